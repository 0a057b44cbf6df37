"""The ledger conformance kit on the file backend: real threads, real files, small limits."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from magnetar.ledger.api import LedgerStore
from magnetar.runtime import metrics
from magnetar.runtime.limits import Limits
from magnetar.runtime.worker import Result, ThreadWorker
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.kits.ledger import LedgerKit, LedgerWorld

_MIB = 1024 * 1024


class _OneAtATime:
    """A worker that does a job only while nobody else has the folder."""

    def __init__(self, name: str, folder_lock: threading.Lock) -> None:
        self._worker = ThreadWorker(name)
        self._folder_lock = folder_lock

    def run(self, job: Callable[..., Result], /, *args: Any) -> asyncio.Future[Result]:
        return self._worker.run(self._alone, job, *args)

    def _alone(self, job: Callable[..., Result], *args: Any) -> Result:
        with self._folder_lock:
            return job(*args)

    async def close(self) -> None:
        await self._worker.close()


class FileWorld(LedgerWorld):
    """One data folder. A crash is a copy of the folder as it is: what a killed process leaves."""

    shared = False
    limits = Limits(journal_file_bytes=9 * _MIB, journal_files_max=2, ledger_cache_bytes=200_000)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folders = folder
        self._lives = 0
        self._folder_lock = threading.Lock()
        self.folder = folder / "0"
        self.storage: Storage

    async def open_store(self) -> LedgerStore:
        self.storage = await open_storage(
            self.folder,
            limits=self.limits,
            new_worker=lambda name: _OneAtATime(name, self._folder_lock),
        )
        return self.storage.ledgers

    async def restart(self) -> None:
        if self._stores:
            self._stores.clear()
            await self.storage.close()

    async def crash(self) -> None:
        self._lives += 1
        copy = self._folders / str(self._lives)
        with self._folder_lock:
            shutil.copytree(self.folder, copy)
        await self.restart()
        shutil.rmtree(self.folder)
        self.folder = copy

    async def settle(self) -> None:
        if self._stores:
            await self.storage.settle()

    def batches(self) -> int:
        self.storage.count()
        (family,) = metrics.JOURNAL_BATCHES.collect()
        return int(family.samples[0].value)

    def cache(self) -> tuple[int, int]:
        return self.storage.ledgers._cache.bytes_used, self.limits.ledger_cache_bytes

    def disk_bytes(self) -> int:
        found = os.walk(self.folder / "ledgers")
        return sum(Path(path, name).stat().st_size for path, _, names in found for name in names)


class CrampedWorld(FileWorld):
    """Journal files so small that they are recycled all the time, and two open ledger files."""

    entry_bytes_max = 20_000
    limits = Limits(
        journal_file_bytes=32 * 1024,
        journal_files_max=3,
        ledger_cache_bytes=10_000,
        ledger_open_files=2,
        metadata_apply_records=10,
    )


class TestFileLedgers(LedgerKit):
    def make_world(self, folder: Path) -> LedgerWorld:
        return FileWorld(folder)


@pytest.mark.slow  # the same items as above, with more work for the journal
class TestCrampedFileLedgers(LedgerKit):
    NOT_APPLICABLE: ClassVar[Mapping[int, str]] = {
        3: "the largest entry does not fit into these journal files",
        4: "what is too large is decided by these journal files",
        5: "batches are as small as the journal files",
    }

    def make_world(self, folder: Path) -> LedgerWorld:
        return CrampedWorld(folder)
