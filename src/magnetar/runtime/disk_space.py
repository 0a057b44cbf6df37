"""The room on the disk of a data folder: watched, kept in reserve, and told to who publishes.

Owns: `DiskSpace`, with the file RESERVE, and `PublishGate`, where publishers look whether messages
are taken. What is decided stands in `space_rules`.

Invariants:
1. All calls to the disk are made by the worker; one look at a time.
2. The reserve is lent to one writer at a time, whole, and what is left of it is taken back at once:
   between two loans nobody else can have it.
3. Each change of `PublishGate` is one line in the log, and advances `changed` once.
4. A disk that cannot keep a reserve is no error: the server goes on without one.

Relies on: its owner, which calls `open` before it writes anything, `look` again and again, and
`lend` when a write found no space.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from magnetar.errors import DISK_FULL_WORDS, DiskFull, MagnetarError, ServerDiskFull, StorageError
from magnetar.runtime import metrics
from magnetar.runtime.clock import Clock
from magnetar.runtime.disk import Disk
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal
from magnetar.runtime.space_rules import SpaceRules, SpaceSeen
from magnetar.runtime.worker import Worker

RESERVE_NAME: Final = "RESERVE"

_MIB: Final = 1 << 20
# A file system needs a little of what it has left for itself: less is tried, and less again.
_TRIES: Final = 4

_log = logger(__name__)


class PublishGate:
    """Says whether messages are taken and topics made; always so where nobody closes it."""

    def __init__(self) -> None:
        self.refusal: MagnetarError | None = None
        """Why not, if not."""
        self.changed = Signal()
        """Advances when it opens and when it closes."""

    def check(self) -> None:
        """Raise why no messages are taken, if that is so."""
        if self.refusal is not None:
            # One error for many: none of them should keep another's trace.
            raise self.refusal.with_traceback(None)


class DiskSpace:
    """See the module."""

    def __init__(
        self, folder: Path, disk: Disk, worker: Worker, clock: Clock, limits: Limits
    ) -> None:
        self.gate = PublishGate()
        self._folder = folder
        self._path = folder / RESERVE_NAME
        self._disk = disk
        self._worker = worker
        self._clock = clock
        self._rules = SpaceRules(limits)
        self._reserved = self._whole = 0
        self._turn = asyncio.Lock()
        self._is_reserve_told = False
        self._is_starting = True

    async def open(self) -> None:
        """Find the reserve of a former life; it makes room for the start on a full disk."""
        async with self._turn:
            self._reserved = await self._worker.run(self._found)
            seen = await self._look(0, has_failed=False)
            # Before the first write: what the journal holds has to be brought home first of all.
            if self._rules.floor(seen.total) > self._rules.left(seen):
                await self._resize(0)

    async def look(self, unsettled: int, *, has_failed: bool = False) -> None:
        """Look at the disk, then refuse or take publishes, and mend the reserve."""
        async with self._turn:
            await self._judge(unsettled, has_failed=has_failed)

    @asynccontextmanager
    async def lend(self, unsettled: int) -> AsyncIterator[bool]:
        """Give the body the space of the reserve; False: it had none."""
        async with self._turn:
            await self._judge(unsettled, has_failed=True)
            had = self._reserved
            if had:
                _log.debug("disk-reserve-lent", bytes=had)
                await self._resize(0)
            try:
                yield had > 0
            finally:
                # As much as there is (invariant 2): less than before by what the body took.
                await self._resize(had)

    async def close(self) -> None:
        """Keep for the next start what its owner no longer needs; call it last of all."""
        async with self._turn:
            if self._reserved < self._whole:
                await self._resize(self._whole)
        await self._worker.close()

    async def _judge(self, unsettled: int, *, has_failed: bool) -> None:
        seen = await self._look(unsettled, has_failed=has_failed)
        self._whole = self._rules.reserve(seen.total)
        is_refusing = self._rules.judge(seen)
        wanted = self._rules.wanted_reserve(seen)
        # What the start needed is written: from here on it is kept from others, as far as it goes.
        if self._is_starting:
            wanted, self._is_starting = self._whole, False
        if wanted != self._reserved:
            await self._resize(wanted)
            # Judged with the reserve in its place: it may have been all that was missing.
            seen = await self._look(unsettled, has_failed=False)
            is_refusing = self._rules.judge(seen)
        self._tell(seen, is_refusing=is_refusing)

    async def _look(self, unsettled: int, *, has_failed: bool) -> SpaceSeen:
        space = await self._worker.run(self._disk.space, self._folder)
        return SpaceSeen(
            free=space.free,
            total=space.total,
            reserved=self._reserved,
            unsettled=unsettled,
            has_failed=has_failed,
            now=self._clock.monotonic(),
        )

    def _tell(self, seen: SpaceSeen, *, is_refusing: bool) -> None:
        """Show what was seen and decided; a change, to everybody who waits for one."""
        floor, gate = self._rules.floor(seen.total), self.gate
        metrics.DISK_FREE_BYTES.set(seen.free)
        metrics.DISK_FLOOR_BYTES.set(floor)
        metrics.DISK_RESERVE_BYTES.set(self._reserved)
        metrics.PUBLISHES_REFUSED.set(int(is_refusing))
        had, gate.refusal = gate.refusal, None
        if is_refusing:
            left = max(0, self._rules.left(seen))
            gate.refusal = ServerDiskFull(refusal_text(left, seen.total, floor))
        # Invariant 3: the text follows the disk, and is no change.
        if (had is None) != (gate.refusal is None):
            event = "publishes-refused" if is_refusing else "publishes-taken-again"
            tell = _log.error if is_refusing else _log.info
            tell(event, folder=self._folder, free=seen.free, floor=floor, reserve=self._reserved)
            gate.changed.advance()

    # --- the reserve

    def _found(self) -> int:
        if not self._disk.exists(self._path):
            return 0
        file = self._disk.open(self._path)
        try:
            return file.size()
        finally:
            file.close()

    async def _resize(self, size: int) -> None:
        try:
            self._reserved = await self._worker.run(self._resized, size)
        except StorageError as error:
            # Invariant 4. Told once: it is tried again with each look.
            if not self._is_reserve_told:
                _log.warning("disk-reserve-failed", error=str(error))
            self._is_reserve_told = True

    def _resized(self, size: int) -> int:
        has = self._reserved
        for part in range(_TRIES):
            try:
                has = self._disk.reserve(self._path, has + ((size - has) >> part))
            except DiskFull:
                continue  # not even its name fits
            if has >= size or (part and has > self._reserved):
                break
        return has


def refusal_text(left: int, total: int, floor: int) -> str:
    """What is said of a disk that is too full for publishes."""
    text = f"{DISK_FULL_WORDS}: {left / _MIB:,.1f} of {total / _MIB:,.1f} MiB are left"
    return f"{text}, publishes need {floor / _MIB:,.1f} MiB"
