"""A queue consumer: each message goes to one of many, and is acknowledged on its own.

Owns: `QueueConsumer`, for scalable topics (and regular ones, which have partitions as segments).

Invariants:
1. It is subscribed, Shared, to every segment of its topics, sealed ones too.
2. There is no order among messages; a message that is given back, or that another consumer left
   behind, comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.connection.pool import Connections
from magnetar.client.consume.all_segments import AllSegmentsConsumer
from magnetar.client.consume.dead_letter import DeadLetters, MakeProducer, letters_of
from magnetar.client.consume.receiving import not_consumed
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged, abandoned
from magnetar.client.consume.segment.queue_segment import QueueSegment
from magnetar.client.consume.segment.seeking import SeekTarget, one_message, seek_fields
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segments import SegmentKey
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

_NO_PROPERTIES: Final[Mapping[str, str]] = {}


class QueueConsumer(AllSegmentsConsumer[T]):
    """Shares the messages of a topic with the other consumers of its subscription.

    async with await client.queue_consumer("topic://public/default/jobs", "workers") as consumer:
        async for message in consumer:
            try:
                await work(message.value)
            except Exception:
                consumer.nack(message)
            else:
                consumer.ack(message)
    """

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
        self, message: Message[Any] | AnyMessageId, *, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge a message, or one whose id was stored.

            consumer.ack(message)             # soon
            await consumer.ack(message)       # the broker has it for good
            consumer.ack(message, txn=txn)    # together with the transaction

        A message of which this consumer was told to seek away is not acknowledged.
        """
        self._check_open()
        if isinstance(message, Message):
            feed = self._feed_of(message)
            if txn is not None:
                feed.refuse_stale(message)
                feed.acknowledging(message)
                return feed.ack_in(txn, message.raw_id, message.chunk_ids)
            if message.generation != feed.generation:
                return NOTHING_TO_DO
            feed.acknowledging(message)
            index, size = message.batch_index, message.batch_size
            return feed.ack_at(message.position, index, size, message.chunk_ids)
        found, message_id = self._feed_and_id(message)
        if found is None:
            return NOTHING_TO_DO
        found.acknowledging(message)
        return found.ack(message_id) if txn is None else found.ack_in(txn, message_id)

    def ack_many(
        self, messages: Iterable[Message[Any] | AnyMessageId], *, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge several messages."""
        return Acknowledged.all_of([self.ack(each, txn=txn) for each in messages])

    def ack_arrow(
        self, batch: pa.RecordBatch, *, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge the messages that a record batch has rows of.

            batch = await consumer.receive_arrow(timeout=1.0)
            await consumer.ack_arrow(batch)

        A slice, or a part of the rows, acknowledges just these; the columns of ids must be there.
        """
        self._check_open()
        feeds = self._feeds_by_topic()
        acked = []
        for entry in arrow.entries_in(batch):
            feed = feeds.get((entry.topic, entry.segment_id))
            if not isinstance(feed, QueueSegment):
                acked.append(abandoned(not_consumed(entry.topic)))
            elif txn is None:
                acked.append(feed.ack_rows(entry.position, entry.mask, entry.batch_size))
            else:
                size = entry.batch_size
                acked.append(feed.ack_rows_in(txn, entry.position, entry.mask, size))
        return Acknowledged.all_of(acked)

    def nack(self, message: Message[Any]) -> None:
        """Give a message back: it is delivered again, to this or another consumer, after a while.

        How long follows from `nack_delay` and from how often it was delivered already. With dead
        letters, a message that was delivered often enough goes there instead.
        """
        self._check_open()
        feed = message.source
        if not isinstance(feed, QueueSegment):
            raise InvalidValue(f"{message!r} was not received by this consumer")
        feed.giving_back(message)
        feed.nack(message)

    async def reconsume_later(
        self,
        message: Message[Any],
        *,
        delay: timedelta | float,
        properties: Mapping[str, str] = _NO_PROPERTIES,
    ) -> None:
        """Put a message off: a copy is consumed after `delay` (seconds), the message acknowledged.

            consumer = await client.queue_consumer(
                topic, "workers", retries=True, dead_letter=DeadLetterPolicy(max_redeliveries=3)
            )
            await consumer.reconsume_later(message, delay=60)

        Unlike after `nack`, nothing waits in the client, and the delay may be long. The copy has
        `properties` beside those of the message, and `RECONSUMETIMES`, which counts; after
        `max_redeliveries` of them it goes to the dead letters. Raises what its producer raises, and
        has then not acknowledged the message.
        """
        self._check_open()
        feed = self._feed_of(message)
        if self._dead_letters is None or self._retry_topic is None:
            hint = "make it with retries=True and a dead_letter policy"
            raise NotAllowed("this consumer has nowhere to put messages off", hint=hint)
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
        if not 0 <= seconds < float("inf"):
            raise InvalidValue(f"a delay of {delay}")
        if feed.has(message):
            await self._dead_letters.retry(message, seconds, properties)
            feed.ack(message.raw_id, message.chunk_ids)

    # --- moving

    async def seek(self, target: SeekTarget) -> None:
        """Move the subscription: to a message, which is the next one, or to a time.

            await consumer.seek(EARLIEST)
            await consumer.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970. A message moves its own segment or partition
        and no other; a time, the earliest or the latest message moves all. What was received before
        cannot be acknowledged any more, and other consumers of the subscription go on from there
        too. If it fails, some segments may have been moved: it can be repeated.
        """
        self._check_open()
        fields = seek_fields(target)
        for feed in self._feeds_at(target):
            assert isinstance(feed, QueueSegment), "that is what this consumer makes"
            await feed.seek(**fields)

    def _feeds_at(self, target: SeekTarget) -> list[SegmentConsumer]:
        present, message = self._feeds.present, one_message(target)
        if message is None:
            return list(present.values())
        if isinstance(message, MessageId) and message.partition < 0 and len(present) > 1:
            raise InvalidValue(f"{message} names no partition, and {len(present)} are consumed")
        found = present.get(self._key_of(message))
        if found is None:
            raise ConsumerNotFound(f"{message} is of nothing that is consumed here")
        return [found]

    def _feed_of(self, message: Message[Any]) -> QueueSegment:
        feed = message.source
        if not isinstance(feed, QueueSegment) or feed.home is not self:
            raise InvalidValue(f"{message!r} was not received by this consumer")
        return feed

    def _feed_and_id(self, message: Message[Any] | AnyMessageId) -> tuple[QueueSegment | None, Any]:
        """The segment of a message; None: it is no more, and so has nothing to acknowledge."""
        if isinstance(message, Message):
            return self._feed_of(message), message.raw_id
        found = self._feeds.present.get(self._key_of(message))
        if found is not None:
            assert isinstance(found, QueueSegment), "that is what this consumer makes"
            return found, plain_id(message)
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
            self._feeds.spawn(self._dead_letters.run(), "dead letters")

    async def _close_sources(self) -> None:
        try:
            await super()._close_sources()
        finally:
            if self._dead_letters is not None:
                await self._dead_letters.close()

    def _subscribe_fields(self) -> Mapping[str, Any]:
        return {"subType": int(SubscriptionType.SHARED)}

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        return QueueSegment(self, spec, dead_letters=self._dead_letters)


def _retry_topic(
    settings: ConsumerSettings, topics: Sequence[TopicName], subscription: str
) -> TopicName:
    assert settings.dead_letter is not None, "settings see to that"
    if settings.dead_letter.retry_topic is not None:
        return TopicName.parse(settings.dead_letter.retry_topic)
    if len(topics) != 1:
        raise InvalidSetting("a consumer of several topics needs a retry_topic for its retries")
    return TopicName.parse(letters_of(topics[0], subscription, "RETRY"))
