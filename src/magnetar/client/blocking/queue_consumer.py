"""Blocking: `QueueConsumer`, for threads.

Written by `make blocking` from `magnetar.client.consume.queue`; edit that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from magnetar.client.blocking.handle import Acknowledged, Handle, wrapped_of
from magnetar.client.blocking.transactions import Transaction
from magnetar.client.consume.queue import QueueConsumer as AsyncQueueConsumer
from magnetar.client.consume.segment.seeking import SeekTarget
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.client.produce.message_sender import NO_PROPERTIES

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class QueueConsumer(Handle[AsyncQueueConsumer[T]], Generic[T]):
    """Shares the messages of a topic with the other consumers of its subscription.

    with client.queue_consumer("topic://public/default/jobs", "workers") as consumer:
        for message in consumer:
            try:
                work(message.value)
            except Exception:
                consumer.nack(message)
            else:
                consumer.ack(message)
    """

    @property
    def subscription(self) -> str:
        """The name of its subscription, which all consumers that share messages have."""
        return self._call(lambda: self._wrapped.subscription)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are consumed now."""
        return self._call(lambda: self._wrapped.topics)

    def ack(
        self, message: Message[Any] | AnyMessageId, *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge a message, or one whose id was stored.

            consumer.ack(message)             # soon
            consumer.ack(message).wait()       # the broker has it for good
            consumer.ack(message, txn=txn)    # together with the transaction

        A message of which this consumer was told to seek away is not acknowledged.
        """
        return self._acknowledged(lambda: self._wrapped.ack(message, txn=wrapped_of(txn)))

    def ack_many(
        self, messages: Iterable[Message[Any] | AnyMessageId], *, txn: Transaction | None = None
    ) -> Acknowledged:
        """Acknowledge several messages."""
        given = [wrapped_of(each) for each in messages]
        return self._acknowledged(lambda: self._wrapped.ack_many(given, txn=wrapped_of(txn)))

    def ack_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> Acknowledged:
        """Acknowledge the messages that a record batch has rows of.

            batch = consumer.receive_arrow(timeout=1.0)
            consumer.ack_arrow(batch).wait()

        A slice, or a part of the rows, acknowledges just these; the columns of ids must be there.
        """
        return self._acknowledged(lambda: self._wrapped.ack_arrow(batch, txn=wrapped_of(txn)))

    def nack(self, message: Message[Any]) -> None:
        """Give a message back: it is delivered again, to this or another consumer, after a while.

        How long follows from `nack_delay` and from how often it was delivered already. With dead
        letters, a message that was delivered often enough goes there instead.
        """
        self._call(lambda: self._wrapped.nack(message))

    def reconsume_later(
        self,
        message: Message[Any],
        *,
        delay: timedelta | float,
        properties: Mapping[str, str] = NO_PROPERTIES,
    ) -> None:
        """Put a message off: a copy is consumed after `delay` (seconds), the message acknowledged.

            consumer = client.queue_consumer(
                topic, "workers", retries=True, dead_letter=DeadLetterPolicy(max_redeliveries=3)
            )
            consumer.reconsume_later(message, delay=60)

        Unlike after `nack`, nothing waits in the client, and the delay may be long. The copy has
        `properties` beside those of the message, and `RECONSUMETIMES`, which counts; after
        `max_redeliveries` of them it goes to the dead letters. Raises what its producer raises, and
        has then not acknowledged the message.
        """
        self._wait(
            lambda: self._wrapped.reconsume_later(message, delay=delay, properties=properties)
        )

    def seek(self, target: SeekTarget) -> None:
        """Move the subscription: to a message, which is the next one, or to a time.

            consumer.seek(EARLIEST)
            consumer.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970. A message moves its own segment or partition
        and no other; a time, the earliest or the latest message moves all. What was received before
        cannot be acknowledged any more, and other consumers of the subscription go on from there
        too. If it fails, some segments may have been moved: it can be repeated.
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
