"""A producer of a scalable topic that keeps the order of each key, whatever happens to segments.

Owns: `ScalableProducer` and its senders, one for each active segment that it has messages for.

Invariants:
1. Sequence ids ascend over the whole topic; each sender sends in their order.
2. A key is in one sender at a time. When a segment is gone from the layout, its sender ends first,
   and then, in one step, what it has no receipt for moves to the senders of the new layout, in
   order and before anything newer.
3. A sender that was closed or lost its connection opens again and sends again all that has no
   receipt. The sender of a terminated segment waits, with what it has, for the next layout.
4. At most `window` messages have no receipt.

Relies on: `DagWatch` for layouts. One message is one entry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from harness.simulation.scalable.history import Published, Receipted
from harness.simulation.scalable.links import (
    CLIENT_ERRORS,
    DagWatch,
    Line,
    Links,
    Pauses,
    Record,
    is_terminated,
    refusal,
    route,
    unrecorded,
)
from magnetar.errors import DeadlineExceeded, RemoteProtocolError, RequestError
from magnetar.model.hashing import key_hash
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Received

WINDOW: Final = 1000
STALL_S: Final = 60.0
"""After so long without a receipt a producer gives up."""

_STOP_S: Final = 30.0


@dataclass(slots=True, eq=False)
class Handed:
    """A message that has no receipt yet."""

    sequence: int
    key: str
    hash32: int
    payload: bytes
    due_at: float
    deliver_at_ms: int | None = None


class Stall(NamedTuple):
    """When a message was handed in (loop time), and how long its receipt took since then."""

    due_at: float
    seconds: float


class Timing(NamedTuple):
    """A time of delivery, and the moment before which no queue may be given the message."""

    deliver_at_ms: int
    not_before: float


class ScalableProducer(Service):
    """One producer name over all segments of a topic."""

    def __init__(
        self,
        links: Links,
        topic: str,
        name: str,
        *,
        first_sequence: int = 0,
        window: int = WINDOW,
        stall_s: float | None = None,
        record: Record = unrecorded,
    ) -> None:
        super().__init__(f"producer {name}", stop_seconds=_STOP_S)
        self.links = links
        self.producer_name = name
        self.stalls: list[Stall] = []
        """Of each message that has a receipt, in the order of receipts."""
        self._watch = DagWatch(links, topic, f"of {name}", record=record)
        self._window = window
        self._stall_s = max(STALL_S, links.wait_s) if stall_s is None else stall_s
        self._record = record
        self._sequence = first_sequence
        self._layout: SegmentLayout | None = None
        self._senders: dict[int, _SegmentSender] = {}
        self._unreceipted: dict[int, Handed] = {}
        self._receipts = Signal()
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    async def _start(self) -> None:
        await self._watch.start()
        self._layout = await self._watch.first()
        self.spawn(self._follow(), "follow")

    async def _stop(self) -> None:
        """What has no receipt is given up."""
        senders = list(self._senders.values())  # a new layout may come meanwhile
        for sender in senders:
            sender.end()
        for sender in senders:
            await sender.ended.wait()
        await self._watch.stop()

    # --- the application's side

    @property
    def waiting(self) -> int:
        """How many messages have no receipt."""
        return len(self._unreceipted)

    async def send(
        self,
        key: str,
        payload: bytes,
        *,
        due_at: float | None = None,
        timing: Timing | None = None,
    ) -> int:
        """Hand a message in, once there is room; its sequence id.

        `due_at` is when the application meant to send it, if that was earlier (loop time).
        """
        due_at = self._now() if due_at is None else due_at
        await self._until(self._window)
        self._sequence += 1
        deliver_at_ms, not_before = timing or (None, None)
        handed = Handed(self._sequence - 1, key, key_hash(key), payload, due_at, deliver_at_ms)
        self._unreceipted[handed.sequence] = handed
        self._record(Published(self.producer_name, handed.sequence, key, not_before))
        self._place(handed)
        return handed.sequence

    async def flush(self) -> None:
        """Wait until everything has its receipt."""
        await self._until(1)

    async def _until(self, most: int) -> None:
        """Until fewer than so many are without a receipt."""
        if len(self._unreceipted) < most and not self._receipts.closed:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                while len(self._unreceipted) >= most or self._receipts.closed:
                    await self._receipts.past(self._receipts.version)
        except TimeoutError as error:
            raise self._overdue() from error

    def _overdue(self) -> DeadlineExceeded:
        first = next(iter(self._unreceipted), None)
        layout = self._layout.epoch if self._layout is not None else None
        return DeadlineExceeded(
            f"{self.producer_name}: no receipt of {first} for {self._stall_s} s"
            f" ({len(self._unreceipted)} wait, the layout is of epoch {layout})"
        )

    # --- the senders' side

    def receipted(self, handed: Handed) -> None:
        if self._unreceipted.pop(handed.sequence, None) is not None:
            self.stalls.append(Stall(handed.due_at, self._now() - handed.due_at))
            self._record(Receipted(self.producer_name, handed.sequence))
            self._receipts.advance()

    def check_patience(self) -> None:
        """Give up if the oldest message has waited for too long."""
        oldest = next(iter(self._unreceipted.values()), None)
        if oldest is not None and self._now() - oldest.due_at > self._stall_s:
            self.give_up(self._overdue())

    def give_up(self, error: Exception) -> None:
        """Whoever waits, now or later, is told why."""
        self._receipts.close(error)

    # --- layouts

    async def _follow(self) -> None:
        version = 0
        while True:
            version = await self._watch.changes.past(version)
            await self._adopt()

    async def _adopt(self) -> None:
        """Go over to the newest layout, once the senders of segments that are gone have ended."""
        while True:
            layout = self._watch.layout
            assert layout is not None
            active = {segment.segment_id for segment in layout.active}
            gone = [sender for number, sender in self._senders.items() if number not in active]
            for sender in gone:
                sender.end()
            ending = [sender for sender in gone if not sender.ended.is_set()]
            if not ending:
                break
            for (
                sender
            ) in ending:  # meanwhile layouts change, and messages make senders by the old one
                await sender.ended.wait()
        self._layout = layout
        for sender in gone:
            del self._senders[sender.segment.segment_id]
        left = [handed for sender in gone for handed in sender.left()]
        for handed in sorted(left, key=lambda each: each.sequence):
            self._place(handed)

    def _place(self, handed: Handed) -> None:
        assert self._layout is not None
        if self.stopping:
            return
        segment = route(self._layout, handed.hash32)
        sender = self._senders.get(segment.segment_id)
        if sender is None:
            sender = _SegmentSender(self, segment, self._watch.topic_of(segment))
            self._senders[segment.segment_id] = sender
            self.spawn(sender.run(), f"segment {segment.segment_id}")
        sender.offer(handed)


class _SegmentSender:
    """The way to one segment, over its connections."""

    def __init__(self, producer: ScalableProducer, segment: Segment, topic: str) -> None:
        self.segment = segment
        self.ended = asyncio.Event()
        """It sends nothing more, and no receipt of what it sent can come."""
        self._producer = producer
        self._topic = topic
        self._name = f"{producer.producer_name}-seg-{segment.segment_id}"
        self._waiting: deque[Handed] = deque()
        self._in_flight: deque[Handed] = deque()
        self._open: tuple[Line, int] | None = None
        self._ending = False
        self._terminated = False
        self._closed_by_broker = False
        self._pauses = Pauses()
        self._failure: Exception | None = None
        self._news = Signal()

    def offer(self, handed: Handed) -> None:
        self._waiting.append(handed)
        self._send_waiting()

    def end(self) -> None:
        """Send no more; `ended` comes once what is in flight is settled."""
        self._ending = True
        self._news.advance()

    def left(self) -> list[Handed]:
        """Everything without a receipt, in order."""
        return [*self._in_flight, *self._waiting]

    async def run(self) -> None:
        try:
            while not self._is_over:
                try:
                    await self._serve()
                except CLIENT_ERRORS as error:
                    self._terminated |= is_terminated(error)
                self._waiting.extendleft(reversed(self._in_flight))
                self._in_flight.clear()
                self._producer.check_patience()
                if self._is_over:
                    break
                await self._pauses.wait()
        finally:
            self.ended.set()

    @property
    def _is_over(self) -> bool:
        return self._ending or self._terminated

    async def _serve(self) -> None:
        """On one connection, until it ends: raises why, unless the sender is ending."""
        links = self._producer.links
        line = await links.lookup(self._topic)
        number = line.register("producer_id", self)
        self._failure = None
        try:
            await line.request(
                "PRODUCER",
                topic=self._topic,
                producer_id=number,
                producer_name=self._name,
                user_provided_producer_name=True,
                timeout_s=links.wait_s,
            )
            self._open = (line, number)
            self._send_waiting()
            await self._until_over(links.wait_s)
            if not self._closed_by_broker and line.failure is None:
                await line.request("CLOSE_PRODUCER", producer_id=number, timeout_s=links.wait_s)
            if self._failure is not None:
                raise self._failure
        except DeadlineExceeded:
            line.abort()
            raise
        finally:
            self._open = None
            line.unregister("producer_id", number)

    async def _until_over(self, wait_s: float) -> None:
        """Until the sender is ending or has failed; with receipts due, each within `wait_s`."""
        self._closed_by_broker = False
        while not self._ending and self._failure is None:
            version, first = self._news.version, self._in_flight[0] if self._in_flight else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.past(version)
            except TimeoutError as error:
                if first is not None and self._in_flight and self._in_flight[0] is first:
                    raise DeadlineExceeded(f"no receipt of {first.sequence}") from error

    def _send_waiting(self) -> None:
        if self._open is None or self._ending or self._failure is not None:
            return
        line, number = self._open
        while self._waiting and line.failure is None and not line.detach().is_closing():
            handed = self._waiting.popleft()
            self._in_flight.append(handed)
            at_ms = handed.deliver_at_ms
            timing: dict[str, Any] = {} if at_ms is None else {"deliver_at_time": at_ms}
            message = build_message(
                handed.payload,
                producer_name=self._name,
                sequence_id=handed.sequence,
                key=handed.key,
                **timing,
            )
            line.send("SEND", message, producer_id=number, sequence_id=handed.sequence)

    # --- the line's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if command.type == TYPES["SEND_RECEIPT"]:
            if not self._in_flight or self._in_flight[0].sequence != body.sequence_id:
                self.lost(RemoteProtocolError(f"receipt of {body.sequence_id} out of order"))
                return
            self._pauses.reset()
            self._producer.receipted(self._in_flight.popleft())
            self._news.advance()
        elif command.type == TYPES["SEND_ERROR"]:
            self.lost(refusal("SEND", body.error, body.message))
        else:
            self._closed_by_broker = True
            self.lost(RequestError(f"{self._name} was closed by the broker"))

    def lost(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._news.advance()
