"""One connection of a client: bytes in, commands handled in their order, frames out.

Owns: `Session`, the protocol of one transport: its state machine, its producers and consumers, the
requests that are being answered, back-pressure, and its end.

SEND and the commands without an answer are handled at once, in frame order; one that is long goes
on in slices, and what was sent behind it waits for its end. Every other command is
a request: a coroutine of its own, so that a slow one (a topic to be loaded) delays nobody. Requests
begin in frame order; commands that end what a request opens are requests too, answered or not.

Invariants:
1. A request is answered exactly once: by its handler, or here with the error that it raised.
2. The connection is read only while sends not yet durable, requests not yet answered, and bytes not
   yet taken by the peer are below their limits; it is read again once they are at half. It is not
   read while commands wait for their turn. With a
   producer it is read only while the server's `publish_throttle` is open, too. What it keeps of a
   frame that is not whole counts in the server's budget.
   A SEND that has to wait for its topic's `publishRate` waits here, with all that came behind it,
   and the connection is not read meanwhile: nothing is refused, and nothing lost.
3. When the transport is gone every producer and consumer has left its topic, and no task of the
   session runs, before `ended` is set. Nothing that belongs to it points at it in a circle: its
   memory is free then, and not when the garbage collector comes.
4. Of the requests with large answers one runs at a time, and only while the peer takes what is
   written: a client that asks and does not read costs one answer.
5. Nothing that a peer sends closes its connection if there is a reply that says what is wrong.

Relies on: one event loop; handlers (`handlers/`) that re-check after each await that the session
and the handle they work for are still there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from magnetar.broker.rates.rate_limiter import RateLimiter
from magnetar.errors import (
    ForeignProtocol,
    InvariantBroken,
    MagnetarError,
    NotAllowed,
    ProtocolError,
    RemoteProtocolError,
    TooManyRequests,
)
from magnetar.model.names import NamespaceName, TopicName
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import CONNECTION_PAUSES, REFUSED_COMMANDS
from magnetar.runtime.signal import Signal
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.server.authority import ANYBODY, Action, Principal
from magnetar.server.context import Context
from magnetar.server.handles import ConsumerHandle, ProducerHandle, TopicListWatch
from magnetar.server.keepalive import keep_alive
from magnetar.server.outbound import Outbound, Stall
from magnetar.server.replies import WRONG_PORT_ANSWER, refusal, unasked_error, unknown_command
from magnetar.server.scalable_handles import ScalableHandles
from magnetar.wire.commands import NAMES
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command, frame_bytes_max
from magnetar.wire.messages import Command, Received, Send, SendRun, Unknown

_log = logger(__name__)

_PING: Final = command("PING")

# Commands are cheaper than what slices are cut for.
_ITEMS_PER_TURN: Final = 2 * SLICE_ITEMS
"""Commands, and message ids in them, that are handled in one turn of the loop."""

AtOnce = Callable[["Session", Any], Coroutine[Any, Any, None] | None]
"""Carries a command out, or returns the long work that it is: what comes later waits for it."""
Request = Callable[["Session", Any], Awaitable[None]]
_Tasks = dict[asyncio.Task[None], None]
"""In the order in which they were started."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of all commands, by the number of their type."""

    at_once: Mapping[int, AtOnce]
    requests: Mapping[int, Request]
    large: frozenset[int] = frozenset()
    """Requests whose answers may be much larger than they are."""


@dataclass(frozen=True, slots=True)
class ClientSoftware:
    """The client's software, as its handshake says."""

    version: str = ""
    protocol_version: int = 0

    @property
    def hears_ends(self) -> bool:
        """Others close a connection on which they see REACHED_END_OF_TOPIC."""
        return self.version.startswith(("Pulsar-Java", "Magnetar"))


CLIENT_TEXT_MAX: Final = 64
"""Characters of a client's version that are kept with what it did."""

_Result = TypeVar("_Result")


class Session(asyncio.Protocol):
    """One client connection."""

    def __init__(self, context: Context, handlers: Handlers) -> None:
        self.context = context
        self.limits = context.limits
        self.client: ClientSoftware | None = None
        self.keeps_transactions = False
        """Its client's transactions survive a change of layout: none waits for the other."""
        self.hears_throttles = False
        """Its client wants to know when its sends wait for a rate (PUBLISH_THROTTLED)."""
        self._told_rate: str | None = None
        self.principal: Principal = ANYBODY
        self.address = ""
        self._client_text = ""
        self.connected_at_ms = 0
        # By the numbers that the client chose for this connection; handlers add and remove.
        self.producers: dict[int, ProducerHandle] = {}
        self.consumers: dict[int, ConsumerHandle] = {}
        self.watches: dict[int, TopicListWatch] = {}
        self.scalable = ScalableHandles()
        self.heard = Signal()
        self.changed = Signal()
        """Advances when publishes were settled or the session ended."""
        self.frame_since: float | None = None
        self.ended = asyncio.Event()
        self.outbound: Outbound
        # The frame limit is the announced message size and room for its headers.
        self.wire = Connection(frame_bytes_max(context.config.max_message_bytes), gathers_runs=True)
        self._handlers = handlers
        self._transport: asyncio.Transport | None = None
        self._loops: _Tasks = {}
        self._requests: _Tasks = {}
        self._large_turn = asyncio.Lock()
        # What back-pressure counts: sends without a receipt, acks without an answer; `_is_read` is
        # what the transport was told last.
        self._owed = 0
        self._acks_owed = 0
        self._is_read = True
        self._draining = False
        self._leaving = False
        # Commands that were read and wait for their turn, behind long work or another slice.
        self._waiting: list[Command] = []
        # Of the command that is being carried out: what a rate of publishing holds back, which one,
        # and by what it wakes this session. The signal is made when it is needed first.
        self._unsent: list[Send] = []
        self._held_by: RateLimiter | None = None
        self._let_through: Signal | None = None
        self._long: asyncio.Task[None] | None = None
        self._spent = 0
        self._turn = context.read_turn

    # --- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport = stream
        self.outbound = Outbound(
            stream, self.limits.connection_write_bytes, self.context.write_turn
        )
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "")
        self.connected_at_ms = self.context.clock.now_ms()
        # It counts as a session until it has ended, but gets no answer: under a flood of
        # connections every reply would be work.
        if not self.context.admit(self):
            self.abandon("too many connections")
            return
        self.spawn(keep_alive(self, self.context.clock, self.limits), "keepalive")

    def data_received(self, data: bytes) -> None:
        self.heard.advance()
        # Saying goodbye: what the peer still sends is read, so that the kernel does not reset the
        # connection, and dropped.
        if self._leaving:
            return
        try:
            # Others have used up this turn of the loop: it goes on in the next one.
            if not self._turn.has_room and not self._waiting and self._long is None:
                self.wire.keep(data)
                self._hold([])
                return
            commands = self.wire.receive(data, _ITEMS_PER_TURN)
        except ProtocolError as error:
            if not self._waiting:
                self._broken(error)
            return
        if self._waiting or self._long is not None:
            self._waiting += commands
        else:
            self._carry_out(commands)
        if self.wire.buffered_bytes or self.frame_since is not None:
            self._note_unfinished(has_ended_one=bool(commands))

    def _note_unfinished(self, *, has_ended_one: bool) -> None:
        # Whole frames that wait for their turn are no unfinished ones.
        held = 0 if self.wire.is_more else self.wire.buffered_bytes
        if not held and self.frame_since is None:
            return
        is_new = has_ended_one or self.frame_since is None
        if not held:
            self.frame_since = None
        elif is_new:
            self.frame_since = self.context.clock.monotonic()
        # May end this session, or another one (invariant 2).
        self.context.frames.note(self, held, is_new=is_new)

    def _carry_out(self, commands: list[Command]) -> None:
        """Handle commands in frame order, as many as a turn of the loop has time for."""
        has_sent = False
        self._spent = 0
        self._turn.spend(min(len(commands), _ITEMS_PER_TURN))
        # Commands in front of damaged bytes are still handled; the damage is told after.
        for number, each in enumerate(commands):
            if self._long is not None or number + self._spent >= _ITEMS_PER_TURN:
                self._hold(commands[number:])
                return
            if isinstance(each, Send):
                has_sent = True
                goes_on = self._send(each)
            elif type(each) is SendRun:
                has_sent = True
                self.spend(len(each.sequence_ids) - 1)
                goes_on = self._send(each, len(each.sequence_ids))
            else:
                self._handle(each)
                goes_on = not self.is_closing
            if not goes_on:
                # Unless it has to wait, one of them ended the connection: nothing behind it counts.
                if self._held_by is not None:
                    self._hold_back(self._held_by, commands[number + 1 :])
                return
        throttle = self.context.publish_throttle
        if self.wire.error is not None:
            self._broken(self.wire.error)
        elif self.wire.is_more:
            self._hold([])
        # Only sends fill the queue that is judged here: a read without one need not look at it.
        elif not (throttle.has_room() if has_sent else throttle.is_open) or not self._is_read:
            self.judge_reading()

    def _hold_back(self, limiter: RateLimiter, later: list[Command]) -> None:
        """Keep sends, and what came behind them, until their topic's rate lets them through."""
        unsent, self._unsent, self._held_by = self._unsent, [], None
        # Of what `_carry_out` counted these were not handled.
        self._turn.give_back(min(len(unsent) + len(later), _ITEMS_PER_TURN))
        if self.hears_throttles:
            self._tell_rate(str(limiter))
        wake = self._let_through
        assert wake is not None, "it was refused by this"
        # The version is taken now: the rate may be gone before the task first runs.
        waiting = self._in_line(limiter, wake, wake.version)
        self._long = self._run(waiting, "publish rate", self._loops)
        self._hold([*unsent, *later])

    async def _in_line(self, limiter: RateLimiter, wake: Signal, seen: int) -> None:
        """Go on when its turn has come at this limiter, in whose line it stands."""
        try:
            await wake.past(seen)
        except asyncio.CancelledError:
            limiter.leave(wake)
            raise
        self._long = None
        self._go_on()
        limiter.settle()

    def _tell_rate(self, rate: str | None) -> None:
        if rate != self._told_rate:
            self._told_rate = rate
            self.write(command("PUBLISH_THROTTLED", **({} if rate is None else {"rate": rate})))

    def _hold(self, commands: list[Command]) -> None:
        """Keep commands back until long work is done, or for the next turn of the loop."""
        self._waiting = commands
        self.judge_reading()
        if self._long is not None:
            return
        if self._turn.has_room:
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._turn.later(self._go_on)

    def _go_on(self) -> None:
        commands, self._waiting = self._waiting, []
        if self.is_closing or self._leaving:
            return
        if not self._turn.has_room:
            self._hold(commands)
            return
        if not commands and self.wire.is_more:
            try:
                commands = self.wire.receive(b"", _ITEMS_PER_TURN)
            except ProtocolError as error:
                self._broken(error)
                return
        self._carry_out(commands)
        self._note_unfinished(has_ended_one=bool(commands))

    def pause_writing(self) -> None:
        self.outbound.pause()
        self.judge_reading()

    def resume_writing(self) -> None:
        self.outbound.resume()
        self.judge_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_unfinished()
        # Nobody may wait for a peer that is gone: both calls wake waiters, who see `is_closing`.
        self.heard.advance()  # who asked whether the peer lives need not wait any longer
        self.outbound.resume()
        # By the context: the end takes awaits, and the transport does not wait for anybody.
        self.context.end(self, self._tear_down())

    # --- what others see of the connection

    @property
    def is_connected(self) -> bool:
        return self.client is not None

    @property
    def is_read(self) -> bool:
        return self._is_read

    @property
    def stall(self) -> Stall | None:
        return self.outbound.stall

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def client_version(self) -> str:
        return "" if self.client is None else self.client.version

    @property
    def client_text(self) -> str:
        """The address and the version of its client in one line, as it is kept with what it did."""
        if not self._client_text:
            # A version comes from the client: it may hold anything.
            version = "".join(each if each.isprintable() else "?" for each in self.client_version)
            self._client_text = f"{self.address} {version[:CLIENT_TEXT_MAX]}".rstrip()
        return self._client_text

    @property
    def owed(self) -> int:
        """Sends that have no receipt yet."""
        return self._owed

    @property
    def _unanswered(self) -> int:
        return len(self._requests) + self._acks_owed

    def ping(self) -> None:
        self.write(_PING)

    def write(self, frame: bytes) -> None:
        self.outbound.write(frame)

    def close(self) -> None:
        """Send what was written, then close."""
        self.outbound.close()

    def say_goodbye(self) -> None:
        """Send what was written and the end of it, and ignore what still comes.

        Closing now, with bytes of the peer unread, would make the kernel throw away what the peer
        has not taken yet: receipts.
        """
        self._leaving = True
        self.outbound.say_goodbye()
        # While it is not read, the end that the peer sends back would never be seen.
        if self._transport is not None and not self.is_closing and not self._is_read:
            self._is_read = True
            self._transport.resume_reading()

    def abandon(self, reason: str) -> None:
        _log.info("connection-abandoned", address=self.address, reason=reason)
        if self._transport is not None:
            self._transport.abort()

    async def drain(self) -> None:
        """Read no more, and return once every send and acknowledgement has its receipt."""
        self._draining = True
        self.judge_reading()
        # Requests are not waited for: their clients ask again elsewhere, and lose nothing.
        while (self._owed or self._acks_owed) and not self.is_closing:
            await self.changed.past(self.changed.version)
        self.outbound.flush()

    # --- for handlers

    def authorise(self, action: Action, target: TopicName | NamespaceName) -> None:
        self.context.authority.authorise(self.principal, action, target)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a loop; it is cancelled when the session ends."""
        return self._run(work, name, self._loops)

    def succeed(self, request_id: int) -> None:
        self.write(command("SUCCESS", request_id=request_id))

    def refuse(self, command_type: int, body: Any, error: BaseException) -> None:
        frame = refusal(command_type, body, error)
        # What is no MagnetarError is a bug: clients do not see its text, the log has all of it.
        name = error.name if isinstance(error, MagnetarError) else InvariantBroken.name
        REFUSED_COMMANDS.labels(name).inc()
        if not isinstance(error, MagnetarError):
            _log.error("command-failed", error, command=NAMES[command_type], address=self.address)
        elif frame is None:
            _log.debug("command-ignored", command=NAMES[command_type], error=str(error))
        if frame is not None:
            self.write(frame)

    def check_room(self) -> None:
        """Refuse one more producer, consumer or watch above the limit."""
        # Kept for a while after the broker closed them (handles, invariant 3); now they make room.
        for number in [each for each, held in self.producers.items() if held.is_forgotten]:
            del self.producers[number]
        held = len(self.producers) + len(self.consumers) + len(self.watches) + len(self.scalable)
        if held >= self.limits.connection_handles_max:
            raise TooManyRequests(f"the connection has {held} producers, consumers and watches")

    def settled(self, count: int) -> None:
        """Note that sends got their receipt, or will never get one."""
        self._owed -= count
        self.changed.advance()
        if not self._is_read:
            self.judge_reading()

    def spend(self, items: int) -> None:
        """A command has so many items: fewer others are handled in this turn of the loop."""
        self._spent += items
        self._turn.spend(items)

    def owe_ack(self) -> None:
        """An acknowledgement will be answered when it is durable."""
        self._acks_owed += 1
        if self._unanswered >= self.limits.connection_requests_max:
            self.judge_reading()

    def answer_at_end(
        self,
        work: asyncio.Future[_Result],
        number: int,
        body: Any,
        reply: Callable[[Any, _Result], bytes | None],
    ) -> None:
        """Answer a command when work ends that is not the session's, and outlives it."""
        self._acks_owed += 1
        if len(self._requests) + self._acks_owed >= self.limits.connection_requests_max:
            self.judge_reading()

        def answer(task: asyncio.Future[_Result]) -> None:
            # Nobody is left to be answered; the work itself went on to its end.
            if self.ended.is_set():
                return
            try:
                frame = reply(body, task.result())
            # Cancelled work is refused like failed work: clients must not wait for ever.
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  answered
                self.refuse(number, body, error)
            else:
                if frame is not None:
                    self.outbound.write(frame)
            self.acks_answered(1)

        work.add_done_callback(answer)

    def acks_answered(self, count: int) -> None:
        self._acks_owed -= count
        self.changed.advance()
        if not self._is_read:
            self.judge_reading()

    # --- commands

    def _send(self, send: Send | SendRun, count: int = 1, *, is_admitted: bool = False) -> bool:
        """Start a send; False: it has ended the connection, or `_unsent` has to wait."""
        handle = self.producers.get(send.producer_id)
        producer = None if handle is None else handle.producer
        if handle is None or producer is None:
            # As ServerCnx: a producer that never was breaks the protocol, one that was closed
            # lately does not.
            if handle is None or not handle.is_closed_by_broker or handle.is_forgotten:
                self._broken(RemoteProtocolError(f"no producer {send.producer_id}"))
                return False
            return True  # sent before the peer learned that the broker closed the producer
        if producer.limiter is not None and not (is_admitted or producer.stopped):
            return self._send_limited(producer.limiter, send, count)
        self._owed += count
        handle.owed += count
        if isinstance(send, SendRun):
            producer.send_run(send)
        else:
            producer.send(send)
        if not handle.is_watching:
            handle.watch()
        # Only at the limit: `judge_reading` is not free, and this is once per message.
        if self._is_read and self._owed >= self.limits.connection_pending_publishes:
            self.judge_reading()
        return True

    def _send_limited(self, limiter: RateLimiter, send: Send | SendRun, count: int) -> bool:
        """Start as much as the rate of its topic lets through; False: the rest of it waits."""
        wake = self._let_through = self._let_through or Signal()
        sends: list[Send] = [send] if isinstance(send, Send) else send.sends()
        for number, each in enumerate(sends):
            if not limiter.admits(wake):
                self._unsent, self._held_by = sends[number:], limiter
                return False
            # Mostly there is room for all of a run, which goes as a whole then.
            if not number and isinstance(send, SendRun):
                messages, size = limiter.room()
                if sum(send.counts) <= messages and send.size <= size:
                    limiter.take(sum(send.counts), send.size)
                    return self._send(send, count, is_admitted=True)
            limiter.take(each.num_messages, len(each.headers_and_payload))
            self._send(each, is_admitted=True)
        return True

    def _handle(self, received: Command) -> None:
        if isinstance(received, Unknown):
            # A newer client: told so, and the connection goes on (invariant 5).
            self.write(unknown_command(received.type))
            return
        assert isinstance(received, Received), "a client sends no MESSAGE"
        number, body = received
        at_once = self._handlers.at_once.get(number)
        # Tasks run in the order in which they are made, so requests begin in frame order.
        if at_once is None:
            self.run_request(number, body)
            return
        try:
            rest = at_once(self, body)
        # Whatever a handler raises is that command's failure, not the connection's (invariant 5).
        except Exception as error:  # noqa: BLE001  answered, and logged if it is a bug
            self.refuse(number, body, error)
            return
        if rest is not None:
            self._long = self._run(self._finish(rest, number, body), NAMES[number], self._requests)
            self.judge_reading()

    async def _finish(self, work: Coroutine[Any, Any, None], number: int, body: Any) -> None:
        """Long work of one command; those that came behind it follow."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  answered, and logged if it is a bug
            self.refuse(number, body, error)
        finally:
            self._long = None
            asyncio.get_running_loop().call_soon(self._go_on)

    def run_request(self, number: int, body: Any, handler: Request | None = None) -> None:
        """Answer a command in a task of its own; by `handler`, if none is in the table."""
        self._run(self._answer(number, body, handler), NAMES[number], self._requests)
        if self._unanswered >= self.limits.connection_requests_max:
            self.judge_reading()

    async def _answer(self, number: int, body: Any, handler: Request | None) -> None:
        try:
            handler = handler or self._handlers.requests.get(number)
            if handler is None:
                raise NotAllowed(f"{NAMES[number]} is not supported by this server")
            if number in self._handlers.large:
                await self._answer_large(handler, body)
            else:
                await handler(self, body)
        except Exception as error:  # noqa: BLE001  answered, and logged if it is a bug
            self.refuse(number, body, error)

    async def _answer_large(self, handler: Request, body: Any) -> None:
        # Invariant 4: the peer's own pace limits how many large answers exist.
        async with self._large_turn:
            await self.outbound.writable()
            # It may have gone while this waited for its turn.
            if not self.is_closing:
                await handler(self, body)

    def _run(self, work: Coroutine[Any, Any, None], name: str, among: _Tasks) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{self.address} {name}")
        among[task] = None
        task.add_done_callback(self._task_ended)
        return task

    # --- back-pressure

    def judge_reading(self) -> None:
        """Read on, or stop reading, as the limits demand now."""
        if self._transport is None or self._transport.is_closing() or self._leaving:
            return
        # Invariant 2, all of it in one place. Consumers are read while publishers are held.
        room = (
            self._has_room(self._owed, self.limits.connection_pending_publishes)
            and self._has_room(self._unanswered, self.limits.connection_requests_max)
            and (self.context.publish_throttle.is_open or not self.producers)
            and not self.outbound.paused
            and not self._draining
            and not self._waiting
            and not self.wire.is_more
            and self._long is None
        )
        if room and not self._is_read:
            self._is_read = True
            # Its peer could not finish a frame while it was not read.
            if self.frame_since is not None:
                self.frame_since = self.context.clock.monotonic()
            self._transport.resume_reading()
            # Last: if the peer has no room for it, this stops reading again.
            if self._told_rate is not None:
                self._tell_rate(None)
        elif not room and self._is_read:
            self._is_read = False
            self._transport.pause_reading()
            CONNECTION_PAUSES.inc()

    def _has_room(self, count: int, limit: int) -> bool:
        # Half the limit to begin again: without a gap reading would start and stop with every
        # receipt.
        return count < limit if self._is_read else count * 2 <= limit

    # --- the end

    def end_unfinished(self, error: MagnetarError) -> None:
        """The beginning of a frame is kept no longer."""
        self._drop_unfinished()
        self._broken(error)

    def _drop_unfinished(self) -> None:
        self.wire.close()
        self.frame_since = None
        self.context.frames.note(self, 0, is_new=False)

    def _broken(self, error: MagnetarError) -> None:
        _log.info("connection-broken", address=self.address, error=str(error))
        # Who came with HTTP is answered in it: a person with a browser or curl reads that.
        is_http = isinstance(error, ForeignProtocol) and "HTTP" in error.args[0]
        self.write(WRONG_PORT_ANSWER if is_http else unasked_error(error))
        self.close()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._loops.pop(task, None)
        self._requests.pop(task, None)
        # A bug in a loop of this session: its client would wait for ever, so it is made to
        # reconnect.
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session-task-crashed", error, task=task.get_name())
            self.abandon("a task of the session crashed")
        elif not self._is_read:
            self.judge_reading()

    async def _tear_down(self) -> None:
        """Requests are not cut short, for they change the broker's state, nor are receipts."""
        # In this order: watches, which nobody reads; requests, which may still open a handle; then
        # the handles; loops last, because they send the receipts that handles wait for.
        for watch in self.watches.values():
            watch.close()
        self.scalable.close_watches()
        if self._requests:
            await asyncio.wait(self._requests, timeout=self.limits.close_seconds)
        await _cancelled(self._requests)
        handles: list[ProducerHandle | ConsumerHandle] = [*self.producers.values()]
        for handle in [*handles, *self.consumers.values()]:
            try:
                await handle.close()
            # The others must leave their topics all the same.
            except MagnetarError as error:
                _log.error("leaving-failed", error, address=self.address)
        await self.scalable.detach()
        await _cancelled(self._loops)
        self.producers, self.consumers, self.watches = {}, {}, {}
        self._owed = self._acks_owed = 0
        self.changed.advance()
        self.context.forget(self)
        # Last (invariant 3): whoever waits to take this connection's place looks at the topics now.
        self.ended.set()


async def _cancelled(tasks: _Tasks) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
