"""The homes of ledgers: two files each, written behind the journal.

Owns: the ledger folder. All calls block. The mover's calls (`move`) and the reader's calls
(`load`, `read`, `forget`) run on one worker thread each and share no descriptor.

Invariants:
1. After `move` returned, everything it was given is on stable storage, names included.
2. `move` writes only behind what earlier moves wrote, or the same bytes again: readers of the
   entries before are not disturbed, and a move that failed can be repeated.
3. Damage is found where it is read: an entry that does not pass its checksum raises
   CorruptEntry, a damaged index slot or header copy is worked around and reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from magnetar.errors import (
    CorruptData,
    CorruptEntry,
    LedgerMissing,
    OutOfDescriptors,
    StorageError,
    StorageFenced,
)
from magnetar.ledger.api import NO_ENTRY, LedgerState
from magnetar.ledger.file_format import (
    ENTRIES_START,
    ENTRY_OVERHEAD,
    INDEX_SLOT_BYTES,
    LedgerHeader,
    decode_header,
    decode_index,
    encode_index,
    entry_size,
    whole_payloads,
)
from magnetar.runtime import metrics
from magnetar.runtime.disk import Disk, File
from magnetar.runtime.logs import logger

_log = logger(__name__)

# Ledgers are spread over folders by id: one with all their names would be slow.
_FOLDERS: Final = 256
_ENTRIES_PER_READ: Final = 1024
"""How many entries' overhead a read makes room for beyond the payload bytes asked for."""


@dataclass(frozen=True, slots=True)
class Move:
    """The records and the header that one settling moves to a ledger's home."""

    header: LedgerHeader | None
    """A new header; None: as it is."""
    ledger_id: int
    first: int
    offset: int
    records: list[bytes]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A ledger's home as it was read: header, number of entries, and where they end."""

    header: LedgerHeader
    count: int
    end: int
    """Offset behind the last entry."""


@dataclass(slots=True)
class _Handle:
    """A ledger's files, opened by the reader."""

    name: str
    data: File
    index: File

    def close(self) -> None:
        self.data.close()
        self.index.close()


@dataclass(slots=True)
class LedgerHomes:
    """All ledger files below one folder."""

    folder: Path
    disk: Disk
    open_files_max: int
    _handles: OrderedDict[int, _Handle] = field(default_factory=OrderedDict)

    # --- moving (on the mover's thread)

    def move(self, moves: Sequence[Move], deleted: Sequence[int]) -> None:
        """Remove, then write, then sync; a failed sync is final (StorageFenced)."""
        # First, so that on a full disk a deleted topic makes room for what is to be written. Cut
        # short, all of this is repeated: until it returned, the journal keeps the delete records.
        self._remove(deleted)
        # A move opens two files, so that half of the limit is in use at most.
        at_a_time = max(1, self.open_files_max // 4)
        folders: set[Path] = set()
        for first in range(0, len(moves), at_a_time):
            self._move_some(moves[first : first + at_a_time], folders)
        # A new file is durable only together with its name (invariant 1).
        _sync(partial(self.disk.sync_folder, folder) for folder in folders)

    def _move_some(self, moves: Sequence[Move], folders: set[Path]) -> None:
        """Write and sync; the folders that got new files are for the caller to sync."""
        with ExitStack() as opened:
            written = [file for move in moves for file in self._write(move, folders, opened)]
            _sync(file.sync for file in written)

    def _write(self, move: Move, folders: set[Path], opened: ExitStack) -> list[File]:
        """Write without syncing; the files written to, which `opened` will close."""
        data_path, index_path = self._paths(move.ledger_id)
        # No entry was moved before: the files may be new, and so their names in the folder.
        if move.offset == ENTRIES_START:
            self.disk.make_folder(data_path.parent)
            folders.add(data_path.parent)
        data = self.disk.open(data_path, create=True)
        opened.callback(data.close)
        if move.header is not None:
            data.write(0, [move.header.encode()])
        # Only the state is new (created, fenced or closed): the index stays as it is.
        if not move.records:
            return [data]
        index = self.disk.open(index_path, create=True)
        opened.callback(index.close)
        data.write(move.offset, move.records)
        index.write(move.first * INDEX_SLOT_BYTES, [encode_index(move.offset, move.records)])
        return [data, index]

    def _remove(self, deleted: Sequence[int]) -> None:
        folders = set()
        for ledger_id in deleted:
            for path in self._paths(ledger_id):
                self.disk.remove(path)
                folders.add(path.parent)
        for folder in folders:
            # Missing if a ledger was deleted before any in this folder was moved.
            if self.disk.exists(folder):
                self.disk.sync_folder(folder)

    # --- reading (on the reader's thread)

    def ids(self) -> list[int]:
        found = [
            int(name.removesuffix(".ledger"))
            for folder in self.disk.list(self.folder)
            for name in self.disk.list(self.folder / folder)
            if name.endswith(".ledger")
        ]
        return sorted(found)

    def load(self, ledger_id: int, entries: int | None = None) -> Loaded:
        """What is on disk; with `entries`, as if only so many of them were there."""
        handle = self._handle(ledger_id)
        header, undamaged = decode_header(handle.data.read(0, ENTRIES_START), handle.name)
        if not undamaged:
            _log.warning("ledger-header-damaged", file=handle.name)
        # The entries of an open ledger are counted by its index alone; an ended one has its end.
        count = handle.index.size() // INDEX_SLOT_BYTES
        ended = header.state is not LedgerState.OPEN
        if entries is None:
            entries = max(count, header.last_entry + 1) if ended else count
        # Entries that were stored are gone. A shorter ledger would hide that.
        if entries > count:
            raise CorruptData(f"{handle.name} holds {count} entries, {entries} were stored")
        # All of an ended ledger: its header knows where the last entry stops, damaged or not.
        if ended and entries == header.last_entry + 1:
            return Loaded(header, entries, _end_by(header))
        end = self._end_of(handle, ledger_id, entries - 1)
        if end < ENTRIES_START + entries * ENTRY_OVERHEAD:
            raise CorruptData(f"{handle.name} is too short for its {entries} entries")
        return Loaded(header, entries, end)

    def _end_of(self, handle: _Handle, ledger_id: int, entry_id: int) -> int:
        """Offset behind an entry, whatever its condition."""
        if entry_id == NO_ENTRY:
            return ENTRIES_START
        start = self._offset(handle, entry_id)
        # If what stands there is not this entry, either its index slot is damaged (then the entry
        # before it leads to it), or the entry is.
        size = entry_size(handle.data.read(start, ENTRY_OVERHEAD), 0, ledger_id, entry_id)
        if size is not None:
            return start + size
        try:
            start, size = self._from_previous(handle, ledger_id, entry_id)
        except CorruptEntry:
            return handle.data.size()  # whoever reads the entry is told; the others go on
        return start + size

    def read(self, ledger_id: int, first: int, last: int, bytes_max: int) -> list[bytes]:
        """Payloads from `first` on, up to a damaged one; if that is the first, CorruptEntry."""
        handle = self._handle(ledger_id)
        start = self._offset(handle, first)
        payloads = self._read_at(handle, start, ledger_id, first, last, bytes_max)
        if payloads:
            return payloads
        # Either the entry is damaged, or the index slot that led here.
        elsewhere, _ = self._from_previous(handle, ledger_id, first)
        if elsewhere != start:
            payloads = self._read_at(handle, elsewhere, ledger_id, first, last, bytes_max)
        if not payloads:
            metrics.LEDGER_CORRUPT_ENTRIES.inc()
            raise CorruptEntry(
                f"entry {ledger_id}:{first} is damaged ({handle.name}, byte {elsewhere})"
            )
        metrics.LEDGER_INDEX_REPAIRS.inc()
        _log.warning("ledger-index-damaged", file=handle.name, entry=first)
        return payloads

    def forget(self, ledger_ids: Sequence[int]) -> None:
        for ledger_id in ledger_ids:
            handle = self._handles.pop(ledger_id, None)
            if handle is not None:
                handle.close()

    def close(self) -> None:
        self.forget(list(self._handles))

    def _read_at(
        self,
        handle: _Handle,
        start: int,
        ledger_id: int,
        first: int,
        last: int,
        bytes_max: int,
    ) -> list[bytes]:
        size = self._bytes_to_read(handle, start, first, last, bytes_max)
        data = handle.data.read(start, size)
        # Cut off by `bytes_max`: the first entry is read again at its full size, a later one
        # is left for the next read.
        length = entry_size(data, 0, ledger_id, first)
        if length is not None and length > len(data):
            data = handle.data.read(start, length)
        # Up to the first that does not stand whole in its place. If that is the very first one,
        # `read` finds out why.
        return whole_payloads(data, ledger_id, first, last)

    def _bytes_to_read(
        self, handle: _Handle, start: int, first: int, last: int, bytes_max: int
    ) -> int:
        """How much holds the entries up to `last`; a guess within bounds if the index is off."""
        # The slot behind `last` says where it ends; the very last entry ends with the file.
        slot = handle.index.read((last + 1) * INDEX_SLOT_BYTES, INDEX_SLOT_BYTES)
        end = decode_index(slot)[0] if len(slot) == INDEX_SLOT_BYTES else handle.data.size()
        most = bytes_max + ENTRY_OVERHEAD * min(last - first + 1, _ENTRIES_PER_READ)
        return max(min(end - start, most), ENTRY_OVERHEAD) if end > start else most

    def _offset(self, handle: _Handle, entry_id: int) -> int:
        """Where the index says that an entry begins; the first one's place is known."""
        if entry_id == 0:
            return ENTRIES_START
        slot = handle.index.read(entry_id * INDEX_SLOT_BYTES, INDEX_SLOT_BYTES)
        offset = decode_index(slot)[0] if len(slot) == INDEX_SLOT_BYTES else ENTRIES_START
        # A damaged slot may lead anywhere: what stands there then says that it is another entry.
        return offset if offset <= handle.data.size() else ENTRIES_START

    def _from_previous(self, handle: _Handle, ledger_id: int, entry_id: int) -> tuple[int, int]:
        """Begin and size of an entry, worked out from the entry before it."""
        start = ENTRIES_START
        if entry_id > 0:
            # Where the entry before it ends; without a sound one, its own slot is all there is.
            before = self._offset(handle, entry_id - 1)
            head = handle.data.read(before, ENTRY_OVERHEAD)
            size = entry_size(head, 0, ledger_id, entry_id - 1)
            start = before + size if size is not None else self._offset(handle, entry_id)
        size = entry_size(handle.data.read(start, ENTRY_OVERHEAD), 0, ledger_id, entry_id)
        if size is None:
            metrics.LEDGER_CORRUPT_ENTRIES.inc()
            raise CorruptEntry(
                f"entry {ledger_id}:{entry_id} is damaged ({handle.name}, byte {start})"
            )
        return start, size

    def _handle(self, ledger_id: int) -> _Handle:
        handle = self._handles.get(ledger_id)
        if handle is not None:
            self._handles.move_to_end(ledger_id)
            return handle
        data_path, index_path = self._paths(ledger_id)
        if not self.disk.exists(data_path):
            raise LedgerMissing(f"there is no ledger {ledger_id}")
        data = self.disk.open(data_path)
        try:
            # An empty ledger has no index yet: the first entries that are moved bring it.
            index = self.disk.open(index_path, create=True)
        except BaseException:
            data.close()
            raise
        handle = self._handles[ledger_id] = _Handle(str(data_path), data, index)
        # Two descriptors each; the least recently used goes.
        if len(self._handles) * 2 > self.open_files_max:
            self._handles.popitem(last=False)[1].close()
        return handle

    def _paths(self, ledger_id: int) -> tuple[Path, Path]:
        folder = self.folder / f"{ledger_id % _FOLDERS:02x}"
        return folder / f"{ledger_id}.ledger", folder / f"{ledger_id}.index"


def _end_by(header: LedgerHeader) -> int:
    """Offset behind the last entry of a ledger that has its end."""
    return ENTRIES_START + header.size_bytes + (header.last_entry + 1) * ENTRY_OVERHEAD


def _sync(syncs: Iterable[Callable[[], None]]) -> None:
    """A sync that failed is final: what it was to make durable may be lost."""
    try:
        for sync in syncs:
            sync()
    # A folder could not even be opened: nothing was tried, and the next settling does it again.
    except OutOfDescriptors:
        raise
    except StorageError as error:
        raise StorageFenced(f"ledger files could not be synced: {error}") from error
