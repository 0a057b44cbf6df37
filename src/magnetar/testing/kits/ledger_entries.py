"""Ledger conformance items 1-11: appending and reading."""

from __future__ import annotations

import asyncio

from magnetar.errors import InvalidArgument, LedgerMissing
from magnetar.ledger.api import NO_ENTRY, LedgerState
from magnetar.model.ids import Position
from magnetar.testing.kits.ledger_base import (
    LedgerKitBase,
    LedgerWorld,
    acknowledged,
    check_run,
    item,
    read_all,
    refuses,
    written,
)

# Enough entries for several batches, since the items yield to the loop in between.
PIPELINED = 500
FOLLOWED = 400
WRITERS = 50
POLL_S = 0.001


class AppendItems(LedgerKitBase):
    """Ids, order, sizes and batches."""

    @item
    async def test_01_ids_begin_with_zero(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        assert writer.last_durable == NO_ENTRY
        for n in range(3):
            assert await writer.append(b"%d" % n) == Position(writer.ledger_id, n)
            assert writer.last_durable == n
        other = await store.create()
        assert await other.append(b"") == Position(other.ledger_id, 0)

    @item
    async def test_02_pipelined_appends_resolve_in_order(self, world: LedgerWorld) -> None:
        writer = await (await world.connect()).create()
        resolved: list[int] = []
        appends = []
        for n in range(PIPELINED):
            append = writer.append(b"%d" % n)
            append.add_done_callback(lambda done: resolved.append(done.result().entry_id))
            appends.append(append)
            # Lets batches begin in between: the order has to hold over several of them.
            if n % 100 == 99:
                await asyncio.sleep(0)
        positions = await acknowledged(*appends)
        assert positions == [Position(writer.ledger_id, n) for n in range(PIPELINED)]
        await asyncio.sleep(0)
        assert resolved == list(range(PIPELINED)), "acknowledged in another order"

    @item
    async def test_03_smallest_and_largest_entries(self, world: LedgerWorld) -> None:
        store = await world.connect()
        payloads = [b"", bytes(world.entry_bytes_max), b"", b"\xff" * world.entry_bytes_max, b"z"]
        writer = await store.create()
        for payload in payloads:
            await writer.append(payload)
        assert await read_all(store, writer.ledger_id) == payloads
        # Once from memory, once from where the entries rest: both know sizes of their own.
        await world.settle()
        assert await read_all(store, writer.ledger_id) == payloads
        info = await store.info(writer.ledger_id)
        assert info.size_bytes == 2 * world.entry_bytes_max + 1

    @item
    async def test_04_an_entry_too_large_is_refused(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        # In flight while the refusal comes.
        early = writer.append(b"early")
        with refuses(InvalidArgument):
            writer.append(bytes(world.entry_bytes_max + 1))
        late = writer.append(b"late")
        ids = [position.entry_id for position in await acknowledged(early, late)]
        assert ids == [0, 1], "a refused entry takes no id and stops nobody"
        assert await read_all(store, writer.ledger_id) == [b"early", b"late"]

    @item
    async def test_05_many_ledgers_share_batches(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writers = [await store.create() for _ in range(WRITERS)]
        before = world.batches()
        rounds = 20
        appends = [writer.append(b"%d" % n) for n in range(rounds) for writer in writers]
        await acknowledged(*appends)
        after = world.batches()
        # Group commit: a sync for each ledger would make many topics as slow as the disk's syncs.
        if before is not None and after is not None:
            assert after - before < len(appends) // 10, "each ledger was made durable alone"
        for writer in writers:
            payloads = await read_all(store, writer.ledger_id)
            assert payloads == [b"%d" % n for n in range(rounds)]

    @item
    async def test_06_ledgers_written_at_once_stay_apart(self, world: LedgerWorld) -> None:
        store = await world.connect()

        async def write(number: int) -> int:
            writer = await store.create()
            for n in range(20):
                await writer.append(b"%d:%d" % (number, n))
            # Open and closed ones side by side.
            if number % 2:
                await writer.close()
            return writer.ledger_id

        ids = await asyncio.gather(*[write(number) for number in range(20)])
        assert len(set(ids)) == 20
        await world.settle()
        for number, ledger_id in enumerate(ids):
            expected = [b"%d:%d" % (number, n) for n in range(20)]
            assert await read_all(store, ledger_id) == expected


class ReadItems(LedgerKitBase):
    """Items about reading: what a reader gets, at rest and behind a writer."""

    @item
    async def test_07_ranges(self, world: LedgerWorld) -> None:
        store = await world.connect()
        payloads = [b"%03d" % n for n in range(200)]
        ledger_id = (await written(store, payloads)).ledger_id
        for _ in range(3):  # from memory, from wherever it rests, from a cache
            for first, last in ((0, 0), (0, 199), (5, 9), (63, 64), (100, 163), (199, 199)):
                found = await store.read(ledger_id, first, last)
                check_run(found, ledger_id, first)
                assert 1 <= len(found) <= last - first + 1
                for entry in found:
                    assert entry.payload == payloads[entry.position.entry_id]
            assert await read_all(store, ledger_id) == payloads
            await world.settle()

    @item
    async def test_08_byte_limit(self, world: LedgerWorld) -> None:
        store = await world.connect()
        ledger_id = (await written(store, [b"12345", b"", b"12345", b"1" * 5000])).ledger_id
        for _ in range(3):
            counts = [
                len(await store.read(ledger_id, first, 9, bytes_max=bytes_max))
                for first, bytes_max in ((0, 1), (0, 5), (0, 9), (0, 10), (3, 1), (0, 5010))
            ]
            # One entry always comes, however large: a reader must get on.
            assert counts == [1, 2, 2, 3, 1, 4], "at least one, then as many as fit"
            assert len(await read_all(store, ledger_id, bytes_max=1)) == 4
            await world.settle()

    @item
    async def test_09_beyond_the_ends(self, world: LedgerWorld) -> None:
        store = await world.connect()
        ledger_id = (await written(store, [b"a", b"b", b"c"])).ledger_id
        empty = (await store.create()).ledger_id
        for _ in range(2):
            assert [entry.payload for entry in await store.read(ledger_id, 2, 50)] == [b"c"]
            # Behind the end is nothing yet, and no error: a reader that caught up asks just this.
            assert await store.read(ledger_id, 3, 50) == []
            assert await store.read(ledger_id, 2, 1) == []
            assert await store.read(empty, 0, 50) == []
            with refuses(InvalidArgument):
                await store.read(ledger_id, -1, 1)
            with refuses(LedgerMissing):
                await store.read(ledger_id + 1_000_000, 0, 1)
            with refuses(LedgerMissing):
                await store.info(ledger_id + 1_000_000)
            await world.settle()

    @item
    async def test_10_a_reader_behind_a_writer(self, world: LedgerWorld) -> None:
        """Never an entry that is not durable, never out of order, and all in the end."""
        store = await world.connect()
        reader = await world.connect()
        writer = await store.create()
        appends: list[asyncio.Future[Position]] = []

        async def write() -> None:
            for n in range(FOLLOWED):
                appends.append(writer.append(b"%d" % n))
                # Uneven steps, and entries that move to their file under the reader's eyes.
                if n % 7 == 0:
                    await asyncio.sleep(0)
                if n % 100 == 50:
                    await world.settle()
            await acknowledged(*appends)

        writing = asyncio.ensure_future(write())
        seen = 0
        while seen < FOLLOWED:
            found = await reader.read(writer.ledger_id, seen, seen + 30)
            check_run(found, writer.ledger_id, seen)
            for entry in found:
                assert entry.payload == b"%d" % entry.position.entry_id
            seen += len(found)
            # What is read and then lost in a crash would have been
            # delivered, and never have existed.
            assert seen <= writer.last_durable + 1, "read before it was durable"
            # A writer that failed would leave the loop waiting for entries that never come.
            if writing.done():
                writing.result()
            if not found:
                await asyncio.sleep(POLL_S)
        await writing
        assert await reader.read(writer.ledger_id, FOLLOWED, FOLLOWED) == []

    @item
    async def test_11_info(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        info = await store.info(writer.ledger_id)
        assert (info.ledger_id, info.state) == (writer.ledger_id, LedgerState.OPEN)
        assert (info.last_entry, info.size_bytes) == (NO_ENTRY, 0)
        for n in range(1, 4):
            await writer.append(b"1234567")
            info = await store.info(writer.ledger_id)
            assert (info.last_entry, info.size_bytes) == (n - 1, 7 * n)
            if n == 2:
                await world.settle()
        assert info.state is LedgerState.OPEN
        closed = await writer.close()
        assert (closed.state, closed.last_entry, closed.size_bytes) == (LedgerState.CLOSED, 2, 21)
        await world.settle()
        assert await store.info(writer.ledger_id) == closed
