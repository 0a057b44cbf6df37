"""Pure: a metadata change as bytes, the same in the journal and on its way into SQLite.

    body of a journal record   row bytes 4 | row | value
    row of a put               [parent, name, value bytes, version, created, modified, mods,
                                session, indexes or null]
    row of a delete            [parent, name]
    body of many deletes       [row, row, ...]

A row is JSON, so that a batch of rows joined by commas is an array that SQLite takes apart by
itself; it is encoded once, when the change is judged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from magnetar.errors import CorruptMetadata
from magnetar.metadata.api import Index
from magnetar.metadata.judge import StoredRecord

_SIZE: Final = struct.Struct("<I")
_encode = msgspec.json.Encoder().encode

_PutRow = tuple[str, str, int, int, int, int, int, int, tuple[Index, ...] | None]
_decode_row = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_put = msgspec.json.Decoder(_PutRow).decode
_decode_delete = msgspec.json.Decoder(tuple[str, str]).decode
_DELETE_COLUMNS: Final = 2


def encode_row(parent: str, name: str, state: StoredRecord | None) -> bytes:
    if state is None:
        return _encode((parent, name))
    # The value's size only: bytes do not fit into JSON and travel beside it. No indexes are null,
    # by which the statements skip the row.
    return _encode(
        (
            parent,
            name,
            len(state.value),
            state.version,
            state.created_ms,
            state.modified_ms,
            state.mods,
            state.session,
            state.indexes or None,
        )
    )


def body_pieces(row: bytes, state: StoredRecord | None) -> tuple[bytes, bytes, bytes]:
    """The body of the journal record, in pieces."""
    return _SIZE.pack(len(row)), row, state.value if state is not None else b""


def deletes_body(rows: Iterable[bytes]) -> bytes:
    """The body of a journal record with many deletes."""
    return b"[" + b",".join(rows) + b"]"


def decode_deletes(body: bytes) -> list[tuple[str, bytes]]:
    """Key and row of each of many deletes."""
    try:
        rows = [bytes(row) for row in _decode_row(body)]
        names = [_decode_delete(row) for row in rows]
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"deletes in the journal cannot be read: {error}") from error
    return [(f"{parent}/{name}", row) for (parent, name), row in zip(names, rows, strict=True)]


def decode_body(body: bytes) -> tuple[str, StoredRecord | None, bytes]:
    """Key, state and row of a change."""
    try:
        (size,) = _SIZE.unpack_from(body)
        row, value = body[_SIZE.size : _SIZE.size + size], body[_SIZE.size + size :]
        # A row of two columns is a delete: it has a name and nothing else.
        if len(_decode_row(row)) == _DELETE_COLUMNS:
            parent, name = _decode_delete(row)
            return f"{parent}/{name}", None, row
        parent, name, _, version, created, modified, mods, session, indexes = _decode_put(row)
    except (struct.error, msgspec.MsgspecError) as error:
        raise CorruptMetadata(
            f"a metadata change in the journal cannot be read: {error}"
        ) from error
    state = StoredRecord(value, version, created, modified, mods, session, indexes or ())
    return f"{parent}/{name}", state, row
