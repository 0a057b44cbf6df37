"""One life of a simulated broker: the real server on a fake machine, and its clients' connections.

Owns: `BrokerWorld`, what the actors of one life share; `Client`, a driver that tells its owner at
once what arrives and when it was written; `Bugs`, which takes what the server logs of its own bugs.

Invariants:
1. Nothing is told to the history after the disk has stopped.
2. A moment (`now`) is later than every moment of the lives before.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from harness.simulation.broker.history import Part, TopicStory
from harness.simulation.seeds import LIFE_SECONDS_MAX
from harness.simulation.storage.history import Findings
from magnetar.errors import (
    DeadlineExceeded,
    MagnetarError,
    RequestError,
    WireCode,
)
from magnetar.server.app import Server
from magnetar.testing.virtual.disk import SimulatedDisk
from magnetar.testing.virtual.driver import Driver
from magnetar.testing.virtual.network import End, Network
from magnetar.wire.messages import Command
from magnetar.wire.pb import pulsar_pb2 as pb

REQUEST_SECONDS: Final = 90.0
"""What an answer may take: a disk on which some operations take seconds is in it."""

CLIENT_ERRORS: Final = (MagnetarError, OSError)
"""What a client must live with: refusals, and the end of its connection."""

_SILENCE_SECONDS: Final = 8.0
_DELETING: Final = 0.2
_UNREADABLE: Final = 0.1
_BATCH_KEYS: Final = 12
"""Half of them are those of single messages, too."""
_SIZE: Final = struct.Struct(">I")
_FATAL_EVENTS: Final = frozenset({"command-failed", "session-task-crashed", "session-end-failed"})

Take = Callable[[Command, float], bool]


class Client(Driver):
    """A connection whose owner sees everything first, with the moment of its writing."""

    take: Take | None = None
    """Says whether it was for the owner; what it leaves is treated as any driver does."""
    silent_since: float | None = None

    @property
    def end(self) -> End:
        transport = self.detach()
        assert isinstance(transport, End)
        return transport

    def _take(self, command: Command) -> None:
        if self.take is None or not self.take(command, self.end.sent_at):
            super()._take(command)


@dataclass(slots=True)
class BrokerWorld:
    """From the start of a server to its end."""

    name: str
    disk: SimulatedDisk
    network: Network
    server: Server
    findings: Findings
    topics: list[TopicStory]
    started_at: float
    """The moment at which the loop's time was 0."""
    delays: Random
    """Draws delays; apart, so that what else is drawn does not depend on them."""
    contents: Random
    """Draws keys and deletions on topics that are compacted; apart as well."""
    ending: bool = False
    consumers: int = 0

    @property
    def over(self) -> bool:
        """Whether the actors should end."""
        return self.ending or self.disk.is_stopped or self.has_failed

    @property
    def has_failed(self) -> bool:
        return self.server.storage.failure is not None

    def now(self) -> float:
        return self.started_at + asyncio.get_running_loop().time()

    def note(self, text: str) -> None:
        if not self.disk.is_stopped:
            self.findings.note(f"{self.name} {self.now():.6f} {text}")

    async def connect(self) -> Client:
        client = await Client.connect(
            self.network.host,
            self.network.port,
            connect=self.network.connect,
            timeout_s=REQUEST_SECONDS,
        )
        assert isinstance(client, Client)
        return client

    async def ask(self, client: Client, command: str, **fields: object) -> Any:
        return await client.request(command, timeout_s=REQUEST_SECONDS, **fields)

    def is_gone(self, client: Client) -> bool:
        """Whether the connection is lost, or silent for so long that a client gives it up."""
        if client.failure is not None:
            return True
        end = client.end
        if not end.is_silent and not end.peer.is_silent:
            client.silent_since = None
            return end.is_closing()
        if client.silent_since is None:
            client.silent_since = self.now()
        return self.now() - client.silent_since > _SILENCE_SECONDS

    def failed(self, what: str, error: Exception, client: Client | None = None) -> None:
        """A client met an error: fine, unless it tells of a bug."""
        name = error.name if isinstance(error, MagnetarError) else type(error).__name__
        self.note(f"{what}: {name}")
        if self.disk.is_stopped:
            return
        if isinstance(error, RequestError) and error.wire_code is WireCode.UNKNOWN:
            self.findings.broken(f"{what}: {error}")
        late = isinstance(error, DeadlineExceeded) and client is not None
        if late and not self.is_silent(client) and not self.disk.plan.faults:
            self.findings.broken(f"{what}: {error}")

    def is_silent(self, client: Client | None) -> bool:
        """Whether nothing can be expected of a connection."""
        if client is None or client.failure is not None:
            return True
        return client.end.is_silent or client.end.peer.is_silent

    def deliver_at(self, topic: TopicStory) -> float | None:
        """The time of delivery of a new message; None: at once."""
        if not topic.has_delays:
            return None
        # The long ones wait over the next start, which is an hour later.
        delay = self.delays.choice((None, None, 0.0, 0.3, 2.0, 8.0, 15.0, LIFE_SECONDS_MAX))
        return None if delay is None else self.now() + delay

    def payload(self, random: Random, number: int) -> bytes:
        """Unlike any other."""
        self.findings.submissions += 1
        text = b"%d %d " % (self.findings.submissions, number)
        return text + random.randbytes(random.choice((0, 10, 200, 1500)))

    def message(self, key: str, payload: bytes) -> tuple[bytes, dict[str, Any], tuple[Part, ...]]:
        """A message of a topic that is compacted: payload, further fields, and what it says."""
        kind = self.contents.random()
        if kind >= _DELETING:
            return payload, {}, (Part(key, False, b""),)
        fields = {"null_value": True} if kind < _DELETING / 2 else {}
        return b"", fields, (Part(key, True, b""),)

    def batch(self, messages: int, payload: bytes) -> tuple[bytes, tuple[Part, ...]]:
        """The same of a batch; few cannot be opened."""
        random = self.contents
        if random.random() < _UNREADABLE:
            return payload, ()
        parts = []
        for _ in range(messages):
            key = random.choice((None, *(f"k{number}" for number in range(_BATCH_KEYS))))
            kind = random.random()
            value = b"" if kind < _DELETING else random.randbytes(random.choice((1, 100)))
            made = pb.SingleMessageMetadata(partition_key=key, payload_size=len(value))
            if kind < _DELETING / 2:
                made.null_value = True
            head = made.SerializeToString()
            parts.append(Part(key, not value, _SIZE.pack(len(head)) + head + value))
        return b"".join(part.data for part in parts), tuple(parts)


class Bugs(logging.Handler):
    """Finds what the server logs of its own failures, as long as its machine runs."""

    def __init__(self, findings: Findings, is_running: Callable[[], bool]) -> None:
        super().__init__(logging.ERROR)
        self._findings = findings
        self._is_running = is_running

    def emit(self, record: logging.LogRecord) -> None:
        event = record.getMessage()
        if self._is_running() and (record.exc_info or event in _FATAL_EVENTS):
            fields: dict[str, object] = getattr(record, "magnetar_fields", {})
            self._findings.broken(f"{event}: {fields.get('error', '')} {fields.get('task', '')}")
