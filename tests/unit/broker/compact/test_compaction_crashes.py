"""A power loss or a kill at every single operation of the disk while a topic is compacted.

Whatever was stopped where: the next load has the former view or the new one, a reader knows the
last value of every key, and no ledger is left that nobody names.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final

import pytest

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import TopicRecord
from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.publish.producers import ProducerNames
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.ledger.api import NO_ENTRY
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.faults import SimulatedCrash
from magnetar.testing.virtual.virtual_time import run
from magnetar.testing.virtual.worker import VirtualWorker
from tests.unit.broker.compact_world import Table, compact, folded, read, trim
from tests.unit.broker.world import EPOCH_MS, NAME

LIMITS: Final = Limits(
    journal_file_bytes=64 * 1024, metadata_apply_records=20, managed_ledger_ledger_entries=6
)
OPERATIONS_MIN: Final = 40
"""A run passes at least so many operations of the disk: each of them is a place to crash."""


async def opened(disk: SimulatedDisk) -> tuple[Storage, Topic]:
    storage = await open_storage(
        ROOT / "data",
        limits=LIMITS,
        disk=disk,
        clock=LoopClock(EPOCH_MS),
        new_worker=lambda name: VirtualWorker(Random(name), disk.stopped),
    )
    metadata, clock = storage.connect(), LoopClock(EPOCH_MS)
    parts = TopicParts(
        metadata,
        storage.ledgers,
        Schemas(metadata, clock),
        clock,
        LIMITS,
        ProducerNames(metadata, "standalone"),
    )
    return storage, await Topic.open(NAME, parts, TopicRecord(EPOCH_MS), TopicPolicies())


async def filled(topic: Topic, *, first: bool) -> Table:
    """Compacted once and trimmed, and then more; or not yet, if the next run is the `first`."""
    table = await Table.of(topic)
    for number in range(9):
        await table.put((f"k{number}", b"1"), (f"l{number}", b"1"))
    if not first:
        await compact(topic)
    for number in range(5):
        await table.put((f"k{number}", b"2"), (f"l{number}", b""))
    if not first:
        await trim(topic)
    return table


def unless_crashed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Nobody asks the tasks of a storage that is gone how they ended."""
    if not isinstance(context.get("exception"), SimulatedCrash):
        loop.default_exception_handler(context)


async def crashed_at(number: int, *, power_loss: bool, first: bool) -> bool:
    """One run with a crash at an operation of the disk; False: there were fewer of them."""
    asyncio.get_running_loop().set_exception_handler(unless_crashed)
    disk = SimulatedDisk(seed=number)
    _, topic = await opened(disk)
    table = await filled(topic, first=first)
    former = topic.compacted
    assert (former is None) is first
    end = topic.max_read_position()
    disk.plan.crash_at = number
    stopped = asyncio.create_task(disk.stopped.past(0))

    async def compacted_and_settled() -> None:
        topic.compaction.begin()
        await topic.compaction.ended()
        # What is durable moves to its own files meanwhile: these are places to crash, too.
        await asyncio.sleep(3)

    work = asyncio.create_task(compacted_and_settled())
    await asyncio.wait({stopped, work}, return_when=asyncio.FIRST_COMPLETED)
    happened = disk.is_stopped
    disk = disk.crash(Random(number), power_loss=power_loss)
    storage, topic = await opened(disk)
    before = None if former is None else former.horizon
    after = None if topic.compacted is None else topic.compacted.horizon
    assert after in (before, end)
    assert folded(await read(topic)) == table.values
    await compact(topic)
    assert topic.compacted is not None
    assert topic.compacted.horizon == end
    found = await read(topic)
    assert {row.key: row.value for row in found} == table.values
    await check_no_orphans(storage, topic)
    await topic.close()
    await storage.close()
    disk.close()
    stopped.cancel()
    work.cancel()
    return happened


async def check_no_orphans(storage: Storage, topic: Topic) -> None:
    assert len(topic.compaction.ledgers) == 1
    known = {span.ledger_id for span in topic.ledger.ledger_spans} | set(topic.compaction.ledgers)
    present = {each async for each in storage.ledgers.list()}
    assert known <= present
    # One that was made in the instant before the crash has nothing in it (ARCHITECTURE.md).
    for ledger_id in present - known:
        assert (await storage.ledgers.info(ledger_id)).last_entry == NO_ENTRY


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("part", range(8))
def test_a_crash_at_any_write_leaves_a_whole_view(part: int, first: bool, power_loss: bool) -> None:
    # In parts, so that no single test is long.
    number = part + 1
    while run(crashed_at(number, power_loss=power_loss, first=first)):
        number += 8
    assert number >= OPERATIONS_MIN
