"""The simulated disk does what a disk does, fails when told, and forgets what was not synced."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from random import Random

import pytest

from magnetar.errors import DiskFailed, DiskFull, FolderInUse
from magnetar.runtime.disk import Disk
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.faults import FaultPlan, FaultRule, Operation, SimulatedCrash

PATH = ROOT / "file"
DATABASE = ROOT / "records.db"


@pytest.fixture
def disk() -> Iterator[SimulatedDisk]:
    made = SimulatedDisk()
    yield made
    made.close()


def _fill(disk: Disk, rows: int) -> None:
    database = disk.database(DATABASE)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER)")
    for number in range(rows):
        database.execute("INSERT INTO numbers VALUES (?)", (number,))


def _count(disk: Disk) -> int:
    database = disk.database(DATABASE, read_only=True)
    ((count,),) = database.execute("SELECT count(*) FROM numbers")
    database.close()
    return int(count)


def test_it_is_a_disk(disk: SimulatedDisk) -> None:
    as_disk: Disk = disk
    as_disk.make_folder(ROOT / "a" / "b")
    file = as_disk.open(ROOT / "a" / "b" / "x", create=True)
    file.write(0, [b"he", b"llo"])
    file.truncate(4)
    assert (file.read(1, 100), file.size()) == (b"ell", 4)
    file.close()
    as_disk.rename(ROOT / "a" / "b" / "x", ROOT / "a" / "b" / "y")
    assert as_disk.list(ROOT / "a" / "b") == ["y"]
    as_disk.remove(ROOT / "a" / "b" / "y")
    as_disk.remove(ROOT / "a" / "b" / "y")
    assert as_disk.list(ROOT / "a" / "b") == as_disk.list(ROOT / "absent") == []
    assert disk.open_files == 0


def test_errors_are_translated(disk: SimulatedDisk) -> None:
    with pytest.raises(DiskFailed, match="No such file"):
        disk.open(PATH)
    file = disk.open(PATH, create=True)
    disk.plan.is_full = True
    with pytest.raises(DiskFull):
        file.write(0, [b"x" * 100])
    disk.plan.is_full = False
    file.write(0, [b"x" * 100])
    disk.plan.is_full = True
    file.write(0, [b"y" * 100])  # it has its space
    file.close()


def test_a_rule_fails_one_operation() -> None:
    rule = FaultRule(Operation.SYNC, "fi*", 2, errno.EIO)
    disk = SimulatedDisk(FaultPlan(rules=[rule]))
    file = disk.open(PATH, create=True)
    file.sync()
    with pytest.raises(DiskFailed):
        file.sync()
    file.sync()
    assert disk.plan.faults == 1
    disk.close()


def test_a_failed_sync_loses_what_a_later_one_does_not_bring_back() -> None:
    lost = 0
    for seed in range(30):
        disk = SimulatedDisk(seed=seed)
        file = disk.open(PATH, create=True)
        disk.sync_folder(ROOT)
        disk.plan.rules.append(FaultRule(Operation.SYNC, "file", 1, errno.EIO))
        file.write(0, [b"x"])
        with pytest.raises(DiskFailed):
            file.sync()
        assert file.read(0, 1) == b"x"
        file.sync()
        after = disk.crash(Random(seed), power_loss=True)
        lost += after.model.read("file", 0, 1) != b"x"
        after.close()
    assert 5 < lost < 25


def test_a_crash_comes_in_its_operation_and_ends_everything() -> None:
    disk = SimulatedDisk(FaultPlan(crash_at=2, crash_on=Operation.WRITE, crash_pattern="file"))
    file = disk.open(PATH, create=True)
    file.write(0, [b"1"])
    with pytest.raises(SimulatedCrash):
        file.write(1, [b"2"])
    with pytest.raises(SimulatedCrash):
        file.sync()
    with pytest.raises(SimulatedCrash):
        disk.exists(PATH)
    after = disk.crash(Random(1), power_loss=False)
    assert after.model.read("file", 0, 1) == b"1"
    after.close()


def test_a_lock_goes_with_its_process(disk: SimulatedDisk) -> None:
    disk.lock(ROOT / "LOCK")
    with pytest.raises(FolderInUse):
        disk.lock(ROOT / "LOCK")
    after = disk.crash(Random(1), power_loss=False)
    lock = after.lock(ROOT / "LOCK")
    lock.release()
    after.lock(ROOT / "LOCK").release()
    after.close()


def test_what_a_kill_left_unsynced_a_power_loss_still_takes() -> None:
    kept = 0
    for seed in range(20):
        disk = SimulatedDisk(seed=seed)
        disk.open(PATH, create=True).write(0, [b"x"])
        disk = disk.crash(Random(seed), power_loss=False)
        assert disk.model.read("file", 0, 1) == b"x"
        disk = disk.crash(Random(seed), power_loss=True)
        kept += disk.model.image().get("file") == b"x"
        disk.close()
    assert 0 < kept < 20


def test_the_database_follows_its_disk(disk: SimulatedDisk) -> None:
    _fill(disk, 10)
    assert disk.exists(DATABASE.with_name("records.db-wal"))
    after = disk.crash(Random(1), power_loss=False)
    assert _count(after) == 10
    after.close()


def test_an_unsynced_log_is_lost_and_a_synced_one_is_not() -> None:
    counts = set()
    for seed in range(20):
        disk = SimulatedDisk(seed=seed)
        _fill(disk, 5)
        log = disk.open(DATABASE.with_name("records.db-wal"))
        log.sync()
        disk.sync_folder(ROOT)
        _fill(disk, 5)
        after = disk.crash(Random(seed), power_loss=True)
        counts.add(_count(after))
        after.close()
    assert min(counts) == 5
    assert len(counts) > 1


def test_a_database_without_space_says_so(disk: SimulatedDisk) -> None:
    _fill(disk, 1)
    disk.plan.is_full = True
    database = disk.database(DATABASE)
    with pytest.raises(DiskFull):
        database.execute("INSERT INTO numbers VALUES (1)")
    assert not database.in_transaction
    disk.plan.is_full = False
    database.execute("INSERT INTO numbers VALUES (1)")
    disk.plan.rules.append(FaultRule(Operation.WRITE, "*-wal", 1, errno.EIO))
    with pytest.raises(DiskFailed):
        database.execute("INSERT INTO numbers VALUES (2)")
    assert _count(disk) == 2


def test_a_crash_inside_sqlite_comes_through(disk: SimulatedDisk) -> None:
    _fill(disk, 1)
    disk.plan = FaultPlan(crash_at=1, crash_on=Operation.WRITE)
    database = disk.database(DATABASE)
    with pytest.raises(SimulatedCrash):
        database.execute("INSERT INTO numbers VALUES (1)")
    with pytest.raises(SimulatedCrash):
        database.execute("SELECT 1")
    after = disk.crash(Random(1), power_loss=False)
    assert _count(after) == 1
    after.close()


def test_a_disk_with_a_capacity_is_full_at_it() -> None:
    disk = SimulatedDisk()
    disk.capacity = 10_000
    file = disk.open(ROOT / "file", create=True)
    file.write(0, [bytes(6000)])
    assert disk.space(ROOT) == (4000, 10_000)
    assert disk.reserve(ROOT / "reserve", 5000) == 0, "it does not fit"
    assert disk.reserve(ROOT / "reserve", 1000) == 1000
    disk.others_bytes = 3000
    with pytest.raises(DiskFull):
        file.write(6000, [bytes(1)])
    file.write(0, [b"written over"])
    assert disk.reserve(ROOT / "reserve", 0) == 0
    assert disk.space(ROOT).free in (999, 1000), "the failed write may have had its byte"
    file.close()
    disk.close()
