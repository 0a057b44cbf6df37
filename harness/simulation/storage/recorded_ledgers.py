"""A ledger store that tells the history of everything that is done to it.

Owns: `RecordedLedgers`, a `LedgerStore` for users that hold one themselves (managed ledgers): the
promises to them are checked below them, too.

Invariants:
1. It changes nothing: calls, answers and errors are those of the store that it stands for.
2. A create is told even if whoever asked for it went away: ids are told in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from harness.simulation.storage.actors import World, follow_append
from magnetar.errors import DiskFull, MagnetarError, StorageError, TooManyRequests
from magnetar.ledger.api import (
    ENTRY_BYTES_MAX,
    Entry,
    LedgerInfo,
    LedgerState,
    LedgerStore,
    LedgerWriter,
)
from magnetar.model.ids import Position


class ToldWriter(LedgerWriter):
    """Tells of appends and of the end."""

    def __init__(self, world: World, writer: LedgerWriter) -> None:
        self.ledger_id = writer.ledger_id
        self.durable = writer.durable
        self._world = world
        self._writer = writer

    @property
    def failure(self) -> StorageError | None:
        return self._writer.failure

    @property
    def last_durable(self) -> int:
        return self._writer.last_durable

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        future = self._writer.append(payload)
        entry_id = self._world.ledgers.submitted(self.ledger_id, payload)
        follow_append(self._world, self.ledger_id, entry_id, future)
        return future

    @property
    def run_bytes_max(self) -> int:
        return self._writer.run_bytes_max

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position]:
        future = self._writer.append_run(payloads, size)
        for number, payload in enumerate(payloads):
            entry_id = self._world.ledgers.submitted(self.ledger_id, payload)
            follow_append(self._world, self.ledger_id, entry_id, future, number)
        return future

    async def close(self) -> LedgerInfo:
        return _told_end(self._world, await self._writer.close(), LedgerState.CLOSED)


class RecordedLedgers(LedgerStore):
    """The ledgers of a world's storage."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.storage.ledgers

    async def create(self) -> LedgerWriter:
        return await asyncio.shield(asyncio.ensure_future(self._create()))

    async def _create(self) -> LedgerWriter:
        world = self._world
        world.ledgers.create_asked()
        try:
            writer = await self._store.create()
        except MagnetarError as error:
            if isinstance(error, DiskFull | TooManyRequests) and not world.disk.is_stopped:
                world.ledgers.create_refused()
            raise
        if not world.disk.is_stopped:
            world.note(f"create: managed ledger {writer.ledger_id}")
            world.ledgers.created(writer.ledger_id)
            world.managed.ledger_ids.add(writer.ledger_id)
        return ToldWriter(world, writer)

    async def info(self, ledger_id: int) -> LedgerInfo:
        return await self._store.info(ledger_id)

    async def read(
        self, ledger_id: int, first: int, last: int, *, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        return await self._store.read(ledger_id, first, last, bytes_max=bytes_max)

    async def fence(self, ledger_id: int) -> LedgerInfo:
        return _told_end(self._world, await self._store.fence(ledger_id), LedgerState.FENCED)

    async def close_ledger(self, ledger_id: int) -> LedgerInfo:
        info = await self._store.close_ledger(ledger_id)
        return _told_end(self._world, info, LedgerState.CLOSED)

    async def delete(self, ledger_id: int) -> None:
        story = self._world.ledgers.stories[ledger_id]
        story.delete_asked = True
        await self._store.delete(ledger_id)
        if not self._world.disk.is_stopped:
            self._world.ledgers.deleted(ledger_id)

    def list(self) -> AsyncGenerator[int, None]:
        return self._store.list()

    async def close(self) -> None:
        """The storage closes its ledgers itself."""


def _told_end(world: World, info: LedgerInfo, asked: LedgerState) -> LedgerInfo:
    if not world.disk.is_stopped:
        world.ledgers.ended(info, asked)
    return info
