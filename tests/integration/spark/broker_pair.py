"""Two brokers on one storage, in a thread of this process, and segments that move between them.

Owns: `BrokerPair`: real servers on real sockets; metadata and ledgers are in memory, shared as in
the simulations of several brokers. A move is what a load balancer does: the one that has a segment
lets it go, the other one loads it, and clients find out by being refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from harness.simulation.scalable.routed_segments import RoutedSegments
from harness.simulation.scalable.world import SharedMachine, SharedStorage
from magnetar.broker.topic.ownership import SharedOwnership
from magnetar.broker.topic.topics import Topics
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.errors import ServiceNotReady
from magnetar.ledger.memory import MemoryLedgers
from magnetar.metadata.memory import MemoryMetadata
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.clock import SystemClock
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from tests.unit.server.serving import LIMITS

R = TypeVar("R")

_SESSION_S = 30.0
_TRIES = 50


class _Way:
    """From one broker to the other, without the troubles of a simulated way."""

    ending = True

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def host_at(self, url: str) -> Any:
        return _Host(next(each for each in self.servers if each.service_url == url))


class _Host:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def ask(self, work: Callable[[Server], Awaitable[R]]) -> R:
        return await work(self._server)


class BrokerPair:
    """Use it with `broker_pair`."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._way = _Way()

    @property
    def url(self) -> str:
        """Of the first one; topics are at both."""
        return self._way.servers[0].service_url

    def move(self, topic: str) -> list[str]:
        """Move every segment of a topic that is loaded to the other broker; their names."""
        return self._thread.wait(lambda: self._move(TopicName.parse(topic)))

    async def _move(self, topic: TopicName) -> list[str]:
        first, second = self._way.servers
        moving = [
            (name, here, there)
            for here, there in ((first, second), (second, first))
            for name in here.topics.loaded
            if name.domain is Domain.SEGMENT and name.scalable_topic() == topic
        ]
        for name, here, there in moving:
            await self._hand_over(name, here, there)
        return [str(name) for name, _, _ in moving]

    async def _hand_over(self, name: TopicName, here: Server, there: Server) -> None:
        """A client that looks for the segment in between may bring it back: then once more."""
        for is_last in (*[False] * _TRIES, True):
            await here.topics.unload(name)
            try:
                await there.topics.get(name, create=False)
            except ServiceNotReady:
                if is_last:
                    raise
            else:
                return

    async def start(self, folder: Path) -> None:
        metadata, ledgers = MemoryMetadata(SystemClock()), MemoryLedgers()
        for number in range(2):
            machine = SharedMachine(
                storage=SharedStorage(metadata, ledgers.connect(), _SESSION_S), route=self._route
            )
            config = ServerConfig(data=str(folder / f"broker-{number}"), port=0, limits=LIMITS)
            server = Server(config, machine=machine)
            await server.start()
            self._way.servers.append(server)

    async def stop(self) -> None:
        for server in self._way.servers:
            await server.stop()

    def _route(self, topics: Topics, sharing: SharedOwnership) -> SegmentHost:
        way: Any = self._way
        return RoutedSegments(way, topics, sharing, Random(0))


@contextmanager
def broker_pair(folder: Path) -> Iterator[BrokerPair]:
    thread = LoopThread()
    try:
        pair = BrokerPair(thread)
        try:
            thread.wait(lambda: pair.start(folder))
            yield pair
        finally:
            thread.wait(pair.stop)
    finally:
        thread.stop()
