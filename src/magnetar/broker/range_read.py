"""Reading a range page by page.

Owns: `RangePage` and `read_page`. Nothing is kept between two calls: the next page begins where the
last one says, at any broker.

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
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from magnetar.broker.range_chunks import chunk_of, whole_message
from magnetar.broker.range_view import RangeView
from magnetar.ledger.api import Entry
from magnetar.model.ranges import RangePosition
from magnetar.runtime.limits import Limits

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
    room = min(bytes_max or limits.range_page_bytes, limits.range_page_bytes)
    found: list[Entry] = []
    at, scanned = start, 0
    while at < end and len(found) < limits.range_page_entries:
        wanted = min(READ_ENTRIES, limits.range_page_entries - len(found))
        entries = await view.ledger.read(at.at, wanted, max(room, 1))
        view.check_kept(at)
        if not entries or RangePosition.before(entries[0].position) >= end:
            at = end
            break
        # Judged before the next await: what is known of them may go with a trim.
        for entry, is_visible in [(each, view.is_visible(each)) for each in entries]:
            if RangePosition.before(entry.position) >= end:
                break
            parts = [entry] if is_visible else []
            if is_visible and (chunk := chunk_of(entry.payload)) is not None:
                parts = await whole_message(view, entry) if chunk.is_last_chunk else []
            size = sum(len(each.payload) for each in parts)
            if found and size > room:
                return RangePage(found, at, is_exhausted=False)
            found += parts
            room -= size
            at = RangePosition.behind(entry.position)
        scanned += len(entries)
        if room <= 0 or scanned >= limits.range_scan_entries:
            break
        await asyncio.sleep(0)  # what is in memory is read without a turn for others
    following = view.ledger.next_valid(at.at)
    if at >= end or following is None or RangePosition.before(following) >= end:
        return RangePage(found, end, is_exhausted=True)
    return RangePage(found, at, is_exhausted=False)
