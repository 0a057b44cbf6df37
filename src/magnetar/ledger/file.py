"""Ledgers on the local disk: durable by the shared journal, at rest in files of their own.

Owns: `FileLedgers`, all ledgers of one data folder, and their writers. An entry is submitted to
the journal, acknowledged when that is synced, kept in memory as part of its ledger's tail, and
moved to the ledger's file by `settle`; from then on it is read from the file.

Invariants:
1. An entry is in the tail or in the file, never in neither; readers see it only once durable.
2. A ledger's id is the number of the journal record that created it: ids grow and never return.
3. In the journal, a ledger's entries follow each other without a gap, and its fence, close or
   delete stands behind them: replaying any stretch of the journal gives the same ledgers.
4. The file of a deleted ledger goes only after its delete record is durable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Final

from magnetar.errors import (
    CorruptData,
    CorruptEntry,
    DiskFull,
    InvalidArgument,
    LedgerFenced,
    LedgerMissing,
    StorageClosed,
    StorageError,
)
from magnetar.journal.format import JournalRecord
from magnetar.journal.journal import Journal
from magnetar.ledger.api import (
    ENTRY_BYTES_MAX,
    Entry,
    LedgerInfo,
    LedgerState,
    LedgerStore,
    LedgerWriter,
)
from magnetar.ledger.cache import BLOCK_ENTRIES, EntryCache
from magnetar.ledger.file_format import (
    ENTRY_OVERHEAD,
    KIND_CLOSE,
    KIND_CREATE,
    KIND_DELETE,
    KIND_ENTRY,
    KIND_FENCE,
    decode_ledger_id,
    encode_entries,
    encode_entry,
    encode_ledger_record,
    entry_ids,
)
from magnetar.ledger.file_home import LedgerHomes, Move
from magnetar.ledger.file_ledger import (
    FileLedger,
    entries_of,
    loaded_ledger,
    move_of,
    not_writable,
)
from magnetar.model.ids import Position
from magnetar.runtime import metrics
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.runtime.worker import Worker

_KNOWN_MAX: Final = 4096
"""Ledgers at rest whose state is kept in memory."""

# What a read from a file takes along for the next reader, in one call.
_READ_AHEAD_BYTES: Final = 1 << 20

_FREED_AT_ONCE: Final = 10_000

_FROM_MEMORY = metrics.LEDGER_READS.labels(source="memory")
_FROM_CACHE = metrics.LEDGER_READS.labels(source="cache")
_FROM_FILE = metrics.LEDGER_READS.labels(source="file")


_Pending = tuple[int, FileLedger, asyncio.Future[Any], Position | int, int]
"""The (last) journal record, ledger, whom to tell; then the position of the first entry and how
many there are, or the kind of another record."""


class FileWriter(LedgerWriter):
    """The owner's end of a ledger in files."""

    def __init__(self, ledgers: FileLedgers, ledger: FileLedger) -> None:
        self.ledger_id = ledger.ledger_id
        self.durable = ledger.durable
        self._ledgers = ledgers
        self._ledger = ledger

    @property
    def failure(self) -> StorageError | None:
        return self._ledger.failure

    @property
    def last_durable(self) -> int:
        return self._ledger.last_durable

    def append(self, payload: bytes) -> asyncio.Future[Position]:
        return self._ledgers.append(self._ledger, payload)

    @property
    def run_bytes_max(self) -> int:
        return self._ledgers.run_bytes_max

    def append_run(self, payloads: list[bytes], size: int) -> asyncio.Future[Position]:
        return self._ledgers.append_run(self._ledger, payloads, size)

    async def close(self) -> LedgerInfo:
        if self._ledger.state is LedgerState.FENCED:
            raise LedgerFenced(f"ledger {self.ledger_id} was fenced")
        return await self._ledgers.close_ledger(self.ledger_id)


class FileLedgers(LedgerStore):
    """See the module. Use: `replay` each record, `start`, serve, `settle` at times, `close`."""

    def __init__(
        self, homes: LedgerHomes, journal: Journal, mover: Worker, reader: Worker, limits: Limits
    ) -> None:
        self._homes = homes
        self._journal = journal
        self._mover = mover
        self._reader = reader
        self._limits = limits
        # Loaded when first asked for, kept while open or dirty (`_forget_resting`).
        self._known: dict[int, FileLedger] = {}
        self._dirty: dict[int, FileLedger] = {}
        """Ledgers whose file lacks something."""
        self._deleted: dict[int, None] = {}
        """Deleted ledgers whose file may still be there."""
        # Submitted and not durable yet, in journal order: durable ones leave on the left, refused
        # ones on the right. `_taken` is the journal record up to which that was done.
        self._pending: deque[_Pending] = deque()
        self._refusals = 0
        self._cache = EntryCache(limits.ledger_cache_bytes)
        # One read must not push out what the other readers share.
        self._read_ahead_bytes = min(_READ_AHEAD_BYTES, limits.ledger_cache_bytes // 4)
        self._taken = 0
        self._followed = Signal()
        self._settle_lock = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None
        self._closed = False
        self._appends = 0
        """Acknowledged appends that the metric does not show yet."""

    # --- opening and closing

    def replay(self, record: JournalRecord) -> None:
        """Take back a durable record that the files may not hold."""
        if record.kind == KIND_ENTRY:
            self._replay_entry(record.raw)
            return
        ledger_id = decode_ledger_id(record.body)
        if record.kind == KIND_CREATE:
            # All its entries follow in the journal: a file that the crash left is written over.
            self._known[ledger_id] = self._dirty[ledger_id] = FileLedger(ledger_id)
        elif record.kind == KIND_DELETE:
            # Whether the file was removed before the crash does not matter: settling removes it.
            self._known.pop(ledger_id, None)
            self._dirty.pop(ledger_id, None)
            self._deleted[ledger_id] = None
        else:
            ledger = self._replayed(ledger_id, None)
            if ledger.state is not LedgerState.CLOSED:  # a fence may stand behind the close
                closed = record.kind == KIND_CLOSE
                ledger.state = LedgerState.CLOSED if closed else LedgerState.FENCED
                ledger.recorded = ledger.state
            ledger.header_unsure = True
            self._dirty[ledger_id] = ledger

    def _replay_entry(self, raw: bytes) -> None:
        ledger_id, entry_id = entry_ids(raw)
        ledger = self._replayed(ledger_id, entry_id)
        # A gap would be an entry that was acknowledged and is lost (invariant 3).
        if entry_id != ledger.next_entry:
            raise CorruptData(
                f"the journal has entry {ledger_id}:{entry_id} where {ledger.next_entry} follows"
            )
        ledger.tail.append(raw)
        ledger.next_entry = entry_id + 1
        ledger.last_durable = entry_id
        self._dirty[ledger_id] = ledger

    def _replayed(self, ledger_id: int, first_entry: int | None) -> FileLedger:
        """A ledger as its file has it, cut back to before `first_entry`: the journal has more."""
        ledger = self._known.get(ledger_id)
        if ledger is None:
            try:
                ledger = loaded_ledger(ledger_id, self._homes.load(ledger_id, first_entry))
            # The file went with a delete that stands further on in the journal. If none follows,
            # `replayed` refuses to open.
            except LedgerMissing:
                ledger = FileLedger(ledger_id, homeless=True)
                ledger.moved = ledger.next_entry = first_entry or 0
            self._known[ledger_id] = ledger
        return ledger

    def replayed(self, sequence: int) -> None:
        """Every durable record up to `sequence` was replayed: `settle` may be called."""
        homeless = [ledger for ledger in self._known.values() if ledger.homeless]
        if homeless:
            raise CorruptData(f"the file of ledger {homeless[0].ledger_id} is missing")
        self._taken = sequence

    def start(self) -> None:
        self._refusals = self._journal.refusals
        self._follower = asyncio.create_task(self._follow(), name="ledger-follow")

    async def close(self) -> None:
        """Stop; everything must be settled."""
        self._closed = True
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        for ledger in self._known.values():
            ledger.failure = ledger.failure or StorageClosed("the ledger store was closed")
        await self._mover.close()
        await self._reader.close()
        self._homes.close()

    # --- writing

    async def create(self) -> LedgerWriter:
        self._check_open()
        self._forget_refused()
        # No await up to the submit: the record gets the number that becomes the id (invariant 2).
        ledger = FileLedger(self._journal.next_sequence)
        await self._submit(KIND_CREATE, ledger)
        return FileWriter(self, ledger)

    def _submit(self, kind: int, ledger: FileLedger) -> asyncio.Future[None]:
        """Journal a record of a whole ledger; what it says is done once it is durable.

        Done by whoever follows the journal, not by the caller: settling must find it done, or the
        journal would forget a record that no file shows.
        """
        sequence = self._journal.append(encode_ledger_record(kind, ledger.ledger_id))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((sequence, ledger, future, kind, 0))
        return future

    def append(self, ledger: FileLedger, payload: bytes) -> asyncio.Future[Position]:
        if (
            self._refusals != self._journal.refusals
            or ledger.state is not LedgerState.OPEN
            or ledger.failure is not None
        ):
            self._check_writable(ledger)
        if len(payload) > ENTRY_BYTES_MAX:
            raise InvalidArgument(
                f"an entry of {len(payload)} bytes; the most is {ENTRY_BYTES_MAX}"
            )
        entry_id = ledger.next_entry
        record = encode_entry(ledger.ledger_id, entry_id, payload)
        # May raise TooManyRequests. The ledger changes only once the journal has taken the record.
        sequence = self._journal.append(record)
        ledger.next_entry = entry_id + 1
        ledger.tail.append(record)
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        position = Position(ledger.ledger_id, entry_id)
        self._pending.append((sequence, ledger, future, position, 1))
        return future

    @property
    def run_bytes_max(self) -> int:
        # Half of it is room for the heads of entries that are a few bytes each.
        return min(self._journal.run_bytes_max // 2, ENTRY_BYTES_MAX)

    def append_run(
        self, ledger: FileLedger, payloads: list[bytes], size: int
    ) -> asyncio.Future[Position]:
        if (
            self._refusals != self._journal.refusals
            or ledger.state is not LedgerState.OPEN
            or ledger.failure is not None
        ):
            self._check_writable(ledger)
        if size > self.run_bytes_max:
            raise InvalidArgument(f"a run of {size} bytes; the most is {self.run_bytes_max}")
        first, count = ledger.next_entry, len(payloads)
        records = encode_entries(ledger.ledger_id, first, payloads)
        # All of it or none: the journal has whole runs in a batch.
        sequence = self._journal.append_run(records, size + count * ENTRY_OVERHEAD)
        ledger.next_entry = first + count
        ledger.tail += records
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        position = Position(ledger.ledger_id, first)
        self._pending.append((sequence + count - 1, ledger, future, position, count))
        return future

    def _check_writable(self, ledger: FileLedger) -> None:
        # Refused entries leave the tail first: nothing may be decided on top of them.
        self._forget_refused()
        if ledger.state is not LedgerState.OPEN or ledger.failure is not None:
            raise not_writable(ledger)

    async def fence(self, ledger_id: int) -> LedgerInfo:
        return await self._end(ledger_id, LedgerState.FENCED, KIND_FENCE)

    async def close_ledger(self, ledger_id: int) -> LedgerInfo:
        return await self._end(ledger_id, LedgerState.CLOSED, KIND_CLOSE)

    async def _end(self, ledger_id: int, state: LedgerState, kind: int) -> LedgerInfo:
        ledger = await self._find(ledger_id)
        if isinstance(ledger.failure, LedgerMissing):
            raise ledger.failure  # behind a delete, nothing of the ledger may stand in the journal
        # Done before; and a fence that comes behind a close changes nothing.
        if ledger.recorded in (state, LedgerState.CLOSED):
            return ledger.info()
        self._forget_refused()
        if ledger.state is not LedgerState.CLOSED:
            ledger.state = state  # from here on no append is taken
        # Entries in flight stand before it in the journal: once this is durable so are they, and
        # the end that is answered is final (promise 5 of the contract).
        await self._submit(kind, ledger)
        return ledger.info()

    async def delete(self, ledger_id: int) -> None:
        try:
            ledger = await self._find(ledger_id)
        except LedgerMissing:
            return
        self._forget_refused()
        deleted = self._submit(KIND_DELETE, ledger)
        # No entry may follow in the journal: its writer is refused before the delete is durable.
        before, ledger.failure = ledger.failure, LedgerMissing(f"ledger {ledger_id} was deleted")
        try:
            await deleted
        except StorageError as error:
            # It is still there; what its writer had in flight may have been refused as well.
            ledger.failure = error if isinstance(before, LedgerMissing | None) else before
            raise

    # --- reading

    async def info(self, ledger_id: int) -> LedgerInfo:
        return (await self._find(ledger_id)).info()

    async def read(
        self, ledger_id: int, first: int, last: int, *, bytes_max: int = ENTRY_BYTES_MAX
    ) -> list[Entry]:
        if first < 0:
            raise InvalidArgument(f"entry ids begin with 0, not {first}")
        ledger = await self._find(ledger_id)
        # A reader at the end gets nothing, and no error: it waits for `durable` and asks again.
        last = min(last, ledger.last_durable)
        if first > last:
            return []
        # Tailing readers: these entries were not moved to the file yet.
        if first >= ledger.moved:
            entries = ledger.read_tail(first, last, bytes_max)
            _FROM_MEMORY.inc(len(entries))
            return entries
        # Catching up: from the file, up to the tail at most. A short answer is allowed.
        last = min(last, ledger.moved - 1)
        payloads = self._cache.get(ledger_id, first, last, bytes_max)
        source = _FROM_CACHE if payloads else _FROM_FILE
        if not payloads:
            payloads = await self._read_file(ledger_id, first, last, ledger.moved, bytes_max)
        entries = entries_of(ledger_id, first, last, payloads, bytes_max)
        source.inc(len(entries))
        return entries

    async def _read_file(
        self, ledger_id: int, first: int, last: int, moved: int, bytes_max: int
    ) -> Sequence[bytes]:
        """Read whole blocks where that is cheap, so that the next reader finds them cached."""
        read = self._homes.read
        start = first - first % BLOCK_ENTRIES
        stop = min(max(last, start + BLOCK_ENTRIES - 1), moved - 1)
        try:
            payloads = await self._reader.run(
                read, ledger_id, start, stop, max(bytes_max, self._read_ahead_bytes)
            )
        except CorruptEntry:
            payloads = []
        if len(payloads) > first - start:
            self._cache.add(ledger_id, start, payloads)
            metrics.LEDGER_CACHE_BYTES.set(self._cache.bytes_used)
            return payloads[first - start :]
        # Entries before `first` are large or damaged: no concern of this reader.
        return await self._reader.run(read, ledger_id, first, last, bytes_max)

    async def list(self) -> AsyncGenerator[int, None]:
        self._check_open()
        on_disk = await self._reader.run(self._homes.ids)
        # New ledgers have no file yet and deleted ones may have theirs: memory knows of both.
        for ledger_id in sorted({*on_disk, *self._known} - self._deleted.keys()):
            yield ledger_id

    async def _find(self, ledger_id: int) -> FileLedger:
        self._check_open()
        ledger = self._known.get(ledger_id)
        if ledger is not None:
            return ledger
        if ledger_id in self._deleted:
            raise LedgerMissing(f"ledger {ledger_id} was deleted")
        loaded = await self._reader.run(self._homes.load, ledger_id)
        # It may have been loaded by another, or deleted, meanwhile.
        if ledger_id in self._deleted:
            raise LedgerMissing(f"ledger {ledger_id} was deleted")
        ledger = self._known.setdefault(ledger_id, loaded_ledger(ledger_id, loaded))
        self._forget_resting()
        return ledger

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the ledger store was closed")

    def _forget_resting(self) -> None:
        """Keep memory bounded: a ledger that its file describes wholly can be loaded again."""
        surplus = len(self._known) - _KNOWN_MAX - len(self._dirty)
        if surplus <= 0:
            return
        # Open ones stay: their writers hold the object, and a second one would contradict it.
        resting = (
            ledger_id
            for ledger_id, ledger in self._known.items()
            if ledger_id not in self._dirty and ledger.state is not LedgerState.OPEN
        )
        for ledger_id in [each for each, _ in zip(resting, range(surplus), strict=False)]:
            del self._known[ledger_id]

    # --- following the journal

    async def _follow(self) -> None:
        while self._journal.failure is None:
            # Taken before the look, so that an advance in between is not lost.
            seen = self._journal.progress.version
            self._take_durable()
            await self._journal.progress.past(seen)
        # The journal has stopped. What it had synced is acknowledged still, the rest fails.
        self._take_durable()
        self._fail_pending(self._journal.failure)
        self._followed.advance()

    def _take_durable(self) -> None:
        self._forget_refused()
        synced = self._journal.synced
        pending = self._pending
        moved_on: dict[int, FileLedger] = {}
        count = 0
        # In journal order, so futures resolve in the order of the calls. A future that is done was
        # cancelled by its caller: the entry exists all the same.
        while pending and pending[0][0] <= synced:
            _, ledger, future, what, entries = pending.popleft()
            if isinstance(what, int):
                self._do(what, ledger)
                if not future.done():
                    future.set_result(None)
                continue
            ledger.last_durable = what.entry_id + entries - 1
            self._dirty[what.ledger_id] = moved_on[what.ledger_id] = ledger
            count += entries
            if not future.done():
                future.set_result(what)
        # Once per ledger and batch, behind all futures: whoever wakes sees the whole batch.
        for ledger in moved_on.values():
            ledger.durable.advance()
        self._taken = synced
        self._followed.advance()
        self._appends += count

    def _do(self, kind: int, ledger: FileLedger) -> None:
        """What a durable record of a whole ledger says."""
        ledger_id = ledger.ledger_id
        if kind == KIND_DELETE:
            self._known.pop(ledger_id, None)
            self._dirty.pop(ledger_id, None)
            # Only now may settling remove its file (invariant 4).
            self._deleted[ledger_id] = None
            self._cache.drop(ledger_id)
            return
        if kind == KIND_CREATE:
            self._known[ledger_id] = ledger
        # Closed is final: a fence that was submitted behind it says nothing new.
        elif ledger.recorded is not LedgerState.CLOSED:
            ledger.recorded = LedgerState.CLOSED if kind == KIND_CLOSE else LedgerState.FENCED
        self._dirty[ledger_id] = ledger

    async def _follow_to(self, sequence: int) -> None:
        while self._taken < sequence:
            if self._journal.failure is not None:
                raise self._journal.failure
            await self._followed.past(self._followed.version)

    def _forget_refused(self) -> None:
        """Entries that the journal refused fail, and so does every later one of their writers."""
        if self._journal.refusals == self._refusals:
            return
        self._refusals = self._journal.refusals
        synced = self._journal.synced
        # Every submit looks here first, so all that is above `synced` was there at the refusal.
        refused = [each for each in self._pending if each[0] > synced]
        for _ in refused:
            self._pending.pop()
        self._fail(refused, DiskFull("the journal had no space for this entry"))

    def _fail_pending(self, error: StorageError) -> None:
        refused = list(self._pending)
        self._pending.clear()
        self._fail(refused, error)

    def _fail(
        self,
        refused: Iterable[_Pending],
        error: StorageError,
    ) -> None:
        for _, ledger, future, what, _ in refused:
            # The first refused entry of a ledger takes those behind it along: no gap (promise 3).
            if ledger.failure is None and not isinstance(what, int):
                ledger.failure = error
                # Earlier entries that are durable may still wait in the queue to be told so.
                del ledger.tail[what.entry_id - ledger.moved :]
                ledger.next_entry = what.entry_id
                ledger.durable.advance()
            if not future.done():
                future.set_exception(error)

    # --- moving to the files

    async def settle(self, sequence: int) -> None:
        """Return when everything up to journal record `sequence` is durable in ledger files."""
        await self._follow_to(sequence)
        metrics.LEDGER_APPENDS.inc(self._appends)
        self._appends = 0
        async with self._settle_lock:
            # One moment: what becomes durable during the move is for the next settling.
            ledgers = list(self._dirty.values())
            deleted = list(self._deleted)
            moves = [move_of(ledger) for ledger in ledgers]
            if deleted:
                # By the thread that has them open: else a removed file would keep its space.
                await self._reader.run(self._homes.forget, deleted)
            await self._mover.run(self._homes.move, moves, deleted)
            # Only now, synced: until here readers take these entries from the tail (invariant 1).
            for ledger, move in zip(ledgers, moves, strict=True):
                self._moved(ledger, move)
            for ledger_id in deleted:
                del self._deleted[ledger_id]
        # A second's entries may be a hundred thousand: to free them takes its time.
        for move in moves:
            while len(move.records) > _FREED_AT_ONCE:
                del move.records[-_FREED_AT_ONCE:]
                await asyncio.sleep(0)

    def _moved(self, ledger: FileLedger, move: Move) -> None:
        ledger.moved += len(move.records)
        ledger.moved_end += sum(map(len, move.records))
        del ledger.tail[: len(move.records)]
        if move.header is not None:
            ledger.header = move.header
            ledger.header_unsure = False
        # More may have come while the files were written: then it stays dirty.
        settled = ledger.moved == ledger.last_durable + 1 and ledger.wanted_header() is None
        if settled and not ledger.tail:
            self._dirty.pop(ledger.ledger_id, None)
