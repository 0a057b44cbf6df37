"""Runs the embedded storage on virtual time, with faults and crashes, and checks what it promised.

Owns: a run, that is, several lives of one storage (`actors.World`) on one disk. Each life begins
with a start on whatever the one before left, compares all of it with the history, lets the actors
work, and ends with a kill, a power loss or a close. The last lives have no faults.

Invariants:
1. One seed is one run: nothing depends on real time, on addresses or on the order of sets.
2. A life whose disk had no fault never fails, and one that only lacked space goes on by itself.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, Final

from harness.simulation.seeds import EPOCH_MS, LIFE_SECONDS_MAX, Report, alone, draw_plan, where
from harness.simulation.storage.actors import (
    ACTORS,
    BUGS,
    FOLDERS,
    INDEXES,
    LEASE_FOLDER,
    World,
    indexes_of,
    space_taker,
)
from harness.simulation.storage.history import (
    Findings,
    LedgerHistory,
    MetadataHistory,
    check_prefix,
)
from harness.simulation.storage.managed_actors import managed_ledger_user
from harness.simulation.storage.managed_history import ManagedHistory
from magnetar.errors import LedgerMissing, MagnetarError
from magnetar.ledger.api import Entry, LedgerInfo
from magnetar.metadata.api import MetadataStore, Record
from magnetar.runtime.clock import Clock, LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual import virtual_time
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.faults import FaultPlan
from magnetar.testing.virtual.worker import VirtualWorker

_ANSWER_SECONDS: Final = 200.0
_RECOVERY_TRIES: Final = 60


class Run:
    """One seed."""

    def __init__(self, seed: int, *, lines: list[str] | None = None) -> None:
        self.report = Report(seed)
        self.findings = Findings()
        self.findings.lines = lines
        self.ledgers = LedgerHistory(self.findings)
        self.metadata = MetadataHistory(self.findings)
        self.managed = ManagedHistory(self.findings)
        self._random = Random(seed)
        self._limits = _small_limits(self._random)
        self._disk = SimulatedDisk(seed=seed)
        self._since = 0
        """Submissions up to here were compared after a start."""
        self._killed = False
        """The last life ended with a kill in mid-operation: not all that it wrote is durable."""

    def go(self) -> Report:
        report = self.report
        try:
            for _ in range(self._random.randrange(4, 9)):
                self._live(draw_plan(self._random), calm=False)
                if self.findings.violations:
                    break
            else:
                self._live(FaultPlan(), calm=True)
                self._live(FaultPlan(), calm=True)
        finally:
            self._disk.close()
        report.operations = self.findings.operations
        report.digest = self.findings.digest
        report.violations = tuple(self.findings.violations)
        return report

    # --- one life

    def _live(self, plan: FaultPlan, *, calm: bool) -> None:
        report = self.report
        report.lives += 1
        random = Random(self._random.randrange(1 << 32))
        self._disk.plan = plan
        self.findings.note(f"life {report.lives}")
        try:
            virtual_time.run(self._until_stopped(random, calm), until=LIFE_SECONDS_MAX)
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding
            # What still waits when the machine stops can wait for ever.
            if not self._disk.is_stopped:
                self.findings.broken(f"{where(error)}: {type(error).__name__}: {error}")
        report.faults += plan.faults
        crashed = self._disk.is_stopped
        report.crashes += crashed
        power_loss = random.random() < 0.6
        self._killed = crashed and not power_loss
        self.findings.note(f"end: crashed {crashed}, power loss {power_loss}")
        self._disk = self._disk.crash(random, power_loss=power_loss)

    async def _until_stopped(self, random: Random, calm: bool) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        life = asyncio.create_task(self._life(random, calm), name="life")
        stop = asyncio.create_task(self._disk.stopped.past(0), name="stop")
        await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not self._disk.is_stopped:
            await life

    async def _life(self, random: Random, calm: bool) -> None:
        plan = self._disk.plan
        plan.is_paused = random.random() < 0.7
        clock = LoopClock(EPOCH_MS + self.report.lives * 3_600_000)
        try:
            storage = await self._open(random, clock)
        except MagnetarError as error:
            if self._disk.is_stopped:
                return
            self.findings.note(f"start: {error.name}")
            if not plan.faults or isinstance(error, BUGS):
                self.findings.broken(f"start: {type(error).__name__}: {error}")
            return
        world = World(
            f"life {self.report.lives}",
            self._disk,
            self.findings,
            self.ledgers,
            self.metadata,
            self.managed,
            storage,
            clock,
        )
        await self._compare(world, started=True)
        if self._killed and random.random() < 0.3:
            return  # the next end follows at once: nothing may rest on what was not durable
        plan.is_paused = False
        watching = await self._act(world, random, calm)
        if storage.failure is not None:
            world.note(f"failed: {storage.failure.name}")
            if not plan.io_errors:
                self.findings.broken(f"the storage stopped without a fault: {storage.failure}")
            return
        plan.end_faults()
        await self._works(world, random)
        await asyncio.sleep(1.0)  # whoever watches hears of the last change
        await self._compare(world, started=False)
        await self._stopped(watching)
        if calm or random.random() < 0.5:
            await self._close(world)

    async def _open(self, random: Random, clock: Clock) -> Storage:
        seed = random.randrange(1 << 32)
        return await open_storage(
            ROOT,
            limits=self._limits,
            disk=self._disk,
            clock=clock,
            new_worker=lambda name: VirtualWorker(Random(f"{seed} {name}"), self._disk.stopped),
        )

    async def _act(self, world: World, random: Random, calm: bool) -> list[asyncio.Task[None]]:
        """Let the actors work for a while; those that watch go on."""
        actors = [*ACTORS, managed_ledger_user]
        if not calm and random.random() < 0.3:
            actors.append(space_taker)
        tasks = [
            asyncio.create_task(
                actor(world, Random(f"{self.report.seed} {world.name} {number}")),
                name=f"{actor.__name__}-{number}",
            )
            for number, actor in enumerate(actors)
        ]
        await asyncio.sleep(random.uniform(0.5, 6.0))
        world.ending = True
        self._disk.plan.is_full = False
        watching = [task for task in tasks if task.get_name().startswith("folder_watcher")]
        ending = [task for task in tasks if task not in watching]
        await self._answered(world, ending)
        await self._stopped(ending)
        return watching

    async def _stopped(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                self.findings.broken(f"{where(result)}: {type(result).__name__}: {result}")

    async def _answered(self, world: World, ending: list[asyncio.Task[None]]) -> None:
        """Every call gets an answer, and every actor that can end does."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ANSWER_SECONDS
        while world.in_flight or not all(task.done() for task in ending):
            if loop.time() > deadline:
                waiting = [task.get_name() for task in ending if not task.done()]
                self.findings.broken(f"no answer to {world.in_flight} calls; waiting: {waiting}")
                return
            await asyncio.sleep(0.5)

    async def _works(self, world: World, random: Random) -> None:
        """Without faults, the storage takes changes again, within some seconds."""
        error: MagnetarError | None = None
        for _ in range(_RECOVERY_TRIES):
            try:
                await world.storage.settle()
                await _write_both(world, random)
                await world.storage.settle()
            except MagnetarError as refusal:
                error = refusal
                await asyncio.sleep(1.0)
            else:
                return
        self.findings.broken(f"the faults are over, but: {type(error).__name__}: {error}")

    async def _close(self, world: World) -> None:
        await world.storage.close()
        world.note("closed")
        if self._disk.open_files:
            self.findings.broken(f"{self._disk.open_files} files are open after the close")

    # --- comparing

    async def _compare(self, world: World, *, started: bool) -> None:
        """Everything that is there with everything that was told; nobody writes meanwhile."""
        self._disk.plan.is_paused = True
        store = world.storage.connect()
        records: list[Record] = []
        for folder in FOLDERS:
            stamp = self.metadata.stamp
            found = [record async for record in store.scan(folder)]
            self.metadata.scanned(folder, found, stamp)
            records.extend(found)
            for view in world.views:
                if view.is_whole and view.folder == folder:
                    self.metadata.watched(view.versions, found, folder)
        if started and await store.scan_keys(LEASE_FOLDER):
            self.findings.broken("leases of former sessions are still there")
        await self._compare_indexes(store, records)
        await self._compare_ledgers(world)
        if started:
            check_prefix(self.findings, self.ledgers, self.metadata, self._since)
            self._since = self.findings.submissions
            self.metadata.crashed()
            self.ledgers.crashed()
        world.note(f"compared {len(records)} records, {len(self.ledgers.stories)} ledgers")

    async def _compare_indexes(self, store: MetadataStore, records: list[Record]) -> None:
        for index in INDEXES:
            found = [record async for record in store.scan_index(index)]
            matching = [
                record
                for record in records
                if index in {entry.name for entry in indexes_of(record.value)}
            ]
            self.metadata.index_scanned(found, matching, index)

    async def _compare_ledgers(self, world: World) -> None:
        ledgers = world.storage.ledgers
        self.ledgers.listed([ledger_id async for ledger_id in ledgers.list()])
        for ledger_id in sorted(self.ledgers.stories):
            try:
                info = await ledgers.info(ledger_id)
                entries = await _read_all(world, info)
            except LedgerMissing:
                self.ledgers.missing(ledger_id)
            else:
                self.ledgers.found(info, entries)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._disk.is_stopped and isinstance(error, Exception):
            text = f"{context['message']}: {type(error).__name__}: {error}"
            if not isinstance(error, MagnetarError):
                self.findings.broken(text)


async def _read_all(world: World, info: LedgerInfo) -> list[Entry]:
    entries: list[Entry] = []
    while len(entries) <= info.last_entry:
        more = await world.storage.ledgers.read(
            info.ledger_id, len(entries), info.last_entry, bytes_max=20_000
        )
        if not more:
            break
        entries.extend(more)
    return entries


async def _write_both(world: World, random: Random) -> None:
    world.ledgers.create_asked()
    try:
        writer = await world.storage.ledgers.create()
    except MagnetarError:
        world.ledgers.create_refused()
        raise
    world.ledgers.created(writer.ledger_id)
    payload = world.new_value(random)
    future = writer.append(payload)
    entry_id = world.ledgers.submitted(writer.ledger_id, payload)
    world.ledgers.acknowledged(writer.ledger_id, entry_id, (await future).entry_id)
    value = world.new_value(random)
    change = world.metadata.submitted("/a/works", value, sure=True)
    stat = await world.storage.connect().put("/a/works", value, indexes=indexes_of(value))
    world.metadata.acknowledged("/a/works", change, stat)


def _small_limits(random: Random) -> Limits:
    """Limits so small that everything that turns over does so often."""
    return Limits().override(
        {
            "journal_file_bytes": random.choice((32, 64, 128)) * 1024,
            "journal_files_max": random.choice((3, 4)),
            "journal_queue_bytes": random.choice((64, 512)) * 1024,
            "journal_batch_bytes": random.choice((4, 32)) * 1024,
            "journal_batch_records": random.choice((10, 100)),
            "metadata_apply_records": random.choice((5, 50)),
            "metadata_snapshots": 3,
            "watch_queue_events": random.choice((4, 64)),
            "sequence_cache_entries": random.choice((1, 10)),
            "ledger_cache_bytes": random.choice((1000, 50_000)),
            "ledger_open_files": random.choice((4, 16)),
            "storage_settle_seconds": random.choice((0.1, 1.0)),
        }
    )


def simulate(seed: int, *, lines: list[str] | None = None) -> Report:
    """Run one seed. `lines` gets every step."""
    with alone():
        return Run(seed, lines=lines).go()
