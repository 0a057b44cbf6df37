"""Brokers that come, go and lose their sessions, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import DeadlineExceeded
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.runtime.clock import LoopClock
from magnetar.scalable.live_brokers import LiveBrokers
from magnetar.scalable.records import BROKERS
from magnetar.testing.virtual.virtual_time import run

SESSION_S = 6.0


def broker(store: MemoryStore, broker_id: str) -> LiveBrokers:
    return LiveBrokers(store, broker_id, start_seconds=5.0, stop_seconds=5.0)


async def until_ids(brokers: LiveBrokers, *ids: str) -> None:
    async with asyncio.timeout(60):
        while brokers.ids != frozenset(ids):
            await brokers.changes.past(brokers.changes.version)


def test_brokers_see_each_other_come_and_go() -> None:
    async def main() -> None:
        server = MemoryMetadata(LoopClock(0))
        one, two = server.connect(SESSION_S), server.connect(SESSION_S)
        async with broker(one, "host:1/é") as first:
            assert first.ids == {"host:1/é"}
            second = broker(two, "host:2")
            await second.start()
            await until_ids(first, "host:1/é", "host:2")
            assert second.ids == first.ids
            await second.stop()
            await until_ids(first, "host:1/é")
        assert await one.scan_keys(BROKERS) == []

    run(main())


def test_a_broker_that_dies_without_a_word_goes_with_its_session() -> None:
    async def main() -> None:
        server = MemoryMetadata(LoopClock(0))
        one, two = server.connect(SESSION_S), server.connect(SESSION_S)
        async with broker(one, "1") as first:
            second = broker(two, "2")
            await second.start()
            await until_ids(first, "1", "2")
            began = asyncio.get_running_loop().time()
            server.drop(two)
            await until_ids(first, "1")
            assert asyncio.get_running_loop().time() - began <= SESSION_S
            await second.stop()

    run(main())


def test_a_lost_session_is_followed_by_a_new_record() -> None:
    async def main() -> None:
        server = MemoryMetadata(LoopClock(0))
        one, two = server.connect(SESSION_S), server.connect(SESSION_S)
        async with broker(one, "1") as first, broker(two, "2"):
            await until_ids(first, "1", "2")
            server.cut(two)
            await until_ids(first, "1")
            server.heal(two)
            await until_ids(first, "1", "2")
            for _ in range(5):  # and the new record is of the new session
                await asyncio.sleep(SESSION_S)
                assert first.ids == {"1", "2"}

    run(main())


def test_a_record_that_was_deleted_by_hand_comes_back() -> None:
    async def main() -> None:
        server = MemoryMetadata(LoopClock(0))
        one, other = server.connect(SESSION_S), server.connect(SESSION_S)
        async with broker(one, "1") as first:
            await until_ids(first, "1")
            await other.delete(f"{BROKERS}/1")
            await first.changes.past(first.changes.version)
            await until_ids(first, "1")

    run(main())


def test_a_start_without_the_store_fails_in_time() -> None:
    async def main() -> None:
        server = MemoryMetadata(LoopClock(0))
        store = server.connect(SESSION_S)
        server.cut(store)
        with pytest.raises(DeadlineExceeded):
            await broker(store, "1").start()
        assert asyncio.get_running_loop().time() <= 6.0

    run(main())
