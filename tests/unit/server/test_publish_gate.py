"""A server whose disk is too full for messages: what it refuses, how, and what goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.topic.topic import Topic
from magnetar.errors import RequestError, ServerDiskFull
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from tests.unit.server.serving import LIMITS, connected, published, serving, subscribed

TOPIC = "persistent://public/default/topic"
# More than any disk has.
FULL = LIMITS.override({"disk_floor_bytes": 1 << 62, "disk_floor_percent": 100})


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[tuple[Server, Driver]]:
    async with serving(folder, **options) as server:
        driver = await connected(server)
        try:
            yield server, driver
        finally:
            await driver.close()


def close_gate(server: Server) -> None:
    gate = server.storage.publish_gate
    gate.refusal = ServerDiskFull("the disk of the server is full: a test says so")
    gate.changed.advance()


def open_gate(server: Server) -> None:
    gate = server.storage.publish_gate
    gate.refusal = None
    gate.changed.advance()


async def refused(driver: Driver, command: str, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await driver.request(command, **fields)
    assert caught.value.wire_code == ServerDiskFull.wire_code
    return str(caught.value)


def test_producers_are_closed_behind_their_receipts_and_come_back_to_a_reason(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with served(tmp_path) as (server, driver):
            await driver.request("PRODUCER", topic=TOPIC, producer_id=1)
            await driver.publish(1, 0, build_message(b"stored", sequence_id=0))
            close_gate(server)
            pushed: Any = await driver.pushes.get()
            assert NAMES[pushed.type] == "CLOSE_PRODUCER"
            assert pushed.body.producer_id == 1
            text = await refused(driver, "PRODUCER", topic=TOPIC, producer_id=1, epoch=1)
            assert "the disk of the server is full" in text
            assert "delete topics" in text
            # A send that has crossed CLOSE_PRODUCER is neither stored nor an error of the peer's.
            late = asyncio.create_task(driver.publish(1, 1, build_message(b"late", sequence_id=1)))
            await asyncio.sleep(0)
            await driver.request("PARTITIONED_METADATA", topic=TOPIC)
            late.cancel()
            topic = server.topics.loaded[TopicName.parse(TOPIC)]
            assert isinstance(topic, Topic)
            assert topic.ledger.entries == 1
            open_gate(server)
            await driver.request("PRODUCER", topic=TOPIC, producer_id=1, epoch=2)
            await driver.publish(1, 1, build_message(b"again", sequence_id=1))

    asyncio.run(story())


def test_what_does_not_publish_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as (server, driver):
            await published(driver, 3, topic=TOPIC)
            close_gate(server)
            await subscribed(driver, topic=TOPIC)
            delivered = [await driver.pushes.get() for _ in range(3)]
            assert len(delivered) == 3
            begun = await driver.request("NEW_TXN", tc_id=0, txn_ttl_millis=60_000)
            await driver.request(
                "END_TXN",
                txnid_most_bits=begun.txnid_most_bits,
                txnid_least_bits=begun.txnid_least_bits,
                txn_action=0,
            )
            await driver.request(
                "PRODUCER", topic="non-persistent://public/default/n", producer_id=2
            )
            await driver.request("UNSUBSCRIBE", consumer_id=0)
            await server.topics.delete(TopicName.parse(TOPIC), force=True)

    asyncio.run(story())


def test_no_topic_is_made_on_a_full_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path, limits=FULL) as (server, driver):
            await refused(driver, "PRODUCER", topic=TOPIC, producer_id=1)
            await refused(
                driver, "SUBSCRIBE", topic=TOPIC, subscription="s", subType=0, consumer_id=1
            )
            with pytest.raises(ServerDiskFull):
                await server.topics.create(TopicName.parse(TOPIC))
            with pytest.raises(ServerDiskFull):
                await server.topics.create_partitioned(TopicName.parse(TOPIC), 2)
            with pytest.raises(ServerDiskFull):
                await server.context.scalable.create(TopicName.parse("topic://public/default/s"))
            assert not await server.topics.exists(TopicName.parse(TOPIC))

    asyncio.run(story())
