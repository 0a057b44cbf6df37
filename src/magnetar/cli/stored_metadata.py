"""The metadata database of a data folder, looked at from outside.

Owns: the checks that a closed (or settled) database is whole and that its indexes agree with its
records both ways. It reads the file with a connection of its own and changes nothing.

Relies on: the schema of `metadata.sqlite_home`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from magnetar.errors import CorruptData
from magnetar.runtime.disk import Disk

_ROWS_SHOWN: Final = 20

# Both directions are needed: a missing entry hides a record from searches,
# and one too many finds a record that does not have the key.
_WITHOUT_ENTRY: Final = f"""
    SELECT record.parent || '/' || record.name, entry.value ->> 0, entry.value ->> 1
    FROM records AS record, json_each(record.indexes) AS entry
    WHERE record.indexes IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM index_entries AS found
        WHERE found.index_name = entry.value ->> 0 AND found.index_key = entry.value ->> 1
            AND found.parent = record.parent AND found.name = record.name)
    LIMIT {_ROWS_SHOWN}"""
_WITHOUT_RECORD: Final = f"""
    SELECT found.parent || '/' || found.name, found.index_name, found.index_key
    FROM index_entries AS found
    WHERE NOT EXISTS (
        SELECT 1 FROM records AS record, json_each(record.indexes) AS entry
        WHERE record.parent = found.parent AND record.name = found.name
            AND entry.value ->> 0 = found.index_name AND entry.value ->> 1 = found.index_key)
    LIMIT {_ROWS_SHOWN}"""


@dataclass(frozen=True, slots=True)
class StoredMetadata:
    """The content of the metadata database in numbers, and what is wrong with it."""

    records: int
    index_entries: int
    mismatches: tuple[str, ...]
    """Index entries without their record and records without their index entry; not all of many."""


def database_path(folder: Path) -> Path:
    return folder / "metadata" / "records.db"


def look_at_metadata(folder: Path, disk: Disk) -> StoredMetadata:
    """Check the database of a data folder. Raises CorruptData if SQLite finds it damaged."""
    path = database_path(folder)
    database = disk.database(path, read_only=True)
    try:
        # Pages and rows, but not SQLite's own indexes: quick even for a large database.
        ((verdict,), *_) = database.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise CorruptData(f"{path} is damaged: {verdict}")
        ((records,),) = database.execute("SELECT count(*) FROM records")
        ((entries,),) = database.execute("SELECT count(*) FROM index_entries")
        missing = [
            f"record {key} lacks its entry {name}={value}"
            for key, name, value in database.execute(_WITHOUT_ENTRY)
        ]
        left_over = [
            f"entry {name}={value} names {key}, which does not have it"
            for key, name, value in database.execute(_WITHOUT_RECORD)
        ]
    finally:
        database.close()
    return StoredMetadata(records, entries, (*missing, *left_over))
