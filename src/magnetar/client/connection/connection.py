"""One connection to one broker, shared by the producers, consumers and watches of a client.

Owns: `BrokerConnection`: handshake, requests and their answers, who gets what is pushed, keepalive,
renewal of credentials, back-pressure of writing, and the end. It never reconnects: its users do.

Invariants:
1. An answer goes to the request of its id that expects its type, an ERROR to the request of its id.
   What nobody waits for any more is dropped.
2. What is pushed for an owner is handed over as it arrives, in order; `take` must not block. An
   answer is shown to `on_answer` in that same order, before anything that came after it.
3. Once the connection is lost, every request fails, every owner hears `lost` once, and every later
   call raises. `closed` then has advanced.
4. A broker from which nothing came for two intervals of keepalive is given up.
5. Every request has a deadline, and there are never more than `requests_max` of them.

Relies on: `connect`, which is called like `loop.create_connection(factory, host, port)`; a fake
network takes its place in simulations.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Protocol, cast

from google.protobuf.message import Message

from magnetar.client.connection.server_errors import raise_refusal, refusal
from magnetar.client.connection.settings import BrokerAddress, ClientSettings
from magnetar.client.connection.throttling import Throttling
from magnetar.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ForeignProtocol,
    LocalProtocolError,
    MagnetarError,
    NotConnected,
    ProtocolError,
    TooManyRequests,
    UntrustedBroker,
)
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.wire.commands import TYPES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import MESSAGE_BYTES_MAX, command, frame_bytes_max
from magnetar.wire.messages import Command, Delivered, Received, ReceivedEntries
from magnetar.wire.pb import pulsar_pb2 as pb

# The newest that Pulsar has numbered; since then brokers tell what they can by feature flags.
PROTOCOL_VERSION: Final = 21
CLIENT_VERSION: Final = f"Magnetar-{version('magnetar')}"

PRODUCER: Final = "producer_id"
CONSUMER: Final = "consumer_id"
LAYOUT_WATCH: Final = "session_id"
WATCH: Final = "watch_id"
"""The kinds of owners: the field that names them in what is pushed."""

_LOG: Final = logger(__name__)

_FEATURES: Final = {
    "supports_auth_refresh": True,
    "supports_broker_entry_metadata": True,
    "supports_partial_producer": True,
    "supports_get_partitioned_metadata_without_auto_creation": True,
    "supports_scalable_topics": True,
    "supports_tc_metadata_discovery": True,
    # Magnetar's own: a send that a layout change moves to another segment has not failed here, so
    # the change need not wait for transactions of this client.
    "supports_transactions_over_layouts": True,
    # Magnetar's own: the broker says when it does not read for the sake of a rate of publishing.
    "supports_publish_throttled": True,
}

# Commands that answer no request, and the field that says whose they are.
_OWNED_BY: Final = {
    TYPES["SEND_RECEIPT"]: PRODUCER,
    TYPES["SEND_ERROR"]: PRODUCER,
    TYPES["CLOSE_PRODUCER"]: PRODUCER,
    TYPES["ACTIVE_CONSUMER_CHANGE"]: CONSUMER,
    TYPES["REACHED_END_OF_TOPIC"]: CONSUMER,
    TYPES["CLOSE_CONSUMER"]: CONSUMER,
    TYPES["SCALABLE_TOPIC_ASSIGNMENT_UPDATE"]: CONSUMER,
    TYPES["SCALABLE_TOPIC_UPDATE"]: LAYOUT_WATCH,
    TYPES["WATCH_SCALABLE_TOPICS_UPDATE"]: WATCH,
    TYPES["WATCH_TC_ASSIGNMENTS_UPDATE"]: WATCH,
}

# How answers are called: SUCCESS, a name of their own, or else `<request>_RESPONSE`.
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

_NO_REQUEST: Final = 2**64 - 1
"""The id of what answers no request; also that of a handshake."""

_WRONG_PORT: Final = (
    "give the port of the binary protocol, 6650 mostly, or 6651 with pulsar+ssl://; "
    "the admin interface has another one"
)
# What the kernel says where nobody listens, and where a machine has no such network: of a host with
# two addresses, one may say this and the other that.
_REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_ERRNO: Final = re.compile(r"\[Errno (\d+)\]")

_CONNECTED: Final = TYPES["CONNECTED"]
_ERROR: Final = TYPES["ERROR"]
_PING: Final = TYPES["PING"]
_PONG: Final = TYPES["PONG"]
_AUTH_CHALLENGE: Final = TYPES["AUTH_CHALLENGE"]
_PUBLISH_THROTTLED: Final = TYPES["PUBLISH_THROTTLED"]

_PING_FRAME: Final = command("PING")
_PONG_FRAME: Final = command("PONG")

OnAnswer = Callable[[Any], bool]
"""Sees an answer as it arrives; False: another one follows it, however late."""


class Connect(Protocol):
    """Opens a transport and ties it to the protocol that the factory makes."""

    def __call__(
        self, factory: Callable[[], BrokerConnection], host: str, port: int, /
    ) -> Awaitable[tuple[asyncio.BaseTransport, BrokerConnection]]: ...


class Owner(Protocol):
    """A producer, consumer or watch on a connection."""

    def take(self, command: Command) -> None: ...

    def lost(self, error: MagnetarError) -> None: ...


@dataclass(slots=True, eq=False)
class _Request:
    what: str
    reply: int
    answer: asyncio.Future[Any]
    on_answer: OnAnswer | None
    deadline: asyncio.Timeout


class BrokerConnection(asyncio.Protocol):
    """One connection. Make it with `BrokerConnection.open`."""

    def __init__(self, address: BrokerAddress, settings: ClientSettings) -> None:
        self.address = address
        self.closed = Signal()
        """Advances when the connection is gone; `failure` then says why."""
        self.failure: MagnetarError | None = None
        # What the handshake tells, and what holds where a broker says nothing.
        self.max_message_bytes = MESSAGE_BYTES_MAX
        self.features = pb.FeatureFlags()
        """What the broker says that it can do."""
        self.is_magnetar = False
        self.throttling = Throttling()
        self.is_writable = True
        """The transport takes more without queueing it."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._wire = Connection(frame_bytes_max(settings.message_bytes_max), side=Side.CLIENT)
        self._transport: asyncio.Transport | None = None
        # Who waits for an answer, by request id, and who gets what is pushed, by kind and id.
        self._requests: dict[int, _Request] = {}
        self._request_id = 0
        self._owners: dict[str, dict[int, Owner]] = {
            kind: {} for kind in (PRODUCER, CONSUMER, LAYOUT_WATCH, WATCH)
        }
        self._numbers = dict.fromkeys(self._owners, 0)
        self._resumers: list[Callable[[], None]] = []
        # Keepalive: whether anything came since the last ping, and the timer of the next.
        self._heard = True
        self._keepalive: asyncio.TimerHandle | None = None
        self._renewal: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        address: BrokerAddress,
        settings: ClientSettings,
        connect: Connect,
        *,
        behind: BrokerAddress | None = None,
    ) -> BrokerConnection:
        """Connect and shake hands; raises `NotConnected`, or what the broker answered.

        `behind`: the address is that of a proxy, and this is the broker that is meant.
        """
        made: BrokerConnection | None = None
        try:
            # One deadline for credentials, connecting and handshake together.
            async with asyncio.timeout(settings.connect_timeout):
                auth_data = await _credentials(settings)
                _, made = await connect(lambda: cls(address, settings), address.host, address.port)
                await made._shake_hands(auth_data, behind)
        # Cancelled or failed, nobody will ever use it. Who asked hears `NotConnected`, which
        # passes, for everything that another try may mend; a certificate that is not trusted is not
        # among that.
        except BaseException as error:
            if made is not None:
                made.abort()
            if isinstance(error, TimeoutError):
                text = f"{address} did not answer within {settings.connect_timeout} s"
                raise NotConnected(text) from error
            if isinstance(error, ssl.SSLCertVerificationError):
                raise UntrustedBroker(
                    f"{address} is not trusted: {error.verify_message}"
                ) from error
            if isinstance(error, OSError):
                unreached = NotConnected(f"{address} cannot be reached: {error}")
                unreached.is_refusal = _is_refusal(error)
                raise unreached from error
            if isinstance(error, ForeignProtocol):
                # No other try finds another protocol there.
                foreign = NotConnected(f"{address}: {error.args[0]}", hint=_WRONG_PORT)
                foreign.is_final = True
                raise foreign from error
            if isinstance(error, ConnectionLost | ProtocolError):
                raise NotConnected(f"{address} broke the handshake off: {error}") from error
            raise
        return made

    async def _shake_hands(self, auth_data: bytes, behind: BrokerAddress | None) -> None:
        fields: dict[str, Any] = {
            "client_version": CLIENT_VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "feature_flags": _FEATURES,
            "auth_method_name": self._settings.auth.method,
        }
        if auth_data:
            fields["auth_data"] = auth_data
        if behind is not None:
            fields["proxy_to_broker_url"] = f"{behind.host}:{behind.port}"
        # An old Pulsar says nothing of the largest message, or 0.
        answer: pb.CommandConnected = await self.request("CONNECT", **fields)
        if answer.HasField("max_message_size") and answer.max_message_size > 0:
            self.max_message_bytes = answer.max_message_size
        self.features = answer.feature_flags
        self.is_magnetar = answer.server_version.startswith("Magnetar")
        self._keepalive = self._loop.call_later(self._settings.keepalive, self._listen)

    # --- requests

    @property
    def is_open(self) -> bool:
        transport = self._transport
        return self.failure is None and transport is not None and not transport.is_closing()

    async def request(
        self,
        type_name: str,
        /,
        *,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
        encode: Callable[[int], bytes] | None = None,
        **fields: object,
    ) -> Any:
        """Send a command and await the body of its answer; a refusal is raised.

        An answer that entries follow is a `ReceivedEntries`.

        The deadline is the client's operation timeout unless another one is given. Once
        `on_answer` has returned False for an answer, the next one may take any time. `encode` makes
        the frame for an id, for commands that are too many for protobuf.
        """
        # Invariant 5.
        if len(self._requests) >= self._settings.requests_max:
            raise TooManyRequests(f"{len(self._requests)} requests wait for {self.address}")
        request_id = _NO_REQUEST
        # A handshake has no id on the wire; it is alone on the connection, so one number serves.
        if type_name != "CONNECT":
            request_id = self._request_id = self._request_id + 1
            fields["request_id"] = request_id
        frame = command(type_name, **fields) if encode is None else encode(request_id)
        seconds = self._settings.operation_timeout if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds) as deadline:
                waiting = _Request(
                    type_name,
                    _reply_type(type_name),
                    self._loop.create_future(),
                    on_answer,
                    deadline,
                )
                # Written before it is registered: if that raises, nobody waits. The answer cannot
                # come before the next turn of the loop.
                self.write(frame)
                self._requests[request_id] = waiting
                return await waiting.answer
        except TimeoutError as error:
            text = f"{self.address} did not answer {type_name} within {seconds} s"
            raise DeadlineExceeded(text) from error
        # Also when the caller is cancelled: an answer that comes later finds nobody, and is dropped
        # (invariant 1).
        finally:
            self._requests.pop(request_id, None)

    def tell(self, type_name: str, /, **fields: object) -> None:
        """Send a command that has no answer, or one that nobody waits for."""
        self.write(command(type_name, **fields))

    def tell_request(self, type_name: str, /, **fields: object) -> None:
        """Send a request without waiting for its answer; nothing if the connection is gone."""
        if self.is_open:
            self._request_id += 1
            self.write(command(type_name, request_id=self._request_id, **fields))

    def write(self, frame: bytes) -> None:
        """Send a frame; raises if the connection is gone."""
        if self.failure is not None:
            raise self.failure
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionLost(f"the connection to {self.address} is closed")
        transport.write(frame)

    def write_pieces(self, pieces: Sequence[bytes]) -> None:
        """Send frames in pieces; raises if the connection is gone."""
        if self.failure is not None:
            raise self.failure
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionLost(f"the connection to {self.address} is closed")
        transport.writelines(pieces)

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, as soon as `is_writable` again (never, if the connection is lost)."""
        self._resumers.append(resume)

    # --- owners

    def register(self, kind: str, owner: Owner) -> int:
        """Let `owner` have what comes for a new id of this kind."""
        if self.failure is not None:
            raise self.failure
        number = self._numbers[kind]
        self._numbers[kind] = number + 1
        self._owners[kind][number] = owner
        return number

    def unregister(self, kind: str, number: int) -> None:
        self._owners[kind].pop(number, None)

    # --- the end

    async def close(self) -> None:
        """Close the connection, and wait until it is gone."""
        if self._transport is None:
            return
        self._transport.close()
        # The peer may not answer the goodbye; a transport that is aborted always ends.
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                await self.closed.past(0)
        except TimeoutError:
            self.abort()
            await self.closed.past(0)

    def abort(self, error: MagnetarError | None = None) -> None:
        """Cut the connection without a goodbye; `error` is what its users hear."""
        # The first reason stays: what follows is only its consequence.
        if error is not None and self.failure is None:
            self.failure = error
        if self._transport is not None:
            self._transport.abort()

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        # Taken out first: a producer that fills the transport again registers anew.
        resumers, self._resumers = self._resumers, []
        for resume in resumers:
            resume()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            commands = self._wire.receive(data)
        except ProtocolError:
            commands = []  # what it was stays in `error`
        for each in commands:
            self._take(each)
        if self._wire.error is not None and self.failure is None:
            self.abort(self._wire.error)

    def connection_lost(self, exc: Exception | None) -> None:
        # Without a reason of ours it is the network's.
        if self.failure is None:
            text = f"the connection to {self.address} ended"
            self.failure = ConnectionLost(f"{text}: {exc}" if exc else text)
        failure = self.failure
        self._wire.close()
        self._resumers.clear()
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._renewal is not None:
            self._renewal.cancel()
        # Requests first, then the signal, then owners (invariant 3): owners open themselves again,
        # and must find nothing half lost.
        for waiting in self._requests.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(failure)
        self.closed.advance()
        for owners in self._owners.values():
            present = list(owners.values())
            owners.clear()
            for owner in present:
                owner.lost(failure)

    # --- what arrived

    def _take(self, arrived: Command) -> None:
        # Messages first: there are more of them than of everything else. An owner that is gone has
        # left some on their way; the broker delivers them again.
        if isinstance(arrived, Delivered):
            owner = self._owners[CONSUMER].get(arrived.consumer_id)
            if owner is not None:
                owner.take(arrived)
        elif isinstance(arrived, Received):
            number = arrived.type
            kind = _OWNED_BY.get(number)
            if kind is not None:
                owner = self._owners[kind].get(getattr(arrived.body, kind))
                if owner is not None:
                    owner.take(arrived)
            elif number == _PING:
                if self.is_open:
                    self.write(_PONG_FRAME)
            elif number == _AUTH_CHALLENGE:
                self._renew()
            elif number == _PUBLISH_THROTTLED:
                body: Any = arrived.body
                rate = body.rate if body.HasField("rate") else None
                self.throttling.note(rate, self._loop.time())
            elif number != _PONG:
                self._answer(arrived)
        elif isinstance(arrived, ReceivedEntries):
            self._answer(arrived)

    def _answer(self, arrived: Received | ReceivedEntries) -> None:
        body: Any = arrived.body
        number = arrived.type
        request_id = _NO_REQUEST if number == _CONNECTED else getattr(body, "request_id", None)
        waiting = self._requests.get(request_id) if request_id is not None else None
        # Given up, or answered twice.
        if waiting is None or waiting.answer.done():
            return
        if number == _ERROR:
            waiting.answer.set_exception(refusal(waiting.what, body.error, body.message))
        elif number == waiting.reply:
            self._settle(waiting, body, arrived if isinstance(arrived, ReceivedEntries) else body)

    def _settle(self, waiting: _Request, body: Message, answer: Message | ReceivedEntries) -> None:
        try:
            raise_refusal(waiting.what, body)
        except MagnetarError as error:
            waiting.answer.set_exception(error)
            return
        if waiting.on_answer is None or waiting.on_answer(body):
            waiting.answer.set_result(answer)
        else:
            # The broker has said that it will take its time (invariant 5 counts from the first
            # answer).
            waiting.deadline.reschedule(None)

    def _renew(self) -> None:
        """The broker asks who we are, again."""
        # One at a time: credentials may take a while, and brokers may ask again meanwhile.
        if self._renewal is None or self._renewal.done():
            self._renewal = self._loop.create_task(self._show_credentials())

    async def _show_credentials(self) -> None:
        auth = self._settings.auth
        try:
            async with asyncio.timeout(self._settings.operation_timeout):
                data = await _credentials(self._settings)
        except (MagnetarError, TimeoutError) as error:
            _LOG.error("credentials-not-renewed", error, broker=str(self.address))
            self.abort(ConnectionLost(f"no credentials for {self.address}: {error}"))
            return
        if self.is_open:
            response = {"auth_method_name": auth.method, "auth_data": data}
            self.tell(
                "AUTH_RESPONSE",
                client_version=CLIENT_VERSION,
                response=response,
                protocol_version=PROTOCOL_VERSION,
            )

    def _listen(self) -> None:
        """Once per interval: did anything come since the last ping?"""
        if not self.is_open:
            return
        # Invariant 4: a ping went out one interval ago, and not even its PONG came.
        if not self._heard:
            seconds = self._settings.keepalive
            self.abort(ConnectionLost(f"{self.address} said nothing for {seconds} s"))
            return
        self._heard = False
        self.write(_PING_FRAME)
        self._keepalive = self._loop.call_later(self._settings.keepalive, self._listen)


async def _credentials(settings: ClientSettings) -> bytes:
    """What to show; raises `NotConnected` if the application cannot say it now."""
    try:
        return await settings.auth.data()
    except MagnetarError:
        raise
    except Exception as error:
        # It may be a file that is being replaced, or a service that is away.
        text = f"there are no credentials, their function failed: {error!r}"
        raise NotConnected(text, hint="it is asked again with the next try") from error


def _is_refusal(error: OSError) -> bool:
    """Whether an address says by itself that nobody is there."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_NONAME
    if isinstance(error, ConnectionRefusedError):
        return True
    # asyncio puts what it heard from several addresses into one text.
    numbers = {int(each) for each in _ERRNO.findall(str(error))}
    return errno.ECONNREFUSED in numbers and numbers <= _REFUSED


def _reply_type(type_name: str) -> int:
    if type_name in _SUCCESS_REPLY:
        return TYPES["SUCCESS"]
    name = _OTHER_REPLIES.get(type_name, f"{type_name}_RESPONSE")
    if name not in TYPES:
        raise LocalProtocolError(f"{type_name} has no answer: use `tell`")
    return TYPES[name]
