"""Consumer groups of regular topics: those that v5 clients read before they are migrated.

Owns: `RegularGroups`. To a group the partitions of a regular topic are segments with the ids 0 to
n - 1 (`changes.synthetic_layout`), which are also the ids of its legacy segments after a migration.
The record of such a group stands where that of a scalable topic's would, and says NEVER as its
layout epoch. No record of the topic is there, so no controller is: every broker that had a session
of such a topic keeps all groups of it in order.

Invariants:
1. A topic is followed here from when a session was stored until no group is left, whichever broker
   holds the others; so what one broker leaves when it dies, another one of them ends.
2. From the commit of a migration the controller goes on with the same records, which it changes at
   once: by that a topic is looked at here once more, and no longer followed. What is stored late
   gives nobody anything, for NEVER is less than the epoch of any layout.
3. Every look reads how many partitions there are, and everyone who attaches causes one: partitions
   that were added are given out at the next attach at the latest.
4. When the topic is gone its groups go, and their sessions find out by that.

A group all of whose brokers ended before its members expired stays as it is until the next consumer
attaches to the topic, or the topic is migrated.

Relies on: `LiveBrokers` being started before and stopped after this service.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from magnetar.errors import MagnetarError, StoreClosed, TopicNotFound, Unavailable
from magnetar.model.names import Domain, TopicName
from magnetar.model.segments import NEVER, SegmentLayout
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.scalable.groups.group_balance import GroupBalance
from magnetar.scalable.layout.changes import synthetic_layout
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import GroupRecord, ScalableRecord
from magnetar.scalable.state import TopicState
from magnetar.scalable.store import ScalableStore

# Short, because a consumer that attaches waits for it; the deadline is its own.
_PAUSE_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 0.5
_LOG: Final = logger(__name__)


class RegularTopics(Protocol):
    """The regular topics that there are; `Topics` is one."""

    async def partitions(self, name: TopicName, *, create: bool = True) -> int:
        """How many partitions a topic has, 0 for none; TopicNotFound."""


def is_regular(record: ScalableRecord | None) -> bool:
    """Whether a topic with such a record, if it is there at all, is (still) a regular one."""
    # Regular until the commit of its migration: up to then its partitions take messages.
    if record is None:
        return True
    change = record.change
    return record.layout is None and change is not None and change.kind == "migrate"


def partition_names(name: TopicName, partitions: int) -> list[TopicName]:
    """The topics that hold the messages of a regular topic: itself, if it has no partitions."""
    regular = TopicName(Domain.PERSISTENT, name.namespace, name.local_name)
    if not partitions:
        return [regular]
    return [regular.with_partition(number) for number in range(partitions)]


class RegularGroups(Service):
    """The groups of regular topics that have, or had, sessions at this broker."""

    def __init__(
        self,
        topics: RegularTopics,
        store: ScalableStore,
        live_brokers: LiveBrokers,
        clock: Clock,
        limits: Limits,
    ) -> None:
        super().__init__("groups of regular topics", stop_seconds=limits.close_seconds)
        self._topics = topics
        self._store = store
        self._live_brokers = live_brokers
        self._clock = clock
        self._grace_seconds = limits.scalable_grace_period_seconds
        self._followed: dict[TopicName, _RegularTopic] = {}

    async def _start(self) -> None:
        self.spawn(self._follow_brokers(), "brokers")

    async def layout(self, topic: TopicName) -> SegmentLayout:
        """The partitions of a regular topic as segments; TopicNotFound if there is none.

        While the store cannot be reached it waits: the deadline is the caller's.
        """
        if "/" in topic.local_name:  # no regular topic can have the name
            raise TopicNotFound(f"{topic} does not exist")
        (whole,) = partition_names(topic, 0)
        while True:
            try:
                count = await self._topics.partitions(whole, create=False)
            except Unavailable:
                await self._clock.sleep(_PAUSE_SECONDS)
                continue
            return synthetic_layout(partition_names(topic, count))

    def look_after(self, topic: TopicName) -> None:
        """Keep the groups of a regular topic in order; one of them was stored before."""
        followed = self._followed.get(topic)
        # One that has just found nothing to do is not woken any more: a new one begins.
        if followed is not None and not followed.is_over:
            followed.wake.advance()
        elif not self.stopping:
            followed = self._followed[topic] = self._new(topic)
            self.spawn(self._run(followed), f"groups of {topic}")

    def looks_after(self, topic: TopicName) -> bool:
        """Whether it was there, and a regular topic, when last looked at."""
        followed = self._followed.get(topic)
        return followed is not None and not followed.is_over

    def _new(self, topic: TopicName) -> _RegularTopic:
        return _RegularTopic(
            topic, self, self._store, self._live_brokers, self._clock, self._grace_seconds
        )

    async def _run(self, followed: _RegularTopic) -> None:
        await followed.run()
        # A new one may stand here by now, begun after this one was over.
        if self._followed.get(followed.topic) is followed:
            del self._followed[followed.topic]

    async def _follow_brokers(self) -> None:
        seen = 0
        while True:
            seen = await self._live_brokers.changes.past(seen)
            for followed in self._followed.values():
                followed.wake.advance()


class _RegularTopic:
    """One topic, from when it has a group until it has none or is migrated."""

    def __init__(
        self,
        topic: TopicName,
        regular: RegularGroups,
        store: ScalableStore,
        live_brokers: LiveBrokers,
        clock: Clock,
        grace_seconds: float,
    ) -> None:
        self.topic = topic
        self.wake = Signal()
        """Advanced whenever something may have moved."""
        self.is_over = False
        """There was nothing to do, and whoever asks from now on needs another one."""
        self._regular = regular
        self._store = store
        self._clock = clock
        self._state = TopicState(store.metadata, topic, self.wake)
        self._groups = GroupBalance(
            topic, self._state, store, live_brokers, clock, grace_seconds=grace_seconds
        )

    async def run(self) -> None:
        """Until there is nothing to do."""
        # The view must run beside the look: what it shows is what gets balanced.
        async with asyncio.TaskGroup() as tasks:
            state = tasks.create_task(self._state.run())
            try:
                await self._look_after_groups()
            except StoreClosed:
                return
            finally:
                self.is_over = True  # with no await since that was found out
                state.cancel()

    async def _look_after_groups(self) -> None:
        while True:
            seen = self.wake.version
            try:
                is_over = await self._look()
            except StoreClosed:
                raise
            except MagnetarError as error:
                _LOG.warning("groups-not-in-order", topic=str(self.topic), error=str(error))
                await self._clock.sleep(_RETRY_SECONDS)
                continue
            # Not if there was news since the look: a session that was stored
            # meanwhile counts on this.
            if is_over and self.wake.version == seen:
                return
            await self._until_news(seen)

    async def _look(self) -> bool:
        """Whether there was nothing to do, by what is stored."""
        layout = await self._layout()
        # In this order: a topic that was migrated has its record for longer than its partitions.
        if not is_regular(await self._store.read(self.topic)):
            return True
        # Three cases: the topic is gone, and its groups with it (invariant 4); it is
        # there, and is balanced as soon as the view is whole; else only the store is
        # asked whether a group is left.
        if layout is None:
            await self._remove_groups()
        elif self._state.is_loaded:
            await self._groups.balance(layout, NEVER)
        return not await self._store.all(self.topic, "group", GroupRecord)

    async def _layout(self) -> SegmentLayout | None:
        try:
            return await self._regular.layout(self.topic)
        except TopicNotFound:
            return None

    async def _remove_groups(self) -> None:
        for group in await self._store.all(self.topic, "group", GroupRecord):
            await self._groups.remove(group)

    async def _until_news(self, seen: int) -> None:
        await self.wake.past_within(seen, self._groups.grace_left())
