"""Blocking: `Producer`, for threads.

Written by `make blocking` from `magnetar.client.produce.producer`; edit that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from magnetar.client.blocking.handle import Handle, wrapped_of
from magnetar.client.blocking.transactions import Transaction
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.message_sender import NO_PROPERTIES
from magnetar.client.produce.producer import Producer as AsyncProducer

if TYPE_CHECKING:
    import pyarrow as pa

Value = TypeVar("Value")


class Producer(Handle[AsyncProducer[Value]], Generic[Value]):
    """Sends messages to one topic. Made by `Client.producer`.

    with client.producer("topic://public/default/orders") as producer:
        producer.send(b"hello", key="k1")
    """

    @property
    def topic(self) -> str:
        """The topic that it sends to, by its full name."""
        return self._call(lambda: self._wrapped.topic)

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._call(lambda: self._wrapped.name)

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that has a receipt, or that the broker had before; -1: none."""
        return self._call(lambda: self._wrapped.last_sequence_id)

    @property
    def pending(self) -> int:
        """How many messages have no receipt."""
        return self._call(lambda: self._wrapped.pending)

    @property
    def throttled(self) -> str | None:
        """The rate of publishing that its sends wait for now, as the broker says; None: none."""
        return self._call(lambda: self._wrapped.throttled)

    def send(
        self,
        value: Value | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] = NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: Transaction | None = None,
    ) -> AnyMessageId:
        """Send a message and wait until it is stored; where it is.

            message_id = producer.send(b"hello", key="k1", properties={"kind": "greeting"})

        None is a message without a value. Times are datetimes or milliseconds since 1970.
        Cancelling the wait does not take the message back. Raises `SendTimedOut` if no receipt came
        in time, `ProducerQueueFull` if there was no room for it in time, or what the broker refused
        it with.
        """
        return self._wait(
            lambda: self._wrapped.send(
                value,
                key=key,
                ordering_key=ordering_key,
                properties=properties,
                event_time=event_time,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                sequence_id=sequence_id,
                replicate_to=replicate_to,
                txn=wrapped_of(txn),
            )
        )

    def submit(
        self,
        value: Value | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] = NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: Transaction | None = None,
    ) -> Future[AnyMessageId]:
        """Hand a message in, once there is room; the future is done when it is stored.

            receipts = [producer.submit(each) for each in values]
            producer.flush()

        A failure is logged, so that the future need not be awaited.
        """
        return self._stored_later(
            lambda: self._wrapped.submit(
                value,
                key=key,
                ordering_key=ordering_key,
                properties=properties,
                event_time=event_time,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                sequence_id=sequence_id,
                replicate_to=replicate_to,
                txn=wrapped_of(txn),
            )
        )

    def send_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> int:
        """Send each row of a record batch, and wait until all are stored; how many they were.

            producer.send_arrow(pa.RecordBatch.from_pydict({"key": keys, "value": payloads}))

        `value` has payloads (text or bytes, or null for a message without one) that are sent as
        they are, whatever the schema; `key`, `properties` and `event_time` may be there too. Raises
        the first failure. Cancelling the wait takes nothing back. Needs `magnetar[arrow]`.
        """
        return self._wait(lambda: self._wrapped.send_arrow(batch, txn=wrapped_of(txn)))

    def submit_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> None:
        """Hand each row of a record batch in, as `send_arrow` does, without waiting for receipts.

        `flush` waits for them, and raises failures.
        """
        self._wait(lambda: self._wrapped.submit_arrow(batch, txn=wrapped_of(txn)))

    def flush(self) -> None:
        """Wait until everything handed in so far has a receipt or an error.

        Raises the first failure of what was handed in since the last flush: also of what had failed
        before this call, and of sends whose own wait has raised it.
        """
        self._wait(lambda: self._wrapped.flush())
