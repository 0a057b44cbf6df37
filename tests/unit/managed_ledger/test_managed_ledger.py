"""The managed ledger's write end: appending, rolling over, failing, changing owner."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from magnetar.errors import (
    DiskFailed,
    DiskFull,
    ManagedLedgerFenced,
    StorageFenced,
    TooManyRequests,
    Unavailable,
)
from magnetar.ledger.api import LedgerWriter
from magnetar.ledger.memory import MemoryLedgerStore
from magnetar.managed_ledger.ledger_list import LedgerList
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.managed_ledger.names import managed_ledger_key
from magnetar.managed_ledger.records import decode_managed_ledger, encode
from magnetar.metadata.memory import MemoryStore
from magnetar.runtime.limits import Limits
from tests.unit.managed_ledger.world import (
    Broker,
    Gate,
    MemoryWorldFactory,
    WorldFactory,
    append_all,
    read_all,
    settled,
)

SMALL = Limits(managed_ledger_ledger_entries=3)


class ScatteredLedgers(MemoryLedgerStore):
    """Each ledger has a connection of its own, so a later one can be faster."""

    async def create(self) -> LedgerWriter:
        return await self._server.connect().create()


def test_what_was_appended_reads_back_after_reopening(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await world.open()
        assert ledger.last_position().entry_id == -1
        futures = [ledger.append(b"%d" % n) for n in range(10)]
        positions = await asyncio.gather(*futures)
        assert positions == sorted(positions)
        await ledger.close()
        again = await world.open()
        entries = await read_all(again)
        assert [entry.payload for entry in entries] == [b"%d" % n for n in range(10)]
        assert [entry.position for entry in entries] == positions
        assert (again.first_position(), again.last_position()) == (positions[0], positions[-1])
        later = await again.append(b"x")
        assert later.ledger_id > positions[-1].ledger_id
        await again.close()

    world_factory.run(main())


def test_the_end_is_looked_for_only_when_it_has_moved(
    world_factory: WorldFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    grow = LedgerList.grow

    def counted(ledgers: LedgerList, ledger_id: int, entries: int, size_bytes: int) -> None:
        grown.append(entries)
        grow(ledgers, ledger_id, entries, size_bytes)

    async def main() -> None:
        ledger = await world_factory().open()
        monkeypatch.setattr(LedgerList, "grow", counted)
        for number in range(3):
            grown.clear()
            position = await ledger.append(b"%d" % number)
            for _ in range(5):
                assert ledger.last_position() == position
                assert ledger.entries == number + 1
                assert ledger.size_bytes == number + 1
            assert len(grown) <= 1
        await ledger.close()

    world_factory.run(main())


def test_opening_again_and_again_keeps_no_empty_ledgers(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        for _ in range(5):
            ledger = await world.open()
            await ledger.close()
        ledger = await world.open()
        assert len(ledger.ledger_spans) == 1
        kept = [each async for each in world.broker().ledgers.list()]
        assert kept == [ledger.ledger_spans[0].ledger_id]

    world_factory.run(main())


def test_rollover_by_entries_never_blocks_or_loses(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await world.open(limits=SMALL)
        payloads = [b"%d" % n for n in range(40)]
        positions = []
        for start in range(0, 40, 4):
            batch = [ledger.append(payload) for payload in payloads[start : start + 4]]
            positions += await asyncio.gather(*batch)
            await settled(lambda: ledger.ledger_spans[-1].entries == 0)
        await settled(lambda: all(span.closed for span in ledger.ledger_spans[:-1]))
        assert [span.entries for span in ledger.ledger_spans] == [4] * 10 + [0]
        assert [entry.payload for entry in await read_all(ledger)] == payloads
        assert [entry.position for entry in await read_all(ledger)] == positions
        await ledger.close()
        assert [e.payload for e in await read_all(await world.open())] == payloads

    world_factory.run(main())


def test_rollover_by_size_and_by_age(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        limits = Limits(managed_ledger_ledger_bytes=100, managed_ledger_ledger_seconds=60)
        ledger = await world.open(limits=limits)
        first = await ledger.append(bytes(100))
        await ledger.append(b"still there, and asks for the next ledger")
        await settled(lambda: ledger.ledger_spans[0].closed)
        second = await ledger.append(b"x")
        assert second.ledger_id > first.ledger_id
        await world.clock.sleep(61)
        third = await ledger.append(b"y")
        assert third.ledger_id > second.ledger_id
        await world.clock.sleep(60 * 10)
        assert [span.entries for span in ledger.ledger_spans[:-1]] == [2, 1, 1]

    memory_world_factory.run(main())


def test_an_empty_ledger_does_not_roll_over_by_age(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open(limits=Limits(managed_ledger_ledger_seconds=60))
        before = ledger.ledger_spans
        await world.clock.sleep(3600)
        assert ledger.ledger_spans == before

    memory_world_factory.run(main())


def test_appends_go_on_while_the_next_ledger_cannot_be_made(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open(limits=SMALL)
        world.ledgers.fail_next(DiskFull("no space"), operation="create")
        await append_all(ledger, [b"x"] * 20)
        assert len(ledger.ledger_spans) == 1
        await world.clock.sleep(6)
        assert len(ledger.ledger_spans) == 2
        assert len(await read_all(ledger)) == 20

    memory_world_factory.run(main())


def test_entries_of_the_next_ledger_stay_hidden_until_the_old_one_is_done(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        broker = Broker(world.metadata.connect(), ScatteredLedgers(world.ledgers))
        ledger = await world.open(broker, limits=SMALL)
        gate = Gate()
        world.ledgers.delay = gate
        old = [ledger.append(b"old") for _ in range(4)]
        await settled(lambda: len(ledger.ledger_spans) == 2)
        world.ledgers.delay = None
        positions = [await ledger.append(b"new")]
        assert await read_all(ledger) == []
        assert ledger.entries == 0
        gate.open.set()
        positions = [*await asyncio.gather(*old), *positions]
        assert [entry.position for entry in await read_all(ledger)] == positions
        assert positions[-1].ledger_id > positions[0].ledger_id

    memory_world_factory.run(main())


def test_a_failed_append_ends_its_ledger_and_later_ones_get_a_new_one(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        first = await ledger.append(b"a")
        world.ledgers.fail_next(DiskFailed("sector"))
        failed = [ledger.append(b"b"), ledger.append(b"c")]
        results = await asyncio.gather(*failed, return_exceptions=True)
        assert all(isinstance(result, DiskFailed) for result in results)
        with pytest.raises(Unavailable):
            ledger.append(b"d")
        await world.clock.sleep(0.1)
        second = await ledger.append(b"e")
        assert second.ledger_id > first.ledger_id
        assert [entry.payload for entry in await read_all(ledger)] == [b"a", b"e"]

    memory_world_factory.run(main())


def test_a_full_disk_recovers_by_itself_when_space_is_back(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        world.ledgers.fail_next(DiskFull("no space"))
        for _ in range(50):
            world.ledgers.fail_next(DiskFull("no space"), operation="create")
        with pytest.raises(DiskFull):
            await ledger.append(b"a")
        with pytest.raises(DiskFull):
            ledger.append(b"b")
        await world.clock.sleep(300)
        assert (await ledger.append(b"c")).entry_id == 0
        assert [entry.payload for entry in await read_all(ledger)] == [b"c"]

    memory_world_factory.run(main())


def test_other_failures_have_a_limited_number_of_retries(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        world.ledgers.fail_next(DiskFailed("sector"))
        for _ in range(50):
            world.ledgers.fail_next(DiskFailed("sector"), operation="create")
        seen = ledger.stopped.version
        with pytest.raises(DiskFailed):
            await ledger.append(b"a")
        await ledger.stopped.past(seen)
        assert isinstance(ledger.failure, DiskFailed)
        with pytest.raises(DiskFailed):
            ledger.append(b"b")
        with pytest.raises(DiskFailed):
            await ledger.appended.past(ledger.appended.version)

    memory_world_factory.run(main())


@pytest.mark.parametrize("stored", [False, True])
def test_a_failed_sync_stops_it_and_the_next_owner_finds_what_is_durable(
    memory_world_factory: MemoryWorldFactory, stored: bool
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        await ledger.append(b"a")
        world.ledgers.fail_next(StorageFenced("sync"), stored=stored)
        with pytest.raises(StorageFenced):
            await ledger.append(b"b")
        with pytest.raises(StorageFenced):
            ledger.append(b"c")
        again = await world.open()
        payloads = [entry.payload for entry in await read_all(again)]
        assert payloads == ([b"a", b"b"] if stored else [b"a"])

    memory_world_factory.run(main())


def test_a_second_owner_fences_the_first(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        first = await world.open()
        kept = await first.append(b"a")
        second = await world.open()
        assert second.epoch == first.epoch + 1
        with pytest.raises(ManagedLedgerFenced):
            await _append_until_refused(first)
        new = await second.append(b"c")
        assert new > kept
        assert [entry.payload for entry in await read_all(second)] == [b"a", b"c"]
        with pytest.raises(ManagedLedgerFenced):
            await first.create_cursor("s", EARLIEST)
        await first.close()

    world_factory.run(main())


async def _append_until_refused(ledger: ManagedLedger) -> None:
    """It may notice that its ledger is gone before it learns why."""
    for _ in range(1000):
        try:
            future = ledger.append(b"b")
        except Unavailable:
            await asyncio.sleep(0.001)
        else:
            await asyncio.wait({future})
            assert future.exception() is not None


def test_only_one_of_two_that_open_at_once_wins_in_the_end(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        results = await asyncio.gather(world.open(), world.open(), return_exceptions=True)
        opened = [each for each in results if isinstance(each, ManagedLedger)]
        refused = [each for each in results if isinstance(each, ManagedLedgerFenced)]
        assert len(opened) == 1
        assert len(refused) == 1
        await opened[0].append(b"x")

    memory_world_factory.run(main())


def test_a_ledger_whose_recording_is_in_doubt_is_left_to_the_next_owner(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    """The record arrives, its answer does not, and a later owner takes it over and dies at once."""

    async def main() -> None:
        world = memory_world_factory()
        broker = world.broker()
        first = await world.open(broker, limits=SMALL)
        travelling = asyncio.Event()

        async def slow() -> None:
            travelling.set()
            await world.clock.sleep(0.01)

        world.metadata_delay = slow
        await append_all(first, [b"x"] * 4)
        await travelling.wait()
        assert isinstance(broker.metadata, MemoryStore)
        world.metadata.cut(broker.metadata, in_flight_arrives=True)
        await world.clock.sleep(0.011)
        world.metadata_delay = None
        other = world.broker().metadata
        key = managed_ledger_key("t")
        found = await other.get(key)
        assert found is not None
        record = decode_managed_ledger(key, "t", found.value)
        assert len(record.ledgers) == 2
        await other.put(key, encode(msgspec.structs.replace(record, epoch=record.epoch + 1)))
        world.metadata.heal(broker.metadata)
        await first.stopped.past(0)
        assert isinstance(first.failure, ManagedLedgerFenced)
        assert len(await read_all(await world.open())) == 4

    memory_world_factory.run(main())


def test_the_number_of_pending_appends_is_limited(world_factory: WorldFactory) -> None:
    async def main() -> None:
        world = world_factory()
        ledger = await world.open(limits=Limits(managed_ledger_pending_appends=5))
        futures = [ledger.append(b"x") for _ in range(5)]
        with pytest.raises(TooManyRequests):
            ledger.append(b"y")
        assert ledger.pending == 5
        await asyncio.gather(*futures)
        assert ledger.pending == 0
        await ledger.append(b"z")
        assert len(await read_all(ledger)) == 6

    world_factory.run(main())


def test_readers_are_woken_once_per_batch(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        seen = ledger.appended.version
        futures = [ledger.append(b"x") for _ in range(1000)]
        await ledger.appended.past(seen)
        await asyncio.gather(*futures)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert ledger.appended.version - seen <= 2
        assert len(await read_all(ledger)) == 1000

    memory_world_factory.run(main())


def test_readers_are_woken_even_if_every_appender_went_away(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open()
        gate = Gate()
        world.ledgers.delay = gate
        for _ in range(3):
            ledger.append(b"x").cancel()
        gate.open.set()
        while len(await read_all(ledger)) < 3:
            await ledger.appended.past(ledger.appended.version)
        await ledger.append(b"y")
        assert len(await read_all(ledger)) == 4

    memory_world_factory.run(main())


def test_no_append_lands_below_the_floor(memory_world_factory: MemoryWorldFactory) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open(limits=SMALL)
        for number in range(20):
            floor = ledger.next_append_floor()
            if number == 10:
                world.ledgers.fail_next(DiskFailed("sector"))
                await asyncio.wait({ledger.append(b"lost")})
                await world.clock.sleep(1)
            assert await ledger.append(b"x") >= floor
            assert ledger.next_append_floor() > floor

    memory_world_factory.run(main())


def test_the_floor_does_not_fall_when_an_empty_ledger_is_sealed(
    memory_world_factory: MemoryWorldFactory,
) -> None:
    async def main() -> None:
        world = memory_world_factory()
        ledger = await world.open(limits=SMALL)
        await ledger.append(b"x")
        await ledger.close()
        ledger = await world.open(limits=SMALL)
        floor = ledger.next_append_floor()
        await ledger.seal()
        assert ledger.next_append_floor() == floor

    memory_world_factory.run(main())
