"""Pure: entries that wait to be delivered (again), and how often each was asked for again.

Owns: `ReplayQueue` (positions that were read but are at no consumer, by key hash) and
`RedeliveryCounts`.

Invariants (`check_invariants`):
1. A position is in the queue at most once, under one hash (0 where keys do not matter).
2. The positions of a hash ascend; a hash without positions does not exist.
3. The order of hashes is the order of turns: one that was served but still waits goes to the end.
4. A count is above 0 and grows by redelivery requests alone.

Relies on: the owner for the bound. Positions enter the queue from consumers (bounded by the limits
on unacknowledged messages) or from reading ahead, which stops when `len` reaches its limit; counts
are kept only for positions that are in the queue or at a consumer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, KeysView

from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position

# Shared, Exclusive, Failover: all positions wait in one queue, in the order of the log.
UNKEYED = 0


class ReplayQueue:
    """Positions to deliver, each hash in the order of the log."""

    __slots__ = ("_hash_of", "_waiting")

    def __init__(self) -> None:
        # Two views of the same positions: membership is asked for at every ack, the order at every
        # read.
        self._hash_of: dict[Position, int] = {}
        self._waiting: dict[int, list[Position]] = {}

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, position: object) -> bool:
        return position in self._hash_of

    @property
    def hashes(self) -> KeysView[int]:
        """Hashes with positions that wait, in the order of turns."""
        return self._waiting.keys()

    def head(self, key_hash: int) -> Position | None:
        """The first position of a hash."""
        waiting = self._waiting.get(key_hash)
        return None if waiting is None else waiting[0]

    def first(self, key_hash: int, count: int) -> list[Position]:
        """The first positions of a hash; they stay in the queue."""
        return self._waiting.get(key_hash, [])[:count]

    def add(self, position: Position, key_hash: int) -> None:
        """Put one in; if it is in already, nothing changes."""
        if position in self._hash_of:
            return
        self._hash_of[position] = key_hash
        waiting = self._waiting.get(key_hash)
        if waiting is None:
            self._waiting[key_hash] = [position]
        # Mostly positions come in order, from one read; a search is for those that come back late.
        elif waiting[-1] < position:
            waiting.append(position)
        else:
            insort(waiting, position)

    def add_all(self, positions: Iterable[tuple[Position, int]]) -> None:
        """Put many in: one sort per hash, not one search per position."""
        # A consumer that leaves may give back tens of thousands at once.
        by_hash: dict[int, list[Position]] = {}
        for position, key_hash in positions:
            if position not in self._hash_of:
                self._hash_of[position] = key_hash
                by_hash.setdefault(key_hash, []).append(position)
        for key_hash, added in by_hash.items():
            self._merge(key_hash, added)

    def add_run(self, positions: Iterable[Position], key_hash: int) -> None:
        """Put many of one hash in, none of which is in: without a step of Python for each."""
        # A dict of positions gives its hashes along: computing them would be most of the work.
        added = dict.fromkeys(positions, key_hash)
        if not added:
            return
        self._merge(key_hash, [*added])
        # Mostly nothing waits yet: a copy would cost as much as all the rest.
        if self._hash_of:
            self._hash_of.update(added)
        else:
            self._hash_of = added

    def _merge(self, key_hash: int, added: list[Position]) -> None:
        added.sort()
        waiting = self._waiting.get(key_hash)
        if waiting is None:
            self._waiting[key_hash] = added
            return
        # What comes in slices comes in order: only what returns late needs a sort of all.
        in_order = waiting[-1] < added[0]
        waiting += added
        if not in_order:
            waiting.sort()

    def remove(self, position: Position) -> bool:
        """Take one out; False: it was not in."""
        key_hash = self._hash_of.pop(position, None)
        if key_hash is None:
            return False
        waiting = self._waiting[key_hash]
        # Mostly it is the first: acks follow the order of delivery.
        del waiting[0 if waiting[0] == position else bisect_left(waiting, position)]
        if not waiting:
            del self._waiting[key_hash]
        return True

    def remove_all(self, positions: Iterable[Position]) -> None:
        """Take many out that are all in: one move per hash, not one per position."""
        by_hash: dict[int, set[Position]] = {}
        for position in positions:
            by_hash.setdefault(self._hash_of.pop(position), set()).add(position)
        for key_hash, gone in by_hash.items():
            waiting = self._waiting[key_hash]
            # What was handed out is mostly the head of the queue; only acks out of order leave
            # gaps.
            if gone.issuperset(waiting[: len(gone)]):
                del waiting[: len(gone)]
            else:
                waiting[:] = [position for position in waiting if position not in gone]
            if not waiting:
                del self._waiting[key_hash]

    def end_turn(self, key_hash: int) -> None:
        """End the turn of a hash that was served: the others come before it again."""
        # A dict keeps the order of insertion: taken out and put in again is last (invariant 3).
        waiting = self._waiting.pop(key_hash, None)
        if waiting is not None:
            self._waiting[key_hash] = waiting

    def drop_through(self, position: Position) -> None:
        """Take everything at or below a position out."""
        # Mostly everything: then nothing has to be looked at one by one.
        if all(waiting[-1] <= position for waiting in self._waiting.values()):
            self.clear()
            return
        for key_hash, waiting in list(self._waiting.items()):
            end = bisect_right(waiting, position)
            for each in waiting[:end]:
                del self._hash_of[each]
            del waiting[:end]
            if not waiting:
                del self._waiting[key_hash]

    def clear(self) -> None:
        self._hash_of.clear()
        self._waiting.clear()

    def check_invariants(self) -> None:
        found: dict[Position, int] = {}
        for key_hash, waiting in self._waiting.items():
            if not waiting or sorted(set(waiting)) != waiting:
                raise InvariantBroken(f"hash {key_hash} waits with {waiting}")
            found.update(dict.fromkeys(waiting, key_hash))
        if found != self._hash_of:
            raise InvariantBroken(f"{len(found)} positions wait, {len(self._hash_of)} are known")


class RedeliveryCounts:
    """The redelivery count of each entry: how often consumers asked for it again."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Position, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def positions(self) -> KeysView[Position]:
        return self._counts.keys()

    def of(self, position: Position) -> int:
        return self._counts.get(position, 0)

    def increase(self, position: Position) -> None:
        self._counts[position] = self._counts.get(position, 0) + 1

    def forget(self, position: Position) -> None:
        self._counts.pop(position, None)

    def drop_through(self, position: Position) -> None:
        if self._counts:
            self._counts = {each: n for each, n in self._counts.items() if each > position}

    def clear(self) -> None:
        self._counts.clear()
