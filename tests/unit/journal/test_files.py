"""Journal files: made whole or not at all, and never taken from another store."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnetar.errors import CorruptData, DiskFull, FormatTooNew, StorageError, StorageFenced
from magnetar.journal.files import JournalFile, create_file, open_files
from magnetar.journal.format import FILE_HEADER_BYTES, FileHeader, encode_file_header
from magnetar.runtime.disk import LocalDisk
from tests.unit.journal.support import STORE, ScriptedDisk, batch, bodies_of, recovered
from tests.unit.journal.test_format import newer_header

SIZE = 3 * 1024 * 1024 + 512


def test_a_new_file_is_prefilled_and_unused(tmp_path: Path) -> None:
    file = create_file(LocalDisk(), tmp_path, 3, SIZE, STORE)
    assert file.header == FileHeader(0, 0, 0, STORE)
    file.close()
    path = tmp_path / "0003.journal"
    data = path.read_bytes()
    assert len(data) == SIZE
    assert not data[FILE_HEADER_BYTES:].strip(b"\0")
    assert path.stat().st_blocks * 512 >= SIZE, "its blocks are there: a batch needs no space"
    assert [each.name for each in tmp_path.iterdir()] == ["0003.journal"]


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path: Path, operation: str) -> None:
    disk = ScriptedDisk()
    disk.fail(operation, "*.new", DiskFull("no space"))
    with pytest.raises(DiskFull):
        create_file(disk, tmp_path, 0, SIZE, STORE)
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_are_removed_and_others_left(tmp_path: Path) -> None:
    (tmp_path / "0001.new").write_bytes(b"half")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    create_file(LocalDisk(), tmp_path, 0, 4096, STORE).close()
    files = open_files(LocalDisk(), tmp_path, STORE)
    assert [(file.path.name, file.size) for file in files] == [("0000.journal", 4096)]
    _close(files)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0000.journal", "notes.txt"]


def test_a_file_of_another_store_is_refused(tmp_path: Path) -> None:
    create_file(LocalDisk(), tmp_path, 0, 4096, STORE).close()
    create_file(LocalDisk(), tmp_path, 1, 4096, b"another store..!").close()
    before = (tmp_path / "0001.journal").read_bytes()
    with pytest.raises(StorageError, match=r"0001\.journal belongs to another store"):
        open_files(LocalDisk(), tmp_path, STORE)
    assert (tmp_path / "0001.journal").read_bytes() == before


def test_a_damaged_or_newer_file_is_refused_and_untouched(tmp_path: Path) -> None:
    create_file(LocalDisk(), tmp_path, 0, 4096, STORE).close()
    path = tmp_path / "0000.journal"
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"!" + whole[21:])
    with pytest.raises(CorruptData, match=r"0000\.journal"):
        open_files(LocalDisk(), tmp_path, STORE)
    path.write_bytes(b"")
    with pytest.raises(CorruptData, match=r"0000\.journal"):
        open_files(LocalDisk(), tmp_path, STORE)
    path.write_bytes(newer_header().ljust(4096, b"\0"))
    before = path.read_bytes()
    with pytest.raises(FormatTooNew):
        open_files(LocalDisk(), tmp_path, STORE)
    assert path.read_bytes() == before


def test_a_file_is_used_begun_anew_and_read_back(tmp_path: Path) -> None:
    file = create_file(LocalDisk(), tmp_path, 0, 8192, STORE)
    salts = set()
    for first in (1, 10):
        file.begin(first, first - 1)
        salts.add(file.header.salt)
        for n in range(3):
            data = batch([b"%d" % n], first + n, salt=file.header.salt)
            assert file.has_room(len(data))
            file.write_synced([data])
            file.end += len(data)
        assert bodies_of(recovered(file.read_all())) == [b"0", b"1", b"2"]
    assert len(salts) == 2
    assert file.has_room(8192 - 512 - 3 * 512)
    assert not file.has_room(8192 - 512 - 3 * 512 + 1)
    file.note_settled(11)
    assert bodies_of(recovered(file.read_all())) == [b"2"]
    file.close()


def test_the_new_header_is_durable_before_the_old_batches_go(tmp_path: Path) -> None:
    """Sectors of one write reach the disk in any order: the header has a sync of its own."""
    disk = ScriptedDisk()
    file = create_file(disk, tmp_path, 0, 8192, STORE)
    disk.done.clear()
    file.begin(1, 0)
    file.write_synced([batch([b"x"], 1, salt=file.header.salt)])
    assert [operation for operation, _ in disk.done] == ["write", "sync", "write", "sync"]
    file.close()


def test_a_failed_sync_is_final(tmp_path: Path) -> None:
    disk = ScriptedDisk()
    file = create_file(disk, tmp_path, 0, 8192, STORE)
    file.begin(1, 0)
    disk.fail("sync", "0000*", DiskFull("no space"))
    with pytest.raises(StorageFenced):
        file.write_synced([batch([b"x"], 1)])
    file.close()


def _close(files: list[JournalFile]) -> None:
    for file in files:
        file.close()


def test_an_unused_header_is_what_a_new_file_has(tmp_path: Path) -> None:
    create_file(LocalDisk(), tmp_path, 0, 4096, STORE).close()
    sector = (tmp_path / "0000.journal").read_bytes()[:FILE_HEADER_BYTES]
    assert sector == encode_file_header(FileHeader(0, 0, 0, STORE))
