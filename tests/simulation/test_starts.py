"""Crashes around a start, tried one by one: each was once found by a seed, and is kept here."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from magnetar.errors import LedgerMissing, MagnetarError
from magnetar.journal.files import JournalFile
from magnetar.ledger.api import LedgerState
from magnetar.ledger.file_format import LedgerHeader
from magnetar.ledger.file_ledger import FileLedger
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from magnetar.server import embedded
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.disk_model import DiskModel
from magnetar.testing.virtual.faults import FaultPlan, FaultRule, Operation
from magnetar.testing.virtual.worker import VirtualWorker

LIMITS = Limits().override({"journal_file_bytes": 32 * 1024, "journal_files_max": 3})


def _live(disk: SimulatedDisk, act: Callable[[Storage], Awaitable[None]]) -> None:
    """Start a storage and use it until the disk stops or `act` is done."""

    async def life() -> None:
        storage = await open_storage(
            ROOT,
            limits=LIMITS,
            disk=disk,
            new_worker=lambda name: VirtualWorker(Random(name), disk.stopped),
        )
        await act(storage)

    async def until_stopped() -> None:
        # What is cleared away after a crash has nothing to say.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = asyncio.create_task(life())
        stop = asyncio.create_task(disk.stopped.past(0))
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not disk.is_stopped:
            await task

    virtual_time.run(until_stopped())


async def _nothing(storage: Storage) -> None:
    """Only start."""


async def _put_some(storage: Storage) -> None:
    store = storage.connect()
    for number in range(20):
        await store.put(f"/a/{number}", b"value")


def _killed_before_a_sync(number: int) -> SimulatedDisk:
    """A process that was killed between the write of a batch and its sync."""
    plan = FaultPlan(crash_at=number, crash_on=Operation.SYNC, crash_pattern="journal/*")
    disk = SimulatedDisk(plan, seed=number)
    try:
        _live(disk, _put_some)
        assert disk.is_stopped
    finally:
        after = disk.crash(Random(number), power_loss=False)
    return after


def _start_after_kills_and_power_losses() -> None:
    """A kill, a start that the power loss cuts at one of its syncs, and a start on what is left."""
    for number in range(1, 12):
        disk = _killed_before_a_sync(6)
        disk.plan = FaultPlan(crash_at=number, crash_on=Operation.SYNC)
        try:
            _live(disk, _nothing)
        finally:
            disk.close()
        for seed in range(8):
            left = SimulatedDisk(model=DiskModel(disk.model.survive(Random(seed))))
            try:
                _live(left, _put_some)
            finally:
                left.close()


def test_what_a_start_rests_on_is_durable_first() -> None:
    """A killed process leaves a batch in memory; the next start must not move it home as it is.

    It would be in its home, synced, and gone from the journal after a power loss.
    """
    _start_after_kills_and_power_losses()


def test_without_that_rule_the_journal_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JournalFile, "secure", lambda *_: None)
    with pytest.raises(MagnetarError, match="ahead"):
        _start_after_kills_and_power_losses()


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_first_start_can_be_cut_anywhere(power_loss: bool) -> None:
    """Also while SQLite makes its database, with a rollback journal that a reader cannot undo."""
    number = 0
    stopped = True
    while stopped:
        number += 1
        disk = SimulatedDisk(FaultPlan(crash_at=number), seed=number)
        try:
            _live(disk, _nothing)
            stopped = disk.is_stopped
        finally:
            disk = disk.crash(Random(number), power_loss=power_loss)
        try:
            _live(disk, _put_some)
        finally:
            disk.close()
    assert number > 20


def _survive_after_a_kill_at(number: int) -> bool:
    """Whether there was a kill: then a start, a power loss, and a look at what was acknowledged."""
    acknowledged: list[Position] = []

    async def append_and_settle(storage: Storage) -> None:
        writer = await storage.ledgers.create()
        for _ in range(5):
            position = await writer.append(b"entry")
            acknowledged.append(position)
        await storage.settle()

    async def look(storage: Storage) -> None:
        if acknowledged:
            found = await storage.ledgers.read(acknowledged[0].ledger_id, 0, 9)
            assert len(found) >= len(acknowledged)

    disk = SimulatedDisk(FaultPlan(crash_at=number, crash_on=Operation.SYNC), seed=number)
    try:
        _live(disk, append_and_settle)
        killed = disk.is_stopped
    finally:
        disk = disk.crash(Random(number), power_loss=False)
    try:
        _live(disk, _nothing)
    finally:
        disk.close()
    for seed in range(6):
        left = SimulatedDisk(model=DiskModel(disk.model.survive(Random(seed))))
        try:
            _live(left, look)
        finally:
            left.close()
    return killed


def test_names_that_a_kill_left_are_durable_before_they_are_used() -> None:
    number = 1
    while _survive_after_a_kill_at(number):
        number += 1
    assert number > 10


def test_without_that_rule_whole_folders_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_secure_names", lambda *_: None)
    with pytest.raises(LedgerMissing):
        test_names_that_a_kill_left_are_durable_before_they_are_used()


def _end_a_ledger_through_a_failed_sync(seed: int) -> None:
    """A start whose sync fails leaves a header that only reads as if it were on disk."""

    async def close_one(storage: Storage) -> None:
        writer = await storage.ledgers.create()
        await writer.append(b"entry")
        await storage.settle()
        await writer.close()

    async def look(storage: Storage) -> None:
        (ledger_id,) = [each async for each in storage.ledgers.list()]
        info = await storage.ledgers.info(ledger_id)
        assert info.state is LedgerState.CLOSED

    disk = SimulatedDisk(seed=seed)
    try:
        _live(disk, close_one)
        disk = disk.crash(Random(seed), power_loss=False)
        rule = FaultRule(Operation.SYNC, "ledgers/*.ledger", 1, errno.EIO)
        disk.plan = FaultPlan(rules=[rule])
        with pytest.raises(MagnetarError):
            _live(disk, _nothing)
        disk = disk.crash(Random(seed), power_loss=False)
        _live(disk, look)
        disk = disk.crash(Random(seed), power_loss=True)
        _live(disk, look)
    finally:
        disk.close()


def test_what_a_failed_sync_left_is_written_again() -> None:
    for seed in range(20):
        _end_a_ledger_through_a_failed_sync(seed)


def test_without_that_rule_an_ended_ledger_is_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = FileLedger.wanted_header

    def trusting(ledger: FileLedger) -> LedgerHeader | None:
        ledger.header_unsure = False
        return wanted(ledger)

    monkeypatch.setattr(FileLedger, "wanted_header", trusting)
    with pytest.raises(AssertionError):
        test_what_a_failed_sync_left_is_written_again()
