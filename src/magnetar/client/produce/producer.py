"""The producer of a topic, scalable or regular, as an application uses it.

Owns: `Producer`: sending, the limits on what waits, flushing, timeouts, sequence ids, and the end.

Invariants:
1. Sends of one key are stored in the order in which they were handed in, over splits, merges,
   reconnects and retries.
2. Every send ends with an id or an error. Cancelling the task that awaits it takes nothing back.
3. At most `max_pending` messages of the producer, and `memory_limit` bytes of its client, have no
   receipt; whoever sends more waits, in the order of coming.
4. After a failure that no retry can heal (`fail`), and after `close`, every send raises it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.connection.pool import Connections
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.message.interceptors import Draft
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.times import milliseconds
from magnetar.client.produce.memory_limit import WeightedSemaphore
from magnetar.client.produce.outbox import UNNUMBERED, Pending, PendingBatch, size_of
from magnetar.client.produce.row_sender import RowSender, place_of
from magnetar.client.produce.segment_producers import SegmentProducers
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.schema.info import Schema
from magnetar.client.transaction.participants import SendTransaction
from magnetar.errors import (
    AlreadyClosed,
    InvalidValue,
    MagnetarError,
    ProducerQueueFull,
    SendTimedOut,
)
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import TxnId

if TYPE_CHECKING:
    import pyarrow as pa

Value = TypeVar("Value")

V5_MARK: Final = ("__pulsar.v5.managed", "true")
"""Tells a broker that this producer follows its regular topic when that becomes a scalable one."""

MESSAGE_OVERHEAD_BYTES: Final = 512
"""What a message takes in memory beside its payload, key and properties."""

_LOG: Final = logger(__name__)
_FAILURES_MAX: Final = 1000
_NO_PROPERTIES: Final[Mapping[str, str]] = {}


class Producer(Generic[Value]):
    """Sends messages to one topic. Made by `Client.producer`.

    async with await client.producer("topic://public/default/orders") as producer:
        await producer.send(b"hello", key="k1")
    """

    def __init__(
        self,
        connections: Connections,
        topic: TopicName,
        *,
        name: str,
        schema: Schema[Value],
        settings: ProducerSettings,
        memory: WeightedSemaphore,
        clock: Clock,
        is_named_by_application: bool,
        on_close: Callable[[Producer[Any]], None],
    ) -> None:
        self._connections = connections
        self._topic = topic
        self._name = name
        self._schema = schema
        self._schema_version = b""
        self._settings = settings
        self._memory = memory
        self._clock = clock
        self._is_named = is_named_by_application
        self._interceptors = connections.interceptors
        self._traffic = connections.metrics.sent_to(str(topic))
        self._room = WeightedSemaphore(settings.max_pending)
        self._loop = asyncio.get_running_loop()
        self._sequence = settings.initial_sequence_id or 0
        self._last_stored = UNNUMBERED
        self._ordinal = 0
        self._order: deque[Pending] = deque()
        """What has no receipt, oldest first; settled ones may still stand between them."""
        self._settled = Signal()
        self._failures: deque[tuple[int, MagnetarError]] = deque()
        """What failed and no flush has raised, with its ordinal."""
        self._flushing = 0
        self._flushed = 0
        """Up to here flushes have told of failures."""
        self._failure: MagnetarError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._on_close = on_close
        self._segments = SegmentProducers(self, LayoutWatch(connections, topic))
        self._rows = RowSender(self)

    # --- what it is

    @property
    def topic(self) -> str:
        return str(self._topic)

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._name

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that has a receipt, or that the broker had before; -1: none."""
        return self._last_stored

    @property
    def pending(self) -> int:
        """How many messages have no receipt."""
        return self._room.taken

    # --- sending

    async def send(
        self,
        value: Value | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: SendTransaction | None = None,
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
        properties: Mapping[str, str] = _NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: SendTransaction | None = None,
    ) -> asyncio.Future[AnyMessageId]:
        """Hand a message in, once there is room; the future is done when it is stored.

            receipts = [await producer.submit(each) for each in values]
            await producer.flush()

        A failure is logged, so that the future need not be awaited.
        """
        encoded = None if value is None else self._schema.encode(value)
        draft = None
        if self._interceptors:
            draft = Draft(topic=self.topic, data=encoded, key=key, properties=dict(properties))
            self._interceptors.sending(draft)
            encoded, key, properties = draft.data, draft.key, draft.properties
        try:
            return await self._submit(
                encoded,
                key=key,
                ordering_key=ordering_key,
                properties=properties,
                event_time=event_time,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                sequence_id=sequence_id,
                replicate_to=replicate_to,
                txn=txn,
                draft=draft,
            )
        except BaseException as error:
            if draft is not None:
                self._interceptors.not_sent(draft, error)
            raise

    async def _submit(
        self,
        encoded: bytes | None,
        *,
        key: str | bytes | None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: SendTransaction | None = None,
        draft: Draft | None = None,
    ) -> asyncio.Future[AnyMessageId]:
        self._check_usable()
        payload = encoded or b""
        if sequence_id is not None and sequence_id < 0:
            raise InvalidValue(f"sequence id {sequence_id} is negative")
        own_size = size_of(payload, key, properties)
        message = Pending(
            payload=payload,
            sequence_id=UNNUMBERED if sequence_id is None else sequence_id,
            key=key,
            ordering_key=ordering_key,
            properties=dict(properties) if properties else _NO_PROPERTIES,
            null_value=encoded is None,
            schema_version=self._schema_version,
            receipt=self._loop.create_future(),
            due_at=self._loop.time() + self._settings.send_timeout,
            own_size=own_size,
            cost=own_size + MESSAGE_OVERHEAD_BYTES,
            is_numbered_by_application=sequence_id is not None,
            draft=draft,
        )
        if event_time is not None:
            message.event_time_ms = milliseconds(event_time)
        if deliver_at is not None or deliver_after is not None:
            message.deliver_at_ms = self._delivery_time(deliver_at, deliver_after)
        if replicate_to:
            message.replicate_to = tuple(replicate_to)
        await self.reserve(message)
        try:
            segment = self._segments.segment_of(key)
            if txn is not None:
                await self.join(message, segment, txn)
        except BaseException:
            self.give_back(message)
            raise
        self.hand_in(message, segment)
        return message.receipt

    async def send_arrow(self, batch: pa.RecordBatch, *, txn: SendTransaction | None = None) -> int:
        """Send each row of a record batch, and wait until all are stored; how many they were.

            await producer.send_arrow(pa.RecordBatch.from_pydict({"key": keys, "value": payloads}))

        `value` has payloads (text or bytes, or null for a message without one) that are sent as
        they are, whatever the schema; `key`, `properties` and `event_time` may be there too. Raises
        the first failure. Cancelling the wait takes nothing back. Needs `magnetar[arrow]`.
        """
        receipts = await self._rows.submit(batch, txn)
        self._segments.close_batches()
        if receipts:
            await asyncio.wait(receipts)  # which, cancelled, leaves them alone
        for receipt in receipts:
            receipt.result()
        return int(batch.num_rows)

    async def submit_arrow(
        self, batch: pa.RecordBatch, *, txn: SendTransaction | None = None
    ) -> None:
        """As `send_arrow`, without waiting for receipts: `flush` does, and raises failures."""
        await self._rows.submit(batch, txn)
        self._segments.close_batches()

    async def flush(self) -> None:
        """Wait until everything handed in so far has a receipt or an error.

        Raises the first failure of what was handed in since the last flush: also of what had failed
        before this call, and of sends whose own wait has raised it.
        """
        self._segments.close_batches()
        last = self._ordinal
        self._flushing += 1
        try:
            while self._order and self._order[0].ordinal <= last:
                await self._settled.past(self._settled.version)
            found = [each for each in self._failures if each[0] <= last]
            self._flushed = max(self._flushed, last)
        finally:
            self._flushing -= 1
            if not self._flushing:  # another flush may wait for the same messages
                self._failures = deque(each for each in self._failures if each[0] > self._flushed)
        if found:
            raise min(found, key=_ordinal)[1]

    def hurry(self) -> None:
        """Send what is being gathered in batches."""
        self._segments.close_batches()

    def drop(self, txn_id: TxnId, error: MagnetarError) -> None:
        """Fail those messages of a transaction that were not sent yet."""
        self.failed(self._segments.unsent(txn_id), error)

    def _delivery_time(self, at: datetime | int | None, after: timedelta | float | None) -> int:
        if at is not None:
            if after is not None:
                raise InvalidValue("deliver_at and deliver_after exclude each other")
            return milliseconds(at)
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after or 0)
        return self._clock.now_ms() + round(seconds * 1000)

    async def _wait_for(self, budget: WeightedSemaphore, units: int) -> None:
        seconds = self._settings.send_timeout or None
        self._segments.close_batches()
        try:
            async with asyncio.timeout(seconds):
                await budget.take(units)
        except TimeoutError as error:
            cause = self._segments.trouble()
            text = f"{self._name}: no room for a message within {seconds} s"
            raise ProducerQueueFull(f"{text}: {cause}" if cause else text) from error

    # --- the steps of a send

    async def reserve(self, message: Pending) -> None:
        """Wait for room; raises if it does not come in time, or the producer is closed."""
        if not self._room.try_take(message.count):
            await self._wait_for(self._room, message.count)
        if not self._memory.try_take(message.cost):
            try:
                await self._wait_for(self._memory, message.cost)
            except BaseException:
                self._room.give(message.count)
                raise
        try:
            self._check_usable()
        except MagnetarError:
            self.give_back(message)
            raise

    async def join(self, message: Pending, segment: Segment, txn: SendTransaction) -> None:
        """Make it a part of a transaction; raises if that takes no more."""
        message.txn = txn.txn_id
        await txn.enlist(self._segments.topic_of(segment))
        self._check_usable()
        txn.sending(message.receipt, self)

    def hand_in(self, message: Pending, segment: Segment) -> None:
        """Send it, behind what was handed in before."""
        self._ordinal += 1
        message.ordinal = self._ordinal
        message.place = place_of(message.key, segment.hash_range.start)
        self._order.append(message)
        if self._deadline is None and self._settings.send_timeout:
            self._deadline = self._loop.call_at(message.due_at, self._give_up_late)
        self._segments.offer(segment, message)
        if message.is_numbered_by_application:
            # Only now: what waited in a batch was given its numbers before this one.
            self._sequence = max(self._sequence, message.sequence_id + 1)

    def give_back(self, message: Pending) -> None:
        """What was reserved for it."""
        self._room.give(message.count)
        self._memory.give(message.cost)

    async def submit_row(
        self, row: arrow.Row, txn: SendTransaction | None
    ) -> asyncio.Future[AnyMessageId]:
        """Send one row of a record batch on its own."""
        return await self._submit(
            row.value,
            key=row.key,
            properties=row.properties,
            event_time=row.event_time_ms,
            txn=txn,
        )

    def replace(self, batch: PendingBatch, messages: Sequence[Pending]) -> None:
        """Each of these counts on its own from now on, in the place of the batch."""
        batch.is_settled = True
        order: deque[Pending] = deque()
        for each in self._order:
            order.extend(messages if each is batch else (each,))
        self._order = order

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    # --- receipts and failures

    def stored(self, messages: Sequence[Pending], ids: Sequence[AnyMessageId]) -> None:
        traffic = self._traffic
        handed_in = messages[0].due_at - self._settings.send_timeout
        seconds = self._loop.time() - handed_in
        for message, sent_id in zip(messages, ids, strict=True):
            if message.is_settled:
                continue
            message.is_settled = True
            traffic.messages += message.count
            traffic.bytes += message.own_size
            traffic.seconds += seconds * message.count
            if not message.receipt.done():
                message.receipt.set_result(sent_id)
            if message.draft is not None:
                self._interceptors.sent(message.draft, sent_id)
            self.give_back(message)
        self._last_stored = max(self._last_stored, messages[-1].sequence_id)
        self._forget_settled()

    def failed(self, messages: Sequence[Pending], error: MagnetarError) -> None:
        open_ones = [each for each in messages if not each.is_settled]
        for message in open_ones:
            message.is_settled = True
            if not message.receipt.done():
                message.receipt.set_exception(error)
                message.receipt.exception()  # it is logged: nobody needs to await it
            if message.draft is not None:
                self._interceptors.not_sent(message.draft, error)
            self.give_back(message)
            if len(self._failures) >= _FAILURES_MAX:
                del self._failures[1]  # the first one is told
            self._failures.append((message.ordinal, error))
        count = sum(each.count for each in open_ones)
        self._traffic.failures += count
        if open_ones:
            _LOG.warning(
                "send-failed",
                producer=self._name,
                topic=self.topic,
                messages=count,
                reason=str(error),
            )
        self._forget_settled()

    def fail(self, error: MagnetarError) -> None:
        if self._failure is None:
            self._failure = error
        self.failed(list(self._order), error)

    def _forget_settled(self) -> None:
        order = self._order
        while order and order[0].is_settled:
            order.popleft()
        if not order and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._settled.waiters:
            self._settled.advance()

    def _give_up_late(self) -> None:
        """The oldest message may be too late."""
        self._deadline = None
        now = self._loop.time()
        late = []
        for message in self._order:
            if message.due_at > now:
                self._deadline = self._loop.call_at(message.due_at, self._give_up_late)
                break
            late.append(message)
        late = [each for each in late if not each.is_settled]
        if late:
            seconds = self._settings.send_timeout
            cause = self._segments.trouble()
            text = f"{self._name}: no receipt within {seconds} s"
            error = SendTimedOut(f"{text}: {cause}" if cause else text)
            self.failed(late, error)
            self._segments.gave_up()

    # --- the segments' side

    @property
    def settings(self) -> ProducerSettings:
        return self._settings

    @property
    def connections(self) -> Connections:
        return self._connections

    @property
    def clock(self) -> Clock:
        return self._clock

    def opening_fields(self, *, is_regular: bool) -> dict[str, Any]:
        metadata = [
            {"key": name, "value": text} for name, text in self._settings.properties.items()
        ]
        if is_regular:
            metadata.append({"key": V5_MARK[0], "value": V5_MARK[1]})
        fields: dict[str, Any] = {
            "user_provided_producer_name": self._is_named,
            "producer_access_mode": int(self._settings.access_mode),
            "metadata": metadata,
            "txn_enabled": True,
        }
        schema = self._schema.info.to_wire()
        if schema is not None:
            fields["schema"] = schema
        return fields

    @property
    def segment_producers(self) -> SegmentProducers:
        return self._segments

    @property
    def schema_version(self) -> bytes:
        """As the broker knows the schema."""
        return self._schema_version

    def next_sequence(self, count: int) -> int:
        self._sequence += count
        return self._sequence - count

    def opened_with(self, last_sequence_id: int, schema_version: bytes) -> None:
        self._last_stored = max(self._last_stored, last_sequence_id)
        self._sequence = max(self._sequence, last_sequence_id + 1)
        self._schema_version = schema_version

    def new_number(self) -> int:
        return int(self._connections.chance.random() * 2**53)

    def segment_terminated(self) -> None:
        self._segments.segment_terminated()

    # --- its life

    async def open(self) -> None:
        """Open a producer on every active segment; raises why that cannot be."""
        try:
            await self._segments.start()
        except BaseException as error:
            if self._failure is None:
                reason = error if isinstance(error, MagnetarError) else None
                self._failure = reason or AlreadyClosed(f"{self._name} was not opened")
            raise

    async def close(self) -> None:
        """Send what was handed in, and leave; what cannot be sent in time fails."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name=f"close {self._name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        closed = AlreadyClosed(f"{self._name} is closed")
        try:
            if self._failure is None:
                self._failure = closed
                async with asyncio.timeout(self._connections.settings.operation_timeout):
                    await self.flush()
        except (TimeoutError, MagnetarError) as error:
            # Whoever awaits one of these messages is told, and it is logged.
            _LOG.info("producer-closed-early", producer=self._name, reason=str(error))
        finally:
            self.fail(closed)
            if self._deadline is not None:
                self._deadline.cancel()
            self._on_close(self)
            await self._segments.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _ordinal(failure: tuple[int, MagnetarError]) -> int:
    return failure[0]
