"""All that a server does with scalable topics.

Owns: `ScalableTopics`, which puts the parts together, and through which clients and operators ask.

Whoever wants a change writes its intent into the topic's record, on any broker; the controller of
the topic carries it out, wherever it is; and who asked waits until the record says that it is done.

Invariants:
1. A request is answered when what it asked for is durable and visible here, or with an error that
   says why not; never before.
2. A request waits for a change that is under way, up to a deadline, and is then judged anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as replace_field
from functools import partial
from typing import Final

from msgspec.structs import replace

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.policy.effective import TopicPolicies, effective
from magnetar.broker.policy.policies import Policies
from magnetar.broker.topic.quota_rules import has_quota
from magnetar.broker.topic.topics import Topics
from magnetar.errors import Conflict, InvalidTopicName, NotAllowed, ServiceNotReady, TopicNotFound
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention
from magnetar.metadata.api import MetadataStore
from magnetar.model.isolation import asked_isolation
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import SCALABLE_PRUNED_SEGMENTS
from magnetar.runtime.service import Service
from magnetar.runtime.slices import SLICE_ITEMS, SlicePace
from magnetar.scalable.controller import KEY_SAMPLES, ControllerParts
from magnetar.scalable.controllers import Controllers
from magnetar.scalable.groups.regular_groups import RegularGroups, partition_names
from magnetar.scalable.groups.sessions import ConsumerSessions
from magnetar.scalable.layout import changes
from magnetar.scalable.layout.autoscale import check_override, split_point
from magnetar.scalable.layout.drains import Drains
from magnetar.scalable.layout.layout_changes import all_done
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.layouts import Layouts
from magnetar.scalable.layout.load_reports import LoadReporter
from magnetar.scalable.layout.needs import why_needed
from magnetar.scalable.layout.quotas import UNKNOWN, BacklogShown, TopicBacklog
from magnetar.scalable.layout.retention import RetentionShares
from magnetar.scalable.layout.segments import LocalSegments, SegmentHost
from magnetar.scalable.layout.subscriptions import SubscriptionDesk
from magnetar.scalable.layout.txn_barrier import TransactionBarrier
from magnetar.scalable.lifecycle import (
    Lifecycle,
    broker_lifecycle,
    read_lifecycle,
    resolve_lifecycle,
)
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import (
    AutoScaleOverride,
    DrainedRecord,
    GroupRecord,
    LayoutChange,
    LifecycleOverride,
    ScalableRecord,
    StartPosition,
    SubscriptionKind,
    SubscriptionRecord,
    drained_key,
    segment_topic,
)
from magnetar.scalable.state import read_segments
from magnetar.scalable.store import ScalableStore
from magnetar.txn.outcomes import Outcomes

# Should the watch of a record be late: whoever waits for it reads it again so often.
_LOOK_SECONDS: Final = 1.0
_TOPIC_ITEMS: Final = SLICE_ITEMS // 25
"""A topic whose policies are put together counts as so many items of work."""


@dataclass(frozen=True, slots=True)
class Dag:
    """A topic as v5 clients see it."""

    topic: TopicName
    """`topic://...`"""
    layout: SegmentLayout
    synthetic: bool = False
    """It is a regular topic, shown as if its partitions were segments."""


class ScalableTopics(Service):
    """The scalable topics of one broker."""

    def __init__(
        self,
        topics: Topics,
        metadata: MetadataStore,
        outcomes: Outcomes,
        *,
        clock: Clock,
        limits: Limits,
        broker: str,
        url: str,
        auto_scale: bool = True,
        retention: Retention = KEEP_NOTHING,
        host: SegmentHost | None = None,
        layout_watchers: LayoutWatchers | None = None,
    ) -> None:
        super().__init__("scalable topics", stop_seconds=limits.close_seconds)
        stop_seconds = limits.close_seconds
        self._topics = topics
        self._clock = clock
        self._limits = limits
        self.store = ScalableStore(metadata)
        self.layout_watchers = layout_watchers or LayoutWatchers()
        """Who watches layouts; the host knows them too."""
        self.host = host or LocalSegments(topics, self.layout_watchers)
        # All layouts, cached by every broker; and the barrier that transactions meet before a seal.
        self.layouts = Layouts(self.store, stop_seconds=stop_seconds)
        self.txn_barrier = TransactionBarrier(
            topics,
            outcomes,
            self.layout_watchers,
            clock,
            wait_seconds=limits.scalable_change_txn_wait_seconds,
        )
        wait_seconds = limits.scalable_controller_wait_seconds
        self.live_brokers = LiveBrokers(
            metadata, broker, start_seconds=wait_seconds, stop_seconds=stop_seconds
        )
        self.retention_shares = RetentionShares(retention, clock)
        """What topics keep that no subscription needs, where no policy says otherwise."""
        parts = ControllerParts(
            store=self.store,
            layouts=self.layouts,
            host=self.host,
            live_brokers=self.live_brokers,
            namespaces=topics.namespaces,
            clock=clock,
            limits=limits,
            txn_barrier=self.txn_barrier,
            retention_shares=self.retention_shares,
            auto_scale=auto_scale,
        )
        # Controllers carry changes out: of the topics whose slot this broker leads.
        self.controllers = Controllers(parts, topics.namespaces_changed, broker, url)
        self._regular_groups = RegularGroups(topics, self.store, self.live_brokers, clock, limits)
        self.sessions = ConsumerSessions(
            self.store,
            self.layouts,
            self._regular_groups,
            broker,
            clock,
            attach_seconds=wait_seconds,
            settle_seconds=wait_seconds,
            stop_seconds=stop_seconds,
            members_max=limits.scalable_group_members_max,
        )
        # What this broker asks of controllers elsewhere, and tells them: drained segments, load.
        self.subscriptions = SubscriptionDesk(self.store, clock, wait_seconds=wait_seconds)
        self._drains = Drains(topics, self.layouts, self.store, clock, stop_seconds=stop_seconds)
        self._loads = LoadReporter(topics, metadata, clock=clock, limits=limits)

    async def _start(self) -> None:
        for part in self._parts():
            await part.start()

    async def _stop(self) -> None:
        # All are stopped though one fails, the last started first; the first error is raised then.
        results = [
            result
            for part in reversed(self._parts())
            for result in await asyncio.gather(part.stop(), return_exceptions=True)
        ]
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _parts(self) -> list[Service]:
        # Each relies on those before it: the view of live brokers and of layouts is whole
        # before anybody decides by it.
        return [
            self.live_brokers,
            self.layouts,
            self._drains,
            self._loads,
            self.controllers,
            self._regular_groups,
            self.sessions,
        ]

    # --- what clients ask

    async def lookup(self, name: TopicName, *, create: bool = True) -> Dag:
        """The segments of a topic; TopicNotFound if there is none and none may be created."""
        # Two that no client looks up so: what has no layout, and a part of one.
        if name.domain is Domain.NON_PERSISTENT or name.domain is Domain.SEGMENT:
            raise NotAllowed(f"{name} has no segments", hint="look up topic:// or persistent://")
        if name.partition is not None:
            raise TopicNotFound(f"{name} is one partition", hint="look up the whole topic")
        topic = name.scalable_topic()
        # The cache may lag behind: only the store can say that there is no such topic.
        record = self.layouts.cached(topic)
        if record is None or record.layout is None:
            record = await self.layouts.read(topic)
        # A regular topic that a v5 client uses: its partitions are shown as segments.
        if record is None and name.domain is Domain.PERSISTENT:
            return await self._regular(name, create)
        # topic://, and nobody has made it yet.
        if record is None:
            record = await self._auto_created(topic, create)
        if record.layout is None and record.change is not None:
            # Without a layout: a migration that is not through, whose clients stay where they are;
            # else a topic that is being created.
            if record.change.kind == "migrate":
                return await self._regular(name, create=False)
            record = await self._after(topic, lambda each: each.layout is not None)
        return Dag(topic, changes.layout_of(record))

    async def _regular(self, name: TopicName, create: bool) -> Dag:
        regular = await self._regular_names(name, create)
        return Dag(name.scalable_topic(), changes.synthetic_layout(regular), synthetic=True)

    async def _regular_names(self, name: TopicName, create: bool) -> list[TopicName]:
        regular = TopicName(Domain.PERSISTENT, name.namespace, name.local_name)
        partitions = await self._topics.partitions(regular, create=create)
        if not partitions:
            await self._topics.get(regular, create=create)
        return partition_names(regular, partitions)

    async def _auto_created(self, topic: TopicName, create: bool) -> ScalableRecord:
        policies = await self._topics.namespaces.policies(topic.namespace)
        creation = policies.auto_topic_creation
        if not create or (creation is not None and not creation.allow_auto_topic_creation):
            raise TopicNotFound(f"{topic} does not exist")
        with suppress(Conflict):  # somebody else was quicker
            await self.create(topic)
        return await self._after(topic, lambda each: each.layout is not None)

    async def admit(self, name: TopicName) -> None:
        """A segment can be used once, and as long as, its topic shows it."""
        if name.domain is not Domain.SEGMENT:
            return
        assert name.descriptor is not None, "segments have one"
        topic, number = name.scalable_topic(), name.descriptor.segment_id
        # The cache for nearly all; a child that a client heard of from another broker may be newer.
        if not _shows(self.layouts.cached(topic), number):
            record = await self.layouts.read(topic)
            if not _shows(record, number):
                raise TopicNotFound(f"{name} is not a segment of its topic")

    async def admit_producer(self, name: TopicName) -> None:
        """Before a producer comes: the backlog of the whole topic is within its quotas."""
        if name.domain is not Domain.SEGMENT:
            return
        assert name.descriptor is not None, "segments have one"
        topic, number = name.scalable_topic(), name.descriptor.segment_id
        policies = self.policies(await self._topics.namespaces.policies(topic.namespace))
        record = self.layouts.cached(topic)
        if not has_quota(policies) or record is None or not _shows(record, number):
            return
        layout = changes.layout_of(record)
        # It is to hear that its segment is sealed, and to go on to the children.
        if not layout.segment(number).is_active:
            return
        controller = self.controllers.controller(topic)
        if controller is not None:
            await controller.check_quotas(layout)
        else:  # another broker leads the topic
            await TopicBacklog(topic, self.host, self._clock).check(layout, policies)

    async def subscribing(self, name: TopicName, options: SubscribeRequest) -> SubscribeRequest:
        """Before a consumer subscribes: its subscription is one of the whole topic.

        As it is now, a segment without its cursor is younger than the subscription, wherever that
        began: of such a one it gets everything.
        """
        if not options.durable or name.domain is Domain.NON_PERSISTENT:
            return options
        topic = name.scalable_topic()
        record = self.layouts.cached(topic)
        if record is None and name.domain is Domain.SEGMENT:
            record = await self.layouts.read(topic)
        # A regular topic, or one that is not migrated yet: the subscription is its own.
        if record is None or record.layout is None or not _has(record, name):
            return options
        whole = replace_field(options, initial_position=InitialPosition.EARLIEST)
        known = await self.subscriptions.get(topic, options.subscription)
        # The usual case: every segment of the layout has its cursor.
        if known is not None and known.established and not known.deleting:
            return whole
        namespaces = self._topics.namespaces
        policies = effective(await namespaces.policies(topic.namespace), broker=namespaces.broker)
        if known is None and not policies.auto_subscription_creation:
            return options  # it is refused, unless the segment has it
        # The first consumer says where it begins, on all segments; the
        # controller makes the cursors.
        earliest = options.initial_position is InitialPosition.EARLIEST
        await self.subscriptions.ensure(
            topic,
            options.subscription,
            "QUEUE" if options.type is SubscriptionType.SHARED else "STREAM",
            "earliest" if earliest else "latest",
            options.subscription_properties,
        )
        return whole

    async def unsubscribed(self, name: TopicName, subscription: str) -> None:
        """A consumer has deleted its subscription of a segment: if it was the last, of all."""
        record = self.layouts.cached(name.scalable_topic())
        if record is None or record.layout is None or not _has(record, name):
            return
        topic, layout = record.topic, record.layout.layout()
        # Clients unsubscribe segment by segment: while another one has
        # consumers, it is still in use.
        others = await all_done(
            self.host.consumers(segment_topic(topic, each), subscription)
            for each in layout.segments.values()
        )
        if not any(others):
            await self.subscriptions.delete(topic, subscription)

    # --- what operators ask

    def names(
        self, namespace: NamespaceName, filters: Mapping[str, str] | None = None
    ) -> list[str]:
        return self.layouts.names(namespace, filters)

    def policies(self, namespace: Policies) -> TopicPolicies:
        """What holds at present for the scalable topics of a namespace with these policies."""
        in_force = self.retention_shares.in_force
        broker = self._topics.namespaces.broker
        return effective(namespace, None, broker, is_segment=True, segment_retention=in_force)

    async def get(self, topic: TopicName) -> ScalableRecord:
        record = await self.layouts.read(topic)
        if record is None or record.layout is None:
            raise TopicNotFound(f"{topic} does not exist")
        return record

    async def create(
        self, topic: TopicName, segments: int = 1, properties: Mapping[str, str] | None = None
    ) -> None:
        """A new topic; Conflict if there is one of that name, scalable or regular."""
        _check_scalable(topic)
        self._check_count(segments)
        self._topics.publish_gate.check()
        await self._topics.namespaces.policies(topic.namespace)  # TopicNotFound if there is none
        if "/" not in topic.local_name:  # else no regular topic can have the name
            regular = TopicName(Domain.PERSISTENT, topic.namespace, topic.local_name)
            if await self._topics.exists(regular):
                raise Conflict(f"{regular} exists", hint="migrate it, or choose another name")
        wanted = changes.begin_create(
            topic,
            segments,
            now_ms=self._clock.now_ms(),
            bucket_budget=self._limits.scalable_entry_bucket_budget,
            properties=properties,
        )
        # The intent; whichever broker leads the topic's slot makes the segments.
        await self.store.create(wanted)
        await self._finished(topic, wanted)

    async def split(
        self,
        topic: TopicName,
        segment_id: int,
        *,
        after: int | None = None,
        by_load: bool = False,
    ) -> SegmentLayout:
        """Split a segment in the middle, behind a point, or where the load divides best."""
        # Sampled before the intent is stored, which fixes the point: a repeated
        # step splits at the same one.
        if by_load and after is None:
            segment = changes.layout_of(await self.get(topic)).segment(segment_id)
            name = segment_topic(topic, segment)
            after = split_point(segment, await self.host.key_samples(name, KEY_SAMPLES))
            if after is None:
                raise NotAllowed(f"{name}: one key has nearly all of the load")
        return await self._change(
            topic,
            lambda record: changes.begin_split(
                record,
                segment_id,
                now_ms=self._clock.now_ms(),
                segments_max=self._limits.scalable_total_segments_max,
                after=after,
            ),
        )

    async def merge(self, topic: TopicName, segment_ids: Iterable[int]) -> SegmentLayout:
        """Merge two or more adjacent segments."""
        ids = tuple(segment_ids)
        return await self._change(
            topic,
            lambda record: changes.begin_merge(
                record,
                ids,
                now_ms=self._clock.now_ms(),
                segments_max=self._limits.scalable_total_segments_max,
            ),
        )

    async def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic with all its segments; Conflict while it is used unless `force`."""
        record = await self.get(topic)
        # For the operator's sake: clients that come after this look lose the topic all the same.
        if not force:
            names = [
                segment_topic(topic, each) for each in changes.layout_of(record).segments.values()
            ]
            used = await all_done(self.host.use(name) for name in names)
            if any(each.producers or each.consumers for each in used):
                raise Conflict(
                    f"{topic} has producers or consumers", hint="close them first, or use force"
                )
        await self._begin(topic, lambda each: changes.begin_delete(each, force=force))
        await self._until(topic, lambda each: each is None)

    async def delete_segment(
        self, topic: TopicName, segment_id: int, *, force: bool = False
    ) -> None:
        """Delete one of the oldest sealed segments; Conflict while somebody needs it.

        With `force` whoever needs it loses what is left in it.
        """
        while True:
            record = await self._after(topic, lambda each: each.change is None)
            layout = changes.layout_of(record)
            layout.prune([segment_id])  # InvalidLayout if it is active, or its parents are there
            segment = layout.segment(segment_id)
            reason = None if force else await self._why_needed(topic, segment)
            if reason is not None:
                raise Conflict(
                    f"segment {segment.descriptor} of {topic}: {reason}",
                    hint="wait until nobody needs it, or use force: what is left in it is lost",
                )
            # What was judged must be what is pruned.
            pruned = partial(changes.pruned_from, judged=record, segment_ids=[segment_id])
            try:
                await self.store.change_topic(topic, pruned)
            except Conflict:
                continue
            break
        SCALABLE_PRUNED_SEGMENTS.inc()
        name = str(segment_topic(topic, segment))
        await self._until(topic, lambda each: each is None or name not in each.garbage)

    async def _why_needed(self, topic: TopicName, segment: Segment) -> str | None:
        """Tell who needs a segment, by what is stored: a controller's view may be late."""
        drained = await self.store.all(topic, "drained", DrainedRecord)
        done = await self.store.all(topic, "done", DrainedRecord)
        groups = await self.store.all(topic, "group", GroupRecord)
        number = segment.segment_id
        return await why_needed(
            topic,
            segment,
            self.host,
            await self.store.all(topic, "sub", SubscriptionRecord),
            lambda name: {each.segment_id for each in drained if each.group == name},
            [
                each.name
                for each in groups
                if each.kind == "CHECKPOINT" and number not in read_segments(each, done)
            ],
        )

    async def migrate(self, name: TopicName, *, force: bool = False) -> None:
        """Make a regular topic scalable; what it holds, and its subscriptions, stay readable."""
        if name.domain is Domain.SEGMENT or name.partition is not None:
            raise InvalidTopicName(f"{name} is not a whole topic")
        topic = name.scalable_topic()
        present = await self.layouts.read(topic)
        if present is None:
            regular = await self._regular_names(name, create=False)
            self._check_count(2 * len(regular))  # each partition, and a segment for each
            if not force:
                # v4 clients would go on with partitions that take no more messages.
                used = await all_done(self.host.use(each) for each in regular)
                if any(each.unmanaged for each in used):
                    raise Conflict(
                        f"{name} has clients that would not follow it",
                        hint="close them or move them to the v5 client first, or use force",
                    )
            present = changes.begin_migrate(
                topic,
                regular,
                now_ms=self._clock.now_ms(),
                bucket_budget=self._limits.scalable_entry_bucket_budget,
                force=force,
            )
            await self.store.create(present)
        # A migration that is under way, begun by whomever, is waited for: to ask again is safe.
        elif present.change is None or present.change.kind != "migrate":
            raise Conflict(f"{topic} exists already")
        await self._finished(topic, present)

    async def set_auto_scale(self, topic: TopicName, override: AutoScaleOverride | None) -> None:
        """What a topic overrides of the auto-scale policy; None: nothing."""
        if override is not None:
            check_override(override)
        await self.get(topic)
        await self.store.change_topic(topic, lambda record: replace(record, auto_scale=override))

    async def set_lifecycle(self, topic: TopicName, override: LifecycleOverride | None) -> None:
        """How long a topic keeps lost consumers and sealed segments; None: as its namespace."""
        await self.get(topic)
        await self.store.change_topic(topic, lambda record: replace(record, lifecycle=override))

    async def lifecycle(self, record: ScalableRecord) -> Lifecycle:
        """What holds for a topic."""
        policies = await self._topics.namespaces.policies(record.topic.namespace)
        given = policies.scalable_topic_lifecycle_policy
        namespace = None if given is None else read_lifecycle(given)
        return resolve_lifecycle(broker_lifecycle(self._limits), namespace, record.lifecycle)

    async def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        await self.get(topic)
        given = dict(properties)
        await self.store.change_topic(topic, lambda record: replace(record, properties=given))

    def _check_count(self, segments: int) -> None:
        limit = self._limits.scalable_total_segments_max
        if segments > limit:
            raise NotAllowed(f"{segments} segments; a topic may have {limit}")

    # --- backlog quotas

    async def enforce_quotas(self) -> None:
        """Look at the backlogs of all topics that are led here now."""
        pace = SlicePace()
        for controller in self.controllers.running():
            await pace.after(_TOPIC_ITEMS)
            record = self.layouts.cached(controller.topic)
            # One that is being created, deleted or changed is looked at another time.
            if record is None or record.layout is None or record.change is not None:
                continue
            await controller.enforce_quotas(record.layout.layout())

    def backlog(self, topic: TopicName, policies: TopicPolicies) -> BacklogShown:
        """What the last look at a topic found, if it is led here and has a quota."""
        controller = self.controllers.controller(topic)
        return UNKNOWN if controller is None else controller.backlog.shown(policies)

    # --- subscriptions

    async def create_subscription(
        self,
        topic: TopicName,
        name: str,
        kind: SubscriptionKind,
        properties: Mapping[str, str] | None = None,
        position: StartPosition = "earliest",
    ) -> None:
        """A subscription that begins at one end of the topic; it may exist already."""
        await self.get(topic)
        asked_isolation(properties or {})
        await self.subscriptions.ensure(topic, name, kind, position, properties)

    async def delete_subscription(self, topic: TopicName, name: str) -> bool:
        """False: there was none."""
        await self.get(topic)
        return await self.subscriptions.delete(topic, name)

    async def seek_subscription(self, topic: TopicName, name: str, ms: int) -> None:
        """Move a subscription to a time, on every segment."""
        layout = await self._layout_with(topic, name)
        await all_done(self._seek(topic, each, name, ms) for each in layout.segments.values())

    async def _seek(self, topic: TopicName, segment: Segment, name: str, ms: int) -> None:
        target = segment_topic(topic, segment)
        # From now on its children wait; should it turn out to be drained all the same, its broker
        # says so again.
        key = drained_key(topic, segment.segment_id, name)
        await self.store.change(key, DrainedRecord, lambda _: None)
        # All of it is older than that time, or all of it is younger (of a migrated partition the
        # record only says when it was migrated); else its messages tell.
        if not segment.is_active and segment.sealed_at_ms < ms:
            await self.host.skip_all(target, name)
        elif segment.created_at_ms >= ms and segment.legacy_topic_name is None:
            await self.host.seek_earliest(target, name)
        else:
            await self.host.seek(target, name, ms)

    async def skip_all(self, topic: TopicName, name: str) -> None:
        """Drop the backlog of a subscription."""
        layout = await self._layout_with(topic, name)
        segments = layout.segments.values()
        await all_done(self.host.skip_all(segment_topic(topic, each), name) for each in segments)

    async def expire(self, topic: TopicName, name: str, seconds: int) -> None:
        """Leave out what is older than so many seconds, on every segment."""
        layout = await self._layout_with(topic, name)
        names = [segment_topic(topic, each) for each in layout.segments.values()]
        await all_done(self.host.expire(each, name, seconds) for each in names)

    async def _layout_with(self, topic: TopicName, subscription: str) -> SegmentLayout:
        record = await self.get(topic)
        known = await self.subscriptions.get(topic, subscription)
        if known is None or known.deleting:
            raise TopicNotFound(f"{topic} has no subscription {subscription!r}")
        return changes.layout_of(record)

    # --- waiting for controllers

    async def _change(
        self, topic: TopicName, begin: Callable[[ScalableRecord], ScalableRecord]
    ) -> SegmentLayout:
        begun = await self._begin(topic, begin)
        await self._finished(topic, begun)
        record = await self.get(topic)
        return changes.layout_of(record)

    async def _begin(
        self, topic: TopicName, begin: Callable[[ScalableRecord], ScalableRecord]
    ) -> ScalableRecord:
        """Store the intent, as soon as no other change is under way."""
        while True:
            # `begin` judges the record of the moment at which it is stored,
            # not this one (invariant 2).
            record = await self._after(topic, lambda each: each.change is None)
            if record.layout is None:
                raise TopicNotFound(f"{topic} does not exist")
            try:
                begun = await self.store.change_topic(topic, begin)
            except Conflict:
                continue  # one came between
            if begun is None:
                raise TopicNotFound(f"{topic} does not exist")
            return begun

    async def _finished(self, topic: TopicName, begun: ScalableRecord) -> None:
        """Wait until the change of this record is done; an error if it was undone."""
        change = begun.change
        assert change is not None, "its caller began one"
        record = await self._until(topic, lambda each: each is None or _is_past(each, change))
        # Past it means done, undone, or overtaken by a later change: the epoch tells.
        if record is None or not _is_committed(record, change):
            reason = "" if record is None else record.last_failure
            raise ServiceNotReady(f"{topic}: the {change.kind} was undone: {reason or 'unknown'}")

    async def _after(
        self, topic: TopicName, holds: Callable[[ScalableRecord], bool]
    ) -> ScalableRecord:
        record = await self._until(topic, lambda each: each is None or holds(each))
        if record is None:
            raise TopicNotFound(f"{topic} does not exist")
        return record

    async def _until(
        self, topic: TopicName, holds: Callable[[ScalableRecord | None], bool]
    ) -> ScalableRecord | None:
        """The stored record once it is as wanted, and this broker's own view no older."""
        changed = self.layouts.changed(topic)
        deadline = self._clock.monotonic() + self._limits.scalable_controller_wait_seconds
        while True:
            # Before the read: a change behind it ends the wait at once.
            seen = changed.version
            record = await self.layouts.read(topic)
            # The cache too (invariant 1): who is answered looks the topic up here next.
            if holds(record) and holds(self.layouts.cached(topic)):
                return record
            if self._clock.monotonic() >= deadline:
                raise ServiceNotReady(
                    f"{topic}: not done within {self._limits.scalable_controller_wait_seconds:g} s",
                    hint="it goes on; look at the layout, and try again if need be",
                )
            await changed.past_within(seen, _LOOK_SECONDS)


def _check_scalable(topic: TopicName) -> None:
    if topic.domain is not Domain.TOPIC:
        raise InvalidTopicName(f"{topic} is not a scalable topic", hint="use topic://")
    if topic.local_name != topic.local_name.strip():
        raise InvalidTopicName(f"{str(topic)!r} begins or ends with a blank")


def _shows(record: ScalableRecord | None, segment_id: int) -> bool:
    return (
        record is not None
        and record.layout is not None
        and any(each.segment_id == segment_id for each in record.layout.segments)
    )


def _has(record: ScalableRecord, name: TopicName) -> bool:
    """Whether a topic holds one of the segments of a record's layout."""
    assert record.layout is not None, "its caller has checked"
    if name.descriptor is not None:
        return _shows(record, name.descriptor.segment_id)
    return any(each.legacy_topic_name == str(name) for each in record.layout.segments)


def _is_past(record: ScalableRecord, change: LayoutChange) -> bool:
    return record.change is None or record.change.after != change.after


def _is_committed(record: ScalableRecord, change: LayoutChange) -> bool:
    """Whether the segments that a change was to make are, or were, in the layout."""
    if record.layout is None or change.after is None:
        return False
    # Epochs only rise, and an undone change leaves the one of before.
    return record.layout.epoch >= change.after.epoch
