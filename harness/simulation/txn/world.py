"""Simulated brokers whose stores are watched, whose clocks jump, and whose topics are taken away.

Owns: `TxnWorld`: the hosts of a run of transactions, the mirror of what is durable, the weather of
its stores; `TxnSharedHost` and `TxnDiskHost`, with clocks that can be set.

Invariants:
1. Wall clocks of brokers jump (`Host.clock`); time as deadlines and intervals see it does not.
2. A topic can be given to another broker while its owner goes on (`usurp`): as if the owner had
   been paused for longer than its session, and not noticed it yet. It does later (`notice`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.simulation.broker_lives import Life
from harness.simulation.scalable.routed_segments import RoutedSegments
from harness.simulation.scalable.world import (
    DiskHost,
    Host,
    ScalableWorld,
    SharedHost,
    SharedMachine,
    SharedServers,
)
from harness.simulation.seeds import EPOCH_MS
from harness.simulation.storage.history import Findings
from harness.simulation.txn.mirror import Mirror
from harness.simulation.txn.stores import (
    Order,
    RecordedLedgers,
    ToldStore,
    WatchedLedgers,
    WatchedMetadata,
    Weather,
    found_again,
)
from magnetar.broker.topic.ownership import OWNERS
from magnetar.errors import MagnetarError, StorageError
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import MetadataStore
from magnetar.model.names import TopicName
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.server import embedded
from magnetar.server.machine import Machine, ServerStorage
from magnetar.testing.virtual.worker import VirtualWorker


class JumpingClock(LoopClock):
    """The loop's time, with a wall clock that can be set."""

    def __init__(self) -> None:
        super().__init__(EPOCH_MS)
        self.offset_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.offset_ms


class TxnWorld(ScalableWorld):
    """All of a run."""

    def __init__(self, seed: int, findings: Findings, limits: Limits) -> None:
        super().__init__(seed, findings, limits)
        self.mirror = Mirror(self.broken, self.now)
        self.weather = Weather(Random(f"{seed} weather"))
        self.clocks: dict[str, JumpingClock] = {}
        self.calm = False
        """Nothing disturbs any more."""

    def broken(self, invariant: str, text: str) -> None:
        self.findings.broken(f"{invariant}: {text} [{self.now():.3f}]")

    def clock_of(self, name: str) -> JumpingClock:
        return self.clocks.setdefault(name, JumpingClock())

    def clear_up(self) -> None:
        """Stores work, and clocks are right."""
        self.weather.clear()
        for clock in self.clocks.values():
            clock.offset_ms = 0


class TxnServers(SharedServers):
    """Shared stores that are watched."""

    def __init__(self, world: TxnWorld, random: Random, *, session_seconds: float) -> None:
        super().__init__(random, session_seconds=session_seconds)
        self._weather = world.weather
        self.watched = WatchedMetadata(
            LoopClock(EPOCH_MS), world.mirror, world.weather, self._slow_delay
        )
        self.metadata = self.watched
        self.ledgers = WatchedLedgers(world.mirror, self._delay)

    async def _slow_delay(self) -> None:
        await self._delay()
        await self._weather.delay()


class TxnSharedHost(SharedHost):
    """One of several brokers."""

    def __init__(self, world: TxnWorld, name: str, servers: TxnServers) -> None:
        super().__init__(world, name, servers)
        self._clock = world.clock_of(name)
        self._watched = servers.watched

    def _machine(self, life: Life) -> Machine:
        self._storage = self._servers.connect()
        chance = Random(f"{self.world.seed} routes of {life.name}")
        return SharedMachine(
            clock=self._clock,
            listen=self._listen(life),
            storage=self._storage,
            route=lambda topics, sharing: RoutedSegments(self.world, topics, sharing, chance),
        )

    async def usurp(self, name: TopicName) -> None:
        """Take a topic from whoever has it, who does not notice yet, and load it here."""
        key = f"{OWNERS}/{encode_name(str(name))}"
        self._watched.take_away(key)
        try:
            await self.ask(lambda server: server.topics.get(name, create=False))
        except MagnetarError as error:
            self.world.note(f"usurp {name}: {error.name}")


async def notice(host: Host, life: Life | None, name: TopicName) -> None:
    """A broker learns that a topic is not its own any more."""
    if host.life is not life or life is None:
        return
    try:
        await host.ask(lambda server: server.topics.unload(name))
    except MagnetarError as error:
        host.world.note(f"notice {name}: {error.name}")


class _WatchedStorage:
    """The embedded storage of one life."""

    def __init__(self, inner: embedded.Storage, world: TxnWorld) -> None:
        self.progress: Signal = inner.progress
        self._order = Order()
        self.ledgers = RecordedLedgers(inner.ledgers, world.mirror, self._order)
        self.shares_journal = inner.shares_journal
        self.publish_gate = inner.publish_gate
        self._inner = inner
        self._world = world

    @property
    def failure(self) -> StorageError | None:
        return self._inner.failure

    @property
    def queued_bytes(self) -> int:
        return self._inner.queued_bytes

    def connect(self) -> MetadataStore:
        return ToldStore(self._inner.connect(), self._world.mirror, self._order)

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True, slots=True)
class WatchedMachine(Machine):
    """A machine whose storage is watched."""

    world: TxnWorld | None = None

    async def open_storage(self, folder: Path, limits: Limits) -> ServerStorage:
        assert self.world is not None
        inner = await embedded.open_storage(
            folder, limits=limits, disk=self.disk, clock=self.clock, new_worker=self.new_worker
        )
        async with inner.connect() as store:
            await found_again(self.world.mirror, store, inner.ledgers)
        return _WatchedStorage(inner, self.world)


class TxnDiskHost(DiskHost):
    """A broker alone, on a simulated disk."""

    def __init__(self, world: TxnWorld, name: str, random: Random) -> None:
        super().__init__(world, name, random)
        self._txn_world = world
        self._clock = world.clock_of(name)

    def _machine(self, life: Life) -> Machine:
        disk = self.disk
        disk.plan = self._draw_plan()
        seed = self._random.randrange(1 << 32)
        return WatchedMachine(
            clock=self._clock,
            disk=disk,
            new_worker=lambda name: VirtualWorker(Random(f"{seed} {name}"), disk.stopped),
            listen=self._listen(life),
            world=self._txn_world,
        )
