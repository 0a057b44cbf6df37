"""The managed ledger: reading, searching, sealing, trimming, deleting, closing."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import (
    CursorMissing,
    DiskFailed,
    InvalidArgument,
    ManagedLedgerSealed,
    StorageClosed,
    Unavailable,
)
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import Position
from tests.unit.managed_ledger.world import (
    MemoryWorldFactory,
    WorldFactory,
    read_all,
    with_ledgers_of,
)

NOTHING_KEPT = Retention(0, 0)


def test_reads_respect_both_limits_over_ledgers(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await with_ledgers_of(world, [3, 3, 2])
        whole = await read_all(ledger)
        assert len(whole) == 8
        for start in range(8):
            position = whole[start].position
            assert await ledger.read(position, 100) == whole[start:]
            assert await ledger.read(position, 4) == whole[start : start + 4]
            assert await ledger.read(position, 100, 30) == whole[start : start + 3]
            assert await ledger.read(position, 100, 1) == whole[start : start + 1]
        assert await ledger.read(Position(10**6, 0), 10) == []
        with pytest.raises(InvalidArgument):
            await ledger.read(EARLIEST, 0)
        assert ledger.next_valid(Position(whole[2].position.ledger_id, 3)) == whole[3].position
        assert ledger.count_between(whole[1].position, whole[6].position) == 5

    world_factory.run(main())


def test_find_by_time_is_the_first_entry_at_or_after(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await with_ledgers_of(world, [3, 1, 4, 2])
        whole = await read_all(ledger)
        for wanted in range(-1, 12):
            found = await ledger.find_by_time(wanted * 10, lambda payload: int(payload) * 10)
            expected = whole[max(wanted, 0)].position if wanted < 10 else None
            assert found == expected
        empty = await world.open(name="empty")
        assert await empty.find_by_time(0, lambda payload: 0) is None

    world_factory.run(main())


def test_seal_is_durable_and_final(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await world.open()
        pending = [ledger.append(b"x") for _ in range(3)]
        end = await ledger.seal()
        assert end == await pending[-1]
        assert await ledger.seal() == end
        with pytest.raises(ManagedLedgerSealed):
            ledger.append(b"y")
        with pytest.raises(ManagedLedgerSealed):
            await ledger.appended.past(ledger.appended.version)
        await ledger.create_cursor("s", EARLIEST)
        await ledger.close()
        again = await world.open()
        assert again.sealed
        assert (await again.seal(), again.last_position()) == (end, end)
        assert again.cursor("s").backlog() == 3
        again.cursor("s").ack_cumulative(end)
        assert len(await again.trim(NOTHING_KEPT)) == 1
        assert await again.seal() == end
        with pytest.raises(ManagedLedgerSealed):
            again.append(b"y")
        assert again.stopped.version == 0
        await again.close()

    world_factory.run(main())


def test_a_seal_that_fails_lets_appends_go_on(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await world.open(broker)
        await ledger.append(b"x")
        world.metadata.cut(broker.metadata)  # type: ignore[arg-type]
        with pytest.raises(Unavailable):
            await ledger.seal()
        with pytest.raises(Unavailable):
            ledger.append(b"y")
        world.metadata.heal(broker.metadata)  # type: ignore[arg-type]
        await world.clock.sleep(1)
        await ledger.append(b"z")
        assert [entry.payload for entry in await read_all(ledger)] == [b"x", b"z"]
        assert (await ledger.seal()) == ledger.last_position()

    memory_world_factory.run(main())


def test_trim_drops_what_all_cursors_acknowledged_and_nothing_at_a_pin(
    world_factory: WorldFactory,
) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await with_ledgers_of(world, [2, 2, 2, 2])
        whole = await read_all(ledger)
        cursor = await ledger.create_cursor("s", EARLIEST)
        reader = ledger.open_reader("r", EARLIEST)
        assert await ledger.trim(NOTHING_KEPT) == []
        cursor.ack_cumulative(whole[5].position)
        assert await ledger.trim(Retention(None, None)) == []
        assert len(await ledger.trim(NOTHING_KEPT, whole[2].position)) == 1
        assert await read_all(ledger) == whole[2:]
        assert ledger.first_position() == whole[2].position
        assert len(await ledger.trim(NOTHING_KEPT)) == 2
        assert await read_all(ledger) == whole[6:]
        assert await reader.read(10) == whole[6:]
        assert [span.entries for span in ledger.ledger_spans] == [2]
        left = [each async for each in world.broker().ledgers.list()]
        assert left == [whole[7].position.ledger_id]
        await ledger.close()
        assert await read_all(await world.open()) == whole[6:]

    world_factory.run(main())


def test_up_to_where_it_was_trimmed_is_known_for_good(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await with_ledgers_of(world, [2, 2, 0, 2])
        whole = await read_all(ledger)
        assert ledger.trimmed_through is None
        assert ledger.last_valid(whole[1].position.next) == whole[1].position
        assert ledger.last_valid(whole[0].position.previous) is None
        await ledger.trim(NOTHING_KEPT, whole[2].position)
        assert ledger.trimmed_through == whole[1].position
        await ledger.close()
        ledger = await world.open()
        assert ledger.trimmed_through == whole[1].position
        await ledger.trim(NOTHING_KEPT)
        assert ledger.entries == 0
        assert ledger.trimmed_through == whole[-1].position

    world_factory.run(main())


def test_trimmed_ledgers_that_could_not_be_deleted_go_later(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await with_ledgers_of(world, [2, 2])
        world.ledgers.fail_next(DiskFailed("sector"), operation="delete")
        with pytest.raises(DiskFailed):
            await ledger.trim(NOTHING_KEPT)
        assert len(await read_all(ledger)) == 2
        assert len([each async for each in world.broker().ledgers.list()]) == 2
        await ledger.close()
        await world.open()
        spans = 2  # one with entries, one new
        assert len([each async for each in world.broker().ledgers.list()]) == spans

    memory_world_factory.run(main())


def test_delete_leaves_nothing_and_the_name_can_be_used_again(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await with_ledgers_of(world, [2, 2])
        await ledger.create_cursor("s", EARLIEST)
        last = ledger.last_position()
        await ledger.delete()
        with pytest.raises(StorageClosed):
            ledger.append(b"x")
        broker = world.broker()
        assert [each async for each in broker.ledgers.list()] == []
        assert await broker.metadata.scan_keys("/managed-ledgers") == []
        assert await broker.metadata.scan_keys("/cursors/t") == []
        again = await world.open(broker)
        assert await read_all(again) == []
        assert await again.append(b"y") > last
        with pytest.raises(CursorMissing):
            again.cursor("s")

    world_factory.run(main())


def test_a_deletion_that_was_interrupted_is_finished_by_the_next_owner(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await with_ledgers_of(world, [2, 2])
        await ledger.create_cursor("s", EARLIEST)
        world.ledgers.fail_next(DiskFailed("sector"), operation="delete")
        with pytest.raises(DiskFailed):
            await ledger.delete()
        again = await world.open()
        assert await read_all(again) == []
        assert again.cursor_names() == []
        assert len([each async for each in world.broker().ledgers.list()]) == 1

    memory_world_factory.run(main())


def test_close_finishes_appends_and_ends_waits(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await world.open()
        future = ledger.append(b"x")
        waiting = asyncio.ensure_future(ledger.appended.past(ledger.appended.version + 5))
        await ledger.close()
        assert future.done()
        with pytest.raises(StorageClosed):
            await waiting
        with pytest.raises(StorageClosed):
            ledger.append(b"y")
        with pytest.raises(StorageClosed):
            await ledger.read(EARLIEST, 1)
        await ledger.close()

    world_factory.run(main())
