"""When the state of deduplication is written: by entries, and by the time that the policy says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import dedup_key
from magnetar.broker.publish.dedup_log import CARE_SECONDS, SNAPSHOT_ENTRIES
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.topic import Topic
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import NAME, World, message, options, receipts


class Snapshots:
    """A topic with deduplication, and when its record changed."""

    def __init__(self, world: World, topic: Topic, producer: Producer) -> None:
        self.world = world
        self.topic = topic
        self.producer = producer
        self._sent = 0

    async def send(self, count: int = 1) -> None:
        for _ in range(count):
            self.producer.send(message(self._sent))
            self._sent += 1
        await receipts(self.producer, count)

    async def version(self) -> int:
        found = await self.topic._parts.metadata.get(dedup_key(NAME))
        assert found is not None
        return found.version

    async def wait(self, seconds: float) -> bool:
        """Whether one was written meanwhile."""
        before = await self.version()
        await asyncio.sleep(seconds)
        return await self.version() != before


def every(seconds: int) -> TopicPolicies:
    return TopicPolicies(deduplication=True, deduplication_snapshot_seconds=seconds)


def with_dedup(seconds: int, scenario: Callable[[Snapshots], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        topic = await world.topic(dedup=True)
        await topic.apply(every(seconds))
        found = Snapshots(world, topic, await topic.add_producer(options()))
        await scenario(found)
        await topic.close()

    run(main())


@pytest.mark.parametrize("seconds", [5, 120, 1000])
def test_a_snapshot_is_written_so_many_seconds_after_the_first_new_entry(seconds: int) -> None:
    async def scenario(found: Snapshots) -> None:
        assert not await found.wait(3.5 * seconds)  # nothing is new
        for _ in range(2):
            await found.send()
            assert not await found.wait(seconds - 1)
            await found.send()  # a later one does not put it off
            assert await found.wait(2)
            assert not await found.wait(3 * seconds)

    with_dedup(seconds, scenario)


def test_a_loaded_topic_follows_another_interval_at_once() -> None:
    async def scenario(found: Snapshots) -> None:
        await found.send()
        assert not await found.wait(10)
        await found.topic.apply(every(12))
        assert await found.wait(3)
        # Longer again, told while it waits; and shorter than it has waited already.
        await found.send()
        await found.topic.apply(every(500))
        assert not await found.wait(400)
        await found.topic.apply(every(60))
        assert await found.wait(1)

    with_dedup(1000, scenario)


def test_without_an_interval_entries_alone_count() -> None:
    async def scenario(found: Snapshots) -> None:
        await found.send()
        assert not await found.wait(10 * CARE_SECONDS)
        await found.send(SNAPSHOT_ENTRIES)
        assert await found.wait(5)
        await found.send()
        await found.topic.apply(every(5))
        assert await found.wait(6)

    with_dedup(0, scenario)


def test_deduplication_begins_with_the_interval_that_holds() -> None:
    async def scenario(found: Snapshots) -> None:
        await found.topic.remove_producer(found.producer)
        await found.topic.apply(TopicPolicies(deduplication_snapshot_seconds=7))
        await found.topic.apply(every(7))
        found.producer = await found.topic.add_producer(options())
        await found.send()
        assert not await found.wait(5)
        assert await found.wait(4)

    with_dedup(1000, scenario)
