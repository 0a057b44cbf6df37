"""Cursors: durable, rate-limited, atomic without multi-key atomicity, fenced with their owner."""

from __future__ import annotations

import asyncio
import time

import pytest
from pyroaring import BitMap

from magnetar.errors import (
    CorruptMetadata,
    CursorMissing,
    ManagedLedgerFenced,
    NotAllowed,
    StorageClosed,
    Unavailable,
)
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.acked import CHUNK_ENTRIES, AckedSet, ChunkKey, StoredChunk
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan, Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.managed_ledger.names import chunks_directory, cursor_key
from magnetar.metadata.memory import MemoryStore
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import CURSOR_FLUSHES
from tests.unit.managed_ledger.world import (
    Broker,
    MemoryWorld,
    MemoryWorldFactory,
    World,
    WorldFactory,
)
from tests.unit.runtime.counting import counted

FLUSH_S = Limits().cursor_flush_seconds


async def filled(world: World, count: int, broker: Broker | None = None) -> ManagedLedger:
    ledger = await world.open(broker)
    await asyncio.gather(*[ledger.append(b"%d" % number) for number in range(count)])
    return ledger


async def crash_and_reopen(world: World, broker: Broker) -> ManagedLedger:
    world.kill(broker)
    return await world.open()


async def main_version(world: World, cursor: str) -> int:
    found = await world.broker().metadata.get(cursor_key("t", cursor))
    assert found is not None
    return found.version


def test_acks_count_at_once_and_are_durable_after_the_flush_interval(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await filled(world, 10, broker)
        entries = await ledger.read(EARLIEST, 10)
        cursor = await ledger.create_cursor("s", EARLIEST, {"kind": "queue"})
        assert cursor.backlog() == 10
        assert cursor.ack(entries[3].position)
        assert cursor.ack(entries[5].position, unacked=0b101)
        assert cursor.ack_cumulative(entries[1].position)
        assert cursor.backlog() == 7
        assert cursor.dirty
        before = counted(CURSOR_FLUSHES)
        await world.clock.sleep(FLUSH_S * 1.5)
        assert not cursor.dirty
        assert counted(CURSOR_FLUSHES) == before + 1
        cursor.ack(entries[9].position)
        again = (await crash_and_reopen(world, broker)).cursor("s")
        assert again.mark_delete == entries[1].position
        assert again.is_acked(entries[3].position)
        assert again.unacked_indexes(entries[5].position) == 0b101
        assert not again.is_acked(entries[9].position)
        assert again.incarnation == cursor.incarnation
        assert again.properties == {"kind": "queue"}
        again.check_invariants()

    memory_world_factory.run(main())


def test_flush_returns_when_a_later_snapshot_is_durable(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await filled(world, 10, broker)
        positions = [entry.position for entry in await ledger.read(EARLIEST, 10)]
        cursor = await ledger.create_cursor("s", EARLIEST)
        cursor.ack(positions[2])
        first = asyncio.ensure_future(cursor.flush())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cursor.ack(positions[4])
        assert not first.done()
        await asyncio.gather(first, cursor.flush(), cursor.flush())
        assert not cursor.dirty
        again = (await crash_and_reopen(world, broker)).cursor("s")
        assert again.is_acked(positions[2])
        assert again.is_acked(positions[4])

    memory_world_factory.run(main())


def test_many_acks_are_one_write(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await filled(world, 100)
        cursor = await ledger.create_cursor("s", EARLIEST)
        store = world.broker().metadata
        key = cursor_key("t", "s")
        for entry in await ledger.read(EARLIEST, 100):
            cursor.ack(entry.position)
        await world.clock.sleep(FLUSH_S * 1.5)
        found = await store.get(key)
        assert found is not None
        assert found.stat.mods == 1
        await cursor.flush()
        assert await main_version(world, "s") == found.version

    memory_world_factory.run(main())


def test_reading_skips_what_is_acknowledged_and_rewinds(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await filled(world, 10)
        whole = await ledger.read(EARLIEST, 10)
        cursor = await ledger.create_cursor("s", whole[1].position)
        for number in (3, 4, 7):
            cursor.ack(whole[number].position)
        wanted = [whole[number] for number in (2, 5, 6, 8, 9)]
        assert await read_to_end(cursor, 2) == wanted
        assert await cursor.read(5) == []
        cursor.rewind()
        assert await cursor.read(100) == wanted
        new = await ledger.append(b"new")
        assert [entry.position for entry in await cursor.read(5)] == [new]

    world_factory.run(main())


async def read_to_end(cursor: Cursor, step: int) -> list[Entry]:
    found: list[Entry] = []
    while part := await cursor.read(step):
        found += part
    return found


def test_a_read_that_is_overtaken_by_a_reset_begins_again(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await filled(world, 6)
        whole = await ledger.read(EARLIEST, 10)
        cursor = await ledger.create_cursor("s", EARLIEST)
        reading = asyncio.ensure_future(cursor.read(2))
        await asyncio.sleep(0)
        await cursor.reset(whole[3].position)
        assert await reading == whole[4:6]

    memory_world_factory.run(main())


def test_reset_begins_a_durable_new_incarnation(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        broker = world.broker()
        ledger = await filled(world, 10, broker)
        whole = await ledger.read(EARLIEST, 10)
        cursor = await ledger.create_cursor("s", EARLIEST)
        cursor.ack(whole[7].position)
        cursor.ack_cumulative(whole[4].position)
        before = cursor.incarnation
        await cursor.reset(whole[1].position)
        assert cursor.incarnation != before
        assert cursor.backlog() == 8
        again = (await crash_and_reopen(world, broker)).cursor("s")
        assert (again.mark_delete, again.backlog()) == (whole[1].position, 8)
        assert again.incarnation == cursor.incarnation
        await again.reset(Position(10**6, 0))
        assert again.backlog() == 0

    world_factory.run(main())


def test_creating_deleting_and_missing_ones(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        broker = world.broker()
        ledger = await filled(world, 3, broker)
        first = await ledger.create_cursor("s", ledger.last_position())
        assert first.backlog() == 0
        with pytest.raises(NotAllowed):
            await ledger.create_cursor("s", EARLIEST)
        with pytest.raises(CursorMissing):
            ledger.cursor("other")
        await ledger.delete_cursor("s")
        with pytest.raises(StorageClosed):
            first.ack_cumulative(Position(1, 0))
        second = await ledger.create_cursor("s", EARLIEST)
        assert second.incarnation != first.incarnation
        assert second.backlog() == 3
        await ledger.delete_cursor("s")
        assert (await crash_and_reopen(world, broker)).cursor_names() == []
        assert await world.broker().metadata.scan_keys("/cursors/t") == []

    world_factory.run(main())


def test_a_reader_is_never_stored(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await filled(world, 3)
        reader = ledger.open_reader("r", EARLIEST)
        assert len(await reader.read(10)) == 3
        reader.ack_cumulative(ledger.last_position())
        assert (reader.durable, reader.dirty, reader.backlog()) == (False, False, 0)
        await reader.flush()
        await reader.reset(EARLIEST)
        assert reader.backlog() == 3
        assert ledger.cursor_names() == []
        assert await world.broker().metadata.scan_keys("/cursors/t") == []

    world_factory.run(main())


def test_a_former_owners_cursor_is_refused_and_changes_nothing(
    world_factory: WorldFactory,
) -> None:
    async def main() -> None:
        world = world_factory()
        first = await filled(world, 5)
        positions = [entry.position for entry in await first.read(EARLIEST, 5)]
        cursor = await first.create_cursor("s", EARLIEST)
        cursor.ack(positions[0])
        await cursor.flush()
        second = await world.open()
        cursor.ack(positions[1])
        with pytest.raises(ManagedLedgerFenced):
            await cursor.flush()
        with pytest.raises(ManagedLedgerFenced):
            cursor.ack(positions[2])
        assert second.cursor("s").mark_delete == positions[0]
        second.cursor("s").ack(positions[1])
        await second.cursor("s").flush()

    world_factory.run(main())


def test_properties_are_changed_beside_acknowledgements(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        first = await filled(world, 5)
        positions = [entry.position for entry in await first.read(EARLIEST, 5)]
        cursor = await first.create_cursor("s", EARLIEST, {"a": "1"})
        work = []
        for number, position in enumerate(positions[1:]):
            cursor.ack(position)
            work += [cursor.flush(), cursor.change_properties({"b": str(number)})]
        await asyncio.gather(*work)
        # As long as one write is under way no other one begins: neither loses what the other wrote.
        second = await world.open()
        taken_over = second.cursor("s")
        assert taken_over.properties == {"b": "3"}
        assert [taken_over.is_acked(each) for each in positions] == [False] + [True] * 4
        with pytest.raises(ManagedLedgerFenced):
            await cursor.change_properties({"c": "late"})
        with pytest.raises(ManagedLedgerFenced):
            await cursor.flush()
        assert second.cursor("s").properties == {"b": "3"}
        await second.close()

    world_factory.run(main())


def test_the_background_write_notices_a_later_owner(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        first = await filled(world, 5)
        cursor = await first.create_cursor("s", EARLIEST)
        await world.open()
        seen = first.stopped.version
        cursor.ack_cumulative(first.last_position())
        await first.stopped.past(seen)
        assert isinstance(first.failure, ManagedLedgerFenced)
        with pytest.raises(ManagedLedgerFenced):
            first.append(b"x")
        await first.close()

    memory_world_factory.run(main())


def test_a_failed_write_is_tried_again(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await filled(world, 5, broker)
        cursor = await ledger.create_cursor("s", EARLIEST)
        assert isinstance(broker.metadata, MemoryStore)
        world.metadata.cut(broker.metadata)
        cursor.ack(ledger.last_position())
        with pytest.raises(Unavailable):
            await cursor.flush()
        await world.clock.sleep(FLUSH_S * 3)
        assert cursor.dirty
        world.metadata.heal(broker.metadata)
        await world.clock.sleep(FLUSH_S * 2)
        assert not cursor.dirty
        assert (await crash_and_reopen(world, broker)).cursor("s").backlog() == 4

    memory_world_factory.run(main())


@pytest.mark.parametrize("arrives", [False, True])
def test_a_write_of_unknown_outcome_is_settled(
    memory_world_factory: MemoryWorldFactory, arrives: bool
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await filled(world, 5, broker)
        cursor = await ledger.create_cursor("s", EARLIEST)
        cursor.ack_cumulative(ledger.last_position())
        in_flight = asyncio.Event()

        async def slow() -> None:
            in_flight.set()
            await world.clock.sleep(0.01)

        world.metadata_delay = slow
        flushing = asyncio.ensure_future(cursor.flush())
        await in_flight.wait()
        assert isinstance(broker.metadata, MemoryStore)
        world.metadata.cut(broker.metadata, in_flight_arrives=arrives)
        await world.clock.sleep(0.02)
        world.metadata.heal(broker.metadata)
        if arrives:
            await flushing
        else:
            with pytest.raises(Unavailable):
                await flushing
            await cursor.flush()
        assert not cursor.dirty
        cursor.check_invariants()
        world.metadata_delay = None
        assert (await crash_and_reopen(world, broker)).cursor("s").backlog() == 0

    memory_world_factory.run(main())


# --- large states


def many_holes(ledger_id: int, chunks: int) -> AckedSet:
    """Every second entry acknowledged."""
    acked = AckedSet()
    bits = BitMap(range(1, CHUNK_ENTRIES, 2)).serialize()
    for number in range(chunks):
        key = ChunkKey(ledger_id, number)
        acked.load_chunk(key, StoredChunk(bits, {}))
        acked.give_back_changed({key})
    return acked


def inject(cursor: Cursor, acked: AckedSet) -> None:
    """Give a cursor a state that would take a million acknowledgements to build."""
    state: CursorState = cursor._state
    state.acked = acked
    state.changes += 1


def test_a_million_holes_open_fast_and_one_more_ack_writes_one_chunk(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        ledger = await filled(world, 1, broker)
        cursor = await ledger.create_cursor("s", EARLIEST)
        ledger_id = ledger.ledger_spans[0].ledger_id
        longer = LedgerList([LedgerSpan(ledger_id, 0, 0, 2 * CHUNK_ENTRIES)])
        cursor._ledgers = lambda: longer
        inject(cursor, many_holes(ledger_id, 2))
        await cursor.flush()
        directory = chunks_directory("t", "s")
        before = set(await broker.metadata.scan_keys(directory))
        assert len(before) == 2
        cursor.ack(Position(ledger_id, 4))
        await cursor.flush()
        after = set(await broker.metadata.scan_keys(directory))
        assert len(after & before) == 1
        assert len(after) == 2

        state = CursorState(EARLIEST, 0)
        started = time.process_time()
        state = await cursor._store.load() if cursor._store is not None else state
        assert time.process_time() - started < 1.5  # of the processor; it takes milliseconds
        assert state.acked.count == CHUNK_ENTRIES + 1
        assert state.backlog(longer) == CHUNK_ENTRIES - 1

    memory_world_factory.run(main())


@pytest.mark.slow
def test_records_stay_below_the_limit_and_leftovers_are_swept(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        broker = world.broker()
        limits = Limits(cursor_record_bytes=2000, managed_ledger_ledger_entries=10**6)
        ledger = await world.open(broker, limits=limits)
        count = 40_000
        await asyncio.gather(*[ledger.append(b"x") for _ in range(count)])
        cursor = await ledger.create_cursor("s", EARLIEST)
        ledger_id = ledger.last_position().ledger_id
        for number in range(1, count, 2):
            cursor.ack(Position(ledger_id, number))
        await cursor.flush()
        directory = chunks_directory("t", "s")
        records = [record async for record in broker.metadata.scan(directory)]
        assert len(records) > 2
        assert max(len(record.value) for record in records) <= 2000
        await broker.metadata.put(f"{directory}/1.99-left-over", b"whatever")
        world.kill(broker)
        again = await world.open(limits=limits)
        assert again.cursor("s").backlog() == count // 2
        left = await world.broker().metadata.scan_keys(directory)
        assert left == [record.key for record in records]
        await again.delete_cursor("s")
        assert await world.broker().metadata.scan_keys(directory) == []

    world_factory.run(main())


def test_a_table_of_very_many_chunks_is_split_too(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        limits = Limits(cursor_record_bytes=2000, managed_ledger_ledger_entries=2)
        ledger = await world.open(broker, limits=limits)
        for _ in range(120):
            await asyncio.gather(*[ledger.append(b"x") for _ in range(3)])
            await world.clock.sleep(0.01)
        whole = await ledger.read(EARLIEST, 1000)
        cursor = await ledger.create_cursor("s", EARLIEST)
        for entry in whole[1::3]:
            cursor.ack(entry.position)
        backlog = cursor.backlog()
        await cursor.flush()
        found = await broker.metadata.get(cursor_key("t", "s"))
        assert found is not None
        assert len(found.value) < 2000
        pieces = await broker.metadata.scan_keys(chunks_directory("t", "s"))
        assert len(pieces) > 1
        cursor.ack(whole[2].position)
        await cursor.flush()
        assert not set(pieces) & set(await broker.metadata.scan_keys(chunks_directory("t", "s")))
        again = await crash_and_reopen(world, broker)
        assert again.cursor("s").backlog() == backlog - 1
        again.cursor("s").check_invariants()

    memory_world_factory.run(main())


@pytest.mark.slow
def test_a_crash_at_any_point_of_a_write_leaves_a_whole_state(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    """Kill the broker after each number of travelled messages of one write."""

    async def main() -> None:
        outcomes = set()
        for steps in range(0, 14):
            outcomes.add(await crash_after(memory_world_factory(), steps))
        assert outcomes == {2_000, 1_999}

    memory_world_factory.run(main())


async def crash_after(world: MemoryWorld, steps: int) -> int:
    broker = world.broker()
    limits = Limits(cursor_record_bytes=2048, managed_ledger_ledger_entries=10**6)
    ledger = await world.open(broker, limits=limits)
    await asyncio.gather(*[ledger.append(b"x") for _ in range(4_000)])
    ledger_id = ledger.last_position().ledger_id
    cursor = await ledger.create_cursor("s", EARLIEST)
    acked = AckedSet()
    acked.load_chunk(
        ChunkKey(ledger_id, 0), StoredChunk(BitMap(range(1, 4_000, 2)).serialize(), {})
    )
    acked.give_back_changed({ChunkKey(ledger_id, 0)})
    inject(cursor, acked)
    await cursor.flush()
    assert cursor.ack(Position(ledger_id, 2))
    travelled = 0
    dead = asyncio.Event()

    async def travel() -> None:
        nonlocal travelled
        travelled += 1
        if travelled == steps:
            dead.set()
        await asyncio.sleep(0)

    world.metadata_delay = travel
    flushing = asyncio.ensure_future(cursor.flush())
    waiting = asyncio.ensure_future(dead.wait())
    await asyncio.wait({flushing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    finished = flushing.done()
    world.metadata_delay = None
    world.kill(broker)
    flushing.cancel()
    again = (await world.open(limits=limits)).cursor("s")
    again.check_invariants()
    assert not finished or again.backlog() == 1_999
    named = await world.broker().metadata.scan_keys(chunks_directory("t", "s"))
    assert len({key.rsplit("/", 1)[1].split("-")[0] for key in named}) == 1
    return again.backlog()


def test_a_damaged_cursor_is_refused_and_left_alone(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await filled(world, 3)
        await ledger.create_cursor("s", EARLIEST)
        await ledger.close()
        store = world.broker().metadata
        key = cursor_key("t", "s")
        found = await store.get(key)
        assert found is not None
        damaged = found.value[:-1] + bytes([found.value[-1] ^ 1])
        await store.put(key, damaged)
        with pytest.raises(CorruptMetadata):
            await world.open()
        left = await store.get(key)
        assert left is not None
        assert left.value == damaged

    world_factory.run(main())


def test_closing_writes_what_is_not_durable_yet(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await filled(world, 3)
        cursor = await ledger.create_cursor("s", EARLIEST)
        cursor.ack_cumulative(ledger.last_position())
        await ledger.close()
        with pytest.raises(StorageClosed):
            await cursor.read(1)
        assert (await world.open()).cursor("s").backlog() == 0

    world_factory.run(main())


def test_a_trim_by_acks_that_a_crash_took_leaves_no_trace(world_factory: WorldFactory) -> None:
    """The stored state is older than what the trim went by."""

    async def main() -> None:
        world = world_factory()
        await (await filled(world, 5)).close()
        broker = world.broker()
        ledger = await filled(world, 3, broker)
        whole = await ledger.read(EARLIEST, 10)
        cursor = await ledger.create_cursor("s", EARLIEST)
        cursor.ack(whole[2].position)
        cursor.ack(whole[3].position, unacked=0b1)
        await cursor.flush()
        cursor.ack_cumulative(whole[4].position)
        assert len(await ledger.trim(Retention(0, 0))) == 1
        again = (await crash_and_reopen(world, broker)).cursor("s")
        again.check_invariants()
        assert again.backlog() == 3
        assert await again.read(10) == whole[5:]

    world_factory.run(main())


def test_a_readers_backlog_forgets_what_was_trimmed(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        await (await filled(world, 5)).close()
        ledger = await filled(world, 3)
        whole = await ledger.read(EARLIEST, 10)
        reader = ledger.open_reader("r", EARLIEST)
        reader.ack(whole[2].position)
        reader.ack(whole[6].position)
        assert reader.backlog() == 6
        assert len(await ledger.trim(Retention(0, 0))) == 1
        assert reader.backlog() == 2
        reader.check_invariants()

    world_factory.run(main())
