"""The way from one simulated broker to the broker that has a segment, slow and unsure as any way.

Owns: `RoutedSegments`, the `SegmentHost` of a broker among several: it finds the owner of a segment
and has it do what a controller wants.

Invariants:
1. A call is carried out by the broker that the ownership names, in that broker's life.
2. A call may fail before it arrives, or after it was carried out; the caller cannot tell which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeVar

from magnetar.broker.publish.lineage import Lineage
from magnetar.broker.topic.ownership import SharedOwnership
from magnetar.broker.topic.quotas import Backlog
from magnetar.broker.topic.topics import Topics
from magnetar.errors import DeadlineExceeded, MagnetarError, ServiceNotReady, Unavailable
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.model.names import TopicName
from magnetar.scalable.layout.autoscale import Sample
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.segments import (
    CursorFound,
    CursorWanted,
    Kept,
    LocalSegments,
    SegmentHost,
    SegmentUse,
)

if TYPE_CHECKING:
    from harness.simulation.scalable.world import ScalableWorld
    from magnetar.server.app import Server

Result = TypeVar("Result")

_SECONDS: Final = 4.0
"""What an answer may take."""
_DELAY_S: Final = 0.002


class RoutedSegments:
    """Segments wherever they are."""

    def __init__(
        self, world: ScalableWorld, topics: Topics, ownership: SharedOwnership, random: Random
    ) -> None:
        self._world = world
        self._local = LocalSegments(topics, LayoutWatchers())
        self._ownership = ownership
        self._random = random

    async def prepare(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        await self._at(name, lambda segments: segments.prepare(name, cursors))

    async def add_cursors(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        await self._at(name, lambda segments: segments.add_cursors(name, cursors))

    async def drop_cursor(self, name: TopicName, subscription: str) -> None:
        await self._at(name, lambda segments: segments.drop_cursor(name, subscription))

    async def seal(self, name: TopicName) -> Lineage:
        return await self._at(name, lambda segments: segments.seal(name))

    async def inherit(self, name: TopicName, lineage: Lineage) -> None:
        await self._at(name, lambda segments: segments.inherit(name, lineage))

    async def delete(self, name: TopicName) -> None:
        await self._at(name, lambda segments: segments.delete(name))

    async def use(self, name: TopicName) -> SegmentUse:
        return await self._at(name, lambda segments: segments.use(name))

    async def cursors(self, name: TopicName) -> list[CursorFound]:
        return await self._at(name, lambda segments: segments.cursors(name))

    async def backlog(self, name: TopicName, subscription: str) -> int | None:
        return await self._at(name, lambda segments: segments.backlog(name, subscription))

    async def kept(self, name: TopicName) -> Kept:
        return await self._at(name, lambda segments: segments.kept(name))

    async def trim(self, name: TopicName, retention: Retention) -> None:
        await self._at(name, lambda segments: segments.trim(name, retention))

    async def slowest_backlog(self, name: TopicName, *, with_age: bool) -> Backlog:
        return await self._at(
            name, lambda segments: segments.slowest_backlog(name, with_age=with_age)
        )

    async def evict(self, name: TopicName, room: int) -> None:
        await self._at(name, lambda segments: segments.evict(name, room))

    async def evict_older(self, name: TopicName, seconds: float) -> None:
        await self._at(name, lambda segments: segments.evict_older(name, seconds))

    async def stop_producers(self, name: TopicName, error: MagnetarError) -> None:
        await self._at(name, lambda segments: segments.stop_producers(name, error))

    async def undecided(self, name: TopicName) -> bool:
        return await self._at(name, lambda segments: segments.undecided(name))

    async def seek(self, name: TopicName, subscription: str, ms: int) -> None:
        await self._at(name, lambda segments: segments.seek(name, subscription, ms))

    async def seek_earliest(self, name: TopicName, subscription: str) -> None:
        await self._at(name, lambda segments: segments.seek_earliest(name, subscription))

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        await self._at(name, lambda segments: segments.skip_all(name, subscription))

    async def expire(self, name: TopicName, subscription: str, seconds: int) -> None:
        await self._at(name, lambda segments: segments.expire(name, subscription, seconds))

    async def key_samples(self, name: TopicName, entries_max: int) -> list[Sample]:
        return await self._at(name, lambda segments: segments.key_samples(name, entries_max))

    async def forget_schema(self, topic: TopicName) -> None:
        await self._local.forget_schema(topic)  # a record: any broker can

    async def forget_partitions(self, topic: TopicName) -> None:
        await self._local.forget_partitions(topic)

    async def consumers(self, name: TopicName, subscription: str) -> int:
        return await self._at(name, lambda segments: segments.consumers(name, subscription))

    async def unused_seconds(self, name: TopicName, subscription: str) -> float | None:
        return await self._at(name, lambda segments: segments.unused_seconds(name, subscription))

    async def _at(
        self, name: TopicName, work: Callable[[SegmentHost], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Have the owner of a segment do something."""
        url = await self._ownership.owner_url(name)
        host = self._world.host_at(url)
        try:
            async with asyncio.timeout(_SECONDS):
                await self._travel(name)
                result = await host.ask(lambda server: work(_local(server)))
                await self._travel(name)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{url} does not answer about {name}") from error
        return result

    async def _travel(self, name: TopicName) -> None:
        await asyncio.sleep(_DELAY_S * self._random.random())
        kind = self._random.random()
        if self._world.ending:
            return
        if kind < 0.01:
            raise Unavailable(f"{name}: the connection to its broker broke")
        if kind < 0.02:
            raise ServiceNotReady(f"{name}: its broker is not ready")
        if kind < 0.025:
            await asyncio.sleep(2 * _SECONDS)


def _local(server: Server) -> LocalSegments:
    return LocalSegments(server.topics, server.context.scalable.layout_watchers)
