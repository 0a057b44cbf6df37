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
from collections.abc import Sequence
from typing import Final, NamedTuple

from magnetar.broker.ranges.chunks import chunk_of, whole_message
from magnetar.broker.ranges.view import RangeView
from magnetar.ledger.api import Entry
from magnetar.model.ids import Position
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
    page = _Page(limits, bytes_max, start.at)
    stop = end.stop
    while page.at < stop and not page.is_full:
        begun = page.at
        entries = await view.ledger.read(begun, page.entries_wanted, max(page.room, 1))
        view.check_kept(RangePosition.before(begun))
        if not entries:
            break
        # Judged before the next await: what is known of them may go with a trim.
        judged = [(each, view.is_visible(each)) for each in entries if each.position < stop]
        if not await _filled(view, page, judged) or len(judged) < len(entries):
            break
        page.scanned += len(entries)
        await asyncio.sleep(0)  # what is in memory is read without a turn for others
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
            if (chunk := chunk_of(entry.payload)) is not None:
                parts = await whole_message(view, entry) if chunk.is_last_chunk else []
                size = sum(len(each.payload) for each in parts)
            if page.found and size > page.room:
                return False
            page.found += parts
            page.room -= size
        page.at = entry.position.next
    return True
