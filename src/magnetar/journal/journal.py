"""The journal: one per process, the place where everything becomes durable first.

Owns: the order of durability. Backends submit records; a single coroutine takes what has gathered,
writes it as one batch, syncs it, and moves `synced` on. While a sync runs the next batch gathers:
that is the group commit, over all ledgers and the metadata store together, without a timer.

Invariants:
1. Records become durable in the order of `append` calls; what survives a crash is a prefix.
2. `synced` moves only after the sync returned. Nobody above acknowledges anything before.
3. A batch that could not be written for lack of space is refused with everything behind it:
   `refusals` moves, their numbers are given again, and nothing of them is ever durable.
4. A failed sync fences the journal for good: what of the batch is durable is unknown.
5. A file is recycled only when every record in it is in its home (`release`).
6. The records of a run are in one batch: all of them are durable, or none is.

Followers do not get callbacks: they wait for `progress` to pass what they know, then look at
`synced`, `refusals` and `failure`. A backend must also compare `refusals` before each `append`,
because what it had decided on top of a refused record is void.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Final

from magnetar.errors import (
    DeadlineExceeded,
    DiskFull,
    InvalidArgument,
    StorageClosed,
    StorageError,
    StorageFenced,
    TooManyRequests,
)
from magnetar.journal.files import JournalFile, create_file, open_files
from magnetar.journal.format import (
    BATCH_HEADER_BYTES,
    FILE_HEADER_BYTES,
    SECTOR_BYTES,
    batch_bytes,
    encode_batch,
    encode_settled,
)
from magnetar.journal.recovery import Recovered, recover
from magnetar.runtime import metrics
from magnetar.runtime.clock import Clock
from magnetar.runtime.disk import Disk
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.runtime.worker import Worker

# So many batches at most wait for the metrics if the owner's timer does not `count` before.
_UNCOUNTED_BATCHES: Final = 1024


class Journal:
    """See the module. Use: `open`, replay `recovered`, `start`, then `append` and `release`."""

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        limits: Limits,
        clock: Clock,
        writer: Worker,
        filler: Worker,
    ) -> None:
        """`writer` syncs batches; `filler` prepares files, so that no batch waits for zeros."""
        self._folder = folder
        self._disk = disk
        self._limits = limits
        self._clock = clock
        self._writer = writer
        self._filler = filler
        self._store_id = bytes(16)
        self._next_slot = 0

        # What followers see: they wait for a signal, then look at the numbers.
        self.progress = Signal()
        self.pressure = Signal()
        """Moves when a file is full: a good moment to settle."""
        self.synced = 0
        self.settled = 0
        self.refusals = 0
        self.written_bytes = 0
        """Of all records that became durable since the start."""
        self._settled_bytes = 0
        self.failure: StorageError | None = None

        self._batches: list[tuple[int, int, float]] = []
        """Records, bytes and seconds of batches that the metrics do not show yet."""
        # Runs among what is queued: the number of the first record and the one behind the last.
        self._runs: deque[tuple[int, int]] = deque()
        # Submitted, and in no batch yet. `_last_change` is the newest record of a backend: the
        # journal's own ones have no home, so nothing is left to settle behind it.
        self._queue: list[bytes] = []
        self.queue_bytes = 0
        """Submitted, and not yet taken into a batch."""
        self._room_bytes = limits.journal_queue_bytes
        self._submitted = asyncio.Event()
        self._next = 1
        self._last_change = 0
        # The way of a file: spare or free, active (takes batches), full (till `release`), free.
        self._active: JournalFile | None = None
        self._full: deque[JournalFile] = deque()
        self._free: list[JournalFile] = []
        self._spare: asyncio.Future[JournalFile] | None = None
        self._released = Signal()
        self._settle_error: StorageError | None = None
        self._committer: asyncio.Task[None] | None = None
        # A record fits into one batch, and that into one file with less than a sector of padding.
        self._record_bytes_max = (
            limits.journal_file_bytes - FILE_HEADER_BYTES - BATCH_HEADER_BYTES - SECTOR_BYTES
        )

    # --- opening

    async def open(self, store_id: bytes) -> Recovered:
        """Read what is durable; the caller moves it to its homes before `start`."""
        self._store_id = store_id
        return await self._writer.run(self._open)

    def _open(self) -> Recovered:
        self._disk.make_folder(self._folder)
        self._free = open_files(self._disk, self._folder, self._store_id)
        self._next_slot = max((int(file.path.stem) + 1 for file in self._free), default=0)
        if not self._free:
            self._free.append(self._create())
        recovered = recover(self._free)
        self._next = recovered.next_sequence
        # A crash may leave a file with a header and no batch. It is the next to be used: two files
        # that begin with the same record could not be told apart.
        self._free.sort(key=lambda file: file.header.first_sequence != self._next)
        # Settled in advance, and every file free: the caller brings all of it home before `start`.
        self.synced = self.settled = recovered.next_sequence - 1
        return recovered

    async def forget_recovered(self) -> None:
        """Note that everything recovered is durable at home: the next start need not replay it."""
        used = [file for file in self._free if file.header.first_sequence]
        if used:
            newest = max(used, key=lambda file: file.header.first_sequence)
            await self._writer.run(newest.note_settled, self.synced)

    def start(self) -> None:
        """Begin to commit. Everything recovered must be durable in its home by now."""
        self._committer = asyncio.create_task(self._commit_batches(), name="journal-commit")

    # --- submitting

    @property
    def next_sequence(self) -> int:
        """The number that the next record gets."""
        return self._next

    @property
    def unsettled_bytes(self) -> int:
        """What will be written once more, to its homes."""
        return self.written_bytes - self._settled_bytes + self.queue_bytes

    @property
    def unsettled(self) -> bool:
        """Whether a record is durable that may not be in its home."""
        return self._last_change > self.settled

    def append(self, record: bytes) -> int:
        """Submit a record (as `encode_record` makes them); its number."""
        if self.failure is not None or self._committer is None:
            self._check_open()
        size = len(record)
        # In full, without calls: this is once per entry.
        if self.queue_bytes + size > self._room_bytes or size > self._record_bytes_max:
            self._check_room(size)
            # Not retryable: no file could ever take it.
            raise InvalidArgument(f"a record of {size} bytes does not fit into a journal file")
        # As `_submit` does.
        if not self._queue:
            self._submitted.set()
        self._queue.append(record)
        self.queue_bytes += size
        sequence = self._last_change = self._next
        self._next = sequence + 1
        return sequence

    @property
    def run_bytes_max(self) -> int:
        """Bytes that a run may have."""
        return min(self._limits.journal_batch_bytes, self._record_bytes_max)

    def append_run(self, records: list[bytes], size: int) -> int:
        """Submit records that become durable together or not at all; the number of the first."""
        self._check_open()
        self._check_room(size)
        if size > self.run_bytes_max or len(records) > self._limits.journal_batch_records:
            raise InvalidArgument(f"a run of {len(records)} records, {size} bytes is no batch")
        if not self._queue:
            self._submitted.set()
        first = self._next
        self._next = first + len(records)
        self._runs.append((first, self._next))
        self._queue += records
        self.queue_bytes += size
        self._last_change = self._next - 1
        return first

    async def durable(self, sequence: int) -> None:
        """Wait until a record that was submitted is durable; raise if it never will be."""
        refusals = self.refusals
        while self.synced < sequence:
            seen = self.progress.version
            if self.failure is not None:
                raise self.failure
            if self.refusals != refusals:
                raise DiskFull("the journal had no space for this record")
            # A refused number is given again, but not synced before every waiter has had its turn.
            await self.progress.past(seen)

    def _submit(self, record: bytes, size: int) -> int:
        # Only the first one wakes the committer; the rest gathers behind it: group commit.
        if not self._queue:
            self._submitted.set()
        self._queue.append(record)
        self.queue_bytes += size
        sequence = self._next
        self._next = sequence + 1
        return sequence

    def _check_room(self, size: int) -> None:
        # The disk does not keep up. Retryable: nothing was submitted.
        if self.queue_bytes + size > self._room_bytes:
            raise TooManyRequests(f"{self.queue_bytes} bytes wait for the journal")

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._committer is None:
            raise StorageClosed("the journal is closed")

    # --- settling

    def release(self, sequence: int, written: int = 0) -> None:
        """Recycle the files of all records up to `sequence`, which are durable in their homes.

        `written`: what `written_bytes` was when that was the last durable one.
        """
        is_new = sequence > self.settled
        self.settled = max(self.settled, sequence)
        self._settled_bytes = max(self._settled_bytes, written)
        # Also if nothing is new: a file may have filled up with what was settled before.
        while self._full and self._full[0].last_sequence <= sequence:
            self._free.append(self._full.popleft())
        self._settle_error = None
        self._released.advance()
        # For recovery, which would otherwise replay more than it needs. Not by `append`: if this
        # record had to be settled too, an idle journal would never come to rest.
        if is_new and self.failure is None and self._committer is not None:
            record = encode_settled(sequence)
            self._submit(record, len(record))

    def settling_failed(self, error: StorageError) -> None:
        """The homes cannot take more now: batches that need a recycled file are refused."""
        self._settle_error = error
        self._released.advance()

    def fence(self, error: StorageError) -> None:
        """Stop for good: nothing submitted and not yet durable is acknowledged any more."""
        if self.failure is None:
            self.failure = error
            self._queue.clear()
            self.queue_bytes = 0
            # Followers fail what is pending; the owner's settling loop sees the end.
            self.progress.advance()
            self.pressure.advance()

    # --- committing

    async def _commit_batches(self) -> None:
        while self.failure is None:
            if not self._queue:
                self._submitted.clear()
                await self._submitted.wait()
                continue
            # Numbers are not kept per record: they are counted back from the next one to be given.
            records, payload = self._take()
            first = self._next - len(self._queue) - len(records)
            try:
                file = await self._file_with_room(batch_bytes(payload), first)
                buffers = encode_batch(records, payload, first, self.synced, file.header.salt)
                started = self._clock.monotonic()
                await self._writer.run(file.write_synced, buffers)
            # No room in the file system, or in the homes for what must be settled first: nothing of
            # the batch is there, now or after a crash (invariant 3).
            except DiskFull as error:
                self._refuse(first, error)
            # How much of it is durable only a restart can tell (invariant 4).
            except StorageError as error:
                self.fence(error if isinstance(error, StorageFenced) else _fenced_by(error))
            else:
                # Moved before the signal: whoever wakes must find `synced` there (invariant 2).
                file.end += batch_bytes(payload)
                file.last_sequence = self.synced = first + len(records) - 1
                self.progress.advance()
                self.written_bytes += payload
                self._batches.append((len(records), payload, self._clock.monotonic() - started))
                if len(self._batches) >= _UNCOUNTED_BATCHES:
                    self.count()

    def _take(self) -> tuple[list[bytes], int]:
        """The records of the next batch and their bytes."""
        limits = self._limits
        most = min(limits.journal_batch_bytes, self._record_bytes_max)
        # Nearly always all of it fits, and the list itself is handed over.
        if len(self._queue) <= limits.journal_batch_records and self.queue_bytes <= most:
            records, payload = self._queue, self.queue_bytes
            self._queue = []
            self._runs.clear()
        else:
            # A burst: one sync takes its share, and at least one record, however large.
            payload = count = 0
            for record in self._queue[: limits.journal_batch_records]:
                if count and payload + len(record) > most:
                    break
                payload += len(record)
                count += 1
            count = self._without_part_of_a_run(count)
            records = self._queue[:count]
            payload = sum(map(len, records))
            del self._queue[:count]
        self.queue_bytes -= payload
        return records, payload

    def _without_part_of_a_run(self, count: int) -> int:
        """The most records that a batch of `count` may have without cutting a run (invariant 6)."""
        first = self._next - len(self._queue)
        runs = self._runs
        while runs and runs[0][1] <= first + count:
            runs.popleft()
        # A run at the very front fits into a batch (`append_run`), so this leaves at least one.
        return runs[0][0] - first if runs and runs[0][0] < first + count else count

    async def _file_with_room(self, size: int, first: int) -> JournalFile:
        if self._active is not None:
            if self._active.has_room(size):
                return self._active
            # It waits for `release`; the owner hears that now is a good moment to settle.
            self._full.append(self._active)
            self._active = None
            self.pressure.advance()
        file = await self._free_file()
        file.begin(first, self.settled)
        self._active = file
        # Filled with zeros while this one takes batches, so that the next change of files is quick.
        if not self._free and self._spare is None and not self._at_most_files():
            self._spare = self._filler.run(self._create)
        return file

    async def _free_file(self) -> JournalFile:
        try:
            # The journal still grows: the file that was prepared while the last one filled.
            if self._spare is not None and not self._free:
                spare, self._spare = self._spare, None
                return await spare
            # None was prepared (there were free ones then), or preparing it failed: make one now.
            if not self._free and not self._at_most_files():
                return await self._filler.run(self._create)
        # No room to grow: the files that are there have to do, as they do once it is at its most.
        except DiskFull:
            if not self._free and not self._full:
                raise
        while not self._free:
            # Every file is full and only settling frees one. If the homes have no space, waiting
            # would not help: the batch is refused.
            if self._settle_error is not None:
                raise self._settle_error
            self.pressure.advance()
            await self._wait_for_release()
        return self._free.pop(0)

    async def _wait_for_release(self) -> None:
        seconds = self._limits.journal_room_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._released.past(self._released.version)
        except TimeoutError:
            # Homes that take nothing for so long are stuck: stop, and let the next start replay.
            error = DeadlineExceeded(f"no journal file was free for {seconds} s")
            raise _fenced_by(error) from error

    def _at_most_files(self) -> bool:
        return self._next_slot >= self._limits.journal_files_max

    def _create(self) -> JournalFile:
        file = create_file(
            self._disk,
            self._folder,
            self._next_slot,
            self._limits.journal_file_bytes,
            self._store_id,
        )
        self._next_slot += 1
        return file

    def _refuse(self, first: int, error: DiskFull) -> None:
        metrics.DISK_FULL.inc()
        # What is queued was decided on top of the batch, so it goes along (invariant 3). The
        # numbers can be given again: nobody has seen them.
        self._queue.clear()
        self._runs.clear()
        self.queue_bytes = 0
        self._next = first
        self._last_change = min(self._last_change, self.synced)
        self.refusals += 1
        self.progress.advance()
        # Whoever watches the disk should look at once.
        self.pressure.advance()

    def count(self) -> None:
        """Bring the metrics up to date. Not done per batch: that would cost a tenth of its time."""
        batches, self._batches = self._batches, []
        for _, _, seconds in batches:
            metrics.JOURNAL_SYNC_SECONDS.observe(seconds)
        metrics.JOURNAL_BATCHES.inc(len(batches))
        metrics.JOURNAL_RECORDS.inc(sum(records for records, _, _ in batches))
        metrics.JOURNAL_BYTES.inc(sum(payload for _, payload, _ in batches))
        metrics.JOURNAL_QUEUE_BYTES.set(self.queue_bytes)
        metrics.JOURNAL_FILES.set(self._next_slot)

    # --- closing

    async def close(self) -> None:
        """Commit what was submitted, then stop. What happened to it is told by `progress`."""
        # New appends are refused from here on; what is queued is still committed.
        committer, self._committer = self._committer, None
        if committer is not None:
            try:
                async with asyncio.timeout(self._limits.close_seconds):
                    while self.failure is None and self.synced < self._next - 1:
                        await self.progress.past(self.progress.version)
            except TimeoutError as error:
                raise DeadlineExceeded("the journal took too long to close") from error
            finally:
                committer.cancel()
                await asyncio.gather(committer, return_exceptions=True)
        if self.failure is None:
            self.failure = StorageClosed("the journal is closed")
            # A clean end with everything at home: the next start has nothing to replay.
            if self._active is not None and not self.unsettled:
                await self._writer.run(self._active.note_settled, self.synced)
        self.progress.advance()
        self.pressure.advance()
        self.count()
        await self._close_files()

    async def _close_files(self) -> None:
        files = [*self._full, *self._free]
        if self._active is not None:
            files.append(self._active)
        if self._spare is not None:
            # The filler may be at work on it still, and then its file has to be closed as well.
            (spare,) = await asyncio.gather(self._spare, return_exceptions=True)
            if isinstance(spare, JournalFile):
                files.append(spare)
        await self._writer.close()
        await self._filler.close()
        for file in files:
            file.close()


def _fenced_by(error: Exception) -> StorageFenced:
    return StorageFenced(f"the journal had to stop: {error}")
