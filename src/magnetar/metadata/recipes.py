"""Recipes from single-key operations: CAS loops, counters, elections, table views.

Owns: `cas_update`, `Counter`, `LeaderElection`, `TableView`, the same on every backend.

Invariants:
1. `cas_update` applies its change at most once per call: it tries again only after an attempt that
   certainly changed nothing.
2. A `Counter` never gives a number twice, whoever shares its key; it may skip numbers.
3. A leader's epoch is the version of its record, so it grows from leader to leader. `leading` turns
   false when the session is lost, before the store can give the record to another. (A record that
   someone deletes by hand can be another's before the leader hears of it: epochs tell them apart.)
4. A former leader deletes nothing but the very record that it led with.
5. A `TableView` shows, once events stop, what a scan shows.

Relies on: `metadata.api` alone. `run` coroutines are started by their owner, in its task group,
and end when the store object is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from magnetar.errors import (
    BadVersion,
    CorruptMetadata,
    DeadlineExceeded,
    InvalidArgument,
    OutcomeUnknown,
    SessionLost,
    StoreClosed,
    Unavailable,
)
from magnetar.metadata.api import (
    ABSENT,
    Event,
    EventKind,
    Index,
    MetadataStore,
    Record,
    SessionEvent,
)
from magnetar.runtime.signal import Signal

CAS_TIMEOUT_S: Final = 10.0
# A lost race is repeated without a pause: the deadline alone would allow a busy loop.
CAS_ATTEMPTS_MAX: Final = 1000
PAUSE_S: Final = 0.1
"""Between attempts while the store is unavailable."""
# Events wake a candidate at once; this is for failures that no event follows.
ELECTION_RETRY_S: Final = 1.0
# One durable write for so many numbers; a restart skips what is left of them.
COUNTER_BLOCK: Final = 1000


# --- compare and set ---


class Content(NamedTuple):
    """The value and indexes that a record shall get: a put without indexes removes them."""

    value: bytes
    indexes: tuple[Index, ...] = ()


async def cas_update(
    store: MetadataStore,
    key: str,
    change: Callable[[Record | None], Content | None],
    *,
    timeout_s: float = CAS_TIMEOUT_S,
) -> Record | None:
    """Read, change and put until no one else got between; the record as it is then.

    `change` may be called several times; None leaves the record as it is. An attempt that ends in
    OutcomeUnknown is not repeated (the change could be applied twice): the caller gets it, and
    knows how to recognise its own value.
    """
    async with _within(timeout_s, f"{key}: compare and set"):
        for _ in range(CAS_ATTEMPTS_MAX):
            try:
                current = await store.get(key)
                content = change(current)
                if content is None:
                    return current
                expected = ABSENT if current is None else current.version
                stat = await store.put(
                    key, content.value, expected=expected, indexes=content.indexes
                )
            # Somebody else got between, so nothing was written: look again at once.
            except BadVersion:
                continue
            # Certainly not written either: the store is away.
            except Unavailable:
                await asyncio.sleep(PAUSE_S)
                continue
            return Record(stat, content.value)
    raise Unavailable(f"{key}: lost {CAS_ATTEMPTS_MAX} compare-and-set races in a row")


async def get_patiently(
    store: MetadataStore, key: str, *, timeout_s: float = CAS_TIMEOUT_S
) -> Record | None:
    """Read a record, again and again while the store is away."""
    async with _within(timeout_s, f"{key}: reading"):
        while True:
            try:
                return await store.get(key)
            except Unavailable:
                await asyncio.sleep(PAUSE_S)


class Fate(Enum):
    """The fate of a record that is not replaced: it stays, or it is deleted."""

    KEPT = "kept"
    GONE = "gone"


async def cas_settle(
    store: MetadataStore,
    key: str,
    change: Callable[[Record | None], Content | Fate],
    *,
    timeout_s: float = CAS_TIMEOUT_S,
) -> None:
    """Update as `cas_update` does, but settle an attempt of unknown outcome by reading.

    For values that say who wrote them, or changes that may be applied again: if the very value is
    there, it counts as stored, whoever put it.
    """
    async with _within(timeout_s, f"{key}: compare and set"):
        while True:
            try:
                current = await store.get(key)
                fate = change(current)
                # Nothing is to be written: as it is, it is right.
                if fate is Fate.KEPT or (fate is Fate.GONE and current is None):
                    return
                if await _settled(store, key, current, fate):
                    return
            except Unavailable:
                await asyncio.sleep(PAUSE_S)


async def _settled(
    store: MetadataStore, key: str, current: Record | None, fate: Content | Fate
) -> bool:
    expected = ABSENT if current is None else current.version
    try:
        if isinstance(fate, Content):
            await store.put(key, fate.value, expected=expected, indexes=fate.indexes)
        else:
            await store.delete(key, expected=expected)
    except BadVersion:
        return False
    # If our value is there, the attempt (or an equal one) counts; if not, decide again.
    except OutcomeUnknown:
        await asyncio.sleep(PAUSE_S)
        found = await store.get(key)
        wanted = fate.value if isinstance(fate, Content) else None
        return (None if found is None else found.value) == wanted
    return True


class Counter:
    """Unique, increasing numbers from 1; one CAS takes a whole block of them.

    What is left of a block when its holder stops is never given. Numbers of several holders
    of one key interleave block by block.
    """

    def __init__(self, store: MetadataStore, key: str, *, block: int = COUNTER_BLOCK) -> None:
        if block < 1:
            raise InvalidArgument(f"{key}: a block needs at least one number, not {block}")
        self._store = store
        self._key = key
        self._block = block
        self._next = 0
        self._end = 0
        self._refill = asyncio.Lock()

    def next_at_once(self) -> int | None:
        """A number that nobody else gets; None: `next`, for a block has to be fetched."""
        # While one is fetched, newcomers queue behind those who wait for it.
        if self._next < self._end and not self._refill.locked():
            self._next += 1
            return self._next - 1
        return None

    async def next(self, *, timeout_s: float = CAS_TIMEOUT_S) -> int:
        """A number that nobody else gets."""
        number = self.next_at_once()
        if number is not None:
            return number
        async with _within(timeout_s, f"{self._key}: next number"), self._refill:
            # Looked at again: the one before in the queue may have brought a block.
            if self._next == self._end:
                last = await self._take_block(timeout_s)
                self._next, self._end = last - self._block + 1, last + 1
            self._next += 1
            return self._next - 1

    async def _take_block(self, timeout_s: float) -> int:
        def take(current: Record | None) -> Content:
            return Content(b"%d" % (_counter_value(current) + self._block))

        while True:
            try:
                record = await cas_update(self._store, self._key, take, timeout_s=timeout_s)
            except OutcomeUnknown:
                await asyncio.sleep(PAUSE_S)  # at worst a block is skipped
                continue
            return _counter_value(record)


def _counter_value(record: Record | None) -> int:
    if record is None:
        return 0
    if not record.value.isdigit():
        raise CorruptMetadata(f"{record.key}: {record.value[:40]!r} is not a counter")
    return int(record.value)


# --- election ---


class LeaderElection:
    """One candidate for the leadership that an ephemeral record stands for.

    `value` names the candidate: no two candidates of one key use the same.
    """

    def __init__(
        self, store: MetadataStore, key: str, value: bytes, *, retry_s: float = ELECTION_RETRY_S
    ) -> None:
        self.changes = Signal()
        """Advances whenever this candidate begins or ceases to lead."""
        self._store = store
        self._key = key
        self._value = value
        self._retry_s = retry_s
        # An answer that was asked for before a loss of the session is not believed after it:
        # hence `_losses` is counted.
        self._epoch: int | None = None
        self.leading = False
        self._losses = 0
        self._news = Signal()
        self._closing = False
        self._over = asyncio.Event()
        self._over.set()

    @property
    def epoch(self) -> int | None:
        """While leading: the fencing token. It goes into what the leader writes."""
        return self._epoch

    async def run(self) -> None:
        """Take part until `close`, or until the store object is closed."""
        self._over.clear()
        try:
            async with asyncio.TaskGroup() as group:
                followers = [
                    group.create_task(self._follow_session()),
                    group.create_task(self._follow_record()),
                ]
                await self._campaign()
                # They follow for as long as the store lives, and the group would wait for them.
                for follower in followers:
                    follower.cancel()
        finally:
            # However it ended: nobody leads with no one watching the session.
            self._step_down()
            self._over.set()

    async def lead(self, *, timeout_s: float) -> int:
        """Wait until this candidate leads; its epoch."""
        async with _within(timeout_s, f"{self._key}: becoming leader"):
            while True:
                seen = self.changes.version
                if self._epoch is not None:
                    return self._epoch
                await self.changes.past(seen)

    async def close(self) -> None:
        """Stop leading at once, delete the own record if it is still there, and end `run`."""
        self._closing = True
        self._news.advance()
        await self._over.wait()

    async def _campaign(self) -> None:
        while not self._closing:
            seen = self._news.version
            try:
                await self._try()
            except StoreClosed:
                return
            except BadVersion:
                continue  # another candidate was quicker: see who
            except (Unavailable, SessionLost, OutcomeUnknown):
                pass  # what is true shows at the next attempt
            await self._news.past_within(seen, self._retry_s)
        await self._resign()

    async def _try(self) -> None:
        """Lead if nobody does, go on leading if it is still this candidate."""
        losses = self._losses
        record = await self._store.get(self._key)
        # The session went while we read: what was read may be gone with it.
        if losses != self._losses:
            return
        if record is None:
            self._step_down()
            stat = await self._store.put(self._key, self._value, expected=ABSENT, ephemeral=True)
            # A session lost meanwhile has taken this record along, or is about to.
            if losses == self._losses:
                self._begin(stat.version)
        elif record.stat.mine and record.value == self._value:
            # Also a put of our own whose answer was lost.
            self._begin(record.version)
        else:
            self._step_down()

    async def _resign(self) -> None:
        # Not leading from here on, for as soon as the record is gone another may lead. Only the
        # very record that it led with is deleted (invariant 4).
        epoch = self._epoch
        self._step_down()
        if epoch is None:
            return
        try:
            await self._store.delete(self._key, expected=epoch)
        except (BadVersion, Unavailable, OutcomeUnknown, StoreClosed):
            return  # no longer ours, or the end of the session will remove it

    async def _follow_session(self) -> None:
        async for state in self._store.session_events():
            if state is SessionEvent.LOST:
                self._losses += 1
                self._step_down()
            self._news.advance()

    async def _follow_record(self) -> None:
        try:
            watch = self._store.watch(key=self._key)
        except StoreClosed:
            return
        async with watch:
            # Whatever happened before the watch was open is seen by one more look.
            self._news.advance()
            async for event in watch:
                if event.kind is EventKind.DELETED:
                    self._step_down()
                self._news.advance()
        self._news.advance()

    def _begin(self, epoch: int) -> None:
        if self._epoch != epoch:
            self._epoch, self.leading = epoch, True
            self.changes.advance()

    def _step_down(self) -> None:
        if self._epoch is not None:
            self._epoch, self.leading = None, False
            self.changes.advance()


# --- table view ---


class TableView:
    """The records of one directory, kept in memory and up to date: for small directories."""

    def __init__(self, store: MetadataStore, parent: str, changes: Signal | None = None) -> None:
        self.changes = changes or Signal()
        """Advances after each update; of an own one the first version is the first whole load."""
        self._store = store
        self._parent = parent
        self._records: dict[str, Record] = {}
        self.is_loaded = False
        """Whether the first whole load is done."""

    @property
    def records(self) -> Mapping[str, Record]:
        """The records by key; a live view."""
        return MappingProxyType(self._records)

    async def loaded(self, *, timeout_s: float) -> None:
        """Wait for the first whole load."""
        async with _within(timeout_s, f"{self._parent}: loading the table view"):
            await self.changes.past(0)

    async def run(self) -> None:
        """Follow the directory until the store object is closed."""
        try:
            # Watch first: what changes during the scan is in the queue behind it.
            async with self._store.watch(parent=self._parent) as watch:
                await self._load()
                async for event in watch:
                    await self._follow(event)
        except StoreClosed:
            return

    async def _follow(self, event: Event) -> None:
        # Which records changed is not said: read all of them.
        if event.kind in (EventKind.RESYNC, EventKind.RANGE_DELETED):
            await self._load()
            return
        try:
            record = await self._store.get(event.key)
        except Unavailable:
            # The event is used up. A whole load waits for the store and catches up with it, too.
            await self._load()
            return
        if record is None:
            self._records.pop(event.key, None)
        else:
            self._records[event.key] = record
        self.changes.advance()

    async def _load(self) -> None:
        while True:
            try:
                records = {record.key: record async for record in self._store.scan(self._parent)}
            except Unavailable:
                await asyncio.sleep(PAUSE_S)
                continue
            # In one step: nobody who looks at `records` sees half a directory.
            self._records.clear()
            self._records.update(records)
            self.is_loaded = True
            self.changes.advance()
            return


@asynccontextmanager
async def _within(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what}: not done within {timeout_s:g} s") from error
