"""Where a coordinator of legacy transactions writes down what happens.

Owns: `CoordinatorLog`: one managed ledger per coordinator, and the cursor that says which of its
entries are still needed.

Invariants:
1. `append` returns once the entry is durable; entries are in the order of the calls.
2. Opening fences the former leader's log: from then on nothing that it appends is acknowledged.
3. An entry goes only when `forget` named it; a crash may bring forgotten ones back.
4. After an error that leaves the outcome open nothing more is appended (`failure`): only an opening
   tells what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, NamedTuple

from magnetar.errors import MagnetarError
from magnetar.ledger.api import LedgerStore
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.managed_ledger.names import managed_ledger_key
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import TXN_LOG_APPENDS
from magnetar.txn.legacy.coordinator_entries import Entry, decode, encode

CURSOR: Final = "transaction.subscription"

_PREFIX: Final = "persistent://pulsar/system/__transaction_log_"
_READ_AT_ONCE: Final = 1000
_NOT_KEPT: Final = Retention(0, 0)


class Logged(NamedTuple):
    """An entry and where it stands."""

    position: Position
    entry: Entry


def log_name(partition: int) -> str:
    return f"{_PREFIX}{partition}"


async def log_exists(metadata: MetadataStore, partition: int) -> bool:
    """Whether a coordinator ever had a legacy transaction: one read."""
    return await metadata.get(managed_ledger_key(log_name(partition))) is not None


class CoordinatorLog:
    """The log of one coordinator, as its leader has it. Get it from `open`."""

    def __init__(self, partition: int, ledger: ManagedLedger, cursor: Cursor) -> None:
        self._partition = str(partition)
        self._ledger = ledger
        self._cursor = cursor
        self._failure: MagnetarError | None = None

    @classmethod
    async def open(
        cls,
        partition: int,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        *,
        clock: Clock,
        limits: Limits,
    ) -> CoordinatorLog:
        """Take the log over, creating it if there is none."""
        ledger = await ManagedLedger.open(
            log_name(partition), metadata, ledgers, clock=clock, limits=limits
        )
        try:
            if CURSOR in ledger.cursor_names():
                cursor = ledger.cursor(CURSOR)
            else:
                cursor = await ledger.create_cursor(CURSOR, EARLIEST)
        except BaseException:
            await ledger.close()
            raise
        return cls(partition, ledger, cursor)

    @property
    def failure(self) -> MagnetarError | None:
        """Why nothing can be appended until it is opened again."""
        return self._failure or self._ledger.failure

    @property
    def ledger(self) -> ManagedLedger:
        """For those who look at it."""
        return self._ledger

    async def replay(self) -> AsyncIterator[Logged]:
        """Every entry that is not forgotten, in order."""
        while found := await self._cursor.read(_READ_AT_ONCE):
            for each in found:
                yield Logged(each.position, decode(each.payload))

    def submit(self, entry: Entry) -> asyncio.Future[Position]:
        """Append now; pass what is returned to `durable`."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        TXN_LOG_APPENDS.labels(self._partition).inc()
        return self._ledger.append(encode(entry))

    async def durable(self, submitted: asyncio.Future[Position]) -> Position:
        """Where an entry stands, once it is durable; a retryable error means: it is not there."""
        try:
            return await asyncio.shield(submitted)
        except MagnetarError as error:
            if not error.retryable:
                self.give_up(error)
            raise

    def give_up(self, error: MagnetarError) -> None:
        """Have it opened again; the first reason stays."""
        if self._failure is None:
            self._failure = error

    async def append(self, entry: Entry) -> Position:
        return await self.durable(self.submit(entry))

    def forget(self, positions: Iterable[Position]) -> None:
        """These entries are not needed any more."""
        for position in positions:
            self._cursor.ack(position)

    async def trim(self) -> None:
        """Let ledgers go of which nothing is needed."""
        await self._ledger.trim(_NOT_KEPT)

    async def close(self) -> None:
        await self._ledger.close()
