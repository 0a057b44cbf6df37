"""Random histories: owners come, go, die and overlap; disks and connections fail.

Nothing acknowledged is lost, no position is used twice, nobody sees what was never appended, and
durable acknowledgements stay. A failing seed is in the test's id and runs alike each time.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from magnetar.errors import (
    DiskFailed,
    DiskFull,
    MagnetarError,
    StorageFenced,
)
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.metadata.memory import MemoryStore
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from tests.unit.managed_ledger.world import Broker, MemoryWorld, MemoryWorldFactory

SEEDS = (*range(40), 765)
"""765 once lost a ledger whose recording was in doubt when a later owner came."""
STEPS = 150
LIMITS = Limits(managed_ledger_ledger_entries=7, cursor_record_bytes=200, cursor_flush_seconds=0.2)
FAULTS = (DiskFull, DiskFailed, StorageFenced)


@dataclass
class Owner:
    broker: Broker
    ledger: ManagedLedger


@dataclass
class History:
    """What was promised to somebody."""

    submitted: set[bytes] = field(default_factory=set)
    acknowledged: dict[Position, bytes] = field(default_factory=dict)
    acked: set[Position] = field(default_factory=set)
    durably_acked: set[Position] = field(default_factory=set)
    trimmed: Position = EARLIEST
    """Up to here a trim was allowed to go."""
    in_flight: set[asyncio.Future[Position]] = field(default_factory=set)


class Simulation:
    """One random history in one world."""

    def __init__(self, world: MemoryWorld, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.history = History()
        self.owners: list[Owner] = []
        self.former: list[Owner] = []
        """Kept, because a dead process does not clean up after itself either."""
        self.number = 0
        world.ledgers.delay = self._delay
        world.metadata_delay = self._delay

    async def _delay(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    async def run(self) -> None:
        await self.take_over()
        steps = [
            (12, self.append),
            (4, self.ack),
            (3, self.flush),
            (2, self.pause),
            (1, self.take_over),
            (1, self.crash),
            (1, self.fail_disk),
            (1, self.cut_connection),
            (1, self.trim),
            (1, self.check),
        ]
        weights = [weight for weight, _ in steps]
        for _ in range(STEPS):
            _, step = self.rng.choices(steps, weights)[0]
            await step()
        await self.crash()
        await self.check()

    @property
    def newest(self) -> Owner:
        return self.owners[-1]

    # --- steps

    async def append(self) -> None:
        owner = self.rng.choice(self.owners)
        for _ in range(self.rng.randrange(1, 6)):
            self.number += 1
            payload = b"%d" % self.number
            try:
                future = owner.ledger.append(payload)
            except MagnetarError:
                return
            self.history.submitted.add(payload)
            self.history.in_flight.add(future)
            future.add_done_callback(partial(self._appended, payload))

    def _appended(self, payload: bytes, future: asyncio.Future[Position]) -> None:
        self.history.in_flight.discard(future)
        if not future.cancelled() and future.exception() is None:
            position = future.result()
            assert position not in self.history.acknowledged, f"{position} was used twice"
            self.history.acknowledged[position] = payload

    async def ack(self) -> None:
        cursor = self.newest.ledger.cursor("s")
        for position in self.rng.sample(
            sorted(self.history.acknowledged), k=min(3, len(self.history.acknowledged))
        ):
            try:
                cursor.ack(position)
            except MagnetarError:
                return
            if cursor.is_acked(position):
                self.history.acked.add(position)

    async def flush(self) -> None:
        cursor = self.newest.ledger.cursor("s")
        promised = {each for each in self.history.acknowledged if cursor.is_acked(each)}
        try:
            await cursor.flush()
        except MagnetarError:
            return
        self.history.durably_acked |= promised

    async def pause(self) -> None:
        await self.world.clock.sleep(self.rng.choice([0, 0.01, 0.3, 6]))

    async def take_over(self) -> None:
        """A second owner opens while the first is still at work."""
        broker = self.world.broker()
        for _ in range(200):
            try:
                ledger = await self.world.open(broker, limits=LIMITS)
                break
            except (DiskFull, DiskFailed):
                await self.world.clock.sleep(0.01)
            except StorageFenced:
                broker = self.world.broker()
        else:
            raise AssertionError("could not open")
        self.former += self.owners[:-1]
        self.owners = [*self.owners[-1:], Owner(broker, ledger)]
        while "s" not in ledger.cursor_names():
            await ledger.create_cursor("s", EARLIEST)

    async def crash(self) -> None:
        for owner in self.owners:
            self.world.kill(owner.broker)
        self.former += self.owners
        self.owners = []
        await self.take_over()

    async def fail_disk(self) -> None:
        error = self.rng.choice(FAULTS)("injected")
        stored = isinstance(error, StorageFenced) and self.rng.random() < 0.5
        self.world.ledgers.fail_next(error, stored=stored)
        if self.rng.random() < 0.3:
            self.world.ledgers.fail_next(DiskFull("injected"), operation="create")

    async def cut_connection(self) -> None:
        store = self.newest.broker.metadata
        assert isinstance(store, MemoryStore)
        self.world.metadata.cut(store, in_flight_arrives=self.rng.random() < 0.5)
        await self.append()
        await self.world.clock.sleep(0.05)
        self.world.metadata.heal(store)

    async def trim(self) -> None:
        await self.flush()
        allowed = self.newest.ledger.cursor("s").mark_delete
        self.history.trimmed = max(self.history.trimmed, allowed)
        with suppress(MagnetarError):
            await self.newest.ledger.trim(Retention(0, 0))

    # --- what must hold

    async def check(self) -> None:
        await self.take_over()  # what a new owner sees is what is durable
        ledger = self.newest.ledger
        entries = await ledger.read(EARLIEST, 100_000)
        positions = [entry.position for entry in entries]
        assert positions == sorted(set(positions))
        seen = {entry.position: entry.payload for entry in entries}
        assert set(seen.values()) <= self.history.submitted
        for position, payload in self.history.acknowledged.items():
            if position > self.history.trimmed:
                assert seen.get(position) == payload, f"{position} was lost"
        cursor = ledger.cursor("s")
        cursor.check_invariants()
        for position in self.history.durably_acked:
            assert cursor.is_acked(position), f"{position} is no longer acknowledged"
        for position in seen.keys() - self.history.acked:
            known = position in self.history.acknowledged
            assert not known or not cursor.is_acked(position), f"nobody acknowledged {position}"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost(memory_world_factory: MemoryWorldFactory, seed: int) -> None:
    async def main() -> None:
        await Simulation(memory_world_factory(), seed).run()

    memory_world_factory.run(main())
