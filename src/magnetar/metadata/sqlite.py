"""The embedded metadata store, as its clients see it.

Owns: `SqliteStore`, one client identity with its session, watches and ephemeral records. The
engine below it (`sqlite_engine`) is shared by all clients of a data folder and lives in one
process with them, so a session ends when its client closes or the process dies, never by time.

Scans read one snapshot: a pinned connection of SQLite, merged with a copy of the changes that
SQLite does not hold yet, both taken in one step of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress

from magnetar.errors import BadVersion, DeadlineExceeded, StoreClosed, Unavailable
from magnetar.metadata.api import (
    Capabilities,
    Event,
    Index,
    MetadataStore,
    Record,
    SessionEvent,
    Stat,
    Watch,
)
from magnetar.metadata.judge import NO_SESSION, StoredRecord
from magnetar.metadata.layers import directory_states, index_entries, merge_index, merge_names
from magnetar.metadata.sqlite_engine import SqliteMetadata, record_of
from magnetar.metadata.sqlite_home import ReadConnection
from magnetar.metadata.watches import SessionFeeds, Watchers

# Deletions of a range that are in flight together: one sync for many, and a bounded queue.
_DELETE_PAGE = 500
# After so many records a scan lets the others run, and looks at its deadline.
_RECORDS_PER_TURN = 256


class SqliteStore(MetadataStore):
    """One client. Sessions are numbered by the engine's opener, from 1."""

    capabilities = Capabilities(
        native_indexes=True,
        ordered_index_scan=True,
        versions_never_reused=True,
        linearizable_get=True,
        sessions_expire=False,
        partitions=1,
    )

    def __init__(self, engine: SqliteMetadata, session: int) -> None:
        self._engine = engine
        self._session = session
        self._watchers = Watchers(engine.limits.watch_queue_events)
        self._feeds = SessionFeeds()
        self._ephemerals: set[str] = set()
        self._closed = False
        engine.watchers.append(self._watchers)

    # --- writing

    def _put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        ephemeral: bool,
    ) -> Awaitable[Stat]:
        if self._closed:
            self._check_open()
        if not ephemeral:
            return self._engine.put(key, value, expected, indexes, NO_SESSION)
        # Before the outcome is known: `close` looks at each key once more.
        self._ephemerals.add(key)
        return self._engine.put(key, value, expected, indexes, self._session)

    def _append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> Awaitable[Stat]:
        self._check_open()
        return self._engine.append(prefix, value, deltas, indexes)

    def _delete(self, key: str, expected: int | None) -> Awaitable[bool]:
        self._check_open()
        return self._engine.delete(key, expected)

    def _delete_seen(self, seen: list[tuple[str, int]]) -> Awaitable[list[str]]:
        self._check_open()
        if len(seen) <= _DELETE_PAGE:
            return self._engine.delete_seen(seen)
        pages = range(0, len(seen), _DELETE_PAGE)
        return _all([self._engine.delete_seen(seen[at : at + _DELETE_PAGE]) for at in pages])

    async def _delete_range(
        self, parent: str, start: str, end: str | None, partition: str | None
    ) -> None:
        self._check_open()
        # Submitted before this call, so it has to be gone as well: the scan
        # sees only what is visible.
        await self._engine.settle_submitted()
        self._engine.check_running()
        keys: list[str] = []
        async for record in self._scan(parent, start, end, partition, None):
            keys.append(record.key)
            if len(keys) == _DELETE_PAGE:
                await self._delete_all(keys)
                keys = []
        await self._delete_all(keys)

    async def _delete_all(self, keys: list[str]) -> None:
        await asyncio.gather(*[self._engine.delete(key, None) for key in keys])

    # --- reading

    async def _get(self, key: str) -> Record | None:
        self._check_open()
        state = self._engine.visible_state(key)
        return None if state is None else record_of(key, state, self._session)

    async def _scan(
        self, parent: str, start: str, end: str | None, partition: str | None, limit: int | None
    ) -> AsyncGenerator[Record, None]:
        async with self._snapshot() as reader:
            changed = directory_states(self._engine.layers(), parent, start, end)
            found = merge_names(reader.scan(parent, start, end), changed)
            keyed = ((f"{parent}/{name}", record) for name, record in found)
            async for record in self._yielded(keyed, limit):
                yield record

    async def _scan_index(
        self, index: str, low: str | None, high: str | None, partition: str | None
    ) -> AsyncGenerator[Record, None]:
        async with self._snapshot() as reader:
            layers = self._engine.layers()
            changed = index_entries(layers, index, low or "", high)
            # What a layer knows is newer than any entry that SQLite has of it, deletions included.
            superseded = frozenset().union(*[layer.states for layer in layers])
            found = merge_index(reader.scan_index(index, low or "", high), changed, superseded)
            async for record in self._yielded(_once(found), None):
                yield record

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[ReadConnection]:
        """A pinned reader; the changes over it must be copied before the next await."""
        self._check_open()
        seconds = self._engine.limits.metadata_scan_seconds
        try:
            # Few at a time: each holds a connection, and keeps SQLite from shortening its log.
            async with asyncio.timeout(seconds):
                await self._engine.open_scans.acquire()
        except TimeoutError:
            raise Unavailable(f"too many scans were open for {seconds} s") from None
        try:
            with self._engine.home.snapshot() as reader:
                yield reader
        finally:
            self._engine.open_scans.release()

    async def _yielded(
        self, found: Iterator[tuple[str, StoredRecord]], limit: int | None
    ) -> AsyncGenerator[Record, None]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._engine.limits.metadata_scan_seconds
        for count, (key, state) in enumerate(found):
            if count == limit:
                return
            if count % _RECORDS_PER_TURN == _RECORDS_PER_TURN - 1:
                # The store may be closed by then, and the reader too slow: a
                # snapshot is not kept for ever.
                await asyncio.sleep(0)
                self._check_open()
                if loop.time() > deadline:
                    raise DeadlineExceeded("a scan was open for too long")
            yield record_of(key, state, self._session)

    # --- watches and session

    def _watch(self, parent: str | None, key: str | None) -> Watch[Event]:
        self._check_open()
        return self._watchers.watch(parent=parent, key=key)

    def _watch_sequence(self, prefix: str) -> Watch[str]:
        self._check_open()
        return self._watchers.watch_sequence(prefix, self._engine.highest_key(prefix))

    async def sync(self, key: str = "") -> None:
        self._check_open()  # one process, one truth: reads are never behind

    def session_events(self) -> AsyncIterator[SessionEvent]:
        return self._feeds.open()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # An ephemeral put that is only judged would not be found, and would
        # stay until the next start.
        await self._engine.settle_submitted()
        await asyncio.gather(*[self._delete_mine(key) for key in self._ephemerals])
        self._engine.watchers.remove(self._watchers)
        self._watchers.close_all()
        self._feeds.close_all()

    async def _delete_mine(self, key: str) -> None:
        state = self._engine.visible_state(key)
        if state is None or state.session != self._session:
            return
        with suppress(BadVersion):  # another client took it over meanwhile: it is theirs
            await self._engine.delete(key, state.version)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the metadata store object was closed")


def _once(
    found: Iterator[tuple[str, StoredRecord]],
) -> Iterator[tuple[str, StoredRecord]]:
    """Each key at its first entry only: a record may have several in one index."""
    seen: set[str] = set()
    for key, record in found:
        # A record with a single entry cannot come twice: no need to remember most of them.
        if len(record.indexes) > 1:
            if key in seen:
                continue
            seen.add(key)
        yield key, record


async def _all(futures: list[asyncio.Future[list[str]]]) -> list[str]:
    return [key for keys in await asyncio.gather(*futures) for key in keys]
