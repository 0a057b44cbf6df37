"""The ground of the ledger conformance kit: a world to test in, and how an item is played.

Owns: `LedgerWorld`, which a backend fills in; `LedgerKitBase`, the switches of a kit; `item`,
which makes a test of a coroutine; and what the items share.

Invariants: those of `metadata_base`: a fresh world for every item, no wait without a deadline, no
dependency on a test runner.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest import SkipTest

from magnetar.ledger.api import ENTRY_BYTES_MAX, Entry, LedgerStore, LedgerWriter
from magnetar.model.ids import Position
from magnetar.testing.kits.metadata_base import WAIT_S, item_number, refuses

__all__ = ["ITEMS", "LedgerKitBase", "LedgerWorld", "item", "refuses"]

# Also in the docs: item 0 of every kit fails if a number has neither a test nor a reason.
ITEMS: Final = 28


class LedgerWorld(ABC):
    """One storage with its clients, made for one test. A backend gives at least `open_store`."""

    shared: ClassVar[bool] = True
    """Several store objects can be open at a time. If not, `connect` gives the same one again."""
    entry_bytes_max: ClassVar[int] = ENTRY_BYTES_MAX
    """The largest entry; a world may be too small for the largest of the contract."""

    def __init__(self) -> None:
        self._stores: list[LedgerStore] = []

    @abstractmethod
    async def open_store(self) -> LedgerStore:
        """Another client of this world's ledgers."""

    async def connect(self) -> LedgerStore:
        # An exclusive store (one folder, one process) cannot be
        # opened twice: both "clients" are one.
        if self.shared or not self._stores:
            self._stores.append(await self.open_store())
        return self._stores[-1]

    async def restart(self) -> None:
        """Close every store object; what is opened next finds what they left."""
        # Forgotten first: a close that fails must not be tried again when the world is closed.
        stores, self._stores = self._stores, []
        for store in stores:
            await store.close()

    async def crash(self) -> None:
        """End the store objects as they are, if the world can do that; else as `restart` does."""
        await self.restart()

    async def settle(self) -> None:
        """Do now what the backend does in the background; afterwards it is at rest."""
        await asyncio.sleep(0)

    def batches(self) -> int | None:
        """How many times entries became durable so far; None: this cannot be seen."""
        return None

    def cache(self) -> tuple[int, int] | None:
        """Bytes in the read cache and its limit; None: there is none."""
        return None

    def disk_bytes(self) -> int | None:
        """What the ledgers take on disk; None: there is no disk."""
        return None

    async def close(self) -> None:
        await self.restart()


class LedgerKitBase(ABC):
    """The base of the kit: what a subclass says about its backend, and how an item is played."""

    NOT_APPLICABLE: ClassVar[Mapping[int, str]] = {}
    """Items that mean nothing for this backend, with the reason."""
    ELSEWHERE: ClassVar[Mapping[int, str]] = {}
    """Items that need more than a kit (processes, disks), with the file that tests them."""

    @abstractmethod
    def make_world(self, folder: Path) -> LedgerWorld:
        """A fresh world; `folder` is empty and its own."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that a test runs on."""
        return asyncio.new_event_loop()

    def play(self, name: str, body: Body, folder: Path) -> None:
        number = item_number(name)
        assert number is not None, f"{name} is not named test_NN_what"
        # A backend may do without an item, but not in silence: the runner shows the reason.
        for listed in (self.NOT_APPLICABLE, self.ELSEWHERE):
            if number in listed:
                raise SkipTest(listed[number])
        # A loop of its own for each item: what one leaves behind cannot disturb the next.
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(self._play(body, folder))

    async def _play(self, body: Body, folder: Path) -> None:
        world = self.make_world(folder)
        try:
            await body(self, world)
        finally:
            await world.close()


Body = Callable[[Any, LedgerWorld], Coroutine[Any, Any, None]]


def item(body: Body) -> Callable[[Any, Path], None]:
    """Make a test of a coroutine that is named test_NN_what and takes a world."""

    def test(self: LedgerKitBase, tmp_path: Path) -> None:
        self.play(body.__name__, body, tmp_path)

    # Not functools.wraps: a runner would look through it and ask for an argument `world`.
    test.__name__ = body.__name__
    test.__qualname__ = body.__qualname__
    test.__doc__ = body.__doc__
    test.__module__ = body.__module__
    return test


# --- what items share ---


async def written(store: LedgerStore, payloads: Iterable[bytes]) -> LedgerWriter:
    """A new ledger with these entries, all acknowledged."""
    writer = await store.create()
    await acknowledged(*[writer.append(payload) for payload in payloads])
    return writer


async def acknowledged(*appends: asyncio.Future[Position]) -> list[Position]:
    """What appends resolve to; they must, before the deadline."""
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*appends)


async def outcomes(appends: Iterable[asyncio.Future[Position]]) -> list[Position | BaseException]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*appends, return_exceptions=True)


async def read_all(
    store: LedgerStore, ledger_id: int, *, bytes_max: int = ENTRY_BYTES_MAX
) -> list[bytes]:
    """Every durable payload; checks on the way that positions follow each other."""
    payloads: list[bytes] = []
    while True:
        first = len(payloads)
        # No upper bound: "all that is durable" is what the store answers, not what we expect.
        found = await store.read(ledger_id, first, 2**62, bytes_max=bytes_max)
        if not found:
            return payloads
        check_run(found, ledger_id, first)
        payloads += [entry.payload for entry in found]


def check_run(entries: list[Entry], ledger_id: int, first: int) -> None:
    """Consecutive entries of one ledger from `first` on."""
    positions = [entry.position for entry in entries]
    assert positions == [Position(ledger_id, first + n) for n in range(len(entries))], positions


async def ids_of(store: LedgerStore) -> list[int]:
    return [ledger_id async for ledger_id in store.list()]
