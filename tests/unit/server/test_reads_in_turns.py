"""What is in memory is read without waiting: who reads very much gives others a turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from magnetar.broker.topic.topic import Topic
from magnetar.managed_ledger.reading import Reading
from magnetar.model.names import TopicName
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from tests.unit.server.serving import connected, run, serving

NAME: Final = TopicName.parse("persistent://public/default/topic")
MANY: Final = 2_000
SCANS_MAX: Final = 2
"""Reads of 500 entries that one turn may do: one that ends a slice, and the first of the next."""


class Reads:
    """Counts reads of all topics, and how many of them others had to wait for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = Reading.read

        async def counted(reading: Reading, *given: Any) -> Any:
            self.count += 1
            return await read(reading, *given)

        patch.setattr(Reading, "read", counted)

    async def most_in_a_turn(self, work: Coroutine[Any, Any, object]) -> int:
        task, most = asyncio.ensure_future(work), 0
        while not task.done():
            before = self.count
            await asyncio.sleep(0)
            most = max(most, self.count - before)
        await task
        return most


async def filled(server: Server, count: int, **metadata: Any) -> Topic:
    topic = await server.topics.get(NAME, create=True)
    assert isinstance(topic, Topic)
    entries = [
        build_message(b"x", producer_name="p", sequence_id=number, **metadata)
        for number in range(count)
    ]
    await asyncio.gather(*map(topic.ledger.append, entries))
    return topic


async def begun(driver: Driver, **fields: Any) -> dict[str, Any]:
    answer = await driver.request("NEW_TXN", tc_id=0, txn_ttl_millis=600_000, **fields)
    names = ("txnid_most_bits", "txnid_least_bits")
    return {name: getattr(answer, name) for name in names}


async def load(server: Server) -> object:
    return await server.topics.get(NAME, create=False)


def test_sequences_are_replayed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)

    async def scene() -> None:
        async with serving(tmp_path) as server:
            await server.topics.change_namespace(
                NAME.namespace,
                lambda policies: msgspec.structs.replace(policies, deduplication_enabled=True),
            )
            driver = await connected(server)
            # Of an open one: whoever loads the topic reads everything from its first message on.
            txn = await begun(driver)
            await driver.request("ADD_PARTITION_TO_TXN", partitions=[str(NAME)], **txn)
            await driver.request("PRODUCER", topic=str(NAME), producer_id=1, producer_name="p")
            await driver.publish(1, 0, build_message(b"x", producer_name="p", **txn), **txn)
            await filled(server, MANY)
            await server.topics.unload(NAME)
            before = reads.count
            assert 0 < await reads.most_in_a_turn(load(server)) <= SCANS_MAX
            assert reads.count - before >= MANY // 500
            await driver.close()

    run(scene())


def test_entries_that_transactions_hold_are_passed_over_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a consumer that asks for one message, each is read on its own."""
    reads = Reads(monkeypatch)

    async def scene() -> None:
        async with serving(tmp_path) as server:
            topic = await filled(server, MANY)
            first, last = topic.ledger.first_position(), topic.ledger.last_position()
            driver = await connected(server)
            where: dict[str, Any] = {"topic": str(NAME), "subscription": "sub", "subType": 1}
            await driver.request("SUBSCRIBE", consumer_id=0, initialPosition=1, **where)
            txn = await begun(driver, scalable=True)
            numbers = range(first.entry_id, last.entry_id)
            ids = [{"ledgerId": first.ledger_id, "entryId": number} for number in numbers]
            await driver.request("ACK", consumer_id=0, ack_type=0, message_id=ids, **txn)
            before = reads.count

            async def receive() -> None:
                driver.send("FLOW", consumer_id=0, messagePermits=1)
                await driver.pushes.get()

            assert 0 < await reads.most_in_a_turn(receive()) <= SLICE_ITEMS + 1
            assert reads.count - before >= MANY
            await driver.close()

    run(scene())
