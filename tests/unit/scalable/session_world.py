"""Brokers with consumer sessions on one metadata store, and a controller of one topic.

The topic is scalable, or a regular one that the world has in `partitions` and nowhere else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from msgspec.structs import replace

from magnetar.errors import TopicNotFound
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.scalable.groups.assignment import MemberView, assign
from magnetar.scalable.groups.group_records import assigned, expired, lost_brokers
from magnetar.scalable.groups.regular_groups import RegularGroups
from magnetar.scalable.groups.sessions import ConsumerSession, ConsumerSessions
from magnetar.scalable.layout.layouts import Layouts
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import (
    GroupKind,
    GroupRecord,
    LayoutRecord,
    ScalableRecord,
    group_key,
    topic_key,
)
from magnetar.scalable.store import ScalableStore

TOPIC = TopicName.parse("topic://public/default/orders")
ATTACH_S = 5.0
SETTLE_S = 2.0
SESSION_S = 6.0
GRACE_S = 60.0
_TICK_S = 0.5
_LIMITS = Limits().override({"scalable_grace_period_seconds": GRACE_S})

Result = TypeVar("Result")


class RegularTopics:
    """Regular topics, by how many partitions they have."""

    def __init__(self) -> None:
        self.counts: dict[TopicName, int] = {}

    async def partitions(self, name: TopicName, *, create: bool = True) -> int:
        assert not create
        if name not in self.counts:
            raise TopicNotFound(f"{name} does not exist")
        return self.counts[name]


class Broker:
    """One broker process: everything it has for sessions, on a store object of its own."""

    def __init__(
        self, server: MemoryMetadata, regular: RegularTopics, clock: LoopClock, name: str
    ) -> None:
        self.name = name
        self.metadata: MemoryStore = server.connect(SESSION_S)
        self.store = ScalableStore(self.metadata)
        self.layouts = Layouts(self.store, stop_seconds=5.0)
        self.live_brokers = LiveBrokers(self.metadata, name, start_seconds=5.0, stop_seconds=5.0)
        self.regular = RegularGroups(regular, self.store, self.live_brokers, clock, _LIMITS)
        self.sessions = ConsumerSessions(
            self.store,
            self.layouts,
            self.regular,
            name,
            clock,
            attach_seconds=ATTACH_S,
            settle_seconds=SETTLE_S,
            stop_seconds=5.0,
            members_max=100,
        )

    @property
    def open_watches(self) -> int:
        return len(self.metadata._watchers)

    async def attach(
        self,
        name: str,
        connection: str = "1",
        *,
        group: str = "g",
        kind: GroupKind = "STREAM",
        shares: bool = False,
    ) -> ConsumerSession:
        return await self.sessions.attach(TOPIC, group, name, kind, connection, shares)


class World:
    """A store server, brokers, and (unless it is held) a controller with a tick."""

    def __init__(self, *, seed: int | None = None, watch_limit: int = 1000) -> None:
        self.clock = LoopClock(1_000_000)
        choose = random.Random(seed)

        async def delay() -> None:
            await asyncio.sleep(choose.random() * 0.02)

        self.server = MemoryMetadata(
            self.clock, delay=None if seed is None else delay, watch_limit=watch_limit
        )
        self.regular = RegularTopics()
        self.metadata = self.server.connect()
        self.store = ScalableStore(self.metadata)
        self.live_brokers: LiveBrokers | None = None
        self.drained: set[int] = set()
        self.controlled = True

    @asynccontextmanager
    async def brokers(self, *names: str, segments: int = 1) -> AsyncIterator[list[Broker]]:
        """With no `segments` there is no scalable topic."""
        if segments:
            layout = SegmentLayout.create(segments, now_ms=0, bucket_budget=4)
            await self.store.create(ScalableRecord(str(TOPIC), 0, layout=LayoutRecord.of(layout)))
        async with AsyncExitStack() as stack:
            self.live_brokers = LiveBrokers(
                self.metadata, "controller", start_seconds=5.0, stop_seconds=5.0
            )
            await stack.enter_async_context(self.live_brokers)
            brokers = [Broker(self.server, self.regular, self.clock, name) for name in names]
            for broker in brokers:
                for part in (broker.layouts, broker.live_brokers, broker.regular, broker.sessions):
                    await stack.enter_async_context(part)
            controller = asyncio.create_task(self._control())
            try:
                yield brokers
            finally:
                controller.cancel()
                await asyncio.wait({controller})

    async def group(self, name: str = "g", kind: GroupKind = "STREAM") -> GroupRecord | None:
        return await self.store.get(group_key(TOPIC, kind, name), GroupRecord)

    async def members(self, name: str = "g", kind: GroupKind = "STREAM") -> list[str]:
        group = await self.group(name, kind)
        return [] if group is None else [member.name for member in group.members]

    async def change_layout(self, change: Callable[[SegmentLayout], SegmentLayout]) -> None:
        def changed(record: ScalableRecord) -> ScalableRecord:
            assert record.layout is not None
            return replace(record, layout=LayoutRecord.of(change(record.layout.layout())))

        await self.store.change_topic(TOPIC, changed)

    async def delete_topic(self) -> None:
        await self.store.forget(TOPIC)
        await self.store.change(topic_key(TOPIC), ScalableRecord, lambda _: None)

    async def _control(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self.controlled:
                await self._assign_all()

    async def _assign_all(self) -> None:
        record = await self.store.read(TOPIC)
        if record is None or record.layout is None:
            return
        layout = record.layout.layout()
        for group in await self.store.all(TOPIC, "group", GroupRecord):
            await self.store.change(
                group_key(TOPIC, group.kind, group.name),
                GroupRecord,
                lambda present: self._balanced(present, layout),
            )

    def _balanced(self, group: GroupRecord | None, layout: SegmentLayout) -> GroupRecord | None:
        if group is None:
            return None
        assert self.live_brokers is not None
        now_ms = self.clock.now_ms()
        kept = lost_brokers(group, self.live_brokers.ids, now_ms)
        kept = expired(kept, now_ms, int(GRACE_S * 1000))
        if not kept.members:
            return None
        members = [MemberView(each.name, each.shares) for each in kept.members]
        owners = assign(layout, kept.kind, members, self.drained, kept.owners)
        return assigned(kept, layout.epoch, owners)


def segment_ids(session: ConsumerSession) -> list[int]:
    return [each.segment.segment_id for each in session.assignment.segments]


async def until_segments(session: ConsumerSession, *ids: int) -> None:
    async with asyncio.timeout(300):
        while segment_ids(session) != list(ids):
            await session.changes.past(session.changes.version)
