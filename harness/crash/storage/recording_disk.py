"""The local disk, with a record of every change in the order in which they were made.

Owns: `RecordingDisk` (a `runtime.disk.Disk` on real files) and its `Recording`, and `Replay`,
which tells the changes to a `DiskModel` up to any place: what the disk may hold had the power gone
there. SQLite's own writes are recorded too (`sqlite_vfs`).

Invariants:
1. A write, rename, removal or creation is noted before it is made, a sync after it returned: at
   every place of the recording, what it calls durable is durable.
2. Notes of the harness (`note`) stand in the same order: an acknowledgement stands behind the
   sync that it rests on.
3. A file is known by a number, not by its name: it is written to under its old name after a rename.

Relies on: one thread at a time using a file, as the backends do.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.crash.storage.history import Event
from magnetar.runtime.disk import Database, File, FolderLock, LocalDisk, SpaceLeft
from magnetar.testing.virtual.disk_model import DiskModel, ModelFile
from magnetar.testing.virtual.sqlite_vfs import ReportingVfs


class Opened(NamedTuple):
    file: int
    path: str
    create: bool


class Written(NamedTuple):
    file: int
    offset: int
    data: bytes


class Truncated(NamedTuple):
    file: int
    size: int


class Synced(NamedTuple):
    file: int


class FolderMade(NamedTuple):
    path: str


class FolderSynced(NamedTuple):
    path: str


class Renamed(NamedTuple):
    old: str
    new: str


class Removed(NamedTuple):
    path: str


Step = Opened | Written | Truncated | Synced | FolderMade | FolderSynced | Renamed | Removed | Event


class Recording:
    """Steps in order; appended to by several threads."""

    def __init__(self, root: Path) -> None:
        self.steps: list[Step] = []
        self._root = root
        self._files = 0
        self._lock = threading.Lock()

    def note(self, step: Step) -> None:
        self.steps.append(step)

    def open(self, path: Path, *, create: bool) -> int:
        with self._lock:
            self._files += 1
            self.steps.append(Opened(self._files, self.name(path), create))
            return self._files

    def name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


class Replay:
    """The disk at a place of a recording, moving forward."""

    def __init__(self, before: Mapping[str, bytes], steps: Sequence[Step]) -> None:
        """`before`: the files as they were, all durable, when the recording began."""
        self.model = DiskModel(before)
        self._steps = steps
        self._place = 0
        self._files: dict[int, ModelFile] = {}

    def forward(self, place: int) -> None:
        """Take every step before `place`."""
        for step in self._steps[self._place : place]:
            self._take(step)
        self._place = max(place, self._place)

    def _take(self, step: Step) -> None:
        match step:
            case Written(file, offset, data):
                self._files[file].write(offset, data)
            case Synced(file):
                self._files[file].sync()
            case Opened(file, path, create):
                self._files[file] = self.model.open(path, create=create)
            case Truncated(file, size):
                self._files[file].truncate(size)
            case FolderMade(path):
                self.model.make_folder(path)
            case FolderSynced(path):
                self.model.sync_folder(path)
            case Renamed(old, new):
                self.model.rename(old, new)
            case Removed(path):
                self.model.remove(path)
            case _:
                pass  # a note of the harness


class RecordingFile:
    """A file whose changes are recorded."""

    def __init__(self, file: File, number: int, recording: Recording) -> None:
        self._file = file
        self._number = number
        self._recording = recording

    def read(self, offset: int, size: int) -> bytes:
        return self._file.read(offset, size)

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        self._recording.note(Written(self._number, offset, b"".join(buffers)))
        self._file.write(offset, buffers)

    def sync(self) -> None:
        self._file.sync()
        self._recording.note(Synced(self._number))

    def size(self) -> int:
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._recording.note(Truncated(self._number, size))
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class RecordingDisk:
    """The local disk below `root`, recorded. `close` it after the storage on it."""

    def __init__(self, root: Path) -> None:
        self.recording = Recording(root)
        self._root = root
        self._disk = LocalDisk()
        self._vfs = ReportingVfs(_SqliteListener(self.recording))

    def open(self, path: Path, *, create: bool = False) -> File:
        number = self.recording.open(path, create=create)
        return RecordingFile(self._disk.open(path, create=create), number, self.recording)

    def exists(self, path: Path) -> bool:
        return self._disk.exists(path)

    def list(self, folder: Path) -> list[str]:
        return self._disk.list(folder)

    def make_folder(self, folder: Path) -> None:
        if folder == self._root or self._disk.exists(folder):
            self._disk.make_folder(folder)
            return
        self.recording.note(FolderMade(self.recording.name(folder)))
        self._disk.make_folder(folder)
        self.recording.note(FolderSynced(self.recording.name(folder.parent)))

    def sync_folder(self, folder: Path) -> None:
        self._disk.sync_folder(folder)
        self.recording.note(FolderSynced(self.recording.name(folder)))

    def rename(self, old: Path, new: Path) -> None:
        self.recording.note(Renamed(self.recording.name(old), self.recording.name(new)))
        self._disk.rename(old, new)

    def remove(self, path: Path) -> None:
        if self._disk.exists(path):
            self.recording.note(Removed(self.recording.name(path)))
        self._disk.remove(path)

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        return self._vfs.connect(path, path, read_only=read_only)

    def lock(self, path: Path) -> FolderLock:
        return self._disk.lock(path)

    def space(self, folder: Path) -> SpaceLeft:
        return self._disk.space(folder)

    def reserve(self, path: Path, size: int) -> int:
        if not size:
            self.remove(path)
            return 0
        # Its content means nothing: a hole of that size will do.
        number = self.recording.open(path, create=True)
        has = self._disk.reserve(path, size)
        self.recording.note(Truncated(number, has))
        return has

    def stop(self) -> None:
        """Record nothing more of SQLite: what follows is only tidying up."""
        self._vfs.stopped = True

    def close(self) -> None:
        self._vfs.close()


class _SqliteListener:
    """SQLite's changes, as steps of the recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._files: dict[Path, int] = {}

    def opened(self, path: Path) -> None:
        self._files[path] = self._recording.open(path, create=True)

    def write(self, path: Path, offset: int, data: bytes) -> None:
        self._recording.note(Written(self._files[path], offset, data))

    def truncate(self, path: Path, size: int) -> None:
        self._recording.note(Truncated(self._files[path], size))

    def sync(self, path: Path) -> None:
        self._recording.note(Synced(self._files[path]))

    def sync_folder(self, folder: Path) -> None:
        self._recording.note(FolderSynced(self._recording.name(folder)))

    def remove(self, path: Path) -> None:
        self._recording.note(Removed(self._recording.name(path)))
