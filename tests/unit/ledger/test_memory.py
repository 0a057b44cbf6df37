"""The in-memory ledgers: order, fencing, failures and several brokers on one server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.errors import (
    DiskFull,
    InvalidArgument,
    LedgerClosed,
    LedgerFenced,
    LedgerMissing,
    StorageClosed,
    StorageFenced,
    TooManyRequests,
)
from magnetar.ledger.api import ENTRY_BYTES_MAX, NO_ENTRY, LedgerState
from magnetar.ledger.memory import MemoryLedgers
from magnetar.model.ids import Position


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


class Gate:
    """A delay that lasts until the test opens it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        await self.open.wait()


def test_pipelined_appends_resolve_in_order_with_increasing_ids() -> None:
    async def main() -> None:
        store = MemoryLedgers().connect()
        writer = await store.create()
        seen: list[int] = []
        futures = [writer.append(b"%d" % n) for n in range(5)]
        for future in futures:
            future.add_done_callback(lambda done: seen.append(done.result().entry_id))
        assert writer.last_durable == NO_ENTRY
        await asyncio.gather(*futures)
        assert seen == [0, 1, 2, 3, 4]
        assert writer.last_durable == 4
        found = await store.read(writer.ledger_id, 1, 3)
        assert [entry.payload for entry in found] == [b"1", b"2", b"3"]
        assert found[0].position == Position(writer.ledger_id, 1)

    run(main())


def test_only_durable_entries_are_read() -> None:
    async def main() -> None:
        gate = Gate()
        server = MemoryLedgers(delay=gate)
        store = server.connect()
        writer = await store.create()
        future = writer.append(b"x")
        assert await store.read(writer.ledger_id, 0, 0) == []
        assert (await store.info(writer.ledger_id)).last_entry == NO_ENTRY
        gate.open.set()
        assert await future == Position(writer.ledger_id, 0)
        assert len(await store.read(writer.ledger_id, 0, 0)) == 1

    run(main())


def test_reads_stop_at_the_byte_limit_but_return_one_entry_at_least() -> None:
    async def main() -> None:
        store = MemoryLedgers().connect()
        writer = await store.create()
        await asyncio.gather(*[writer.append(b"12345") for _ in range(4)])
        assert len(await store.read(writer.ledger_id, 0, 9, bytes_max=1)) == 1
        assert len(await store.read(writer.ledger_id, 0, 9, bytes_max=10)) == 2
        assert await store.read(writer.ledger_id, 4, 9) == []
        with pytest.raises(InvalidArgument):
            await store.read(writer.ledger_id, -1, 9)
        with pytest.raises(LedgerMissing):
            await store.read(99, 0, 1)

    run(main())


def test_fence_refuses_what_the_former_owner_has_in_flight() -> None:
    async def main() -> None:
        gate = Gate()
        server = MemoryLedgers(delay=gate)
        first, second = server.connect(), server.connect()
        writer = await first.create()
        future = writer.append(b"late")
        info = await second.fence(writer.ledger_id)
        assert (info.state, info.last_entry) == (LedgerState.FENCED, NO_ENTRY)
        gate.open.set()
        with pytest.raises(LedgerFenced):
            await future
        with pytest.raises(LedgerFenced):
            writer.append(b"later")
        with pytest.raises(LedgerFenced):
            await writer.close()
        assert await second.fence(writer.ledger_id) == info
        assert (await second.close_ledger(writer.ledger_id)).state is LedgerState.CLOSED

    run(main())


def test_a_failed_append_takes_all_later_ones_with_it() -> None:
    async def main() -> None:
        server = MemoryLedgers()
        store = server.connect()
        writer, other = await store.create(), await store.create()
        server.fail_next(DiskFull("no space"))
        failed = [writer.append(b"a"), writer.append(b"b")]
        fine = other.append(b"c")
        results = await asyncio.gather(*failed, fine, return_exceptions=True)
        assert isinstance(results[0], DiskFull)
        assert isinstance(results[1], DiskFull)
        assert results[2] == Position(other.ledger_id, 0)
        with pytest.raises(DiskFull):
            writer.append(b"d")
        assert isinstance(writer.failure, DiskFull)
        assert (await writer.close()).last_entry == NO_ENTRY

    run(main())


@pytest.mark.parametrize("stored", [False, True])
def test_a_failed_sync_stops_the_broker_and_fence_settles_the_entry(stored: bool) -> None:
    async def main() -> None:
        server = MemoryLedgers()
        store, second = server.connect(), server.connect()
        writer, other = await store.create(), await store.create()
        server.fail_next(StorageFenced("sync failed"), stored=stored)
        with pytest.raises(StorageFenced):
            await writer.append(b"x")
        with pytest.raises(StorageFenced):
            other.append(b"y")
        with pytest.raises(StorageFenced):
            await store.create()
        assert writer.last_durable == NO_ENTRY
        assert (await second.fence(writer.ledger_id)).last_entry == (0 if stored else NO_ENTRY)

    run(main())


def test_close_waits_for_submitted_appends() -> None:
    async def main() -> None:
        gate = Gate()
        store = MemoryLedgers(delay=gate).connect()
        writer = await store.create()
        futures = [writer.append(b"ab"), writer.append(b"c")]
        futures[1].cancel()
        closing = asyncio.ensure_future(writer.close())
        await asyncio.sleep(0)
        with pytest.raises(LedgerClosed):
            writer.append(b"d")
        assert not closing.done()
        gate.open.set()
        info = await closing
        assert (info.state, info.last_entry, info.size_bytes) == (LedgerState.CLOSED, 1, 3)
        assert await writer.close() == info

    run(main())


def test_ids_grow_past_deleted_ledgers_and_deleted_ones_are_missing() -> None:
    async def main() -> None:
        store = MemoryLedgers().connect()
        ids = [(await store.create()).ledger_id for _ in range(3)]
        await store.delete(ids[2])
        await store.delete(ids[2])
        assert (await store.create()).ledger_id > ids[2]
        with pytest.raises(LedgerMissing):
            await store.info(ids[2])
        assert [ledger_id async for ledger_id in store.list()] == [*ids[:2], ids[2] + 1]

    run(main())


def test_a_deleted_ledger_takes_no_append() -> None:
    async def main() -> None:
        server = MemoryLedgers()
        first, second = server.connect(), server.connect()
        writer = await first.create()
        await second.delete(writer.ledger_id)
        with pytest.raises(LedgerFenced):
            await writer.append(b"x")

    run(main())


def test_limits_and_faults_of_other_operations() -> None:
    async def main() -> None:
        server = MemoryLedgers(queue_max=1)
        store = server.connect()
        writer = await store.create()
        queued = writer.append(b"x")
        with pytest.raises(TooManyRequests):
            writer.append(b"y")
        await queued
        with pytest.raises(InvalidArgument):
            writer.append(bytes(ENTRY_BYTES_MAX + 1))
        assert await writer.append(b"z") == Position(writer.ledger_id, 1)
        server.fail_next(DiskFull("no space"), operation="create")
        with pytest.raises(DiskFull):
            await store.create()
        await store.create()

    run(main())


def test_a_closed_store_keeps_its_ledgers_for_the_next_one() -> None:
    async def main() -> None:
        server = MemoryLedgers()
        store = server.connect()
        writer = await store.create()
        future = writer.append(b"x")
        await store.close()
        assert future.done()
        with pytest.raises(LedgerClosed):
            writer.append(b"y")
        with pytest.raises(StorageClosed):
            await store.create()
        assert (await server.connect().fence(writer.ledger_id)).last_entry == 0

    run(main())


def test_a_dropped_broker_loses_its_queue() -> None:
    async def main() -> None:
        server = MemoryLedgers(delay=Gate())
        store = server.connect()
        writer = await store.create()
        future = writer.append(b"x")
        server.drop(store)
        with pytest.raises(StorageClosed):
            await future
        assert (await server.connect().fence(writer.ledger_id)).last_entry == NO_ENTRY

    run(main())
