"""SQLite whose every write and sync is reported, and can be made to fail.

Owns: `ReportingVfs`, a file system for SQLite that does what the operating system's does, after
telling a listener of it, and `ReportedDatabase`, a `runtime.disk.Database` on it. Simulations and
the power-loss harness use it; it needs `apsw`, a development dependency.

Invariants:
1. The listener hears of every change of a database, its log and its rollback journal before it is
   done, in order. What the listener raises is what the operation fails with: an `OSError` as
   SQLite's code for it, anything else as itself.
2. The shared-memory file (`-shm`) is not reported: it holds nothing that lasts.
3. Once stopped, nothing is reported any more: connections may be closed without a trace.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from magnetar.errors import StorageError
from magnetar.runtime.disk import database_error

_NUMBERS = itertools.count(1)
_BASE: Final = "unix"
_JOURNALS: Final = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL


class ChangeListener(Protocol):
    """The listener that is told of changes. Paths are those of the real files."""

    def opened(self, path: Path) -> None:
        """The file is opened and made if it is not there yet."""
        ...

    def write(self, path: Path, offset: int, data: bytes) -> None: ...

    def truncate(self, path: Path, size: int) -> None: ...

    def sync(self, path: Path) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...

    def remove(self, path: Path) -> None: ...


class ReportingVfs:
    """A file system for SQLite, registered under a name of its own until `close`."""

    def __init__(self, listener: ChangeListener) -> None:
        self.name = f"reporting-{next(_NUMBERS)}"
        self.stopped = False
        self.failure: BaseException | None = None
        """What the listener raised in the statement that runs, if SQLite has no code for it."""
        self._listener = listener
        self._vfs: _Vfs | None = _Vfs(self)

    def connect(self, path: Path, shown: Path, *, read_only: bool = False) -> ReportedDatabase:
        """Open a database; `shown` is its name in errors."""
        flags = apsw.SQLITE_OPEN_READONLY
        if not read_only:
            flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        self.failure = None
        try:
            return ReportedDatabase(self, shown, apsw.Connection(str(path), flags, self.name))
        except apsw.Error as error:
            raise self.translated(shown, error) from error

    def close(self) -> None:
        """Every connection must be closed by now."""
        if self._vfs is not None:
            self._vfs.unregister()
            self._vfs = None

    def translated(self, path: Path, error: apsw.Error) -> BaseException:
        # What the listener raised says more than SQLite's code for "some error in a callback".
        if self.failure is not None:
            return self.failure
        code: int = getattr(error, "extendedresult", apsw.SQLITE_ERROR)
        return database_error(path, error, code)

    def report(self, code: int, tell: Callable[[ChangeListener], None]) -> None:
        """Tell the listener; what it raises becomes an error that SQLite understands."""
        # Invariant 3: clearing up after a crash is no change of the disk.
        if self.stopped:
            return
        try:
            tell(self._listener)
        except OSError as error:
            # A full disk has a code of its own, which comes back as `DiskFull`.
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise apsw.exception_for(apsw.SQLITE_FULL if full else code) from error
        except BaseException as error:
            # A crash is no error that SQLite knows: it gets a code, and the caller gets the crash.
            self.failure = error
            raise apsw.exception_for(code) from error


class ReportedDatabase:
    """One connection."""

    def __init__(self, vfs: ReportingVfs, path: Path, connection: apsw.Connection) -> None:
        self._vfs = vfs
        self._path = path
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        self._vfs.failure = None
        try:
            rows: list[Any] = self._connection.execute(sql, tuple(parameters)).fetchall()
        except apsw.Error as error:
            raise self._vfs.translated(self._path, error) from error
        if self._vfs.failure is not None:
            raise self._vfs.failure  # SQLite could do without what failed
        return rows

    def close(self) -> None:
        self._vfs.failure = None
        try:
            self._connection.close()
        except apsw.Error as error:
            failure = self._vfs.translated(self._path, error)
            # The checkpoint at the end is a courtesy: the log stays and is read at the next start.
            if not isinstance(failure, StorageError):
                raise failure from error
        if self._vfs.failure is not None:
            raise self._vfs.failure


class _Vfs(apsw.VFS):
    def __init__(self, owner: ReportingVfs) -> None:
        self._owner = owner
        super().__init__(owner.name, _BASE)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        if name is None:
            return apsw.VFSFile(_BASE, name, flags)  # a temporary file, gone when closed
        path = Path(name if isinstance(name, str) else name.filename())
        # Reported before it is done (invariant 1), so that a refusal leaves no file behind.
        if flags[0] & apsw.SQLITE_OPEN_CREATE:
            self._owner.report(apsw.SQLITE_CANTOPEN, lambda to: to.opened(path))
        return _VfsFile(self._owner, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        path = Path(filename)
        # SQLite may delete what is not there; that is no change of the disk.
        if path.exists():
            self._owner.report(apsw.SQLITE_IOERR_DELETE, lambda to: to.remove(path))
        super().xDelete(filename, syncdir)
        if syncdir:
            parent = path.parent
            self._owner.report(apsw.SQLITE_IOERR_DIR_FSYNC, lambda to: to.sync_folder(parent))


class _VfsFile(apsw.VFSFile):
    def __init__(
        self,
        owner: ReportingVfs,
        path: Path,
        name: str | apsw.URIFilename | None,
        flags: list[int],
    ) -> None:
        self._owner = owner
        self._path = path
        # The first sync of a new journal also syncs its folder, as the operating system's does.
        self._folder_unsynced = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)
        super().__init__(_BASE, name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        # The buffer is SQLite's and is used again once this returns.
        copy = bytes(data)
        self._owner.report(apsw.SQLITE_IOERR_WRITE, lambda to: to.write(self._path, offset, copy))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._owner.report(apsw.SQLITE_IOERR_TRUNCATE, lambda to: to.truncate(self._path, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        self._owner.report(apsw.SQLITE_IOERR_FSYNC, lambda to: to.sync(self._path))
        if self._folder_unsynced:
            parent = self._path.parent
            self._owner.report(apsw.SQLITE_IOERR_DIR_FSYNC, lambda to: to.sync_folder(parent))
            self._folder_unsynced = False
        super().xSync(flags)
