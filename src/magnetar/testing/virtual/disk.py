"""A simulated disk: in memory, with faults, and with a past that a power loss can take back.

Owns: `SimulatedDisk`, a `runtime.disk.Disk` whose files are in a `DiskModel`. SQLite keeps real
files in a scratch folder, and each of its changes is told to the model before it is made.

Invariants:
1. Every operation asks the `FaultPlan`; what fails is translated as `LocalDisk` does it.
2. A write that failed, or in which the machine stopped, may have written a part of its sectors. A
   sync that failed has written some sectors, and those it lost are lost for good.
3. After a crash nothing done to this disk has an effect, and every call raises SimulatedCrash.
   The next start uses what `crash` gave: names, locks and handles of before are gone.

Relies on: one thread. `close` removes the scratch folder.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

from magnetar.errors import DiskFull, FolderInUse
from magnetar.runtime.disk import (
    SECTOR_BYTES,
    Database,
    File,
    FolderLock,
    SpaceLeft,
    disk_errors,
)
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.disk_model import DiskModel, ModelFile
from magnetar.testing.virtual.faults import FaultPlan, Operation, SimulatedCrash
from magnetar.testing.virtual.sqlite_vfs import ReportedDatabase, ReportingVfs

ROOT: Final = Path("/simulated")
"""Where the disk is, as its users see it."""

# A folder in memory, where there is one.
_MEMORY: Final = Path("/dev/shm")


class SimulatedDisk:
    """See the module. `stopped` advances once, when the plan's crash comes."""

    def __init__(
        self, plan: FaultPlan | None = None, *, model: DiskModel | None = None, seed: int = 0
    ) -> None:
        self.plan = plan or FaultPlan()
        self.model = model or DiskModel()
        self.stopped = Signal()
        self.open_files = 0
        self.capacity: int | None = None
        """Bytes that fit, others' included; None: it does not say, and takes what comes."""
        self.others_bytes = 0
        """Taken by somebody else."""
        # For torn writes and failed syncs; apart from the plan's
        # chance, whose draws stay what they are.
        self._random = Random(seed)
        self._locked: set[str] = set()
        # SQLite works on real files below `_scratch`; `_Mirror` tells the model of every change.
        self._databases: list[_TrackedDatabase] = []
        self._scratch: Path | None = None
        self._listener = _Mirror(self)
        self._vfs = ReportingVfs(self._listener)

    # --- the contract of Disk

    def open(self, path: Path, *, create: bool = False) -> File:
        name = _relative(path)
        with disk_errors("open", path):
            if create and not self.model.exists(name):
                self.step(Operation.NAME, name, takes_space=True)
            self.check_running()
            return SimulatedFile(self, path, self.model.open(name, create=create))

    def exists(self, path: Path) -> bool:
        self.check_running()
        return self.model.exists(_relative(path))

    def list(self, folder: Path) -> list[str]:
        self.check_running()
        with disk_errors("list", folder):
            try:
                return self.model.list(_relative(folder))
            except FileNotFoundError:
                return []

    def make_folder(self, folder: Path) -> None:
        with disk_errors("make folder", folder):
            # One step for each folder, the outermost first: a crash may leave some of them.
            missing = [each for each in (folder, *folder.parents) if not self.exists(each)]
            for each in reversed(missing):
                self.step(Operation.NAME, _relative(each), takes_space=True)
                self.model.make_folder(_relative(each))
            if missing:
                self.sync_folder(folder.parent)

    def sync_folder(self, folder: Path) -> None:
        with disk_errors("sync folder", folder):
            self.step(Operation.SYNC, _relative(folder))
            self.model.sync_folder(_relative(folder))

    def rename(self, old: Path, new: Path) -> None:
        with disk_errors("rename", old):
            self.step(Operation.NAME, _relative(old))
            self.model.rename(_relative(old), _relative(new))

    def remove(self, path: Path) -> None:
        name = _relative(path)
        with disk_errors("remove", path):
            self.check_running()
            # Removing what is not there is no operation: it must not
            # shift the numbers of `crash_at`.
            if self.model.exists(name):
                self.step(Operation.NAME, name)
                self.model.remove(name)

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        self.check_running()
        live = self._live(path)
        database = _TrackedDatabase(self, self._vfs.connect(live, path, read_only=read_only))
        self._databases.append(database)
        return database

    def lock(self, path: Path) -> FolderLock:
        self.open(path, create=True).close()
        name = _relative(path)
        if name in self._locked:
            raise FolderInUse(f"{path.parent} is open in another process")
        self._locked.add(name)
        return _Lock(self._locked, name)

    def space(self, folder: Path) -> SpaceLeft:
        self.check_running()
        if self.capacity is None:
            return SpaceLeft(0, 0)
        used = self.others_bytes + self.model.bytes_used()
        return SpaceLeft(max(0, self.capacity - used), self.capacity)

    def reserve(self, path: Path, size: int) -> int:
        if not size:
            self.remove(path)
            return 0
        file = self.open(path, create=True)
        try:
            file.truncate(size)
        except DiskFull:
            pass  # as large as it was
        finally:
            has = file.size()
            file.close()
        return has

    def take(self, size: int) -> None:
        """Let something grow by so many bytes; raise if they do not fit."""
        if size > 0 and self.capacity is not None and size > self.space(ROOT).free:
            raise OSError(errno.ENOSPC, "ENOSPC", "")

    # --- faults and the end

    @property
    def is_stopped(self) -> bool:
        return self.stopped.version > 0

    def check_running(self) -> None:
        if self.is_stopped:
            raise SimulatedCrash

    def step(self, operation: Operation, name: str, *, takes_space: bool = False) -> None:
        """Count an operation; raise what the plan wants instead of it."""
        self.check_running()
        error = self.plan.error_for(operation, name, takes_space=takes_space)
        # Asked even if the operation fails anyway, so that every operation is counted once.
        if self.plan.crashes_now(operation, name):
            self.stop()
        if error is not None:
            raise OSError(error, errno.errorcode[error], name)

    def stop(self) -> None:
        """The machine stops in the operation that runs now."""
        self.stopped.advance()
        raise SimulatedCrash

    def crash(self, chance: Random, *, power_loss: bool) -> SimulatedDisk:
        """The disk as the next start finds it. This one is at its end."""
        if not self.is_stopped:
            self.stopped.advance()
        self.close()
        # A killed process leaves all that it wrote, but what was not synced is still at risk.
        model = DiskModel(self.model.survive(chance)) if power_loss else self.model
        following = SimulatedDisk(model=model, seed=chance.randrange(1 << 32))
        following.capacity, following.others_bytes = self.capacity, self.others_bytes
        return following

    def close(self) -> None:
        """Let go of SQLite and its scratch folder; nothing of that is a change of the disk."""
        self._vfs.stopped = True
        for database in list(self._databases):
            database.close()
        self._vfs.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)
            self._scratch = None

    def write_part(self, file: ModelFile, offset: int, data: bytes) -> None:
        """Do a part of a write that did not end well: some whole sectors from its begin on."""
        end = offset + self._random.randrange(len(data) + 1)
        if end < offset + len(data):
            # A sector is atomic: the torn write ends at the border of one (invariant 2).
            end -= end % SECTOR_BYTES
        file.write(offset, data[: max(0, end - offset)])

    def sync_file(self, name: str, file: ModelFile) -> None:
        try:
            self.step(Operation.SYNC, name)
        except OSError:
            # Invariant 2: some sectors are written and the others
            # lost, and no later sync repeats them.
            file.fail_sync(self._random)
            raise
        file.sync()

    def _live(self, path: Path) -> Path:
        """The real file of a database, with its journals as the model has them."""
        if self._scratch is None:
            where = _MEMORY if _MEMORY.is_dir() else None
            self._scratch = Path(tempfile.mkdtemp(prefix="magnetar-", dir=where))
            self._listener.scratch = self._scratch
        live = self._scratch / _relative(path)
        # The first use of this disk: SQLite begins with what the model has, which
        # after a crash is the database and the journals that survived.
        if not live.exists():
            live.parent.mkdir(parents=True, exist_ok=True)
            for name in self.list(path.parent):
                if name.startswith(path.name):
                    file = self.model.open(_relative(path.with_name(name)))
                    live.with_name(name).write_bytes(file.data)
        return live

    def forget(self, database: _TrackedDatabase) -> None:
        if database in self._databases:
            self._databases.remove(database)


class SimulatedFile:
    """An open file."""

    def __init__(self, disk: SimulatedDisk, path: Path, file: ModelFile) -> None:
        self._disk = disk
        self._path = path
        self._name = _relative(path)
        self._file = file
        self._closed = False
        disk.open_files += 1

    def read(self, offset: int, size: int) -> bytes:
        with disk_errors("read", self._path):
            self._check_open()
            self._disk.step(Operation.READ, self._name)
            return self._file.read(offset, size)

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        data = b"".join(buffers)
        with disk_errors("write", self._path):
            self._check_open()
            grows = offset + len(data) - self._file.size()
            try:
                self._disk.step(Operation.WRITE, self._name, takes_space=grows > 0)
                self._disk.take(grows)
            # Invariant 2: neither an error nor a crash says how much of it was written.
            except (OSError, SimulatedCrash):
                self._disk.write_part(self._file, offset, data)
                raise
            self._file.write(offset, data)

    def sync(self) -> None:
        with disk_errors("sync", self._path):
            self._check_open()
            self._disk.sync_file(self._name, self._file)

    def size(self) -> int:
        with disk_errors("measure", self._path):
            self._check_open()
            self._disk.check_running()
            return self._file.size()

    def truncate(self, size: int) -> None:
        with disk_errors("truncate", self._path):
            self._check_open()
            grows = size - self._file.size()
            self._disk.step(Operation.WRITE, self._name, takes_space=grows > 0)
            self._disk.take(grows)
            self._file.truncate(size)

    def close(self) -> None:
        self._check_open()
        self._closed = True
        self._disk.open_files -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "EBADF", self._name)


class _TrackedDatabase:
    """A connection that its disk can close when it stops."""

    def __init__(self, disk: SimulatedDisk, database: ReportedDatabase) -> None:
        self._disk = disk
        self._database = database

    @property
    def in_transaction(self) -> bool:
        self._disk.check_running()
        return self._database.in_transaction

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[object]:
        self._disk.check_running()
        return self._database.execute(sql, parameters)

    def close(self) -> None:
        self._disk.forget(self)
        self._database.close()


class _Lock:
    def __init__(self, locked: set[str], name: str) -> None:
        self._locked = locked
        self._name = name

    def release(self) -> None:
        self._locked.discard(self._name)


class _Mirror:
    """Does to the model what SQLite is about to do to its real files."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.scratch = Path()

    def opened(self, path: Path) -> None:
        name = self._name(path)
        if not self._disk.model.exists(name):
            self._disk.step(Operation.NAME, name, takes_space=True)
            self._disk.model.open(name, create=True)

    def write(self, path: Path, offset: int, data: bytes) -> None:
        name = self._name(path)
        file = self._disk.model.open(name)
        grows = offset + len(data) - file.size()
        try:
            self._disk.step(Operation.WRITE, name, takes_space=grows > 0)
            self._disk.take(grows)
        # Only a crash tears the write: after an error neither the
        # real file nor the model has changed.
        except SimulatedCrash:
            self._disk.write_part(file, offset, data)
            raise
        file.write(offset, data)

    def truncate(self, path: Path, size: int) -> None:
        name = self._name(path)
        self._disk.step(Operation.WRITE, name)
        self._disk.model.truncate(name, size)

    def sync(self, path: Path) -> None:
        name = self._name(path)
        self._disk.sync_file(name, self._disk.model.open(name))

    def sync_folder(self, folder: Path) -> None:
        name = self._name(folder)
        self._disk.step(Operation.SYNC, name)
        self._disk.model.sync_folder(name)

    def remove(self, path: Path) -> None:
        name = self._name(path)
        self._disk.step(Operation.NAME, name)
        self._disk.model.remove(name)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.scratch).as_posix()


def _relative(path: Path) -> str:
    """The name of a path in the model; what is above the root counts as the root."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
