"""The journal's files: created once, filled with zeros, then recycled for ever.

Owns: one `JournalFile` per slot. A prefilled file never grows, so that a sync writes data only
(half the latency of one that also moves the end of the file), and a full disk cannot stop a batch
that has a file. All calls block.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from magnetar.errors import DiskFull, StorageError, StorageFenced
from magnetar.journal.format import (
    FILE_HEADER_BYTES,
    SECTOR_BYTES,
    FileHeader,
    decode_file_header,
    encode_file_header,
)
from magnetar.runtime.disk import Disk, File

_SUFFIX = ".journal"
_UNFINISHED = ".new"
# Zeros are written piece by piece: at once they would take a whole file's size in memory.
_PREFILL_BYTES = 1 << 20


class JournalFile:
    """One slot. `header` is that of its present use."""

    def __init__(self, path: Path, file: File, header: FileHeader, size: int) -> None:
        self.path = path
        self.header = header
        self.size = size
        self.end = FILE_HEADER_BYTES
        """Where the next batch goes."""
        self.last_sequence = header.first_sequence - 1
        self._file = file

    def begin(self, first_sequence: int, settled: int) -> None:
        """Use the file anew; what it held is forgotten with the first write of the new header."""
        # A new salt: leftovers of the earlier use no longer pass for batches of this one.
        self.header = FileHeader(
            first_sequence, settled, secrets.randbits(64), self.header.store_id
        )
        self.end = FILE_HEADER_BYTES
        self.last_sequence = first_sequence - 1

    def has_room(self, size: int) -> bool:
        return self.end + size <= self.size

    def write_synced(self, buffers: Sequence[bytes]) -> None:
        """Write a batch at the end and sync it; the caller moves `end` once this returned.

        DiskFull from the write: nothing of the batch is there, now or after a crash. A failed
        sync is final: StorageFenced.
        """
        if self.end == FILE_HEADER_BYTES:
            # Alone and synced: sectors reach the disk in any order, and the first batch must not
            # destroy what the file held while the old header still vouches for it.
            self._file.write(0, [encode_file_header(self.header)])
            self._sync()
        try:
            self._file.write(self.end, buffers)
        except DiskFull:
            # Only the padding may be missing. The batch is refused, so it must not come back.
            self._file.write(self.end, [bytes(SECTOR_BYTES)])
            self._sync()
            raise
        self._sync()

    def _sync(self) -> None:
        try:
            self._file.sync()
        except StorageError as error:
            raise StorageFenced(f"the journal could not be synced: {error}") from error

    def secure(self, offset: int, batch: bytes) -> None:
        """Make the last batch, as it was read, durable.

        A process that was killed may have left it in the kernel's memory only, and after a failed
        sync another one would do nothing: only bytes written again are synced for certain.
        """
        # The first batch counts only behind its header, which is as much in doubt.
        if offset == FILE_HEADER_BYTES:
            self._file.write(0, [encode_file_header(self.header), batch])
        else:
            self._file.write(offset, [batch])
        try:
            self._file.sync()
        except StorageError as error:
            raise StorageFenced(f"the journal could not be synced: {error}") from error

    def note_settled(self, settled: int) -> None:
        """Say in the header that a clean end left nothing to replay up to `settled`."""
        self.header = self.header._replace(settled=settled)
        self._file.write(0, [encode_file_header(self.header)])
        self._file.sync()

    def read_all(self) -> bytes:
        return self._file.read(0, self.size)

    def close(self) -> None:
        self._file.close()


def open_files(disk: Disk, folder: Path, store_id: bytes) -> list[JournalFile]:
    """Every journal file of a folder, each with a header that was checked."""
    files: list[JournalFile] = []
    try:
        for name in disk.list(folder):
            # A crash cut its creation short (`create_file`): nothing was ever stored in it.
            if name.endswith(_UNFINISHED):
                disk.remove(folder / name)
            elif name.endswith(_SUFFIX):
                files.append(_open_file(disk, folder / name, store_id))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _open_file(disk: Disk, path: Path, store_id: bytes) -> JournalFile:
    file = disk.open(path)
    try:
        header = decode_file_header(file.read(0, FILE_HEADER_BYTES), str(path))
        # A folder that was copied in by hand: its records would be replayed into the wrong homes.
        if header.store_id != store_id:
            raise StorageError(
                f"{path} belongs to another store",
                hint="put back the journal folder that belongs to this data folder",
            )
        return JournalFile(path, file, header, file.size())
    except BaseException:
        file.close()
        raise


def create_file(disk: Disk, folder: Path, slot: int, size: int, store_id: bytes) -> JournalFile:
    """A new file, whole and durable before it gets its name."""
    path = folder / f"{slot:04d}{_SUFFIX}"
    unfinished = path.with_suffix(_UNFINISHED)
    header = FileHeader(0, 0, 0, store_id)
    disk.remove(unfinished)
    file = disk.open(unfinished, create=True)
    try:
        for offset in range(0, size, _PREFILL_BYTES):
            file.write(offset, [bytes(min(_PREFILL_BYTES, size - offset))])
        file.write(0, [encode_file_header(header)])
        file.sync()
        # The name comes last, and is durable before any batch relies on the file.
        disk.rename(unfinished, path)
        disk.sync_folder(folder)
    except BaseException:
        file.close()
        disk.remove(unfinished)
        raise
    return JournalFile(path, file, header, size)
