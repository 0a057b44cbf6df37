"""Several brokers in one process on virtual time: real servers, fake machines, and their ends.

Owns: `Host`, the place of one broker: its address, and the life that it has there; `SharedHost`,
whose storage is shared with other hosts (metadata and ledgers in memory), and `DiskHost`, one
alone with the embedded storage on a simulated disk; `ScalableWorld`, all hosts of a run, and the
way to them.

Invariants:
1. A killed broker does nothing any more: its stores take nothing, its connections are silent, its
   tasks are cancelled. What was durable stays; its session lives until its timeout.
2. A broker that lost the metadata store, or its session, is not killed: it goes on as it can.
3. At most one life of a host runs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from harness.simulation.broker_lives import Housed, Life
from harness.simulation.scalable.routed_segments import RoutedSegments
from harness.simulation.seeds import EPOCH_MS
from harness.simulation.storage.history import Findings
from magnetar.broker.topic.ownership import SharedOwnership
from magnetar.broker.topic.topics import Topics
from magnetar.errors import MagnetarError, StorageError, Unavailable
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.metadata.api import MetadataStore
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.disk_space import PublishGate
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.segments import SegmentHost
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.server.machine import Listener, Machine, NewProtocol, ServerStorage
from magnetar.testing.virtual.disk import ROOT, SimulatedDisk
from magnetar.testing.virtual.faults import FaultPlan, SimulatedCrash
from magnetar.testing.virtual.network import End, Network, ProtocolT
from magnetar.testing.virtual.worker import VirtualWorker

Result = TypeVar("Result")

PORT: Final = 6650
ANY_HOST: Final = "any"
CLEARING_SECONDS: Final = 30.0
"""What the tasks of a killed broker may take to end."""

_STORE_FAST_S: Final = 0.0005
_STORE_SLOW_S: Final = 0.03


class SharedStorage:
    """One broker's connections to storage that several share."""

    shares_journal: Final = False

    def __init__(
        self, metadata: MemoryMetadata, ledgers: MemoryLedgerStore, timeout: float
    ) -> None:
        self.progress = Signal()
        self.publish_gate = PublishGate()
        self.ledgers = ledgers
        self.stores: list[MemoryStore] = []
        self._metadata = metadata
        self._timeout = timeout

    @property
    def failure(self) -> StorageError | None:
        return None  # a shared storage does not fail with one of its brokers

    @property
    def queued_bytes(self) -> int:
        return 0

    def connect(self) -> MemoryStore:
        self.stores.append(self._metadata.connect(self._timeout))
        return self.stores[-1]

    async def close(self) -> None:
        for store in self.stores:
            await store.close()
        await self.ledgers.close()


class SharedServers:
    """What outlives every broker of a run."""

    def __init__(self, random: Random, *, session_seconds: float) -> None:
        self._random = random
        self._session_seconds = session_seconds
        self.metadata = MemoryMetadata(LoopClock(EPOCH_MS), delay=self._delay)
        self.ledgers = MemoryLedgers(delay=self._delay)

    def connect(self) -> SharedStorage:
        return SharedStorage(self.metadata, self.ledgers.connect(), self._session_seconds)

    async def _delay(self) -> None:
        most = _STORE_FAST_S if self._random.random() < 0.9 else _STORE_SLOW_S
        await asyncio.sleep(most * self._random.random())


@dataclass(frozen=True, slots=True)
class SharedMachine(Machine):
    """A machine without storage of its own."""

    storage: SharedStorage | None = None
    route: Callable[[Topics, SharedOwnership], SegmentHost] | None = None

    async def open_storage(self, folder: Path, limits: Limits) -> ServerStorage:
        assert self.storage is not None
        return self.storage

    def share_topics(self, metadata: MetadataStore, url: str) -> SharedOwnership:
        return SharedOwnership(metadata, url, self.clock)

    def segments(
        self, topics: Topics, sharing: SharedOwnership | None, layout_watchers: LayoutWatchers
    ) -> SegmentHost:
        assert self.route is not None
        assert sharing is not None
        return self.route(topics, sharing)


class Host:
    """The place of one broker."""

    def __init__(self, world: ScalableWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.life: Life | None = None
        self.server: Server
        self.is_ready = False
        """A broker answers here."""
        self.network = Network(Random(f"{world.seed} network {name}"), world.now)
        self.network.host = name
        self.starts = 0
        """How many lives it has had."""

    @property
    def url(self) -> str:
        return f"pulsar://{self.name}:{PORT}"

    # --- a life

    async def start(self) -> bool:
        """Start a broker here; False: it could not, or died of it."""
        assert self.life is None
        self.starts += 1
        self.life = life = Life(f"{self.name}{self.starts}")
        self.world.note(f"{life.name} starts")
        config = ServerConfig(
            data=str(ROOT),
            host=self.name,
            port=PORT,
            transaction_kind=self.world.transaction_kind,
            limits=self.world.limits,
        )
        self.server = Server(config, machine=self._machine(life))
        try:
            await life.ask(self.server.start())
        except (MagnetarError, SimulatedCrash) as error:
            if self.life is life:
                self._start_failed(error)
                await self.kill()
            return False
        self.is_ready = self.life is life
        self.world.note(f"{life.name} is ready")
        return self.is_ready

    async def kill(self) -> None:
        """End the broker without a word."""
        life = self.life
        if life is None:
            return
        self.world.note(f"{life.name} is killed")
        self.life = None
        self.is_ready = False
        self._cut_storage()
        self.network.accept(False)
        for link in self.network.links:
            link.cut()
        life.kill()
        late = await life.cleared(CLEARING_SECONDS)
        if late:
            self.world.findings.broken(f"tasks of {life.name} outlive it: {late}")

    async def stop(self) -> None:
        """End the broker in order."""
        life = self.life
        if life is None:
            return
        self.is_ready = False
        self.world.note(f"{life.name} stops")
        try:
            await life.ask(self.server.stop())
        except MagnetarError as error:
            self.world.note(f"{life.name} stop: {error.name}")
        if self.life is life:
            await self.kill()

    async def ask(self, work: Callable[[Server], Coroutine[Any, Any, Result]]) -> Result:
        """Something that this broker does for another one, or for an operator."""
        life = self.life
        if life is None or not self.is_ready:
            raise Unavailable(f"no broker runs at {self.name}")
        return await life.ask(work(self.server))

    # --- its machine

    def _machine(self, life: Life) -> Machine:
        raise NotImplementedError

    def _cut_storage(self) -> None:
        """Nothing that this broker still tries to store arrives."""
        raise NotImplementedError

    def _start_failed(self, error: BaseException) -> None:
        self.world.note(f"{self.name} start: {type(error).__name__}")

    def _listen(
        self, life: Life
    ) -> Callable[[NewProtocol, str, int], Coroutine[Any, Any, Listener]]:
        async def listen(new_protocol: NewProtocol, host: str, port: int) -> Listener:
            return await self.network.listen(lambda: life.housed(new_protocol), host, port)

        return listen


class SharedHost(Host):
    """One of several brokers on shared storage."""

    def __init__(self, world: ScalableWorld, name: str, servers: SharedServers) -> None:
        super().__init__(world, name)
        self._servers = servers
        self._storage: SharedStorage | None = None

    def lose_metadata(self, *, in_flight_arrives: bool) -> None:
        """Cut this broker from the metadata server; it lives on."""
        for store in self._stores():
            self._servers.metadata.cut(store, in_flight_arrives=in_flight_arrives)

    def find_metadata(self) -> None:
        for store in self._stores():
            self._servers.metadata.heal(store)

    def _stores(self) -> list[MemoryStore]:
        return [] if self._storage is None else self._storage.stores

    def _machine(self, life: Life) -> Machine:
        self._storage = self._servers.connect()
        chance = Random(f"{self.world.seed} routes of {life.name}")
        return SharedMachine(
            clock=LoopClock(EPOCH_MS),
            listen=self._listen(life),
            storage=self._storage,
            route=lambda topics, sharing: RoutedSegments(self.world, topics, sharing, chance),
        )

    def _cut_storage(self) -> None:
        assert self._storage is not None
        for store in self._storage.stores:
            self._servers.metadata.drop(store)
        self._servers.ledgers.drop(self._storage.ledgers)
        self._storage = None


class DiskHost(Host):
    """A broker alone, with the embedded storage on a simulated disk."""

    def __init__(self, world: ScalableWorld, name: str, random: Random) -> None:
        super().__init__(world, name)
        self.disk = SimulatedDisk(seed=random.randrange(1 << 32))
        self._random = random
        self._draw_plan: Callable[[], FaultPlan] = FaultPlan

    def plan_with(self, draw: Callable[[], FaultPlan]) -> None:
        """What becomes of the disk from the next start on."""
        self._draw_plan = draw

    def _machine(self, life: Life) -> Machine:
        disk = self.disk
        disk.plan = self._draw_plan()
        seed = self._random.randrange(1 << 32)
        return Machine(
            clock=LoopClock(EPOCH_MS),
            disk=disk,
            new_worker=lambda name: VirtualWorker(Random(f"{seed} {name}"), disk.stopped),
            listen=self._listen(life),
        )

    def _cut_storage(self) -> None:
        power_loss = self._random.random() < 0.6
        self.world.note(f"{self.name}: power loss {power_loss}")
        self.disk = self.disk.crash(self._random, power_loss=power_loss)

    def _start_failed(self, error: BaseException) -> None:
        super()._start_failed(error)
        if not self.disk.is_stopped and not self.disk.plan.faults:
            self.world.findings.broken(f"start: {type(error).__name__}: {error}")

    async def kill_when_stopped(self) -> None:
        """Wait until the disk stops in mid-operation, and with it the broker."""
        disk = self.disk
        await disk.stopped.past(0)
        if self.disk is disk:
            await self.kill()

    def close(self) -> None:
        self.disk.close()


class ScalableWorld:
    """All brokers of a run, and what their clients share."""

    def __init__(self, seed: int, findings: Findings, limits: Limits) -> None:
        self.seed = seed
        self.findings = findings
        self.limits = limits
        self.hosts: dict[str, Host] = {}
        self.transaction_kind = "auto"
        """As in the settings of brokers."""
        self.ending = False
        """Clients should come to their end."""
        self._chance = Random(f"{seed} bootstrap")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def note(self, text: str) -> None:
        self.findings.note(f"{self.now():.6f} {text}")

    @property
    def ready(self) -> list[Host]:
        """The hosts at which a broker answers."""
        return [host for host in self.hosts.values() if host.is_ready]

    def host_at(self, url: str) -> Host:
        """The host of a broker's URL."""
        host = self.hosts.get(urlsplit(url).hostname or "")
        if host is None:
            raise Unavailable(f"nobody knows {url}")
        return host

    async def connect(
        self, factory: Callable[[], ProtocolT], host: str, port: int, /
    ) -> tuple[End, ProtocolT]:
        """As `loop.create_connection`; the client's end stays in the context of the caller.

        `ANY_HOST` is an address in front of all brokers, as a load balancer has it.
        """
        if host == ANY_HOST and self.ready:
            host = self._chance.choice(self.ready).name
        place = self.hosts.get(host)
        if place is None:
            raise ConnectionRefusedError(f"no host {host}")
        end, protocol = await place.network.connect(factory, host, port)
        end.set_protocol(Housed.here(protocol))
        return end, protocol
