"""A session without a socket: a transport that keeps what is written, on a loop of virtual time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.topic.topics import Topics
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.context import Context
from magnetar.server.handlers.table import HANDLERS
from magnetar.server.session import Handlers, Session
from magnetar.wire.commands import NAMES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command
from magnetar.wire.messages import Received


class Wire(asyncio.Transport):
    """Takes what a session writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_read = True
        self.session: Session | None = None
        self._closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 1234) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._closed, "written to a closed transport"
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            assert self.session is not None
            asyncio.get_running_loop().call_soon(self.session.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.writes))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class NoQueue:
    """Storage that is never behind."""

    queued_bytes = 0

    def __init__(self) -> None:
        self.progress = Signal()


class Link:
    """A client's end of a session."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        handlers: Handlers = HANDLERS,
        context: Context | None = None,
    ) -> None:
        config = ServerConfig(limits=limits or Limits())
        self.context = context or Context(
            config,
            cast("Topics", None),
            cast("Schemas", None),
            LoopClock(0),
            Authority(),
            "",
            queue=NoQueue(),
        )
        self.session = Session(self.context, handlers)
        self.wire = Wire()
        self.wire.session = self.session
        self._client = Connection(side=Side.CLIENT)
        self._read = 0
        self.session.connection_made(self.wire)

    def send(self, type_name: str, **fields: object) -> None:
        self.session.data_received(command(type_name, **fields))

    async def received(self) -> list[tuple[str, Any]]:
        """What came since the last call, once the session has nothing more to say by itself."""
        for _ in range(20):
            await asyncio.sleep(0)
        new = b"".join(self.wire.writes[self._read :])
        self._read = len(self.wire.writes)
        found = self._client.receive(new) if new else []
        return [(NAMES[each.type], each.body) for each in found if isinstance(each, Received)]

    async def connect(self, version: str = "Pulsar-CPP-v4.2.0") -> Any:
        self.send("CONNECT", client_version=version, protocol_version=20)
        ((name, body),) = await self.received()
        assert name == "CONNECTED"
        return body

    async def close(self) -> None:
        self.wire.close()
        await self.session.ended.wait()
