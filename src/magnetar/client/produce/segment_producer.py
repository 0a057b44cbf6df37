"""A producer on one segment (or partition), over all its connections.

Owns: `SegmentProducer`: its place at the broker, and when what is in its `Outbox` is written;
`ProducerSpec`, what all segments of one producer have in common.

Invariants:
1. What has no receipt when a connection ends is written again on the next one, before anything
   newer.
2. Once the segment takes no more messages, or it is told to end, nothing more is written; what
   comes is kept for `left`.
3. A refusal that concerns one message fails that message; any other one is trouble of the whole
   producer, and heals with the next connection or not at all.
4. While the disk of the server is full each message fails with that, after one try to open; what
   may be stored already fails as lost. The producer lives on, and opens once there is room.

Relies on: `PendingMessages`, below it, which numbers messages and settles them. It calls nothing
above: that its segment is terminated it says by a `Signal`, and `left` is asked for what is to go
elsewhere.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from magnetar.client.connection.connection import PRODUCER, BrokerConnection
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import may_open, refusal
from magnetar.client.connection.throttling import Throttling
from magnetar.client.message.batch import PayloadCipher
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.outbox import Outbox, Pending, PendingSend
from magnetar.client.produce.pending_messages import PendingMessages
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.schema.info import Schema
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    DeadlineExceeded,
    MagnetarError,
    MessageTooLarge,
    ProducerFenced,
    RemoteProtocolError,
    ServerDiskFull,
    ServiceNotReady,
    TopicNotFound,
    TopicTerminated,
    WireCode,
)
from magnetar.model.ids import MessageId, ScalableMessageId
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment
from magnetar.runtime.signal import Signal
from magnetar.wire.commands import TYPES
from magnetar.wire.frames import encode_send
from magnetar.wire.messages import Command, Received, TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

V5_MARK: Final = ("__pulsar.v5.managed", "true")
"""Tells a broker that this client follows its regular topic when that becomes a scalable one."""

_RECEIPT: Final = TYPES["SEND_RECEIPT"]
_SEND_ERROR: Final = TYPES["SEND_ERROR"]

# So much that a call is cheap beside its bytes, so little that a slow broker is soon noticed.
_WRITE_BYTES: Final = 256 * 1024
"""Written at a time, before it is looked whether the transport takes more."""

_LAST_ANSWERS_S: Final = 2.0
"""After so long without an answer Pulsar tells no more about messages of a producer it closed."""

_FULL_DISK_PAUSE_S: Final = 0.2
"""Between two tries to open on a full disk while there are messages to send."""

_MESSAGE_REFUSED: Final = frozenset({WireCode.CHECKSUM, WireCode.NOT_ALLOWED})
"""These say something of one message, not of its producer."""


@dataclass(frozen=True, slots=True)
class ProducerSpec:
    """A producer as brokers are told of it, whatever the segment."""

    name: str
    settings: ProducerSettings
    schema: Schema[Any]
    is_named_by_application: bool
    cipher: PayloadCipher | None = None

    def opening_fields(self, *, is_regular: bool) -> dict[str, Any]:
        """What PRODUCER says, but for the segment, names and numbers."""
        metadata = [{"key": name, "value": text} for name, text in self.settings.properties.items()]
        if is_regular:
            metadata.append({"key": V5_MARK[0], "value": V5_MARK[1]})
        fields: dict[str, Any] = {
            "user_provided_producer_name": self.is_named_by_application,
            "producer_access_mode": int(self.settings.access_mode),
            "metadata": metadata,
            "txn_enabled": True,
        }
        if self.cipher is not None:
            fields["encrypted"] = True
        schema = self.schema.info.to_wire()
        if schema is not None:
            fields["schema"] = schema
        return fields


class SegmentProducer:
    """One producer on one segment."""

    def __init__(
        self,
        connections: Connections,
        spec: ProducerSpec,
        pending: PendingMessages,
        segment: Segment,
        topic: str,
        *,
        terminated: Signal,
    ) -> None:
        """`terminated` is advanced when the broker says that the segment takes no more."""
        self.segment = segment
        self.topic = topic
        self.is_regular = segment.legacy_topic_name is not None
        name = spec.name
        self.name = name if self.is_regular else f"{name}-seg-{segment.segment_id}"
        partition = TopicName.parse(topic).partition
        self._partition = -1 if partition is None else partition
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when it was opened for the first time, or was refused for good."""
        self.is_over = asyncio.Event()
        """It writes nothing more, and no receipt of what it wrote can come."""
        self.failure: MagnetarError | None = None
        """Why it is not connected, if it is not."""
        self.is_terminated = False
        """The broker said that this segment takes no more messages."""
        self._connections = connections
        self._spec = spec
        self._pending = pending
        self._terminated = terminated
        self._outbox = Outbox(
            segment,
            spec.settings,
            producer_name=self.name,
            sequences=pending.sequences,
            clock=connections.clock,
            chance=connections.chance,
            cipher=spec.cipher,
        )
        self._stranded: list[Pending] = []
        # Batches: the timer that closes open ones.
        self._timer: asyncio.Handle | None = None
        # The present connection, and what became of it: set by what the broker says, read by `run`.
        self._open: tuple[BrokerConnection, int] | None = None
        self._throttling = Throttling()
        self._opening: asyncio.Task[pb.CommandProducerSuccess] | None = None
        self._is_pumping = False
        self._is_ending = False
        self._closed_by_broker = False
        self._is_append_refused = False
        self._leaves_doubt = False
        """What was in flight when the last connection ended may be stored."""
        self._trouble: MagnetarError | None = None
        self._news = Signal()
        self._epoch = 0
        self._topic_epoch: int | None = None
        self._backoff = connections.backoff()

    # --- the producer's side

    @property
    def takes_messages(self) -> bool:
        """Whether what is offered is sent from here."""
        return not self._is_ending and not self.is_terminated

    @property
    def throttling(self) -> Throttling:
        """The rates that its present or last connection waits for."""
        return self._throttling

    @property
    def _goes_on(self) -> bool:
        """Nothing happened that ends the present connection."""
        return not self._is_ending and self._trouble is None

    def offer(self, message: Pending) -> None:
        """Take a message; it is sent as soon as that is possible."""
        # Between two layouts (invariant 2): it moves with the rest, in its order.
        if not self.takes_messages:
            self._stranded.append(message)
            return
        outbox = self._outbox
        try:
            outbox.add(message)
        except MessageTooLarge as error:
            # A batch of rows that is too large for the broker: its messages may fit one by one.
            if message.count > 1:
                for each in message.messages():
                    self.offer(each)
                    outbox.close_batches()  # each is an entry of its own
            else:
                self._pending.failed([message], error)
        if outbox.has_waiting:
            self._pump_soon()
        # It may open by now; if not, this one need not wait for the next try to be told so.
        if isinstance(self.failure, ServerDiskFull):
            self._news.advance()
        # The timer runs exactly while a batch is open.
        if outbox.has_open_batches:
            if self._timer is None:
                self._set_timer()
        elif self._timer is not None:
            self._stop_timer()

    def close_batches(self) -> None:
        """Let nothing wait for more messages."""
        self._stop_timer()
        if self.takes_messages:
            self._outbox.close_batches()
            self._pump_soon()

    def end(self) -> None:
        """Write no more; `is_over` comes once what is in flight is settled."""
        self._is_ending = True
        self._stop_timer()
        self._interrupt()

    def left(self) -> list[Pending]:
        """What has no receipt, in order, to go elsewhere; call it when it `is_over`."""
        stranded, self._stranded = self._stranded, []
        open_ones = [each for each in stranded if not each.is_settled]
        return self._outbox.left() + [one for each in open_ones for one in each.messages()]

    def unsent(self, txn_id: TxnId) -> list[Pending]:
        """The messages of a transaction that were not written to a connection."""
        self.close_batches()  # what is not dropped must not wait for a timer any more
        stranded = [each for each in self._stranded if each.txn == txn_id]
        return self._outbox.unsent(txn_id) + [each for each in stranded if not each.may_be_stored]

    def gave_up(self) -> None:
        """Messages were given up: begin anew without those that are in flight."""
        # Its answers would have to be matched with entries that nobody waits for; a new connection
        # sends the others again.
        if self._open is not None and self._outbox.has_dead_in_flight:
            self.lost(DeadlineExceeded(f"{self.topic} gave no receipt in time"))

    def _set_timer(self) -> None:
        # An idle segment has no reason to wait: the batch is what this turn of the loop brings.
        if self._outbox.is_idle:
            self._timer = self._loop.call_soon(self.close_batches)
        else:
            delay = self._spec.settings.batch_delay
            self._timer = self._loop.call_later(delay, self.close_batches)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- writing

    def _pump_soon(self) -> None:
        """Write at the end of this turn of the loop, with whatever else it brings."""
        if not self._is_pumping and self._open is not None:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pumping = False
        if self._open is None or not self.takes_messages or self._trouble is not None:
            return
        connection, number = self._open
        while self._outbox.has_waiting and connection.is_open:
            # The broker reads slower than this sends: the transport calls back once it has room.
            if not connection.is_writable:
                self._is_pumping = True
                connection.when_writable(self._pump)
                return
            pieces: list[bytes] = []
            for outbound in self._outbox.send_some(_WRITE_BYTES):
                pieces += _encoded(number, outbound)
            connection.write_pieces(pieces)

    # --- its life

    async def run(self) -> None:
        """Until it is told to end, or takes no more messages."""
        try:
            while self.takes_messages:
                try:
                    await self._serve()
                except MagnetarError as error:
                    self._note(error)
                self._outbox.requeue(in_doubt=self._leaves_doubt)
                if self.takes_messages:
                    if isinstance(self.failure, ServerDiskFull):
                        self._fail_all(self.failure)
                    await self._pause()
        finally:
            self._open = None
            self.is_over.set()
            self._refuse(self.failure or AlreadyClosed(f"{self.name} was closed"))

    def _note(self, error: MagnetarError) -> None:
        """What the end of a connection, or a refusal to open, means."""
        self.failure = error
        # The segment was sealed or, if it was open before, deleted since: its messages go to its
        # successors. A regular topic that is not found may be created with the next try.
        if isinstance(error, TopicTerminated) or (
            isinstance(error, TopicNotFound) and not self.is_regular and self.ready.done()
        ):
            self.is_terminated = True
            self._stop_timer()
            self._refuse(error)
            self._terminated.advance()
        # Refused for good (not authorized, fenced, a wrong schema): no segment can go on.
        elif not self._may_open(error) and not self._is_ending:
            self._is_ending = True
            self._refuse(error)
            self._pending.fail(error)

    def _may_open(self, error: MagnetarError) -> bool:
        # The first segment of a producer tells its application that the disk is full; one that
        # comes with a later layout must not end the others.
        if isinstance(error, ServerDiskFull) and self._pending.was_opened:
            return True
        return may_open(error, was_open=self.ready.done())

    def _refuse(self, error: MagnetarError) -> None:
        """Tell who waits for the first opening that it will not come."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # nobody may be waiting

    async def _pause(self) -> None:
        """Before the next try; cut short when it is told to end."""
        seconds = self._backoff.next()
        # Invariant 4: a message that comes cuts the pause short, but for a breath.
        if isinstance(self.failure, ServerDiskFull):
            await self._until_ending(min(seconds, _FULL_DISK_PAUSE_S))
            if not self._is_ending and self._outbox.is_idle and not self._outbox.has_open_batches:
                await self._news.past_within(self._news.version, seconds)
            return
        await self._until_ending(seconds)

    async def _until_ending(self, seconds: float) -> None:
        version = self._news.version
        try:
            async with asyncio.timeout(seconds):
                while not self._is_ending:
                    version = await self._news.past(version)
        except TimeoutError:
            return

    def _fail_all(self, error: ServerDiskFull) -> None:
        """Fail what waits, by what is known of each message."""
        left = self._outbox.left()
        self._stop_timer()
        lost = [each for each in left if each.is_in_doubt]
        if lost:
            text = f"{self.topic}: the connection was lost, and now {error}"
            self._pending.failed(lost, ConnectionLost(text))
        self._pending.failed([each for each in left if not each.is_in_doubt], error)

    async def _serve(self) -> None:
        """Produce on one connection until it ends: raises why, unless it is told to end."""
        connection = await self._connections.lookup(self.topic)
        if self._is_ending:
            return
        number = connection.register(PRODUCER, self)
        self._throttling = connection.throttling
        self._trouble = None
        self._closed_by_broker = False
        self._is_append_refused = False
        try:
            await self._open_at(connection, number)
            self._open = (connection, number)
            self._leaves_doubt = True
            self._pump_soon()
            version = self._news.version
            while self._goes_on:
                version = await self._news.past(version)
            # It was told to end, or had trouble of its own making: the broker must know.
            if not self._closed_by_broker and connection.is_open:
                # Its answer comes behind the receipts of what is in flight.
                await connection.request("CLOSE_PRODUCER", producer_id=number)
            if not connection.is_magnetar:
                await self._until_answered(connection)
            # Magnetar answers what it has taken before it closes a producer.
            is_unknown = not connection.is_magnetar and self._outbox.awaits_answers
            self._leaves_doubt = not connection.is_open or self._is_append_refused or is_unknown
            if self._trouble is not None:
                raise self._trouble
        # Nobody waits for an answer any more, and the broker may have opened it all the same.
        except (DeadlineExceeded, AlreadyClosed, asyncio.CancelledError):
            connection.tell_request("CLOSE_PRODUCER", producer_id=number)
            raise
        finally:
            self._open = None
            # A connection that is lost calls nobody back, not even who waited to write on it.
            self._is_pumping = False
            connection.unregister(PRODUCER, number)

    async def _until_answered(self, connection: BrokerConnection) -> None:
        """Pulsar closes a producer, and only then tells what became of its last messages."""
        while self._outbox.awaits_answers and connection.is_open:
            try:
                async with asyncio.timeout(_LAST_ANSWERS_S):
                    await self._news.past(self._news.version)
            except TimeoutError:
                return

    async def _open_at(self, connection: BrokerConnection, number: int) -> None:
        fields = self._spec.opening_fields(is_regular=self.is_regular)
        if self._topic_epoch is not None:
            fields["topic_epoch"] = self._topic_epoch
        asked = connection.request(
            "PRODUCER",
            # One that had the topic for itself does not wait for it again: another one has it.
            on_answer=_is_ready if self._topic_epoch is None else None,
            topic=self.topic,
            producer_id=number,
            producer_name=self.name,
            epoch=self._epoch,
            **fields,
        )
        self._epoch += 1
        self._opening = self._loop.create_task(asked, name=f"open {self.name}")
        try:
            answer = await self._opening
        # Cancelled by `_interrupt`, because something happened, or from outside, with the whole
        # task.
        except asyncio.CancelledError:
            if self._goes_on:
                raise
            raise (self._trouble or AlreadyClosed(f"{self.name} was closed")) from None
        finally:
            self._opening = None
        # It had the topic for itself once (`topic_epoch`), and another one has taken that over.
        if not answer.producer_ready:
            raise ProducerFenced(f"{self.name}: another producer has {self.topic} for itself")
        self._opened(answer, connection)

    def _opened(self, answer: pb.CommandProducerSuccess, connection: BrokerConnection) -> None:
        self._pending.opened_with(answer.last_sequence_id, answer.schema_version)
        if answer.HasField("topic_epoch"):
            self._topic_epoch = answer.topic_epoch
        self._outbox.entry_bytes_max = connection.max_message_bytes
        self.failure = None
        if not self.ready.done():
            self.ready.set_result(None)

    def _interrupt(self) -> None:
        """Wake whatever is waited for: something happened."""
        self._news.advance()
        if self._opening is not None:
            self._opening.cancel()

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if command.type == _RECEIPT:
            self._take_receipt(body)
            if self._trouble is not None:
                self._news.advance()
        elif command.type == _SEND_ERROR:
            self._take_error(body)
        else:
            self._closed_by_broker = True
            self.lost(ServiceNotReady(f"{self.name} was closed by the broker"))

    def lost(self, error: MagnetarError) -> None:
        if self._trouble is None:
            self._trouble = error
        self._interrupt()

    def _take_receipt(self, body: pb.CommandSendReceipt) -> None:
        outbound = self._answered(body.sequence_id)
        if outbound is not None:
            self._backoff.reset()
            if outbound.is_whole:
                self._pending.stored(outbound.messages, self._ids(outbound, body.message_id))

    def _take_error(self, body: pb.CommandSendError) -> None:
        error = refusal(f"a message to {self.topic}", body.error, body.message)
        # Invariant 3. After a seal the broker refuses all that follows, and what it refused is
        # certainly not stored; after any other refusal of an append that is not certain.
        if error.wire_code not in _MESSAGE_REFUSED:
            if isinstance(error, TopicTerminated):
                self._outbox.refused(body.sequence_id)
            else:
                self._is_append_refused = True
            self.lost(error)
            return
        outbound = self._answered(body.sequence_id)
        if outbound is not None:
            self._pending.failed(outbound.messages, error)

    def _answered(self, sequence_id: int) -> PendingSend | None:
        try:
            return self._outbox.answered(sequence_id)
        except RemoteProtocolError as error:
            self.lost(error)
            return None

    def _ids(self, outbound: PendingSend, sent: pb.MessageIdData) -> list[AnyMessageId]:
        ledger, entry = _signed(sent.ledgerId), _signed(sent.entryId)
        count = len(outbound.messages)
        partition = self._partition
        if count == 1:
            plain = [MessageId(ledger, entry, partition)]
        else:
            plain = [MessageId(ledger, entry, partition, index, count) for index in range(count)]
        if self.is_regular:
            return list(plain)
        segment_id = self.segment.segment_id
        return [ScalableMessageId(segment_id, each) for each in plain]


def _encoded(producer_id: int, outbound: PendingSend) -> list[bytes]:
    entry = outbound.entry
    return encode_send(
        producer_id,
        entry.sequence_id,
        entry.headers_and_payload,
        num_messages=entry.num_messages,
        txn=entry.txn,
        highest_sequence_id=entry.highest_sequence_id,
        is_chunk=outbound.is_chunk,
    )


def _is_ready(answer: pb.CommandProducerSuccess) -> bool:
    """False: it waits to have the topic for itself."""
    return bool(answer.producer_ready)


def _signed(number: int) -> int:
    """An id that the wire has as unsigned; -1 is that of a dropped repetition."""
    return number - (1 << 64) if number >> 63 else number
