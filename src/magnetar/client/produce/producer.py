"""The producer of a topic, scalable or regular, as an application uses it.

Owns: `Producer`: values and interceptors. What happens to a payload is `ProducerCore`'s.

Invariants:
1. Sends of one key are stored in the order in which they were handed in, over splits, merges,
   reconnects and retries.
2. Every send ends with an id or an error. Cancelling the task that awaits it takes nothing back.
3. At most `max_pending` messages of the producer, and `memory_limit` bytes of its client, have no
   receipt; whoever sends more waits, in the order of coming.
4. After a failure that no retry can heal, and after `close`, every send raises it.
5. An interceptor that has seen a draft hears what became of it, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from magnetar.client.message.interceptors import Draft
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.message_sender import NO_PROPERTIES
from magnetar.client.produce.producer_core import ProducerCore
from magnetar.client.schema.info import Schema
from magnetar.client.transaction.transaction import Transaction, core_of

if TYPE_CHECKING:
    import pyarrow as pa

Value = TypeVar("Value")


class Producer(Generic[Value]):
    """Sends messages to one topic. Made by `Client.producer`.

    async with await client.producer("topic://public/default/orders") as producer:
        await producer.send(b"hello", key="k1")
    """

    def __init__(self, core: ProducerCore, schema: Schema[Value]) -> None:
        self._core = core
        self._encode = schema.encode
        # Asked for every message: looked up once.
        self._interceptors = core.pending.interceptors
        self._hand_in = core.sender.submit

    @property
    def topic(self) -> str:
        """The topic that it sends to, by its full name."""
        return self._core.pending.topic

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._core.name

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that has a receipt, or that the broker had before; -1: none."""
        return self._core.pending.last_stored

    @property
    def pending(self) -> int:
        """How many messages have no receipt."""
        return self._core.pending.room.taken

    @property
    def throttled(self) -> str | None:
        """The rate of publishing that its sends wait for now, as the broker says; None: none."""
        return self._core.segments.throttled_since()

    # --- sending

    async def send(
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

            message_id = await producer.send(b"hello", key="k1", properties={"kind": "greeting"})

        None is a message without a value. Times are datetimes or milliseconds since 1970.
        Cancelling the wait does not take the message back. Raises `SendTimedOut` if no receipt came
        in time, `ProducerQueueFull` if there was no room for it in time, or what the broker refused
        it with.
        """
        receipt = await self.submit(
            value,
            key=key,
            ordering_key=ordering_key,
            properties=properties,
            event_time=event_time,
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            sequence_id=sequence_id,
            replicate_to=replicate_to,
            txn=txn,
        )
        # A transaction must know what became of it, even if nobody waits here any more.
        return await (receipt if txn is None else asyncio.shield(receipt))

    async def submit(
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
    ) -> asyncio.Future[AnyMessageId]:
        """Hand a message in, once there is room; the future is done when it is stored.

            receipts = [await producer.submit(each) for each in values]
            await producer.flush()

        A failure is logged, so that the future need not be awaited.
        """
        encoded = None if value is None else self._encode(value)
        draft = None
        if self._interceptors:
            # They may change everything but the topic, after the schema and before the routing.
            draft = Draft(topic=self.topic, data=encoded, key=key, properties=dict(properties))
            self._interceptors.sending(draft)
            encoded, key, properties = draft.data, draft.key, draft.properties
        try:
            return await self._hand_in(
                encoded,
                key=key,
                ordering_key=ordering_key,
                properties=properties,
                event_time=event_time,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                sequence_id=sequence_id,
                replicate_to=replicate_to,
                txn=core_of(txn),
                draft=draft,
            )
        except BaseException as error:
            # Not taken, for whatever reason, cancellation included (invariant 5).
            if draft is not None:
                self._interceptors.not_sent(draft, error)
            raise

    async def send_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> int:
        """Send each row of a record batch, and wait until all are stored; how many they were.

            await producer.send_arrow(pa.RecordBatch.from_pydict({"key": keys, "value": payloads}))

        `value` has payloads (text or bytes, or null for a message without one) that are sent as
        they are, whatever the schema; `key`, `properties` and `event_time` may be there too. Raises
        the first failure. Cancelling the wait takes nothing back. Needs `magnetar[arrow]`.
        """
        receipts = await self._core.submit_rows(batch, core_of(txn))
        if receipts:
            await asyncio.wait(receipts)  # which, cancelled, leaves them alone
        for receipt in receipts:
            receipt.result()
        return int(batch.num_rows)

    async def submit_arrow(self, batch: pa.RecordBatch, *, txn: Transaction | None = None) -> None:
        """Hand each row of a record batch in, as `send_arrow` does, without waiting for receipts.

        `flush` waits for them, and raises failures.
        """
        await self._core.submit_rows(batch, core_of(txn))

    async def flush(self) -> None:
        """Wait until everything handed in so far has a receipt or an error.

        Raises the first failure of what was handed in since the last flush: also of what had failed
        before this call, and of sends whose own wait has raised it.
        """
        await self._core.flush()

    async def close(self) -> None:
        """Send what was handed in, and leave; what cannot be sent in time fails."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
