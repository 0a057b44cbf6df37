"""Ledger conformance items 12-20: fencing, closing, deleting and listing."""

from __future__ import annotations

import asyncio

from magnetar.errors import LedgerClosed, LedgerFenced, LedgerMissing, MagnetarError
from magnetar.ledger.api import NO_ENTRY, LedgerState, LedgerWriter
from magnetar.model.ids import Position
from magnetar.testing.kits.ledger_base import (
    LedgerKitBase,
    LedgerWorld,
    ids_of,
    item,
    outcomes,
    read_all,
    refuses,
    written,
)

# Appends that a fence or a close meets half-way.
IN_FLIGHT = 300


class EndItems(LedgerKitBase):
    """Items about the end of a ledger: how it gets one, and who may still do what."""

    @item
    async def test_12_fence_against_appends_in_flight(self, world: LedgerWorld) -> None:
        """Each append is acknowledged and readable, or failed: decided when fence returns."""
        store = await world.connect()
        other = await world.connect()
        # A few turns of the loop more each time, so that the fence meets every stage of an append.
        for turns in range(12):
            writer = await store.create()
            appends = [writer.append(b"%d" % n) for n in range(IN_FLIGHT)]
            fencing = asyncio.ensure_future(other.fence(writer.ledger_id))
            for _ in range(turns):
                await asyncio.sleep(0)
            info = await fencing
            at_fence = await read_all(other, writer.ledger_id)
            with refuses(LedgerFenced):
                await writer.append(b"late")
            done = [not isinstance(each, BaseException) for each in await outcomes(appends)]
            # Acknowledged ones are a prefix: a hole would be an entry that is lost.
            assert done == sorted(done, reverse=True), "an append after a failed one succeeded"
            assert (info.state, info.last_entry) == (LedgerState.FENCED, len(at_fence) - 1)
            # Durable but not acknowledged is allowed; the other way round breaks recovery.
            assert sum(done) <= len(at_fence), "acknowledged after the fence"
            assert await read_all(other, writer.ledger_id) == at_fence
            assert at_fence == [b"%d" % n for n in range(len(at_fence))]
            assert await other.info(writer.ledger_id) == info

    @item
    async def test_13_fence_again(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await written(store, [b"a"])
        info = await store.fence(writer.ledger_id)
        # Whoever recovers may die and begin again, or two may try at once: all get the same end.
        assert await store.fence(writer.ledger_id) == info
        await world.settle()
        assert await store.fence(writer.ledger_id) == info
        closed = await (await written(store, [b"b"])).close()
        assert await store.fence(closed.ledger_id) == closed, "closed stays closed"
        await world.settle()
        assert await store.fence(closed.ledger_id) == closed
        with refuses(LedgerMissing):
            await store.fence(closed.ledger_id + 1_000_000)
        both = await written(store, [b"c"])
        first, second = await asyncio.gather(
            store.fence(both.ledger_id), store.fence(both.ledger_id)
        )
        assert first == second

    @item
    async def test_14_a_fenced_writer_stops(self, world: LedgerWorld) -> None:
        store = await world.connect()
        other = await world.connect()
        writer, bystander = await written(store, [b"a"]), await written(store, [b"b"])
        await other.fence(writer.ledger_id)
        # Not only the first call: the writer must learn it each time.
        for _ in range(2):
            with refuses(LedgerFenced):
                await writer.append(b"late")
            with refuses(LedgerFenced):
                await writer.close()
        # Fencing is about one ledger; the store of its writer lives on.
        assert await bystander.append(b"fine") == Position(bystander.ledger_id, 1)
        assert await read_all(other, writer.ledger_id) == [b"a"]

    @item
    async def test_15_close_waits_for_what_was_submitted(self, world: LedgerWorld) -> None:
        store = await world.connect()
        writer = await store.create()
        appends = [writer.append(b"%d" % n) for n in range(IN_FLIGHT)]
        closing = asyncio.ensure_future(writer.close())
        await asyncio.sleep(0)
        # While it closes it takes nothing new, or it would have no end.
        with refuses(LedgerClosed):
            await writer.append(b"late")
        info = await closing
        assert all(append.done() for append in appends)
        assert [append.result().entry_id for append in appends] == list(range(IN_FLIGHT))
        assert (info.state, info.last_entry) == (LedgerState.CLOSED, IN_FLIGHT - 1)
        assert await writer.close() == info, "closing again is no error"
        await world.settle()
        assert await writer.close() == info
        with refuses(LedgerClosed):
            await writer.append(b"late")
        empty = await (await store.create()).close()
        assert (empty.state, empty.last_entry) == (LedgerState.CLOSED, NO_ENTRY)

    @item
    async def test_16_close_for_a_writer_that_is_gone(self, world: LedgerWorld) -> None:
        store = await world.connect()
        other = await world.connect()
        writer = await written(store, [b"a", b"b"])
        await other.fence(writer.ledger_id)
        info = await other.close_ledger(writer.ledger_id)
        assert (info.state, info.last_entry) == (LedgerState.CLOSED, 1)
        assert await other.close_ledger(writer.ledger_id) == info
        # Without a fence before: closing shuts a living writer out as well.
        open_one = await written(store, [b"c"])
        info = await other.close_ledger(open_one.ledger_id)
        assert info.state is LedgerState.CLOSED
        await _refuses_appends(open_one)
        with refuses(LedgerMissing):
            await other.close_ledger(open_one.ledger_id + 1_000_000)

    @item
    async def test_17_delete(self, world: LedgerWorld) -> None:
        store = await world.connect()
        closed = (await (await written(store, [b"a"])).close()).ledger_id
        settled = (await written(store, [b"b"])).ledger_id
        await world.settle()
        await read_all(store, settled)
        writer = await written(store, [b"c"])
        kept = (await written(store, [b"kept"])).ledger_id
        # One that has its end, one at rest in its file, one that is being written.
        for ledger_id in (closed, settled, writer.ledger_id):
            await store.delete(ledger_id)
            # Again: garbage collection repeats what it is not sure of.
            await store.delete(ledger_id)
            for _ in range(2):
                with refuses(LedgerMissing):
                    await store.info(ledger_id)
                with refuses(LedgerMissing):
                    await store.read(ledger_id, 0, 0)
                with refuses(LedgerMissing):
                    await store.fence(ledger_id)
                await world.settle()
        await _refuses_appends(writer)
        await store.delete(kept + 1_000_000)
        assert await ids_of(store) == [kept]
        assert await read_all(store, kept) == [b"kept"]

    @item
    async def test_18_delete_frees_space(self, world: LedgerWorld) -> None:
        store = await world.connect()
        await world.settle()
        empty = world.disk_bytes()
        size = min(world.entry_bytes_max, 4096)
        writers = [await written(store, [bytes(size)] * 50) for _ in range(4)]
        await world.settle()
        full = world.disk_bytes()
        for writer in writers:
            # Read first, so that caches and open files hold something that has to go.
            await read_all(store, writer.ledger_id)
            await store.delete(writer.ledger_id)
        await world.settle()
        assert await ids_of(store) == []
        if empty is not None and full is not None:
            assert full >= empty + 4 * 50 * size
            assert world.disk_bytes() == empty, "a deleted ledger still takes space"

    @item
    async def test_19_ids_never_come_back(self, world: LedgerWorld) -> None:
        store = await world.connect()
        given: list[int] = []
        for n in range(20):
            writer = await store.create()
            # Growing, not only new: the order of ids is the order of a managed ledger's list.
            assert writer.ledger_id > max(given, default=-1)
            given.append(writer.ledger_id)
            if n % 3:
                await store.delete(writer.ledger_id)
            if n % 5 == 4:
                await world.settle()
        more = await asyncio.gather(*[store.create() for _ in range(20)])
        ids = [writer.ledger_id for writer in more]
        assert len(set(ids)) == 20
        assert min(ids) > max(given)

    @item
    async def test_20_list_is_ascending(self, world: LedgerWorld) -> None:
        store = await world.connect()
        assert await ids_of(store) == []
        ids = []
        for n in range(60):
            ids.append((await store.create()).ledger_id)
            if n == 30:
                await world.settle()
        assert await ids_of(store) == ids
        for ledger_id in ids[::3]:
            await store.delete(ledger_id)
        left = [ledger_id for n, ledger_id in enumerate(ids) if n % 3]
        assert await ids_of(store) == left
        await world.settle()
        assert await ids_of(store) == left


async def _refuses_appends(writer: LedgerWriter) -> None:
    """Whether it says so at once or by the future: nothing is acknowledged."""
    for _ in range(2):
        try:
            position = await writer.append(b"late")
        except (LedgerClosed, LedgerFenced, LedgerMissing):
            continue
        except MagnetarError as error:
            raise AssertionError(f"an append was refused for another reason: {error!r}") from error
        raise AssertionError(f"an append was acknowledged as {position}")
