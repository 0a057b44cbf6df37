"""The engine of the embedded metadata store: judged in memory, journalled, kept in SQLite.

Owns: `SqliteMetadata`, one per data folder. A change goes through four places, each a step
closer to rest:

    judged    decided against every change before it; submitted to the journal; invisible
    visible   durable in the journal: readable, watched, acknowledged
    applying  on its way into SQLite, in one transaction; still read from memory
    home      in SQLite; the journal may forget it once SQLite is synced (`settle`)

Invariants:
1. A change leaves `judged` only when the journal has synced it, and is acknowledged only then.
2. An answer that rests on a judged change (a lost compare-and-set, "nothing to delete") waits
   until that change is durable: no answer ever rests on something that did not happen.
3. When the journal refuses a batch, everything judged is void and its callers are told so.
4. A version is the number of the journal record that wrote it: never reused.
5. Old sessions' ephemeral records are gone, durably, before the first client connects.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from magnetar.errors import (
    DiskFull,
    MagnetarError,
    OutcomeUnknown,
    StorageError,
    TooManyRequests,
    Unavailable,
)
from magnetar.journal.format import JournalRecord, encode_record
from magnetar.journal.journal import Journal
from magnetar.metadata.api import Event, EventKind, Index, Record, Stat
from magnetar.metadata.judge import (
    NO_SESSION,
    StoredRecord,
    judge_delete,
    judge_put,
    next_sequence,
    parse_sequence,
    sequence_key,
    sequence_prefixes,
    split_key,
    stat_of,
)
from magnetar.metadata.known_names import KnownNames
from magnetar.metadata.layers import Layer, directory_states
from magnetar.metadata.sqlite_home import SqliteHome
from magnetar.metadata.sqlite_rows import (
    body_pieces,
    decode_body,
    decode_deletes,
    deletes_body,
    encode_row,
)
from magnetar.metadata.watches import Watchers
from magnetar.runtime import metrics
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.runtime.worker import Worker

KIND_CHANGE: Final = 16
"""The journal's kind of a metadata change: key and new state."""

KIND_DELETES: Final = 17
"""The journal's kind of many deletes: their keys."""

METADATA_KINDS: Final = (KIND_CHANGE, KIND_DELETES)

_ROOM_STEP: Final = 256
"""How many changes are taken between two looks at how many are unapplied."""

_PUTS = metrics.METADATA_CHANGES.labels(kind="put")
_DELETES = metrics.METADATA_CHANGES.labels(kind="delete")


class _Change(msgspec.Struct, frozen=True):
    """A decided change, or merely an answer, that waits for the journal."""

    sequence: int
    future: asyncio.Future[Any]
    answer: Any
    key: str
    parent: str
    state: StoredRecord | None
    row: bytes
    event: EventKind | None
    """None: nothing changes, only the answer waits (its error, if it is one)."""


class _Deletes(msgspec.Struct, frozen=True):
    """Decided deletes of several records that share a record of the journal."""

    sequence: int
    future: asyncio.Future[Any]
    changes: list[_Change]
    """One for each, with this sequence and future."""
    answer: list[str]
    """Their keys."""


class SqliteMetadata:
    """See the module. Use: `replay` each record, `start`, `connect`, `settle` at times, `close`."""

    def __init__(
        self, home: SqliteHome, journal: Journal, worker: Worker, clock: Clock, limits: Limits
    ) -> None:
        self.home = home
        self.limits = limits
        self._journal = journal
        self._worker = worker
        self._clock = clock
        # The places of the module's table. `_pending` has what is judged, and the answers that wait
        # for it, in journal order.
        self._judged: dict[str, _Change] = {}
        self._visible = Layer()
        self._applying = Layer()
        self._pending: deque[_Change | _Deletes] = deque()
        self._refusals = 0
        # How many changes may be taken before the unapplied ones are counted again.
        self._room = 0
        # Shortcuts: names that cannot exist, and the highest numbers of sequences, each with the
        # journal record that gave it.
        self._known = KnownNames(home.reader, self._on_their_way)
        self._sequences: OrderedDict[tuple[str, int], tuple[tuple[int, ...], int]] = OrderedDict()
        self._followed = Signal()
        self._apply_wanted = asyncio.Event()
        self._apply_lock = asyncio.Lock()
        # Journal records: SQLite has all up to `_applied`, `_taken` is the last that is visible.
        self._applied = home.applied
        self._applying_sequence = self._taken = self._applied
        self._tasks: list[asyncio.Task[None]] = []
        self.watchers: list[Watchers] = []
        self.open_scans = asyncio.Semaphore(limits.metadata_snapshots)

    # --- opening and closing

    def replay(self, record: JournalRecord) -> None:
        """Take back a durable change that SQLite may not hold."""
        if record.sequence <= self._applied:
            return
        if record.kind == KIND_DELETES:
            for key, row in decode_deletes(record.body):
                self._visible.set(key, None, row)
        else:
            self._visible.set(*decode_body(record.body))

    def replayed(self, sequence: int) -> None:
        """Every durable change up to `sequence` was replayed: `settle` may be called."""
        self._taken = sequence

    async def start(self) -> None:
        """Begin to serve; the journal has started, and what was replayed is settled."""
        self._refusals = self._journal.refusals
        self._tasks = [
            asyncio.create_task(self._follow(), name="metadata-follow"),
            asyncio.create_task(self._apply_when_wanted(), name="metadata-apply"),
        ]
        # Their sessions ended with the process that had them (invariant 5).
        left_over = [self.delete(key, None) for key in self.home.reader.ephemeral_keys()]
        if left_over:
            await asyncio.gather(*left_over)

    async def close(self) -> None:
        """Stop; everything must be settled and every client closed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._worker.close()
        self.home.close()

    # --- writing: decide now, answer when durable

    def put(
        self,
        key: str,
        value: bytes,
        expected: int | None,
        indexes: tuple[Index, ...],
        session: int,
    ) -> asyncio.Future[Stat]:
        if self._room > 0 and self._journal.refusals == self._refusals:
            self._room -= 1
        else:
            self._check_room()
        parent, _, name = key.rpartition("/")  # as `split_key`
        # Judged against changes that are not durable yet, too: calls of one turn see each other.
        # The version is the number that `_submit` gets; there is no await in between (invariant 4).
        judged = self._judged.get(key)
        current = judged.state if judged is not None else self._visible_at(key, parent, name)
        try:
            state = judge_put(
                key,
                current,
                value=value,
                expected=expected,
                indexes=indexes,
                session=session,
                version=self._journal.next_sequence,
                now_ms=self._clock.now_ms(),
            )
        except MagnetarError as error:
            # A lost compare-and-set is an answer: it waits for what it rests on (invariant 2).
            metrics.METADATA_CONFLICTS.inc()
            return self._answer(error)
        # A plain put may write a key that `append` would give next.
        if self._sequences:
            self._note_sequence(key, state.version)
        kind = EventKind.CREATED if current is None else EventKind.MODIFIED
        return self._submit(key, parent, name, state, kind, stat_of(key, state, session))

    def append(
        self, prefix: str, value: bytes, deltas: tuple[int, ...], indexes: tuple[Index, ...]
    ) -> asyncio.Future[Stat]:
        self._check_room()
        # Behind `_check_room`: a refusal makes void what is known of the numbers.
        numbers = next_sequence(self._last_numbers(prefix, len(deltas)), deltas)
        return self.put(sequence_key(prefix, numbers), value, None, indexes, NO_SESSION)

    def delete(self, key: str, expected: int | None) -> asyncio.Future[bool]:
        self._check_room()
        try:
            present = judge_delete(key, self._judged_state(key), expected)
        except MagnetarError as error:
            metrics.METADATA_CONFLICTS.inc()
            return self._answer(error)
        # Perhaps because of a deletion that is judged only: the answer waits for it (invariant 2).
        if not present:
            return self._answer(False)
        return self._submit(key, *split_key(key), None, EventKind.DELETED, True)

    def delete_seen(self, seen: list[tuple[str, int]]) -> asyncio.Future[list[str]]:
        """Delete what is there in these versions, with one record of the journal; its keys."""
        self._check_room()
        self._room -= len(seen) - 1
        rows: dict[str, tuple[str, bytes]] = {}
        for key, version in seen:
            state = self._judged_state(key)
            if state is not None and state.version == version:
                parent, name = split_key(key)
                rows[key] = parent, encode_row(parent, name, None)
        if not rows:
            return self._answer([])  # perhaps because of deletions that are judged only
        try:
            body = deletes_body([row for _, row in rows.values()])
            sequence = self._journal.append(encode_record(KIND_DELETES, body))
        except StorageError as error:
            text = f"{len(rows)} records cannot be deleted: {error}"
            raise Unavailable(text, hint=error.hint) from error
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        changes = [
            _Change(sequence, future, None, key, parent, None, row, EventKind.DELETED)
            for key, (parent, row) in rows.items()
        ]
        self._judged.update((each.key, each) for each in changes)
        self._pending.append(_Deletes(sequence, future, changes, list(rows)))
        return future

    async def settle_submitted(self) -> None:
        """Wait until every change submitted so far is visible (or refused)."""
        last = self._journal.next_sequence - 1
        while self._pending and self._pending[0].sequence <= last:
            await self._followed.past(self._followed.version)

    def _submit(
        self,
        key: str,
        parent: str,
        name: str,
        state: StoredRecord | None,
        event: EventKind,
        answer: Any,
    ) -> asyncio.Future[Any]:
        row = encode_row(parent, name, state)
        try:
            # If the journal does not take it, nothing was remembered yet.
            sequence = self._journal.append(encode_record(KIND_CHANGE, *body_pieces(row, state)))
        except StorageError as error:
            raise Unavailable(f"{key} cannot be changed: {error}", hint=error.hint) from error
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        change = _Change(sequence, future, answer, key, parent, state, row, event)
        self._judged[key] = change
        self._pending.append(change)
        self._known.put(parent, name)
        return future

    def _answer(self, answer: Any) -> asyncio.Future[Any]:
        """Answer once everything that the answer may rest on is durable."""
        self.check_running()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._pending:
            # With the number of the last change, so that both become due in the same step.
            last = self._pending[-1].sequence
            self._pending.append(_Change(last, future, answer, "", "", None, b"", None))
        else:
            _resolve(future, answer)
        return future

    def check_running(self) -> None:
        """Refuse an answer from memory: what was judged last may or may not have happened."""
        if self._journal.failure is not None:
            raise Unavailable(f"the store stopped: {self._journal.failure}")

    def _check_room(self) -> None:
        # What was judged on top of a refused change is void: forget it, then judge (invariant 3).
        if self._journal.refusals != self._refusals:
            self._forget_refused()
        if self._room > 0:
            self._room -= 1
            return
        # SQLite does not keep up. The caller may come again; the layers in memory stay bounded.
        unapplied = len(self._pending) + len(self._visible) + len(self._applying)
        if unapplied >= self.limits.metadata_unapplied_records:
            raise TooManyRequests(f"{unapplied} metadata changes wait for SQLite")
        self._room = min(_ROOM_STEP, self.limits.metadata_unapplied_records - unapplied) - 1

    def _judged_state(self, key: str) -> StoredRecord | None:
        judged = self._judged.get(key)
        return judged.state if judged is not None else self.visible_state(key)

    # --- sequences

    def _last_numbers(self, prefix: str, dimensions: int) -> tuple[int, ...] | None:
        """The highest numbers given so far, the undecided ones included."""
        cached = self._sequences.get((prefix, dimensions))
        if cached is not None:
            self._sequences.move_to_end((prefix, dimensions))
            return cached[0]
        parent, name = split_key(prefix)
        # Two appends of one turn must not get the same numbers, so undecided keys count as well.
        judged = (split_key(key)[1] for key in self._judged if split_key(key)[0] == parent)
        known = [parse_sequence(name, each, dimensions) for each in judged]
        known.append(self._visible_numbers(parent, name, dimensions))
        last = max((each for each in known if each is not None), default=None)
        self._remember((prefix, dimensions), last or (0,) * dimensions, 0)
        return last

    def _visible_numbers(
        self, parent: str, name: str, dimensions: int | None
    ) -> tuple[int, ...] | None:
        changed = dict(directory_states((self._visible, self._applying), parent, name, None))
        # A name that a layer knows is decided there, deletions included;
        # SQLite speaks for the others.
        in_home = (
            each
            for each in self.home.reader.names_downwards(parent, name)
            if each not in changed and parse_sequence(name, each, dimensions) is not None
        )
        candidates = [each for each, state in changed.items() if state is not None]
        candidates.extend([highest] if (highest := next(in_home, None)) is not None else [])
        numbers = (parse_sequence(name, each, dimensions) for each in candidates)
        return max((each for each in numbers if each is not None), default=None)

    def _note_sequence(self, key: str, version: int) -> None:
        """A key that looks like one of a sequence raises what the sequence knows."""
        parent, name = split_key(key)
        for prefix in sequence_prefixes(name):
            numbers = parse_sequence(prefix, name)
            assert numbers is not None
            place = (f"{parent}/{prefix}", len(numbers))
            known = self._sequences.get(place)
            if known is not None and known[0] < numbers:
                self._remember(place, numbers, version)

    def _remember(self, place: tuple[str, int], numbers: tuple[int, ...], sequence: int) -> None:
        self._sequences[place] = (numbers, sequence)
        self._sequences.move_to_end(place)
        while len(self._sequences) > self.limits.sequence_cache_entries:
            oldest = next(iter(self._sequences))
            if self._sequences[oldest][1] > self._journal.synced:
                return  # its highest number is known nowhere else yet
            del self._sequences[oldest]

    def highest_key(self, prefix: str) -> str | None:
        """The highest visible key of a sequence, of whatever dimensions."""
        parent, name = split_key(prefix)
        numbers = self._visible_numbers(parent, name, None)
        return None if numbers is None else sequence_key(prefix, numbers)

    # --- reading

    def visible_state(self, key: str) -> StoredRecord | None:
        return self._visible_at(key, *split_key(key))

    def _visible_at(self, key: str, parent: str, name: str) -> StoredRecord | None:
        # From the newest to the oldest: the first that knows the key is right, deleted or not.
        states = self._visible.states
        if key not in states:
            states = self._applying.states
            if key not in states:
                return self._known.record(key, parent, name)
        return states[key]

    def _on_their_way(self) -> Iterator[str]:
        yield from self._applying.states
        yield from self._visible.states
        yield from self._judged

    def layers(self) -> tuple[Layer, Layer]:
        """The changes over the database, newest first."""
        return self._visible, self._applying

    # --- following the journal

    async def _follow(self) -> None:
        while self._journal.failure is None:
            # Before the look: what advances after it is not missed.
            seen = self._journal.progress.version
            self._take_durable()
            await self._journal.progress.past(seen)
        self._take_durable()
        # The batch that was being synced may be durable or not: only a restart tells.
        self._fail_pending(OutcomeUnknown(f"the store stopped: {self._journal.failure}"))
        self._followed.advance()

    def _take_durable(self) -> None:
        if self._journal.refusals != self._refusals:
            self._forget_refused()
        synced = self._journal.synced
        pending = self._pending
        puts = deletes = 0
        while pending and pending[0].sequence <= synced:
            change = pending.popleft()
            # Readable and watched first, then answered: whoever has the answer reads its own write.
            if isinstance(change, _Deletes):
                for each in change.changes:
                    self._show(each)
                deletes += len(change.changes)
            elif change.event is not None:
                self._show(change)
                if change.state is not None:
                    puts += 1
                else:
                    deletes += 1
            _resolve(change.future, change.answer)
        if puts or deletes:
            _PUTS.inc(puts)
            _DELETES.inc(deletes)
            metrics.METADATA_UNAPPLIED_RECORDS.set(len(self._visible) + len(self._applying))
        if len(self._visible) >= self.limits.metadata_apply_records:
            self._apply_wanted.set()
        self._taken = synced
        self._followed.advance()

    def _show(self, change: _Change) -> None:
        """Make a durable change readable, then tell the watches."""
        key, state, judged = change.key, change.state, self._judged
        self._known.changed(key)
        # A later change of the key that is only judged stays: new verdicts go by that one.
        if judged[key] is change:
            del judged[key]
        if change.event is EventKind.CREATED and state is not None:
            self._visible.create(key, state, change.row)
        elif state is not None:
            self._visible.set(key, state, change.row)
        elif self._visible.delete(key, change.row) and key not in judged:
            self._known.gone([key])
        for watchers in self.watchers:
            # Most changes are in directories that nobody watches.
            if watchers.has(change.parent):
                assert change.event is not None
                version = None if state is None else state.version
                watchers.publish(Event(change.event, key, version))

    def _forget_refused(self) -> None:
        """What the journal refused was never there. Everything pending was behind it."""
        self._refusals = self._journal.refusals
        refused = [each for each in self._pending if each.sequence > self._journal.synced]
        for _ in refused:
            self._pending.pop()
        # What is left in the queue is synced already and waits for its turn only.
        self._judged = {}
        for each in self._pending:
            changes = each.changes if isinstance(each, _Deletes) else [each]
            self._judged.update((one.key, one) for one in changes if one.event is not None)
        # Some numbers may have been refused: they are learnt again, when asked for.
        self._sequences.clear()
        for each in refused:
            _resolve(each.future, Unavailable("the disk is full", hint=DiskFull.hint))

    def _fail_pending(self, error: MagnetarError) -> None:
        while self._pending:
            _resolve(self._pending.popleft().future, error)

    # --- moving to SQLite

    async def settle(self, sequence: int) -> None:
        """Return when every change up to journal record `sequence` is durable in SQLite."""
        while self._taken < sequence:
            if self._journal.failure is not None:
                raise self._journal.failure
            await self._followed.past(self._followed.version)
        # A layer that was on its way goes first, so this may take two rounds.
        while self._applied < sequence:
            await self._apply()
        await self._worker.run(self.home.sync)

    async def _apply_when_wanted(self) -> None:
        while True:
            await self._apply_wanted.wait()
            self._apply_wanted.clear()
            try:
                await self._apply()
            except DiskFull:
                metrics.DISK_FULL.inc()  # the changes stay in memory; `settle` tries again
            # What SQLite holds now is in doubt. The journal has it all: stop,
            # and let a start replay.
            except StorageError as error:
                self._journal.fence(error)
                return

    async def _apply(self) -> None:
        async with self._apply_lock:
            # A layer whose transaction failed is tried again as it is: newer
            # changes must not overtake.
            if not len(self._applying):
                self._applying, self._visible = self._visible, Layer()
                self._applying_sequence = self._taken
            sequence = self._applying_sequence
            await self._worker.run(self.home.apply, self._applying, sequence)
            # Read from memory until here, and from SQLite from here on: in between no await.
            applied, self._applying = self._applying, Layer()
            # Unless the name was put again meanwhile: then it is on its way once more.
            self._known.gone(
                key
                for key, state in applied.states.items()
                if state is None and key not in self._visible.states and key not in self._judged
            )
            self._applied = sequence
            metrics.METADATA_UNAPPLIED_RECORDS.set(len(self._visible))


def record_of(key: str, state: StoredRecord, session: int) -> Record:
    return Record(stat_of(key, state, session), state.value)


def _resolve(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, MagnetarError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
