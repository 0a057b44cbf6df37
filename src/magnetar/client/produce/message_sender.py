"""The way of one message into a producer: room, transaction, segment.

Owns: `MessageSender`, which makes a `Pending` of a payload and hands it to its segment's producer;
waiting for room, and giving up what has no receipt in time.

Invariants:
1. Messages are handed in in the order in which they got room: those of a key reach their segment's
   producer in that order.
2. A message that is refused on its way in, or whose sender is cancelled while it waits, has nothing
   reserved and is in no transaction.
3. What was handed in is settled within `send_timeout`, if there is one.

Relies on: `PendingMessages`, which counts and settles; `SegmentProducers`, which route and send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from magnetar.client.encryption.encryptor import Encryptor
from magnetar.client.message.interceptors import Draft
from magnetar.client.message.message import AnyMessageId
from magnetar.client.message.options import wrong_property
from magnetar.client.message.times import milliseconds
from magnetar.client.produce.outbox import UNNUMBERED, Pending, size_of
from magnetar.client.produce.pending_messages import PendingMessages
from magnetar.client.produce.segment_producers import SegmentProducers
from magnetar.client.produce.semaphore import WeightedSemaphore
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.transaction.participants import SendTransaction
from magnetar.errors import InvalidValue, MagnetarError, ProducerQueueFull, SendTimedOut
from magnetar.model.hashing import key_hash, segment_hash
from magnetar.model.segments import Segment
from magnetar.runtime.clock import Clock
from magnetar.wire.messages import TxnId

MESSAGE_OVERHEAD_BYTES: Final = 512
"""What a message takes in memory beside its payload, key and properties."""

_KEY_TYPES: Final = (str, bytes)
NO_PROPERTIES: Final[Mapping[str, str]] = {}


class MessageSender:
    """Sends single messages by one producer; to a transaction it is the `Sender`."""

    def __init__(
        self,
        settings: ProducerSettings,
        pending: PendingMessages,
        segments: SegmentProducers,
        clock: Clock,
        encryptor: Encryptor | None = None,
    ) -> None:
        self._send_timeout = settings.send_timeout
        self._pending = pending
        self._segments = segments
        self._clock = clock
        self._encryptor = encryptor
        self._loop = asyncio.get_running_loop()

    async def submit(
        self,
        encoded: bytes | None,
        *,
        key: str | bytes | None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] = NO_PROPERTIES,
        event_time: datetime | int | None = None,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        sequence_id: int | None = None,
        replicate_to: Sequence[str] = (),
        txn: SendTransaction | None = None,
        draft: Draft | None = None,
    ) -> asyncio.Future[AnyMessageId]:
        """Hand a payload in, once there is room; the future is done when it is stored."""
        pending, loop = self._pending, self._loop
        pending.check_usable()
        if self._encryptor is not None:
            self._encryptor.prepare()
        payload = encoded or b""
        if sequence_id is not None and not _counts(sequence_id):
            raise InvalidValue(f"a sequence id is a whole number, 0 or more, not {sequence_id!r}")
        if key is not None and not isinstance(key, _KEY_TYPES):
            raise InvalidValue(f"a key is text or bytes, not {key!r}", hint="use str(...)")
        if ordering_key is not None and not isinstance(ordering_key, bytes):
            raise InvalidValue(f"an ordering key is bytes, not {ordering_key!r}")
        if properties and (wrong := wrong_property(properties)) is not None:
            raise InvalidValue(f"properties: {wrong}", hint="names and values are str")
        own_size = size_of(payload, key, properties)
        message = Pending(
            payload=payload,
            sequence_id=UNNUMBERED if sequence_id is None else sequence_id,
            key=key,
            ordering_key=ordering_key,
            properties=dict(properties) if properties else NO_PROPERTIES,
            null_value=encoded is None,
            schema_version=pending.schema_version,
            receipt=loop.create_future(),
            due_at=loop.time() + self._send_timeout,
            own_size=own_size,
            cost=own_size + MESSAGE_OVERHEAD_BYTES,
            is_numbered_by_application=sequence_id is not None,
            draft=draft,
        )
        # Rare ones are set afterwards: the constructor runs for every message.
        if event_time is not None:
            message.event_time_ms = milliseconds(event_time)
        if deliver_at is not None or deliver_after is not None:
            message.deliver_at_ms = self._delivery_time(deliver_at, deliver_after)
        if replicate_to:
            message.replicate_to = tuple(replicate_to)
            if isinstance(replicate_to, str) or not all(map(_is_text, message.replicate_to)):
                raise InvalidValue(f"replicate_to is a list of clusters, not {replicate_to!r}")
        if not pending.try_reserve(message):
            await self.reserve(message)
        try:
            # Chosen after the wait for room: the layout may have changed meanwhile.
            segment = self._segments.segment_of(key)
            if txn is not None:
                await self.join(message, segment, txn)
        except BaseException:
            pending.give_back(message)
            raise
        self.hand_in(message, segment)
        return message.receipt

    # --- the steps of a send, for rows too

    def prepare(self) -> None:
        """Have what messages are encrypted with; raises `EncryptionFailed`."""
        # Here and not when their entry is made: whoever sends is told.
        if self._encryptor is not None:
            self._encryptor.prepare()

    async def reserve(self, message: Pending) -> None:
        """Wait for room; raises if it does not come in time, or the producer is closed."""
        pending = self._pending
        if not pending.room.try_take(message.count):
            await self._wait_for(pending.room, message.count)
        if not pending.memory.try_take(message.cost):
            try:
                await self._wait_for(pending.memory, message.cost)
            except BaseException:
                pending.room.give(message.count)
                raise
        try:
            # Closed or failed while it waited.
            pending.check_usable()
        except MagnetarError:
            pending.give_back(message)
            raise

    async def join(self, message: Pending, segment: Segment, txn: SendTransaction) -> None:
        """Make a message a part of a transaction; raises if that takes no more."""
        message.txn = txn.txn_id
        await txn.enlist(self._segments.topic_of(segment))
        # The coordinator was asked: the producer may have been closed, the transaction ended.
        self._pending.check_usable()
        txn.sending(message.receipt, self)

    def hand_in(self, message: Pending, segment: Segment) -> None:
        """Send a message, behind what was handed in before."""
        pending = self._pending
        pending.add(message)
        message.place = place_of(message.key, segment.hash_range.start)
        # One timer for the oldest message is enough: it looks for the next one when it fires.
        if pending.deadline is None and self._send_timeout:
            pending.deadline = self._loop.call_at(message.due_at, self._give_up_late)
        self._segments.offer(segment, message)
        if message.is_numbered_by_application:
            # Only now: what waited in a batch was given its numbers before this one.
            pending.sequences.go_behind(message.sequence_id)

    def _delivery_time(self, at: datetime | int | None, after: timedelta | float | None) -> int:
        if at is not None:
            if after is not None:
                raise InvalidValue("deliver_at and deliver_after exclude each other")
            return milliseconds(at)
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after or 0)
        return self._clock.now_ms() + round(seconds * 1000)

    async def _wait_for(self, limit: WeightedSemaphore, units: int) -> None:
        seconds = self._send_timeout or None
        # What is gathered for a batch holds room: it must not wait for a message that waits for it.
        self._segments.close_batches()
        try:
            async with asyncio.timeout(seconds):
                await limit.take(units)
        except TimeoutError as error:
            text = f"{self._pending.name}: no room for a message within {seconds} s"
            since = self._loop.time() - self._send_timeout
            raise ProducerQueueFull(self._with_cause(text, since)) from error

    def _give_up_late(self) -> None:
        """The oldest message may be too late."""
        pending = self._pending
        late, next_due = pending.late(self._loop.time())
        pending.deadline = (
            None if next_due is None else self._loop.call_at(next_due, self._give_up_late)
        )
        if late:
            text = f"{pending.name}: no receipt within {self._send_timeout} s"
            since = late[0].due_at - self._send_timeout
            pending.failed(late, SendTimedOut(self._with_cause(text, since)))
            # Settled first: segments then see which of their entries nobody waits for.
            self._segments.gave_up()

    def _with_cause(self, text: str, since: float) -> str:
        # A rate goes first: what a producer meets while it waits for one follows from that.
        rate = self._segments.throttled_since(since)
        cause = self._segments.trouble() if rate is None else f"throttled by {rate}"
        return f"{text}: {cause}" if cause else text

    # --- the transactions' side

    def hurry(self) -> None:
        """Send what is being gathered in batches."""
        self._segments.close_batches()

    def drop(self, txn_id: TxnId, error: MagnetarError) -> None:
        """Fail those messages of a transaction that were not sent yet."""
        self._pending.failed(self._segments.unsent(txn_id), error)


def _is_text(given: object) -> bool:
    return isinstance(given, str)


def _counts(given: object) -> bool:
    return isinstance(given, int) and given >= 0


def place_of(key: str | bytes | None, otherwise: int) -> int:
    """Where a key that is not text stands on the ring: brokers cannot know it otherwise."""
    return segment_hash(key_hash(key)) if isinstance(key, bytes) else otherwise
