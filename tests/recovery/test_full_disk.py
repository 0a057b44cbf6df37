"""A full disk: an error, nothing acknowledged lost, and work again once there is space.

Once with a budget of bytes in front of the real files, once with the kernel's own limit on the
size of a file, in a process of its own.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S, within
from magnetar.errors import DiskFull, Unavailable
from magnetar.ledger.api import LedgerWriter
from magnetar.metadata.api import MetadataStore
from magnetar.runtime.disk import Database, Disk, File, LocalDisk, translated
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage

LIMITS = Limits(
    journal_file_bytes=64 * 1024,
    journal_files_max=3,
    metadata_apply_records=20,
    storage_settle_seconds=0.02,
)
PAYLOAD_BYTES = 4000


class BudgetFile:
    """A file whose growth is paid from its disk's budget."""

    def __init__(self, file: File, path: Path, disk: BudgetDisk) -> None:
        self._file = file
        self._path = path
        self._disk = disk

    def write(self, offset: int, buffers: Sequence[bytes]) -> None:
        growth = offset + sum(map(len, buffers)) - self._file.size()
        self._disk.pay(max(0, growth), self._path)
        self._file.write(offset, buffers)

    def read(self, offset: int, size: int) -> bytes:
        return self._file.read(offset, size)

    def sync(self) -> None:
        self._file.sync()

    def size(self) -> int:
        return self._file.size()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


class BudgetDisk(LocalDisk):
    """The local disk with room for so many more bytes; SQLite is full when nothing is left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def pay(self, size: int, path: Path) -> None:
        if size > self.budget:
            raise translated(OSError(errno.ENOSPC, "no space"), "write", path)
        self.budget -= size

    def open(self, path: Path, *, create: bool = False) -> File:
        return BudgetFile(super().open(path, create=create), path, self)

    def database(self, path: Path, *, read_only: bool = False) -> Database:
        return _BudgetDatabase(super().database(path, read_only=read_only), path, self)


class _BudgetDatabase:
    def __init__(self, database: Database, path: Path, disk: BudgetDisk) -> None:
        self._database = database
        self._path = path
        self._disk = disk

    @property
    def in_transaction(self) -> bool:
        return self._database.in_transaction

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[object]:
        if "INSERT OR REPLACE INTO records" in sql:
            self._disk.pay(4096, self._path)
        return self._database.execute(sql, parameters)

    def close(self) -> None:
        self._database.close()


async def _append_until_full(storage: Storage, acknowledged: dict[tuple[int, int], bytes]) -> None:
    """Append until the disk is full, noting what was acknowledged."""
    for _ in range(1000):
        await _append(await storage.ledgers.create(), 3, acknowledged)


async def _append(
    writer: LedgerWriter, count: int, acknowledged: dict[tuple[int, int], bytes]
) -> None:
    for number in range(count):
        payload = bytes([number % 256]) * PAYLOAD_BYTES
        position = await writer.append(payload)
        acknowledged[(position.ledger_id, position.entry_id)] = payload


async def _check(storage: Storage, acknowledged: dict[tuple[int, int], bytes]) -> None:
    for (ledger_id, entry_id), payload in acknowledged.items():
        (entry,) = await storage.ledgers.read(ledger_id, entry_id, entry_id)
        assert entry.payload == payload


def test_full_disk(tmp_path: Path) -> None:
    async def fill_and_free() -> None:
        disk = BudgetDisk(700_000)
        acknowledged: dict[tuple[int, int], bytes] = {}
        storage = await open_storage(tmp_path, limits=LIMITS, disk=disk)
        with pytest.raises(DiskFull):
            await _append_until_full(storage, acknowledged)
        assert len(acknowledged) > 50
        await _check(storage, acknowledged)
        # Space comes back: it goes on without being opened again.
        disk.budget = 10_000_000
        await _append(await _create(storage), 30, acknowledged)
        async with storage.connect() as store:
            stat = await store.put("/after", b"full")
        await _check(storage, acknowledged)
        await storage.close()
        storage = await open_storage(tmp_path, limits=LIMITS)
        await _check(storage, acknowledged)
        async with storage.connect() as store:
            record = await store.get("/after")
        assert record is not None
        assert record.version == stat.version
        await storage.close()

    asyncio.run(fill_and_free())


def test_full_disk_under_metadata(tmp_path: Path) -> None:
    async def fill_and_free() -> None:
        disk = BudgetDisk(400_000)
        storage = await open_storage(tmp_path, limits=LIMITS, disk=disk)
        acknowledged: dict[str, bytes] = {}
        async with storage.connect() as store:
            with pytest.raises((Unavailable, DiskFull)):
                await _put_until_full(store, acknowledged)
            disk.budget = 10_000_000
            await _until_written(storage)
            for key, value in acknowledged.items():
                record = await store.get(key)
                assert record is not None
                assert record.value == value
            found = await store.scan_keys("/full")
            assert sorted(acknowledged) == found
        await storage.close()

    asyncio.run(fill_and_free())


async def _put_until_full(store: MetadataStore, acknowledged: dict[str, bytes]) -> None:
    for number in range(100_000):
        key, value = f"/full/{number}", bytes([number % 256]) * 2000
        await store.put(key, value)
        acknowledged[key] = value


async def _create(storage: Storage) -> LedgerWriter:
    """As soon as the settling has seen that there is space again."""
    async with within("there is space again"):
        while True:
            try:
                return await storage.ledgers.create()
            except DiskFull:
                await asyncio.sleep(0.01)


async def _until_written(storage: Storage) -> None:
    async with within("there is space again"), storage.connect() as store:
        while True:
            try:
                await store.put("/after", b"full")
            except (Unavailable, DiskFull):
                await asyncio.sleep(0.01)
            else:
                return


IN_A_SMALL_DISK = """
    import asyncio, resource, signal, sys
    from pathlib import Path
    from magnetar.errors import DiskFull
    from magnetar.server.embedded import open_storage
    from tests.recovery.test_full_disk import LIMITS, _append, _check, _create

    async def main(folder):
        acknowledged = {}
        storage = await open_storage(folder, limits=LIMITS)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        writer = await storage.ledgers.create()
        try:
            await _append(writer, 1000, acknowledged)
        except DiskFull as error:
            print("refused", len(acknowledged) > 10)
        await _check(storage, acknowledged)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        await _append(await _create(storage), 100, acknowledged)
        await _check(storage, acknowledged)
        await storage.close()
        storage = await open_storage(folder, limits=LIMITS)
        await _check(storage, acknowledged)
        await storage.close()
        print("goes on", len(acknowledged))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as a full disk's does
    asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_full_disk_by_the_kernel(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_A_SMALL_DISK), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    refused, goes_on = done.stdout.splitlines()
    assert refused == "refused True"
    assert int(goes_on.removeprefix("goes on ")) > 110


def test_budget_disk_is_a_disk(tmp_path: Path) -> None:
    disk: Disk = BudgetDisk(10)
    file = disk.open(tmp_path / "file", create=True)
    file.write(0, [b"1234567890"])
    with pytest.raises(DiskFull):
        file.write(5, [b"67890x"])
    file.write(0, [b"again"])
    file.close()
