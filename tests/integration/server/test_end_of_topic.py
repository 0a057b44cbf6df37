"""A terminated topic: each consumer that may be told learns that it has everything, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver
from tests.unit.server.serving import (
    connected,
    message,
    published,
    pushed,
    run,
    serving,
    subscribed,
)

JAVA = {"client_version": "Pulsar-Java-v5.0.0"}
EARLIEST = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}
WHOLE = [{"start": 0, "end": 65535}]

KINDS: dict[str, dict[str, Any]] = {
    "Exclusive": {"subType": 0},
    "Shared": {"subType": 1},
    "Failover": {"subType": 2},
    "Key_Shared": {"subType": 3},
    "sticky": {"subType": 3, "keySharedMeta": {"keySharedMode": 1, "hashRanges": WHOLE}},
    "entry buckets": {
        "subType": 3,
        "keySharedMeta": {"keySharedMode": 1, "hashRanges": WHOLE, "entryBucketDispatch": True},
    },
    "reader": {"subType": 0, "durable": False, "start_message_id": EARLIEST},
}


async def joined(driver: Driver, kind: str) -> None:
    await subscribed(driver, **KINDS[kind])
    if kind == "Failover":
        await pushed(driver, "ACTIVE_CONSUMER_CHANGE")


async def terminate(server: Server) -> None:
    topic = await server.topics.get(TopicName.parse("topic"))
    await topic.terminate()


async def ack(driver: Driver, *ids: Any, cumulative: bool = False) -> None:
    """Acknowledge and wait until that is durable."""
    fields = [{"ledgerId": each.ledgerId, "entryId": each.entryId} for each in ids]
    await driver.request("ACK", consumer_id=0, ack_type=int(cumulative), message_id=fields)


async def nothing_more(driver: Driver) -> None:
    driver.send("PING")
    await pushed(driver, "PONG")


@pytest.mark.parametrize("client", ["Pulsar-Java-v5.0.0", "Magnetar-0.1"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_told_with_the_last_acknowledgement(
    tmp_path: Path, kind: str, client: str
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, client_version=client)
            await joined(driver, kind)
            await published(driver, 3)
            ids = [(await message(driver)).body.message_id for _ in range(3)]
            await ack(driver, ids[0])
            await terminate(server)
            await ack(driver, ids[1])
            await nothing_more(driver)
            await ack(driver, ids[2])
            assert (await pushed(driver, "REACHED_END_OF_TOPIC")).consumer_id == 0
            await nothing_more(driver)
            await driver.close()

    run(scene())


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "reader"])
def test_the_end_is_told_after_a_cumulative_acknowledgement(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, **JAVA)
            await joined(driver, kind)
            await published(driver, 3)
            await terminate(server)
            ids = [(await message(driver)).body.message_id for _ in range(3)]
            await ack(driver, ids[2], cumulative=True)
            assert (await pushed(driver, "REACHED_END_OF_TOPIC")).consumer_id == 0
            await driver.close()

    run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_is_told_when_everything_was_acknowledged_before(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, **JAVA)
            await joined(driver, kind)
            await published(driver, 2)
            await ack(driver, *[(await message(driver)).body.message_id for _ in range(2)])
            await nothing_more(driver)
            await terminate(server)
            assert (await pushed(driver, "REACHED_END_OF_TOPIC")).consumer_id == 0
            await driver.close()

    run(scene())


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared"])
def test_every_consumer_is_told_and_so_is_one_that_comes_late(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            first, second, late = [await connected(server, **JAVA) for _ in range(3)]
            await joined(first, kind)
            await published(first, 1)
            only = (await message(first)).body.message_id
            await joined(second, kind)
            await terminate(server)
            await ack(first, only)
            for driver in (first, second):
                await pushed(driver, "REACHED_END_OF_TOPIC")
            await joined(late, kind)
            await pushed(late, "REACHED_END_OF_TOPIC")
            for driver in (first, second, late):
                await driver.close()

    run(scene())


@pytest.mark.parametrize("kind", ["Exclusive", "Failover", "Shared", "Key_Shared"])
def test_the_end_is_told_after_a_restart(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, **JAVA)
            await joined(driver, kind)
            await published(driver, 1)
            await ack(driver, (await message(driver)).body.message_id)
            await terminate(server)
            await pushed(driver, "REACHED_END_OF_TOPIC")
            await driver.close()
        async with serving(tmp_path) as server:
            driver = await connected(server, **JAVA)
            await joined(driver, kind)
            await pushed(driver, "REACHED_END_OF_TOPIC")
            await driver.close()

    run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_topic_without_messages(tmp_path: Path, kind: str) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, **JAVA)
            await joined(driver, kind)
            await terminate(server)
            assert (await pushed(driver, "REACHED_END_OF_TOPIC")).consumer_id == 0
            await driver.close()

    run(scene())
