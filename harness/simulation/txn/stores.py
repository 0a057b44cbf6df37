"""Stores that tell every durable change, in order, and that can be slow or fail.

Owns: `Weather` (how slow and how unsure writes are at the moment), `WatchedMetadata` and
`WatchedLedgers` (the shared stores in memory), `ToldStore` and `RecordedLedgers` (around the
embedded ones of a disk), each with the `Mirror` that it tells.

Invariants:
1. A change is told in the step in which it becomes durable, before anybody is answered. On a disk:
   when it is answered, in the order of submission, which is that of the journal; what a crash
   leaves unanswered is told by `found_again` at the next start.
2. A write that fails as Unavailable was not made; one whose outcome is unknown may have been.
3. Only records of transactions and cursors fail: leases and elections have their own trouble. On a
   disk none does by itself, for they share a journal with all entries: the disk fails, or nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

from harness.simulation.txn.mirror import Mirror
from magnetar.errors import LedgerMissing, OutcomeUnknown, StorageError, Unavailable
from magnetar.ledger.api import ENTRY_BYTES_MAX, Entry, LedgerInfo, LedgerStore, LedgerWriter
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.managed_ledger.names import CURSORS, MANAGED_LEDGERS, cursors_directory
from magnetar.metadata.api import (
    Event,
    EventKind,
    Index,
    MetadataStore,
    Record,
    SessionEvent,
    Stat,
    Watch,
)
from magnetar.metadata.memory import SESSION_TIMEOUT_S, Delay, MemoryMetadata, MemoryStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.txn.records import ABORTED_RECORDS, GROUPS, HEADERS, OPS

Result = TypeVar("Result")

FAILING: Final = ("/txn/id/", "/txn/op/", "/txn/aborted/", "/txn/group/", "/cursors/")
"""Keys of records that may fail to be written."""

_FIRST: Final = (MANAGED_LEDGERS, OPS, ABORTED_RECORDS, GROUPS, HEADERS)
"""In which order records are told that were found after a crash."""


@dataclass(slots=True)
class Weather:
    """What becomes of writes just now."""

    random: Random
    fail_rate: float = 0.0
    slow_seconds: float = 0.0
    """What a way to the server may take in addition."""
    failures: int = 0

    def clear(self) -> None:
        self.fail_rate = self.slow_seconds = 0.0

    def fate(self, key: str) -> str:
        """ "ok", "refused" (not made), "lost" or "unsure" (nobody knows)."""
        if not self.fail_rate or not key.startswith(FAILING):
            return "ok"
        if self.random.random() >= self.fail_rate:
            return "ok"
        self.failures += 1
        return self.random.choice(("refused", "lost", "unsure"))

    async def delay(self) -> None:
        if self.slow_seconds and self.random.random() < 0.3:
            await asyncio.sleep(self.random.random() * self.slow_seconds)


# --- shared, in memory


class WatchedMetadata(MemoryMetadata):
    """The shared metadata server."""

    def __init__(self, clock: Clock, mirror: Mirror, weather: Weather, delay: Delay) -> None:
        super().__init__(clock, delay=delay)
        self._weather = weather
        self._mirror = mirror
        self._server.listeners.append(self._tell)

    def connect(
        self, session_timeout: float = SESSION_TIMEOUT_S, clock: Clock | None = None
    ) -> MemoryStore:
        store = TroubledStore(
            self._server, self._delay, session_timeout, clock or self._clock, self._watch_limit
        )
        store.weather = self._weather
        return store

    def take_away(self, key: str) -> None:
        """Delete a record without a word to who wrote it: its session has ended unnoticed."""
        self._server.delete(key, None)

    def _tell(self, event: Event) -> None:
        if event.kind is EventKind.DELETED:
            self._mirror.removed(event.key)
        elif event.kind in (EventKind.CREATED, EventKind.MODIFIED):
            stored = self._server.tree.get(event.key)
            assert stored is not None
            self._mirror.put(event.key, stored.value)


class TroubledStore(MemoryStore):
    """A connection on which writes may fail."""

    weather: Weather

    def _put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        ephemeral: bool,
    ) -> Awaitable[Stat]:
        fate = self.weather.fate(key)
        if fate == "ok":
            return super()._put(key, value, expected, indexes, ephemeral)
        apply = None
        if fate == "unsure":

            def apply() -> None:
                self._server.put(key, bytes(value), expected, indexes, 0)

        return self._failed(key, fate, apply)

    def _delete(self, key: str, expected: int | None) -> Awaitable[bool]:
        fate = self.weather.fate(key)
        if fate == "ok":
            return super()._delete(key, expected)
        apply = None
        if fate == "unsure":

            def apply() -> None:
                self._server.delete(key, expected)

        return self._failed(key, fate, apply)

    def _failed(self, key: str, fate: str, apply: Callable[[], None] | None) -> Awaitable[Any]:
        if fate == "refused":
            return self._refused(Unavailable(f"{key} cannot be written now"))

        def unknown() -> None:
            if apply is not None:
                apply()
            raise OutcomeUnknown(f"{key}: no answer came")

        return self._submit(unknown)


class WatchedLedgers(MemoryLedgers):
    """The shared ledgers."""

    def __init__(self, mirror: Mirror, delay: Delay) -> None:
        super().__init__(delay=delay)
        self._mirror = mirror

    def connect(self) -> MemoryLedgerStore:
        store = _WatchedLedgerStore(self)
        store.mirror = self._mirror
        return store


class _WatchedLedgerStore(MemoryLedgerStore):
    mirror: Mirror

    def _commit(self) -> None:
        batch = list(self._queue)
        super()._commit()
        for writer, payloads, position, _ in batch:
            if position.entry_id <= writer.last_durable:
                _tell_run(self.mirror, position, payloads)


def _tell_run(mirror: Mirror, first: Position, payloads: Sequence[bytes]) -> None:
    for number, payload in enumerate(payloads):
        mirror.stored(Position(first.ledger_id, first.entry_id + number), payload)


# --- embedded, on a disk


class Order:
    """Tells changes of one storage in the order of their submission, which is that of its journal.

    Answers may come in another order, a few steps apart.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[Any], None]]] = deque()

    def tell(self, written: asyncio.Future[Result], then: Callable[[Result], None]) -> None:
        """Call `then` with the result, after all that was submitted before is told."""
        self._waiting.append((written, then))
        written.add_done_callback(self._go_on)

    def _go_on(self, _: asyncio.Future[Any]) -> None:
        while self._waiting and self._waiting[0][0].done():
            written, then = self._waiting.popleft()
            if not written.cancelled() and written.exception() is None:
                then(written.result())


class ToldStore(MetadataStore):
    """A connection to the embedded store."""

    def __init__(self, inner: MetadataStore, mirror: Mirror, order: Order) -> None:
        self.capabilities = inner.capabilities
        self._inner = inner
        self._mirror = mirror
        self._order = order

    async def _get(self, key: str) -> Record | None:
        return await self._inner._get(key)

    def _put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        ephemeral: bool,
    ) -> Awaitable[Stat]:
        written = self._inner._put(key, value, expected, indexes, ephemeral)
        return self._told(written, lambda _: self._mirror.put(key, value))

    def _append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> Awaitable[Stat]:
        return self._inner._append(prefix, value, deltas, indexes)

    def _delete(self, key: str, expected: int | None) -> Awaitable[bool]:
        def gone(was_there: bool) -> None:
            if was_there:
                self._mirror.removed(key)

        return self._told(self._inner._delete(key, expected), gone)

    def _delete_seen(self, seen: list[tuple[str, int]]) -> Awaitable[list[str]]:
        def gone(keys: list[str]) -> None:
            for key in keys:
                self._mirror.removed(key)

        return self._told(self._inner._delete_seen(seen), gone)

    def _told(
        self, written: Awaitable[Result], tell: Callable[[Result], None]
    ) -> asyncio.Future[Result]:
        done = asyncio.ensure_future(written)
        self._order.tell(done, tell)
        # Whoever waits may be cancelled: the change is made, and told, all the same.
        return asyncio.shield(done)

    async def _delete_range(
        self, parent: str, start: str, end: str | None, partition: str | None
    ) -> None:
        await self._inner._delete_range(parent, start, end, partition)

    def _scan(
        self, parent: str, start: str, end: str | None, partition: str | None, limit: int | None
    ) -> AsyncGenerator[Record, None]:
        return self._inner._scan(parent, start, end, partition, limit)

    def _scan_index(
        self, index: str, low: str | None, high: str | None, partition: str | None
    ) -> AsyncGenerator[Record, None]:
        return self._inner._scan_index(index, low, high, partition)

    def _watch(self, parent: str | None, key: str | None) -> Watch[Event]:
        return self._inner._watch(parent, key)

    def _watch_sequence(self, prefix: str) -> Watch[str]:
        return self._inner._watch_sequence(prefix)

    async def sync(self, key: str = "") -> None:
        await self._inner.sync(key)

    def session_events(self) -> AsyncIterator[SessionEvent]:
        return self._inner.session_events()

    async def close(self) -> None:
        await self._inner.close()


class _ToldWriter(LedgerWriter):
    def __init__(self, inner: LedgerWriter, mirror: Mirror, order: Order) -> None:
        self.ledger_id = inner.ledger_id
        self.durable = inner.durable
        self._inner = inner
        self._mirror = mirror
        self._order = order

    @property
    def failure(self) -> StorageError | None:
        return self._inner.failure

    @property
    def last_durable(self) -> int:
        return self._inner.last_durable

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        future = self._inner.append(payload)

        self._order.tell(future, lambda position: self._mirror.stored(position, payload))
        return future

    @property
    def run_bytes_max(self) -> int:
        return self._inner.run_bytes_max

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position]:
        future = self._inner.append_run(payloads, size)
        self._order.tell(future, lambda first: _tell_run(self._mirror, first, payloads))
        return future

    async def close(self) -> LedgerInfo:
        return await self._inner.close()


class RecordedLedgers(LedgerStore):
    """The ledgers of the embedded storage."""

    def __init__(self, inner: LedgerStore, mirror: Mirror, order: Order) -> None:
        self._inner = inner
        self._mirror = mirror
        self._order = order

    async def create(self) -> LedgerWriter:
        return _ToldWriter(await self._inner.create(), self._mirror, self._order)

    async def info(self, ledger_id: int) -> LedgerInfo:
        return await self._inner.info(ledger_id)

    async def read(
        self, ledger_id: int, first: int, last: int, *, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        return await self._inner.read(ledger_id, first, last, bytes_max=bytes_max)

    async def fence(self, ledger_id: int) -> LedgerInfo:
        return await self._inner.fence(ledger_id)

    async def close_ledger(self, ledger_id: int) -> LedgerInfo:
        return await self._inner.close_ledger(ledger_id)

    async def delete(self, ledger_id: int) -> None:
        await self._inner.delete(ledger_id)

    def list(self) -> AsyncGenerator[int, None]:
        return self._inner.list()

    async def close(self) -> None:
        await self._inner.close()


async def found_again(mirror: Mirror, store: MetadataStore, ledgers: LedgerStore) -> None:
    """Tell what a crash left: first what is new, then what is gone."""
    present: dict[str, bytes] = {}
    for directory in _FIRST:
        async for record in store.scan(directory):
            present[record.key] = record.value
    for key, value in present.items():
        if mirror.keys.get(key) != value:
            mirror.put(key, value)
    for name in list(mirror.places):
        place = mirror.places[name]
        for span in () if place.record is None else place.record.ledgers:
            try:
                info = await ledgers.info(span.ledger_id)
                entries = await ledgers.read(span.ledger_id, 0, info.last_entry)
            except LedgerMissing:
                continue
            for position, payload in entries:
                mirror.stored(position, payload)
        async for record in store.scan(cursors_directory(name)):
            present[record.key] = record.value
            mirror.put(record.key, record.value)
    for key in sorted(mirror.keys, key=lambda key: not key.startswith((CURSORS, MANAGED_LEDGERS))):
        if key not in present:
            mirror.removed(key)
