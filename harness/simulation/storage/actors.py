"""Users of a simulated storage: each does random things to it and tells the history.

Owns: `World`, what one run shares, and the actors, coroutines that run until the world is ending.
An actor never waits for a crash and never judges: it calls, and tells the history what was asked,
what was answered and what was read. Adding an actor means writing one coroutine and naming it in
`ACTORS`; the actor of managed ledgers, which needs more room, is in `managed_actors`.

Invariants:
1. Everything random comes from the actor's own `Random`, made from the seed and its name.
2. After the disk has stopped, nothing is told to the history any more.
3. A change that was refused with "not applied" is told as failed; any other error leaves it open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from harness.simulation.storage.history import Change, Findings, LedgerHistory, MetadataHistory
from harness.simulation.storage.managed_history import ManagedHistory
from magnetar.errors import (
    BadVersion,
    CorruptData,
    CorruptMetadata,
    DiskFailed,
    DiskFull,
    InvariantBroken,
    LedgerMissing,
    MagnetarError,
    StorageFenced,
    StoreClosed,
    TooManyRequests,
    Unavailable,
)
from magnetar.ledger.api import LedgerState, LedgerWriter
from magnetar.metadata.api import ABSENT, EventKind, Index, MetadataStore, Stat
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.server.embedded import Storage
from magnetar.testing.virtual.disk import SimulatedDisk

SHARED_FOLDERS: Final = ("/a", "/a/b")
SEQUENCE_FOLDER: Final = "/numbers"
RANGE_FOLDER: Final = "/ranges"
LEASE_FOLDER: Final = "/leases"
FOLDERS: Final = (*SHARED_FOLDERS, SEQUENCE_FOLDER, RANGE_FOLDER)
INDEXES: Final = ("by-rest", "by-third")

_KEYS: Final = 12
_LEDGERS_OPEN: Final = 4
_NOT_APPLIED: Final = (BadVersion, Unavailable, TooManyRequests, StoreClosed)
BUGS: Final = (InvariantBroken, CorruptData, CorruptMetadata)
"""Errors that no fault of a disk explains."""


@dataclass(slots=True)
class World:
    """One life of a storage within a run: from a start to a crash or a close."""

    name: str
    disk: SimulatedDisk
    findings: Findings
    ledgers: LedgerHistory
    metadata: MetadataHistory
    managed: ManagedHistory
    storage: Storage
    clock: Clock
    ending: bool = False
    in_flight: int = 0
    values: int = 0
    writers: dict[int, LedgerWriter] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the actors should end."""
        return self.ending or self.disk.is_stopped or self.storage.failure is not None

    def note(self, text: str) -> None:
        if not self.disk.is_stopped:
            moment = asyncio.get_running_loop().time()
            self.findings.note(f"{self.name} {moment:.6f} {text}")

    def failed(self, what: str, error: MagnetarError) -> None:
        """An operation was answered with an error: fine, unless it tells of a bug."""
        self.note(f"{what}: {error.name}")
        plan = self.disk.plan
        bug = (
            isinstance(error, BUGS)
            or (isinstance(error, DiskFailed | StorageFenced) and not plan.io_errors)
            or (isinstance(error, DiskFull) and plan.faults == plan.io_errors)
        )
        if bug and not self.disk.is_stopped:
            self.findings.broken(f"{what}: {type(error).__name__}: {error}")

    def new_value(self, random: Random) -> bytes:
        """A value that was never used before; its number says how it is indexed."""
        number = self.findings.submissions
        self.values += 1
        return b"%d.%d.%s " % (number, self.values, self.name.encode()) + random.randbytes(
            random.choice((0, 20, 300))
        )

    def follow(
        self,
        what: str,
        answer: Awaitable[Any],
        done: Callable[[Any], None],
        failed: Callable[[MagnetarError], None],
    ) -> None:
        """Tell the history of an answer as soon as it is there."""
        self.in_flight += 1

        def told(future: asyncio.Future[Any]) -> None:
            self.in_flight -= 1
            if self.disk.is_stopped or future.cancelled():
                return
            error = future.exception()
            if error is None:
                self.note(f"{what}: ok")
                done(future.result())
            elif isinstance(error, MagnetarError):
                self.failed(what, error)
                failed(error)
            else:
                self.findings.broken(f"{what}: {error!r}")

        asyncio.ensure_future(answer).add_done_callback(told)


@dataclass(slots=True)
class View:
    """What an actor that watches a folder, then scans it, believes to be in it."""

    folder: str
    versions: dict[str, int] = field(default_factory=dict)
    is_whole: bool = False


def indexes_of(value: bytes) -> list[Index]:
    """The index entries that a value is always put with."""
    number = int(value.partition(b".")[0])
    found = [Index("by-rest", str(number % 5))] if number % 7 else []
    if number % 3 == 0:
        found.append(Index("by-third", f"{number:06d}"))
        found.append(Index("by-third", f"{number % 10:06d}"))
    return found


# --- ledgers


async def ledger_writer(world: World, random: Random) -> None:
    """Creates ledgers, appends to them (many at once), ends and deletes them."""
    while not world.over:
        await asyncio.sleep(random.expovariate(20))
        kind = random.random()
        open_ones = sorted(world.writers)
        if not open_ones or (kind < 0.1 and len(open_ones) < _LEDGERS_OPEN):
            await _create_ledger(world)
        elif kind < 0.8:
            _append_entries(world, random, random.choice(open_ones))
        elif kind < 0.95:
            _end_ledger(world, random, random.choice(open_ones))
        else:
            _delete_ledger(world, random.choice(_unmanaged(world)))


def _unmanaged(world: World) -> list[int]:
    return sorted(world.ledgers.stories.keys() - world.managed.ledger_ids)


async def _create_ledger(world: World) -> None:
    world.ledgers.create_asked()
    try:
        writer = await world.storage.ledgers.create()
    except MagnetarError as error:
        if world.disk.is_stopped:
            return
        world.failed("create", error)
        if isinstance(error, DiskFull | TooManyRequests):
            world.ledgers.create_refused()
        return
    if not world.disk.is_stopped:
        world.note(f"create: ledger {writer.ledger_id}")
        world.ledgers.created(writer.ledger_id)
        world.writers[writer.ledger_id] = writer


def _append_entries(world: World, random: Random, ledger_id: int) -> None:
    writer = world.writers[ledger_id]
    for _ in range(random.choice((1, 1, 5, 40))):
        payload = world.new_value(random) + random.randbytes(random.choice((0, 700, 3000)))
        try:
            future = writer.append(payload)
        except MagnetarError as error:
            world.failed(f"append to {ledger_id}", error)
            if not isinstance(error, TooManyRequests):
                world.writers.pop(ledger_id, None)
            return
        follow_append(world, ledger_id, world.ledgers.submitted(ledger_id, payload), future)


def follow_append(
    world: World,
    ledger_id: int,
    entry_id: int,
    future: asyncio.Future[Position],
    number: int = 0,
) -> None:
    """Tell the history what becomes of an append to a ledger, the `number`th of its run."""

    def done(position: Position) -> None:
        world.ledgers.acknowledged(ledger_id, entry_id, position.entry_id + number)

    def failed(error: MagnetarError) -> None:
        if isinstance(error, DiskFull):
            world.ledgers.refused(ledger_id, entry_id)

    world.follow(f"append {ledger_id}:{entry_id}", future, done, failed)


def _end_ledger(world: World, random: Random, ledger_id: int) -> None:
    store = world.storage.ledgers
    closing = random.random() < 0.5
    asked = LedgerState.CLOSED if closing else LedgerState.FENCED
    answer = store.close_ledger(ledger_id) if closing else store.fence(ledger_id)
    world.writers.pop(ledger_id)
    world.findings.operations += 1

    def failed(error: MagnetarError) -> None:
        if isinstance(error, LedgerMissing):
            world.ledgers.missing(ledger_id)

    world.follow(
        f"{asked.value} {ledger_id}", answer, lambda i: world.ledgers.ended(i, asked), failed
    )


def _delete_ledger(world: World, ledger_id: int) -> None:
    world.writers.pop(ledger_id, None)
    world.ledgers.stories[ledger_id].delete_asked = True
    world.findings.operations += 1
    answer = world.storage.ledgers.delete(ledger_id)
    world.follow(
        f"delete {ledger_id}",
        answer,
        lambda _: world.ledgers.deleted(ledger_id),
        lambda _: None,
    )


async def ledger_reader(world: World, random: Random) -> None:
    """Reads parts of ledgers, old and new."""
    while not world.over:
        await asyncio.sleep(random.expovariate(15))
        if not world.ledgers.stories:
            continue
        story = world.ledgers.stories[random.choice(sorted(world.ledgers.stories))]
        first = random.randrange(len(story.appends) + 2)
        last = first + random.choice((0, 3, 100))
        gone, durable = story.gone, story.durable
        world.findings.operations += 1
        try:
            entries = await world.storage.ledgers.read(
                story.ledger_id, first, last, bytes_max=random.choice((1, 2000, 1 << 20))
            )
        except LedgerMissing:
            if not world.disk.is_stopped:
                world.ledgers.missing(story.ledger_id)
            continue
        except MagnetarError as error:
            world.failed(f"read {story.ledger_id}:{first}", error)
            continue
        if world.disk.is_stopped:
            return
        world.note(f"read {story.ledger_id}:{first}: {len(entries)} entries")
        if gone:
            world.findings.broken(f"ledger {story.ledger_id} was deleted and can be read")
        if first <= durable and not entries:
            world.findings.broken(f"{story.ledger_id}:{first} is durable and was not read")
        world.ledgers.read(story.ledger_id, first, entries)


# --- metadata


async def record_writer(world: World, random: Random) -> None:
    """Puts, compares-and-sets and deletes records in folders that it shares with others."""
    store = world.storage.connect()
    while not world.over:
        await asyncio.sleep(random.expovariate(25))
        key = f"{random.choice(SHARED_FOLDERS)}/k{random.randrange(_KEYS):02d}"
        for _ in range(random.choice((1, 1, 1, 10))):
            kind = random.random()
            if kind < 0.55:
                _put(world, store, key, world.new_value(random), None)
            elif kind < 0.8:
                await _compare_and_set(world, random, store, key)
            else:
                _delete(world, store, key)


def _put(world: World, store: MetadataStore, key: str, value: bytes, expected: int | None) -> None:
    change = world.metadata.submitted(key, value, sure=expected is None)

    def done(stat: Stat) -> None:
        if expected is not None:
            world.metadata.won(key, change, expected)
        world.metadata.acknowledged(key, change, stat)

    try:
        answer = store.put(key, value, expected=expected, indexes=indexes_of(value))
    except MagnetarError as error:
        _refused(world, key, change, error)
        return
    world.follow(f"put {key}", answer, done, lambda error: _failed(world, key, change, error))


def _refused(world: World, key: str, change: Change, error: MagnetarError) -> None:
    """A call raised at once: nothing was submitted, whatever it says."""
    world.failed(f"change of {key}", error)
    world.metadata.failed(key, change)


def _failed(world: World, key: str, change: Change, error: MagnetarError) -> None:
    if isinstance(error, _NOT_APPLIED):
        world.metadata.failed(key, change)


async def _compare_and_set(world: World, random: Random, store: MetadataStore, key: str) -> None:
    stamp = world.metadata.stamp
    try:
        record = await store.get(key)
    except MagnetarError as error:
        world.failed(f"get {key}", error)
        return
    if world.disk.is_stopped:
        return
    world.metadata.read(key, record, stamp)
    expected = ABSENT if record is None else record.version
    if random.random() < 0.3:
        await asyncio.sleep(random.expovariate(100))  # let others win
    if not world.over:
        _put(world, store, key, world.new_value(random), expected)


def _delete(world: World, store: MetadataStore, key: str) -> None:
    change = world.metadata.submitted(key, None, sure=False)

    def done(existed: bool) -> None:
        if existed:
            world.metadata.acknowledged(key, change, None)
        else:
            world.metadata.absent(key, change)

    try:
        answer = store.delete(key)
    except MagnetarError as error:
        _refused(world, key, change, error)
        return
    world.follow(f"delete {key}", answer, done, lambda error: _failed(world, key, change, error))


async def sequence_writer(world: World, random: Random) -> None:
    """Appends to sequences; nobody deletes there."""
    store = world.storage.connect()
    while not world.over:
        await asyncio.sleep(random.expovariate(10))
        prefix = f"{SEQUENCE_FOLDER}/s{random.randrange(3)}"
        for _ in range(random.choice((1, 1, 6))):
            _append_record(world, store, prefix, world.new_value(random))


def _append_record(world: World, store: MetadataStore, prefix: str, value: bytes) -> None:
    change = world.metadata.append_submitted(value)
    known = [key for key in world.metadata.live_keys(SEQUENCE_FOLDER) if key.startswith(prefix)]

    def done(stat: Stat) -> None:
        if known and stat.key <= known[-1]:
            world.findings.broken(f"{stat.key} was given after {known[-1]}")
        world.metadata.acknowledged(stat.key, change, stat)

    try:
        answer = store.append(prefix, value, indexes=indexes_of(value))
    except MagnetarError as error:
        _refused(world, prefix, change, error)
        return
    world.follow(
        f"append to {prefix}", answer, done, lambda error: _failed(world, prefix, change, error)
    )


async def range_writer(world: World, random: Random) -> None:
    """Fills a folder of its own and deletes ranges of it; holds leases meanwhile."""
    store = world.storage.connect()
    while not world.over:
        await asyncio.sleep(random.expovariate(3))
        for _ in range(random.randrange(12)):
            key = f"{RANGE_FOLDER}/k{random.randrange(_KEYS):02d}"
            _put(world, store, key, world.new_value(random), None)
        await asyncio.sleep(random.expovariate(3))
        if not world.over:
            await _delete_range(world, random, store)
            await _take_lease(world, random, store)


async def _delete_range(world: World, random: Random, store: MetadataStore) -> None:
    start = f"k{random.randrange(_KEYS):02d}"
    end = random.choice((None, f"k{random.randrange(_KEYS):02d}"))
    changes = {
        key: world.metadata.submitted(key, None, sure=False)
        for key in sorted(world.metadata.stories)
        if _within(key, start, end)
    }
    try:
        await store.delete_range(RANGE_FOLDER, start, end)
    except MagnetarError as error:
        world.failed(f"delete range {start} {end}", error)
        return
    if not world.disk.is_stopped:
        world.note(f"delete range {start} {end}: ok")
        for key, change in changes.items():
            world.metadata.acknowledged(key, change, None)


def _within(key: str, start: str, end: str | None) -> bool:
    folder, _, name = key.rpartition("/")
    return folder == RANGE_FOLDER and start <= name and (end is None or name < end)


async def _take_lease(world: World, random: Random, store: MetadataStore) -> None:
    key = f"{LEASE_FOLDER}/l{random.randrange(3)}"
    try:
        await store.put(key, b"held", ephemeral=True)
    except MagnetarError as error:
        world.failed(f"lease {key}", error)


async def folder_watcher(world: World, random: Random) -> None:
    """Watches a folder, scans it, and keeps what it knows up to date by events alone."""
    store = world.storage.connect()
    view = View(random.choice(SHARED_FOLDERS))
    world.views.append(view)
    watch = store.watch(parent=view.folder)
    await _scan_view(world, store, view)
    async for event in watch:
        if event.kind is EventKind.RESYNC:
            await _scan_view(world, store, view)
        elif event.kind is EventKind.DELETED:
            view.versions.pop(event.key, None)
        elif event.version is not None:
            view.versions[event.key] = event.version


async def _scan_view(world: World, store: MetadataStore, view: View) -> None:
    view.is_whole = False
    stamp = world.metadata.stamp
    records = []
    try:
        async for record in store.scan(view.folder):
            records.append(record)
            await asyncio.sleep(0)
    except MagnetarError as error:
        world.failed(f"scan {view.folder}", error)
        return
    if not world.disk.is_stopped:
        world.metadata.scanned(view.folder, records, stamp)
        view.versions = {record.key: record.version for record in records}
        view.is_whole = True


async def index_reader(world: World, random: Random) -> None:
    """Scans indexes while others write: every record shown has been put, with that entry."""
    store = world.storage.connect()
    while not world.over:
        await asyncio.sleep(random.expovariate(5))
        index = random.choice(INDEXES)
        stamp = world.metadata.stamp
        world.findings.operations += 1
        try:
            found = [record async for record in store.scan_index(index)]
        except MagnetarError as error:
            world.failed(f"scan index {index}", error)
            continue
        if world.disk.is_stopped:
            return
        world.note(f"scan index {index}: {len(found)} records")
        for record in found:
            world.metadata.read(record.key, record, stamp)
            if index not in {entry.name for entry in indexes_of(record.value)}:
                world.findings.broken(f"{record.key} is shown by index {index}, it is not in it")


# --- the rest


async def settler(world: World, random: Random) -> None:
    """Moves everything home at odd moments."""
    while not world.over:
        await asyncio.sleep(random.expovariate(2))
        try:
            await world.storage.settle()
        except MagnetarError as error:
            world.failed("settle", error)


async def space_taker(world: World, random: Random) -> None:
    """Fills the disk at times, and frees it again."""
    while not world.over:
        await asyncio.sleep(random.expovariate(0.5))
        world.disk.plan.is_full = random.random() < 0.7
        world.note(f"disk full: {world.disk.plan.is_full}")
        await asyncio.sleep(random.expovariate(0.5))
        world.disk.plan.is_full = False


Actor = Callable[[World, Random], Coroutine[Any, Any, None]]

ACTORS: Final[tuple[Actor, ...]] = (
    ledger_writer,
    ledger_writer,
    ledger_reader,
    record_writer,
    record_writer,
    sequence_writer,
    range_writer,
    folder_watcher,
    index_reader,
    settler,
)
