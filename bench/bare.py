"""The anchors: the least that a durable write costs on this disk, without any of our code.

Each loop writes batches of a given size and makes each durable before the next, as fast as it can:
what a server with perfect batching and no work of its own would reach.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

SECTOR_BYTES = 512
FILE_BYTES = 32 * 1024 * 1024


def sync_loop(folder: Path, entry_bytes: int, entries_per_sync: int, seconds: float) -> list[float]:
    """Seconds of each write and fdatasync into a prefilled file that is used again and again."""
    size = -(-entry_bytes * entries_per_sync // SECTOR_BYTES) * SECTOR_BYTES
    path = folder / "bare"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        length = max(FILE_BYTES, size)
        os.pwrite(descriptor, bytes(length), 0)
        os.fdatasync(descriptor)
        data = os.urandom(size)
        times: list[float] = []
        offset = 0
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            if offset + size > length:
                offset = 0
            os.pwrite(descriptor, data, offset)
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - start)
            offset += size
        return times
    finally:
        os.close(descriptor)
        path.unlink()


def sqlite_loop(
    folder: Path, value_bytes: int, records_per_commit: int, seconds: float
) -> list[float]:
    """Seconds of each durable SQLite commit of records with one index entry each."""
    path = folder / "bare.db"
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in (
        "PRAGMA journal_mode = WAL",
        "PRAGMA synchronous = FULL",
        "CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
        "CREATE TABLE entries (name TEXT, key TEXT, record TEXT, PRIMARY KEY (name, key, record))"
        " WITHOUT ROWID",
    ):
        connection.execute(statement)
    value = os.urandom(value_bytes)
    times: list[float] = []
    count = 0
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        keys = [f"/bench/{count + each:020d}" for each in range(records_per_commit)]
        count += records_per_commit
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            "INSERT OR REPLACE INTO records VALUES (?, ?)", [(key, value) for key in keys]
        )
        connection.executemany(
            "INSERT OR REPLACE INTO entries VALUES ('by-key', ?, ?)",
            [(key[-6:], key) for key in keys],
        )
        connection.execute("COMMIT")
        times.append(time.perf_counter() - start)
    connection.close()
    for suffix in ("", "-wal", "-shm"):
        (folder / f"bare.db{suffix}").unlink(missing_ok=True)
    return times
