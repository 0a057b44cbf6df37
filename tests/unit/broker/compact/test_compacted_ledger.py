"""The ledger of a compacted view, on a journal whose batches are smaller than its runs."""

from __future__ import annotations

from random import Random

from magnetar.broker.compact.compacted_ledger import CompactedLedger, CompactedWriter
from magnetar.ledger.api import Entry
from magnetar.model.ids import Position
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import open_storage
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.virtual_time import run
from magnetar.testing.virtual.worker import VirtualWorker
from tests.unit.broker.world import EPOCH_MS

ENTRIES = 75


def test_runs_of_more_records_than_a_batch_of_the_journal_are_divided() -> None:
    async def scenario() -> None:
        disk = SimulatedDisk(seed=1)
        storage = await open_storage(
            ROOT / "data",
            limits=Limits(journal_batch_records=4),
            disk=disk,
            clock=LoopClock(EPOCH_MS),
            new_worker=lambda name: VirtualWorker(Random(name), disk.stopped),
        )
        expected = [Entry(Position(7, 3 * each), b"%d" % each) for each in range(ENTRIES)]
        writer = CompactedWriter(await storage.ledgers.create(), LoopClock(EPOCH_MS))
        for each in expected:
            await writer.add(each)
        assert (await writer.close()).last_entry == ENTRIES - 1
        view = CompactedLedger(storage.ledgers, writer.ledger_id, Position(7, 999))
        assert [each async for page in view.pages() for each in page] == expected
        await storage.close()

    run(scenario())
