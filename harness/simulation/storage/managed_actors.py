"""Users of managed ledgers on a simulated storage: owners that come, work, go and die with it.

Owns: the actor `managed_ledger_user`. It holds two managed ledgers at a time, each through a chain
of owners: one opens, compares all that it finds with the history, appends, reads, acknowledges,
flushes, trims, seals, and is closed, replaced by the next owner at once, or killed with the
storage. As every actor it calls and tells (`managed_history`), and judges nothing.

Invariants: those of `actors`, and
1. Only positions that can be read are acknowledged, so what an acknowledgement covers is certain.
2. One coroutine uses a managed ledger; only appends and flushes run beside it.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from harness.simulation.storage.actors import World
from harness.simulation.storage.managed_history import (
    BATCH,
    WHOLE,
    CursorStory,
    CursorView,
    ManagedAppend,
    ManagedStory,
)
from harness.simulation.storage.recorded_ledgers import RecordedLedgers
from magnetar.errors import DiskFull, MagnetarError, ManagedLedgerFenced
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits

SLOTS: Final = 2
_CURSOR_NAMES: Final = ("s", "t")
_RETENTIONS: Final = (
    Retention(0, 0),
    Retention(0, 0),
    Retention(None, 3000),
    Retention(2.0, None),
    Retention(None, None),
)
_STEPS_PER_SECOND: Final = 60
_REOPEN_CHANCE: Final = 0.008
_READ_BYTES: Final = 20_000


async def managed_ledger_user(world: World, random: Random) -> None:
    """Uses managed ledgers, one owner after the other."""
    async with asyncio.TaskGroup() as group:
        for slot in range(SLOTS):
            own = Random(f"{random.random()} {slot}")
            group.create_task(_use_slot(world, own, slot), name=f"managed-{slot}")


async def _use_slot(world: World, random: Random, slot: int) -> None:
    former: _Owner | None = None
    while not world.over:
        await asyncio.sleep(random.expovariate(10))
        story = world.managed.story(_choose_name(world, random, slot))
        if former is not None and former.story is not story:
            await former.close()
            former = None
        if former is not None:
            former.fenced = True
        owner = await _open(world, random, story)
        if former is not None:
            await former.close()
            former = None
        if owner is None:
            continue
        await owner.work()
        if random.random() < 0.4 and not world.over:
            former = owner
        else:
            await owner.close()
    if former is not None:
        await former.close()


def _choose_name(world: World, random: Random, slot: int) -> str:
    """The newest of its managed ledgers; a next one or an older one if that one is sealed."""
    names = [name for name in world.managed.stories if name.startswith(f"m{slot}.")]
    if not names or (world.managed.stories[names[-1]].sealed and random.random() < 0.5):
        return f"m{slot}.{len(names)}"
    return names[-1] if random.random() < 0.8 else random.choice(names)


async def _open(world: World, random: Random, story: ManagedStory) -> _Owner | None:
    """A new owner that has told all it found; None if it could not be."""
    ledger: ManagedLedger | None = None
    try:
        ledger = await ManagedLedger.open(
            story.name,
            world.storage.connect(),
            RecordedLedgers(world),
            clock=world.clock,
            limits=_small_limits(random),
            rng=random,
        )
        owner = _Owner(world, random, story, ledger)
        await owner.compare()
    except MagnetarError as error:
        if not world.disk.is_stopped:
            world.failed(f"open {story.name}", error)
            _check_not_fenced(world, story.name, error)
        if ledger is not None:
            await _Owner(world, random, story, ledger).close()
        return None
    return owner


def _small_limits(random: Random) -> Limits:
    return Limits().override(
        {
            "managed_ledger_ledger_entries": random.choice((4, 12, 40)),
            "managed_ledger_ledger_bytes": random.choice((2000, 100_000)),
            "managed_ledger_ledger_seconds": random.choice((0.5, 600.0)),
            "managed_ledger_pending_appends": random.choice((5, 100)),
            "cursor_flush_seconds": random.choice((0.1, 1.0, 30.0)),
            "cursor_record_bytes": random.choice((40, 120, 4000)),
        }
    )


def _check_not_fenced(world: World, name: str, error: MagnetarError) -> None:
    if isinstance(error, ManagedLedgerFenced):
        world.findings.broken(f"{name}: its only owner was fenced: {error}")


class _Owner:
    """One owner of a managed ledger, from its opening to its end."""

    def __init__(
        self, world: World, random: Random, story: ManagedStory, ledger: ManagedLedger
    ) -> None:
        self.story = story
        self.fenced = False
        """Another one is being opened, or was."""
        self._world = world
        self._random = random
        self._ledger = ledger
        self._compared = False
        """Until then the history may know of acknowledgements that are lost."""

    # --- the beginning and the end

    async def compare(self) -> None:
        """Tell everything that this owner found."""
        ledger = self._ledger
        entries: list[Entry] = []
        following = EARLIEST
        while more := await ledger.read(following, 1000, _READ_BYTES):
            entries += more
            following = more[-1].position.next
        end = await ledger.seal() if ledger.sealed else None
        if self._world.disk.is_stopped:
            return
        if len(entries) != ledger.entries:
            self._broken(f"{len(entries)} entries were read of {ledger.entries}")
        views: dict[str, CursorView] = {}
        for name in ledger.cursor_names():
            cursor = ledger.cursor(name)
            cursor.check_invariants()
            masks = [_mask(cursor, entry.position) for entry in entries]
            views[name] = CursorView(cursor.mark_delete, masks, cursor.backlog())
        self._note(f"opened: {len(entries)} entries, {len(views)} cursors, end {end}")
        self.story.opened(entries, views, end)
        self._compared = True

    async def close(self) -> None:
        """Whatever was acknowledged is durable after a close that succeeds."""
        asked = [
            (self.story.cursors[name], self.story.cursors[name].asked.copy())
            for name in self._ledger.cursor_names()
            if name in self.story.cursors and self._ledger.cursor(name).failure is None
        ]
        try:
            await self._ledger.close()
        except MagnetarError as error:
            self._failed("close", error)
            return
        if self._compared and not self.fenced and not self._world.disk.is_stopped:
            self._note("closed")
            for cursor, begun_with in asked:
                cursor.flushed(begun_with)

    async def work(self) -> None:
        """Do this and that until the world ends, the managed ledger fails, or for a while."""
        steps = (
            (30, self._append),
            (6, self._read),
            (5, self._create_cursor),
            (10, self._read_cursor),
            (22, self._acknowledge),
            (8, self._flush),
            (6, self._trim),
            (0.15, self._seal),
            (0.3, self._delete_cursor),
        )
        weights = [weight for weight, _ in steps]
        while not self._is_over and self._random.random() > _REOPEN_CHANCE:
            await asyncio.sleep(self._random.expovariate(_STEPS_PER_SECOND))
            if self._is_over:
                return
            _, step = self._random.choices(steps, weights)[0]
            try:
                await step()
            except MagnetarError as error:
                self._failed(step.__name__, error)

    @property
    def _is_over(self) -> bool:
        failed = self._ledger.failure is not None and not self._ledger.sealed
        return self._world.over or failed

    # --- entries

    async def _append(self) -> None:
        if self.story.sealed:
            return
        for _ in range(self._random.choice((1, 1, 4, 15))):
            payload = self._world.new_value(self._random)
            future = self._ledger.append(payload)
            append = self.story.submitted(payload)
            self._follow_append(append, future)
        if self._random.random() < 0.3:
            await asyncio.wait({future}, timeout=5)

    def _follow_append(self, append: ManagedAppend, future: asyncio.Future[Position]) -> None:
        def done(position: Position) -> None:
            self.story.acknowledged(append, position, self._world.clock.now_ms())

        def failed(error: MagnetarError) -> None:
            if isinstance(error, DiskFull):
                self.story.refused(append)

        self._world.follow(f"{self.story.name}: append {append.number}", future, done, failed)

    async def _read(self) -> None:
        start = self._some_position()
        if start is None:
            return
        entries = await self._ledger.read(start, self._random.choice((1, 5, 50)), _READ_BYTES)
        if not self._world.disk.is_stopped:
            self._note(f"read {start}: {len(entries)} entries")
            self.story.read(start, entries)

    def _some_position(self) -> Position | None:
        """One that can be read now."""
        if not self.story.positions:
            return None
        return self._ledger.next_valid(self._random.choice(self.story.positions))

    # --- cursors

    def _some_cursor(self) -> tuple[Cursor, CursorStory] | None:
        names = [name for name in self._ledger.cursor_names() if name in self.story.cursors]
        if not names:
            return None
        name = self._random.choice(names)
        return self._ledger.cursor(name), self.story.cursors[name]

    async def _create_cursor(self) -> None:
        name = self._random.choice(_CURSOR_NAMES)
        if name in self._ledger.cursor_names():
            return
        last = self._ledger.last_position()
        exists = self._ledger.next_valid(last) == last
        start = last if exists and self._random.random() < 0.3 else EARLIEST
        told = self.story.cursor_asked(name, start)
        cursor = await self._ledger.create_cursor(name, start)
        if not self._world.disk.is_stopped:
            self._note(f"cursor {name} created behind {start}")
            self.story.cursor_created(told, cursor.mark_delete)

    async def _delete_cursor(self) -> None:
        chosen = self._some_cursor()
        if chosen is None:
            return
        cursor, told = chosen
        told.sure = False
        await self._ledger.delete_cursor(cursor.name)
        if not self._world.disk.is_stopped:
            self._note(f"cursor {cursor.name} deleted")
            self.story.cursor_deleted(told)

    async def _read_cursor(self) -> None:
        chosen = self._some_cursor()
        if chosen is None:
            return
        cursor, told = chosen
        if self._random.random() < 0.3:
            cursor.rewind()
        start = max(cursor.read_position, cursor.mark_delete.next)
        entries = await cursor.read(self._random.choice((1, 5, 50)), _READ_BYTES)
        if not self._world.disk.is_stopped:
            self._note(f"cursor {cursor.name} read {start}: {len(entries)} entries")
            self.story.cursor_read(told, start, entries)

    async def _acknowledge(self) -> None:
        chosen = self._some_cursor()
        if chosen is None:
            return
        cursor, told = chosen
        for _ in range(self._random.choice((1, 3, 10))):
            position = self._some_position()
            if position is None:
                return
            if self._random.random() < 0.15:
                # Near the mark, so that it moves on little by little.
                position = self._ledger.next_valid(cursor.mark_delete.next) or position
                self._ack_cumulative(cursor, told, position)
            else:
                unacked = self._some_unacked()
                cursor.ack(position, unacked)
                told.asked.add(position, WHOLE & ~unacked)
        self._note(f"cursor {cursor.name} acknowledged up to {cursor.mark_delete}")

    def _ack_cumulative(self, cursor: Cursor, told: CursorStory, position: Position) -> None:
        unacked = self._some_unacked()
        cursor.ack_cumulative(position, unacked)
        told.asked.add_through(position.previous)
        told.asked.add(position, WHOLE & ~unacked)

    def _some_unacked(self) -> int:
        return self._random.randrange(1, 1 << BATCH) if self._random.random() < 0.3 else 0

    async def _flush(self) -> None:
        chosen = self._some_cursor()
        if chosen is None:
            return
        cursor, told = chosen
        self._world.findings.operations += 1
        begun_with = told.asked.copy()
        self._world.follow(
            f"{self.story.name}: flush of {cursor.name}",
            cursor.flush(),
            lambda _: told.flushed(begun_with),
            lambda error: self._check_fenced(error),
        )
        if self._random.random() < 0.5:
            await asyncio.sleep(0.05)

    # --- the end of data

    async def _trim(self) -> None:
        retention = self._random.choice(_RETENTIONS)
        pin = self._some_position() if self._random.random() < 0.3 else None
        asked = self.story.trim_asked(retention, pin)
        gone = await self._ledger.trim(retention, pin)
        if not self._world.disk.is_stopped:
            self._note(f"trimmed {gone}")
            self.story.trimmed(gone, asked, self._world.clock.now_ms())

    async def _seal(self) -> None:
        self.story.seal_asked()
        end = await self._ledger.seal()
        if not self._world.disk.is_stopped:
            self._note(f"sealed at {end}")
            self.story.seal_answered(end)

    # --- telling

    def _note(self, text: str) -> None:
        self._world.note(f"{self.story.name}: {text}")

    def _failed(self, what: str, error: MagnetarError) -> None:
        if not self._world.disk.is_stopped:
            self._world.failed(f"{self.story.name}: {what}", error)
            self._check_fenced(error)

    def _check_fenced(self, error: MagnetarError) -> None:
        if not self.fenced:
            _check_not_fenced(self._world, self.story.name, error)

    def _broken(self, text: str) -> None:
        self._world.findings.broken(f"{self.story.name}: {text}")


def _mask(cursor: Cursor, position: Position) -> int:
    if cursor.is_acked(position):
        return WHOLE
    unacked = cursor.unacked_indexes(position)
    return 0 if unacked is None else WHOLE & ~unacked
