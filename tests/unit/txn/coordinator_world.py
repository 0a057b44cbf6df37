"""Brokers with coordinators on one metadata store in memory, for tests on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from harness.simulation.seeds import EPOCH_MS
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator.gc import Leftover
from magnetar.txn.coordinator_partitions import CoordinatorPartitions
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.txn.open_transactions import OpenTransactions
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import Header, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

LIMITS = Limits(close_seconds=5)
MINUTE_MS = 60_000


class Seen:
    """A participant that keeps what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, State]] = []

    def decided(self, txn: TxnId, state: State) -> None:
        self.told.append((to_text(txn), state))


class EndCall(NamedTuple):
    """One call of a coordinator that a topic or subscription carried out."""

    where: str
    txn: TxnId
    commit: bool
    low_watermark: int


class Stage:
    """Topics and subscriptions that end legacy transactions, and remember how."""

    def __init__(self) -> None:
        self.ends: list[EndCall] = []
        self.attempts: Counter[str] = Counter()
        self.failing: dict[str, Exception] = {}
        """What these raise."""
        self.away = asyncio.Event()
        """While it is not set, nobody answers."""
        self.away.set()

    async def end_on_topic(
        self, topic: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None:
        await self._end(EndCall(topic, txn, commit, low_watermark))

    async def end_on_subscription(
        self, topic: str, subscription: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None:
        await self._end(EndCall(f"{topic} {subscription}", txn, commit, low_watermark))

    async def _end(self, call: EndCall) -> None:
        self.attempts[call.where] += 1
        await self.away.wait()
        if call.where in self.failing:
            raise self.failing[call.where]
        self.ends.append(call)

    def outcomes(self, txn: TxnId) -> dict[str, bool]:
        """What each of them was told; told otherwise later: it fails."""
        found: dict[str, bool] = {}
        for call in self.ends:
            if call.txn == txn:
                assert found.setdefault(call.where, call.commit) == call.commit
        return found


class Broker:
    """One process with its session in the store."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.metadata: MemoryStore = world.metadata.connect(session_timeout=10.0)
        self.store = TxnStore(self.metadata)
        partitions = CoordinatorPartitions(
            self.metadata, broker=name, url=f"pulsar://{name}:6650", limits=world.limits
        )
        self.partitions = partitions
        self.outcomes = Outcomes(self.store, world.clock, coordinates=partitions.coordinates)
        self.repairs: list[Leftover] = []
        self.missing: set[str] = set()
        """Topics that do not exist."""
        self.ledgers: MemoryLedgerStore = world.ledgers.connect()
        open_transactions = OpenTransactions(
            self.outcomes, per_owner_max=world.limits.txn_open_per_owner_max
        )
        self.legacy = LegacyCoordinators(
            partitions,
            open_transactions,
            world.participants,
            self.store,
            self.ledgers,
            clock=world.clock,
            limits=world.limits,
        )
        self.coordinators = Coordinators(
            self.store,
            partitions,
            open_transactions,
            self.legacy,
            clock=world.clock,
            limits=world.limits,
            repair=self._repair,
        )

    async def _repair(self, left: Leftover) -> bool:
        self.repairs.append(left)
        return left.segment not in self.missing

    async def start(self) -> None:
        await self.outcomes.start()
        await self.coordinators.start()

    async def stop(self) -> None:
        await self.coordinators.stop()
        await self.outcomes.stop()
        await self.metadata.close()

    async def begin(self, coordinator: int = 0, timeout_ms: int = MINUTE_MS) -> Header:
        return await self.coordinators.begin(coordinator, timeout_ms)

    def follow(self, *txns: TxnId) -> Seen:
        seen = Seen()
        for txn in txns:
            self.outcomes.join(txn, seen)
        return seen


class World:
    """The store, which outlives every broker."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.clock = LoopClock(EPOCH_MS)
        self.metadata = MemoryMetadata(self.clock)
        self.ledgers = MemoryLedgers()
        self.participants = Stage()
        self._brokers = 0

    async def broker(self) -> Broker:
        self._brokers += 1
        broker = Broker(self, f"broker-{self._brokers}")
        await broker.start()
        return broker

    async def kill(self, broker: Broker) -> None:
        """Without a word: its session runs out, and it does nothing any more."""
        self.metadata.drop(broker.metadata)
        self.ledgers.drop(broker.ledgers)


Scene = Callable[[World, Broker], Awaitable[None]]


def on_a_broker(scene: Scene, limits: Limits = LIMITS) -> None:
    async def main() -> None:
        world = World(limits)
        broker = await world.broker()
        await scene(world, broker)
        await broker.stop()

    run(main())


async def keys(store: TxnStore) -> list[str]:
    """All records of transactions but those that stay: counters and leaders."""
    found = []
    for parent in ("/txn/id", "/txn/op", "/txn/aborted", "/txn/group"):
        found += await store.metadata.scan_keys(parent)
    return found
