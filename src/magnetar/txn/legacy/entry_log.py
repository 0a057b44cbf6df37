"""A log of entries of which some are still needed.

Owns: `EntryLog`: one managed ledger, and the one cursor that says what is not needed any more.

Invariants:
1. Opening fences the former owner's log: from then on nothing that it appends is acknowledged.
2. Entries stand in the order in which they were submitted.
3. An entry goes only when `forget` named it; a crash may bring forgotten ones back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Generic, NamedTuple

from magnetar.errors import MagnetarError
from magnetar.ledger.api import LedgerStore
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.managed_ledger.reading import SCAN_BYTES, SCAN_ENTRIES
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.slices import SlicePace
from magnetar.txn.legacy.entry_codec import EntryCodec, Kinds


class Logged(NamedTuple, Generic[Kinds]):
    """An entry and where it stands."""

    position: Position
    entry: Kinds


class LedgerWithCursor(NamedTuple):
    """The managed ledger of a log, and the cursor on it. Get it from `open_ledger`."""

    ledger: ManagedLedger
    cursor: Cursor


async def open_ledger(
    name: str,
    cursor: str,
    metadata: MetadataStore,
    ledgers: LedgerStore,
    *,
    clock: Clock,
    limits: Limits,
) -> LedgerWithCursor:
    """Take a log over, creating it if there is none."""
    ledger = await ManagedLedger.open(name, metadata, ledgers, clock=clock, limits=limits)
    try:
        # A crash may have come between the ledger and its first cursor: then it is created here.
        if cursor in ledger.cursor_names():
            return LedgerWithCursor(ledger, ledger.cursor(cursor))
        return LedgerWithCursor(ledger, await ledger.create_cursor(cursor, EARLIEST))
    except BaseException:
        await ledger.close()
        raise


class EntryLog(Generic[Kinds]):
    """One log, as one owner has it."""

    def __init__(self, kept_in: LedgerWithCursor, codec: EntryCodec[Kinds]) -> None:
        self.ledger, self._cursor = kept_in
        self._codec = codec

    @property
    def failure(self) -> MagnetarError | None:
        """Why nothing can be appended until it is opened again."""
        return self.ledger.failure

    async def replay(self) -> AsyncIterator[Logged[Kinds]]:
        """Every entry that is not forgotten, in order."""
        # From the mark-delete position: what was forgotten, but not durably,
        # comes again (invariant 3).
        self._cursor.rewind()
        pace = SlicePace()
        while found := await self._cursor.read(SCAN_ENTRIES, SCAN_BYTES):
            for each in found:
                yield Logged(each.position, self._codec.decode(each.payload))
            await pace.after(len(found))  # topics that are served already go on

    def submit(self, entry: Kinds) -> asyncio.Future[Position]:
        """Append now; its position, once it is durable."""
        return self.ledger.append(self._codec.encode(entry))

    def forget(self, positions: Iterable[Position]) -> None:
        """Let entries go that are not needed any more."""
        # In memory; the cursor is written now and then. Too late costs a
        # longer replay, nothing else.
        for position in positions:
            self._cursor.ack(position)

    async def trim(self) -> None:
        """Let ledgers go of which nothing is needed."""
        await self.ledger.trim(KEEP_NOTHING)

    async def trim_if_due(self) -> None:
        """Let ledgers go if a whole one stands before what is needed."""
        if self.ledger.first_position().ledger_id < self._cursor.mark_delete.ledger_id:
            await self.trim()

    async def close(self) -> None:
        await self.ledger.close()

    async def delete(self) -> None:
        await self.ledger.delete()
