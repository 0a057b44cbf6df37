"""Pure: a set of positions in order, compact and cheap to cut however many they are.

Owns: `PositionSet`.

Invariants:
1. A ledger without positions has no bitmap.

Relies on: entry ids that a ledger can have, from 0 up and below 2^32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pyroaring import BitMap

from magnetar.model.ids import Position


class PositionSet:
    """Positions by ledger, ascending."""

    __slots__ = ("_ledgers",)

    def __init__(self) -> None:
        self._ledgers: dict[int, BitMap] = {}

    def __bool__(self) -> bool:
        return bool(self._ledgers)

    def __len__(self) -> int:
        return sum(map(len, self._ledgers.values()))

    def __contains__(self, position: Position) -> bool:
        found = self._ledgers.get(position.ledger_id)
        return found is not None and position.entry_id in found

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in sorted(self._ledgers):
            for entry_id in self._ledgers[ledger_id]:
                yield Position(ledger_id, entry_id)

    def add(self, position: Position) -> None:
        found = self._ledgers.get(position.ledger_id)
        if found is None:
            found = self._ledgers[position.ledger_id] = BitMap()
        found.add(position.entry_id)

    def discard(self, position: Position) -> None:
        found = self._ledgers.get(position.ledger_id)
        if found is not None:
            found.discard(position.entry_id)
            if not found:
                del self._ledgers[position.ledger_id]

    def first(self) -> Position | None:
        """The lowest position."""
        if not self._ledgers:
            return None
        ledger_id = min(self._ledgers)
        return Position(ledger_id, self._ledgers[ledger_id].min())

    def take(self, count: int) -> list[Position]:
        """Take the lowest positions out."""
        taken: list[Position] = []
        while self._ledgers and len(taken) < count:
            ledger_id = min(self._ledgers)
            found = self._ledgers[ledger_id]
            entries = list(islice(found, count - len(taken)))
            found.remove_range(0, entries[-1] + 1)
            if not found:
                del self._ledgers[ledger_id]
            taken += [Position(ledger_id, each) for each in entries]
        return taken

    def within(self, ledger_id: int, first: int, last: int) -> BitMap:
        """The entry ids of a ledger from `first` to `last`, both included."""
        found = self._ledgers.get(ledger_id)
        return BitMap() if found is None else found & BitMap(range(first, last + 1))

    def clear(self) -> None:
        self._ledgers.clear()
