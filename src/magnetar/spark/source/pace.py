"""The pace of micro-batches: how far one goes, by limits, and nobody ahead of those who wait.

Owns: `Pace`, which asks brokers for what the rules of `admission` need, and cuts; `Paced`, the ends
that come out, and how much is left behind them.

Invariants:
1. An end is never before the start of its segment, and never behind its target.
2. A batch has at most `maxMessagesPerTrigger` messages: counts may be estimates, cuts are exact.
3. Of two segments, none goes further in publish time than the other may, where one of them waits
   for its parents or is stopped by a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from magnetar.client.message.batch import open_entry
from magnetar.errors import UnreadableMessage
from magnetar.model.ranges import RangeCount, RangePosition
from magnetar.spark.source import admission
from magnetar.spark.source.admission import Hold, SegmentShare
from magnetar.spark.source.offsets import TopicOffset
from magnetar.spark.source.watched_topics import Watched

R = TypeVar("R")

_AT_ONCE: Final = 32
"""Requests that are on their way at a time."""

Ends = Mapping[SegmentShare, RangePosition]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most messages and bytes of one batch."""

    messages: int | None = None
    bytes: int | None = None

    @property
    def is_any(self) -> bool:
        return self.messages is not None or self.bytes is not None


@dataclass(frozen=True, slots=True)
class Paced:
    """The ends of a batch."""

    ends: Ends
    total: int | None
    """The messages up to the targets, if they were counted."""
    oldest_ms: int | None
    """The publish time of the oldest message that is left, if one is known."""


class Pace:
    """The pace of one query."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        # Whose turn it is when a limit is smaller than the number of segments; not in the offset,
        # so a restart only changes who is first.
        self._turn = 0

    async def ends(
        self,
        places: Mapping[str, TopicOffset],
        targets: Ends,
        limits: BatchLimits,
        held: Hold | None,
        *,
        is_counted: bool = False,
    ) -> Paced:
        """How far to go from `places`, at most to the targets."""
        # Holding comes before limits: a share of messages that may not be read yet would be wasted.
        starts = {part: _start(places, part) for part in targets}
        ends = targets if held is None else await self._held(starts, targets, held)
        paced = Paced(ends, None, None if held is None else held.time_ms)
        # The common case, no limit and no minimum: nothing is counted, and no broker is asked.
        if not limits.is_any and not is_counted:
            return paced
        counts = await self.counts({part: (starts[part], end) for part, end in ends.items()})
        paced = replace(paced, total=sum(each.messages for each in counts.values()))
        return await self._limited(starts, paced, counts, limits) if limits.is_any else paced

    async def counts(
        self, spans: Mapping[SegmentShare, tuple[RangePosition, RangePosition]]
    ) -> dict[SegmentShare, RangeCount]:
        """What these ranges hold; empty ones are not asked for."""
        by_topic: dict[str, dict[int, tuple[RangePosition, RangePosition]]] = {}
        found = {part: RangeCount(0, 0) for part in spans}
        for part, (start, end) in spans.items():
            if start < end:
                by_topic.setdefault(part.topic, {})[part.number] = (start, end)
        isolation = self._watched.isolation

        async def ask(topic: str) -> None:
            ranges = await self._watched.ranges(topic)
            counted = await ranges.counts(by_topic[topic], isolation=isolation)
            found.update({SegmentShare(topic, number): count for number, count in counted.items()})

        await asyncio.gather(*map(ask, by_topic))
        return found

    # --- holding

    async def _held(self, starts: Ends, ends: Ends, held: Hold) -> Ends:
        """None goes past the time of the hold but those that it is for."""
        # Everyone but those that the others wait for (`admission`, invariant 2).
        others = [part for part, end in ends.items() if part not in held.exempt]
        others = [part for part in others if starts[part] < ends[part]]

        async def at_time(part: SegmentShare) -> RangePosition:
            ranges = await self._watched.ranges(part.topic)
            return await ranges.at_time(
                part.number, held.time_ms, isolation=self._watched.isolation
            )

        stops = await _for_each(others, at_time)
        # Invariant 1: a time search knows nothing of where the query is, and may answer before the
        # start or behind the target.
        return {
            part: max(starts[part], min(end, stops[part])) if part in stops else end
            for part, end in ends.items()
        }

    # --- limits

    async def _limited(
        self,
        starts: Ends,
        paced: Paced,
        counts: Mapping[SegmentShare, RangeCount],
        limits: BatchLimits,
    ) -> Paced:
        # Both limits give every segment a share; `_cut` then stops at whichever comes first.
        self._turn += 1
        shares: dict[SegmentShare, dict[str, int]] = {part: {} for part in counts}
        for what in ("messages", "bytes"):
            limit: int | None = getattr(limits, what)
            amounts = {part: getattr(count, what) for part, count in counts.items()}
            if limit is None or _fits(counts, amounts, limit):
                continue
            # A segment that got nothing this time has a share of 0 here, not none: it must stay
            # where it is.
            given = admission.shares(amounts, limit, self._turn)
            for part in shares:
                if counts[part].messages:  # what nobody sees, aborted messages, is no burden
                    shares[part][what] = given.get(part, 0)
        cut = {part: share for part, share in shares.items() if share}
        if not cut:
            return paced
        # Shares come from estimates; the broker cuts at exact messages (invariant 2).
        ends = dict(paced.ends)
        ends.update(
            await _for_each(list(cut), lambda part: self._cut(starts, ends, part, cut[part]))
        )
        # Invariant 3: segments that a limit stopped have stopped at different publish times. None
        # goes past the earliest of them, or Spark's watermark would run ahead of what that one
        # still has.
        stopped = [part for part, end in ends.items() if end < paced.ends[part]]
        times = await _for_each(stopped, lambda part: self._time_at(part, ends[part], paced))
        known = {part: time for part, time in times.items() if time is not None}
        level = admission.level(known)
        if level is None:
            return replace(paced, ends=ends)
        return replace(paced, ends=await self._held(starts, ends, level), oldest_ms=level.time_ms)

    async def _cut(
        self, starts: Ends, ends: Ends, part: SegmentShare, share: Mapping[str, int]
    ) -> RangePosition:
        # No share this time, or already held at its start: it does not move, and costs no request.
        if 0 in share.values() or starts[part] >= ends[part]:
            return starts[part]
        ranges = await self._watched.ranges(part.topic)
        return await ranges.cut(
            part.number,
            starts[part],
            ends[part],
            messages=share.get("messages"),
            bytes=share.get("bytes"),
            isolation=self._watched.isolation,
        )

    async def _time_at(
        self, part: SegmentShare, position: RangePosition, paced: Paced
    ) -> int | None:
        """When the message at a position was published; None: nothing is behind it."""
        ranges = await self._watched.ranges(part.topic)
        pages = ranges.read(
            part.number, position, paced.ends[part], isolation=self._watched.isolation
        )
        # Broken entries have no time; the first readable message behind the cut tells it. Closing
        # ends the pages that are read ahead.
        async with aclosing(pages):
            async for page in pages:
                for entry in page.entries():
                    if (time := _publish_time(entry.headers_and_payload)) is not None:
                        return time
        return None


def _fits(
    counts: Mapping[SegmentShare, RangeCount], amounts: Mapping[SegmentShare, int], limit: int
) -> bool:
    # An estimate that fits may still hide too many: only exact counts spare the cut (invariant 2).
    return sum(amounts.values()) <= limit and all(each.is_exact for each in counts.values())


def _start(places: Mapping[str, TopicOffset], part: SegmentShare) -> RangePosition:
    found = places[part.topic].segments[part.number]
    assert found is not None, "a segment with a target is not drained"
    return found


async def _for_each(
    parts: list[SegmentShare], ask: Callable[[SegmentShare], Awaitable[R]]
) -> dict[SegmentShare, R]:
    """Ask for all of them, some at a time."""
    # A topic may have thousands of segments: all at once would run into the limit of requests.
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(part: SegmentShare) -> R:
        async with turn:
            return await ask(part)

    return dict(zip(parts, await asyncio.gather(*map(one, parts)), strict=True))


def _publish_time(data: bytes) -> int | None:
    """None: the entry is broken, which reading it will tell."""
    try:
        return int(open_entry(data).metadata.publish_time)
    except UnreadableMessage:
        return None
