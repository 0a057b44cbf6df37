"""What scalable topics keep that no subscription needs: real brokers on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import RetentionPolicies
from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.errors import DataLost
from magnetar.model.names import NamespaceName
from magnetar.model.segments import Segment
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, Stage, until

MINUTES = 20
"""The default of these brokers; days would only take longer."""
PASSES_S = 200.0
"""Several looks of the maintenance, and of the controller."""
KIB = b"x" * 1024

DEFAULT: dict[str, Any] = {
    "disk": True,
    "retention_minutes": MINUTES,
    "scalable_sealed_seconds": 60.0,
}


async def publish(client: Client, count: int, *, first: int = 0, padding: bytes = b"") -> None:
    async with await client.producer(NAME) as producer:
        for number in range(first, first + count):
            await producer.submit(b"%d %b" % (number, padding), key=f"k{number % 7}")
        await producer.flush()


async def kept(stage: Stage) -> list[int]:
    """The numbers that a reader finds who begins at the earliest message."""
    async with (
        new_client(stage) as client,
        await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer,
    ):
        found: list[int] = []
        while got := await consumer.receive_many(1000, timeout=3.0):
            found += [int(message.value.partition(b" ")[0]) for message in got]
    return sorted(found)


async def restart(stage: Stage) -> None:
    await stage.host.kill()
    assert await stage.host.start()


async def set_retention(stage: Stage, minutes: int, megabytes: int) -> None:
    value = RetentionPolicies(minutes, megabytes)

    def change(found: Policies) -> Policies:
        return msgspec.structs.replace(found, retention_policies=value)

    namespace = NamespaceName("public", "default")
    await stage.host.ask(lambda server: server.topics.change_namespace(namespace, change))


async def segments(stage: Stage) -> dict[int, Segment]:
    return dict((await stage.layout()).segments)


async def pruned(stage: Stage, *ids: int, seconds: float = PASSES_S) -> None:
    async def are_gone() -> bool:
        return not set(ids) & set(await segments(stage))

    await until(are_gone, seconds, f"segments {ids} are pruned")


def test_what_was_published_before_anybody_subscribed_outlives_a_restart() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await publish(client, 500)
        await restart(stage)
        assert await kept(stage) == list(range(500))  # loads the segments
        await asyncio.sleep(PASSES_S)
        assert await kept(stage) == list(range(500))
        await asyncio.sleep(15 * 60.0)
        assert await kept(stage) == list(range(500))
        # Nobody has it loaded now, and nobody comes: its time passes all the same.
        await restart(stage)
        await asyncio.sleep(25 * 60.0)
        assert await kept(stage) == []

    play(story, **DEFAULT)


@pytest.mark.parametrize("by_namespace", [True, False])
def test_without_retention_it_goes_as_in_pulsar(by_namespace: bool) -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        if by_namespace:
            await set_retention(stage, 0, 0)
        async with new_client(stage) as client:
            await publish(client, 500)
        await restart(stage)
        assert await kept(stage) == list(range(500))
        await asyncio.sleep(PASSES_S)
        assert await kept(stage) == []

    play(story, **(DEFAULT | {"retention_minutes": MINUTES if by_namespace else 0}))


def test_old_messages_stay_in_sealed_parents_until_their_time_is_over() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await publish(client, 100)
            await stage.split(0)
            await publish(client, 100, first=100)
            await stage.merge(1, 2)
            await publish(client, 100, first=200)
            async with await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer:
                got = await consumer.receive_many(50, timeout=5.0)
                assert got
                half_read = consumer.checkpoint()
        await asyncio.sleep(15 * 60.0)
        assert set(await segments(stage)) == {0, 1, 2, 3}
        assert await kept(stage) == list(range(300))
        await pruned(stage, 0, 1, 2, seconds=10 * 60.0)
        left = await kept(stage)
        assert left in ([], list(range(200, 300)))
        async with new_client(stage) as client:
            with pytest.raises(DataLost):
                await client.checkpoint_consumer(NAME, start=half_read)

    play(story, **DEFAULT)


def test_a_policy_of_the_namespace_goes_before_the_default() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        await set_retention(stage, 5, -1)
        async with new_client(stage) as client:
            await publish(client, 100)
            await stage.split(0)
        await asyncio.sleep(4 * 60.0)
        assert await kept(stage) == list(range(100))
        await pruned(stage, 0, seconds=5 * 60.0)

    play(story, **DEFAULT)


def test_the_size_is_that_of_all_segments_and_the_oldest_go_first() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        await set_retention(stage, -1, 2)  # MB, of messages of about 1 KB
        async with new_client(stage) as client:
            for number in range(3):
                await publish(client, 1200, first=1200 * number, padding=KIB)
                if number < 2:
                    (active,) = (await stage.layout()).active
                    await stage.split(active.segment_id)
                    await stage.merge(*(each.segment_id for each in (await stage.layout()).active))
            await pruned(stage, 0)
            # All of what was written last, and what is older as far as there is room.
            assert await kept(stage) == list(range(1200, 3600))
            # Then the active one fills up alone.
            for number in range(3, 9):
                await publish(client, 1200, first=1200 * number, padding=KIB)
                await asyncio.sleep(PASSES_S)
        assert len(await segments(stage)) == 1
        left = await kept(stage)
        assert left == list(range(10_800 - len(left), 10_800))
        assert 2000 <= len(left) <= 3300

    play(story, **DEFAULT)
