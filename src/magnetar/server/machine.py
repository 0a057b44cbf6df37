"""The machine that a server runs on: clock, disk, threads, network, storage.

Owns: `Machine`, the real one, and the contracts of a listener and of a storage. Simulations put
their own parts in. Brokers that share their storage have another `open_storage`, and with it
`share_topics` and `segments`.

Invariants:
1. A listener accepts nothing before `start`, and nothing after `close`.
2. A storage belongs to one server: it is closed with it, whoever else may share what is behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from magnetar.broker.topic.ownership import SharedOwnership
from magnetar.broker.topic.topics import Topics
from magnetar.errors import ConfigError, StorageError
from magnetar.ledger.api import LedgerStore
from magnetar.metadata.api import MetadataStore
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.disk import Disk, LocalDisk
from magnetar.runtime.disk_space import PublishGate
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.runtime.worker import ThreadWorker, Worker
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.segments import LocalSegments, SegmentHost
from magnetar.server import embedded

# After a restart all clients come back at once.
_BACKLOG: Final = 1024

NewProtocol = Callable[[], asyncio.Protocol]


class Listener(Protocol):
    """Accepts connections at one address."""

    @property
    def port(self) -> int:
        """The real one, also if a free one was asked for."""
        ...

    async def start(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class ServerStorage(Protocol):
    """The storage in which a server keeps everything that must last."""

    progress: Signal
    """Advances when what was submitted has become durable, or never will."""

    @property
    def ledgers(self) -> LedgerStore: ...

    @property
    def shares_journal(self) -> bool:
        """Whether metadata and entries become durable in the order of their submission."""
        ...

    @property
    def failure(self) -> StorageError | None:
        """Why nothing can be written any more; None while all is well."""
        ...

    @property
    def queued_bytes(self) -> int:
        """What is not durable yet."""
        ...

    @property
    def publish_gate(self) -> PublishGate:
        """Closed while there is no room for messages."""
        ...

    def connect(self) -> MetadataStore:
        """A client of the metadata store, with a session of its own."""
        ...

    async def close(self) -> None: ...


class SocketListener:
    """Listens on a TCP socket."""

    def __init__(self, server: asyncio.Server, host: str) -> None:
        self._server = server
        self._host = host

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        port = self.port
        try:
            await self._server.start_serving()
        # Two that started at once may both have bound it: the kernel decides only here.
        except OSError as error:
            raise cannot_listen(self._host, port, error) from error

    def close(self) -> None:
        self._server.close()

    async def wait_closed(self) -> None:
        await self._server.wait_closed()


async def listen(new_protocol: NewProtocol, host: str, port: int) -> Listener:
    """A listener on a socket, not started yet; ConfigError if the address cannot be had."""
    loop = asyncio.get_running_loop()
    try:
        # Invariant 1: bound at once, so that the port can be announced; it listens after `start`.
        server = await loop.create_server(
            new_protocol, host, port, backlog=_BACKLOG, start_serving=False
        )
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return SocketListener(server, host)


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason}",
        hint="choose another --port or --admin-port, or 0 for a free one",
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """The real machine, unless parts of it are replaced."""

    # The seams to the outside: simulations put virtual time, disk and network here.
    clock: Clock = field(default_factory=SystemClock)
    disk: Disk = field(default_factory=LocalDisk)
    new_worker: Callable[[str], Worker] = ThreadWorker
    listen: Callable[[NewProtocol, str, int], Awaitable[Listener]] = listen

    async def open_storage(self, folder: Path, limits: Limits) -> ServerStorage:
        """The embedded storage of a data folder, recovered."""
        return await embedded.open_storage(
            folder,
            limits=limits,
            disk=self.disk,
            clock=self.clock,
            new_worker=self.new_worker,
        )

    def share_topics(self, metadata: MetadataStore, url: str) -> SharedOwnership | None:
        """How topics are shared with other brokers on the same storage; None: it is alone."""
        return None

    def segments(
        self, topics: Topics, sharing: SharedOwnership | None, layout_watchers: LayoutWatchers
    ) -> SegmentHost:
        """The way to the segments of scalable topics."""
        return LocalSegments(topics, layout_watchers)
