"""The metadata conformance kit on the embedded store: real threads, real files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from magnetar.metadata.api import MetadataStore
from magnetar.runtime import metrics
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.kits.metadata import (
    NO_CHANGE_LOG,
    NO_NETWORK,
    MetadataKit,
    MetadataWorld,
)

_MIB = 1024 * 1024


class EmbeddedWorld(MetadataWorld):
    """One data folder; every client shares the engine that has it open."""

    watch_limit = 200
    limits = Limits(
        journal_file_bytes=4 * _MIB,
        journal_files_max=3,
        watch_queue_events=watch_limit,
        metadata_apply_records=1000,
    )

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._storage: Storage | None = None

    async def open_store(self) -> MetadataStore:
        if self._storage is None:
            self._storage = await open_storage(self._folder, limits=self.limits)
        return self._storage.connect()

    async def restart(self) -> None:
        await super().restart()
        storage, self._storage = self._storage, None
        if storage is not None:
            await storage.close()

    def batches(self) -> int:
        if self._storage is not None:
            self._storage.count()
        (family,) = metrics.JOURNAL_BATCHES.collect()
        return int(family.samples[0].value)


class EagerWorld(EmbeddedWorld):
    """Every few changes go to SQLite: reads meet all layers, caches hold next to nothing."""

    limits = EmbeddedWorld.limits.override(
        {"metadata_apply_records": 3, "sequence_cache_entries": 1, "storage_settle_seconds": 0.01}
    )


class TestEmbeddedMetadata(MetadataKit):
    NOT_APPLICABLE = NO_NETWORK | NO_CHANGE_LOG
    ELSEWHERE: ClassVar[Mapping[int, str]] = {
        36: "tests/recovery/test_crash.py",
        56: "tests/recovery/test_crash.py",
        57: "tests/recovery/test_crash.py",
        58: "tests/recovery/test_full_disk.py",
        59: "tests/recovery/test_folder_lock.py",
    }
    machine_examples = 30

    def make_world(self, folder: Path) -> MetadataWorld:
        return EmbeddedWorld(folder)

    @pytest.mark.slow  # thirty random runs with real syncs
    def test_62_random_operations(self, tmp_path: Path) -> None:
        super().test_62_random_operations(tmp_path)


@pytest.mark.slow
class TestEagerEmbeddedMetadata(TestEmbeddedMetadata):
    def make_world(self, folder: Path) -> MetadataWorld:
        return EagerWorld(folder)
