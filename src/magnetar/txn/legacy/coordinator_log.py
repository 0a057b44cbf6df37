"""The log of a coordinator of legacy transactions, as PIP-31 has it.

Owns: `CoordinatorLog`: the log of one coordinator, of which all that is not over is needed.

Invariants:
1. `append` returns once the entry is durable; entries are in the order of the calls.
2. After an error that leaves the outcome open nothing more is appended (`failure`): only an opening
   tells what is there.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.errors import MagnetarError
from magnetar.ledger.api import LedgerStore
from magnetar.managed_ledger.names import managed_ledger_key
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import TXN_LOG_APPENDS
from magnetar.txn.legacy.coordinator_entries import CODEC, Entry
from magnetar.txn.legacy.entry_log import EntryLog, LedgerWithCursor, open_ledger

# Pulsar's names for the log and its cursor: tools that look for them find them.
CURSOR: Final = "transaction.subscription"

_PREFIX: Final = "persistent://pulsar/system/__transaction_log_"


def log_name(partition: int) -> str:
    return f"{_PREFIX}{partition}"


async def log_exists(metadata: MetadataStore, partition: int) -> bool:
    """Whether a coordinator ever had a legacy transaction: one read."""
    return await metadata.get(managed_ledger_key(log_name(partition))) is not None


class CoordinatorLog(EntryLog[Entry]):
    """The log of one coordinator, as its leader has it. Get it from `open`."""

    def __init__(self, partition: int, kept_in: LedgerWithCursor) -> None:
        super().__init__(kept_in, CODEC)
        self._partition = str(partition)
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
        name = log_name(partition)
        kept_in = await open_ledger(name, CURSOR, metadata, ledgers, clock=clock, limits=limits)
        return cls(partition, kept_in)

    @property
    def failure(self) -> MagnetarError | None:
        return self._failure or super().failure

    def submit(self, entry: Entry) -> asyncio.Future[Position]:
        """Append now; pass what is returned to `durable`."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        TXN_LOG_APPENDS.labels(self._partition).inc()
        return super().submit(entry)

    async def durable(self, submitted: asyncio.Future[Position]) -> Position:
        """Where an entry stands, once it is durable; a retryable error means: it is not there."""
        try:
            # Shielded: the entry is in the ledger's hands, and cancelling who
            # waits does not take it back.
            return await asyncio.shield(submitted)
        except MagnetarError as error:
            # Retryable means that nothing was stored. Anything else leaves it open whether the
            # entry is there, and an entry behind it could contradict it (invariant 2).
            if not error.retryable:
                self.give_up(error)
            raise

    async def append(self, entry: Entry) -> Position:
        return await self.durable(self.submit(entry))

    def give_up(self, error: MagnetarError) -> None:
        """Have it opened again; the first reason stays."""
        if self._failure is None:
            self._failure = error
