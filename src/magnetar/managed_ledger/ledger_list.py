"""Pure: the ledgers of one managed ledger, in order, and arithmetic on their positions.

Owns: `LedgerSpan` (one ledger), `LedgerList`, and the decisions when to begin a new ledger and
which old ones may go.

Invariants:
1. Ledger ids ascend along the list, so tuple order of positions is log order.
2. A position exists if its ledger is in the list and its entry id is below that ledger's count.
   Questions take any position: what was trimmed stands before the first, the rest after the last.
3. Closed ledgers never change; only an open one grows. Open ledgers stand behind closed ones,
   except while a ledger is being closed after its successor was begun.
4. Only a leading run of closed ledgers is ever trimmed, and never one that holds a position at or
   above the lowest pin or above the slowest cursor's mark-delete position.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position

MS_PER_SECOND: Final = 1000


class LedgerSpan(msgspec.Struct, frozen=True, array_like=True):
    """One ledger of the list. Until it is closed, its count and size are only those known."""

    ledger_id: int
    created_ms: int
    closed_ms: int | None = None
    entries: int = 0
    size_bytes: int = 0

    @property
    def closed(self) -> bool:
        return self.closed_ms is not None


class Retention(NamedTuple):
    """The limits of keeping acknowledged data; the first one reached lets it go. None: no limit."""

    seconds: float | None
    """Since the ledger was closed."""
    size_bytes: int | None
    """A ledger goes if at least this much is left without it."""


KEEP_NOTHING: Final = Retention(0, 0)
"""What every cursor has acknowledged may go."""


class Rollover(NamedTuple):
    """The limits at which a ledger is full: its size, its entries, its age."""

    size_bytes: int
    entries: int
    seconds: float

    def due(self, entries: int, size_bytes: int, age_seconds: float) -> bool:
        """An empty ledger is never full, however old."""
        if entries == 0:
            return False
        full = size_bytes >= self.size_bytes or entries >= self.entries
        return full or age_seconds >= self.seconds


class LedgerList:
    """The ledgers in order. Changed by the managed ledger's writer alone."""

    def __init__(self, spans: Iterable[LedgerSpan] = ()) -> None:
        # Side by side, one place per ledger: ids and sums can be searched by bisection.
        self._spans: list[LedgerSpan] = []
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._before: list[int] = []
        """Entries of all ledgers before each one; right up to `_summed`."""
        self._summed = 0
        for span in spans:
            self.add(span)

    # --- changes

    def add(self, span: LedgerSpan) -> None:
        if self._ids and span.ledger_id <= self._ids[-1]:
            raise InvariantBroken(f"ledger {span.ledger_id} does not follow {self._ids[-1]}")
        self._spans.append(span)
        self._ids.append(span.ledger_id)
        self._counts.append(span.entries)
        self._before.append(0)

    def grow(self, ledger_id: int, entries: int, size_bytes: int) -> None:
        """An open ledger has this many readable entries now."""
        index = self._index(ledger_id)
        span = self._spans[index]
        if span.closed or entries < self._counts[index]:
            raise InvariantBroken(f"ledger {ledger_id} cannot become {entries} entries long")
        if (entries, size_bytes) != (span.entries, span.size_bytes):
            # Only the sums behind it are out of date: nearly always none, for
            # the last ledger grows.
            self._counts[index] = entries
            self._summed = min(self._summed, index)
            changed = msgspec.structs.replace(span, entries=entries, size_bytes=size_bytes)
            self._spans[index] = changed

    def close(self, ledger_id: int, entries: int, size_bytes: int, closed_ms: int) -> None:
        """A ledger has got its end."""
        self.grow(ledger_id, entries, size_bytes)
        index = self._index(ledger_id)
        self._spans[index] = msgspec.structs.replace(self._spans[index], closed_ms=closed_ms)

    def drop(self, ledger_ids: Iterable[int]) -> None:
        gone = set(ledger_ids)
        kept = [index for index, each in enumerate(self._ids) if each not in gone]
        self._spans = [self._spans[index] for index in kept]
        self._ids = [self._ids[index] for index in kept]
        self._counts = [self._counts[index] for index in kept]
        self._before = [0] * len(kept)
        self._summed = 0

    # --- the ledgers

    @property
    def spans(self) -> tuple[LedgerSpan, ...]:
        return tuple(self._spans)

    def __contains__(self, ledger_id: int) -> bool:
        index = bisect_left(self._ids, ledger_id)
        return index < len(self._ids) and self._ids[index] == ledger_id

    def entries_of(self, ledger_id: int) -> int:
        return self._counts[self._index(ledger_id)]

    @property
    def size_bytes(self) -> int:
        return sum(span.size_bytes for span in self._spans)

    # --- positions

    @property
    def total(self) -> int:
        """How many entries exist."""
        if not self._ids:
            return 0
        self._sum_up()
        return self._before[-1] + self._counts[-1]

    @property
    def first(self) -> Position | None:
        return self.at_or_after(Position(0, 0))

    @property
    def last(self) -> Position | None:
        for index in range(len(self._ids) - 1, -1, -1):
            if self._counts[index]:
                return Position(self._ids[index], self._counts[index] - 1)
        return None

    def exists(self, position: Position) -> bool:
        index = bisect_left(self._ids, position.ledger_id)
        if index == len(self._ids) or self._ids[index] != position.ledger_id:
            return False
        return 0 <= position.entry_id < self._counts[index]

    def at_or_after(self, position: Position) -> Position | None:
        """The lowest existing position that is not below this one."""
        ledger_id, entry_id = position
        index = bisect_left(self._ids, ledger_id)
        if index == len(self._ids):
            return None
        # In its own ledger, if that has so many entries; otherwise the first entry behind it. Empty
        # ledgers have none: the open one, or one that is being closed.
        if self._ids[index] == ledger_id:
            if 0 <= entry_id < self._counts[index]:
                return position
            if entry_id < 0 < self._counts[index]:
                return Position(ledger_id, 0)
            index += 1
        while index < len(self._ids):
            if self._counts[index]:
                return Position(self._ids[index], 0)
            index += 1
        return None

    def after(self, position: Position) -> Position | None:
        """The lowest existing position above this one."""
        return self.at_or_after(position.next)

    def at_or_before(self, position: Position) -> Position | None:
        """The highest existing position that is not above this one."""
        index = bisect_right(self._ids, position.ledger_id) - 1
        # The mirror image: its own ledger up to there, or the last entry before it.
        if index >= 0 and self._ids[index] == position.ledger_id:
            entry_id = min(position.entry_id, self._counts[index] - 1)
            if entry_id >= 0:
                return Position(position.ledger_id, entry_id)
            index -= 1
        while index >= 0:
            if self._counts[index]:
                return Position(self._ids[index], self._counts[index] - 1)
            index -= 1
        return None

    def before(self, position: Position) -> Position | None:
        """The highest existing position below this one."""
        return self.at_or_before(position.previous)

    def rank(self, position: Position) -> int:
        """How many existing positions are not above this one."""
        index = bisect_right(self._ids, position.ledger_id) - 1
        if index < 0:
            return 0
        self._sum_up()
        count = self._counts[index]
        # Its own ledger counts up to the position; if that is not in the
        # list, all of the one before.
        if self._ids[index] == position.ledger_id:
            count = min(max(position.entry_id + 1, 0), count)
        return self._before[index] + count

    def count_between(self, above: Position, through: Position) -> int:
        """How many positions exist in (above, through]."""
        return max(self.rank(through) - self.rank(above), 0)

    def at(self, index: int) -> Position:
        """The existing position with that many existing ones below it."""
        if not 0 <= index < self.total:
            raise InvariantBroken(f"there is no entry number {index} of {self.total}")
        at = bisect_right(self._before, index) - 1
        return Position(self._ids[at], index - self._before[at])

    # --- trimming

    def trimmable(
        self,
        retention: Retention,
        now_ms: int,
        *,
        acked_through: Position | None,
        lowest_pin: Position | None,
    ) -> list[int]:
        """The ledgers that may go now. `acked_through` None: no cursor holds anything back."""
        found: list[int] = []
        kept_bytes = self.size_bytes
        # From the front, up to the first that has to stay (invariant 4).
        for span in self._spans:
            if not span.closed or not self._is_free(span, acked_through, lowest_pin):
                break
            # Retention is for data: an empty ledger may go at once.
            if span.entries and not _expired(span, retention, now_ms, kept_bytes):
                break
            found.append(span.ledger_id)
            kept_bytes -= span.size_bytes
        return found

    def _is_free(
        self, span: LedgerSpan, acked_through: Position | None, lowest_pin: Position | None
    ) -> bool:
        last = Position(span.ledger_id, span.entries - 1)
        # An open transaction, for example, still needs what stands there.
        if lowest_pin is not None and lowest_pin <= last:
            return False
        return span.entries == 0 or acked_through is None or last <= acked_through

    # --- parts

    def _index(self, ledger_id: int) -> int:
        index = bisect_left(self._ids, ledger_id)
        if index == len(self._ids) or self._ids[index] != ledger_id:
            raise InvariantBroken(f"ledger {ledger_id} is not in the list")
        return index

    def _sum_up(self) -> None:
        """Bring `_before` up to date behind the last ledger whose count changed."""
        for index in range(max(self._summed, 0) + 1, len(self._ids)):
            self._before[index] = self._before[index - 1] + self._counts[index - 1]
        self._summed = max(len(self._ids) - 1, 0)


def last_of(spans: Iterable[LedgerSpan], otherwise: Position | None) -> Position | None:
    """The last entry in any of these ledgers; `otherwise` if there is none in them."""
    found = [Position(span.ledger_id, span.entries - 1) for span in spans if span.entries]
    return max(found, default=otherwise)


def _expired(span: LedgerSpan, retention: Retention, now_ms: int, kept_bytes: int) -> bool:
    assert span.closed_ms is not None
    # By age, of the whole ledger since it was closed; or by size, if enough is left without it.
    if retention.seconds is not None:
        age_ms = now_ms - span.closed_ms
        if age_ms >= retention.seconds * MS_PER_SECOND:
            return True
    return retention.size_bytes is not None and kept_bytes - span.size_bytes >= retention.size_bytes
