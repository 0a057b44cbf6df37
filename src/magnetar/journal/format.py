"""Pure: the bytes of a journal file.

A file is a header sector, then batches. A batch is what one sync made durable: a header, then its
records, padded to whole sectors, so that no sector ever holds bytes of two batches and a synced
sector is never written again until its file is recycled.

    file    magic 8 | version 2 | flags 2 | first sequence 8 | settled 8 | salt 8 | store 16 | crc 4
    batch   magic 4 | payload bytes 4 | first sequence 8 | synced 8 | records 4 | crc 4
    record  crc 4 | body bytes 4 | kind 1 | body

All numbers are little-endian; every crc is CRC32C. A record's crc covers all of it but the crc.
A batch header's crc starts from its file's salt, a random number that changes at each use of the
file: bytes left over from an earlier use, or a payload that looks like a batch, never match.

Invariants:
1. Records are numbered without gaps; a record's number is its batch's first plus its place.
2. `synced` is the last number that was durable when the batch was written. So a bad batch with a
   valid one behind it was durable once: corruption. A bad batch with nothing behind it is a write
   that a crash cut short, and none of its records was ever acknowledged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from crc32c import crc32c

from magnetar.errors import CorruptData, FormatTooNew

FORMAT_VERSION: Final = 1
# The smallest unit that disks write as a whole: batches never share one (see above).
SECTOR_BYTES: Final = 512
FILE_HEADER_BYTES: Final = SECTOR_BYTES

_FILE_MAGIC: Final = b"MAGJRNL\n"
_BATCH_MAGIC: Final = b"MBAT"
_FILE = struct.Struct("<8sHHQQQ16s")
_BATCH = struct.Struct("<4sIQQI")
_CRC = struct.Struct("<I")
_SALT = struct.Struct("<Q")
_RECORD = struct.Struct("<IIB")
_RECORD_TAIL = struct.Struct("<IB")

BATCH_HEADER_BYTES: Final = _BATCH.size + _CRC.size
RECORD_HEADER_BYTES: Final = _RECORD.size

KIND_SETTLED: Final = 0
"""The journal's own record: everything up to the number in its body is in its home."""


class FileHeader(NamedTuple):
    """The contents of a journal file's first sector."""

    first_sequence: int
    """Number of the file's first record; 0: the file was never used."""
    settled: int
    """What was known to be in its home when this use of the file began."""
    salt: int
    store_id: bytes


class JournalRecord(NamedTuple):
    """One record as recovery finds it; `raw` is the whole record, header included."""

    sequence: int
    kind: int
    raw: bytes

    @property
    def body(self) -> bytes:
        return self.raw[RECORD_HEADER_BYTES:]


def encode_record(kind: int, *body: bytes) -> bytes:
    """A record whose body is the given pieces, one behind the other."""
    # Of a few hundred bytes mostly: copied once more, they are cheaper than a checksum of pieces.
    data = b"".join(body)
    data = _RECORD_TAIL.pack(len(data), kind) + data
    return _CRC.pack(crc32c(data)) + data


def encode_file_header(header: FileHeader) -> bytes:
    head = _FILE.pack(
        _FILE_MAGIC,
        FORMAT_VERSION,
        0,
        header.first_sequence,
        header.settled,
        header.salt,
        header.store_id,
    )
    return (head + _CRC.pack(crc32c(head))).ljust(FILE_HEADER_BYTES, b"\0")


def decode_file_header(sector: bytes, name: str) -> FileHeader:
    if len(sector) < FILE_HEADER_BYTES or not sector.startswith(_FILE_MAGIC):
        raise CorruptData(f"{name} does not begin like a journal file")
    magic_and_version = _FILE.unpack_from(sector)
    (stored,) = _CRC.unpack_from(sector, _FILE.size)
    # Before the version is believed: a flipped bit must read as damage, not as a newer release.
    if stored != crc32c(sector[: _FILE.size]):
        raise CorruptData(f"the header of {name} fails its checksum")
    version = magic_and_version[1]
    if version > FORMAT_VERSION:
        raise FormatTooNew(f"{name} has journal format {version}, this is {FORMAT_VERSION}")
    return FileHeader(*magic_and_version[3:])


def batch_bytes(payload: int) -> int:
    """Size on disk of a batch whose records take `payload` bytes."""
    return -(-(BATCH_HEADER_BYTES + payload) // SECTOR_BYTES) * SECTOR_BYTES


def encode_batch(
    records: Sequence[bytes], payload: int, first_sequence: int, synced: int, salt: int
) -> list[bytes]:
    """The buffers to write; `payload` is the sum of the records' sizes."""
    head = _BATCH.pack(_BATCH_MAGIC, payload, first_sequence, synced, len(records))
    padding = batch_bytes(payload) - BATCH_HEADER_BYTES - payload
    return [head + _batch_crc(head, salt), *records, bytes(padding)]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that passed every check."""

    next_sequence: int
    records: list[JournalRecord]
    end: int
    """Offset of the byte behind its padding."""


def decode_batch(data: bytes, offset: int, header: FileHeader, expected: int) -> Batch | None:
    """The batch at `offset` if it is whole and begins with record `expected`, else None.

    Of a batch that was settled when the file's header was written, only the header is looked at.
    """
    # None: zeros behind the last batch, a torn write, or bytes of an earlier use of the file.
    found = _batch_header(data, offset, header.salt)
    if found is None:
        return None
    payload, first_sequence, count = found
    start = offset + BATCH_HEADER_BYTES
    # Not the next of the chain, or cut off: for the caller, the file ends here.
    if first_sequence != expected or start + payload > len(data):
        return None
    records: list[JournalRecord] = []
    # Settled records are in their homes: nobody replays them, so damage in them harms nobody.
    if first_sequence + count - 1 > header.settled:
        records = list(_records(data, start, start + payload, first_sequence))
        # The header reached the disk, the payload not wholly: a batch counts whole or not at all.
        if len(records) != count:
            return None
    return Batch(first_sequence + count, records, offset + batch_bytes(payload))


def find_later_batch(data: bytes, offset: int, header: FileHeader, expected: int) -> int | None:
    """Offset of a batch behind `offset` that was written after record `expected` was durable."""
    # A batch is written only after the one before it was synced, so a higher first number proves
    # that `expected` was durable (invariant 2). Off the sector boundaries the magic is a payload's.
    while (offset := data.find(_BATCH_MAGIC, offset)) >= 0:
        found = _batch_header(data, offset, header.salt) if offset % SECTOR_BYTES == 0 else None
        if found is not None and found[1] > expected:
            return offset
        offset += 1
    return None


def encode_settled(sequence: int) -> bytes:
    return encode_record(KIND_SETTLED, _SALT.pack(sequence))


def decode_settled(record: JournalRecord) -> int:
    (sequence,) = _SALT.unpack(record.body)
    return int(sequence)


def _batch_crc(head: bytes, salt: int) -> bytes:
    return _CRC.pack(crc32c(head, crc32c(_SALT.pack(salt))))


def _batch_header(data: bytes, offset: int, salt: int) -> tuple[int, int, int] | None:
    if len(data) - offset < BATCH_HEADER_BYTES or not data.startswith(_BATCH_MAGIC, offset):
        return None
    head = data[offset : offset + _BATCH.size]
    if data[offset + _BATCH.size : offset + BATCH_HEADER_BYTES] != _batch_crc(head, salt):
        return None
    _, payload, first_sequence, _synced, count = _BATCH.unpack(head)
    return payload, first_sequence, count


def _records(data: bytes, start: int, end: int, sequence: int) -> Iterator[JournalRecord]:
    """The whole records from `start` on; stops at the first that is not."""
    while end - start >= RECORD_HEADER_BYTES:
        crc, size, kind = _RECORD.unpack_from(data, start)
        stop = start + RECORD_HEADER_BYTES + size
        # A size that leads out of the batch is damage; where the next record begins is unknown.
        if stop > end:
            return
        raw = data[start:stop]
        if crc32c(memoryview(raw)[_CRC.size :]) != crc:
            return
        yield JournalRecord(sequence, kind, raw)
        sequence += 1
        start = stop
