"""The embedded storage on a simulated disk that is full: what is lent, recycled and freed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from magnetar.errors import DiskFull, Unavailable
from magnetar.ledger.api import LedgerWriter
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.disk_space import DiskSpace
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.worker import VirtualWorker

CAPACITY = 4 << 20
FLOOR = CAPACITY * 5 // 100
LIMITS = Limits(journal_file_bytes=64 * 1024, journal_files_max=3, metadata_apply_records=20)
PAYLOAD = bytes(4000)


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


async def opened(disk: SimulatedDisk) -> Storage:
    disk.capacity = CAPACITY
    return await open_storage(
        ROOT / "data",
        limits=LIMITS,
        disk=disk,
        clock=LoopClock(0),
        new_worker=lambda name: VirtualWorker(Random(name), disk.stopped),
    )


def fill(disk: SimulatedDisk) -> None:
    """Somebody else takes the last byte."""
    disk.others_bytes += disk.space(ROOT).free


async def published(storage: Storage) -> LedgerWriter:
    """A ledger that took entries until the gate closed."""
    writer = await storage.ledgers.create()
    while storage.publish_gate.refusal is None:
        await writer.append(PAYLOAD)
    return writer


async def acknowledged(storage: Storage, rounds: int = 500) -> None:
    """Changes of a few records, far more than the journal holds without being recycled."""
    async with storage.connect() as metadata:
        for number in range(rounds):
            await metadata.put(f"/cursors/{number % 20}", b"%d" % number + bytes(500))


async def assert_all_there(storage: Storage, ledger_id: int, count: int) -> None:
    entry = 0
    while entry < count:
        for each in await storage.ledgers.read(ledger_id, entry, count - 1):
            assert (each.position.entry_id, each.payload) == (entry, PAYLOAD)
            entry += 1


def test_the_gate_closes_before_a_write_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = SimulatedDisk()
        storage = await opened(disk)
        await published(storage)
        assert 0 < disk.space(ROOT).free < 2 * FLOOR
        await storage.close()
        disk.close()

    run(main())
    assert [each.message for each in caplog.records].count("publishes-refused") == 1
    assert "settle-failed" not in caplog.text


@pytest.mark.parametrize("how", ["goes on", "stopped", "killed", "power loss"])
def test_without_a_free_byte_changes_go_on_and_deleting_makes_room(how: str) -> None:
    async def main() -> None:
        disk = SimulatedDisk()
        storage = await opened(disk)
        writer = await published(storage)
        count = writer.last_durable + 1
        fill(disk)
        await acknowledged(storage)
        if how != "goes on":
            if how == "stopped":
                await storage.close()
            fill(disk)
            disk = disk.crash(Random(5), power_loss=how == "power loss")
            storage = await opened(disk)
            assert storage.publish_gate.refusal is not None
            await acknowledged(storage)
        await assert_all_there(storage, writer.ledger_id, count)
        async with storage.connect() as metadata:
            found = await metadata.get("/cursors/19")
            assert found is not None
            assert found.value.startswith(b"499")
        await storage.ledgers.delete(writer.ledger_id)
        await asyncio.sleep(3)
        assert storage.publish_gate.refusal is None
        assert disk.space(ROOT).free > FLOOR
        await storage.close()
        disk.close()

    run(main())


def test_without_the_reserve_changes_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep(self: DiskSpace, size: int) -> None:
        """The reserve is taken, and never given up."""
        self._reserved = max(size, self._reserved)

    monkeypatch.setattr(DiskSpace, "_resize", keep)

    async def main() -> None:
        disk = SimulatedDisk()
        storage = await opened(disk)
        await published(storage)
        fill(disk)
        with pytest.raises((DiskFull, Unavailable)):
            await acknowledged(storage)
        await asyncio.sleep(1)
        disk.others_bytes = 0
        await storage.close()
        disk.close()

    run(main())
