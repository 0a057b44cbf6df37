"""A queue consumer: each message goes to one of many, and is acknowledged on its own.

Owns: `QueueConsumer`, for scalable topics (and regular ones, which have partitions as segments), as
an application uses it; `QueueCore` does the work.

Invariants:
1. It is subscribed, Shared, to every segment of its topics, sealed ones too.
2. There is no order among messages; a message that is given back, or that another consumer left
   behind, comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from magnetar.client.consume.core.queue_core import QueueCore
from magnetar.client.consume.receiving import Receiving
from magnetar.client.consume.segment.acknowledged import Acknowledged
from magnetar.client.consume.segment.seeking import SeekTarget
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.client.produce.message_sender import NO_PROPERTIES
from magnetar.client.transaction.transaction import Transaction, core_of

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class QueueConsumer(Receiving[T]):
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

    _core: QueueCore[T]

    def __init__(self, core: QueueCore[T]) -> None:
        super().__init__(core)

    @property
    def subscription(self) -> str:
        """The name of its subscription, which all consumers that share messages have."""
        return self._core.subscription

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are consumed now."""
        return self._core.topics

    # --- settling

    def ack(
        self, message: Message[Any] | AnyMessageId, *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge a message, or one whose id was stored.

            consumer.ack(message)             # soon
            await consumer.ack(message)       # the broker has it for good
            consumer.ack(message, txn=txn)    # together with the transaction

        A message of which this consumer was told to seek away is not acknowledged.
        """
        return self._core.ack(message, core_of(txn))

    def ack_many(
        self, messages: Iterable[Message[Any] | AnyMessageId], *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge several messages."""
        core, within = self._core, core_of(txn)
        return Acknowledged.all_of([core.ack(each, within) for each in messages])

    def ack_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> Acknowledged:
        """Acknowledge the messages that a record batch has rows of.

            batch = await consumer.receive_arrow(timeout=1.0)
            await consumer.ack_arrow(batch)

        A slice, or a part of the rows, acknowledges just these; the columns of ids must be there.
        """
        return self._core.ack_rows(batch, core_of(txn))

    def nack(self, message: Message[Any]) -> None:
        """Give a message back: it is delivered again, to this or another consumer, after a while.

        How long follows from `nack_delay` and from how often it was delivered already. With dead
        letters, a message that was delivered often enough goes there instead.
        """
        self._core.nack(message)

    async def reconsume_later(
        self,
        message: Message[Any],
        *,
        delay: timedelta | float,
        properties: Mapping[str, str] = NO_PROPERTIES,
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
        await self._core.reconsume_later(message, delay, properties)

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
        await self._core.seek(target)
