"""The room of a simulated disk: the reserve, loans of it, and what publishers are told."""

from __future__ import annotations

import errno
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from magnetar.errors import DiskFailed, DiskFull, ServerDiskFull
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.disk_space import RESERVE_NAME, DiskSpace
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.worker import VirtualWorker

MIB = 1 << 20
# One MiB of floor, one of reserve.
LIMITS = Limits(disk_floor_bytes=MIB)
FOLDER = ROOT / "data"


class Bench:
    """A disk of 40 MiB."""

    def __init__(self, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.disk.capacity = 40 * MIB
        self.disk.make_folder(FOLDER)
        worker = VirtualWorker(Random(1), self.disk.stopped)
        self.space = DiskSpace(FOLDER, self.disk, worker, LoopClock(0), LIMITS)

    @property
    def reserved(self) -> int:
        path = FOLDER / RESERVE_NAME
        if not self.disk.exists(path):
            return 0
        file = self.disk.open(path)
        try:
            return file.size()
        finally:
            file.close()

    @property
    def free(self) -> int:
        return self.disk.space(FOLDER).free

    def leave(self, free: int) -> None:
        """Somebody else takes all but so much."""
        self.disk.others_bytes += self.free - free

    async def open(self) -> Bench:
        await self.space.open()
        await self.space.look(0)
        return self

    async def close(self) -> None:
        await self.space.close()
        self.disk.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


def test_publishes_are_refused_below_the_floor_and_taken_well_above_it() -> None:
    async def main() -> None:
        bench = await Bench().open()
        gate = bench.space.gate
        assert bench.reserved == MIB
        gate.check()
        for free, changes in ((MIB, 0), (MIB - 1, 1), (0, 1), (MIB, 1), (MIB + MIB // 4, 2)):
            bench.leave(free)
            await bench.space.look(0)
            assert gate.changed.version == changes, free
            assert (gate.refusal is not None) == (changes == 1)
            assert bench.reserved == MIB, "nobody needed it"
        await bench.close()

    run(main())


def test_the_refusal_says_what_is_left_and_what_to_do() -> None:
    async def main() -> None:
        bench = await Bench().open()
        bench.leave(MIB // 2)
        await bench.space.look(0)
        with pytest.raises(ServerDiskFull) as caught:
            bench.space.gate.check()
        assert str(caught.value) == (
            "the disk of the server is full: 0.5 of 40.0 MiB are left, publishes need 1.0 MiB "
            "(free some space on it, or delete topics; publishing goes on by itself once there is "
            "room)"
        )
        await bench.close()

    run(main())


def test_a_loan_gives_the_reserve_to_who_needs_it_and_takes_back_the_rest() -> None:
    async def main() -> None:
        bench = await Bench().open()
        bench.leave(0)
        file = bench.disk.open(FOLDER / "home", create=True)
        with pytest.raises(DiskFull):
            file.write(0, [bytes(100_000)])
        async with bench.space.lend(0) as has_lent:
            assert has_lent
            file.write(0, [bytes(100_000)])
        file.close()
        assert bench.space.gate.refusal is not None, "a write found no space: refused at once"
        # Halved until it fits: never more than there is.
        assert MIB // 2 <= bench.reserved <= MIB - 100_000
        # It stays as it is on the full disk, and grows once there is room.
        bench.leave(MIB // 8)
        await bench.space.look(0)
        assert bench.reserved < MIB
        bench.leave(4 * MIB)
        await bench.space.look(0)
        assert bench.reserved == MIB
        assert bench.space.gate.refusal is None
        await bench.close()

    run(main())


def test_nothing_is_lent_of_a_reserve_that_is_not_there() -> None:
    async def main() -> None:
        bench = Bench()
        bench.leave(0)
        await bench.open()
        assert bench.reserved == 0
        async with bench.space.lend(0) as has_lent:
            assert not has_lent
        await bench.close()

    run(main())


def test_a_start_on_a_full_disk_has_the_space_of_the_reserve() -> None:
    async def main() -> None:
        bench = await Bench().open()
        bench.leave(0)
        await bench.space.close()
        again = Bench(bench.disk)
        await again.space.open()
        assert again.free == MIB
        bench.disk.others_bytes += 200_000
        await again.space.look(0)
        assert MIB // 2 <= again.reserved <= MIB - 200_000
        assert again.space.gate.refusal is not None
        await again.close()

    run(main())


def test_a_start_with_room_leaves_the_reserve_alone() -> None:
    async def main() -> None:
        bench = await Bench().open()
        await bench.space.close()
        again = Bench(bench.disk)
        operations = bench.disk.plan.operations
        await again.open()
        assert again.reserved == MIB
        assert bench.disk.plan.operations == operations
        await again.close()

    run(main())


def test_a_disk_that_keeps_no_reserve_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: SimulatedDisk, path: Path, size: int) -> int:
        raise DiskFailed(f"cannot reserve {path}: {errno.errorcode[errno.EIO]}")

    monkeypatch.setattr(SimulatedDisk, "reserve", refuse)

    async def main() -> None:
        bench = await Bench().open()
        for _ in range(3):
            await bench.space.look(0)
        bench.space.gate.check()
        await bench.close()

    run(main())
    assert [each.message for each in caplog.records].count("disk-reserve-failed") == 1


def test_a_disk_that_does_not_say_its_size_has_no_floor() -> None:
    async def main() -> None:
        bench = Bench()
        bench.disk.capacity = None
        await bench.open()
        bench.space.gate.check()
        assert bench.reserved == 0
        await bench.close()

    run(main())
