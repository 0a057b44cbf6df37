"""The ledger's contract: append-only sequences of entries with an owner that can be fenced.

Owns: `LedgerStore` (create, read, fence, close, delete, list) and `LedgerWriter` (append).

Promises of every backend (the conformance kit checks them):
1. Entry ids of a ledger are 0, 1, 2, ... in the order of `append` calls. `append` submits when
   called; its future resolves, in that order, once the entry is durable.
2. What a future resolved for is never lost and reads back byte for byte, across crashes.
3. If an append fails, every later append of that writer fails: a ledger has no gaps. Whether an
   entry that failed with an unknown outcome (`StorageFenced`) exists is settled by `fence`.
4. Only durable entries can be read; a reader never sees an entry that a crash could take back.
5. After `fence` returned, no append of an earlier writer is ever acknowledged, and the ledger's
   last entry never changes again.
6. A damaged entry is reported as `CorruptEntry`; the entries around it stay readable.
7. Ledger ids grow: a new ledger's id is above every id given before, deleted ones included.
8. `delete` frees the space; the id reads as `LedgerMissing` from then on.
9. The entries of a run are durable together: its future tells of all of them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from magnetar.errors import StorageError
from magnetar.model.ids import Position
from magnetar.runtime.signal import Signal

NO_ENTRY: Final = -1
"""The last entry id of an empty ledger."""

ENTRY_BYTES_MAX: Final = 8 * 1024 * 1024


class Entry(NamedTuple):
    """An entry and where it stands."""

    position: Position
    payload: bytes


class LedgerState(Enum):
    OPEN = "open"
    """Its writer may append."""
    FENCED = "fenced"
    """No writer may append; the last entry is final."""
    CLOSED = "closed"
    """As FENCED, and ended on purpose by its owner."""


@dataclass(frozen=True, slots=True)
class LedgerInfo:
    """The state, end and size of a ledger; for an OPEN one they are those of this moment."""

    ledger_id: int
    state: LedgerState
    last_entry: int
    size_bytes: int
    """Sum of the payload sizes."""


class LedgerWriter(ABC):
    """The owner's end of one open ledger."""

    ledger_id: int
    durable: Signal
    """Advances when `last_durable` has moved on or the writer has failed, once per batch."""

    @property
    @abstractmethod
    def failure(self) -> StorageError | None:
        """Why an append failed: from that one on, all of them do."""

    @property
    @abstractmethod
    def last_durable(self) -> int:
        """Id of the last durable entry, NO_ENTRY if there is none yet."""

    @abstractmethod
    def append(self, payload: bytes) -> asyncio.Future[Position]:
        """Submit an entry now; the future resolves to its position once durable.

        Raises at once, with nothing submitted: LedgerFenced, LedgerClosed, the error with which
        an earlier append failed, TooManyRequests (the queue is full), InvalidArgument (too large).
        """

    @property
    @abstractmethod
    def run_bytes_max(self) -> int:
        """Bytes of payload that a run may have."""

    @abstractmethod
    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position]:
        """Submit entries that follow one another; the future resolves to the first one's position.

        All of them become durable, or none (promise 9). `size` is that of all payloads. Raises as
        `append` does, with nothing submitted: InvalidArgument also where the run is too large.
        """

    @abstractmethod
    async def close(self) -> LedgerInfo:
        """Wait for the appends submitted so far, then end the ledger."""


class LedgerStore(ABC):
    """All ledgers of one storage."""

    @abstractmethod
    async def create(self) -> LedgerWriter:
        """A new, empty ledger, durable, with its writer."""

    @abstractmethod
    async def info(self, ledger_id: int) -> LedgerInfo: ...

    @abstractmethod
    async def read(
        self, ledger_id: int, first: int, last: int, *, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        """Consecutive durable entries from `first` to at most `last`.

        At least one entry if `first` is durable, then as many more as are at hand and fit into
        `bytes_max`: a short answer does not mean the end. Beyond the last durable entry the
        answer is empty. A damaged entry ends the list before it; if it is the first, CorruptEntry
        is raised.
        """

    @abstractmethod
    async def fence(self, ledger_id: int) -> LedgerInfo:
        """Take the ledger from its writer for good. Fencing again is no error."""

    @abstractmethod
    async def close_ledger(self, ledger_id: int) -> LedgerInfo:
        """End a ledger whose writer is gone: fence it and mark it CLOSED."""

    @abstractmethod
    async def delete(self, ledger_id: int) -> None:
        """Remove a ledger, whatever its state; an absent one is no error."""

    @abstractmethod
    def list(self) -> AsyncGenerator[int, None]:
        """Ids of all ledgers, ascending."""

    @abstractmethod
    async def close(self) -> None:
        """Finish queued work and release every resource; writers are closed to new appends."""
