"""The backlog quotas of a scalable topic: of all its segments together.

Owns: `TopicBacklog`, the backlog of one topic as it was looked at last, and what its quotas do with
it; and the pure `rooms`.

Invariants:
1. A size is the sum over all segments, sealed ones included, of what the slowest durable
   subscription of each has left; an age is that of the oldest message among these.
2. What has to go goes from the oldest: sealed segments one after the other, and only then active
   ones, which are cut to one size.
3. A producer is judged by a look that is at most `LOOK_SECONDS` old. Those of sealed segments are
   not judged: they are to hear that their segment is sealed.
4. A segment whose broker does not answer counts as empty, and holds nobody up.

Relies on: `broker/topic/quota_rules.py`, where it is decided when a quota is used up; the broker
that has a segment, which looks at no quota by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from typing import Final, NamedTuple, TypeAlias

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.topic import quota_rules
from magnetar.broker.topic.quota_rules import KEPT, Exceeded
from magnetar.broker.topic.quotas import NO_BACKLOG, Backlog, Oldest, refusal
from magnetar.errors import MagnetarError, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.slices import SlicePace
from magnetar.scalable.layout.retention import fair_share
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.scalable.records import segment_topic

LOOK_SECONDS: Final = 1.0
"""Between two looks for the sake of producers that come: hundreds may come at once."""

Drained: TypeAlias = Callable[[], Set[int] | None]
"""Segments that every subscription has drained; None: there is no subscription. Asked once for
each look: to find it out is work."""

_LOG: Final = logger(__name__)


class BacklogShown(NamedTuple):
    """The backlog of a topic, for statistics."""

    size_bytes: int
    oldest_seconds: int
    """-1: not known."""
    oldest_of: str | None


UNKNOWN: Final = BacklogShown(-1, -1, None)


class _Look(NamedTuple):
    """The findings of one look."""

    at: float
    sizes: dict[int, int]
    """By segment; those with nothing left are not in it."""
    oldest: Oldest | None


def rooms(layout: SegmentLayout, sizes: Mapping[int, int], room: int) -> dict[int, int]:
    """What the backlogs of segments may keep, of those that must let something go."""
    found: dict[int, int] = {}
    excess = sum(sizes.values()) - room
    # By id: parents come before their children (invariant 2).
    for segment in layout.segments.values():
        size = sizes.get(segment.segment_id, 0)
        if segment.is_active or not size or excess <= 0:
            continue
        found[segment.segment_id] = max(size - excess, 0)
        excess -= size
    if excess <= 0:
        return found
    active = {each.segment_id: sizes.get(each.segment_id, 0) for each in layout.active}
    share = fair_share(active.values(), room)
    return found | {number: share for number, size in active.items() if size > share}


class TopicBacklog:
    """The backlog of one topic."""

    def __init__(self, topic: TopicName, host: SegmentHost, clock: Clock) -> None:
        self._topic = topic
        self._host = host
        self._clock = clock
        self._last: _Look | None = None
        # Producers that come at once share one look.
        self._turn = asyncio.Lock()

    def shown(self, policies: TopicPolicies) -> BacklogShown:
        """What the last look found, while there is a quota."""
        last = self._last
        if last is None or not quota_rules.has_quota(policies):
            return UNKNOWN
        size = sum(last.sizes.values())
        if last.oldest is None:
            return BacklogShown(size, -1, None)
        age = quota_rules.age_seconds(last.oldest.published_ms, self._clock.now_ms())
        return BacklogShown(size, int(age), last.oldest.subscription)

    async def check(
        self, layout: SegmentLayout, policies: TopicPolicies, drained: Drained = frozenset
    ) -> None:
        """Raise if no producer may come now.

        `drained` tells which segments every subscription is known to have drained.
        """
        if not quota_rules.has_quota(policies):
            return
        async with self._turn:
            last = self._last
            if last is None or self._clock.monotonic() - last.at >= LOOK_SECONDS:
                last = await self._look(layout, policies, drained)
        found = self._exceeded(policies, last)
        if found is not None and found.policy != "consumer_backlog_eviction":
            raise refusal(self._topic, found)

    async def enforce(
        self, layout: SegmentLayout, policies: TopicPolicies, drained: Drained = frozenset
    ) -> None:
        """Do what the policy says if a quota is used up."""
        if not quota_rules.has_quota(policies):
            self._last = None
            return
        try:
            # Nobody uses a topic of which nothing is loaded: it is not loaded to be looked at.
            if not await self._is_loaded(layout):
                return
            async with self._turn:
                last = await self._look(layout, policies, drained)
                found = self._exceeded(policies, last)
                if found is not None:
                    await self._carry_out(found, layout, last)
        # The next look tries again; what else its controller does must not wait for it.
        except MagnetarError as error:
            _LOG.warning("quota-check-failed", topic=str(self._topic), error=str(error))

    async def _carry_out(self, found: Exceeded, layout: SegmentLayout, last: _Look) -> None:
        """Close producers, or let the oldest go."""
        if found.policy != "consumer_backlog_eviction":
            error = refusal(self._topic, found)
            for segment in layout.active:
                await self._host.stop_producers(self._name(segment), error)
            return
        self._last = None  # what was found holds no longer
        if found.kind == "size":
            for number, room in rooms(layout, last.sizes, int(KEPT * found.limit)).items():
                await self._host.evict(self._name(layout.segment(number)), room)
            return
        for number in last.sizes:
            await self._host.evict_older(self._name(layout.segment(number)), KEPT * found.limit)

    async def _is_loaded(self, layout: SegmentLayout) -> bool:
        for segment in layout.active:
            if (await self._host.kept(self._name(segment))).loaded:
                return True
        return False

    async def _look(
        self, layout: SegmentLayout, policies: TopicPolicies, drained: Drained
    ) -> _Look:
        known_empty = drained()
        with_age = quota_rules.has_age_quota(policies)
        sizes, oldest, pace = dict[int, int](), list[Oldest](), SlicePace()
        for segment in layout.segments.values():
            await pace.after()
            # Marked durably: it need not be loaded to be found empty.
            if known_empty is None or segment.segment_id in known_empty:
                continue
            found = await self._backlog_of(segment, with_age=with_age)
            if found.size_bytes:
                sizes[segment.segment_id] = found.size_bytes
            if found.oldest is not None:
                oldest.append(found.oldest)
        first = min(oldest, key=lambda each: each.published_ms, default=None)
        self._last = _Look(self._clock.monotonic(), sizes, first)
        return self._last

    async def _backlog_of(self, segment: Segment, *, with_age: bool) -> Backlog:
        try:
            return await self._host.slowest_backlog(self._name(segment), with_age=with_age)
        except TopicNotFound:
            return NO_BACKLOG  # pruned since the layout was read
        except MagnetarError as error:
            name = str(self._name(segment))
            _LOG.warning("quota-check-failed", topic=name, error=str(error))
            return NO_BACKLOG

    def _exceeded(self, policies: TopicPolicies, last: _Look) -> Exceeded | None:
        published_ms = None if last.oldest is None else last.oldest.published_ms
        age = quota_rules.age_seconds(published_ms, self._clock.now_ms())
        return quota_rules.exceeded(policies, sum(last.sizes.values()), age)

    def _name(self, segment: Segment) -> TopicName:
        return segment_topic(self._topic, segment)
