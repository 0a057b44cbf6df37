"""A broker that answers as a test tells it to, on the fake network and on virtual time.

Owns: `FakeBroker`. It shakes hands and answers PINGs by itself; every other command goes to the
handler of its name, or waits in `commands` if there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, cast

from magnetar.client.connection.pool import Connections
from magnetar.client.connection.settings import ClientSettings, ServiceUrl
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.network import Network
from magnetar.wire.commands import NAMES, Side
from magnetar.wire.connection import Connection
from magnetar.wire.frames import command
from magnetar.wire.messages import Received, Send

URL = "pulsar://broker:6650"
SEED = 7

Handler = Callable[["Peer", Any], None]
"""Gets the peer and the body (of a SEND: the `Send`)."""


class Peer(asyncio.Protocol):
    """The broker's end of one connection."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.wire = Connection(side=Side.SERVER)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.broker.peers.append(self)

    def data_received(self, data: bytes) -> None:
        for each in self.wire.receive(data):
            if isinstance(each, Received):
                self._handle(NAMES[each.type], each.body)
            elif isinstance(each, Send):
                self._handle("SEND", each)

    def say(self, name: str, **fields: object) -> None:
        self.transport.write(command(name, **fields))

    def _handle(self, name: str, body: Any) -> None:
        self.broker.commands.append((name, body))
        handler = self.broker.handlers.get(name)
        if handler is not None:
            handler(self, body)
        elif name == "CONNECT":
            self.wire.open()
            self.say("CONNECTED", server_version="fake", **self.broker.connected)
        elif name == "PING":
            self.say("PONG")


class FakeBroker:
    """Listens on the fake network."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.network = Network(Random(SEED), loop.time)
        self.peers: list[Peer] = []
        self.commands: list[tuple[str, Any]] = []
        self.handlers: dict[str, Handler] = {}
        self.connected: dict[str, object] = {
            "protocol_version": 21,
            "feature_flags": {"supports_scalable_topics": True},
        }

    async def listen(self) -> None:
        listener = await self.network.listen(lambda: Peer(self), "broker", 6650)
        await listener.start()

    def connections(self, url: str = URL, **settings: Any) -> Connections:
        """Those of a client whose network is this one."""
        given = ClientSettings(service_url=ServiceUrl.parse(url), **settings)
        return Connections(given, connect=self.network.connect, chance=Random(SEED))

    def said(self, name: str) -> list[Any]:
        return [body for each, body in self.commands if each == name]


def play(story: Callable[[FakeBroker], Coroutine[Any, Any, None]]) -> None:
    """Run a story with a broker that listens."""

    async def main() -> None:
        broker = FakeBroker()
        await broker.listen()
        await story(broker)

    virtual_time.run(main(), until=100_000)
