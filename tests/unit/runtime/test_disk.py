"""The local disk: files, names, locks, databases, and errors in the words of our tree."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from magnetar.errors import (
    CorruptData,
    DiskFailed,
    DiskFull,
    FolderInUse,
    OutOfDescriptors,
    StorageError,
)
from magnetar.runtime.disk import LocalDisk, database_error, disk_errors, translated

DISK = LocalDisk()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EFBIG, DiskFull),
        (errno.EMFILE, OutOfDescriptors),
        (errno.ENFILE, OutOfDescriptors),
        (errno.EIO, DiskFailed),
        (errno.EACCES, DiskFailed),
        (errno.EROFS, DiskFailed),
    ],
)
def test_errors_of_the_system_are_translated(number: int, kind: type[StorageError]) -> None:
    error = translated(OSError(number, os.strerror(number)), "write", Path("a-file"))
    assert type(error) is kind
    assert "cannot write a-file" in str(error)
    assert os.strerror(number) in str(error)
    with pytest.raises(kind) as caught, disk_errors("sync", Path("x")):
        raise OSError(number, "whatever")
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(ValueError, match="not of the disk"), disk_errors("sync", Path("x")):
        raise ValueError("not of the disk")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, DiskFull),
        (sqlite3.SQLITE_CORRUPT, CorruptData),
        (sqlite3.SQLITE_CORRUPT_VTAB, CorruptData),
        (sqlite3.SQLITE_NOTADB, CorruptData),
        (sqlite3.SQLITE_IOERR_WRITE, DiskFailed),
        (sqlite3.SQLITE_BUSY, DiskFailed),
    ],
)
def test_errors_of_sqlite_are_translated(code: int, kind: type[StorageError]) -> None:
    error = database_error(Path("records.db"), sqlite3.OperationalError("says why"), code)
    assert type(error) is kind
    assert "records.db: says why" in str(error)


def test_a_file_is_written_and_read_at_offsets(tmp_path: Path) -> None:
    file = DISK.open(tmp_path / "f", create=True)
    file.write(5, [b"abc", b"", b"def"])
    assert (file.size(), file.read(0, 100)) == (11, b"\0" * 5 + b"abcdef")
    assert file.read(7, 2) == b"cd"
    assert file.read(11, 5) == b""
    many = [b"%05d" % n for n in range(3000)]  # more buffers than one call takes
    file.write(2, many)
    assert file.read(2, 15_000) == b"".join(many)
    file.sync()
    file.truncate(4)
    assert file.size() == 4
    file.close()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_write, whole_read = os.pwrite, os.pread

    def short_writev(descriptor: int, buffers: list[bytes], offset: int) -> int:
        return whole_write(descriptor, b"".join(buffers)[:3], offset)

    monkeypatch.setattr(os, "pwritev", short_writev)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole_write(fd, data[:2], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: whole_read(fd, min(size, 4), at))
    file = DISK.open(tmp_path / "f", create=True)
    file.write(1, [b"0123", b"456789"])
    assert file.read(0, 50) == b"\x000123456789"
    file.close()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match="cannot open"):
        DISK.open(tmp_path / "absent")
    assert not DISK.exists(tmp_path / "absent")
    DISK.remove(tmp_path / "absent")
    assert DISK.list(tmp_path / "absent") == []


def test_names(tmp_path: Path) -> None:
    DISK.make_folder(tmp_path / "a" / "b")
    DISK.make_folder(tmp_path / "a" / "b")
    for name in ("z", "y"):
        DISK.open(tmp_path / "a" / name, create=True).close()
    DISK.rename(tmp_path / "a" / "z", tmp_path / "a" / "x")
    DISK.sync_folder(tmp_path / "a")
    assert DISK.list(tmp_path / "a") == ["b", "x", "y"]
    DISK.remove(tmp_path / "a" / "x")
    assert DISK.list(tmp_path / "a") == ["b", "y"]
    with pytest.raises(DiskFailed, match="cannot rename"):
        DISK.rename(tmp_path / "none", tmp_path / "other")


def test_a_lock_is_exclusive_and_can_be_given_back(tmp_path: Path) -> None:
    lock = DISK.lock(tmp_path / "LOCK")
    with pytest.raises(FolderInUse, match="open in another process"):
        DISK.lock(tmp_path / "LOCK")
    lock.release()
    DISK.lock(tmp_path / "LOCK").release()


def test_databases(tmp_path: Path) -> None:
    path = tmp_path / "with space?.db"
    database = DISK.database(path)
    database.execute("CREATE TABLE t (n INTEGER)")
    assert not database.in_transaction
    database.execute("BEGIN")
    database.execute("INSERT INTO t VALUES (?)", (1,))
    assert database.in_transaction
    database.execute("COMMIT")
    reader = DISK.database(path, read_only=True)
    assert reader.execute("SELECT n FROM t") == [(1,)]
    with pytest.raises(DiskFailed, match="readonly"):
        reader.execute("INSERT INTO t VALUES (2)")
    reader.close()
    database.close()
    with pytest.raises(StorageError):
        DISK.database(tmp_path / "absent.db", read_only=True)


def test_a_reserve_takes_its_space_for_certain(tmp_path: Path) -> None:
    disk, path = LocalDisk(), tmp_path / "RESERVE"
    assert disk.reserve(path, 1 << 20) == 1 << 20
    assert path.stat().st_blocks * 512 >= 1 << 20, "it has no holes"
    assert disk.reserve(path, 2 << 20) == path.stat().st_size == 2 << 20
    assert disk.reserve(path, 1 << 19) == path.stat().st_size == 1 << 19
    assert disk.reserve(path, 0) == 0
    assert not path.exists()


def test_a_file_system_that_cannot_allocate_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "RESERVE"
    assert LocalDisk().reserve(path, (1 << 20) + 5) == (1 << 20) + 5
    assert path.stat().st_blocks * 512 >= 1 << 20


def test_a_reserve_that_does_not_fit_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, path = LocalDisk(), tmp_path / "RESERVE"
    disk.reserve(path, 4096)

    def half(descriptor: int, offset: int, size: int) -> None:
        os.ftruncate(descriptor, offset + size // 2)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", half)
    assert disk.reserve(path, 1 << 20) == path.stat().st_size == 4096


def test_space_is_what_the_file_system_says(tmp_path: Path) -> None:
    space = LocalDisk().space(tmp_path)
    assert 0 <= space.free <= space.total
    with pytest.raises(StorageError):
        LocalDisk().space(tmp_path / "missing")


def test_shared_memory_of_sqlite_without_space_is_a_full_disk() -> None:
    error = database_error(Path("db"), Exception("disk I/O error"), sqlite3.SQLITE_IOERR_SHMSIZE)
    assert isinstance(error, DiskFull)
