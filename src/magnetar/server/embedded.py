"""The embedded storage of one data folder: journal, metadata and ledgers put together.

Owns: the folder (its lock and its FORMAT file), the order of opening and closing, and settling:
the loop that moves durable records from the journal to their homes so that its files can be used
again.

    FORMAT             version and identity of the store
    LOCK               held by the process that has the folder open
    RESERVE            space for acknowledgements and deletes on a full disk
    journal/           the write-ahead journal
    metadata/          the SQLite database
    ledgers/           two files for each ledger

Invariants:
1. Nothing is served before every record of the journal is back in its home.
2. The journal releases a record only after both homes have synced it.
3. A failed sync of a home fences the journal: the records are still in it, and the next start
   replays them.
4. A home that finds no space gets that of the reserve before the journal hears of it: so settling,
   and with it all that does not publish, goes on while the disk is full.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from magnetar.errors import CorruptData, DiskFull, FormatTooNew, StorageError
from magnetar.journal.journal import Journal
from magnetar.journal.recovery import Recovered
from magnetar.ledger.file import FileLedgers
from magnetar.ledger.file_format import LEDGER_KINDS
from magnetar.ledger.file_home import LedgerHomes
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.sqlite_engine import METADATA_KINDS, SqliteMetadata
from magnetar.metadata.sqlite_home import SqliteHome
from magnetar.runtime import metrics
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.disk import Disk, FolderLock, LocalDisk, replace_file
from magnetar.runtime.disk_space import DiskSpace, PublishGate
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.worker import ThreadWorker, Worker

# Grows when older versions could not read what is written; FORMAT is read before anything else.
STORE_FORMAT: Final = 1
STORE_ID_BYTES: Final = 16

_LOOK_SECONDS: Final = 1.0
"""Between two looks at the disk, unless the journal has filled a file or refused a batch."""

_log = logger(__name__)


class StoreFormat(msgspec.Struct, frozen=True):
    """The content of the FORMAT file."""

    format: int
    store: str


class Storage:
    """An open data folder. Made by `open_storage`."""

    # Transactions rely on it: a pin that is submitted first need not be waited for.
    shares_journal: Final = True
    """Metadata and entries become durable in the order of their submission."""

    def __init__(
        self,
        lock: FolderLock,
        journal: Journal,
        metadata: SqliteMetadata,
        ledgers: FileLedgers,
        limits: Limits,
        space: DiskSpace,
    ) -> None:
        self.ledgers = ledgers
        self.recovered_records = 0
        self.progress = journal.progress
        """Advances when what was submitted has become durable, or never will."""
        self._lock = lock
        self._journal = journal
        self._metadata = metadata
        self._limits = limits
        self._space = space
        # Each client of the metadata store has its own, so that its ephemeral records end with it.
        self._sessions = 0
        # One at a time: the loop's turn, and that of `close`.
        self._settling = asyncio.Lock()
        self._loops: list[asyncio.Task[None]] = []
        self._closed = False

    def connect(self) -> SqliteStore:
        """A client of the metadata store, with a session of its own."""
        self._sessions += 1
        return SqliteStore(self._metadata, self._sessions)

    @property
    def failure(self) -> StorageError | None:
        """Why nothing can be written any more; None while all is well."""
        return self._journal.failure

    @property
    def publish_gate(self) -> PublishGate:
        """Closed while the disk is too full for messages."""
        return self._space.gate

    @property
    def queued_bytes(self) -> int:
        """What waits for the next syncs."""
        return self._journal.queue_bytes

    def count(self) -> None:
        """Bring the metrics up to date; done each second by itself."""
        self._journal.count()

    async def settle(self) -> None:
        """Move everything durable to its home and let the journal forget it."""
        async with self._settling:
            # Taken first: what becomes durable from here on is settled next time.
            sequence, written = self._journal.synced, self._journal.written_bytes
            errors = await self._settle_homes(sequence)
            # Invariant 4. Not for a lack of descriptors, which space does not help.
            if any(type(error) is DiskFull for error in errors):
                async with self._space.lend(self._journal.unsettled_bytes) as has_lent:
                    if has_lent:
                        errors = await self._settle_homes(sequence)
            for error in errors:  # both count: a lack of space must not hide a failed sync
                # Nothing is lost: records stay in the journal, which is full after a while, until
                # there is room.
                if isinstance(error, DiskFull):
                    metrics.DISK_FULL.inc()
                    self._journal.settling_failed(error)
                # Invariant 3: after a failed sync nobody knows what the disk holds.
                elif isinstance(error, StorageError):
                    self._journal.fence(error)
            if errors:
                raise errors[0]
            # Invariant 2: only now may the journal use these files again.
            self._journal.release(sequence, written)

    async def _settle_homes(self, sequence: int) -> list[BaseException]:
        # Both homes are independent files on one disk: side by side they share its time.
        results = await asyncio.gather(
            self._metadata.settle(sequence),
            self.ledgers.settle(sequence),
            return_exceptions=True,
        )
        return [error for error in results if isinstance(error, BaseException)]

    async def close(self) -> None:
        """Settle, so that the next start has nothing to replay, and let the folder go."""
        if self._closed:
            return
        self._closed = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        # It runs backwards: the journal first, so that nothing new is submitted; the lock last.
        async with AsyncExitStack() as ending:  # whatever fails, the rest is closed too
            ending.callback(self._lock.release)
            ending.push_async_callback(self._space.close)
            ending.push_async_callback(self._metadata.close)
            ending.push_async_callback(self.ledgers.close)
            ending.push_async_callback(self._journal.close)
            # A journal that failed keeps its records: the next start replays them (invariant 3).
            if self._journal.failure is None:
                await self.settle()

    async def recover(self, recovered: Recovered) -> None:
        """Bring what the journal holds home, then start. Called once, by `open_storage`."""
        for record in recovered.records:
            # The kind of a record says whose it is. In their order: later ones build on earlier
            # ones.
            if record.kind in METADATA_KINDS:
                self._metadata.replay(record)
            elif record.kind in LEDGER_KINDS:
                self.ledgers.replay(record)
            else:
                raise CorruptData(f"the journal has a record of unknown kind {record.kind}")
        last = recovered.next_sequence - 1
        self._metadata.replayed(last)
        self.ledgers.replayed(last)
        # Synced at home before the journal forgets them (invariants 1 and 2).
        if recovered.records:
            await self._metadata.settle(last)
            await self.ledgers.settle(last)
            await self._journal.forget_recovered()
        self.recovered_records = len(recovered.records)
        # The journal takes records before its followers do; metadata may write when it starts.
        self._journal.start()
        self.ledgers.start()
        await self._metadata.start()
        # Everything that the start had to write is written: the reserve is put in its place.
        await self._space.look(self._journal.unsettled_bytes)
        self._loops = [
            asyncio.create_task(self._settle_when_due(), name="storage-settle"),
            asyncio.create_task(self._watch_space(), name="storage-space"),
        ]

    async def _settle_when_due(self) -> None:
        seen = self._journal.pressure.version
        # The journal asks when its files run out; the pause bounds what a restart has to replay.
        while self._journal.failure is None:
            # Though nothing presses, what has gathered is settled.
            pressure, seconds = self._journal.pressure, self._limits.storage_settle_seconds
            seen = await pressure.past_within(seen, seconds)
            self._journal.count()
            if not self._journal.unsettled:
                continue
            try:
                await self.settle()
            except StorageError as error:
                _log.error("settle-failed", error=str(error))

    async def _watch_space(self) -> None:
        journal = self._journal
        seen, refusals = journal.pressure.version, journal.refusals
        while journal.failure is None:
            # A file that has filled, or a refused batch, is a reason to look now.
            seen = await journal.pressure.past_within(seen, _LOOK_SECONDS)
            has_failed, refusals = journal.refusals > refusals, journal.refusals
            try:
                await self._space.look(journal.unsettled_bytes, has_failed=has_failed)
            except StorageError as error:
                _log.error("disk-look-failed", error=str(error))


async def open_storage(
    folder: Path,
    *,
    limits: Limits | None = None,
    disk: Disk | None = None,
    clock: Clock | None = None,
    new_worker: Callable[[str], Worker] = ThreadWorker,
) -> Storage:
    """Open (or create) a data folder; refused at once if another process has it."""
    disk = disk or LocalDisk()
    limits = limits or Limits()
    clock = clock or SystemClock()
    disk.make_folder(folder)
    async with AsyncExitStack() as undo:
        # First of all: two processes in one folder would destroy it.
        lock = disk.lock(folder / "LOCK")
        undo.callback(lock.release)
        space = DiskSpace(folder, disk, new_worker("disk-space"), clock, limits)
        undo.push_async_callback(space.close)
        await space.open()
        _secure_names(disk, folder)
        store_id = _read_or_make_format(disk, folder)
        # A thread each: a sync of the journal waits for no other work.
        workers = new_worker("journal"), new_worker("journal-fill")
        journal = Journal(folder / "journal", disk, limits, clock, *workers)
        undo.push_async_callback(journal.close)
        recovered = await journal.open(store_id)
        disk.make_folder(folder / "metadata")
        home = SqliteHome(folder / "metadata" / "records.db", disk)
        applied = home.applied
        # The homes never run ahead of the journal. A folder restored from two backups would, and
        # its next records would be skipped as known.
        if applied >= recovered.next_sequence:
            home.close()
            raise CorruptData(
                f"{folder / 'metadata'} is ahead of {folder / 'journal'}: "
                f"{applied} against {recovered.next_sequence - 1}",
                hint="both must come from the same copy of the data folder",
            )
        metadata = SqliteMetadata(home, journal, new_worker("metadata"), clock, limits)
        undo.push_async_callback(metadata.close)
        disk.make_folder(folder / "ledgers")
        homes = LedgerHomes(folder / "ledgers", disk, limits.ledger_open_files)
        ledgers = FileLedgers(
            homes, journal, new_worker("ledger-move"), new_worker("ledger-read"), limits
        )
        undo.push_async_callback(ledgers.close)
        storage = Storage(lock, journal, metadata, ledgers, limits, space)
        await storage.recover(recovered)
        # From here on `Storage.close` does all that.
        undo.pop_all()
        return storage


def _secure_names(disk: Disk, folder: Path) -> None:
    """Make durable what names there are before anything is put behind them.

    A process that was killed may have made one and not synced its folder: it looks as good as any,
    and a power loss would take it with everything that was stored in it since.
    """
    for each in (folder, folder / "journal", folder / "ledgers"):
        if disk.exists(each):
            disk.sync_folder(each)


def _read_or_make_format(disk: Disk, folder: Path) -> bytes:
    path = folder / "FORMAT"
    if disk.exists(path):
        file = disk.open(path)
        try:
            text = file.read(0, 4096)
        finally:
            file.close()
        try:
            found = msgspec.json.decode(text, type=StoreFormat)
            store_id = bytes.fromhex(found.store)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptData(f"{path} cannot be read: {error}") from error
        if len(store_id) != STORE_ID_BYTES:
            raise CorruptData(f"{path} has an identity of {len(store_id)} bytes")
        # Written by a newer version: nothing in the folder may be touched.
        if found.format > STORE_FORMAT:
            raise FormatTooNew(f"{folder} has store format {found.format}, this is {STORE_FORMAT}")
        return store_id
    # No FORMAT yet: a new folder, or a start that died right here. Anything else is somebody's
    # data.
    others = [name for name in disk.list(folder) if name not in ("LOCK", "FORMAT.new")]
    if others:
        raise CorruptData(
            f"{folder} has no FORMAT file but holds {others[0]}",
            hint="choose an empty folder, or put the FORMAT file back",
        )
    return _make_format(disk, folder)


def _make_format(disk: Disk, folder: Path) -> bytes:
    store_id = secrets.token_bytes(STORE_ID_BYTES)
    found = StoreFormat(STORE_FORMAT, store_id.hex())
    replace_file(disk, folder / "FORMAT", msgspec.json.encode(found))
    return store_id
