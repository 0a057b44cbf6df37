"""The anchors: the least that a durable write costs on this disk, without any of our code.

Each loop writes batches of a given size and makes each durable before the next, as fast as it can:
what a server with perfect batching and no work of its own would reach.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
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


SCHEMA = (
    "CREATE TABLE records (parent TEXT, name TEXT, value BLOB, version INTEGER, created INTEGER,"
    " modified INTEGER, mods INTEGER, session INTEGER, indexes TEXT, PRIMARY KEY (parent, name))"
    " WITHOUT ROWID",
    "CREATE TABLE entries (name TEXT, key TEXT, parent TEXT, record TEXT,"
    " PRIMARY KEY (name, key, parent, record)) WITHOUT ROWID",
)


def sqlite_writer(path: Path) -> sqlite3.Connection:
    """A database of the columns that a metadata store needs, each commit synced."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", *SCHEMA):
        connection.execute(statement)
    return connection


def commit(connection: sqlite3.Connection, records: Sequence[tuple[str, str, bytes]]) -> None:
    """Put (name, index key, value) records, durably, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT OR REPLACE INTO records VALUES ('/bench', ?, ?, 1, 1, 1, 0, 0, ?)",
        [(name, value, f'[["by-key","{key}"]]') for name, key, value in records],
    )
    connection.executemany(
        "INSERT OR REPLACE INTO entries VALUES ('by-key', ?, '/bench', ?)",
        [(key, name) for name, key, _ in records],
    )
    connection.execute("COMMIT")


def sqlite_loop(
    folder: Path, value_bytes: int, records_per_commit: int, seconds: float
) -> list[float]:
    """Seconds of each durable SQLite commit of records with one index entry each."""
    path = folder / "bare.db"
    connection = sqlite_writer(path)
    value = os.urandom(value_bytes)
    times: list[float] = []
    count = 0
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        names = [f"{count + each:020d}" for each in range(records_per_commit)]
        commit(connection, [(name, name[-6:], value) for name in names])
        count += records_per_commit
        times.append(time.perf_counter() - start)
    connection.close()
    for suffix in ("", "-wal", "-shm"):
        (folder / f"bare.db{suffix}").unlink(missing_ok=True)
    return times
