"""The alternative that was weighed: metadata made durable by SQLite's own sync.

A group commit like the journal's (what has gathered goes into the next transaction), but each
transaction is synced by SQLite, beside the journal's syncs. Only the bench uses it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from magnetar.runtime.worker import ThreadWorker


class OwnSyncStore:
    """Puts with one index entry each, durable when their future resolves."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"
        )
        self._connection.execute(
            "CREATE TABLE entries (name TEXT, key TEXT, record TEXT,"
            " PRIMARY KEY (name, key, record)) WITHOUT ROWID"
        )
        self._worker = ThreadWorker("own-sync")
        self._queue: list[tuple[str, str, bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._commit())

    def put(self, key: str, index_key: str, value: bytes) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((key, index_key, value, future))
        self._wake.set()
        return future

    async def _commit(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queue = self._queue, []
            await self._worker.run(self._write, batch)
            for *_, future in batch:
                future.set_result(None)

    def _write(self, batch: list[tuple[str, str, bytes, asyncio.Future[None]]]) -> None:
        execute = self._connection
        execute.execute("BEGIN IMMEDIATE")
        execute.executemany(
            "INSERT OR REPLACE INTO records VALUES (?, ?)",
            [(key, value) for key, _, value, _ in batch],
        )
        execute.executemany(
            "INSERT OR REPLACE INTO entries VALUES ('by-key', ?, ?)",
            [(index_key, key) for key, index_key, _, _ in batch],
        )
        execute.execute("COMMIT")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._worker.close()
        self._connection.close()
