"""The journal at work: group commit, refusals, fencing, recycling and closing. No threads."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import (
    DiskFailed,
    DiskFull,
    InvalidArgument,
    StorageClosed,
    StorageFenced,
    TooManyRequests,
)
from magnetar.journal.format import encode_record
from magnetar.journal.journal import Journal
from magnetar.journal.recovery import Recovered
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.disk import Disk
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual import virtual_time
from tests.unit.journal.support import KIND, STORE, ScriptedDisk, StepWorker, bodies_of, turns

LIMITS = Limits(
    journal_file_bytes=8192,
    journal_files_max=3,
    journal_queue_bytes=20_000,
    journal_batch_bytes=4096,
    journal_room_seconds=30.0,
)
LARGE = bytes(3000)
"""Two batches of these fill a file."""


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


def new_journal(folder: Path, disk: Disk, limits: Limits, writer: StepWorker) -> Journal:
    return Journal(folder, disk, limits, LoopClock(0), writer, StepWorker("fill"))


class Bench:
    """A journal with its disk and its workers."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.folder = folder / "journal"
        self.disk = ScriptedDisk()
        self.writer = StepWorker("journal")
        self.journal = new_journal(self.folder, self.disk, limits, self.writer)
        self.found: Recovered

    async def start(self) -> Bench:
        self.found = await self.journal.open(STORE)
        self.journal.start()
        return self

    def append(self, body: bytes) -> int:
        return self.journal.append(encode_record(KIND, body))

    async def append_durable(self, body: bytes) -> int:
        sequence = self.append(body)
        await self.journal.durable(sequence)
        return sequence

    async def fill(self, batches: int) -> int:
        for _ in range(batches):
            last = await self.append_durable(LARGE)
        return last

    def syncs(self) -> int:
        return self.disk.count("sync", "journal/*")

    async def close(self) -> None:
        await self.journal.close()


async def bodies_in(folder: Path) -> list[bytes]:
    """What a start finds in the folder of a bench."""
    return bodies_of(await opened(folder))


async def opened(folder: Path) -> Recovered:
    journal = new_journal(folder / "journal", ScriptedDisk(), LIMITS, StepWorker())
    found = await journal.open(STORE)
    await journal.close()
    return found


def test_records_gather_while_a_sync_runs(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        await bench.append_durable(b"warm-up")
        before = bench.syncs()
        bench.writer.held = True
        first = bench.append(b"first")
        await turns()
        assert len(bench.writer.waiting) == 1
        last = [bench.append(b"%d" % n) for n in range(100)][-1]
        await turns()
        assert bench.journal.synced < first, "nothing is durable before the sync returned"
        bench.writer.release()
        await bench.journal.durable(last)
        assert bench.syncs() - before == 2, "one batch for the first, one for all the others"
        await bench.close()
        expected = [b"warm-up", b"first", *(b"%d" % n for n in range(100))]
        assert await bodies_in(tmp_path) == expected

    run(main())


def test_batches_keep_to_their_limits(tmp_path: Path) -> None:
    async def main() -> None:
        limits = LIMITS.override({"journal_batch_records": 10})
        bench = await Bench(tmp_path, limits).start()
        bench.writer.held = True
        last = [bench.append(b"%d" % n) for n in range(35)][-1]
        sizes = []
        while bench.journal.synced < last:
            await turns()
            if bench.writer.waiting:
                before = bench.journal.synced
                bench.writer.release(1)
                await turns()
                sizes.append(bench.journal.synced - before)
        assert [size for size in sizes if size] == [10, 10, 10, 5]
        bench.writer.release()
        await bench.close()

    run(main())


def test_a_run_is_in_one_batch(tmp_path: Path) -> None:
    async def main() -> None:
        limits = LIMITS.override({"journal_batch_records": 10})
        bench = await Bench(tmp_path, limits).start()
        bench.writer.held = True
        bench.append(b"first")  # the batch that is being written
        await turns()
        for _ in range(3):
            records = [encode_record(KIND, b"%d" % n) for n in range(7)]
            last = bench.journal.append_run(records, sum(map(len, records))) + 6
            bench.append(b"between")
        sizes = []
        while bench.journal.synced < last + 1:
            before = bench.journal.synced
            bench.writer.release(1)
            await turns()
            sizes.append(bench.journal.synced - before)
        # Ten would fit: 7 + 1 and the beginning of the next run, which is not cut.
        assert [size for size in sizes if size] == [1, 8, 8, 8]
        bench.writer.release()
        await bench.close()
        run_bodies = [b"%d" % n for n in range(7)]
        assert await bodies_in(tmp_path) == [b"first", *[*run_bodies, b"between"] * 3]

    run(main())


def test_a_run_that_no_batch_could_hold_is_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        limits = LIMITS.override({"journal_batch_records": 10})
        bench = await Bench(tmp_path, limits).start()
        record = encode_record(KIND, b"x")
        with pytest.raises(InvalidArgument, match="no batch"):
            bench.journal.append_run([record] * 11, 11 * len(record))
        large = encode_record(KIND, LARGE)
        with pytest.raises(InvalidArgument, match="no batch"):
            bench.journal.append_run([large] * 2, 2 * len(large))
        assert bench.journal.append_run([record] * 10, 10 * len(record)) == 1
        await bench.close()

    run(main())


def test_without_space_a_batch_and_all_behind_it_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        await bench.append_durable(b"kept")
        bench.disk.fail("write", "0000*", DiskFull("no space"))
        bench.writer.held = True
        refused = [bench.append(b"refused")]
        await turns()
        refused += [bench.append(b"%d" % n) for n in range(3)]
        waits = [asyncio.ensure_future(bench.journal.durable(each)) for each in refused]
        await turns()
        bench.writer.release()
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(result) for result in results] == [DiskFull] * 4
        assert (bench.journal.synced, bench.journal.refusals) == (1, 1)
        assert bench.journal.next_sequence == refused[0], "their numbers are given again"
        assert bench.journal.failure is None
        with pytest.raises(DiskFull):
            await bench.append_durable(b"still full")
        bench.disk.heal()
        assert await bench.append_durable(b"after") == refused[0]
        await bench.close()
        assert await bodies_in(tmp_path) == [b"kept", b"after"]

    run(main())


@pytest.mark.parametrize("operation", ["sync", "write"])
def test_a_disk_error_fences_for_good(tmp_path: Path, operation: str) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        await bench.append_durable(b"kept")
        bench.disk.fail(operation, "0000*", DiskFailed("EIO"))
        with pytest.raises(StorageFenced):
            await bench.append_durable(b"unknown")
        bench.disk.heal()
        written = len(bench.disk.done)
        assert isinstance(bench.journal.failure, StorageFenced)
        with pytest.raises(StorageFenced):
            bench.append(b"more")
        bench.journal.release(1)
        await turns()
        assert len(bench.disk.done) == written, "nothing is written after a fence"
        assert bench.journal.synced == 1
        await bench.close()
        assert (await bodies_in(tmp_path))[0] == b"kept"

    run(main())


def test_a_full_queue_refuses_and_forgets(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        bench.writer.held = True
        accepted = [bench.append(LARGE) for _ in range(6)]
        with pytest.raises(TooManyRequests):
            bench.append(LARGE)
        assert bench.append(b"small") == accepted[-1] + 1, "the refused record took no number"
        bench.writer.release()
        await bench.journal.durable(accepted[-1] + 1)
        bench.journal.release(accepted[-1])
        await bench.append_durable(LARGE)
        await bench.close()

    run(main())


def test_a_record_that_fits_no_file_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        with pytest.raises(InvalidArgument):
            bench.append(bytes(8192))
        await bench.append_durable(bytes(8192 - 512 - 512 - 32 - 9))
        await bench.close()
        assert len(await bodies_in(tmp_path)) == 1

    run(main())


def test_with_all_files_in_use_a_batch_waits_for_release(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        first_file = await bench.fill(2)
        await bench.fill(4)
        pressure = bench.journal.pressure.version
        waiting = asyncio.ensure_future(bench.append_durable(LARGE + b"waits"))
        await turns()
        assert not waiting.done()
        assert bench.journal.pressure.version > pressure
        bench.journal.release(first_file - 1)
        await turns()
        assert not waiting.done(), "a file is recycled only when all of it is settled"
        bench.journal.release(first_file)
        await waiting
        assert _files(bench) == ["0000.journal", "0001.journal", "0002.journal"]
        await bench.close()
        assert await bodies_in(tmp_path) == [LARGE] * 4 + [LARGE + b"waits"]

    run(main())


def test_the_wait_for_a_file_has_a_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        await bench.fill(6)
        started = asyncio.get_running_loop().time()
        with pytest.raises(StorageFenced, match="no journal file was free"):
            await bench.append_durable(LARGE + b"waits")
        waited = asyncio.get_running_loop().time() - started
        assert waited == pytest.approx(LIMITS.journal_room_seconds)
        await bench.close()
        assert await bodies_in(tmp_path) == [LARGE] * 6

    run(main())


def test_if_settling_cannot_go_on_a_batch_is_refused_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        last = await bench.fill(6)
        waiting = asyncio.ensure_future(bench.append_durable(LARGE + b"refused"))
        await turns()
        bench.journal.settling_failed(DiskFull("no space for ledgers"))
        with pytest.raises(DiskFull):
            await waiting
        with pytest.raises(DiskFull):
            await bench.append_durable(LARGE)
        assert asyncio.get_running_loop().time() == 0.0
        bench.journal.release(last)
        assert await bench.append_durable(b"after") > last
        await bench.close()
        assert await bodies_in(tmp_path) == [b"after"]

    run(main())


def test_files_are_recycled_and_never_more_than_the_limit(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        for n in range(60):
            sequence = await bench.append_durable(LARGE + b"%d" % n)
            if n % 3 == 2:
                bench.journal.release(sequence)
            assert len(_files(bench)) <= LIMITS.journal_files_max
        assert len(_files(bench)) == LIMITS.journal_files_max
        bench.journal.release(sequence)
        assert not bench.journal.unsettled
        await bench.close()
        assert await bodies_in(tmp_path) == []

    run(main())


def test_numbers_go_on_after_a_clean_end(tmp_path: Path) -> None:
    async def main() -> None:
        last = 0
        for n in range(12):
            bench = await Bench(tmp_path).start()
            assert bodies_of(bench.found) == ([] if n % 2 == 0 else [LARGE, LARGE])
            assert bench.found.next_sequence > last
            last = await bench.fill(2)
            if n % 2:
                bench.journal.release(last)
            await bench.close()
            if n % 2 == 0:
                continue
            assert (await opened(tmp_path)).records == []

    run(main())


@pytest.mark.parametrize("released", [False, True])
def test_a_crash_behind_a_new_header_hides_nothing_later(tmp_path: Path, released: bool) -> None:
    """The header of a begun file is durable and its first batch is not; then life goes on."""

    async def main() -> None:
        bench = await Bench(tmp_path).start()
        last = await bench.fill(2)
        if released:
            bench.journal.release(last)
            last += 1
            await bench.journal.durable(last)
        writes = bench.disk.count("write", "0001*")

        def second_write(operation: str, path: Path) -> DiskFailed | None:
            begun = bench.disk.count("write", "0001*") > writes
            return DiskFailed("power") if begun and operation == "write" else None

        bench.disk.fault = second_write
        with pytest.raises(StorageFenced):
            await bench.append_durable(LARGE)
        await bench.close()

        again = await Bench(tmp_path).start()
        assert again.found.next_sequence == last + 1
        assert await again.append_durable(b"acknowledged") == last + 1
        shutil.copytree(tmp_path, tmp_path / "crash")
        await again.close()
        assert (await bodies_in(tmp_path / "crash"))[-1:] == [b"acknowledged"]

    run(main())


def test_close_commits_what_was_submitted(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        last = [bench.append(b"%d" % n) for n in range(5)][-1]
        await bench.close()
        assert bench.journal.synced == last
        assert isinstance(bench.journal.failure, StorageClosed)
        with pytest.raises(StorageClosed):
            bench.append(b"late")
        await bench.journal.durable(last)
        with pytest.raises(StorageClosed):
            await bench.journal.durable(last + 1)
        assert await bodies_in(tmp_path) == [b"%d" % n for n in range(5)]

    run(main())


def test_nothing_is_taken_before_start(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path)
        await bench.journal.open(STORE)
        with pytest.raises(StorageClosed):
            bench.append(b"early")
        await bench.close()

    run(main())


def test_a_fence_from_outside_stops_everything(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        bench.writer.held = True
        submitted = bench.append(b"submitted")
        bench.journal.fence(StorageFenced("a home could not be synced"))
        with pytest.raises(StorageFenced, match="a home"):
            await bench.journal.durable(submitted)
        bench.journal.fence(StorageFenced("another"))
        with pytest.raises(StorageFenced, match="a home"):
            bench.append(b"late")
        await bench.close()

    run(main())


def _files(bench: Bench) -> list[str]:
    return sorted(path.name for path in bench.folder.iterdir())


def test_a_journal_that_cannot_grow_recycles_what_it_has(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        bench.disk.fail("write", "0001.new", DiskFull("no space"))
        last = await bench.fill(2)
        waiting = asyncio.ensure_future(bench.append_durable(LARGE))
        await turns()
        assert not waiting.done(), "its only file is full, and not at home"
        bench.journal.release(last)
        assert await waiting > last
        assert bench.journal.refusals == 0
        assert len(list(bench.folder.iterdir())) == 1
        await bench.close()

    run(main())


def test_a_file_whose_records_came_home_before_it_was_full_is_recycled(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        bench.disk.fail("write", "0001.new", DiskFull("no space"))
        last = await bench.fill(2)
        bench.journal.release(last)
        await turns()
        waiting = asyncio.ensure_future(bench.append_durable(LARGE))
        await turns()
        bench.journal.release(bench.journal.synced)
        await waiting
        await bench.close()

    run(main())


def test_unsettled_bytes_are_those_that_have_to_be_written_once_more(tmp_path: Path) -> None:
    async def main() -> None:
        bench = await Bench(tmp_path).start()
        assert bench.journal.unsettled_bytes == 0
        last = await bench.append_durable(LARGE)
        written = bench.journal.written_bytes
        assert bench.journal.unsettled_bytes == written > len(LARGE)
        await bench.append_durable(b"later")
        bench.journal.release(last, written)
        assert len(b"later") < bench.journal.unsettled_bytes < len(LARGE)
        await bench.close()

    run(main())
