"""Formats: the golden folders of version 1 still open; what is newer is refused and untouched."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
from crc32c import crc32c

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.journal.format import FORMAT_VERSION as JOURNAL_FORMAT
from magnetar.ledger.file_format import FORMAT_VERSION as LEDGER_FORMAT
from magnetar.metadata.sqlite_home import SCHEMA_VERSION
from magnetar.server.embedded import STORE_FORMAT, open_storage
from tests.recovery.stores import GOLDEN, SMALL, content, expected_content, hashes

JOURNAL_HEADER_BYTES = 52
LEDGER_HEADER_BYTES = 40
SECTOR = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a golden folder that was closed cleanly."""
    return Path(shutil.copytree(GOLDEN / "clean", tmp_path / "store"))


@pytest.mark.parametrize("kind", ["clean", "unreplayed"])
def test_golden_folder_opens(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / kind, tmp_path / kind))

    async def read_twice() -> None:
        for is_first in (True, False):
            storage = await open_storage(folder, limits=SMALL)
            try:
                assert await content(storage) == expected_content()
                if is_first:
                    assert bool(storage.recovered_records) is (kind == "unreplayed")
            finally:
                await storage.close()

    asyncio.run(read_twice())


def test_format_is_of_this_version() -> None:
    """A format that changes needs a new golden folder, and the old one must still open."""
    versions = (STORE_FORMAT, JOURNAL_FORMAT, LEDGER_FORMAT, SCHEMA_VERSION)
    assert versions == (1, 1, 1, 1)


def test_newer_store_is_refused(folder: Path) -> None:
    path = folder / "FORMAT"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": STORE_FORMAT + 1}))
    _assert_refused(folder, f"has store format {STORE_FORMAT + 1}, this is {STORE_FORMAT}")


def test_newer_journal_is_refused(folder: Path) -> None:
    path = next((folder / "journal").glob("*.journal"))
    _set_version(path, JOURNAL_HEADER_BYTES, copies=1)
    _assert_refused(folder, f"{path} has journal format {JOURNAL_FORMAT + 1}")


def test_newer_database_is_refused(folder: Path) -> None:
    path = folder / "metadata" / "records.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    assert not path.with_name("records.db-wal").exists()
    _assert_refused(folder, f"{path} has schema {SCHEMA_VERSION + 1}")


def test_newer_database_with_an_open_end_is_refused(folder: Path) -> None:
    """The newer version was killed: its changes are in SQLite's log, and stay there."""
    path = folder / "metadata" / "records.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        killed = folder.with_name("killed")
        shutil.copytree(folder, killed, ignore=shutil.ignore_patterns("*-shm"))
    assert (killed / "metadata" / "records.db-wal").stat().st_size
    _assert_refused(killed, f"has schema {SCHEMA_VERSION + 1}")


def test_newer_ledger_is_refused_and_the_others_are_read(folder: Path) -> None:
    path, *others = sorted((folder / "ledgers").rglob("*.ledger"))
    _set_version(path, LEDGER_HEADER_BYTES, copies=2)
    before = path.read_bytes()

    async def read() -> None:
        storage = await open_storage(folder, limits=SMALL)
        try:
            with pytest.raises(FormatTooNew, match=re.escape(str(path))):
                await storage.ledgers.read(int(path.stem), 0, 1)
            for other in others:
                assert len(await storage.ledgers.read(int(other.stem), 0, 1)) == 2
        finally:
            await storage.close()

    asyncio.run(read())
    assert path.read_bytes() == before


def test_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(CorruptData, match=r"no FORMAT file but holds letter\.txt"):
        asyncio.run(open_storage(tmp_path, limits=SMALL))
    assert (tmp_path / "letter.txt").read_text() == "dear reader"


def test_journal_of_another_store_is_refused(folder: Path, tmp_path: Path) -> None:
    async def make_another() -> None:
        await (await open_storage(tmp_path / "another", limits=SMALL)).close()

    asyncio.run(make_another())
    shutil.rmtree(folder / "journal")
    shutil.copytree(tmp_path / "another" / "journal", folder / "journal")
    before = hashes(folder)
    with pytest.raises(Exception, match="belongs to another store"):
        asyncio.run(open_storage(folder, limits=SMALL))
    assert hashes(folder) == before


def _assert_refused(folder: Path, message: str) -> None:
    before = hashes(folder)
    with pytest.raises(FormatTooNew, match=re.escape(message)):
        asyncio.run(open_storage(folder, limits=SMALL))
    assert hashes(folder) == before


def _set_version(path: Path, header_bytes: int, *, copies: int) -> None:
    """Give a file the next version number, with checksums that fit."""
    data = bytearray(path.read_bytes())
    for start in range(0, copies * SECTOR, SECTOR):
        (version,) = struct.unpack_from("<H", data, start + 8)
        struct.pack_into("<H", data, start + 8, version + 1)
        checksum = crc32c(bytes(data[start : start + header_bytes]))
        struct.pack_into("<I", data, start + header_bytes, checksum)
    path.write_bytes(data)
