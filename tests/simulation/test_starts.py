"""Crashes around a start, tried one by one: each was once found by a seed, and is kept here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from magnetar.errors import MagnetarError
from magnetar.journal.files import JournalFile
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing import virtual_time
from magnetar.testing.disk import ROOT, SimulatedDisk
from magnetar.testing.disk_model import DiskModel
from magnetar.testing.faults import FaultPlan, Operation
from magnetar.testing.virtual_worker import VirtualWorker

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
        task = asyncio.create_task(life())
        stop = asyncio.create_task(disk.stopped.past(0))
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not disk.is_stopped:
            await task

    virtual_time.run(until_stopped())


async def _nothing(storage: Storage) -> None:
    """Only start."""


async def _put_ten(storage: Storage) -> None:
    store = storage.connect()
    for number in range(10):
        await store.put(f"/a/{number}", b"value")


def _killed_before_a_sync(number: int) -> SimulatedDisk:
    """A process that was killed between the write of a batch and its sync."""
    plan = FaultPlan(crash_at=number, crash_on=Operation.SYNC, crash_pattern="journal/*")
    disk = SimulatedDisk(plan, seed=number)
    try:
        _live(disk, _put_ten)
        assert disk.is_stopped
    finally:
        after = disk.crash(Random(number), power_loss=False)
    return after


def _start_after_kills_and_power_losses() -> None:
    for number in range(2, 16):
        disk = _killed_before_a_sync(number)
        try:
            _live(disk, _nothing)
        finally:
            disk.close()
        for seed in range(6):
            left = SimulatedDisk(model=DiskModel(disk.model.survive(Random(seed))))
            try:
                _live(left, _put_ten)
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
            _live(disk, _put_ten)
        finally:
            disk.close()
    assert number > 20
