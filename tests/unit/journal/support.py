"""What tests of the storage share: a disk that fails on request, a worker that waits for a word.

Both do real work on a real folder; nothing runs on a thread, so a folder can be copied at any
moment, and what the copy holds is what a process killed at that moment would leave.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from magnetar.errors import StorageError
from magnetar.journal.files import JournalFile
from magnetar.journal.format import (
    FILE_HEADER_BYTES,
    FileHeader,
    decode_file_header,
    encode_batch,
    encode_file_header,
    encode_record,
)
from magnetar.journal.recovery import Recovered, recover
from magnetar.runtime.disk import Database, File, LocalDisk
from magnetar.runtime.worker import Result

STORE = b"store-of-a-test!"
SALT = 0x0123_4567_89AB_CDEF
KIND = 7

Fault = Callable[[str, Path], StorageError | None]
"""Asked before each operation ("write", "sync", "open", "sql") on a path."""


class ScriptedDisk(LocalDisk):
    """The local disk; `fault` may refuse an operation, `done` lists those that went through."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.done: list[tuple[str, Path]] = []

    def fail(self, operation: str, pattern: str, error: StorageError) -> None:
        """From now on, every operation of that kind on a path that matches fails."""

        def fault(asked: str, path: Path) -> StorageError | None:
            return error if asked == operation and path.match(pattern) else None

        self.fault = fault

    def heal(self) -> None:
        self.fault = None

    def ask(self, operation: str, path: Path) -> None:
        error = None if self.fault is None else self.fault(operation, path)
        if error is not None:
            raise error
        self.done.append((operation, path))

    def count(self, operation: str, pattern: str) -> int:
        return sum(each == operation and path.match(pattern) for each, path in self.done)

    def open(self, path: Path, *, create: bool = False) -> File:
        self.ask("open", path)
        return _ScriptedFile(self, path, super().open(path, create=create))

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        return _ScriptedDatabase(self, path, super().database(path, read_only=read_only))


class _ScriptedFile:
    def __init__(self, disk: ScriptedDisk, path: Path, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file
        self.read = file.read
        self.size = file.size
        self.truncate = file.truncate
        self.close = file.close

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        self._disk.ask("write", self._path)
        self._file.write(offset, buffers)

    def sync(self) -> None:
        self._disk.ask("sync", self._path)
        self._file.sync()


class _ScriptedDatabase:
    def __init__(self, disk: ScriptedDisk, path: Path, database: Database) -> None:
        self._disk = disk
        self._path = path
        self._database = database
        self.close = database.close

    @property
    def in_transaction(self) -> bool:
        return self._database.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        if sql.startswith("BEGIN IMMEDIATE"):
            self._disk.ask("sql", self._path)
        return self._database.execute(sql, parameters)


class StepWorker:
    """Does one job per turn of the event loop, and none while it is held."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.held = False
        self.waiting: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = (
            deque()
        )

    def run(self, job: Callable[..., Result], /, *args: Any) -> asyncio.Future[Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self.waiting.append((future, job, args))
        loop.call_soon(self._step)
        return future

    def release(self, jobs: int | None = None) -> None:
        """Go on; with a number, do so many of the waiting jobs and stay held."""
        self.held = jobs is not None
        for _ in range(len(self.waiting) if jobs is None else jobs):
            self._do()

    def _step(self) -> None:
        if self.waiting and not self.held:
            self._do()

    def _do(self) -> None:
        future, job, args = self.waiting.popleft()
        try:
            result = job(*args)
        except StorageError as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    async def close(self) -> None:
        self.release()


class StepWorkers:
    """A `new_worker` that remembers what it made."""

    def __init__(self) -> None:
        self.by_name: dict[str, StepWorker] = {}

    def __call__(self, name: str) -> StepWorker:
        self.by_name[name] = StepWorker(name)
        return self.by_name[name]


async def turns(count: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- journal files made by hand


class MemoryFile:
    """The bytes of one file."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        joined = b"".join(buffers)
        self.data[offset : offset + len(joined)] = joined

    def sync(self) -> None:
        pass

    def size(self) -> int:
        return len(self.data)

    def truncate(self, size: int) -> None:
        del self.data[size:]

    def close(self) -> None:
        pass


def batch(bodies: Sequence[bytes], first: int, *, salt: int = SALT) -> bytes:
    """A batch whose records have these bodies."""
    records = [encode_record(KIND, body) for body in bodies]
    return b"".join(encode_batch(records, sum(map(len, records)), first, first - 1, salt))


def image(
    batches: Sequence[Sequence[bytes]],
    *,
    first: int = 1,
    settled: int = 0,
    salt: int = SALT,
    room: int = 2048,
) -> bytes:
    """A journal file with these batches and zeros behind."""
    data = encode_file_header(FileHeader(first, settled, salt, STORE))
    for bodies in batches:
        data += batch(bodies, first, salt=salt)
        first += len(bodies)
    return data + bytes(room)


def ends_of(batches: Sequence[Sequence[bytes]]) -> list[int]:
    """Offsets behind each batch, beginning with that of the first batch."""
    ends = [FILE_HEADER_BYTES]
    for bodies in batches:
        ends.append(ends[-1] + len(batch(bodies, 1)))
    return ends


def recovered(*images: bytes) -> Recovered:
    """What recovery makes of files with these bytes."""
    files = []
    for slot, data in enumerate(images):
        path = Path(f"{slot:04d}.journal")
        header = decode_file_header(data[:FILE_HEADER_BYTES], str(path))
        files.append(JournalFile(path, MemoryFile(data), header, len(data)))
    return recover(files)


def bodies_of(found: Recovered) -> list[bytes]:
    return [record.body for record in found.records]


def flat(batches: Sequence[Sequence[bytes]]) -> list[bytes]:
    return [body for bodies in batches for body in bodies]
