"""What a consumer of a scalable topic gets of one segment, over its connections.

Owns: `Inbox`, where the messages of all segments of a consumer wait for the application;
`Delivery`, one of them; `SegmentFeed`, a consumer on one segment; `ReaderFeed`, a non-durable one
that begins at a position.

Invariants:
1. A feed has no more messages in the inbox than `PERMITS`: more are asked for only once the
   application has as many.
2. A message counts as handed out from `Inbox.take` until its acknowledgement is durable.
3. Each connection is a generation. What an earlier one delivered is dropped from the inbox, and an
   acknowledgement of it does nothing: the broker delivers it again.
4. A feed that is released hands nothing more out, and closes once everything that it handed out is
   acknowledged (or after `RELEASE_S`: the broker then gives the rest to the next owner).

Relies on: one message being one entry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from harness.simulation.scalable.history import AckDurable, AckSent
from harness.simulation.scalable.history import Delivered as DeliveredEvent
from harness.simulation.scalable.links import CLIENT_ERRORS, Line, Links, Pauses, Record
from magnetar.errors import DeadlineExceeded, RequestError, WireCode
from magnetar.model.ids import LATEST, MessageId, Position
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.network import End
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Delivered, Received, layout_of, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb

PERMITS: Final = 500
RELEASE_S: Final = 20.0

_ACKS_MAX: Final = 1000
_UINT64: Final = 2**64
_INT64_MAX: Final = 2**63 - 1


@dataclass(slots=True, eq=False)
class Delivery:
    """A message, as the application gets it."""

    feed: SegmentFeed
    generation: int
    position: Position
    producer: str
    sequence: int
    key: str
    payload: bytes
    redelivery_count: int
    sent_at: float | None
    """When the broker wrote it, if the network tells."""
    marks: tuple[Mark, ...] = ()
    """How far every segment had been handed out, this message included."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one segment was handed out."""

    feed: SegmentFeed
    generation: int
    position: Position


class Inbox:
    """Messages of all segments, in the order of their arrival."""

    def __init__(self) -> None:
        self.arrivals = Signal()
        self._waiting: deque[Delivery] = deque()

    def add(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self.arrivals.advance()

    def drop(self, feed: SegmentFeed) -> None:
        """Forget what a feed put there."""
        self._waiting = deque(each for each in self._waiting if each.feed is not feed)

    async def take(self, timeout_s: float) -> Delivery:
        """The next message: from now on it is handed out."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._waiting:
                    await self.arrivals.past(self.arrivals.version)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no message came within {timeout_s} s") from error
        delivery = self._waiting.popleft()
        delivery.feed.handing_out(delivery)
        return delivery


class SegmentFeed:
    """A durable consumer of one segment. `run` is its life."""

    def __init__(
        self,
        links: Links,
        receive_queue: Inbox,
        *,
        segment_id: int,
        topic: str,
        subscription: str,
        consumer: str,
        options: Mapping[str, object],
        cumulative: bool,
        record: Record,
    ) -> None:
        self.segment_id = segment_id
        self.topic = topic
        self.options = options
        """Fields of SUBSCRIBE that depend on the kind of consumer."""
        self.generation = 0
        self.subscribed = False
        """It was, at least once."""
        self.ended = False
        self.reached_end = False
        """The segment is sealed, and everything of it is handed out and acknowledged."""
        self.news = Signal()
        self._links = links
        self._receive_queue = receive_queue
        self._subscription = subscription
        self._consumer = consumer
        self._cumulative = cumulative
        self._record = record
        self._handed: dict[Position, Delivery] = {}
        self._acks: dict[Position, Delivery] = {}
        self._taken = 0
        self._open: tuple[Line, int] | None = None
        self._failure: Exception | None = None
        self._closed_by_broker = False
        self._release_by: float | None = None
        self._pauses = Pauses()

    @property
    def releasing(self) -> bool:
        return self._release_by is not None

    # --- the consumer's side

    def handing_out(self, delivery: Delivery) -> None:
        self._handed[delivery.position] = delivery
        self._record(
            DeliveredEvent(
                self._subscription,
                self._consumer,
                delivery.producer,
                delivery.sequence,
                delivery.key,
                self.segment_id,
                delivery.position,
                delivery.sent_at,
            )
        )
        self._taken += 1
        if self._taken >= PERMITS // 2 and self._open is not None and not self.releasing:
            self._flow(self._taken)
            self._taken = 0

    def ack(self, generation: int, position: Position) -> None:
        """Acknowledge one message."""
        if generation == self.generation and position in self._handed:
            self._settle([position])

    def ack_through(self, generation: int, position: Position) -> None:
        """Acknowledge everything up to a message that was handed out."""
        if generation == self.generation:
            self._settle([each for each in self._handed if each <= position])

    def _settle(self, positions: list[Position]) -> None:
        for position in positions:
            if position not in self._acks:
                delivery = self._acks[position] = self._handed[position]
                self.ack_sent(delivery)
        self.news.advance()

    def release(self) -> None:
        """Hand out no more, and end once what was handed out is acknowledged."""
        if self._release_by is None:
            self._release_by = asyncio.get_running_loop().time() + RELEASE_S
            self._receive_queue.drop(self)
            self.news.advance()

    def ack_sent(self, delivery: Delivery) -> None:
        self._record(AckSent(self._subscription, delivery.producer, delivery.sequence))

    def ack_durable(self, delivery: Delivery) -> None:
        self._record(
            AckDurable(self._subscription, delivery.producer, delivery.sequence, self._written_at())
        )

    # --- its life

    async def run(self) -> None:
        try:
            while not self.ended:
                try:
                    await self._serve()
                except CLIENT_ERRORS as error:
                    self._failed(error)
                self._forget()
                # What it handed out comes again on the next connection, to whoever is next.
                self.ended |= self.releasing
                if not self.ended:
                    await self._pauses.wait()
        finally:
            self.ended = True
            self._receive_queue.drop(self)
            self.news.advance()

    def _failed(self, error: Exception) -> None:
        """Every error may pass, as long as its consumer wants the segment."""

    async def _serve(self) -> None:
        wait_s = self._links.wait_s
        line = await self._links.lookup(self.topic)
        number = line.register("consumer_id", self)
        self._failure = None
        self._closed_by_broker = False
        try:
            await self._subscribe(line, number)
            self._open = (line, number)
            self.subscribed = True
            self.news.advance()
            if not self.releasing:
                self._flow(PERMITS)
            await self._until_over(line, number)
            if not self._closed_by_broker and line.failure is None:
                await line.request("CLOSE_CONSUMER", consumer_id=number, timeout_s=wait_s)
            if self._failure is not None:
                raise self._failure
        except DeadlineExceeded:
            line.abort()
            raise
        finally:
            self._open = None
            line.unregister("consumer_id", number)

    async def _subscribe(self, line: Line, number: int) -> None:
        await line.request(
            "SUBSCRIBE",
            topic=self.topic,
            subscription=self._subscription,
            consumer_id=number,
            consumer_name=f"{self._consumer}-seg-{self.segment_id}",
            timeout_s=self._links.wait_s,
            **self.options,
        )

    async def _until_over(self, line: Line, number: int) -> None:
        """Send acknowledgements until the connection fails or everything is released."""
        now = asyncio.get_running_loop().time
        while self._failure is None:
            version = self.news.version
            if self._acks:
                try:
                    await self._send_acks(line, number)
                except RequestError as error:
                    self.lost(error)  # and so closed: the broker delivers it again
                continue
            if self._release_by is not None and (not self._handed or now() >= self._release_by):
                return
            try:
                async with asyncio.timeout_at(self._release_by):
                    await self.news.past(version)
            except TimeoutError:
                continue  # the time for the release is over

    async def _send_acks(self, line: Line, number: int) -> None:
        positions = list(self._acks)[:_ACKS_MAX]
        last = [max(positions)] if self._cumulative else positions
        kind = pb.CommandAck.Cumulative if self._cumulative else pb.CommandAck.Individual
        await line.request(
            "ACK",
            consumer_id=number,
            ack_type=kind,
            message_id=[wire_id(position) for position in last],
            timeout_s=self._links.wait_s,
        )
        for position in positions:
            self.ack_durable(self._acks.pop(position))
            self._handed.pop(position, None)

    def _flow(self, permits: int) -> None:
        if self._open is not None and self._open[0].failure is None:
            line, number = self._open
            if not line.detach().is_closing():
                line.send("FLOW", consumer_id=number, messagePermits=permits)

    def _forget(self) -> None:
        self.generation += 1
        self._receive_queue.drop(self)
        self._handed.clear()
        self._acks.clear()
        self._taken = 0

    # --- the line's side

    def take(self, command: Command) -> None:
        if isinstance(command, Delivered):
            self._pauses.reset()
            if not self.releasing:
                self._arrived(self._delivery(command))
        elif isinstance(command, Received):
            if command.type == TYPES["REACHED_END_OF_TOPIC"]:
                self.reached_end = True
                self.news.advance()
                self._receive_queue.arrivals.advance()
            elif command.type == TYPES["CLOSE_CONSUMER"]:
                self._closed_by_broker = True
                self.lost(RequestError(f"{self._consumer} was closed by the broker"))

    def lost(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self.news.advance()

    def _arrived(self, delivery: Delivery) -> None:
        self._receive_queue.add(delivery)

    def _delivery(self, command: Delivered) -> Delivery:
        data = command.headers_and_payload
        metadata = metadata_of(data)
        producer, separator, segment = metadata.producer_name.rpartition("-seg-")
        return Delivery(
            self,
            self.generation,
            position_of(command.body.message_id),
            producer if separator and segment.isdigit() else metadata.producer_name,
            metadata.sequence_id,
            metadata.partition_key,
            data[layout_of(data).payload :],
            command.body.redelivery_count,
            self._written_at(),
        )

    def _written_at(self) -> float | None:
        """When what arrived last was written; only a simulated network tells."""
        transport = None if self._open is None else self._open[0].detach()
        return transport.sent_at if isinstance(transport, End) else None


class ReaderFeed(SegmentFeed):
    """A non-durable consumer that begins behind `start`, and remembers how far it was read."""

    def __init__(
        self,
        links: Links,
        receive_queue: Inbox,
        *,
        segment_id: int,
        topic: str,
        subscription: str,
        consumer: str,
        start: MessageId,
        record: Record,
    ) -> None:
        super().__init__(
            links,
            receive_queue,
            segment_id=segment_id,
            topic=topic,
            subscription=subscription,
            consumer=consumer,
            options={"subType": pb.CommandSubscribe.Exclusive, "durable": False},
            cumulative=True,
            record=record,
        )
        self.position = start
        """Up to where it was handed out; `LATEST` only until it is open."""

    def handing_out(self, delivery: Delivery) -> None:
        super().handing_out(delivery)
        self.position = MessageId(*delivery.position)
        # A reader acknowledges what the application has: only then can it reach the end.
        self.ack_through(delivery.generation, delivery.position)

    def _arrived(self, delivery: Delivery) -> None:
        """The broker also sends the entry that it was told to start at: the application has it."""
        if delivery.position > self.position.position:
            super()._arrived(delivery)
            return
        self._taken += 1
        self._acks[delivery.position] = delivery
        self.news.advance()

    def ack_sent(self, delivery: Delivery) -> None:
        """No promise hangs on it: the checkpoint says where to go on."""

    def ack_durable(self, delivery: Delivery) -> None:
        """As with `ack_sent`."""

    def _failed(self, error: Exception) -> None:
        """A segment that is deleted has nothing more to read."""
        if isinstance(error, RequestError) and error.wire_code is WireCode.TOPIC_NOT_FOUND:
            self.ended = self.reached_end = True

    async def _subscribe(self, line: Line, number: int) -> None:
        if self.position == LATEST:
            await self._subscribe_at(line, number, LATEST)
            wait_s = self._links.wait_s
            last = await line.request("GET_LAST_MESSAGE_ID", consumer_id=number, timeout_s=wait_s)
            await line.request("CLOSE_CONSUMER", consumer_id=number, timeout_s=wait_s)
            # From here on it has a place of its own, which a checkpoint can name.
            self.position = MessageId(*position_of(last.last_message_id))
        await self._subscribe_at(line, number, self.position)

    async def _subscribe_at(self, line: Line, number: int, start: MessageId) -> None:
        name = f"{self._consumer}-seg-{self.segment_id}"
        await line.request(
            "SUBSCRIBE",
            topic=self.topic,
            # A name of its own each time: what is left of an earlier one stands elsewhere.
            subscription=f"reader-{name}-{self.generation}-{number}",
            consumer_id=number,
            consumer_name=name,
            start_message_id=wire_id(start.position),
            timeout_s=self._links.wait_s,
            **self.options,
        )


def position_of(message_id: pb.MessageIdData) -> Position:
    return Position(_signed(message_id.ledgerId), _signed(message_id.entryId))


def wire_id(position: Position) -> dict[str, int]:
    return {"ledgerId": position.ledger_id % _UINT64, "entryId": position.entry_id % _UINT64}


def _signed(number: int) -> int:
    return number if number <= _INT64_MAX else number - _UINT64
