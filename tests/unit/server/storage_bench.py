"""An embedded storage whose disk and workers obey the test.

On workers without threads the journal can be held at any record, and a copy of the folder is what
a process killed at that moment would leave.
"""

from __future__ import annotations

import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from magnetar.runtime.clock import LoopClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage
from magnetar.testing.virtual import virtual_time
from tests.unit.journal.support import ScriptedDisk, StepWorker, StepWorkers

LIMITS = Limits(journal_file_bytes=64 * 1024, journal_files_max=3, journal_batch_records=1)


def run(main: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(main)


class Bench:
    """An open storage whose disk and workers obey the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = ScriptedDisk()
        self.workers = StepWorkers()
        self.storage: Storage

    async def open(self) -> Bench:
        self.storage = await open_storage(
            self.folder,
            limits=LIMITS,
            disk=self.disk,
            clock=LoopClock(0),
            new_worker=self.workers,
        )
        return self

    @property
    def journal(self) -> StepWorker:
        return self.workers.by_name["journal"]

    def killed(self) -> Path:
        """A copy of the folder as it is."""
        copy = self.folder.with_name(self.folder.name + "-killed")
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(self.folder, copy))

    async def close(self) -> None:
        self.disk.heal()
        self.journal.release()
        await self.storage.close()


async def opened(folder: Path) -> Bench:
    return await Bench(folder).open()
