"""Named places at which a process of the crash tests kills itself.

Owns: the table of crash points and `CrashingDisk`, the local disk that sends SIGKILL to its own
process at the n-th time that a point is passed. Nothing of this is in the storage code: a point
is a call that crosses the `Disk` contract, before or after it is made, or half way (`torn`).

What a killed process wrote stays in the page cache: kills find wrong orders of operations and
wrong recoveries, not a missing sync. Power cuts (`crash_cuts`) find those.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from magnetar.runtime.disk import Database, File, FolderLock, LocalDisk, SpaceLeft


class CrashPoint(NamedTuple):
    """One row of the table."""

    name: str
    often: int
    """A process of the crash tests passes the point at least about so many times."""
    meaning: str


CRASH_POINTS: Final = (
    CrashPoint("before:write:journal", 60, "a batch is complete in memory only"),
    CrashPoint("torn:write:journal", 60, "half of a batch is written"),
    CrashPoint("after:write:journal", 60, "a batch is written and not synced"),
    CrashPoint("before:sync:journal", 60, "as above, one call later"),
    CrashPoint("after:sync:journal", 60, "a batch is durable, nobody was told"),
    CrashPoint("before:create:journal", 1, "a journal file is about to be made"),
    CrashPoint("torn:fill:journal", 1, "a new journal file is half full of zeros"),
    CrashPoint("before:rename:journal", 1, "a new journal file is durable without its name"),
    CrashPoint("after:rename:journal", 1, "its name is not synced"),
    CrashPoint("before:folder-sync:journal", 1, "as above, one call later"),
    CrashPoint("after:folder-sync:journal", 1, "a new journal file is ready, unused"),
    CrashPoint("before:create:ledger", 10, "a ledger has no file yet"),
    CrashPoint("after:create:ledger", 10, "a ledger has an empty file"),
    CrashPoint("torn:write:ledger", 30, "half of a ledger's entries or header is in its file"),
    CrashPoint("after:write:ledger", 30, "entries are in the ledger's file, not in its index"),
    CrashPoint("torn:write:index", 30, "half of the index slots are written"),
    CrashPoint("after:write:index", 30, "entries and index are written, not synced"),
    CrashPoint("before:sync:ledger", 30, "some ledgers of a move are synced, others not"),
    CrashPoint("after:sync:ledger", 30, "a ledger's entries are synced, its index is not"),
    CrashPoint("before:folder-sync:ledger", 10, "a new ledger's name is not synced"),
    CrashPoint("after:folder-sync:ledger", 10, "a move is done, the journal knows nothing of it"),
    CrashPoint("before:remove:ledger", 3, "a deleted ledger's files are still there"),
    CrashPoint("after:remove:ledger", 3, "its index is still there"),
    CrashPoint("after:remove:index", 3, "both are gone, the folder is not synced"),
    CrashPoint("before:database-apply", 10, "SQLite holds a transaction that is not committed"),
    CrashPoint("after:database-apply", 10, "changes are in SQLite's log, not synced"),
    CrashPoint("before:database-sync", 10, "as above, one call later"),
    CrashPoint("after:database-sync", 10, "SQLite's log is synced, not folded in"),
    CrashPoint("after:checkpoint", 10, "SQLite's log is folded in, the journal not released"),
    CrashPoint("before:rename:format", 1, "a new store has no FORMAT file"),
    CrashPoint("after:rename:format", 1, "a new store has its FORMAT file and nothing else"),
)

_AREAS: Final = {
    ".journal": "journal",
    ".new": "journal",
    ".ledger": "ledger",
    ".index": "index",
    ".db-wal": "database",
}


class CrashCount:
    """Counts how often the chosen point is passed, and kills at the n-th time."""

    def __init__(self, point: str, nth: int) -> None:
        if point not in {each.name for each in CRASH_POINTS}:
            raise ValueError(f"there is no crash point {point!r}")
        self._point = point
        self._left = nth
        self._lock = threading.Lock()

    def passed(self, point: str) -> None:
        if self.is_due(point):
            kill_self()

    def is_due(self, point: str) -> bool:
        """Whether the process must die here."""
        if point != self._point:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashingFile:
    """A file whose calls pass crash points."""

    def __init__(self, file: File, area: str, count: CrashCount, *, filling: bool) -> None:
        self._file = file
        self._area = area
        self._count = count
        self._filling = filling
        """It is a new journal file; until it has its name its writes only fill it."""

    def read(self, offset: int, size: int) -> bytes:
        return self._file.read(offset, size)

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        verb = "fill" if self._filling else "write"
        self._count.passed(f"before:{verb}:{self._area}")
        if self._count.is_due(f"torn:{verb}:{self._area}"):
            whole = b"".join(buffers)
            self._file.write(offset, [whole[: len(whole) // 2]])
            kill_self()
        self._file.write(offset, buffers)
        self._count.passed(f"after:{verb}:{self._area}")

    def sync(self) -> None:
        point = "database-sync" if self._area == "database" else f"sync:{self._area}"
        if not self._filling:
            self._count.passed(f"before:{point}")
        self._file.sync()
        if not self._filling:
            self._count.passed(f"after:{point}")
        self._filling = False

    def size(self) -> int:
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class CrashingDatabase:
    """A connection whose commits and checkpoints pass crash points."""

    def __init__(self, database: Database, count: CrashCount) -> None:
        self._database = database
        self._count = count

    @property
    def in_transaction(self) -> bool:
        return self._database.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        commits = sql == "COMMIT"
        if commits:
            self._count.passed("before:database-apply")
        rows = self._database.execute(sql, parameters)
        if commits:
            self._count.passed("after:database-apply")
        elif "wal_checkpoint" in sql:
            self._count.passed("after:checkpoint")
        return rows

    def close(self) -> None:
        self._database.close()


class CrashingDisk:
    """The local disk, with crash points."""

    def __init__(self, count: CrashCount) -> None:
        self._disk = LocalDisk()
        self._count = count

    def open(self, path: Path, *, create: bool = False) -> File:
        area = _area(path)
        creates = create and not self._disk.exists(path)
        if creates:
            self._count.passed(f"before:create:{area}")
        file = self._disk.open(path, create=create)
        if creates:
            self._count.passed(f"after:create:{area}")
        return CrashingFile(file, area, self._count, filling=path.suffix == ".new")

    def exists(self, path: Path) -> bool:
        return self._disk.exists(path)

    def list(self, folder: Path) -> list[str]:
        return self._disk.list(folder)

    def make_folder(self, folder: Path) -> None:
        self._disk.make_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        area = "ledger" if folder.parent.name == "ledgers" else folder.name
        self._count.passed(f"before:folder-sync:{area}")
        self._disk.sync_folder(folder)
        self._count.passed(f"after:folder-sync:{area}")

    def rename(self, old: Path, new: Path) -> None:
        self._count.passed(f"before:rename:{_area(new)}")
        self._disk.rename(old, new)
        self._count.passed(f"after:rename:{_area(new)}")

    def remove(self, path: Path) -> None:
        exists = self._disk.exists(path)
        if exists:
            self._count.passed(f"before:remove:{_area(path)}")
        self._disk.remove(path)
        if exists:
            self._count.passed(f"after:remove:{_area(path)}")

    def space(self, folder: Path) -> SpaceLeft:
        return self._disk.space(folder)

    def reserve(self, path: Path, size: int) -> int:
        return self._disk.reserve(path, size)

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        database = self._disk.database(path, read_only=read_only)
        # A reader's COMMIT ends a snapshot; only the writer's moves anything.
        return database if read_only else CrashingDatabase(database, self._count)

    def lock(self, path: Path) -> FolderLock:
        return self._disk.lock(path)


def _area(path: Path) -> str:
    return "format" if path.name.startswith("FORMAT") else _AREAS.get(path.suffix, "other")
