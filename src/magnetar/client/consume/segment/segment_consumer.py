"""A consumer on one segment, partition or regular topic, over all its connections.

Owns: `SegmentConsumer`, the life of one: subscribing, permits, acknowledgements, redelivery, and
the end. What is acknowledged how is decided by its subclasses (`queue_segment`, `stream_segment`).

Invariants:
1. The broker is never asked for more than `queue_size` messages beyond what the application took.
2. Acknowledgements outlive connections: what the broker has not confirmed is sent again before any
   new message is asked for.
3. What waited in the receive queue when the connection was lost is dropped: the broker delivers it
   again.
4. Released: nothing more is handed out, and the segment is given up once everything that was handed
   out is settled, or after `release_timeout`. Closed: only acknowledgements are waited for.

Relies on: `run` being the only task that speaks on the connection, but for FLOW; its
`ParentConsumer` for ids alone. That it is over, and why (`failure`), its parent sees by `ends`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from magnetar.client.connection.connection import CONSUMER, BrokerConnection
from magnetar.client.connection.pool import Connections, retrying
from magnetar.client.connection.server_errors import is_other_type, is_passing, may_open
from magnetar.client.consume.segment.ack_outbox import AckOutbox, AckTransaction
from magnetar.client.consume.segment.ack_state import AckItem
from magnetar.client.consume.segment.acknowledged import Acknowledged, abandoned
from magnetar.client.consume.segment.entry_intake import EntryIntake
from magnetar.client.consume.segment.receive_queue import ReceiveQueue
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.encryption.decryptor import Decryptor
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import AnyMessageId, Message, MessageId
from magnetar.errors import (
    AlreadyClosed,
    MagnetarError,
    ServiceNotReady,
    TransactionConflict,
)
from magnetar.model.batch_indexes import words_of
from magnetar.model.ids import Position
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import encode_ack
from magnetar.wire.messages import Command, Delivered, Received, TxnId

_LOG: Final = logger(__name__)
_REACHED_END: Final = TYPES["REACHED_END_OF_TOPIC"]
_CLOSED: Final = TYPES["CLOSE_CONSUMER"]


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """One segment as a consumer wants it: another spec is another subscription."""

    wire_topic: str
    topic: str
    """As the application knows it."""
    subscription: str
    consumer_name: str
    fields: Mapping[str, Any]
    """Of SUBSCRIBE, as the kind of consumer has them."""
    segment_id: int | None = None
    """None: a regular topic, or a partition of one."""


@dataclass(frozen=True, slots=True)
class ConsumerContext:
    """The things that all segments of one consumer share."""

    connections: Connections
    settings: ConsumerSettings
    receive_queue: ReceiveQueue[Any]
    decryptor: Decryptor
    waits_for_others: bool
    """Whether another consumer on a segment is waited for, and no error."""


class ParentConsumer(Protocol):
    """The consumer that a segment's consumer belongs to: all that may be asked of it."""

    @property
    def context(self) -> ConsumerContext:
        """Read once, when the segment's consumer is made."""
        ...

    def id_of(self, segment: SegmentConsumer, message_id: MessageId, turn: int) -> AnyMessageId:
        """The id of a message for the application: it may name other segments too."""
        ...


class _Restart(Exception):
    """The subscription is to be opened anew, at once."""


class SegmentConsumer(ABC):
    """One segment. `run` is its life."""

    def __init__(self, parent: ParentConsumer, spec: SegmentSpec) -> None:
        context = parent.context
        self.parent = parent
        self.spec = spec
        self.settings = context.settings
        self.connections = context.connections
        self.receive_queue = context.receive_queue
        self.loop = asyncio.get_running_loop()
        # What others see of its life: they wait for these signals, and look at these flags.
        self.news = Signal()
        self.ends = Signal()
        """Advances when the topic has reached its end, and when this consumer is over."""
        self.is_subscribed = False
        """It was, at least once."""
        self.has_ended = False
        self.failure: MagnetarError | None = None
        """Why it cannot be consumed, and no retry will help; known before it has ended."""
        self.reached_end = False
        """The topic takes no more messages, and everything of it is acknowledged."""
        self.end_is_final = False
        """It has reached its end, and nothing came in its place."""
        self.generation = 0
        """Counts how often everything was delivered anew on purpose: by a seek or a rewind."""
        # The present connection, and what happened to it.
        self._open: tuple[BrokerConnection, int] | None = None
        self.trouble: MagnetarError | None = None
        self._is_restarting = False
        self._is_closed_by_broker = False
        self._sending: asyncio.Timeout | None = None
        """A broker that closed the consumer does not answer: `lost` ends the wait."""
        # Permits that the broker may be given: half a queue at a time, as Pulsar's clients do.
        self._returned = 0
        self._returned_enough = max(1, context.settings.queue_size // 2)
        self._release_by: float | None = None
        self._waits_for_application = True
        self._waits_for_others = context.waits_for_others
        connections = context.connections
        self.traffic = connections.metrics.received_from(spec.topic, spec.subscription)
        self._interceptors = connections.interceptors
        self._is_watched = bool(self._interceptors)
        self._backoff = connections.backoff()
        self._outbox = AckOutbox(self, spec.wire_topic, spec.subscription)
        self._intake = EntryIntake(
            self,
            context.receive_queue,
            context.decryptor,
            on_decryption_failure=context.settings.on_decryption_failure,
            chunked_messages_max=context.settings.chunked_messages_max,
            chunk_timeout=context.settings.chunk_timeout,
        )

    # --- what subclasses decide

    @abstractmethod
    def admit(self, position: Position, size: int, unacked: int) -> int:
        """The set of messages of an entry that are to be handed out."""

    @abstractmethod
    def discard(self, position: Position, index: int, size: int) -> None:
        """Acknowledge something that is not for the application."""

    @abstractmethod
    def give_up_chunks(self, ids: Sequence[MessageId]) -> bool:
        """Give up chunks that cannot become a message here; whether they will come again."""

    @property
    @abstractmethod
    def has_acks(self) -> bool:
        """There are acknowledgements to send."""

    @abstractmethod
    def take_acks(self) -> tuple[list[AckItem], bool]:
        """What is to be sent, and whether it is cumulative."""

    @abstractmethod
    def confirm_acks(self, items: Sequence[AckItem]) -> None: ...

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """The application has nothing that is not acknowledged."""

    @abstractmethod
    def _handed_out(self, message: Message[Any]) -> None: ...

    @abstractmethod
    def _handed_out_rows(self, rows: EntryRows, turn: int) -> None: ...

    @property
    def takes_rows(self) -> bool:
        """Whether batches may wait as they are."""
        return True

    @abstractmethod
    def _dropped(self, messages: Sequence[Message[Any]]) -> None:
        """Note messages that left the receive queue, but not to the application."""

    @abstractmethod
    def _reconnected(self) -> None:
        """A new connection: what was in flight must be sent again."""

    @property
    def _may_ask(self) -> bool:
        """Whether the application settled enough to be given more."""
        return True

    def _next_due(self) -> float | None:
        """When `_do_due` has something to do."""
        return self._intake.next_expiry

    def _do_due(self, now: float) -> None:
        """Do what was to be done by now."""
        self._intake.expire(now)

    # --- what the consumer sees

    @property
    def topic(self) -> str:
        """The topic as the application knows it."""
        return self.spec.topic

    @property
    def wire_topic(self) -> str:
        """The topic as the broker knows it: that of the segment."""
        return self.spec.wire_topic

    @property
    def segment_id(self) -> int | None:
        """The number of the segment; None: of a regular topic."""
        return self.spec.segment_id

    @property
    def is_releasing(self) -> bool:
        """Whether it hands out no more, and is to end."""
        return self._release_by is not None

    def id_of(self, message_id: MessageId, turn: int) -> AnyMessageId:
        # Regular topics have plain ids, which nothing has to be added to.
        if self.spec.segment_id is None:
            return message_id
        return self.parent.id_of(self, message_id, turn)

    def deliver(self, message: Message[Any] | EntryRows) -> None:
        """What arrived and was let in."""
        self.receive_queue.add(message)

    def handing_out(self, message: Message[Any]) -> None:
        # Called for every message: permits are only counted, and given half a queue at a time.
        self._handed_out(message)
        self._returned += 1
        if self._returned >= self._returned_enough:
            self.give_permits(0)
        traffic = self.traffic
        traffic.messages += 1
        traffic.bytes += len(message.data)
        if self._is_watched:
            self._interceptors.received(message, self.spec.subscription)

    def handing_out_rows(self, rows: EntryRows, turn: int) -> None:
        self._handed_out_rows(rows, turn)
        self.give_permits(rows.num_rows)
        self.traffic.messages += rows.num_rows

    def acknowledging(
        self, message: Message[Any] | AnyMessageId, *, is_cumulative: bool = False
    ) -> None:
        """The application acknowledges a message, or all up to it."""
        self.traffic.acknowledged += 1
        if self._is_watched:
            subscription = self.spec.subscription
            self._interceptors.acknowledged(message, subscription, is_cumulative=is_cumulative)

    def giving_back(self, message: Message[Any]) -> None:
        """The application gives a message back."""
        self.traffic.nacked += 1
        if self._is_watched:
            self._interceptors.nacked(message, self.spec.subscription)

    def release(self, *, wait: bool = True) -> None:
        """Hand out no more, and end: with `wait`, once the application has settled what it has."""
        # Closing overrides a release that waits: not the other way round.
        self._waits_for_application &= wait
        if self._release_by is None:
            self._release_by = self.loop.time() + self.settings.release_timeout
            self._intake.drop_held()
            self._dropped(self.receive_queue.drop(self))
        self.news.advance()

    def restart(self) -> None:
        """Open the subscription anew: the broker delivers everything that is not acknowledged."""
        self._is_restarting = True
        # What waits was delivered by the old subscription; the new one delivers it again.
        self._intake.drop_held()
        self._dropped(self.receive_queue.drop(self))
        self.news.advance()

    async def ask(self, type_name: str, **fields: Any) -> Any:
        """A request about this consumer; raises `ServiceNotReady` while it has no connection."""
        connection, number = self._connected()
        return await connection.request(type_name, consumer_id=number, **fields)

    def _connected(self) -> tuple[BrokerConnection, int]:
        if self._open is None:
            raise ServiceNotReady(f"{self.wire_topic} is not connected")
        return self._open

    async def _ask_acks(
        self, items: Sequence[AckItem], /, *, cumulative: bool, txn: TxnId | None = None
    ) -> Any:
        connection, number = self._connected()
        named = [(each.position, words_of(each.unacked), each.batch_size) for each in items]

        def encode(request_id: int) -> bytes:
            return encode_ack(number, request_id, named, cumulative=cumulative, txn=txn)

        return await connection.request("ACK", encode=encode)

    async def ask_again(self, type_name: str, **fields: Any) -> Any:
        """Ask until there is an answer, over lost connections too; for what can be repeated."""

        async def attempt() -> Any:
            if self.has_ended:
                raise self._ended_error()
            return await self.ask(type_name, **fields)

        connections = self.connections
        timeout_s = connections.settings.operation_timeout
        what = f"{type_name} of {self.wire_topic}"
        return await retrying(what, attempt, connections.backoff(), timeout_s)

    def tell(self, type_name: str, **fields: object) -> None:
        """A command about this consumer; nothing while it has no connection."""
        if self._open is not None and self._open[0].is_open:
            self._open[0].tell(type_name, consumer_id=self._open[1], **fields)

    async def until_subscribed(self) -> None:
        """Until the first subscription is there; raises why it will not be."""
        while not self.is_subscribed:
            if self.has_ended:
                ended = f"{self.wire_topic}: the consumer ended before it was subscribed"
                raise self.trouble or AlreadyClosed(ended)
            await self.news.past(self.news.version)

    # --- acknowledging, for subclasses

    def acked(self) -> Acknowledged:
        """Have what was just acknowledged sent: done when the broker has it."""
        # Others have acknowledged since the last command: the same answer is for all of them.
        joined = self._outbox.joined
        if joined is not None:
            return joined
        if self.has_ended:
            return abandoned(self._ended_error())
        self.news.advance()
        return self._outbox.join()

    def acked_in(
        self,
        txn: AckTransaction,
        items: Sequence[AckItem],
        *,
        cumulative: bool,
        on_end: Callable[[bool], None],
    ) -> Acknowledged:
        """Have an acknowledgement sent in a transaction."""
        if self.has_ended:
            raise self._ended_error()
        joined = self._outbox.join_txn(txn, items, cumulative=cumulative, on_end=on_end)
        self.news.advance()
        return joined

    def refuse_stale(self, message: Message[Any]) -> None:
        """Raise if a message is of an older generation: it would have two results."""
        if message._generation != self.generation:
            raise TransactionConflict(
                f"{message._raw_id} is delivered again since another transaction was aborted"
            )

    def _ended_error(self) -> MagnetarError:
        return AlreadyClosed(
            f"{self.wire_topic} is not consumed here any more",
            hint="what was not acknowledged is delivered again",
        )

    # --- its life

    async def run(self) -> None:
        try:
            while not self._is_over():
                try:
                    await self._serve()
                # Opened anew on purpose (a seek, a rewind): at once, and without a pause.
                except _Restart:
                    self._disconnected()
                except MagnetarError as error:
                    self._disconnected()
                    if not self._may_go_on(error):
                        return
                    _LOG.info("consumer-interrupted", topic=self.wire_topic, reason=str(error))
                    await self._pause()
                # Released, and closed at the broker: that is the end.
                else:
                    return
        finally:
            self._end()

    def _is_over(self) -> bool:
        if self._release_by is None:
            return False
        # Invariant 4: an application that does not settle must not hold the segment forever.
        if self.loop.time() >= self._release_by:
            return True
        is_open = self._waits_for_application and not self.is_settled
        return not is_open and not self._outbox.has_work

    def _may_go_on(self, error: MagnetarError) -> bool:
        self.trouble = error
        # Passing: the broker restarts, the topic moves. While it is released nobody waits for
        # anything else. All else depends on whether it was ever subscribed: a refusal at first is
        # told at once, later it may be a matter of time.
        if is_passing(error):
            return True
        if self.is_releasing:
            return False
        # Who has the segment lets go of it in time; who consumes it in another way does not.
        waits = self._waits_for_others and not is_other_type(error)
        if may_open(error, was_open=self.is_subscribed or waits):
            return True
        self.failure = error
        return False

    async def _pause(self) -> None:
        """Before the next try; a release or restart cuts it short."""
        self._is_restarting = False  # the next try is one, whenever it succeeds
        was_releasing = self.is_releasing
        version = self.news.version
        try:
            async with asyncio.timeout(self._backoff.next()):
                while self.is_releasing is was_releasing and not self._is_restarting:
                    version = await self.news.past(version)
        except TimeoutError:
            return

    async def _serve(self) -> None:
        """Consume on one connection until all is released; raises why it ended before."""
        connection = await self.connections.lookup(self.wire_topic)
        number = connection.register(CONSUMER, self)
        self._is_restarting = self._is_closed_by_broker = False
        self.trouble = None
        is_closed = False
        try:
            await self._subscribe(connection, number)
            self._raise_trouble()
            # Before anything is asked for: acknowledgements first, so that the broker does not
            # deliver what is acknowledged (invariant 2).
            self._reconnected()
            self._open = (connection, number)
            if self._outbox.has_work:
                await self._send_acks()
            self.is_subscribed = True
            self.news.advance()
            self._returned = self.settings.queue_size  # it has none on a new connection
            self.give_permits(0)
            await self._until_over()
            # No permits from here on: what the broker still delivers is dropped, and goes to
            # others.
            self._open = None
            await connection.request("CLOSE_CONSUMER", consumer_id=number)
            is_closed = True
        finally:
            self._open = None
            connection.unregister(CONSUMER, number)
            # It ended in the middle of something: the broker may have a consumer of ours.
            if not is_closed and not self._is_closed_by_broker:
                connection.tell_request("CLOSE_CONSUMER", consumer_id=number)

    async def _subscribe(self, connection: BrokerConnection, number: int) -> None:
        await connection.request("SUBSCRIBE", **self._subscribe_fields(number))

    def _subscribe_fields(self, number: int) -> dict[str, Any]:
        spec, settings = self.spec, self.settings
        fields: dict[str, Any] = {
            "topic": spec.wire_topic,
            "subscription": spec.subscription,
            "consumer_name": spec.consumer_name,
            "consumer_id": number,
            "initialPosition": int(settings.initial_position),
            "priority_level": settings.priority_level,
            "read_compacted": settings.read_compacted,
            "metadata": _pairs(settings.properties),
            "subscription_properties": _pairs(settings.subscription_properties),
            **spec.fields,
        }
        wire = self.receive_queue.schemas.schema.info.to_wire()
        if wire is not None:
            fields["schema"] = wire
        return fields

    async def _until_over(self) -> None:
        while True:
            # The version first: what happens while it looks wakes the wait at the end.
            version = self.news.version
            self._raise_trouble()
            if self._outbox.has_work:
                await self._send_acks()
                continue
            if self._is_over():
                return
            now = self.loop.time()
            # Redeliveries, expired chunks, messages whose time of delivery comes; or the end of
            # patience.
            dues = (self._next_due(), self._release_by)
            due = min((each for each in dues if each is not None), default=None)
            if due is not None and due <= now:
                self._do_due(now)
                continue
            try:
                async with asyncio.timeout_at(due):
                    await self.news.past(version)
            except TimeoutError:
                continue

    async def _send_acks(self) -> None:
        try:
            async with asyncio.timeout(None) as self._sending:
                await self._outbox.send(self._ask_acks)
        # `lost` set the deadline to now: the answer will not come.
        except TimeoutError:
            self._raise_trouble()
            raise
        finally:
            self._sending = None
        self._backoff.reset()
        # What was settled may have made room.
        self.give_permits(0)

    def _raise_trouble(self) -> None:
        if self.trouble is not None:
            raise self.trouble
        if self._is_restarting:
            raise _Restart

    def _disconnected(self) -> None:
        # The intake first: the room that the queue gains is not for what came before, too.
        self._intake.reconnected()
        self._dropped(self.receive_queue.drop(self))

    def _end(self) -> None:
        self.has_ended = True
        self._disconnected()
        self._outbox.end(self._ended_error())
        self.news.advance()
        self.ends.advance()

    # --- permits

    def give_permits(self, count: int) -> None:
        """Count messages that left the queue, and give the broker permits when it is time."""
        self._returned += count
        is_due = self._returned >= self._returned_enough
        if is_due and self._open is not None and not self.is_releasing and self._may_ask:
            self.tell("FLOW", messagePermits=self._returned)
            self._returned = 0

    # --- the connection's side

    def take(self, command: Command) -> None:
        if isinstance(command, Delivered):
            # What comes after a release or a seek is not for the application: the broker gives it
            # to others, or delivers it anew.
            if self._release_by is None and not self._is_restarting:
                self._backoff.reset()
                self._intake.take(command)
        elif isinstance(command, Received):
            if command.type == _REACHED_END:
                self._intake.in_order(self._reach_end)
            elif command.type == _CLOSED:
                self._is_closed_by_broker = True
                self.lost(ServiceNotReady(f"the broker closed the consumer of {self.wire_topic}"))

    def _reach_end(self) -> None:
        self.reached_end = True
        self.ends.advance()

    def lost(self, error: MagnetarError) -> None:
        if self.trouble is None:
            self.trouble = error
        if self._sending is not None:
            self._sending.reschedule(self.loop.time())
        self.news.advance()


def _pairs(properties: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in properties.items()]
