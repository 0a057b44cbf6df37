"""Pure: how many entries and bytes of which ledgers a range has, without reading any.

Owns: `RangeSpans`. Entries are counted exactly; their bytes are the ledger's own size, shared out
equally among its entries.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.model.ranges import RangePosition


class _Part(NamedTuple):
    """The entries of one ledger in the range."""

    ledger_id: int
    first: int
    entries: int
    entry_bytes: float


class RangeSpans:
    """One range over the ledgers of one moment."""

    def __init__(
        self, spans: Iterable[LedgerSpan], start: RangePosition, end: RangePosition
    ) -> None:
        self.entries = 0
        """In the range; one that it begins or ends in counts."""
        self.bytes = 0.0
        self._parts: list[_Part] = []
        self._entries_before: list[int] = []
        self._bytes_before: list[float] = []
        behind_last = end.stop.entry_id
        for span in spans:
            if not start.ledger <= span.ledger_id <= end.ledger or not span.entries:
                continue
            first = start.entry if span.ledger_id == start.ledger else 0
            stop = min(span.entries, behind_last) if span.ledger_id == end.ledger else span.entries
            if stop > first:
                self._add(_Part(span.ledger_id, first, stop - first, _entry_bytes(span)))

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._entries_before.append(self.entries)
        self._bytes_before.append(self.bytes)
        self.entries += part.entries
        self.bytes += part.entries * part.entry_bytes

    def at_entry(self, number: int) -> Position:
        """The entry of the range with that many before it."""
        index = bisect_right(self._entries_before, number) - 1
        part = self._parts[index]
        return Position(part.ledger_id, part.first + number - self._entries_before[index])

    def at_byte(self, offset: float) -> Position:
        """The entry of the range that begins at, or next behind, that many bytes."""
        index = max(bisect_right(self._bytes_before, offset) - 1, 0)
        part = self._parts[index]
        passed = round((offset - self._bytes_before[index]) / part.entry_bytes)
        if passed >= part.entries and index + 1 < len(self._parts):
            part, passed = self._parts[index + 1], 0
        return Position(part.ledger_id, part.first + min(passed, part.entries - 1))


def _entry_bytes(span: LedgerSpan) -> float:
    return max(span.size_bytes / span.entries, 1.0)
