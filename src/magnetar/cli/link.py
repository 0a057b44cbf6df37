"""A connection to a server for the verbs `produce` and `consume`: requests and what arrives.

Owns: `ServerConnection`, one coroutine's view of one connection. Nothing runs beside it: whoever
waits for something reads the connection meanwhile, and pings are answered on the way.

Invariants:
1. Every wait has a deadline, but that of `next` without one: it is for a user who stops it.
2. A refusal leaves as `RequestError` with the server's words and its URL; a broken connection as
   `ServiceNotReady`.
3. Commands that came while a reply was awaited are handed out by `next`, in their order.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from magnetar.errors import DeadlineExceeded, RequestError, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.wire.commands import NAMES, TYPES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import base_command, command, encode_with_payload
from magnetar.wire.messages import Command, Received
from magnetar.wire.pb import pulsar_pb2 as pb

# Long enough for a server that has to load the topic first, short enough for a person.
REPLY_SECONDS: Final = 30.0
DEFAULT_PORT: Final = 6650

_PROTOCOL_VERSION: Final = 20
_READ_BYTES: Final = 1 << 16
_FAILED: Final = pb.CommandLookupTopicResponse.Failed
_CONNECT: Final = pb.CommandLookupTopicResponse.Connect


class ServerConnection:
    """An open connection. Use it with `async with`."""

    def __init__(self, url: str, *, seconds: float = REPLY_SECONDS) -> None:
        self.url = url
        self.server_version = ""
        self._seconds = seconds
        self._wire = Connection(side=Side.CLIENT)
        # Commands that came and nobody has taken yet; `request`
        # puts those back that it passed over.
        self._arrived: deque[Command] = deque()
        self._requests = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        host, port = _address(self.url)
        try:
            async with asyncio.timeout(self._seconds):
                self._reader, self._writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise ServiceNotReady(
                f"no server answers at {self.url}: {_reason(error)}",
                hint="start one with `magnetar serve`, or name its --url",
            ) from error
        try:
            await self._shake_hands()
        # `__aexit__` is not called for a block that was never entered.
        except BaseException:
            self._writer.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _shake_hands(self) -> None:
        self.write(
            command(
                "CONNECT",
                client_version=f"Magnetar-CLI-{version('magnetar')}",
                protocol_version=_PROTOCOL_VERSION,
            )
        )
        async with self._deadline("the handshake"):
            received = await self.next()
        if not isinstance(received, Received) or received.type != TYPES["CONNECTED"]:
            raise self._refused(received)
        self.server_version = str(getattr(received.body, "server_version", ""))

    # --- sending

    def write(self, frame: bytes) -> None:
        assert self._writer is not None, "use `async with`"
        self._writer.write(frame)

    def send(self, producer_id: int, sequence_id: int, headers_and_payload: bytes) -> None:
        base = base_command("SEND", producer_id=producer_id, sequence_id=sequence_id)
        for piece in encode_with_payload(base, headers_and_payload):
            self.write(piece)

    async def request(self, name: str, **fields: object) -> Any:
        """Send a command and wait for the body of its reply; what else arrives is kept."""
        request_id = self._requests
        self._requests += 1
        self.write(command(name, request_id=request_id, **fields))
        kept: list[Command] = []
        try:
            async with self._deadline(name):
                while True:
                    received = await self.next()
                    if isinstance(received, Received):
                        # One request at a time: an ERROR is about it, whatever id it carries.
                        if received.type == TYPES["ERROR"]:
                            raise self._refused(received)
                        if getattr(received.body, "request_id", None) == request_id:
                            return received.body
                    kept.append(received)
        finally:
            # Also when it failed (invariant 3); in front, for they
            # came before what is still in the queue.
            self._arrived.extendleft(reversed(kept))

    # --- receiving

    async def next(self) -> Command:
        """The next command that is not a ping."""
        while True:
            while self._arrived:
                received = self._arrived.popleft()
                if not isinstance(received, Received) or received.type not in _KEEPALIVE:
                    return received
                # Answered while waiting for something else: nothing runs beside the verb.
                if received.type == TYPES["PING"]:
                    self.write(command("PONG"))
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise ServiceNotReady(f"the connection to {self.url} broke: {error}") from error
            # An orderly end of the stream: the server stopped, or
            # closed the connection on an error.
            if not data:
                raise ServiceNotReady(f"{self.url} closed the connection")
            self._arrived.extend(self._wire.receive(data))

    async def next_within(self, seconds: float | None) -> Command | None:
        """Wait so long at most for the next command; None: nothing came in time."""
        try:
            async with asyncio.timeout(seconds):
                return await self.next()
        except TimeoutError:
            return None

    def _deadline(self, what: str) -> _Deadline:
        return _Deadline(self._seconds, f"{self.url} did not answer {what} in time")

    def refusal(self, words: str) -> RequestError:
        return RequestError(f"{words} (said {self.url})")

    def _refused(self, received: Command) -> RequestError:
        message = getattr(getattr(received, "body", None), "message", "")
        number = received.type if isinstance(received, Received) else -1
        return self.refusal(message or f"it answered with {NAMES.get(number, 'a message')}")

    # --- topics

    async def partitions_of(self, topic: TopicName) -> list[TopicName]:
        """The topics to use for a name: its partitions, or itself."""
        answer = await self.request("PARTITIONED_METADATA", topic=str(topic))
        if answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed:
            raise self.refusal(answer.message or f"{topic}: error {answer.error}")
        # 0 partitions: not partitioned at all, and used under its own name.
        if not answer.partitions:
            return [topic]
        return [topic.with_partition(number) for number in range(answer.partitions)]

    async def look_up(self, topic: TopicName) -> None:
        """Make sure that this server has the topic."""
        answer = await self.request("LOOKUP", topic=str(topic))
        if answer.response == _FAILED:
            raise self.refusal(answer.message or f"{topic}: error {answer.error}")
        # A redirect: the CLI has one connection and follows none, but says where to ask.
        if answer.response != _CONNECT:
            raise RequestError(
                f"{topic} is served by {answer.brokerServiceUrl}",
                hint=f"use --url {answer.brokerServiceUrl}",
            )


class _Deadline:
    """`asyncio.timeout`, with an error of ours."""

    def __init__(self, seconds: float, text: str) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._text = text

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DeadlineExceeded(self._text) from late


_KEEPALIVE: Final = frozenset({TYPES["PING"], TYPES["PONG"]})


async def checked_url(url: str) -> str:
    """The whole URL of a server that answers, for the client."""
    # It would try again and again, as applications want it; whoever types wants to know at once.
    async with ServerConnection(url):
        return _whole(url)


@contextmanager
def said_by(url: str) -> Iterator[None]:
    """Refusals that the client passes on get the URL of the server, as those of a connection."""
    try:
        yield
    except RequestError as error:
        # A connection has said it already.
        if url in str(error):
            raise
        raise RequestError(f"{error.args[0]} (said {url})", hint=error.hint) from error


def _whole(url: str) -> str:
    # `host:port` alone is what people type.
    return url if "://" in url else f"pulsar://{url}"


def _reason(error: OSError) -> str:
    # Asyncio's own text has the address again, as Python writes a tuple. A name that cannot be
    # resolved has a number that is not the system's.
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or "it took too long"


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(_whole(url))
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise RequestError(f"{url!r} is not a service URL: {error}") from error
    if parts.scheme != "pulsar" or not parts.hostname:
        raise RequestError(f"{url!r} is not a service URL", hint="use pulsar://host:port")
    return parts.hostname, port
