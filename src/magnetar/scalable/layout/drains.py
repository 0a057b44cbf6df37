"""Telling controllers which sealed segments a subscription has finished.

Owns: `Drains`: for each sealed segment that this broker has loaded, a coroutine that waits for
acknowledgements and writes, or takes back, the marks that controllers go by.

Invariants:
1. A mark of a subscription is written only when everything is acknowledged and that is durable:
   after a crash nothing of the segment can come again, so its children may be read.
2. A seek back takes the mark away.
3. A mark of a checkpoint group is written when a member's reader has taken everything. It holds
   for that member alone, because only its checkpoint knows where it stands.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import MagnetarError
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import SCALABLE_DRAINED_SEGMENTS
from magnetar.runtime.service import Service
from magnetar.scalable.layout.layouts import Layouts
from magnetar.scalable.records import (
    DrainedRecord,
    GroupRecord,
    done_key,
    drained_key,
    sealed_topics,
)
from magnetar.scalable.store import ScalableStore

_RETRY_SECONDS: Final = 1.0
_LOG: Final = logger(__name__)


class Drains(Service):
    """The sealed segments of one broker."""

    def __init__(
        self,
        topics: Topics,
        layouts: Layouts,
        store: ScalableStore,
        clock: Clock,
        *,
        stop_seconds: float,
    ) -> None:
        super().__init__("drains", stop_seconds=stop_seconds)
        self._topics = topics
        self._layouts = layouts
        self._store = store
        self._clock = clock
        # One task for each loaded sealed segment; those of unloaded ones end by themselves.
        self._watched: dict[Topic, asyncio.Task[None]] = {}

    async def _start(self) -> None:
        self.spawn(self._follow_topics(), "topics")
        self.spawn(self._follow_layouts(), "layouts")

    # --- which segments

    async def _follow_topics(self) -> None:
        seen, loads = -1, 0
        while True:
            # A sealed segment is found when it is loaded, or, loaded already,
            # when its layout says sealed.
            seen = await self._topics.loaded_changed.past(seen)
            loads, loaded = self._topics.loaded_since(loads)
            for topic in loaded:
                self._look_at(topic)

    async def _follow_layouts(self) -> None:
        seen = 0
        while True:
            since, seen = seen, await self._layouts.news.past(seen)
            for key in list(self._layouts.changed_since(since)):
                record = self._layouts.records.get(key)
                for name in () if record is None else sealed_topics(record):
                    topic = self._topics.loaded.get(name)
                    if topic is not None:
                        self._look_at(topic)

    def _look_at(self, topic: LoadedTopic) -> None:
        """Watch it if it is a sealed segment."""
        if self.stopping or not isinstance(topic, Topic):
            return
        if topic in self._watched and not self._watched[topic].done():
            return
        record = self._layouts.cached(topic.name.scalable_topic())
        number = None if record is None else sealed_topics(record).get(topic.name)
        if number is None:
            return
        # Swept when one comes, so that the table does not grow with the history of the broker.
        for gone in [each for each, task in self._watched.items() if task.done()]:
            del self._watched[gone]
        self._watched[topic] = self.spawn(self._watch(topic, number), str(topic.name))

    # --- one segment

    async def _watch(self, topic: Topic, segment_id: int) -> None:
        """Until the topic is unloaded."""
        while not topic.closing and topic.lost is None:
            try:
                # The version before the look: an acknowledgement during it makes
                # the next look immediate.
                seen = topic.ends.version
                for subscription in list(topic.subscriptions.values()):
                    # No controller waits for the position of a segment's compaction.
                    if subscription.name != COMPACTION:
                        await self._judge(topic, segment_id, subscription)
                await topic.ends.past(seen)
            except MagnetarError as error:
                _LOG.warning("drain-not-marked", topic=str(topic.name), error=str(error))
                await self._clock.sleep(_RETRY_SECONDS)

    async def _judge(self, topic: Topic, segment_id: int, subscription: Subscription) -> None:
        scalable = topic.name.scalable_topic()
        # Readers and checkpoint consumers have no durable cursor: how far
        # they are is in their client.
        if not subscription.durable:
            await self._judge_readers(topic, segment_id, subscription)
            return
        drained = subscription.backlog() == 0
        # Invariant 1: acknowledged in memory is not enough, a crash would bring messages back
        # behind those of the children.
        if drained:
            await subscription.ack_durable()
            drained = subscription.backlog() == 0  # a seek may have come between
        wanted = DrainedRecord(segment_id, subscription.name) if drained else None
        key = drained_key(scalable, segment_id, subscription.name)
        # Read first: nearly always the mark is as it should be, and nothing is written.
        if await self._store.get(key, DrainedRecord) != wanted:
            if not drained:
                # A former owner must not take back what the present one has marked.
                await self._topics.check_owned(topic.name)
            await self._store.change(key, DrainedRecord, lambda _: wanted)
            SCALABLE_DRAINED_SEGMENTS.inc(1 if drained else 0)

    async def _judge_readers(
        self, topic: Topic, segment_id: int, subscription: Subscription
    ) -> None:
        ending = f"-seg-{segment_id}"
        # By name: a checkpoint consumer calls its reader of a segment after itself and the segment.
        for reader in list(subscription.consumers):
            if reader.name.endswith(ending) and await _has_all(topic, subscription, reader):
                await self._mark_read(topic, segment_id, reader.name.removesuffix(ending))

    async def _mark_read(self, topic: Topic, segment_id: int, member: str) -> None:
        scalable = topic.name.scalable_topic()
        for group in await self._groups_of(scalable, member):
            mark = DrainedRecord(segment_id, group, member)
            await self._store.change(
                done_key(scalable, segment_id, group), DrainedRecord, partial(_replaced, mark)
            )

    async def _groups_of(self, scalable: TopicName, member: str) -> list[str]:
        """The checkpoint groups in which a consumer is."""
        return [
            group.name
            for group in await self._store.all(scalable, "group", GroupRecord)
            if group.kind == "CHECKPOINT" and any(each.name == member for each in group.members)
        ]


async def _has_all(topic: Topic, subscription: Subscription, reader: Consumer) -> bool:
    """Whether nothing of a sealed segment is left for a reader.

    One that begins at the last message gets it again, and drops it without a word.
    """
    if subscription.backlog() == 0:
        return True
    start = reader.options.start
    # More than one message is left, or it did not begin at one: it has really not read it all.
    if start is None or subscription.backlog() > 1:
        return False
    last = await topic.last_message(subscription.isolation)
    begins_at_end = start.position == last.position
    return begins_at_end and (start.batch_index < 0 or start.batch_index >= last.batch_index)


def _replaced(mark: DrainedRecord, _: DrainedRecord | None) -> DrainedRecord:
    return mark
