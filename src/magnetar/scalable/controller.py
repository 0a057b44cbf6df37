"""The controller of one scalable topic: one coroutine that keeps it in order.

Owns: `Controller`. It waits until something moved (the topic's record, what stands beside it, the
brokers, the time), then looks at everything in one order: the change under way, subscriptions,
topics to delete, consumer groups, and at intervals unused subscriptions, backlog quotas, drained
segments and the load.

Invariants:
1. One coroutine does it all, so changes of one topic never overlap, whoever asked for them.
2. It holds nothing that is not in the store: it can be stopped at any await, and another one goes
   on from the records.
3. A consumer keeps its segments while it is connected, and for the grace period after; nobody else
   gets them before.
4. A sealed segment is pruned only when its parents are, when every subscription has drained it,
   and every checkpoint group and every reader that is connected has read it, when no transaction
   in it is undecided, and when retention lets it go (`layout/retention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from magnetar.broker.policy.effective import TopicPolicies, effective
from magnetar.broker.policy.namespaces import Namespaces
from magnetar.broker.policy.policies import Policies
from magnetar.errors import Conflict, InvalidLayout, MagnetarError, StoreClosed
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import (
    EXPIRED_SUBSCRIPTIONS,
    SCALABLE_PRUNED_SEGMENTS,
    SCALABLE_SUPPRESSED,
)
from magnetar.runtime.signal import Signal
from magnetar.scalable.groups.group_balance import GroupBalance
from magnetar.scalable.layout import changes
from magnetar.scalable.layout.autoscale import (
    AutoScalePolicy,
    Decision,
    Merge,
    Sample,
    Split,
    decide,
    read_override,
    resolve,
    suppressed,
)
from magnetar.scalable.layout.expiry import SubscriptionExpiry
from magnetar.scalable.layout.layout_changes import LayoutChanges, all_done
from magnetar.scalable.layout.layouts import Layouts
from magnetar.scalable.layout.needs import why_needed
from magnetar.scalable.layout.quotas import TopicBacklog
from magnetar.scalable.layout.retention import RetentionShares, TopicRetention
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.scalable.layout.subscriptions import Subscriptions
from magnetar.scalable.layout.txn_barrier import TransactionBarrier
from magnetar.scalable.lifecycle import (
    broker_lifecycle,
    read_lifecycle,
    resolve_lifecycle,
)
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import (
    AutoScaleOverride,
    LifecycleOverride,
    ScalableRecord,
    SubscriptionRecord,
    segment_topic,
)
from magnetar.scalable.state import TopicState
from magnetar.scalable.store import ScalableStore, Superseded

# Enough to find a point that halves the load within a few percent, from one read.
KEY_SAMPLES: Final = 1000
"""Messages that are looked at to find where a segment is best split."""

# A topic whose store or brokers do not answer must not spin; half a second is not felt.
_RETRY_SECONDS: Final = 0.5
_CHANGE_SECONDS: Final = 0.01
"""A change that waits for transactions is looked at again so soon: to look is to wait for them."""

_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class ControllerParts:
    """The parts that all controllers of one broker share."""

    store: ScalableStore
    layouts: Layouts
    host: SegmentHost
    live_brokers: LiveBrokers
    namespaces: Namespaces
    clock: Clock
    limits: Limits
    txn_barrier: TransactionBarrier
    retention_shares: RetentionShares
    auto_scale: bool
    """Whether topics are scaled where neither namespace nor topic say anything."""


class Controller:
    """Keeps one topic in order while it runs."""

    def __init__(self, topic: TopicName, parts: ControllerParts) -> None:
        self.topic = topic
        # The one thing it waits for: record, state, brokers and groups all advance it.
        self.wake = Signal()
        """Advanced whenever something may have moved."""
        self.state = TopicState(parts.store.metadata, topic, self.wake)
        self.policy: AutoScalePolicy | None = None
        """As it was last resolved."""
        self.lifecycle = broker_lifecycle(parts.limits)
        """As it was last resolved."""
        self._namespace_lifecycle: LifecycleOverride | None = None
        self._is_lifecycle_known = False
        self._parts = parts
        self._store = parts.store
        self._host = parts.host
        self._clock = parts.clock
        self._limits = parts.limits
        self._groups = GroupBalance(
            topic,
            self.state,
            parts.store,
            parts.live_brokers,
            parts.clock,
            grace_seconds=parts.limits.scalable_grace_period_seconds,
        )
        self._subscriptions = Subscriptions(topic, parts.store, parts.host)
        self._changes = LayoutChanges(
            topic, parts.store, parts.host, self._subscriptions, parts.txn_barrier, parts.clock
        )
        self._retention = TopicRetention(
            topic, parts.host, parts.retention_shares, parts.clock, parts.limits
        )
        self._expiry = SubscriptionExpiry(topic, self.state, parts.host, parts.clock)
        self.backlog = TopicBacklog(topic, parts.host, parts.clock)
        """What quotas are compared with."""
        # A whole interval first: a take-over begins with what clients wait for.
        self._tick_at = parts.clock.monotonic() + parts.limits.scalable_auto_scale_interval_seconds
        # Consumers that have just come, or a policy that was changed, do
        # not wait for the next tick.
        self._wish_seen: tuple[int, AutoScaleOverride | None] = (0, None)
        """Consumers of the largest group, and the topic's own policy, when last looked at."""

    async def run(self) -> None:
        """Keep the topic in order until it is gone."""
        layouts = self._parts.layouts
        layouts.tell(self.topic, self.wake)
        try:
            while True:
                # Before the look: whatever moves while it works makes it look again at once.
                seen = self.wake.version
                try:
                    record = await self._look_after()
                # Another controller (a leadership that has just moved) was faster:
                # read, and go on from there.
                except Superseded:
                    continue
                except StoreClosed:
                    return
                except MagnetarError as error:
                    _LOG.warning("topic-not-in-order", topic=str(self.topic), error=str(error))
                    await self._clock.sleep(_RETRY_SECONDS)
                    continue
                # The topic is deleted, and with it the need for a controller.
                if record is None:
                    return
                await self._until_news(seen, record)
        finally:
            layouts.tell_no_more(self.topic)
            self._retention.forget()

    async def _look_after(self) -> ScalableRecord | None:
        record = await self._store.read(self.topic)
        if record is None:
            return None
        if record.change is not None:
            record = await self._changes.carry_out(record)
        # Not created yet, or being deleted, or the view is still loading: nothing to keep in order.
        # The next news brings it back here.
        if record is None or record.layout is None or not self.state.is_loaded:
            return record
        layout = record.layout.layout()
        await self._follow_lifecycle(record)
        # The view is enough to notice it; `keep` reads what is stored.
        if any(each.deleting or not each.established for each in self.state.subscriptions()):
            await self._subscriptions.keep(layout)
        if record.garbage:
            record = await self._sweep(record)
        await self._groups.balance(layout, layout.epoch)
        # Only without a change under way: one that waits for transactions must stay the only one.
        if record is not None and record.change is None:
            record = await self._at_intervals(record)
        return record

    def policies_changed(self) -> None:
        """Have it read anew what its namespace says of lost consumers and sealed segments."""
        self._is_lifecycle_known = False
        self.wake.advance()

    async def _follow_lifecycle(self, record: ScalableRecord) -> None:
        # The namespace's is read when it is told that this has changed, and at every tick: looks
        # are many. The topic's own stands in the record.
        if not self._is_lifecycle_known:
            self._is_lifecycle_known = True
            self._note_lifecycle(await self._parts.namespaces.policies(self.topic.namespace))
        self.lifecycle = resolve_lifecycle(
            broker_lifecycle(self._limits), self._namespace_lifecycle, record.lifecycle
        )
        self._groups.grace_seconds = self.lifecycle.grace_period_seconds
        self._retention.sealed_seconds = self.lifecycle.sealed_seconds

    def _note_lifecycle(self, policies: Policies) -> None:
        given = policies.scalable_topic_lifecycle_policy
        self._namespace_lifecycle = None if given is None else read_lifecycle(given)

    async def _until_news(self, seen: int, record: ScalableRecord) -> None:
        now = self._clock.monotonic()
        # Nothing is polled: the next tick, or the end of the next grace
        # period, whichever comes first.
        wait = min(self._tick_at - now, self._groups.grace_left())
        # Being created or deleted: somebody waits for it, and no news may come of a failed attempt.
        if record.layout is None:
            wait = min(wait, _RETRY_SECONDS)
        if record.change is not None:
            wait = min(wait, _CHANGE_SECONDS)
        await self.wake.past_within(seen, max(wait, 0.0))

    # --- the end of segments

    async def _sweep(self, record: ScalableRecord) -> ScalableRecord | None:
        """Delete the topics of pruned segments."""
        doomed = record.garbage
        # The topics before their names in the record: after a crash in between the names are still
        # there, and deleting again is no error.
        await all_done(self._host.delete(TopicName.parse(name)) for name in doomed)
        # The last migrated partition is gone: nothing needs the regular topic's partition count.
        if not any(each.legacy_topic_name for each in changes.layout_of(record).segments.values()):
            await self._host.forget_partitions(self.topic)
        swept = await self._store.change_topic(
            self.topic, lambda present: changes.swept(present, doomed)
        )
        await self._forget_marks(record)
        return swept

    async def _forget_marks(self, record: ScalableRecord) -> None:
        assert record.layout is not None, "its caller has checked"
        present = {each.segment_id for each in record.layout.segments}
        for key in self.state.keys_beside(present):
            await self._store.metadata.delete(key)

    async def _collect(
        self, record: ScalableRecord, policies: TopicPolicies
    ) -> ScalableRecord | None:
        """Prune the segments that nobody needs any more, oldest first."""
        layout = changes.idle_layout(record)
        await self._retention.measure(layout, policies)
        gone = await self._spent_segments(layout)
        # After sealed segments went, if they do: these are older.
        await self._retention.trim(layout)
        if not gone:
            return record

        def pruned(present: ScalableRecord) -> ScalableRecord:
            # What was judged must be what is pruned: a split or merge that came
            # between has its own DAG.
            if present.layout != record.layout or present.change is not None:
                raise Superseded(present.name)
            return changes.pruned(present, gone)

        after = await self._store.change_topic(self.topic, pruned)
        _LOG.info("segments-pruned", topic=str(self.topic), segments=sorted(gone))
        SCALABLE_PRUNED_SEGMENTS.inc(len(gone))
        return None if after is None else await self._sweep(after)

    async def _spent_segments(self, layout: SegmentLayout) -> set[int]:
        """Sealed segments that retention lets go and nobody needs."""
        gone: set[int] = set()
        # Nothing is sealed, as nearly always: no subscription need be asked for.
        if len(layout.active) == len(layout.segments):
            return gone
        # One that comes later is established here, on what is left.
        subscriptions = await self._subscriptions.all()
        for segment in layout.segments.values():  # by id: parents come first
            # Parents go first (invariant 4): the DAG loses its roots, never its middle.
            is_oldest = not segment.is_active and gone.issuperset(segment.parent_ids)
            is_due = is_oldest and self._retention.lets_go(segment, layout)
            if is_due and await self._is_spent(segment, subscriptions):
                gone.add(segment.segment_id)
                self._retention.gone(segment.segment_id)
        return gone

    async def _is_spent(
        self, segment: Segment, subscriptions: Sequence[SubscriptionRecord]
    ) -> bool:
        """Whether nobody needs what is in it."""
        checkpoints = [each for each in self.state.groups() if each.kind == "CHECKPOINT"]
        number = segment.segment_id
        unread_by = [each.name for each in checkpoints if number not in self.state.done(each)]
        drained_by = self.state.drained
        reason = await why_needed(
            self.topic, segment, self._host, subscriptions, drained_by, unread_by
        )
        return reason is None

    # --- subscriptions that nobody uses, and backlog quotas

    async def _expire_subscriptions(self, layout: SegmentLayout, policies: TopicPolicies) -> None:
        minutes = policies.subscription_expiration_minutes
        for name in await self._expiry.expired(layout, minutes):
            await self._subscriptions.end(name, layout)
            EXPIRED_SUBSCRIPTIONS.inc()
            _LOG.info("subscription-expired", topic=str(self.topic), subscription=name)

    async def check_quotas(self, layout: SegmentLayout) -> None:
        """Raise if no producer may come now."""
        await self.backlog.check(layout, await self._policies(), self.state.drained_by_all)

    async def enforce_quotas(self, layout: SegmentLayout) -> None:
        """Do what its quotas say of the backlog of all segments."""
        await self._enforce_quotas(layout, await self._policies())

    async def _enforce_quotas(self, layout: SegmentLayout, policies: TopicPolicies) -> None:
        await self.backlog.enforce(layout, policies, self.state.drained_by_all)

    async def _policies(self) -> TopicPolicies:
        return effective(
            await self._parts.namespaces.policies(self.topic.namespace),
            broker=self._parts.namespaces.broker,
            is_segment=True,
            segment_retention=self._parts.retention_shares.default,
        )

    # --- load

    async def _at_intervals(self, record: ScalableRecord) -> ScalableRecord | None:
        consumers = max((len(each.members) for each in self.state.groups()), default=0)
        now = self._clock.monotonic()
        before, self._wish_seen = self._wish_seen, (consumers, record.auto_scale)
        # More consumers than before, or another policy, are looked at now; fewer can wait.
        if now < self._tick_at and consumers <= before[0] and record.auto_scale == before[1]:
            return record
        present: ScalableRecord | None = record
        if now >= self._tick_at:
            self._tick_at = now + self._limits.scalable_auto_scale_interval_seconds
            policies = await self._policies()
            layout = changes.layout_of(record)
            await self._expire_subscriptions(layout, policies)
            await self._enforce_quotas(layout, policies)
            # Pruning before scaling: it makes room below the limit of segments.
            present = await self._collect(record, policies)
        if present is not None and present.layout is not None:
            present = await self._scale(present)
        return present

    async def _scale(self, record: ScalableRecord) -> ScalableRecord | None:
        """Begin a split or a merge if the load, or the number of consumers, asks for it."""
        self.policy = await self._resolved(record)
        decision = await self._decided(record, self.policy)
        # Counted for operators: a limit of the policy holds back what the load asks for.
        if decision is None:
            self._count_suppressed(changes.layout_of(record), self.policy)
            return record
        try:
            after = await self._store.change_topic(
                self.topic, lambda present: self._begin(present, decision)
            )
        # A request began a change meanwhile: it goes first, and the load is looked at again later.
        except (Conflict, InvalidLayout) as error:
            _LOG.info("auto-scale-refused", topic=str(self.topic), error=str(error))
            return record
        return None if after is None else await self._changes.carry_out(after)

    async def _decided(self, record: ScalableRecord, policy: AutoScalePolicy) -> Decision:
        """A split is decided again with a look at the keys that the segment gets."""
        layout = changes.idle_layout(record)
        key_loads: dict[int, list[Sample]] = {}
        while True:
            decision = decide(
                layout,
                self.state.loads(),
                [len(each.members) for each in self.state.groups()],
                policy,
                self._clock.now_ms(),
                last_split_ms=record.last_split_ms,
                last_merge_ms=record.last_merge_ms,
                key_loads=key_loads,
            )
            # Two rounds at most for each segment: first which one, then, with its keys, where, or
            # that no point would help, and then perhaps another one.
            if not isinstance(decision, Split) or decision.segment_id in key_loads:
                return decision
            name = segment_topic(self.topic, layout.segment(decision.segment_id))
            samples = await self._host.key_samples(name, KEY_SAMPLES)
            key_loads[decision.segment_id] = samples

    def _begin(self, record: ScalableRecord, decision: Split | Merge) -> ScalableRecord:
        now_ms = self._clock.now_ms()
        limit = self._limits.scalable_total_segments_max
        if isinstance(decision, Merge):
            return changes.begin_merge(
                record, decision.segment_ids, now_ms=now_ms, segments_max=limit, cause="load"
            )
        return changes.begin_split(
            record,
            decision.segment_id,
            now_ms=now_ms,
            segments_max=limit,
            after=decision.after,
            cause=decision.cause,
        )

    def _count_suppressed(self, layout: SegmentLayout, policy: AutoScalePolicy) -> None:
        consumers = [len(each.members) for each in self.state.groups()]
        now_ms = self._clock.now_ms()
        for reason in suppressed(layout, self.state.loads(), consumers, policy, now_ms):
            SCALABLE_SUPPRESSED.labels(reason).inc()

    async def _resolved(self, record: ScalableRecord) -> AutoScalePolicy:
        policies = await self._parts.namespaces.policies(self.topic.namespace)
        self._note_lifecycle(policies)  # another broker may have changed it
        given = policies.scalable_topic_auto_scale_policy
        namespace = None if given is None else read_override(given)
        enabled = self._parts.auto_scale
        return resolve(self._limits, namespace, record.auto_scale, enabled=enabled)
