"""The home of metadata records: one SQLite database, written behind the journal.

Owns: the schema and every SQL statement. Durability is the journal's: SQLite runs in WAL mode
with `synchronous=NORMAL`, and `applied` says up to which journal record it holds everything, so
that a start replays the rest. All calls block; `apply` and `sync` run on one worker thread, reads
on the loop's own read-only connections.

Invariants:
1. `apply` is one transaction: records, their index entries and `applied` move together.
2. One connection does all writes and all checkpoints; readers never do either.
3. After `sync`, what was applied before it survives a power loss.

A whole batch is handed to SQLite as one JSON text and one blob, and taken apart by SQL: the
interpreter's lock is released for the whole statement. Row by row (`executemany`) the lock is
taken and given up per row, and a busy event loop then slows the writer a hundredfold (ADR 0003).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.metadata.api import Index
from magnetar.metadata.judge import StoredRecord, sequence_bounds
from magnetar.metadata.layers import Layer
from magnetar.runtime.disk import Database, Disk

SCHEMA_VERSION: Final = 1
# Reads run on the loop: a page bounds for how long nothing else does.
_PAGE_ROWS: Final = 256
_CACHE_KIB: Final = 32 * 1024

_SCHEMA: Final = (
    """CREATE TABLE records (
        parent TEXT NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL,
        created_ms INTEGER NOT NULL, modified_ms INTEGER NOT NULL, mods INTEGER NOT NULL,
        session INTEGER NOT NULL, indexes TEXT, PRIMARY KEY (parent, name)) WITHOUT ROWID""",
    "CREATE INDEX ephemerals ON records (session) WHERE session <> 0",
    """CREATE TABLE index_entries (
        index_name TEXT NOT NULL, index_key TEXT NOT NULL, parent TEXT NOT NULL,
        name TEXT NOT NULL, PRIMARY KEY (index_name, index_key, parent, name)) WITHOUT ROWID""",
    "CREATE TABLE progress (applied INTEGER NOT NULL)",
    "INSERT INTO progress VALUES (0)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

# ?1 is a JSON array; each of its rows names a record by (parent, name).
_DROP_OLD_INDEX_ENTRIES: Final = """
    DELETE FROM index_entries WHERE (index_name, index_key, parent, name) IN (
        SELECT entry.value ->> 0, entry.value ->> 1, old.parent, old.name
        FROM json_each(?1) AS row
        CROSS JOIN records AS old
            ON old.parent = row.value ->> 0 AND old.name = row.value ->> 1
        CROSS JOIN json_each(old.indexes) AS entry
        WHERE old.indexes IS NOT NULL)"""
_DELETE_RECORDS: Final = """
    DELETE FROM records WHERE (parent, name) IN (
        SELECT row.value ->> 0, row.value ->> 1 FROM json_each(?1) AS row)"""
# ?2 is all values joined, in the order of the rows, behind one byte that keeps it from being empty.
_PUT_RECORDS: Final = """
    INSERT OR REPLACE INTO records
    SELECT row.value ->> 0, row.value ->> 1,
        substr(?2, 2 + coalesce(sum(row.value ->> 2) OVER before, 0), row.value ->> 2),
        row.value ->> 3, row.value ->> 4, row.value ->> 5, row.value ->> 6, row.value ->> 7,
        row.value ->> 8
    FROM json_each(?1) AS row
    WINDOW before AS (ORDER BY row.key ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"""
_PUT_INDEX_ENTRIES: Final = """
    INSERT OR REPLACE INTO index_entries
    SELECT entry.value ->> 0, entry.value ->> 1, row.value ->> 0, row.value ->> 1
    FROM json_each(?1) AS row CROSS JOIN json_each(row.value ->> 8) AS entry
    WHERE row.value ->> 8 IS NOT NULL"""

_COLUMNS: Final = "value, version, created_ms, modified_ms, mods, session, indexes"
_GET: Final = f"SELECT {_COLUMNS} FROM records WHERE parent = ? AND name = ?"
_SCAN: Final = f"""SELECT name, {_COLUMNS} FROM records
    WHERE parent = ? AND name >= ? AND name < ? ORDER BY name LIMIT ?"""
_SCAN_TO_END: Final = f"""SELECT name, {_COLUMNS} FROM records
    WHERE parent = ? AND name >= ? ORDER BY name LIMIT ?"""
_LAST_NAMES: Final = """SELECT name FROM records
    WHERE parent = ? AND name >= ? AND name < ? ORDER BY name DESC LIMIT ? OFFSET ?"""
_HIGHEST_NAME: Final = """SELECT name FROM records
    WHERE parent = ? AND name >= ? AND name < ? ORDER BY name DESC LIMIT 1"""
_NAMES: Final = "SELECT name FROM records WHERE parent = ? LIMIT ?"
_SCAN_INDEX_TO_END: Final = f"""
    SELECT entry.index_key, parent, name, {_COLUMNS}
    FROM index_entries AS entry JOIN records USING (parent, name)
    WHERE index_name = ?1 AND (index_key, parent, name) > (?2, ?3, ?4)
    ORDER BY index_key, parent, name LIMIT {_PAGE_ROWS}"""
# An end that is part of the range: behind a condition that may be NULL, SQLite would look at every
# entry up to the end of the index.
_SCAN_INDEX: Final = _SCAN_INDEX_TO_END.replace("ORDER BY", "AND index_key <= ?5 ORDER BY")

_decode_indexes = msgspec.json.Decoder(tuple[Index, ...]).decode


class SqliteHome:
    """The writer's side, and the loop's own reader. `close` it after its worker has stopped."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._folder_synced = False
        self._idle: list[ReadConnection] = []
        self._check_version()
        self._writer = disk.database(path)
        try:
            self._prepare()
            self.reader = self._new_reader()
        except BaseException:
            self._writer.close()
            raise

    def _check_version(self) -> None:
        """Refuse a newer database, and leave it untouched.

        A connection that may write would fold SQLite's log into the database when it is closed.
        """
        rollback = self._path.with_name(self._path.name + "-journal")
        if not self._disk.exists(self._path) or self._disk.exists(rollback):
            # Not there, or its creation was cut short, which only a writer can undo.
            return
        with closing(self._disk.database(self._path, read_only=True)) as database:
            ((version,),) = database.execute("PRAGMA user_version")
        if version > SCHEMA_VERSION:
            raise FormatTooNew(f"{self._path} has schema {version}, this is {SCHEMA_VERSION}")

    def _prepare(self) -> None:
        ((version,),) = self._writer.execute("PRAGMA user_version")
        ((mode,),) = self._writer.execute("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise CorruptData(f"{self._path} cannot use a write-ahead log (it is in mode {mode})")
        # Commits do not sync and never checkpoint: `sync` does both, once per settling.
        self._writer.execute("PRAGMA synchronous = NORMAL")
        self._writer.execute("PRAGMA wal_autocheckpoint = 0")
        self._writer.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        # A new database. In one transaction: if it is cut short, the next start begins again.
        if version == 0:
            self._writer.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                self._writer.execute(statement)
            self._writer.execute("COMMIT")
            self.sync()

    @property
    def applied(self) -> int:
        """The last journal record that this database holds."""
        ((sequence,),) = self._writer.execute("SELECT applied FROM progress")
        return int(sequence)

    def apply(self, layer: Layer, applied: int) -> None:
        """Store the state of each key in the layer, up to journal record `applied`."""
        states = layer.states
        puts = _array(row for key, row in layer.rows.items() if states[key] is not None)
        deletes = _array(row for key, row in layer.rows.items() if states[key] is None)
        # `rows` and `states` are filled together, so the values come in the order of their rows.
        values = b"".join((b"\0", *(each.value for each in states.values() if each is not None)))
        write = self._writer.execute
        write("BEGIN IMMEDIATE")
        try:
            # While the old records are still there to name their index entries.
            for rows in (puts, deletes):
                write(_DROP_OLD_INDEX_ENTRIES, (rows,))
            write(_DELETE_RECORDS, (deletes,))
            write(_PUT_RECORDS, (puts, values))
            write(_PUT_INDEX_ENTRIES, (puts,))
            write("UPDATE progress SET applied = ?", (applied,))
            write("COMMIT")
        except BaseException:
            # After some errors (a full disk among them) SQLite has rolled back by itself.
            if self._writer.in_transaction:
                write("ROLLBACK")
            raise

    def sync(self) -> None:
        """Make everything applied durable, then fold the write-ahead log into the database.

        A checkpoint would sync the log too, but not while a scan holds it back.
        """
        log_path = self._path.with_name(self._path.name + "-wal")
        if self._disk.exists(log_path):
            log = self._disk.open(log_path)
            try:
                log.sync()
            finally:
                log.close()
        # The names of database and log; they stay the same, so once is enough.
        if not self._folder_synced:
            self._disk.sync_folder(self._path.parent)
            self._folder_synced = True
        # PASSIVE waits for no reader: what a scan holds back is left for the next time.
        self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def snapshot(self) -> Iterator[ReadConnection]:
        """A reader that sees the database as it is now, until the block ends."""
        reader = self._idle.pop() if self._idle else self._new_reader()
        try:
            with reader.pinned():
                yield reader
        except BaseException:
            # The state of its transaction is in doubt: it is not used again.
            reader.close()
            raise
        self._idle.append(reader)

    def _new_reader(self) -> ReadConnection:
        return ReadConnection(self._disk.database(self._path, read_only=True))

    def close(self) -> None:
        for reader in (self.reader, *self._idle):
            reader.close()
        self._writer.close()


class ReadConnection:
    """A read-only connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")

    @contextmanager
    def pinned(self) -> Iterator[None]:
        self._database.execute("BEGIN")
        # A transaction takes its snapshot at its first read, not at BEGIN.
        self._database.execute("SELECT applied FROM progress")
        try:
            yield
        finally:
            self._database.execute("COMMIT")

    def get(self, parent: str, name: str) -> StoredRecord | None:
        rows = self._database.execute(_GET, (parent, name))
        return _stored(rows[0]) if rows else None

    def scan(
        self, parent: str, start: str, end: str | None
    ) -> Iterator[list[tuple[str, StoredRecord]]]:
        """Pages of one directory, sorted by name."""
        while True:
            if end is None:
                rows = self._database.execute(_SCAN_TO_END, (parent, start, _PAGE_ROWS))
            else:
                rows = self._database.execute(_SCAN, (parent, start, end, _PAGE_ROWS))
            if rows:
                yield [(row[0], _stored(row[1:])) for row in rows]
            if len(rows) < _PAGE_ROWS:
                return
            # The lowest name above the last one: no name holds NUL.
            start = rows[-1][0] + "\0"

    def scan_index(
        self, index: str, low: str, high: str | None
    ) -> Iterator[list[tuple[str, str, StoredRecord]]]:
        """Pages of (index key, key, record), sorted by index key, then key."""
        # Below every entry of `low`, for no name is empty.
        after = (low, "", "")
        while True:
            if high is None:
                rows = self._database.execute(_SCAN_INDEX_TO_END, (index, *after))
            else:
                rows = self._database.execute(_SCAN_INDEX, (index, *after, high))
            if rows:
                yield [(row[0], f"{row[1]}/{row[2]}", _stored(row[3:])) for row in rows]
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1][:3]

    def highest_name(self, parent: str, prefix: str) -> str:
        """The highest name in a directory that begins so, "" if there is none."""
        # Every text is below every blob.
        end = f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}" if prefix else b""
        rows = self._database.execute(_HIGHEST_NAME, (parent, prefix, end))
        return str(rows[0][0]) if rows else ""

    def names(self, parent: str, most: int) -> list[str]:
        """All names in a directory, or so many of them."""
        return [name for (name,) in self._database.execute(_NAMES, (parent, most))]

    def names_downwards(self, parent: str, prefix: str) -> Iterator[str]:
        """Names that may be of the sequence `prefix`, highest first."""
        low, high = sequence_bounds(prefix)
        # One row first: nearly always the highest name is the one that is wanted.
        offset, rows = 0, 1
        while True:
            found = self._database.execute(_LAST_NAMES, (parent, low, high, rows, offset))
            yield from (name for (name,) in found)
            if len(found) < rows:
                return
            offset, rows = offset + rows, _PAGE_ROWS

    def ephemeral_keys(self) -> list[str]:
        rows = self._database.execute("SELECT parent, name FROM records WHERE session <> 0")
        return [f"{parent}/{name}" for parent, name in rows]

    def close(self) -> None:
        self._database.close()


def _stored(row: tuple[bytes, int, int, int, int, int, str | None]) -> StoredRecord:
    value, version, created_ms, modified_ms, mods, session, indexes = row
    entries = _decode_indexes(indexes) if indexes is not None else ()
    return StoredRecord(value, version, created_ms, modified_ms, mods, session, entries)


def _array(rows: Iterable[bytes]) -> str:
    return (b"[" + b",".join(rows) + b"]").decode()
