"""Pure: the records of managed ledgers and cursors, as bytes.

Owns: the formats, with a version each, and their encoding and decoding.

Layout of every record: version (1 byte), CRC32C of the body (4 bytes, big-endian), body
(MessagePack). The store protects its own bytes; the checksum is there so that no damaged byte
ever reaches a decoder of bitmaps.

Invariants:
1. A newer version raises FormatTooNew, anything undecodable CorruptMetadata; the record stays.
2. A decoded record equals the encoded one.
3. Fields are only ever appended, with a default, unless the version changes.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from magnetar.errors import CorruptMetadata, FormatTooNew
from magnetar.managed_ledger.acked import StoredChunk
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 5


class ManagedLedgerRecord(msgspec.Struct, frozen=True, array_like=True):
    """The ledgers of one managed ledger, and who owns it."""

    name: str
    epoch: int
    """Grows with each owner: a former one's compare-and-set fails, because this record changed."""
    ledgers: tuple[LedgerSpan, ...] = ()
    dropping: tuple[int, ...] = ()
    """Ledgers that are no longer part of it and must be deleted (again, if in doubt)."""
    sealed: bool = False
    sealed_at: Position | None = None
    """The last entry; None if it was sealed empty."""
    deleted: bool = False
    """Being deleted: who finds it finishes that."""
    properties: dict[str, str] = {}
    trimmed_through: Position | None = None
    """The last entry that is gone; None: none ever was."""


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """The place of a chunk of acknowledgements: inline, or in records of its own."""

    ledger_id: int
    number: int
    inline: bytes = b""
    generation: str = ""
    pieces: int = 0


class CursorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A cursor. Its acknowledgements are a table of chunks, encoded by `encode_table`."""

    managed_ledger: str
    name: str
    # Who may write the record (`epoch`, the owner's), and since which seek its acknowledgements
    # count (`incarnation`, the cursor's generation).
    epoch: int
    incarnation: int
    mark_delete: Position
    table: bytes = b""
    table_generation: str = ""
    table_pieces: int = 0
    """Above 0: the table is too long for this record and stands in that many others."""
    deleted: bool = False
    properties: dict[str, str] = {}


def encode(record: ManagedLedgerRecord | CursorRecord) -> bytes:
    return _wrap(_ENCODER.encode(record))


def decode_managed_ledger(key: str, name: str, data: bytes) -> ManagedLedgerRecord:
    record = _decode(key, data, _MANAGED_LEDGER)
    _check_name(key, name, record.name)
    return record


def decode_cursor(key: str, managed_ledger: str, data: bytes) -> CursorRecord:
    record = _decode(key, data, _CURSOR)
    _check_name(key, managed_ledger, record.managed_ledger)
    return record


def encode_chunk(chunk: StoredChunk) -> bytes:
    return _ENCODER.encode(chunk)


def decode_chunk(key: str, data: bytes) -> StoredChunk:
    return _decode_body(key, data, _CHUNK)


def encode_table(table: list[ChunkRef]) -> bytes:
    return _ENCODER.encode(table)


def decode_table(key: str, data: bytes) -> list[ChunkRef]:
    return _decode_body(key, data, _TABLE) if data else []


def split(data: bytes, record_bytes: int) -> list[bytes]:
    """Cut a chunk or table into records of at most `record_bytes`, header included."""
    # Nothing to cut makes one record all the same: 0 pieces mean that the bytes stand inline.
    room = max(record_bytes - HEADER_BYTES, 1)
    return [_wrap(data[at : at + room]) for at in range(0, max(len(data), 1), room)]


def piece_body(key: str, data: bytes) -> bytes:
    """What one record made by `split` holds."""
    return _unwrap(key, data)


_Decoded = TypeVar("_Decoded")

_ENCODER: Final = msgspec.msgpack.Encoder()
_MANAGED_LEDGER: Final = msgspec.msgpack.Decoder(ManagedLedgerRecord)
_CURSOR: Final = msgspec.msgpack.Decoder(CursorRecord)
_CHUNK: Final = msgspec.msgpack.Decoder(StoredChunk)
_TABLE: Final = msgspec.msgpack.Decoder(list[ChunkRef])


def _wrap(body: bytes) -> bytes:
    return bytes([FORMAT_VERSION]) + crc32c(body).to_bytes(4, "big") + body


def _unwrap(key: str, data: bytes) -> bytes:
    # Before the checksum, which a newer version may keep elsewhere.
    if data and data[0] > FORMAT_VERSION:
        raise FormatTooNew(f"{key} has format version {data[0]}; this is {FORMAT_VERSION}")
    body = data[HEADER_BYTES:]
    if len(data) < HEADER_BYTES or data[0] != FORMAT_VERSION:
        raise CorruptMetadata(f"{key} is no record of a managed ledger")
    if crc32c(body) != int.from_bytes(data[1:HEADER_BYTES], "big"):
        raise CorruptMetadata(f"{key} does not match its checksum")
    return body


def _decode(key: str, data: bytes, decoder: msgspec.msgpack.Decoder[_Decoded]) -> _Decoded:
    return _decode_body(key, _unwrap(key, data), decoder)


def _decode_body(key: str, body: bytes, decoder: msgspec.msgpack.Decoder[_Decoded]) -> _Decoded:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{key} cannot be decoded: {error}") from error


def _check_name(key: str, expected: str, found: str) -> None:
    # Long names are cut and hashed in keys (`names.py`): the full name in the record counts.
    if expected != found:
        raise CorruptMetadata(f"{key} belongs to {found!r}, not to {expected!r}")
