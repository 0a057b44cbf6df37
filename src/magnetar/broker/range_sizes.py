"""How much is in a range, and where to cut it.

Owns: `count`, `cut`, `pieces` and `at_time`.

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
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, NamedTuple

from magnetar.broker.dispatcher import messages_in
from magnetar.broker.entries import publish_time_of
from magnetar.broker.range_chunks import chunk_of
from magnetar.broker.range_read import READ_ENTRIES
from magnetar.broker.range_spans import RangeSpans
from magnetar.broker.range_view import RangeView
from magnetar.errors import NotAllowed
from magnetar.ledger.api import Entry
from magnetar.model.ranges import RangeCount, RangePosition
from magnetar.runtime.limits import Limits

EXACT_ENTRIES: Final = 2000
EXACT_BYTES: Final = 4 * 1024 * 1024

_SAMPLES: Final = 16
_SAMPLE_ENTRIES: Final = 16
_SAMPLE_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 1024 * 1024
_PIECES_MAX: Final = 10_000


class Cut(NamedTuple):
    """Where a range was cut, and what is before that."""

    position: RangePosition
    messages: int
    bytes: int
    is_partial: bool = False
    """It may go further: this much was looked at."""


async def count(view: RangeView, start: RangePosition, end: RangePosition) -> RangeCount:
    """How much is in a range."""
    view.check(start, end)
    spans = RangeSpans(view.ledger.ledger_spans, start, end)
    if start == end or not spans.entries:
        return RangeCount(0, 0, is_exact=True)
    if spans.entries <= EXACT_ENTRIES and spans.bytes <= EXACT_BYTES:
        messages = size = 0
        async for found in _walk(view, start, end):
            messages += found.messages
            size += len(found.entry.payload)
        return RangeCount(messages, size, is_exact=True)
    average = await _average(view, spans)
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
    at, messages, size, looked_at = start, 0, 0, 0
    async with aclosing(_walk(view, start, end, invisible=True)) as walk:
        async for found in walk:
            if looked_at >= limits.range_scan_entries:
                return Cut(at, messages, size, is_partial=True)
            looked_at += 1
            more = len(found.entry.payload) if found.is_visible else 0
            if bytes_max is not None and messages and more and size + more > bytes_max:
                return Cut(at, messages, size)
            if messages_max is not None and messages + found.messages > messages_max:
                taken = messages_max - messages
                inside = RangePosition(*found.entry.position, found.first_index + taken)
                return Cut(inside if taken else at, messages_max, size + more * bool(taken))
            messages += found.messages
            size += more
            at = min(RangePosition.behind(found.entry.position), end)
    return Cut(end, messages, size)


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
        if start < at < end and at.at != spans.at_entry(0):
            found.add(at)
    return sorted(found)


async def at_time(view: RangeView, ms: int) -> RangePosition:
    """The first entry published at or after a moment, or the end; see `find_by_time`."""
    found = await view.ledger.find_by_time(ms, publish_time_of)
    stable = view.stable()
    return stable if found is None else min(RangePosition.before(found), stable)


# --- looking at entries


class _Found(NamedTuple):
    entry: Entry
    is_visible: bool
    first_index: int
    """Of its messages in the range."""
    messages: int
    """How many of them are in the range."""


async def _walk(
    view: RangeView, start: RangePosition, end: RangePosition, *, invisible: bool = False
) -> AsyncGenerator[_Found, None]:
    """The entries of a range, in order; those that are not visible if wanted."""
    at = start
    while at < end:
        entries = await view.ledger.read(at.at, READ_ENTRIES, _READ_BYTES)
        view.check_kept(at)
        # Judged before the next await: what is known of them may go with a trim.
        judged = [(entry, view.is_visible(entry)) for entry in entries]
        if not judged:
            return
        for entry, is_visible in judged:
            if RangePosition.before(entry.position) >= end:
                return
            if is_visible:
                yield _found(entry, start, end)
            elif invisible:
                yield _Found(entry, is_visible=False, first_index=0, messages=0)
        at = RangePosition.behind(entries[-1].position)
        await asyncio.sleep(0)


def _found(entry: Entry, start: RangePosition, end: RangePosition) -> _Found:
    messages = messages_of(entry.payload)
    first = start.batch_index if entry.position == start.at else 0
    stop = min(end.batch_index, messages) if entry.position == end.at else messages
    return _Found(entry, is_visible=True, first_index=first, messages=max(stop - first, 0))


def messages_of(payload: bytes) -> int:
    """How many messages an entry completes."""
    chunk = chunk_of(payload)
    return messages_in(payload) if chunk is None else int(chunk.is_last_chunk)
