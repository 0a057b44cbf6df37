"""The names that the database is known to hold or not: most lookups are for names that are new.

Owns: `KnownNames`, in front of one reader of the database.

Invariants:
1. `record` says what the database holds, or will hold once what was `put` is in it: a name of which
   it answers None without a lookup is in neither.
2. What is kept is bounded, by directories, by names and by the bytes of records.

Ids and sequences mostly grow, those of several issuers (`<issuer>_<number>`) side by side: above
the highest name of its series a name is new. In a directory whose names come and go in no order,
the names are kept once lookups have found nothing there several times, unless there are too many.

Relies on: being told of every record when it is put, of every change when it becomes readable and
of every deletion once it is in the database; on readers that look first at what is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from magnetar.metadata.judge import StoredRecord, split_key

SERIES_MAX: Final = 10_000
"""Series whose highest name is kept."""

NAMES_MAX: Final = 20_000
"""Names that are kept of one directory."""

DIRECTORIES_MAX: Final = 16
"""Directories whose names are kept."""

MISSES: Final = 32
"""Lookups in vain, after which the names of a directory are kept."""

_TOO_MANY: Final = -10_000
"""Misses of a directory with more names than are kept: so many later it is looked at again."""

RECORDS_MAX: Final = 4096
RECORD_BYTES_MAX: Final = 2048
"""What was looked up is kept for the next time, if it is not larger."""


class NamesReader(Protocol):
    """The database."""

    def get(self, parent: str, name: str) -> StoredRecord | None: ...
    def highest_name(self, parent: str, prefix: str) -> str: ...
    def names(self, parent: str, most: int) -> list[str]: ...


class KnownNames:
    """See the module; `on_their_way` gives the keys that are put but not in the database yet."""

    def __init__(self, reader: NamesReader, on_their_way: Callable[[], Iterable[str]]) -> None:
        self._reader = reader
        self._on_their_way = on_their_way
        self._highest: dict[tuple[str, str], str] = {}
        self._names: dict[str, set[str]] = {}
        """By directory; the one that was learnt first goes first."""
        self._misses: dict[str, int] = {}
        self._records: dict[str, StoredRecord] = {}

    def record(self, key: str, parent: str, name: str) -> StoredRecord | None:
        """What the database has under a key (of that directory and name) that is not on its way
        there.
        """
        # Read before, and not changed since (`changed` would have dropped it).
        found = self._records.get(key)
        if found is not None:
            return found
        names = self._names.get(parent)
        # Every name of this directory is known, and this one is not among them.
        if names is not None and name not in names:
            return None
        series = (parent, name[: name.find("_") + 1])  # as `series_of`
        highest = self._highest.get(series)
        if highest is None:
            highest = self._learn_highest(series)
        # Above the highest of its series: new, as most ids are when they are looked up.
        if name > highest:
            return None
        found = self._reader.get(parent, name)
        if found is None:
            self._missed(parent)
        elif len(found.value) <= RECORD_BYTES_MAX:
            # Begin again: that costs a few lookups, an order of use would cost a little with each.
            if len(self._records) >= RECORDS_MAX:
                self._records.clear()
            self._records[key] = found
        return found

    def changed(self, key: str) -> None:
        """Readers see another record than before, or none."""
        self._records.pop(key, None)

    def put(self, parent: str, name: str) -> None:
        """A record is on its way to the database."""
        series = (parent, name[: name.find("_") + 1])  # as `series_of`
        # A series that was never learnt stays unknown: its highest name may be far above this one.
        if name > self._highest.get(series, name):
            self._highest[series] = name
        names = self._names.get(parent)
        if names is not None:
            names.add(name)
            # Too many to keep: from now on the database is asked again.
            if len(names) > NAMES_MAX:
                del self._names[parent]
                self._misses[parent] = _TOO_MANY

    def gone(self, keys: Iterable[str]) -> None:
        """Forget names that were deleted from the database and are not on their way there again."""
        # `_highest` is left as it is: a mark that is too high costs a lookup, one that is too low
        # would deny a record (invariant 1).
        if not self._names:
            return
        for key in keys:
            parent, name = split_key(key)
            names = self._names.get(parent)
            if names is not None:
                names.discard(name)

    def _learn_highest(self, series: tuple[str, str]) -> str:
        if len(self._highest) >= SERIES_MAX:
            self._highest.clear()
        parent, prefix = series
        # The database does not show these yet, and a mark below them would deny them.
        coming = [name for name in self._coming(parent) if series_of(name) == prefix]
        highest = max(self._reader.highest_name(parent, prefix), *coming, "")
        self._highest[series] = highest
        return highest

    def _missed(self, parent: str) -> None:
        # A name outlived its record, a refused put's for example: the lookup
        # was right, learn nothing.
        if parent in self._names:
            return
        if len(self._misses) >= SERIES_MAX:
            self._misses.clear()
        misses = self._misses[parent] = self._misses.get(parent, 0) + 1
        if misses < MISSES:
            return
        names = {*self._reader.names(parent, NAMES_MAX + 1), *self._coming(parent)}
        if len(names) > NAMES_MAX:
            self._misses[parent] = _TOO_MANY
            return
        # The one that was learnt first goes: if it is still in use, it is learnt anew.
        if len(self._names) >= DIRECTORIES_MAX:
            del self._names[next(iter(self._names))]
        self._names[parent] = names

    def _coming(self, parent: str) -> Iterable[str]:
        places = map(split_key, self._on_their_way())
        return [name for directory, name in places if directory == parent]


def series_of(name: str) -> str:
    """The names with which a name grows: those of the same issuer."""
    return name[: name.find("_") + 1]
