"""A stream consumer: messages in the order of their keys, acknowledged up to one.

Owns: `StreamConsumer`, a member of a group that shares the segments of a scalable topic, as an
application uses it; `StreamCore` does the work.

Invariants:
1. It consumes what the controller assigns to it. A segment that it loses is kept until everything
   that was handed out of it is acknowledged: only then may the next member have it.
2. A cumulative acknowledgement covers what had been handed out when its message was, in every
   segment, and nothing that still waited for the application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from magnetar.client.consume.core.stream_core import StreamCore
from magnetar.client.consume.receiving import Receiving
from magnetar.client.consume.segment.acknowledged import Acknowledged
from magnetar.client.consume.segment.seeking import SeekTarget
from magnetar.client.message.message import Message
from magnetar.client.transaction.transaction import Transaction, core_of
from magnetar.model.ids import ScalableMessageId

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class StreamConsumer(Receiving[T]):
    """Gets the messages of each key in order.

    async with await client.stream_consumer("topic://public/default/orders", "billing") as consumer:
        async for message in consumer:
            apply(message.value)
            consumer.ack_cumulative(message)
    """

    _core: StreamCore[T]

    def __init__(self, core: StreamCore[T]) -> None:
        super().__init__(core)

    @property
    def topic(self) -> str:
        """The topic that it consumes, by its full name."""
        return self._core.topic

    @property
    def subscription(self) -> str:
        """The name of its subscription, which all members of the group have."""
        return self._core.subscription

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are this member's now."""
        return self._core.segment_ids

    def ack_cumulative(
        self, message: Message[Any] | ScalableMessageId, *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge everything that was received up to a message, in all segments.

            consumer.ack_cumulative(message)            # soon
            await consumer.ack_cumulative(message)      # the broker has it for good

        In a transaction that is aborted, what is not acknowledged is delivered again.
        """
        return self._core.ack_cumulative(message, core_of(txn))

    def ack_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> Acknowledged:
        """Acknowledge, in each segment, everything up to its last row in a record batch.

        batch = await consumer.receive_arrow(timeout=1.0)
        await consumer.ack_arrow(batch)
        """
        return self._core.ack_rows(batch, core_of(txn))

    async def seek(self, target: SeekTarget) -> None:
        """Move the subscription: to a message, which is the next one, or to a time.

            await consumer.seek(EARLIEST)
            await consumer.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970. A message moves its own segment and no
        other; a time, the earliest or the latest message moves all, those too that were finished:
        each key comes in order again. Receive nothing meanwhile: what was received before cannot be
        acknowledged any more. Raises `NotAllowed` if another member of the group has a segment.
        """
        await self._core.seek(target)
