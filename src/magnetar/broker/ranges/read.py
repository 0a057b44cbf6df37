"""Reading a range page by page.

Owns: `RangePage` and `read_page`; `chunk_of` and `whole_message`, the chunks of a message whose
last one is given. Nothing is kept between two calls: the next page begins where the last one says,
at any broker.

A range may begin between two chunks of one message, and chunks of several producers stand among
each other. So the earlier ones are no part of a range by themselves: whoever reads the last chunk
is given all of them, looked for backwards from there.

Invariants:
1. Pages that follow each other have every visible entry of the range once, in order, and nothing
   else (but earlier chunks of messages whose last one is in it, which stand right before that); an
   entry that the range begins or ends in comes as a whole. How a range falls into pages
   may differ from one time to the next; what is in it does not.
2. A page is at most `range_page_bytes` and `range_page_entries`, but one entry comes whatever its
   size. About `range_scan_entries` are looked at for it: where many are aborted a page may have
   none, and is still progress.
3. It never waits for a message: at the end of the range it says so.
4. What is trimmed while it is read makes the call fail (`RangeLost`), never skip.
5. The chunks of a message come in their order, the last one included; if one cannot be found (it
   was trimmed, or never stored) or they are too much for one answer, the last one comes alone, and
   its reader sees that it is incomplete. Others have their turn after each read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from magnetar.broker.entries import UNPLACED, EntryView
from magnetar.broker.ranges.view import RangeView
from magnetar.ledger.api import Entry
from magnetar.model.ids import Position
from magnetar.model.ranges import RangePosition
from magnetar.runtime.limits import Limits
from magnetar.wire.messages import payload_offset

MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all chunks of a message that is answered as a whole."""

# Far enough for chunks that stand among those of many other producers; what is farther off is
# answered as incomplete (invariant 5).
_LOOK_BACK_ENTRIES: Final = 20_000
_WINDOW_ENTRIES: Final = 32
_READ_BYTES: Final = 8 * 1024 * 1024
_CHUNKS_TAG: Final = b"\xd8\x01"
"""The bytes with which field 27 (num_chunks_from_msg, a number) begins in MessageMetadata."""


def chunk_of(payload: bytes) -> EntryView | None:
    """An entry that is a chunk; None: it is none. Those that cannot be one are not parsed."""
    # The tag may also be in a value: then it is parsed for nothing, but no chunk is missed.
    if payload.find(_CHUNKS_TAG, 0, payload_offset(payload)) < 0:
        return None
    view = EntryView(UNPLACED, payload)
    return view if view.is_chunk else None


async def whole_message(view: RangeView, last: Entry) -> list[Entry]:
    """All chunks of the message that ends with this one."""
    metadata = EntryView.of(last).metadata
    found: dict[int, Entry] = {}
    size, looked_at, end = len(last.payload), 0, last.position.previous
    # Backwards in windows: mostly the chunks stand right before the last one.
    while len(found) < metadata.chunk_id and looked_at < _LOOK_BACK_ENTRIES:
        before = view.ledger.last_valid(end)
        if before is None or size > MESSAGE_BYTES_MAX:
            return [last]
        first = Position(before.ledger_id, max(before.entry_id - _WINDOW_ENTRIES + 1, 0))
        for entry in await _between(view, first, before):
            chunk = chunk_of(entry.payload)
            # Chunks of other messages stand in between, and a producer may have sent one chunk
            # twice: the latest copy before the end counts.
            if chunk is not None and chunk.metadata.uuid == metadata.uuid:
                number = chunk.metadata.chunk_id
                if number < metadata.chunk_id and number not in found:
                    found[number] = entry
                    size += len(entry.payload)
        looked_at += _WINDOW_ENTRIES
        end = first.previous
    # Invariant 5: better incomplete, which a reader sees, than an answer that never ends.
    if len(found) < metadata.chunk_id or size > MESSAGE_BYTES_MAX:
        return [last]
    return [*(found[number] for number in sorted(found)), last]


async def _between(view: RangeView, first: Position, last: Position) -> list[Entry]:
    """Entries of one ledger; those that were trimmed meanwhile are left out."""
    found: list[Entry] = []
    while first <= last:
        count = last.entry_id - first.entry_id + 1
        part = await view.ledger.read(first, count, _READ_BYTES)
        found += [each for each in part if each.position <= last]
        # Trimmed, or the read went on to the next ledger.
        if not part or part[-1].position > last:
            break
        first = part[-1].position.next
        await asyncio.sleep(0)
    return found


READ_ENTRIES: Final = 500
"""Between two turns of other coroutines."""


class RangePage(NamedTuple):
    """Some entries of a range."""

    entries: list[Entry]
    next: RangePosition
    is_exhausted: bool
    """Nothing of the range is left."""


async def read_page(
    view: RangeView, start: RangePosition, end: RangePosition, limits: Limits, bytes_max: int = 0
) -> RangePage:
    """The first page of a range; `bytes_max` may ask for a smaller one."""
    view.check(start, end)
    page = _Page(limits, bytes_max, start.at)
    stop = end.stop
    while page.at < stop and not page.is_full:
        begun = page.at
        # One byte at least: a read brings one entry whatever its size (invariant 2).
        entries = await view.ledger.read(begun, page.entries_wanted, max(page.room, 1))
        # After the read, not before: what was trimmed meanwhile would be skipped in silence
        # (invariant 4).
        view.check_kept(RangePosition.before(begun))
        if not entries:
            break
        # Judged before the next await: what is known of them may go with a trim.
        judged = [(each, view.is_visible(each)) for each in entries if each.position < stop]
        if not await _filled(view, page, judged) or len(judged) < len(entries):
            break
        page.scanned += len(entries)
        await asyncio.sleep(0)  # what is in memory is read without a turn for others
    # Nothing may be left but trimmed or empty ledgers: then this page says that it is the last.
    following = view.ledger.next_valid(page.at)
    if following is None or following >= stop:
        return RangePage(page.found, end, is_exhausted=True)
    return RangePage(page.found, RangePosition.before(page.at), is_exhausted=False)


class _Page:
    """A page as it fills."""

    def __init__(self, limits: Limits, bytes_max: int, at: Position) -> None:
        self.found: list[Entry] = []
        self.at = at
        """What is below it was looked at."""
        self.room = min(bytes_max or limits.range_page_bytes, limits.range_page_bytes)
        self.scanned = 0
        self._limits = limits

    @property
    def entries_wanted(self) -> int:
        return min(READ_ENTRIES, self._limits.range_page_entries - len(self.found))

    @property
    def is_full(self) -> bool:
        return (
            self.room <= 0
            or len(self.found) >= self._limits.range_page_entries
            or self.scanned >= self._limits.range_scan_entries
        )


async def _filled(view: RangeView, page: _Page, judged: Sequence[tuple[Entry, bool]]) -> bool:
    """Put entries on a page, those that are visible; False: the next one does not fit."""
    for entry, is_visible in judged:
        if is_visible:
            parts = [entry]
            size = len(entry.payload)
            # Earlier chunks come with the last one; alone they are passed over.
            if (chunk := chunk_of(entry.payload)) is not None:
                parts = await whole_message(view, entry) if chunk.is_last_chunk else []
                size = sum(len(each.payload) for each in parts)
            # Not the first on its page: it begins the next one.
            if page.found and size > page.room:
                return False
            page.found += parts
            page.room -= size
        page.at = entry.position.next
    return True
