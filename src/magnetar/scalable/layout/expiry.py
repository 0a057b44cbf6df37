"""The end of subscriptions of a scalable topic that nobody uses: of each as a whole.

Owns: `SubscriptionExpiry`, which finds those of one topic that are to go.

Invariants:
1. A subscription is unused while no group of that name has a member and no segment a consumer. One
   consumer on one segment keeps it on all of them.
2. Time counts from when the last one left, as far as that is known: a segment that is loaded says
   so, and this object has seen who was there at each look since it was made.
3. `__compaction` is spared.

Relies on: the controller, which looks at intervals and deletes what is named; the broker that has a
segment deletes no subscription of it by itself.
"""

from __future__ import annotations

from typing import Final

from magnetar.errors import TopicNotFound
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.slices import SlicePace
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.scalable.records import segment_topic
from magnetar.scalable.state import TopicState

_COMPACTION: Final = "__compaction"
_SECONDS_PER_MINUTE: Final = 60


class SubscriptionExpiry:
    """The subscriptions of one topic, by when they were used last."""

    def __init__(self, topic: TopicName, state: TopicState, host: SegmentHost, clock: Clock):
        self._topic = topic
        self._state = state
        self._host = host
        self._clock = clock
        self._used_at: dict[str, float] = {}

    async def expired(self, layout: SegmentLayout, minutes: int) -> list[str]:
        """Name those that nobody has used for so many minutes; 0: none of them expires."""
        if not minutes:
            self._used_at.clear()
            return []
        subscriptions = [each for each in self._state.subscriptions() if not each.deleting]
        names = {each.name for each in subscriptions if each.name != _COMPACTION}
        members = {each.name for each in self._state.groups() if each.kind == "STREAM"}
        known, self._used_at = self._used_at, {}
        for name in sorted(names):
            now = self._clock.monotonic()
            # One that is seen for the first time counts as used now (invariant 2).
            used_at = now if name in members else known.get(name, now)
            idle = await self._idle_seconds(layout, name, at_most=now - used_at)
            self._used_at[name] = now - idle
        now, limit = self._clock.monotonic(), minutes * _SECONDS_PER_MINUTE
        return [name for name, used_at in self._used_at.items() if now - used_at >= limit]

    async def _idle_seconds(self, layout: SegmentLayout, name: str, at_most: float) -> float:
        idle, pace = at_most, SlicePace()
        for segment in layout.segments.values():
            if idle <= 0:
                break
            await pace.after()
            target = segment_topic(self._topic, segment)
            try:
                found = await self._host.unused_seconds(target, name)
            except TopicNotFound:
                continue  # pruned since the layout was read
            idle = idle if found is None else min(idle, found)
        return idle
