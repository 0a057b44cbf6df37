"""The alternative that was weighed: metadata made durable by SQLite's own sync.

The same engine judges, shows and acknowledges; only the place of durability differs. Where the
product submits a change to the shared journal, this writes what has gathered straight into SQLite,
in one transaction that SQLite syncs, beside the journal's syncs for the ledgers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from magnetar.errors import StorageError
from magnetar.journal.format import RECORD_HEADER_BYTES
from magnetar.journal.journal import Journal
from magnetar.metadata.layers import Layer
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.sqlite_engine import SqliteMetadata
from magnetar.metadata.sqlite_home import SqliteHome
from magnetar.metadata.sqlite_rows import decode_body
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.disk import LocalDisk
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.runtime.worker import ThreadWorker

_UNAPPLIED = 10_000_000


class OwnSync:
    """What the engine needs of a journal, on SQLite with `synchronous=FULL`."""

    def __init__(self, folder: Path) -> None:
        disk = LocalDisk()
        self.home = SqliteHome(folder / "own-sync.db", disk)
        self.home._writer.execute("PRAGMA synchronous = FULL")  # the one difference
        self.progress = Signal()
        self.synced = 0
        self.refusals = 0
        self.failure: StorageError | None = None
        self.next_sequence = 1
        self._queue: list[bytes] = []
        self._wake = asyncio.Event()
        self._worker = ThreadWorker("own-sync")
        self._task = asyncio.create_task(self._commit())

    def append(self, record: bytes) -> int:
        self._queue.append(record)
        self._wake.set()
        self.next_sequence += 1
        return self.next_sequence - 1

    async def _commit(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queue = self._queue, []
            layer = Layer()
            for record in batch:
                layer.set(*decode_body(record[RECORD_HEADER_BYTES:]))
            synced = self.synced + len(batch)
            await self._worker.run(self.home.apply, layer, synced)
            self.synced = synced
            self.progress.advance()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._worker.close()


class OwnSyncMetadata:
    """A metadata store of its own beside the storage under test."""

    async def open(self, folder: Path) -> SqliteStore:
        self._journal = OwnSync(folder)
        # What is durable is in SQLite already: the engine must not move it there a second time.
        limits = Limits(metadata_apply_records=_UNAPPLIED, metadata_unapplied_records=_UNAPPLIED)
        self._engine = SqliteMetadata(
            self._journal.home,
            cast("Journal", self._journal),
            ThreadWorker("own-sync-engine"),
            SystemClock(),
            limits,
        )
        await self._engine.start()
        return SqliteStore(self._engine, 1)

    async def close(self) -> None:
        await self._journal.close()
        await self._engine.close()
