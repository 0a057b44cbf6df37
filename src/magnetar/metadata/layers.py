"""Pure: changes that are durable but not in the database yet, held in memory over it.

Owns: `Layer`, the latest state of each changed key (None: deleted), reachable by directory and by
index. A read looks into the layers from the newest to the oldest, then into the database; the
first that knows the key is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from magnetar.metadata.judge import StoredRecord, in_range, split_key


class Layer:
    """A set of changed keys; setting a key again replaces its state."""

    __slots__ = ("_by_index", "_by_parent", "_created", "_unlisted", "rows", "states")

    def __init__(self) -> None:
        self.states: dict[str, StoredRecord | None] = {}
        self.rows: dict[str, bytes] = {}
        """Each state as it is handed to the database."""
        self._by_parent: dict[str, set[str]] = {}
        self._by_index: dict[str, set[str]] = {}
        self._unlisted: dict[str, None] = {}
        """Keys that the two above do not show yet: most are never asked for."""
        self._created: set[str] = set()
        """Keys that were nowhere before the layer had them."""

    def __len__(self) -> int:
        return len(self.states)

    def set(self, key: str, state: StoredRecord | None, row: bytes) -> None:
        self.states[key] = state
        self.rows[key] = row
        self._unlisted[key] = None

    def create(self, key: str, state: StoredRecord, row: bytes) -> None:
        """Set a key that is in no lower layer and not in the database, or is deleted in them."""
        # One that this layer says was deleted may still be in the database.
        if key not in self.states:
            self._created.add(key)
        self.set(key, state, row)

    def delete(self, key: str, row: bytes) -> bool:
        """Set a key to deleted; True: it was only here, and is forgotten instead."""
        if key not in self._created:
            self.set(key, None, row)
            return False
        # Most records of a transaction: what is below need never hear of them.
        self._created.discard(key)
        del self.states[key]
        del self.rows[key]
        self._unlisted.pop(key, None)
        # In an index it may stay: who finds it there looks at its state.
        parent, name = split_key(key)
        names = self._by_parent.get(parent)
        if names is not None:
            names.discard(name)
        return True

    def names(self, parent: str) -> Iterable[str]:
        self._list()
        return self._by_parent.get(parent, ())

    def keys_of_index(self, index: str) -> Iterable[str]:
        """Keys that had an entry of this index at some time: look at their states."""
        self._list()
        return self._by_index.get(index, ())

    def _list(self) -> None:
        # Put off until somebody scans: of a key that was set many times the latest state counts.
        unlisted, self._unlisted = self._unlisted, {}
        for key in unlisted:
            parent, name = split_key(key)
            self._by_parent.setdefault(parent, set()).add(name)
            state = self.states[key]
            if state is not None:
                for index in state.indexes:
                    self._by_index.setdefault(index.name, set()).add(key)


def directory_states(
    layers: Iterable[Layer], parent: str, start: str, end: str | None
) -> list[tuple[str, StoredRecord | None]]:
    """What the layers (newest first) know of the names in a range, sorted by name."""
    found: dict[str, StoredRecord | None] = {}
    for layer in layers:
        for name in layer.names(parent):
            # Newest first: an older layer's state of the same name is out of date.
            if name not in found and in_range(name, start, end):
                found[name] = layer.states[f"{parent}/{name}"]
    return sorted(found.items())


def index_entries(
    layers: Iterable[Layer], index: str, low: str, high: str | None
) -> list[tuple[str, str, StoredRecord]]:
    """(index key, key, record) of the records in the layers with an entry in range, sorted."""
    found: list[tuple[str, str, StoredRecord]] = []
    seen: set[str] = set()
    for layer in layers:
        for key in layer.keys_of_index(index):
            if key in seen:
                continue
            seen.add(key)
            # A newer layer may have deleted it, or taken it out of the index.
            record = newest_state(layers, key)
            if record is None:
                continue
            found.extend(
                (entry.key, key, record)
                for entry in record.indexes
                if entry.name == index and low <= entry.key and (high is None or entry.key <= high)
            )
    return sorted(found, key=lambda each: each[:2])


def newest_state(layers: Iterable[Layer], key: str) -> StoredRecord | None:
    for layer in layers:
        if key in layer.states:
            return layer.states[key]
    return None


def merge_names(
    pages: Iterable[list[tuple[str, StoredRecord]]],
    changed: list[tuple[str, StoredRecord | None]],
) -> Iterator[tuple[str, StoredRecord]]:
    """One sorted stream of a directory: what changed replaces what the pages hold."""
    # Both sides are sorted by name. Where both have one, the change is newer; a deletion (None)
    # hides what the page has.
    place = 0
    for page in pages:
        for name, record in page:
            while place < len(changed) and changed[place][0] < name:
                yield from _present(changed[place])
                place += 1
            if place < len(changed) and changed[place][0] == name:
                yield from _present(changed[place])
                place += 1
            else:
                yield name, record
    for each in changed[place:]:
        yield from _present(each)


def merge_index(
    pages: Iterable[list[tuple[str, str, StoredRecord]]],
    changed: list[tuple[str, str, StoredRecord]],
    superseded: frozenset[str],
) -> Iterator[tuple[str, StoredRecord]]:
    """One stream sorted by index key; a superseded key is never taken from the pages."""
    place = 0
    for page in pages:
        for index_key, key, record in page:
            # Where it stands in the index now, if it does, `changed` says: its
            # index key may have moved.
            if key in superseded:
                continue
            while place < len(changed) and changed[place][:2] < (index_key, key):
                yield changed[place][1:]
                place += 1
            yield key, record
    for _, key, record in changed[place:]:
        yield key, record


def _present(
    state: tuple[str, StoredRecord | None],
) -> Iterator[tuple[str, StoredRecord]]:
    name, record = state
    if record is not None:
        yield name, record
