"""A place where managed ledgers live: shared servers, brokers that come, go and die.

Tests get it from the fixture `world_factory`, so that the same tests can run on other backends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from magnetar.ledger.api import Entry, LedgerStore
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.metadata.api import MetadataStore
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock, LoopClock
from magnetar.runtime.limits import Limits

EPOCH_MS = 1_700_000_000_000


class Broker:
    """One process: its two stores."""

    def __init__(self, metadata: MetadataStore, ledgers: LedgerStore) -> None:
        self.metadata = metadata
        self.ledgers = ledgers


class World:
    """Servers that outlive brokers. Made inside the event loop of a test."""

    def __init__(self) -> None:
        self.clock: Clock = LoopClock(EPOCH_MS)
        self.metadata = MemoryMetadata(self.clock, delay=self._travel)
        self.metadata_delay: Callable[[], Awaitable[None]] | None = None
        """Awaited for each way of a message to or from the metadata server."""
        self.ledgers = MemoryLedgers()
        self.rng = random.Random(1)

    async def _travel(self) -> None:
        if self.metadata_delay is not None:
            await self.metadata_delay()

    def broker(self) -> Broker:
        return Broker(self.metadata.connect(), self.ledgers.connect())

    def kill(self, broker: Broker) -> None:
        """Without a word: what was queued is lost."""
        assert isinstance(broker.metadata, MemoryStore)
        assert isinstance(broker.ledgers, MemoryLedgerStore)
        self.metadata.drop(broker.metadata)
        self.ledgers.drop(broker.ledgers)

    async def open(
        self, broker: Broker | None = None, name: str = "t", limits: Limits | None = None
    ) -> ManagedLedger:
        broker = broker or self.broker()
        return await ManagedLedger.open(
            name,
            broker.metadata,
            broker.ledgers,
            clock=self.clock,
            limits=limits or Limits(),
            rng=self.rng,
        )


WorldFactory = Callable[[], World]


# --- small things that the tests share ---


async def append_all(ledger: ManagedLedger, payloads: list[bytes]) -> list[Position]:
    return [await ledger.append(payload) for payload in payloads]


async def read_all(ledger: ManagedLedger) -> list[Entry]:
    return await ledger.read(EARLIEST, 10_000)


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; bounded."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came to hold")


class Gate:
    """A delay of the ledgers that lasts until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        await self.open.wait()


async def with_ledgers_of(world: World, counts: list[int]) -> ManagedLedger:
    """Ledgers of so many entries of 10 bytes, each entry its own number; the last is open."""
    number = 0
    ledger = await world.open()
    for at, count in enumerate(counts):
        for _ in range(count):
            await ledger.append(b"%010d" % number)
            number += 1
        if at < len(counts) - 1:
            await ledger.close()
            ledger = await world.open()
    return ledger
