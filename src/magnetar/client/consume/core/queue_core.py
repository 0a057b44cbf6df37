"""The inside of a queue consumer: settling message by message, letters, and moving.

Owns: `QueueCore`. `QueueConsumer`, which applications have, stands on it.

Invariants:
1. It is subscribed, Shared, to every segment of its topics, sealed ones too; with retries, to the
   retry topic as well.
2. A message is settled in the segment that it came from; one that is named by its id, in the
   segment that the id names, if that is consumed here.
3. What another consumer handed out is refused, not acknowledged by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.all_segments import AllSegmentsCore
from magnetar.client.consume.core.consumer_core import not_consumed
from magnetar.client.consume.core.dead_letter import DeadLetters, MakeProducer, letters_of
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged, abandoned
from magnetar.client.consume.segment.queue_segment import QueueSegment
from magnetar.client.consume.segment.seeking import SeekTarget, one_message, seek_fields
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.client.message.message_ids import plain_id
from magnetar.client.schema.info import Schema
from magnetar.errors import ConsumerNotFound, InvalidSetting, InvalidValue, NotAllowed
from magnetar.model.ids import MessageId, ScalableMessageId
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class QueueCore(AllSegmentsCore[T]):
    """One queue consumer, over all its segments."""

    def __init__(
        self,
        connections: Connections,
        topics: Iterable[TopicName],
        *,
        subscription: str,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
        make_producer: MakeProducer,
        create_if_missing: bool = True,
    ) -> None:
        topics = tuple(topics)
        super().__init__(
            connections,
            topics,
            subscription=subscription,
            schema=schema,
            settings=settings,
            name=name,
            create_if_missing=create_if_missing,
        )
        # What is not for the application any more: put aside for good, or until later.
        self._dead_letters = (
            None
            if settings.dead_letter is None
            else DeadLetters(settings.dead_letter, subscription, make_producer)
        )
        self._retry_topic: TopicName | None = None
        if self._dead_letters is not None and settings.retries:
            self._retry_topic = _retry_topic(settings, topics, subscription)
            self._dead_letters.retry_topic = str(self._retry_topic)

    # --- settling

    def ack(
        self, message: Message[Any] | AnyMessageId, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge a message, or one whose id was stored."""
        if self._closing is not None:
            self.check_open()
        if isinstance(message, Message):
            segment = message._source
            # One that was received here, as nearly always; the segment is asked without detours.
            if not isinstance(segment, QueueSegment) or segment.parent is not self:
                raise _not_received(message)
            if txn is not None:
                segment.refuse_stale(message)
                segment.acknowledging(message)
                return segment.ack_in(txn, message._raw_id, message._chunk_ids)
            # Since it was received there was a seek: the broker delivers what it decides anew.
            if message._generation != segment.generation:
                return NOTHING_TO_DO
            segment.acknowledging(message)
            index, size = message._batch_index, message._batch_size
            return segment.ack_at(message._position, index, size, message._chunk_ids)
        found, message_id = self._segment_and_id(message)
        if found is None:
            return NOTHING_TO_DO
        found.acknowledging(message)
        return found.ack(message_id) if txn is None else found.ack_in(txn, message_id)

    def ack_rows(self, batch: pa.RecordBatch, txn: AckTransaction | None) -> Acknowledged:
        """Acknowledge the messages that a record batch has rows of."""
        self.check_open()
        segments = self._by_topic()
        acked = []
        # An entry at a time: its rows are a bit set, however many they are.
        for entry in arrow.entries_in(batch):
            segment = segments.get((entry.topic, entry.segment_id))
            if not isinstance(segment, QueueSegment):
                acked.append(abandoned(not_consumed(entry.topic)))
            elif txn is None:
                acked.append(segment.ack_rows(entry.position, entry.mask, entry.batch_size))
            else:
                size = entry.batch_size
                acked.append(segment.ack_rows_in(txn, entry.position, entry.mask, size))
        return Acknowledged.all_of(acked)

    def nack(self, message: Message[Any]) -> None:
        """Give a message back, to be delivered again after a while."""
        self.check_open()
        segment = message._source
        if not isinstance(segment, QueueSegment):
            raise _not_received(message)
        segment.giving_back(message)
        segment.nack(message)

    async def reconsume_later(
        self, message: Message[Any], delay: timedelta | float, properties: Mapping[str, str]
    ) -> None:
        """Store a copy that is consumed later, then acknowledge the message."""
        self.check_open()
        segment = self._segment_of(message)
        if self._dead_letters is None or self._retry_topic is None:
            hint = "make it with retries=True and a dead_letter policy"
            raise NotAllowed("this consumer has nowhere to put messages off", hint=hint)
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
        if not 0 <= seconds < float("inf"):
            raise InvalidValue(f"a delay of {delay}")
        # One that is settled, or was delivered anew since, has its other copy already.
        if segment.has(message):
            await self._dead_letters.retry(message, seconds, properties)
            # Only now: if the copy is not stored, the message must come again.
            segment.ack(message._raw_id, message._chunk_ids)

    # --- moving

    async def seek(self, target: SeekTarget) -> None:
        """Move the subscription, in one segment or in all."""
        self.check_open()
        fields = seek_fields(target)
        for segment in self._segments_at(target):
            assert isinstance(segment, QueueSegment), "that is what this consumer makes"
            await segment.seek(**fields)

    def _segments_at(self, target: SeekTarget) -> list[SegmentConsumer]:
        present, message = self._segments.present, one_message(target)
        if message is None:
            return list(present.values())
        # A plain id says nothing of its partition unless its producer or consumer knew it.
        if isinstance(message, MessageId) and message.partition < 0 and len(present) > 1:
            raise InvalidValue(f"{message} names no partition, and {len(present)} are consumed")
        found = present.get(self._key_of(message))
        if found is None:
            raise ConsumerNotFound(f"{message} is of nothing that is consumed here")
        return [found]

    def _segment_of(self, message: Message[Any]) -> QueueSegment:
        segment = message._source
        if not isinstance(segment, QueueSegment) or segment.parent is not self:
            raise _not_received(message)
        return segment

    def _segment_and_id(
        self, message: Message[Any] | AnyMessageId
    ) -> tuple[QueueSegment | None, Any]:
        """The segment of a message; None: it is no more, and so has nothing to acknowledge."""
        if isinstance(message, Message):
            return self._segment_of(message), message._raw_id
        found = self._segments.present.get(self._key_of(message))
        if found is not None:
            assert isinstance(found, QueueSegment), "that is what this consumer makes"
            return found, plain_id(message)
        # Not consumed here: it was deleted, and what was in it with it; or it was never here.
        topic, segment_id = self._key_of(message)
        watch = self._watches.get(topic)
        if watch is None or watch.layout is None or segment_id in watch.layout.segments:
            raise ConsumerNotFound(f"{message} is of no segment that is consumed here")
        return None, plain_id(message)

    def _key_of(self, message_id: AnyMessageId) -> SegmentKey:
        if isinstance(message_id, ScalableMessageId):
            topic = message_id.parent_topic or self._only_topic(message_id)
            return topic, message_id.segment_id
        topic = self._only_topic(message_id)
        # A partition that is consumed by its name is the only segment of its topic.
        is_partition = TopicName.parse(topic).partition is not None
        return topic, 0 if is_partition else max(0, message_id.partition)

    def _only_topic(self, message_id: AnyMessageId) -> str:
        if len(self._watches) != 1:
            raise InvalidValue(f"{message_id} names no topic, and this consumer has several")
        return next(iter(self._watches))

    # --- its parts

    async def _open(self) -> None:
        await super()._open()
        if self._retry_topic is not None:
            # Whatever waits there is for this subscription, however long it has waited.
            await self._add_topic(self._retry_topic, are_new=True)
        if self._dead_letters is not None:
            self._segments.spawn(self._dead_letters.run(), "dead letters")

    async def _close_sources(self) -> None:
        # The letters' producers last: segments hand in what they have until they are over.
        try:
            await super()._close_sources()
        finally:
            if self._dead_letters is not None:
                await self._dead_letters.close()

    def _subscribe_fields(self) -> Mapping[str, Any]:
        return {"subType": int(SubscriptionType.SHARED)}

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        return QueueSegment(self, spec, dead_letters=self._dead_letters)


def _not_received(message: Message[Any]) -> InvalidValue:
    return InvalidValue(f"{message!r} was not received by this consumer")


def _retry_topic(
    settings: ConsumerSettings, topics: Sequence[TopicName], subscription: str
) -> TopicName:
    assert settings.dead_letter is not None, "settings see to that"
    if settings.dead_letter.retry_topic is not None:
        return TopicName.parse(settings.dead_letter.retry_topic)
    if len(topics) != 1:
        raise InvalidSetting("a consumer of several topics needs a retry_topic for its retries")
    return TopicName.parse(letters_of(topics[0], subscription, "RETRY"))
