"""Keeping the consumer groups of one topic in order.

Owns: `GroupBalance`: who is lost, who has been lost for too long, and who gets which segment,
stored by compare-and-set; `balanced`, the pure part of it; and `count_rebalance`, the metrics of
what an assignment moved.

Invariants:
1. It decides on the stored record alone, and the same for everyone who sees the same world: two
   that keep one group in order at a time do no harm.
2. A consumer keeps its segments while it is connected, and for the grace period after.
3. Nothing of a group is left once its last member has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Final

from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.metrics import (
    SCALABLE_ASSIGNMENT_CHANGES,
    SCALABLE_EXPIRED_CONSUMERS,
    SCALABLE_REBALANCES,
)
from magnetar.scalable.groups import group_records
from magnetar.scalable.groups.assignment import MemberView, assign
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import DrainedRecord, GroupRecord, group_key
from magnetar.scalable.state import TopicState
from magnetar.scalable.store import ScalableStore

_MS: Final = 1000
_IDLE_SECONDS: Final = 60.0
"""Between two looks while nobody is lost, at least: there may be no grace period at all."""


class GroupBalance:
    """The groups of one topic, as `state` shows them."""

    def __init__(
        self,
        topic: TopicName,
        state: TopicState,
        store: ScalableStore,
        live_brokers: LiveBrokers,
        clock: Clock,
        *,
        grace_seconds: float,
    ) -> None:
        self._topic = topic
        self._state = state
        self._store = store
        self._live_brokers = live_brokers
        self._clock = clock
        self.grace_seconds = grace_seconds
        """How long a lost consumer keeps its segments; whoever changes it balances then."""

    async def balance(self, layout: SegmentLayout, layout_epoch: int) -> None:
        """Give out the segments of a layout; `layout_epoch` is NEVER for a regular topic's."""
        established = {each.name for each in self._state.subscriptions() if each.established}
        for group in self._state.groups():
            if group.kind == "CHECKPOINT":
                # Marks of former owners first: else a segment that comes back to
                # one would count as read.
                await self._forget_stale(group)
            await self._balance(group, layout, layout_epoch, group.name in established)

    def grace_left(self) -> float:
        """Seconds until the next lost consumer has been lost for too long."""
        lost = [
            member.lost_ms
            for group in self._state.groups()
            for member in group.members
            if member.lost_ms != NEVER
        ]
        if not lost:
            # Nobody is lost: any time would do, for whoever gets lost is news.
            return max(self.grace_seconds, _IDLE_SECONDS)
        due_ms = min(lost) + self.grace_seconds * _MS
        # Never 0: a clock that stands still would make its caller spin.
        return max((due_ms - self._clock.now_ms()) / _MS, 0.001)

    async def remove(self, group: GroupRecord) -> None:
        """The topic is gone: a group goes, whoever is in it."""
        await self._store.change(self._key(group), GroupRecord, lambda _: None)
        await self._forget_done(group.name)

    async def _balance(
        self, group: GroupRecord, layout: SegmentLayout, layout_epoch: int, established: bool
    ) -> None:
        """Once more in the store, for the group may have moved on since it was seen."""
        now_ms = self._clock.now_ms()
        grace_ms = int(self.grace_seconds * _MS)
        live_brokers = self._live_brokers.ids
        before: GroupRecord | None = None

        # Called for the stored record, again after each lost race: members that joined meanwhile
        # are in it. What is passed in was only seen in the view.
        def changed(present: GroupRecord | None) -> GroupRecord | None:
            nonlocal before
            before = present
            if present is None:
                return None
            # Connections of dead brokers count as lost from now on: their members
            # get the grace period, too.
            kept = group_records.lost_brokers(present, live_brokers, now_ms)
            kept = group_records.expired(kept, now_ms, grace_ms)
            finished = self._finished(kept, established)
            return balanced(kept, layout, layout_epoch, finished)

        after = await self._store.change(self._key(group), GroupRecord, changed)
        # Once per stored change; a lost race has counted nothing.
        if before is not None:
            count_rebalance(before, after)
        # Its last member has gone, and the marks of what they had read mean nothing to others.
        if after is None and group.kind == "CHECKPOINT":
            await self._forget_done(group.name)

    def _finished(self, group: GroupRecord, established: bool) -> set[int]:
        if group.kind == "CHECKPOINT":
            return self._state.done(group)
        # Without its cursors a stream group has drained nothing, whatever an old mark says.
        return self._state.drained(group.name) if established else set()

    async def _forget_stale(self, group: GroupRecord) -> None:
        """What a former owner has read must not count when it gets the segment again."""
        present = await self._store.get(self._key(group), GroupRecord)

        def kept(mark: DrainedRecord | None) -> DrainedRecord | None:
            if mark is None or present is None:
                return None
            return mark if mark.member in present.owners.get(mark.segment_id, ()) else None

        for mark in self._state.keys_of("done", group.name):
            await self._store.change(mark, DrainedRecord, kept)

    async def _forget_done(self, group: str) -> None:
        for key in self._state.keys_of("done", group):
            await self._store.change(key, DrainedRecord, lambda _: None)

    def _key(self, group: GroupRecord) -> str:
        return group_key(self._topic, group.kind, group.name)


def balanced(
    group: GroupRecord, layout: SegmentLayout, layout_epoch: int, finished: Set[int]
) -> GroupRecord | None:
    """A group with every segment given out that can be; None: it has no members."""
    if not group.members:
        return None
    members = [MemberView(each.name, each.shares) for each in group.members]
    owners = assign(layout, group.kind, members, finished, group.owners)
    return group_records.assigned(group, layout_epoch, owners)


def count_rebalance(before: GroupRecord, after: GroupRecord | None) -> None:
    """A controller has looked at a group: what came of it."""
    # In one compare-and-set only expiry can make it fewer: leaving is a session's own write.
    gone = len(before.members) - (0 if after is None else len(after.members))
    if gone > 0:
        SCALABLE_EXPIRED_CONSUMERS.inc(gone)
    if after is None or after.revision == before.revision:
        return
    SCALABLE_REBALANCES.labels(after.kind).inc()
    SCALABLE_ASSIGNMENT_CHANGES.labels(after.kind).inc(moves(before, after))


def moves(before: GroupRecord, after: GroupRecord) -> int:
    """How many times a segment came to a consumer or left one."""
    # As pairs: a segment that moves counts twice, once for who loses it and once for who gets it.
    had = Counter((segment, name) for segment, names in before.owners.items() for name in names)
    has = Counter((segment, name) for segment, names in after.owners.items() for name in names)
    return ((had - has) + (has - had)).total()
