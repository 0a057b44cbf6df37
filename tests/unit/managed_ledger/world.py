"""Places where managed ledgers live: shared servers, brokers that come, go and die.

Tests get one from a fixture. `world_factory` runs a test on every backend; `memory_world_factory`
is for tests that make servers slow or fail, or that let much time pass.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from magnetar.ledger.api import Entry, LedgerStore
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.metadata.api import MetadataStore
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock, LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual import virtual_time

EPOCH_MS = 1_700_000_000_000

STORAGE_LIMITS = Limits(journal_file_bytes=1 << 20, journal_files_max=4)
"""Small, because the files are made anew for each test."""


class Broker:
    """One process: its two stores."""

    def __init__(self, metadata: MetadataStore, ledgers: LedgerStore) -> None:
        self.metadata = metadata
        self.ledgers = ledgers


class World(ABC):
    """Servers that outlive brokers. Made inside the event loop of a test."""

    def __init__(self) -> None:
        self.clock: Clock = LoopClock(EPOCH_MS)
        self.rng = random.Random(1)

    @abstractmethod
    def broker(self) -> Broker: ...

    @abstractmethod
    def kill(self, broker: Broker) -> None:
        """Without a word: nothing that it has not sent yet has an effect any more."""

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


class MemoryWorld(World):
    """Servers in memory, with delays and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = MemoryMetadata(self.clock, delay=self._travel)
        self.metadata_delay: Callable[[], Awaitable[None]] | None = None
        """Awaited for each way of a message to or from the metadata server."""
        self.ledgers = MemoryLedgers()

    async def _travel(self) -> None:
        if self.metadata_delay is not None:
            await self.metadata_delay()

    def broker(self) -> Broker:
        return Broker(self.metadata.connect(), self.ledgers.connect())

    def kill(self, broker: Broker) -> None:
        assert isinstance(broker.metadata, MemoryStore)
        assert isinstance(broker.ledgers, MemoryLedgerStore)
        self.metadata.drop(broker.metadata)
        self.ledgers.drop(broker.ledgers)


class EmbeddedWorld(World):
    """One embedded storage with files and threads, which all brokers share."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self._storage = storage

    def broker(self) -> Broker:
        return Broker(self._storage.connect(), self._storage.ledgers)

    def kill(self, broker: Broker) -> None:
        """Its managed ledgers are left as they are: the next owner's opening fences them."""


class WorldFactory(Protocol):
    """Makes the worlds of one test, and runs the test on the loop that they need."""

    def __call__(self) -> World: ...

    def run(self, main: Coroutine[Any, Any, None]) -> None: ...


class MemoryWorldFactory:
    """On virtual time."""

    def __call__(self) -> MemoryWorld:
        return MemoryWorld()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(main)


class EmbeddedWorldFactory:
    """On a storage in a folder of its own, in real time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._storage: Storage | None = None

    def __call__(self) -> EmbeddedWorld:
        assert self._storage is not None
        return EmbeddedWorld(self._storage)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self._run(main))

    async def _run(self, main: Coroutine[Any, Any, None]) -> None:
        self._storage = await open_storage(self._folder, limits=STORAGE_LIMITS)
        try:
            await main
        finally:
            await self._storage.close()


# --- small things that the tests share ---


async def append_all(ledger: ManagedLedger, payloads: list[bytes]) -> list[Position]:
    return [await ledger.append(payload) for payload in payloads]


async def read_all(ledger: ManagedLedger) -> list[Entry]:
    return await ledger.read(EARLIEST, 10_000)


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop run, and threads if there are any, until the condition holds; bounded."""
    for turn in range(6000):
        if condition():
            return
        await asyncio.sleep(0 if turn < 1000 else 0.001)
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
