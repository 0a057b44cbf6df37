"""A thin protocol driver: any command over any asyncio transport, and no policy.

Owns: `Driver`, one client connection. It sends what it is told, matches replies to requests,
answers PING, and queues everything else (`pushes`). It never reconnects, looks up, acknowledges or
retries: simulations, crash tests and benches decide all that themselves.

Invariants:
1. A reply goes to the oldest request of its id that expects its type; an ERROR to the oldest of its
   id. A command that no request waits for is pushed, in the order of arrival.
2. `pushes` is bounded: from `pushes_max` on the driver stops reading, until half of them are taken.
   Requests then wait too, each until its deadline.
3. Once the connection is lost, every waiter is told, and so is every later call.

Relies on: `connect`, which is called like `loop.create_connection(factory, host, port)`. A fake
network takes its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, cast

from google.protobuf.message import Message

from magnetar.broker.entries import UNPLACED, EntryView
from magnetar.errors import (
    DeadlineExceeded,
    MagnetarError,
    ProtocolError,
    RemoteProtocolError,
    RequestError,
    WireCode,
)
from magnetar.runtime.signal import Signal
from magnetar.wire.commands import TYPES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import base_command, encode_command, encode_with_payload, frame_bytes_max
from magnetar.wire.messages import Command, Received, ReceivedEntries, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

TIMEOUT_S: Final = 10.0
PUSHES_MAX: Final = 10_000

_PUSH_REQUEST_ID: Final = 2**64 - 1
"""The id of what answers no request; also that of a handshake."""

# The protocol answers most requests with `<NAME>_RESPONSE`; these, and those below, are exceptions.
_SUCCESS_REPLY: Final = frozenset(
    {
        "SUBSCRIBE",
        "UNSUBSCRIBE",
        "SEEK",
        "CLOSE_PRODUCER",
        "CLOSE_CONSUMER",
        "WATCH_TOPIC_LIST_CLOSE",
        "SCALABLE_TOPIC_UNSUBSCRIBE",
    }
)
_OTHER_REPLIES: Final = {
    "CONNECT": "CONNECTED",
    "PRODUCER": "PRODUCER_SUCCESS",
    "WATCH_TOPIC_LIST": "WATCH_TOPIC_LIST_SUCCESS",
    "TC_CLIENT_CONNECT_REQUEST": "TC_CLIENT_CONNECT_RESPONSE",
}


class Connect(Protocol):
    """Opens a transport and ties it to the protocol that the factory makes."""

    def __call__(
        self, factory: Callable[[], Driver], host: str, port: int, /
    ) -> Awaitable[tuple[asyncio.BaseTransport, Driver]]: ...


class _Waiter(NamedTuple):
    reply: int
    answer: asyncio.Future[Message]


class Pushes:
    """The queue of commands that arrived without being asked for, oldest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Command] = deque()
        self._arrived = Signal()
        self.transport: asyncio.ReadTransport | None = None
        self._paused = False

    def __len__(self) -> int:
        return len(self._items)

    async def get(self, timeout_s: float = TIMEOUT_S) -> Command:
        """The next one, waiting for it; raises what ended the connection if none can come."""
        await _within(timeout_s, "a push", self._wait())
        return self.get_nowait()

    def get_nowait(self) -> Command:
        """The next one; IndexError if there is none."""
        item = self._items.popleft()
        # Not at the limit at once: reading would stop and go with every single push (invariant 2).
        if self._paused and len(self._items) <= self._limit // 2 and self.transport is not None:
            self._paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return item

    def append(self, item: Command) -> None:
        self._items.append(item)
        self._arrived.advance()
        if len(self._items) >= self._limit and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def fail(self, error: Exception) -> None:
        """No more will come: who waits is told once those that came are taken."""
        self._arrived.close(error)

    async def _wait(self) -> None:
        while not self._items:
            await self._arrived.past(self._arrived.version)


class Driver(asyncio.Protocol):
    """One client connection. Make it with `Driver.connect`."""

    def __init__(self, *, pushes_max: int = PUSHES_MAX, max_frame_bytes: int | None = None) -> None:
        self.pushes = Pushes(pushes_max)
        self.answer_pings = True
        self._wire = Connection(max_frame_bytes or frame_bytes_max(), side=Side.CLIENT)
        self._transport: asyncio.Transport | None = None
        # Who waits, by request id and by (producer, sequence).
        # Lists, because a test may use an id twice on purpose.
        self._requests: dict[int, list[_Waiter]] = {}
        self._receipts: dict[tuple[int, int], deque[asyncio.Future[Message]]] = {}
        self._request_id = 0
        # Set unless the transport asked us to pause: a connection begins with an empty buffer.
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = asyncio.Event()
        self._failure: MagnetarError | None = None

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        connect: Connect | None = None,
        handshake: bool = True,
        pushes_max: int = PUSHES_MAX,
        timeout_s: float = TIMEOUT_S,
        **connect_fields: object,
    ) -> Driver:
        """Open a connection and, unless told otherwise, shake hands (fields: those of CONNECT)."""
        open_transport = connect or cast("Connect", asyncio.get_running_loop().create_connection)
        opening = open_transport(lambda: cls(pushes_max=pushes_max), host, port)
        driver: Driver
        _, driver = await _within(timeout_s, f"a connection to {host}:{port}", opening)
        if handshake:
            fields = {"client_version": "magnetar-driver", "protocol_version": 21}
            try:
                await driver.request("CONNECT", timeout_s=timeout_s, **(fields | connect_fields))
            except BaseException:
                driver.abort()
                raise
        return driver

    @property
    def failure(self) -> MagnetarError | None:
        """Why the connection is gone, if it is."""
        return self._failure

    async def request(
        self, type_name: str, /, *, timeout_s: float = TIMEOUT_S, **fields: object
    ) -> Any:
        """Send a command and await the body of its reply.

        A refusal is raised as `RequestError` with the server's code as `wire_code`. The driver
        numbers requests itself unless a `request_id` is given.
        """
        request_id = _PUSH_REQUEST_ID
        # CONNECT has no request id; there is one at a time, so a fixed one will do.
        if type_name != "CONNECT":
            self._request_id += 1
            request_id = cast("int", fields.setdefault("request_id", self._request_id))
        waiter = _Waiter(_reply_type(type_name), asyncio.get_running_loop().create_future())
        waiting = self._requests.setdefault(request_id, [])
        # Before the command is sent: no answer can come too early for it.
        waiting.append(waiter)
        try:
            self.send(type_name, **fields)
            reply = await _within(timeout_s, f"the reply to {type_name}", waiter.answer)
        finally:
            if waiter in waiting:
                waiting.remove(waiter)
            # The list of another request of that id, made meanwhile, stays.
            if not waiting and self._requests.get(request_id) is waiting:
                del self._requests[request_id]
        return _accepted(type_name, reply)

    def send(
        self, type_name: str, headers_and_payload: bytes | None = None, /, **fields: object
    ) -> None:
        """Send a command and wait for nothing (`drain` waits until it has left)."""
        base = base_command(type_name, **fields)
        if headers_and_payload is None:
            self.send_bytes(encode_command(base))
        else:
            self.send_bytes(b"".join(encode_with_payload(base, headers_and_payload)))

    def send_bytes(self, data: bytes) -> None:
        """Send any bytes, broken ones too."""
        if self._failure is not None:
            raise self._failure
        if self._transport is None or self._transport.is_closing():
            raise RemoteProtocolError("the connection is not open")
        self._transport.write(data)

    async def publish(
        self,
        producer_id: int,
        sequence_id: int,
        headers_and_payload: bytes,
        *,
        timeout_s: float = TIMEOUT_S,
        **fields: object,
    ) -> pb.CommandSendReceipt:
        """SEND, and await its receipt. Without `publish` receipts are pushes.

        Unless `num_messages` is given, the command claims as many messages as the metadata.
        """
        count = EntryView(UNPLACED, headers_and_payload).metadata.num_messages_in_batch
        fields = {"num_messages": count, **fields}
        # By producer and sequence, in the order of the sends: one may be sent again in between.
        receipt: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        ids = {"producer_id": producer_id, "sequence_id": sequence_id}
        key = (producer_id, sequence_id)
        waiting = self._receipts.setdefault(key, deque())
        waiting.append(receipt)
        try:
            self.send("SEND", headers_and_payload, **(fields | ids))
            reply = await _within(timeout_s, f"the receipt of {key}", receipt)
        finally:
            if receipt in waiting:
                waiting.remove(receipt)
            if not waiting and self._receipts.get(key) is waiting:
                del self._receipts[key]
        return cast("pb.CommandSendReceipt", _accepted("SEND", reply))

    async def drain(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the transport takes more bytes."""
        await _within(timeout_s, "room in the transport", self._writable.wait())
        if self._failure is not None:
            raise self._failure

    async def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Close the connection and wait until it is gone."""
        if self._transport is not None and not self._lost.is_set():
            self._transport.close()
            await self.lost(timeout_s)

    async def lost(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the connection is gone, whoever ends it."""
        await _within(timeout_s, "the end of the connection", self._lost.wait())

    def abort(self) -> None:
        """Cut the connection without a goodbye."""
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol; from then on the driver hears nothing of it."""
        if self._transport is None:
            raise RemoteProtocolError("the connection is not open")
        return self._transport

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.pushes.transport = self._transport

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            commands = self._wire.receive(data)
        except ProtocolError:
            commands = []  # What it was stays in `error`.
        for command in commands:
            self._take(command)
        # Behind the loop: commands from before the broken frame have been taken.
        if self._wire.error is not None:
            self._fail(self._wire.error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RemoteProtocolError(f"the connection is closed ({exc or 'by one of its ends'})"))
        self._lost.set()

    # --- what arrived

    def _take(self, command: Command) -> None:
        if isinstance(command, Received | ReceivedEntries):
            # A test may leave pings unanswered, to see whether the server gives the client up.
            if command.type == TYPES["PING"] and self.answer_pings:
                if self._transport is not None and not self._transport.is_closing():
                    self.send("PONG")
                return
            waiting = self._waiting_for(command)
            if waiting is not None:
                waiting.set_result(command.body if isinstance(command, Received) else command)
                return
        self.pushes.append(command)

    def _waiting_for(self, command: Received | ReceivedEntries) -> asyncio.Future[Any] | None:
        body: Any = command.body
        # Receipts have no request id: producer and sequence name the send.
        if command.type in (TYPES["SEND_RECEIPT"], TYPES["SEND_ERROR"]):
            receipts = self._receipts.get((body.producer_id, body.sequence_id))
            return _first_open(receipts) if receipts else None
        request_id = _request_id_of(command)
        waiting = self._requests.get(request_id, [])
        is_error = command.type == TYPES["ERROR"]
        # Invariant 1: an ERROR names only the request, so it goes to the oldest of that id.
        for waiter in waiting:
            if (is_error or waiter.reply == command.type) and not waiter.answer.done():
                return waiter.answer
        return None

    def _fail(self, error: MagnetarError) -> None:
        if self._failure is None:
            self._failure = error
        # Whoever waits for room, a push or an answer must wake and hear of it (invariant 3).
        self._writable.set()
        self.pushes.fail(self._failure)
        waiting = [waiter.answer for waiters in self._requests.values() for waiter in waiters]
        waiting += [receipt for receipts in self._receipts.values() for receipt in receipts]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(self._failure)


def build_message(
    payload: bytes,
    *,
    producer_name: str = "driver",
    sequence_id: int = 0,
    publish_time_ms: int = 0,
    properties: Mapping[str, str] | None = None,
    key: str | None = None,
    checksum: bool = True,
    **metadata: Any,
) -> bytes:
    """headers_and_payload for `send` and `publish`; `metadata` are further fields of it."""
    made = pb.MessageMetadata(
        producer_name=producer_name,
        sequence_id=sequence_id,
        publish_time=publish_time_ms,
        properties=[pb.KeyValue(key=name, value=text) for name, text in (properties or {}).items()],
        partition_key=key,
        **metadata,
    )
    return encode_entry(made, payload, checksum=checksum)


async def _within(timeout_s: float, what: str, awaited: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await awaited
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} did not come within {timeout_s} s") from error


def _reply_type(type_name: str) -> int:
    if type_name in _SUCCESS_REPLY:
        return TYPES["SUCCESS"]
    name = _OTHER_REPLIES.get(type_name, f"{type_name}_RESPONSE")
    if name not in TYPES:
        raise RequestError(f"{type_name} has no reply: use `send`")
    return TYPES[name]


def _request_id_of(command: Received | ReceivedEntries) -> int:
    if command.type == TYPES["CONNECTED"]:
        return _PUSH_REQUEST_ID
    return int(getattr(command.body, "request_id", _PUSH_REQUEST_ID))


def _first_open(futures: deque[asyncio.Future[Message]]) -> asyncio.Future[Message] | None:
    return next((each for each in futures if not each.done()), None)


def _accepted(type_name: str, reply: Any) -> Any:
    """The reply, unless it is a refusal: most replies have a field for that."""
    # Two forms of refusal: ERROR has `error` and `message`, most
    # responses have them too, some the other pair.
    for error, text in (("error", "message"), ("error_code", "error_message")):
        if error in reply.DESCRIPTOR.fields_by_name and reply.HasField(error):
            code = getattr(reply, error)
            name = pb.ServerError.Name(code)
            refused = RequestError(f"{type_name}: {name}: {getattr(reply, text)}")
            # The code is that of this answer, not of a class of errors.
            vars(refused)["wire_code"] = WireCode(code)
            raise refused
    return reply


__all__ = ["PUSHES_MAX", "TIMEOUT_S", "Connect", "Driver", "Pushes", "build_message"]
