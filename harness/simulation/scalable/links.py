"""How clients of scalable topics reach brokers: connections by URL, lookups, and the layout watch.

Owns: `Line`, a driver that hands what arrives to its owner at once; `Links`, the connections of one
client by URL; `DagWatch`, the layout of a topic as commands 70 and 71 tell it.

Invariants:
1. What arrives is handed over in the step in which it arrives; what belongs to nobody (any more) is
   dropped, so a line never stops reading.
2. A line that says nothing for `DEAF_S` is aborted, so whoever waits for it is told.
3. `DagWatch.layout` never goes back: an update of a smaller epoch is recorded and dropped. One of
   the same epoch counts (a topic and what it was migrated from both have epoch 0).

Relies on: one event loop, on virtual time or not; `connect` as the driver takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from harness.simulation.scalable.history import Event, LayoutSeen
from magnetar.client.message.layouts import layout_from
from magnetar.errors import (
    DeadlineExceeded,
    MagnetarError,
    RemoteProtocolError,
    RequestError,
    WireCode,
)
from magnetar.model.hashing import partition_of
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.driver import TIMEOUT_S, Connect, Driver
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Delivered, Received
from magnetar.wire.pb import pulsar_pb2 as pb

CLIENT_ERRORS: Final = (MagnetarError, OSError)
"""What a client must live with: refusals, lost connections, answers that do not come."""

CLIENT_VERSION: Final = "Pulsar-Java-v5.0.0-testing"
"""These clients stand for the Java one; only such clients are told of the end of a segment."""

PING_S: Final = 3.0
DEAF_S: Final = 10.0

_REDIRECTS_MAX: Final = 5
_PAUSE_FIRST_S: Final = 0.02
_PAUSE_MOST_S: Final = 1.0
_STOP_S: Final = 30.0

_OWNER_OF: Final = {
    TYPES["SEND_RECEIPT"]: "producer_id",
    TYPES["SEND_ERROR"]: "producer_id",
    TYPES["CLOSE_PRODUCER"]: "producer_id",
    TYPES["ACTIVE_CONSUMER_CHANGE"]: "consumer_id",
    TYPES["REACHED_END_OF_TOPIC"]: "consumer_id",
    TYPES["CLOSE_CONSUMER"]: "consumer_id",
    TYPES["SCALABLE_TOPIC_ASSIGNMENT_UPDATE"]: "consumer_id",
    TYPES["SCALABLE_TOPIC_UPDATE"]: "session_id",
}
"""The field that names whom a command is for."""

OWNED_REQUESTS: Final = 1 << 40
"""A SCALABLE_TOPIC_SUBSCRIBE has this plus its owner's number as its request id."""

_ASSIGNED: Final = TYPES["SCALABLE_TOPIC_SUBSCRIBE_RESPONSE"]

Record = Callable[[Event], None]


def unrecorded(event: Event) -> None:
    """For clients that nobody checks."""


class Owner(Protocol):
    """A producer, consumer or session on a line."""

    def take(self, command: Command) -> None: ...

    def lost(self, error: Exception) -> None: ...


class Pauses:
    """How long to wait before the next try: longer each time, up to a limit."""

    def __init__(self) -> None:
        self._next = 0.0

    def reset(self) -> None:
        self._next = 0.0

    async def wait(self) -> None:
        """Not at all the first time: most losses are over once they are noticed."""
        pause = self._next
        self._next = min(_PAUSE_MOST_S, max(_PAUSE_FIRST_S, 2 * pause))
        await asyncio.sleep(pause)


class Line(Driver):
    """One connection, shared by the producers, consumers and sessions of a client."""

    def __init__(self, *, pushes_max: int, max_frame_bytes: int | None = None) -> None:
        super().__init__(pushes_max=pushes_max, max_frame_bytes=max_frame_bytes)
        self.heard_at = asyncio.get_running_loop().time()
        self._owners: dict[tuple[str, int], Owner] = {}
        self._number = 0

    def register(self, kind: str, owner: Owner) -> int:
        """Let `owner` have what comes for a new id of this kind, such as "consumer_id"."""
        if self.failure is not None:
            raise self.failure
        self._number += 1
        self._owners[kind, self._number] = owner
        return self._number

    def unregister(self, kind: str, number: int) -> None:
        self._owners.pop((kind, number), None)

    def data_received(self, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        owners, self._owners = list(self._owners.values()), {}
        for owner in owners:
            owner.lost(self.failure or RemoteProtocolError("the connection is closed"))

    def _take(self, command: Command) -> None:
        if isinstance(command, Delivered):
            self._hand_over("consumer_id", command.body.consumer_id, command)
        elif isinstance(command, Received) and command.type in _OWNER_OF:
            kind = _OWNER_OF[command.type]
            self._hand_over(kind, getattr(command.body, kind), command)
        elif not isinstance(command, Received) or command.type != TYPES["PONG"]:
            if isinstance(command, Received) and command.type == _ASSIGNED:
                # Its owner must see it before the updates that follow it, not when a task wakes.
                body: Any = command.body
                self._hand_over("request_id", body.request_id - OWNED_REQUESTS, command)
            super()._take(command)

    def _hand_over(self, kind: str, number: int, command: Command) -> None:
        owner = self._owners.get((kind, number))
        if owner is not None:
            owner.take(command)


class Links(Service):
    """The connections of one client process: at most one to each broker."""

    def __init__(
        self, service_url: str, *, connect: Connect | None = None, wait_s: float = TIMEOUT_S
    ) -> None:
        super().__init__("links", stop_seconds=_STOP_S)
        self.wait_s = wait_s
        """What one answer may take."""
        self._service_url = service_url
        self._connect = connect
        self._lines: dict[str, Line] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def _start(self) -> None:
        self.spawn(self._listen(), "pings")

    async def _stop(self) -> None:
        self.cut()
        for line in list(self._lines.values()):  # one that was being opened may still come
            await line.lost(self.wait_s)

    async def line(self, url: str | None = None) -> Line:
        """The connection to a broker, made if there is none; without a URL, to any broker."""
        url = url or self._service_url
        async with self._opening.setdefault(url, asyncio.Lock()):
            known = self._lines.get(url)
            if known is not None and known.failure is None:
                return known
            parts = urlsplit(url)
            if parts.hostname is None or parts.port is None:
                raise RequestError(f"{url} names no host and port")
            line = await Line.connect(
                parts.hostname,
                parts.port,
                connect=self._connect,
                timeout_s=self.wait_s,
                client_version=CLIENT_VERSION,
            )
            assert isinstance(line, Line)
            self._lines[url] = line
            return line

    async def lookup(self, topic: str) -> Line:
        """The connection to the broker that has a topic."""
        line = await self.line()
        authoritative = False
        for _ in range(_REDIRECTS_MAX):
            found = await line.request(
                "LOOKUP", topic=topic, authoritative=authoritative, timeout_s=self.wait_s
            )
            proxied = found.proxy_through_service_url
            line = await self.line(None if proxied else found.brokerServiceUrl)
            if found.response == pb.CommandLookupTopicResponse.Connect:
                return line
            authoritative = found.authoritative
        raise RequestError(f"the lookup of {topic} was redirected {_REDIRECTS_MAX} times")

    def cut(self) -> None:
        """Break every connection, as a network might; they are made again when needed."""
        for line in self._lines.values():
            line.abort()

    async def _listen(self) -> None:
        """Make every line say something now and then; end those that do not."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(PING_S)
            for line in self._lines.values():
                if line.failure is None and not line.detach().is_closing():
                    if now() - line.heard_at > DEAF_S:
                        line.abort()
                    else:
                        line.send("PING")


class DagWatch(Service):
    """Follows the layout of a topic, over lost connections."""

    def __init__(
        self,
        links: Links,
        topic: str,
        name: str,
        *,
        record: Record = unrecorded,
        create_if_missing: bool = True,
    ) -> None:
        super().__init__(f"watch {name}", stop_seconds=_STOP_S)
        self.layout: SegmentLayout | None = None
        self.controller_url: str | None = None
        self.changes = Signal()
        """Advances with every new layout; closed if there never was one."""
        self._links = links
        self._topic = topic
        self._record = record
        self._create = create_if_missing
        self._resolved: TopicName | None = None
        self._session: _Session | None = None
        self._sessions = 0

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")

    async def _stop(self) -> None:
        if self._session is not None:
            self._session.close()

    async def first(self) -> SegmentLayout:
        """The layout as soon as there is one."""
        try:
            async with asyncio.timeout(self._links.wait_s):
                await self.changes.past(0)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no layout of {self._topic} came") from error
        assert self.layout is not None
        return self.layout

    def topic_of(self, segment: Segment) -> str:
        """The topic that holds the messages of a segment."""
        if segment.legacy_topic_name is not None:
            return segment.legacy_topic_name
        assert self._resolved is not None, "a layout comes with the name it was resolved to"
        return str(self._resolved.segment(segment.descriptor))

    async def _follow(self) -> None:
        pauses = Pauses()
        while True:
            try:
                line = await self._links.lookup(self._topic)
                self._session = _Session(self)
                await self._session.run(line, self._links.wait_s)
                pauses.reset()
            except CLIENT_ERRORS as error:
                refused = isinstance(error, RequestError) and not is_passing(error)
                if refused and self.layout is None:
                    self.changes.close(error)
                    return
            await pauses.wait()

    def opened(self, line: Line, session_id: int) -> str:
        """Ask for the layout; the name of the session as an observer."""
        self._sessions += 1
        line.send(
            "SCALABLE_TOPIC_LOOKUP",
            session_id=session_id,
            topic=self._topic,
            create_if_missing=self._create,
        )
        return f"{self.name} #{self._sessions}"

    def update(self, observer: str, body: pb.CommandScalableTopicUpdate) -> None:
        layout = layout_from(body.dag)
        self._record(LayoutSeen(observer, layout.epoch, tuple(layout.segments.values())))
        if self.layout is not None and layout.epoch < self.layout.epoch:
            return
        self.controller_url = body.dag.controller_broker_url or None
        if body.resolved_topic_name:
            self._resolved = TopicName.parse(body.resolved_topic_name)
        if layout != self.layout:
            self.layout = layout
            self.changes.advance()


class _Session:
    """A watch on one connection."""

    def __init__(self, watch: DagWatch) -> None:
        self._watch = watch
        self._observer = ""
        self._updates = Signal()
        self._open: tuple[Line, int] | None = None

    async def run(self, line: Line, wait_s: float) -> None:
        """Until the connection is lost or the broker ends the session: raises why."""
        session_id = line.register("session_id", self)
        self._open = (line, session_id)
        try:
            self._observer = self._watch.opened(line, session_id)
            async with asyncio.timeout(wait_s):
                version = await self._updates.past(0)
            while True:
                version = await self._updates.past(version)
        except TimeoutError as error:
            line.abort()
            raise DeadlineExceeded("the layout did not come") from error
        finally:
            self._open = None
            line.unregister("session_id", session_id)

    def close(self) -> None:
        if self._open is not None and self._open[0].failure is None:
            line, session_id = self._open
            line.send("SCALABLE_TOPIC_CLOSE", session_id=session_id)

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if body.HasField("error"):
            self.lost(refusal("SCALABLE_TOPIC_LOOKUP", body.error, body.message))
        else:
            self._watch.update(self._observer, body)
            self._updates.advance()

    def lost(self, error: Exception) -> None:
        self._updates.close(error)


# --- layouts and errors as the wire has them


def route(layout: SegmentLayout, hash32: int) -> Segment:
    """Where a key goes; a regular topic (all its segments are legacy) is routed as v4 does."""
    if all(segment.legacy_topic_name is not None for segment in layout.active):
        by_id = sorted(layout.active, key=lambda segment: segment.segment_id)
        return by_id[partition_of(hash32, len(by_id))]
    return layout.route(hash32)


def refusal(what: str, code: int, text: str) -> RequestError:
    """An error that the server sent in a push, as the driver raises those of replies."""
    refused = RequestError(f"{what}: {pb.ServerError.Name(code)}: {text}")
    # The code is that of this answer, not of a class of errors.
    vars(refused)["wire_code"] = WireCode(code)
    return refused


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed after a while, whatever the client does."""
    return not isinstance(error, RequestError) or error.wire_code in (
        WireCode.SERVICE_NOT_READY,
        WireCode.METADATA,
        WireCode.PERSISTENCE,
        WireCode.TOO_MANY_REQUESTS,
    )


def is_terminated(error: Exception) -> bool:
    return isinstance(error, RequestError) and error.wire_code is WireCode.TOPIC_TERMINATED
