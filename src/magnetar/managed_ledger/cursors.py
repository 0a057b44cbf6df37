"""The cursors of one managed ledger: load, create, delete, and the writing of changed states.

Owns: `Cursors`.

Invariants:
1. Loading takes every cursor record over (compare-and-set with this owner's epoch) before its
   state is read: what a former owner wrote last is either in it or will fail.
2. A cursor that `create` returned is found by every later owner: after its record is durable the
   managed ledger's own record is read once more, and it still names this owner.
3. A deletion that began is finished by whoever loads next.
4. Changed states are written `cursor_flush_seconds` after the first change at the latest, one
   write per cursor for all changes of that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import msgspec

from magnetar.errors import (
    CorruptMetadata,
    CursorMissing,
    MagnetarError,
    ManagedLedgerFenced,
    NotAllowed,
)
from magnetar.managed_ledger.cursor import Cursor, ReadEntries
from magnetar.managed_ledger.cursor_state import CursorState
from magnetar.managed_ledger.cursor_store import CursorStore
from magnetar.managed_ledger.ledger_list import LedgerList
from magnetar.managed_ledger.names import cursor_key, cursors_directory, managed_ledger_key
from magnetar.managed_ledger.owned_record import OwnedRecord, take
from magnetar.managed_ledger.records import (
    CursorRecord,
    decode_cursor,
    decode_managed_ledger,
    encode,
)
from magnetar.metadata.api import MetadataStore, Record
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal

# A load is several round trips: not one after the other, and not thousands together.
LOADS_AT_ONCE: Final = 16

_LOG: Final = logger(__name__)


class Cursors:
    """All cursors of one owner of a managed ledger."""

    def __init__(
        self,
        name: str,
        epoch: int,
        metadata: MetadataStore,
        *,
        clock: Clock,
        limits: Limits,
        ledgers: Callable[[], LedgerList],
        read: ReadEntries,
        new_incarnation: Callable[[], int],
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._metadata = metadata
        self._clock = clock
        self._limits = limits
        self._ledgers = ledgers
        self._read = read
        self._new_incarnation = new_incarnation
        # Names for chunk records, and the signal of every cursor's changes, for `keep_flushed`.
        self._generations = 0
        self._changed = Signal()
        # Durable ones only: readers' cursors hold nothing back and nobody looks for them. The lock
        # keeps a create and a delete of the same name apart.
        self._by_name: dict[str, Cursor] = {}
        self._lock = asyncio.Lock()

    # --- what there is

    def get(self, name: str) -> Cursor:
        cursor = self._by_name.get(name)
        if cursor is None:
            raise CursorMissing(f"{self._name} has no cursor {name!r}")
        return cursor

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def lowest_mark_delete(self) -> Position | None:
        """The position up to which every durable cursor has acknowledged; None: there is none."""
        return min((cursor.mark_delete for cursor in self._by_name.values()), default=None)

    # --- load, create, delete

    async def load(self) -> None:
        """Take over and read every cursor."""
        async with aclosing(self._metadata.scan(cursors_directory(self._name))) as records:
            found = [record async for record in records]
        for at in range(0, len(found), LOADS_AT_ONCE):
            await asyncio.gather(*(self._load(record) for record in found[at : at + LOADS_AT_ONCE]))

    async def create(
        self, name: str, mark_delete: Position, properties: dict[str, str] | None = None
    ) -> Cursor:
        """A new durable cursor behind a position."""
        async with self._lock:
            if name in self._by_name:
                raise NotAllowed(f"{self._name} has a cursor {name!r} already")
            state = CursorState.behind(mark_delete, self._ledgers(), self._new_incarnation())
            fresh = CursorRecord(
                managed_ledger=self._name,
                name=name,
                epoch=self._epoch,
                incarnation=state.incarnation,
                mark_delete=state.mark_delete,
                properties=properties or {},
            )
            # A record may be there: of a create that was cut short (its state is taken over), or of
            # a deletion that was (that is finished first, invariant 3).
            record = await self._take(name, lambda present: present or fresh)
            if record.value.deleted:
                await self._store_of(record).delete()
                record = await self._take(name, lambda present: present or fresh)
            # A later owner may have loaded its cursors before our record was there (invariant 2).
            await self._check_ownership()
            store = self._store_of(record)
            if record.value != fresh:  # left by an owner that did not live to tell
                state = await store.load()
                state.settle(self._ledgers())
            cursor = self._cursor(name, state, store)
            self._by_name[name] = cursor
            return cursor

    def open_volatile(self, name: str, mark_delete: Position) -> Cursor:
        """A cursor that is never stored and holds nothing back: a reader's."""
        state = CursorState.behind(mark_delete, self._ledgers(), self._new_incarnation())
        return self._cursor(name, state, None)

    async def delete(self, name: str) -> None:
        async with self._lock:
            await self.get(name).delete()
            del self._by_name[name]

    async def delete_all(self) -> None:
        for name in self.names():
            await self.delete(name)

    def stop(self, error: MagnetarError) -> None:
        """Refuse all further use of every cursor."""
        for cursor in self._by_name.values():
            cursor.stop(error)

    # --- writing

    async def keep_flushed(self) -> None:
        """Write changed states, for ever. Ends with the error that stops the whole owner."""
        while True:
            seen = self._changed.version
            # The pause comes after the first change, not before: all changes of that time share a
            # write (invariant 4), and an idle managed ledger does nothing.
            if not any(cursor.dirty for cursor in self._by_name.values()):
                await self._changed.past(seen)
            await self._clock.sleep(self._limits.cursor_flush_seconds)
            await self._flush_dirty()

    async def flush(self) -> None:
        """Return once the states of this moment are durable; raises the first error."""
        dirty = [cursor for cursor in self._by_name.values() if cursor.failure is None]
        results = await asyncio.gather(*(c.flush() for c in dirty), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _flush_dirty(self) -> None:
        dirty = [cursor for cursor in self._by_name.values() if cursor.dirty]
        for cursor in dirty:
            if isinstance(cursor.failure, ManagedLedgerFenced):
                raise cursor.failure  # whoever else wrote it met the next owner
        # Deleted ones, say: nothing of them is written any more.
        dirty = [cursor for cursor in dirty if cursor.failure is None]
        results = await asyncio.gather(*(c.flush() for c in dirty), return_exceptions=True)
        for cursor, result in zip(dirty, results, strict=True):
            if result is None:
                continue
            # A bug, or the next owner: this one is over.
            if not isinstance(result, MagnetarError) or isinstance(result, ManagedLedgerFenced):
                raise result
            # The store is away, perhaps: the cursor stays dirty, and the next round tries again.
            _LOG.warning("cursor-write-failed", cursor=cursor.name, error=str(result))

    # --- parts

    async def _load(self, stored: Record) -> None:
        found = decode_cursor(stored.key, self._name, stored.value)
        if cursor_key(self._name, found.name) != stored.key:
            raise CorruptMetadata(f"{stored.key} holds the cursor {found.name!r}")
        # Taken before its state is read: the former owner may be writing still (invariant 1).
        record = await self._take(found.name, lambda present: present or found)
        store = self._store_of(record)
        if record.value.deleted:
            await store.delete()
            return
        state = await store.load()
        state.settle(self._ledgers())
        self._by_name[found.name] = self._cursor(found.name, state, store)

    async def _take(
        self, name: str, choose: Callable[[CursorRecord | None], CursorRecord]
    ) -> OwnedRecord[CursorRecord]:
        key = cursor_key(self._name, name)

        def claim(present: CursorRecord | None) -> CursorRecord:
            # We are the former owner, and have not heard of it yet.
            if present is not None and present.epoch > self._epoch:
                raise ManagedLedgerFenced(f"{key} belongs to a later owner")
            return msgspec.structs.replace(choose(present), epoch=self._epoch)

        def decode(data: bytes) -> CursorRecord:
            return decode_cursor(key, self._name, data)

        return await take(self._metadata, self._clock, key, decode, claim, encode=encode)

    async def _check_ownership(self) -> None:
        key = managed_ledger_key(self._name)
        # A read that lags behind would prove nothing.
        await self._metadata.sync(key)
        found = await self._metadata.get(key)
        owner = None if found is None else decode_managed_ledger(key, self._name, found.value)
        if owner is None or owner.epoch != self._epoch or owner.deleted:
            raise ManagedLedgerFenced(f"{self._name} has another owner")

    def _store_of(self, record: OwnedRecord[CursorRecord]) -> CursorStore:
        return CursorStore(self._metadata, self._limits, record, self._next_generation)

    def _cursor(self, name: str, state: CursorState, store: CursorStore | None) -> Cursor:
        return Cursor(
            name,
            state,
            ledgers=self._ledgers,
            read=self._read,
            new_incarnation=self._new_incarnation,
            changed=self._changed,
            store=store,
        )

    def _next_generation(self) -> str:
        self._generations += 1
        # The epoch makes it unique over owners, the number within one: never used twice.
        return f"{self._epoch:x}.{self._generations:x}"
