"""Blocking: `StreamConsumer`, for threads.

Written by `make blocking` from `magnetar.client.consume.stream`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from magnetar.client.blocking.handle import Acknowledged, Handle, wrapped_of
from magnetar.client.blocking.transactions import Transaction
from magnetar.client.consume.segment.seeking import SeekTarget
from magnetar.client.consume.stream import StreamConsumer as AsyncStreamConsumer
from magnetar.client.message.message import Message
from magnetar.model.ids import ScalableMessageId

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class StreamConsumer(Handle[AsyncStreamConsumer[T]], Generic[T]):
    """Gets the messages of each key in order.

    with client.stream_consumer("topic://public/default/orders", "billing") as consumer:
        for message in consumer:
            apply(message.value)
            consumer.ack_cumulative(message)
    """

    @property
    def topic(self) -> str:
        """The topic that it consumes, by its full name."""
        return self._call(lambda: self._wrapped.topic)

    @property
    def subscription(self) -> str:
        """The name of its subscription, which all members of the group have."""
        return self._call(lambda: self._wrapped.subscription)

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are this member's now."""
        return self._call(lambda: self._wrapped.segments)

    def ack_cumulative(
        self, message: Message[Any] | ScalableMessageId, *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge everything that was received up to a message, in all segments.

            consumer.ack_cumulative(message)            # soon
            consumer.ack_cumulative(message).wait()      # the broker has it for good

        In a transaction that is aborted, what is not acknowledged is delivered again.
        """
        return self._acknowledged(
            lambda: self._wrapped.ack_cumulative(message, txn=wrapped_of(txn))
        )

    def ack_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> Acknowledged:
        """Acknowledge, in each segment, everything up to its last row in a record batch.

        batch = consumer.receive_arrow(timeout=1.0)
        consumer.ack_arrow(batch).wait()
        """
        return self._acknowledged(lambda: self._wrapped.ack_arrow(batch, txn=wrapped_of(txn)))

    def seek(self, target: SeekTarget) -> None:
        """Move the subscription: to a message, which is the next one, or to a time.

            consumer.seek(EARLIEST)
            consumer.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970. A message moves its own segment and no
        other; a time, the earliest or the latest message moves all, those too that were finished:
        each key comes in order again. Receive nothing meanwhile: what was received before cannot be
        acknowledged any more. Raises `NotAllowed` if another member of the group has a segment.
        """
        self._wait(lambda: self._wrapped.seek(target))

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._call(lambda: self._wrapped.name)

    def receive(self, timeout: float | None = None) -> Message[T]:
        """The next message; the application has it from now on.

            message = consumer.receive(timeout=5.0)

        Raises `DeadlineExceeded` if none came within `timeout` seconds: it has nothing else to
        return. `receive_many` and `receive_arrow` return what came, which may be nothing.
        """
        return self._wait(lambda: self._wrapped.receive(timeout))

    def receive_many(
        self, max_messages: int = 100, timeout: float | None = None
    ) -> list[Message[T]]:
        """The messages that are there, up to a limit; waits only until there is one.

            for message in consumer.receive_many(500, timeout=1.0):
                ...

        Empty if none came within `timeout` seconds, where `receive` raises `DeadlineExceeded`.
        """
        return self._wait(lambda: self._wrapped.receive_many(max_messages, timeout))

    def receive_arrow(self, max_rows: int = 10000, timeout: float | None = None) -> pa.RecordBatch:
        """The messages that are there as an Arrow record batch; waits only until there is one.

            batch = consumer.receive_arrow(50_000, timeout=1.0)
            frame = batch.to_pandas()

        Without rows if none came within `timeout` seconds, where `receive` raises
        `DeadlineExceeded`. Values are the payloads as they were
        sent; `magnetar.client.arrow.arrow` describes the columns. Needs `magnetar[arrow]`.
        """
        return self._wait(lambda: self._wrapped.receive_arrow(max_rows, timeout))

    def __iter__(self) -> Iterator[Message[T]]:
        """The messages, until it is closed."""
        return self._iterate(lambda: self._wrapped.__aiter__())
