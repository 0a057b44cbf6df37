"""The size of a range, and the places where to cut it.

Owns: `count`, `cut`, `pieces` and `at_time`; `RangeSpans`, how many entries and bytes of which
ledgers a range has, without reading any.

What is exact: the entries of a range, always, without reading them. The messages of a range, if it
has at most `EXACT_ENTRIES` entries and `EXACT_BYTES`: they are counted one by one. Of a larger
range some entries are read, at even distances, and their average is taken. Bytes are those of
counted entries, or else each ledger's size shared out among its entries. A cut by messages is
exact, whatever it costs: every entry up to it is looked at.

Invariants:
1. A range with a visible message never counts as empty.
2. No call looks at more than `range_scan_entries` entries (a cut then answers with a part), and
   others have their turn after every `READ_ENTRIES` of them.
3. A chunk of a message counts as none, but for the last.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Final, NamedTuple

from magnetar.broker.dispatch.dispatcher import messages_in
from magnetar.broker.entries import publish_time_of
from magnetar.broker.ranges.read import READ_ENTRIES, chunk_of
from magnetar.broker.ranges.view import RangeView
from magnetar.errors import NotAllowed
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.model.ranges import RangeCount, RangePosition
from magnetar.runtime.limits import Limits


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
        # Sums before each part, so that a place in the range is found by bisection.
        self._entries_before: list[int] = []
        self._bytes_before: list[float] = []
        behind_last = end.stop.entry_id
        for span in spans:
            if not start.ledger <= span.ledger_id <= end.ledger or not span.entries:
                continue
            # Only the first and the last ledger of a range can be cut.
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
        # Rounded up to the end of its ledger: the next entry is the first one of the ledger behind
        # it.
        if passed >= part.entries and index + 1 < len(self._parts):
            part, passed = self._parts[index + 1], 0
        return Position(part.ledger_id, part.first + min(passed, part.entries - 1))


def _entry_bytes(span: LedgerSpan) -> float:
    return max(span.size_bytes / span.entries, 1.0)


# Counting this much takes milliseconds; more than that would make a planner wait.
EXACT_ENTRIES: Final = 2000
EXACT_BYTES: Final = 4 * 1024 * 1024

# Spread over the range, a few hundred entries show how large its batches are on average.
_SAMPLES: Final = 16
_SAMPLE_ENTRIES: Final = 16
_SAMPLE_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 1024 * 1024
_PIECES_MAX: Final = 10_000


class Cut(NamedTuple):
    """The place where a range was cut, and what is before it."""

    position: RangePosition
    messages: int
    bytes: int
    is_partial: bool = False
    """It may go further: this much was looked at."""


async def count(view: RangeView, start: RangePosition, end: RangePosition) -> RangeCount:
    """How much is in a range."""
    view.check(start, end)
    spans = RangeSpans(view.ledger.ledger_spans, start, end)
    # An empty range, or all of it is in ledgers that hold nothing.
    if start == end or not spans.entries:
        return RangeCount(0, 0, is_exact=True)
    if spans.entries <= EXACT_ENTRIES and spans.bytes <= EXACT_BYTES:
        # Small enough to be counted one by one.
        messages = size = 0
        async for some in _walk(view, start, end):
            messages += sum(found.messages for found in some)
            size += sum(found.size for found in some)
        return RangeCount(messages, size, is_exact=True)
    average = await _average(view, spans)
    # Invariant 1: whoever plans would leave out a range of which a sample saw aborted entries only.
    return RangeCount(max(round(spans.entries * average), 1), max(round(spans.bytes), 1))


async def _average(view: RangeView, spans: RangeSpans) -> float:
    """Messages per entry, by some of them."""
    messages = looked_at = 0
    for number in range(_SAMPLES):
        at = spans.at_entry(spans.entries * number // _SAMPLES)
        for entry in await view.ledger.read(at, _SAMPLE_ENTRIES, _SAMPLE_BYTES):
            looked_at += 1
            messages += messages_of(entry.payload) if view.is_visible(entry) else 0
        await asyncio.sleep(0)
    return messages / looked_at if looked_at else 1.0


async def cut(
    view: RangeView,
    start: RangePosition,
    end: RangePosition,
    limits: Limits,
    *,
    messages_max: int | None,
    bytes_max: int | None,
) -> Cut:
    """The furthest end of a range that has at most so many messages and bytes.

    Messages: exactly, if need be inside a batch. Bytes: at entries, and one is always taken.
    """
    view.check(start, end)
    at, messages, size, looked_at = start.at, 0, 0, 0
    step = min(READ_ENTRIES, limits.range_scan_entries)
    # Closed explicitly: a return out of the loop must not leave the generator to the collector.
    async with aclosing(_walk(view, start, end, step)) as walk:
        async for some in walk:
            # Invariant 2: who asked goes on from here.
            if looked_at >= limits.range_scan_entries:
                return Cut(_reached(at, start), messages, size, is_partial=True)
            looked_at += len(some)
            for position, first_index, here, more in some:
                # The first message is taken whatever its size, or a cut would never get past a
                # large one.
                if bytes_max is not None and messages and more and size + more > bytes_max:
                    return Cut(_reached(at, start), messages, size)
                # The limit is reached here: before this entry, or inside its batch.
                if messages_max is not None and messages + here > messages_max:
                    taken = messages_max - messages
                    if not taken:
                        return Cut(_reached(at, start), messages, size)
                    inside = RangePosition(*position, first_index + taken)
                    return Cut(inside, messages_max, size + more)
                messages += here
                size += more
                at = position.next
    return Cut(end, messages, size)


def _reached(at: Position, start: RangePosition) -> RangePosition:
    """The end of what was taken: all below an entry, which may be nothing of the range."""
    return max(RangePosition.before(at), start)


def pieces(
    view: RangeView, start: RangePosition, end: RangePosition, wanted: int
) -> list[RangePosition]:
    """Up to `wanted` - 1 entries inside a range that cut it into about equally many bytes."""
    view.check(start, end)
    if not 1 <= wanted <= _PIECES_MAX:
        raise NotAllowed(f"a range cannot be cut into {wanted} pieces", hint=f"1 to {_PIECES_MAX}")
    spans = RangeSpans(view.ledger.ledger_spans, start, end)
    found: set[RangePosition] = set()
    for number in range(1, wanted if spans.entries else 1):
        at = RangePosition.before(spans.at_byte(spans.bytes * number / wanted))
        # A cut at the first entry would leave an empty piece.
        if start < at < end and at.at != spans.at_entry(0):
            found.add(at)
    return sorted(found)


async def at_time(view: RangeView, ms: int) -> RangePosition:
    """The first entry published at or after a moment, or the end; see `find_by_time`."""
    found = await view.ledger.find_by_time(ms, publish_time_of)
    # Asked after the search: what was found may be above the maxReadPosition.
    stable = view.stable()
    return stable if found is None else min(RangePosition.before(found), stable)


# --- looking at entries


class _Found(NamedTuple):
    position: Position
    first_index: int
    """Of its messages in the range."""
    messages: int
    """How many of them are in the range; none, if it is not visible."""
    size: int
    """0: it is not visible."""


async def _walk(
    view: RangeView, start: RangePosition, end: RangePosition, step: int = READ_ENTRIES
) -> AsyncGenerator[list[_Found], None]:
    """The entries of a range, in order, some at a time."""
    at, stop = start.at, end.stop
    while at < stop:
        entries = await view.ledger.read(at, step, _READ_BYTES)
        view.check_kept(RangePosition.before(at))
        if not entries:
            return
        # Before the next await: what is known of them may go with a trim.
        yield [_found(view, each, start, end) for each in entries if each.position < stop]
        at = entries[-1].position.next
        await asyncio.sleep(0)


def _found(view: RangeView, entry: Entry, start: RangePosition, end: RangePosition) -> _Found:
    position, payload = entry
    if not view.is_visible(entry):
        return _Found(position, 0, 0, 0)
    messages = stop = messages_of(payload)
    # A range may begin or end inside a batch: only the messages between count.
    first = start.batch_index if position == start.at else 0
    if position == end.at:
        stop = min(end.batch_index, messages)
    return _Found(position, first, max(stop - first, 0), len(payload))


def messages_of(payload: bytes) -> int:
    """How many messages an entry completes."""
    chunk = chunk_of(payload)
    return messages_in(payload) if chunk is None else int(chunk.is_last_chunk)
