"""What a server needs of the machine that it runs on: clock, disk, threads, network.

Owns: `Machine`, the real one, and the contract of a listener. Simulations put their own parts in.

Invariants:
1. A listener accepts nothing before `start`, and nothing after `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from magnetar.errors import ConfigError
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.disk import Disk, LocalDisk
from magnetar.runtime.worker import ThreadWorker, Worker

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


class SocketListener:
    """Listens on a TCP socket."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        await self._server.start_serving()

    def close(self) -> None:
        self._server.close()

    async def wait_closed(self) -> None:
        await self._server.wait_closed()


async def listen(new_protocol: NewProtocol, host: str, port: int) -> Listener:
    """A listener on a socket, not started yet; ConfigError if the address cannot be had."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            new_protocol, host, port, backlog=_BACKLOG, start_serving=False
        )
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return SocketListener(server)


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason}",
        hint="choose another --port or --admin-port, or 0 for a free one",
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """The real machine, unless parts of it are replaced."""

    clock: Clock = field(default_factory=SystemClock)
    disk: Disk = field(default_factory=LocalDisk)
    new_worker: Callable[[str], Worker] = ThreadWorker
    listen: Callable[[NewProtocol, str, int], Awaitable[Listener]] = listen
