"""The metadata store in memory: one server object that several simulated brokers share.

Owns: `MemoryMetadata`, the server as its users see it, and `MemoryStore`, one broker's connection
to it. Faults of the network are part of the server: `cut`, `heal`, `drop`.

Invariants:
1. A write is judged, stored, readable and watched in one step of the event loop, at the server;
   the step comes after the request has travelled (`delay`), never at the call.
2. Writes of one store object reach the server in call order; those waiting travel together.
3. A write that was on its way when the connection was cut ends in OutcomeUnknown, one that was
   still queued in Unavailable. Nothing that was sent before a cut arrives after what was sent
   once it is healed.
4. A client gives its session up `LEASE_SHARE` of the timeout after it sent the last heartbeat
   that was answered; the server ends it a whole timeout after the last one that arrived. So the
   owner knows of the loss before anyone can take its place.

Relies on: one event loop; a clock that agrees with that loop's timers. All state is ordered, so
equal calls at equal times give equal results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from magnetar.errors import (
    MetadataError,
    OutcomeUnknown,
    SessionLost,
    StoreClosed,
    Unavailable,
)
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
from magnetar.metadata.judge import NO_SESSION, StoredRecord, stat_of
from magnetar.metadata.memory_server import MemoryServer
from magnetar.metadata.watches import QUEUE_LIMIT, SessionFeeds, Watchers
from magnetar.runtime.clock import Clock
from magnetar.runtime.signal import Signal

Delay = Callable[[], Awaitable[None]]
"""Awaited for each way of a message between a store object and the server."""

Result = TypeVar("Result")

SESSION_TIMEOUT_S: Final = 30.0
# The last third is the margin in which the client knows and the server waits (invariant 4).
LEASE_SHARE: Final = 2 / 3
# Four in the time of a lease, which is thus renewed long before it ends.
HEARTBEATS_PER_TIMEOUT: Final = 6
WRITES_QUEUED_MAX: Final = 100_000
# An index scan promises no snapshot, so it need not be one answer.
INDEX_PAGE_RECORDS: Final = 1000

_CAPABILITIES: Final = Capabilities(
    native_indexes=True,
    ordered_index_scan=True,
    versions_never_reused=True,
    linearizable_get=True,
    sessions_expire=True,
    partitions=1,
)


class MemoryMetadata:
    """The shared server. Its records live as long as this object."""

    def __init__(
        self, clock: Clock, *, delay: Delay | None = None, watch_limit: int = QUEUE_LIMIT
    ) -> None:
        self._delay = delay
        self._server = MemoryServer(clock)
        self._clock = clock
        self._watch_limit = watch_limit

    def connect(
        self, session_timeout: float = SESSION_TIMEOUT_S, clock: Clock | None = None
    ) -> MemoryStore:
        """One more broker. Called inside the event loop that its store object will live in."""
        return MemoryStore(
            self._server, self._delay, session_timeout, clock or self._clock, self._watch_limit
        )

    # faults

    def cut(self, store: MemoryStore, *, in_flight_arrives: bool = False) -> None:
        """Break that broker's connection until `heal`.

        `in_flight_arrives` says what becomes of requests on their way; their senders never know.
        """
        store._disconnect(in_flight_arrives)

    def heal(self, store: MemoryStore) -> None:
        """Let that broker connect again."""
        store._reconnect()

    def drop(self, store: MemoryStore, *, in_flight_arrives: bool = False) -> None:
        """Let that broker die without a word: its session runs until the timeout."""
        store._disconnect(in_flight_arrives)
        store._die()


# --- a broker's connection ---


@dataclass(slots=True)
class _Write:
    """One write on its way. `lost`: the request does not arrive."""

    apply: Callable[[], Any]
    future: asyncio.Future[Any]
    lost: bool = False
    outcome: Any = field(default=None)

    def arrive(self) -> None:
        if not self.lost:
            try:
                self.outcome = self.apply()
            except MetadataError as error:
                self.outcome = error

    def answer(self) -> None:
        if self.future.done():  # cancelled by its awaiter, or failed by a cut
            return
        if isinstance(self.outcome, MetadataError):
            self.future.set_exception(self.outcome)
        else:
            self.future.set_result(self.outcome)

    def fail(self, error: MetadataError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class MemoryStore(MetadataStore):
    """One broker's store object: made by `MemoryMetadata.connect`."""

    capabilities = _CAPABILITIES

    def __init__(
        self,
        server: MemoryServer,
        delay: Delay | None,
        session_timeout: float,
        clock: Clock,
        watch_limit: int,
    ) -> None:
        self._server = server
        self._delay = delay
        self._clock = clock
        self._timeout_s = session_timeout
        self._watchers = Watchers(watch_limit)
        self._feeds = SessionFeeds()
        self._linked = True
        self._link = Signal()
        """Advances whenever the connection breaks or comes back."""
        self._closing = False
        self._ended = asyncio.Event()
        # A write is queued, then in flight until its answer is back: a cut
        # treats the two differently.
        self._queue: deque[_Write] = deque()
        self._in_flight: list[_Write] = []
        self._sender: asyncio.Task[None] | None = None
        # Counted from before the session is opened, so that it ends before the server's time does.
        self._lease = clock.monotonic() + session_timeout * LEASE_SHARE
        self._session = server.open_session(session_timeout)
        server.listeners.append(self._hear)
        self._keeper = asyncio.get_running_loop().create_task(self._keep_session())

    # reads

    async def _get(self, key: str) -> Record | None:
        stored = await self._ask(lambda: self._server.tree.get(key))
        return None if stored is None else self._record(key, stored)

    async def _scan(
        self, parent: str, start: str, end: str | None, partition: str | None, limit: int | None
    ) -> AsyncGenerator[Record, None]:
        def snapshot() -> list[tuple[str, StoredRecord]]:
            # All in one step at the server: the snapshot that a scan promises.
            names = self._server.tree.names_in(parent, start, end)[:limit]
            return self._stored(f"{parent}/{name}" for name in names)

        for key, stored in await self._ask(snapshot):
            yield self._record(key, stored)

    async def _scan_index(
        self, index: str, low: str | None, high: str | None, partition: str | None
    ) -> AsyncGenerator[Record, None]:
        def matches(entry: Index) -> bool:
            above = low is None or low <= entry.key
            return entry.name == index and above and (high is None or entry.key <= high)

        keys = await self._ask(lambda: self._server.tree.indexed(index, low, high))
        for first in range(0, len(keys), INDEX_PAGE_RECORDS):
            page = keys[first : first + INDEX_PAGE_RECORDS]
            for key, stored in await self._ask(partial(self._stored, page)):
                # It may have changed between the list of keys and its page.
                if any(map(matches, stored.indexes)):
                    yield self._record(key, stored)

    async def sync(self, key: str = "") -> None:
        await self._ask(lambda: None)

    # writes

    def _put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        ephemeral: bool,
    ) -> Awaitable[Stat]:
        session = self._session if ephemeral else NO_SESSION

        def apply() -> Stat:
            stored = self._server.put(key, bytes(value), expected, indexes, session)
            return stat_of(key, stored, self._session)

        # Given up here while the server may still have it: writing in its
        # name is over (invariant 4).
        if ephemeral and not self._holds_session():
            return self._refused(SessionLost(f"{key}: the session of this store object was lost"))
        return self._submit(apply)

    def _append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> Awaitable[Stat]:
        def apply() -> Stat:
            key, stored = self._server.append(prefix, bytes(value), deltas, indexes)
            return stat_of(key, stored, self._session)

        return self._submit(apply)

    def _delete(self, key: str, expected: int | None) -> Awaitable[bool]:
        return self._submit(lambda: self._server.delete(key, expected))

    async def _delete_range(
        self, parent: str, start: str, end: str | None, partition: str | None
    ) -> None:
        await self._submit(lambda: self._server.delete_range(parent, start, end))

    # news

    def _watch(self, parent: str | None, key: str | None) -> Watch[Event]:
        self._check_open()
        return self._watchers.watch(parent=parent, key=key)

    def _watch_sequence(self, prefix: str) -> Watch[str]:
        self._check_open()
        # While cut there is nothing to read; healing offers the highest key to every watch.
        return self._watchers.watch_sequence(
            prefix, self._highest(prefix) if self._linked else None
        )

    def session_events(self) -> AsyncIterator[SessionEvent]:
        return self._feeds.open()

    async def close(self) -> None:
        if self._closing:
            await self._ended.wait()
            return
        self._closing = True
        # What was submitted before the close is still carried over.
        if self._sender is not None:
            await asyncio.wait({self._sender})
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        if self._linked:
            await self._travel()
        if self._linked:  # a cut while travelling: the session ends by its timeout
            self._server.end_session(self._session)
        self._finish()

    # --- between this object and the server

    async def _travel(self) -> None:
        if self._delay is not None:
            await self._delay()

    async def _ask(self, read: Callable[[], Result]) -> Result:
        self._check_open()
        return await self._exchange(read)

    async def _exchange(self, read: Callable[[], Result]) -> Result:
        """Call the server and bring the answer back; a cut at any moment of it is Unavailable."""
        link = self._check_link(self._link.version)
        await self._travel()
        self._check_link(link)
        result = read()
        await self._travel()
        self._check_link(link)
        return result

    def _submit(self, apply: Callable[[], Result]) -> asyncio.Future[Result]:
        self._check_open()
        # Certainly not sent, and the caller may know it: Unavailable (invariant 3).
        if not self._linked:
            return self._refused(Unavailable("not connected to the metadata server"))
        if len(self._queue) >= WRITES_QUEUED_MAX:
            return self._refused(Unavailable(f"{WRITES_QUEUED_MAX} writes are queued already"))
        loop = asyncio.get_running_loop()
        write = _Write(apply, loop.create_future())
        self._queue.append(write)
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send())
        return write.future

    async def _send(self) -> None:
        """Carry the queue to the server and the answers back until it is empty."""
        try:
            while self._queue:
                # One message for all that waits; what comes meanwhile goes with
                # the next (invariant 2).
                self._in_flight = list(self._queue)
                self._queue.clear()
                await self._travel()
                for write in self._in_flight:
                    write.arrive()
                await self._travel()
                for write in self._in_flight:
                    write.answer()
                self._in_flight = []
        finally:
            self._fail_writes("the store object ended before this write was sent")

    def _fail_writes(self, why: str) -> None:
        """Fail all writes: those on their way may be applied, those queued certainly are not."""
        for write in self._in_flight:
            write.fail(OutcomeUnknown("the connection ended while this write was on its way"))
        for write in self._queue:
            write.fail(Unavailable(why))
        self._queue.clear()

    def _refused(self, error: MetadataError) -> asyncio.Future[Any]:
        self._check_open()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    def _hear(self, event: Event) -> None:
        if self._linked:
            self._watchers.publish(event)

    # --- faults, called by the server

    def _disconnect(self, in_flight_arrives: bool) -> None:
        if not self._linked:
            return
        self._linked = False
        for write in self._in_flight:
            # Only the server will know: the sender gets OutcomeUnknown in either case.
            write.lost = not in_flight_arrives
        self._fail_writes("the connection to the metadata server broke")
        self._link.advance()

    def _reconnect(self) -> None:
        if self._linked or self._closing:
            return
        self._linked = True
        self._link.advance()
        # Nothing was heard while the link was down.
        self._watchers.resync_all(self._highest)

    def _die(self) -> None:
        self._closing = True
        self._keeper.cancel()
        self._finish()

    def _finish(self) -> None:
        self._watchers.close_all()
        self._feeds.close_all()
        if not self._ended.is_set():
            self._server.listeners.remove(self._hear)
            self._ended.set()

    # --- the session

    async def _keep_session(self) -> None:
        while True:
            await self._hold_session()
            self._feeds.say(SessionEvent.LOST)
            await self._renew_identity()
            self._feeds.say(SessionEvent.REESTABLISHED)

    async def _hold_session(self) -> None:
        """Send heartbeats; returns once the session must be taken as lost."""
        while (left := self._lease - self._clock.monotonic()) > 0:
            link = self._link.version
            sent = self._clock.monotonic()
            try:
                async with asyncio.timeout(left):
                    alive = await self._exchange(self._renew)
            # No answer: the session may well live on at the server. Suspended,
            # until the lease is over.
            except (Unavailable, TimeoutError):
                self._feeds.say(SessionEvent.SUSPENDED)
                await self._link_moves(link, self._lease - self._clock.monotonic())
                continue
            # The server has ended it: no need to wait for the lease.
            if not alive:
                return
            # From when it was sent: the server counts from when it arrived, which
            # is later (invariant 4).
            self._lease = sent + self._timeout_s * LEASE_SHARE
            if self._feeds.state is SessionEvent.SUSPENDED:
                self._feeds.say(SessionEvent.CONNECTED)
            await self._link_moves(link, self._timeout_s / HEARTBEATS_PER_TIMEOUT)

    def _renew(self) -> bool:
        return self._server.renew_session(self._session)

    async def _renew_identity(self) -> None:
        """End the old session at the server, whatever is left of it, and begin another."""

        def replace() -> int:
            # Else its ephemeral records would outlive the identity that made them.
            self._server.end_session(self._session)
            return self._server.open_session(self._timeout_s)

        while True:
            link = self._link.version
            sent = self._clock.monotonic()
            try:
                self._session = await self._exchange(replace)
            except Unavailable:
                await self._link_moves(link, self._timeout_s)
                continue
            self._lease = sent + self._timeout_s * LEASE_SHARE
            return

    async def _link_moves(self, seen: int, seconds: float) -> None:
        await self._link.past_within(seen, max(seconds, 0))

    def _holds_session(self) -> bool:
        # The lease is checked as well: after a pause of the whole process its timer may be late.
        lost = self._feeds.state is SessionEvent.LOST
        return not lost and self._clock.monotonic() < self._lease

    # --- small things

    def _record(self, key: str, stored: StoredRecord) -> Record:
        return Record(stat_of(key, stored, self._session), stored.value)

    def _stored(self, keys: Iterable[str]) -> list[tuple[str, StoredRecord]]:
        found = ((key, self._server.tree.get(key)) for key in keys)
        return [(key, stored) for key, stored in found if stored is not None]

    def _highest(self, prefix: str) -> str | None:
        highest = self._server.tree.highest(prefix, None)
        return None if highest is None else highest[0]

    def _check_open(self) -> None:
        if self._closing:
            raise StoreClosed("the store object was closed")

    def _check_link(self, link: int) -> int:
        if not self._linked or link != self._link.version:
            raise Unavailable("the connection to the metadata server broke")
        return link
