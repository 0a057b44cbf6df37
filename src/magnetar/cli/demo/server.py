"""The part of `magnetar demo` with a server: a round trip, a kill while publishing, a comparison.

Owns: starting `magnetar serve` on free ports, publishing to it until it is killed, and reading
everything back from the one that is started after it. The official client does the round trip and
reads back, if it is installed; else the connection of the verbs `produce` and `consume`.

Invariants:
1. A message counts as receipted only when its receipt is here; receipts that the server had sent
   before it died are read to the end.
2. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from magnetar.cli.link import ServerConnection
from magnetar.errors import DeadlineExceeded, RequestError, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.wire.commands import NAMES, TYPES
from magnetar.wire.frames import command
from magnetar.wire.messages import Delivered, Received, encode_entry, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

ROUND_TRIP_MESSAGES: Final = 100

_SERVE: Final = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "serve")
_CLIENT: Final = (sys.executable, "-m", "magnetar.cli.demo.client")
_ROUND_TRIP_TOPIC: Final = TopicName.parse("persistent://public/default/round-trip")
_TOPIC: Final = TopicName.parse("persistent://public/default/killed")
_READY_SECONDS: Final = 20.0
_REPLY_SECONDS: Final = 20.0
_CLIENT_SECONDS: Final = 60.0
# In flight at a time: enough for a kill to strike in the middle of a batch.
_WINDOW: Final = 200
_FILLER: Final = "." * 100
# More than the topic has: reading back is not about flow control.
_PERMITS: Final = 1 << 30
_EARLIEST: Final = 1


@dataclass(slots=True)
class ServerResult:
    """The result with a server: what was done with it, and what was found after its death."""

    client: str
    """Who did the round trip and read back."""
    round_trip: int = 0
    """Messages that came back from the round trip, each once."""
    sent: int = 0
    receipted: int = 0
    found: int = 0
    """Messages in the topic after the restart."""
    lost: int = 0
    """Receipted, and not found."""
    doubled: int = 0
    unexplained: int = 0
    """Found, and never sent."""
    restart_ms: float = 0.0
    """From the start of the process until it said that it is ready, admin interface included."""

    @property
    def not_acknowledged(self) -> int:
        """Found and sent; the server died before its receipt was here."""
        return self.found - self.receipted + self.lost - self.doubled - self.unexplained

    @property
    def is_sound(self) -> bool:
        wrong = self.lost or self.doubled or self.unexplained
        return not wrong and self.round_trip == ROUND_TRIP_MESSAGES and self.receipted > 0


@dataclass(slots=True)
class Published:
    """The knowledge of a publisher: how many were sent, from 0 on, and which have a receipt."""

    sent: int = 0
    receipted: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RunningServer:
    process: subprocess.Popen[bytes]
    url: str
    admin_url: str
    ready_ms: float


def serve_and_kill(folder: Path, seconds: float, tell: Callable[[str], None]) -> ServerResult:
    """The whole part; `tell` hears what is going on."""
    # A stranger's client is the better witness, but no dependency of ours.
    is_official = find_spec("pulsar") is not None
    client = f"the official client {version('pulsar-client')}" if is_official else "our own client"
    if not is_official:
        tell("the official client (pulsar-client) is not installed: our own takes its place")
    result = ServerResult(client)
    # The first server: it does the round trip, and is killed by the publisher below.
    with served(folder) as server:
        tell(f"{ROUND_TRIP_MESSAGES} messages to {server.url} and back, with {client}")
        result.round_trip = _round_trip(server.url, is_official)
        tell(f"publishing for {seconds:g} s, then kill -9 of the server")
        published = asyncio.run(_publish_until_killed(server, seconds))
    # The second one, on the same folder: what it has is what survived.
    tell("starting it again on its folder and reading everything back")
    with served(folder) as server:
        result.restart_ms = server.ready_ms
        if is_official:
            texts = _official(server.url, "read", _TOPIC)
        else:
            texts = asyncio.run(_read(server.url, _TOPIC))
        # This one ends in order, which a recovered store has to be able to do as well.
        server.process.terminate()
        code = server.process.wait(_READY_SECONDS)
    if code != 0:
        raise ServiceNotReady(f"the server ended with exit code {code}")
    compare_messages(published, texts, result)
    return result


def compare_messages(published: Published, texts: list[str], result: ServerResult) -> None:
    numbers = [number_of(text) for text in texts]
    copies = Counter(number for number in numbers if number is not None)
    result.sent = published.sent
    result.receipted = len(published.receipted)
    result.found = len(texts)
    result.lost = len(published.receipted - copies.keys())
    # A number that was never sent, or a text that is not as it was sent, is nobody's message.
    known = [count for number, count in copies.items() if number < published.sent]
    result.doubled = sum(known) - len(known)
    result.unexplained = len(texts) - sum(known)


def text_of(number: int) -> str:
    return f"{number} {_FILLER}"


def number_of(text: str) -> int | None:
    """None: it is not as it was sent."""
    head = text.partition(" ")[0]
    return int(head) if head.isdecimal() and text == text_of(int(head)) else None


# --- the server


@contextmanager
def served(folder: Path) -> Iterator[RunningServer]:
    """A server on free ports, killed at the end of the block if it still runs."""
    started = time.monotonic()
    ports = ("--port", "0", "--admin-port", "0", "--log-level", "error", "--json")
    with subprocess.Popen([*_SERVE, "--data", str(folder), *ports], stdout=subprocess.PIPE) as run:
        try:
            assert run.stdout is not None
            # The line is printed when clients can connect: no polling of ports.
            if not select.select([run.stdout], [], [], _READY_SECONDS)[0]:
                raise DeadlineExceeded("the server did not become ready")
            line = run.stdout.readline()
            if not line:
                raise ServiceNotReady("the server did not start: its reason is above")
            ready_ms = (time.monotonic() - started) * 1000
            ready = json.loads(line)
            yield RunningServer(run, ready["service_url"], ready["admin_url"], ready_ms)
        finally:
            run.kill()


# --- the official client


def _official(url: str, *arguments: object) -> list[str]:
    """What the official client got, told to do something in a process of its own."""
    kind, topic, *count = map(str, arguments)
    try:
        done = subprocess.run(
            [*_CLIENT, kind, url, topic, *count],
            stdout=subprocess.PIPE,
            timeout=_CLIENT_SECONDS,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(f"the official client did not end: {kind}") from error
    if done.returncode != 0:
        raise RequestError(f"the official client failed: {kind}; its reason is above")
    return done.stdout.splitlines()


def _round_trip(url: str, is_official: bool) -> int:
    """How many messages came back, each counted once."""
    count = ROUND_TRIP_MESSAGES
    if is_official:
        return len(set(_official(url, "round-trip", _ROUND_TRIP_TOPIC, count)))

    async def with_link() -> list[str]:
        async with ServerConnection(url) as link:
            name = await _open_producer(link, _ROUND_TRIP_TOPIC)
            for number in range(count):
                link.send(0, number, _entry(name, number))
            for _ in range(count):
                await _next_receipt(link)
        return await _read(url, _ROUND_TRIP_TOPIC)

    return len(set(asyncio.run(with_link())))


# --- our own connection


async def _publish_until_killed(server: RunningServer, seconds: float) -> Published:
    """Publish for so long, kill the server, and read the receipts that it had sent."""
    published = Published()
    is_killed = False
    async with ServerConnection(server.url) as link:
        name = await _open_producer(link, _TOPIC)
        deadline = time.monotonic() + seconds
        try:
            while True:
                # Always a full window, so that the kill meets messages in every stage.
                while not is_killed and published.sent - len(published.receipted) < _WINDOW:
                    link.send(0, published.sent, _entry(name, published.sent))
                    published.sent += 1
                published.receipted.add(await _next_receipt(link))
                if not is_killed and time.monotonic() >= deadline:
                    is_killed = True
                    server.process.kill()
        # Expected after the kill, once the receipts on their way are read (invariant 1).
        except ServiceNotReady:
            if not is_killed:
                raise
    return published


async def _open_producer(link: ServerConnection, topic: TopicName) -> str:
    await link.look_up(topic)
    opened = await link.request("PRODUCER", topic=str(topic), producer_id=0)
    return str(opened.producer_name)


async def _next_receipt(link: ServerConnection) -> int:
    """The number of the next message that is stored."""
    received = await link.next_within(_REPLY_SECONDS)
    if received is None:
        raise DeadlineExceeded("no receipt came in time")
    if not isinstance(received, Received) or received.type != TYPES["SEND_RECEIPT"]:
        name = NAMES[received.type] if isinstance(received, Received) else "a message"
        raise RequestError(f"the server sent {name} instead of a receipt")
    assert isinstance(received.body, pb.CommandSendReceipt)
    return received.body.sequence_id


async def _read(url: str, topic: TopicName) -> list[str]:
    """All messages of a topic."""
    texts: list[str] = []
    async with ServerConnection(url) as link:
        await link.look_up(topic)
        await link.request(
            "SUBSCRIBE",
            topic=str(topic),
            subscription="read-back",
            subType=pb.CommandSubscribe.Exclusive,
            consumer_id=0,
            initialPosition=_EARLIEST,
        )
        # The end is asked for, not waited for: silence would not tell "all" from "slow".
        last = (await link.request("GET_LAST_MESSAGE_ID", consumer_id=0)).last_message_id
        link.write(command("FLOW", consumer_id=0, messagePermits=_PERMITS))
        while True:
            received = await link.next_within(_REPLY_SECONDS)
            if received is None:
                raise DeadlineExceeded(f"{topic} could not be read to its end in time")
            if isinstance(received, Delivered):
                data = received.headers_and_payload
                texts.append(data[payload_offset(data) :].decode())
                place = received.body.message_id
                # Entries come in order, so this one is the last of all.
                if (place.ledgerId, place.entryId) == (last.ledgerId, last.entryId):
                    return texts


def _entry(producer: str, number: int) -> bytes:
    now_ms = time.time_ns() // 1_000_000
    metadata = pb.MessageMetadata(producer_name=producer, sequence_id=number, publish_time=now_ms)
    return encode_entry(metadata, text_of(number).encode())
