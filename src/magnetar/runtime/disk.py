"""The disk, as the embedded backends see it: the one seam below which faults are simulated.

Owns: the `Disk` and `File` contracts and `LocalDisk`, the real one. All calls block; backends
call them on a `Worker`. Every `OSError` is translated here.

Invariants:
1. `File.write` writes all its buffers or raises; after a raise the range holds anything.
2. What `File.sync` returned for is on stable storage; what was only written is not.
3. A created, renamed or removed name is durable only after `Disk.sync_folder` of its folder.
4. A sector (512 bytes) is written whole or not at all; nothing larger is atomic.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from magnetar.errors import (
    CorruptData,
    DiskFailed,
    DiskFull,
    FolderInUse,
    OutOfDescriptors,
    StorageError,
)

SECTOR_BYTES = 512

# The kernel takes at most this many buffers in one pwritev.
_BUFFERS_PER_CALL = 1024
# Quotas and the largest file size are a lack of space, too: waiting and freeing can help.
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Not every file system can allocate without writing.
_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_ALLOCATE_BYTES = 1 << 20
# Of this process, or of the whole machine. The disk is sound, and no file was even opened.
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class SpaceLeft(NamedTuple):
    """The room of a file system."""

    free: int
    """Bytes that this process may still take."""
    total: int
    """0: it does not say."""


class File(Protocol):
    """One open file; offsets are explicit, so there is no shared cursor."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes at `offset`; fewer only at the end of the file."""
        ...

    def write(self, offset: int, buffers: Sequence[bytes]) -> None: ...

    def sync(self) -> None: ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Database(Protocol):
    """One SQLite connection in autocommit mode; used by one thread at a time."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run one statement and give all its rows."""
        ...

    def close(self) -> None: ...


class FolderLock(Protocol):
    """Held while a process has a folder open."""

    def release(self) -> None: ...


class Disk(Protocol):
    """The file system below one data folder."""

    def open(self, path: Path, *, create: bool = False) -> File: ...

    def exists(self, path: Path) -> bool: ...

    def list(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; an absent folder is empty."""
        ...

    def make_folder(self, folder: Path) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...

    def rename(self, old: Path, new: Path) -> None: ...

    def remove(self, path: Path) -> None:
        """Remove a file; an absent one is no error."""
        ...

    def database(self, path: Path, *, read_only: bool = False) -> Database: ...

    def lock(self, path: Path) -> FolderLock:
        """Take the exclusive lock or raise `FolderInUse` at once."""
        ...

    def space(self, folder: Path) -> SpaceLeft: ...

    def reserve(self, path: Path, size: int) -> int:
        """Give a file so many bytes that are taken for certain, none are holes; what it has now.

        Less if the file system has less; 0 removes it. What is in it means nothing.
        """
        ...


@contextmanager
def disk_errors(what: str, path: Path) -> Iterator[None]:
    """Translate what the operating system raises while doing `what` to `path`."""
    try:
        yield
    except OSError as error:
        raise translated(error, what, path) from error


def translated(error: OSError, what: str, path: Path) -> StorageError:
    """The error of our tree that says the same as this `OSError`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    text = f"cannot {what} {path}: {reason}"
    if error.errno in _NO_DESCRIPTORS:
        return OutOfDescriptors(text)
    return DiskFull(text) if error.errno in _NO_SPACE else DiskFailed(text)


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Give a file this content, durably: at any moment it is the old one or the new one, whole."""
    unfinished = path.with_name(f"{path.name}.new")
    # A file of that name is left from an attempt that died: its content counts for nothing.
    disk.remove(unfinished)
    file = disk.open(unfinished, create=True)
    try:
        file.write(0, [data])
        # Before the rename: else the new name could be durable, and its content not.
        file.sync()
    finally:
        file.close()
    disk.rename(unfinished, path)
    # Invariant 3: only now is it certain that the next start finds the new content.
    disk.sync_folder(path.parent)


class LocalFile:
    """A file of the operating system."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        with disk_errors("read", self._path):
            data = os.pread(self._descriptor, size, offset)
            # The common case, without a copy. A short read before the
            # end of a file is legal but rare.
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size and (data := os.pread(self._descriptor, size - got, offset + got)):
                parts.append(data)
                got += len(data)
            return b"".join(parts)

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        with disk_errors("write", self._path):
            for first in range(0, len(buffers), _BUFFERS_PER_CALL):
                chunk = buffers[first : first + _BUFFERS_PER_CALL]
                size = sum(map(len, chunk))
                written = os.pwritev(self._descriptor, chunk, offset)
                # The kernel may take a part, at a signal or a nearly full
                # disk; invariant 1 wants all of it.
                if written < size:
                    self._write_rest(offset + written, b"".join(chunk)[written:])
                offset += size

    def _write_rest(self, offset: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset += written
            data = data[written:]

    def sync(self) -> None:
        with disk_errors("sync", self._path):
            # Not fsync: times need not be durable, and the size is,
            # where it is needed to read the data.
            os.fdatasync(self._descriptor)

    def size(self) -> int:
        with disk_errors("measure", self._path):
            return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        with disk_errors("truncate", self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


class LocalDatabase:
    """A connection of the standard library's SQLite."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise database_error(self._path, error, error.sqlite_errorcode) from error

    def close(self) -> None:
        self._connection.close()


def database_error(path: Path, error: Exception, code: int) -> StorageError:
    """The error of our tree for an SQLite result code."""
    text = f"{path}: {error}"
    # The low byte is the kind; the rest says in which operation it happened.
    primary = code & 0xFF
    # The other one: its shared memory could not grow, which it tries before each transaction.
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return DiskFull(text)
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return CorruptData(text)
    # SQLite does not say why it cannot open one of its files.
    if primary == sqlite3.SQLITE_CANTOPEN and not _may_open():
        return OutOfDescriptors(text)
    return DiskFailed(text)


def _may_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in _NO_DESCRIPTORS
    return True


class _FileLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        os.close(self._descriptor)


class LocalDisk:
    """The operating system's file system."""

    def open(self, path: Path, *, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with disk_errors("open", path):
            return LocalFile(path, os.open(path, flags, 0o644))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def list(self, folder: Path) -> list[str]:
        with disk_errors("list", folder):
            try:
                return sorted(os.listdir(folder))
            except FileNotFoundError:
                return []

    def make_folder(self, folder: Path) -> None:
        with disk_errors("make folder", folder):
            # Invariant 3 holds for the name of a folder, too.
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                self.sync_folder(folder.parent)

    def sync_folder(self, folder: Path) -> None:
        with disk_errors("sync folder", folder):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        with disk_errors("rename", old):
            os.replace(old, new)

    def remove(self, path: Path) -> None:
        with disk_errors("remove", path):
            path.unlink(missing_ok=True)

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        # One thread at a time uses a connection, though not always the thread that opened it.
        mode = "ro" if read_only else "rwc"
        try:
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise database_error(path, error, error.sqlite_errorcode) from error
        return LocalDatabase(path, connection)

    def lock(self, path: Path) -> FolderLock:
        with disk_errors("lock", path):
            # The lock belongs to the open file: the kernel drops it
            # when the process dies, however it does.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            # Held by somebody: the one expected failure. All else is a broken disk.
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise FolderInUse(f"{path.parent} is open in another process") from error
            raise translated(error, "lock", path) from error
        return _FileLock(descriptor)

    def space(self, folder: Path) -> SpaceLeft:
        with disk_errors("measure", folder):
            found = os.statvfs(folder)
        return SpaceLeft(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def reserve(self, path: Path, size: int) -> int:
        if not size:
            self.remove(path)
            return 0
        with disk_errors("reserve", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    _allocate(descriptor, before, size)
                except OSError as error:
                    if error.errno not in _NO_SPACE:
                        raise
                    # What came of it may have holes: only what was there before counts.
                    os.ftruncate(descriptor, before)
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)


def _allocate(descriptor: int, before: int, size: int) -> None:
    """Let a file grow, or shrink, to a size without holes."""
    if size <= before:
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, before, size - before)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
        # What cannot be compressed: a file system that does so would keep zeros for nothing.
        for offset in range(before, size, _ALLOCATE_BYTES):
            os.pwrite(descriptor, os.urandom(min(_ALLOCATE_BYTES, size - offset)), offset)
        os.fsync(descriptor)
