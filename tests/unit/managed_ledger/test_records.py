"""The stored formats: round trips, golden bytes of each version, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from magnetar.errors import CorruptMetadata, FormatTooNew
from magnetar.managed_ledger.acked import AckedSet, ChunkKey, StoredChunk
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.managed_ledger.records import (
    FORMAT_VERSION,
    ChunkRef,
    CursorRecord,
    ManagedLedgerRecord,
    decode_chunk,
    decode_cursor,
    decode_managed_ledger,
    decode_table,
    encode,
    encode_chunk,
    encode_table,
    piece_body,
    split,
)
from magnetar.model.ids import Position

GOLDEN = Path(__file__).parent / "golden"
NAME = "public/default/persistent/orders"

MANAGED_LEDGER = ManagedLedgerRecord(
    name=NAME,
    epoch=7,
    ledgers=(
        LedgerSpan(3, 1_700_000_000_000, 1_700_000_060_000, 1000, 65_536),
        LedgerSpan(12, 1_700_000_060_000),
    ),
    dropping=(1, 2),
    properties={"owner": "team a"},
)
SEALED = ManagedLedgerRecord(
    name=NAME,
    epoch=8,
    ledgers=(LedgerSpan(12, 1_700_000_060_000, 1_700_000_070_000, 5, 50),),
    sealed=True,
    sealed_at=Position(12, 4),
)


def acknowledged() -> StoredChunk:
    acked = AckedSet()
    acked.add_range(12, 5, 9)
    acked.add(Position(12, 70_000))
    acked.merge_batch(Position(12, 20), 0b1_0000_0001)
    return acked.dump_chunk(ChunkKey(12, 0))


TABLE = [
    ChunkRef(12, 0, inline=encode_chunk(acknowledged())),
    ChunkRef(12, 1, generation="7.1", pieces=2),
]
CURSOR = CursorRecord(
    managed_ledger=NAME,
    name="billing",
    epoch=7,
    incarnation=123_456_789,
    mark_delete=Position(12, 3),
    table=encode_table(TABLE),
    properties={"kind": "shared"},
)
CURSOR_SPLIT = CursorRecord(
    managed_ledger=NAME,
    name="billing",
    epoch=7,
    incarnation=123_456_789,
    mark_delete=Position(3, -1),
    table_generation="7.2",
    table_pieces=3,
    deleted=True,
)

TRIMMED = replace(MANAGED_LEDGER, trimmed_through=Position(2, 17))

GOLDEN_BYTES = {
    "managed-ledger-trimmed-v1.bin": encode(TRIMMED),
    "cursor-v1.bin": encode(CURSOR),
    "cursor-split-v1.bin": encode(CURSOR_SPLIT),
    "chunk-piece-v1.bin": split(encode_chunk(acknowledged()), 10_000)[0],
}


@pytest.mark.parametrize("name", sorted(GOLDEN_BYTES))
def test_this_version_still_writes_the_golden_bytes(name: str) -> None:
    assert (GOLDEN / name).read_bytes() == GOLDEN_BYTES[name]


def test_golden_files_decode_to_what_was_written() -> None:
    def stored(name: str) -> bytes:
        return (GOLDEN / name).read_bytes()

    # These two are from before `trimmed_through`: nothing was trimmed, as far as they know.
    assert decode_managed_ledger("k", NAME, stored("managed-ledger-v1.bin")) == MANAGED_LEDGER
    assert decode_managed_ledger("k", NAME, stored("managed-ledger-sealed-v1.bin")) == SEALED
    assert decode_managed_ledger("k", NAME, stored("managed-ledger-trimmed-v1.bin")) == TRIMMED
    cursor = decode_cursor("k", NAME, stored("cursor-v1.bin"))
    assert cursor == CURSOR
    assert decode_table("k", cursor.table) == TABLE
    assert decode_cursor("k", NAME, stored("cursor-split-v1.bin")) == CURSOR_SPLIT
    chunk = decode_chunk("k", piece_body("k", stored("chunk-piece-v1.bin")))
    acked = AckedSet()
    acked.load_chunk(ChunkKey(12, 0), chunk)
    assert acked.count == 6
    assert acked.unacked_indexes(Position(12, 20)) == 0b1_0000_0001


def test_a_newer_version_is_refused() -> None:
    data = bytes([FORMAT_VERSION + 1]) + encode(MANAGED_LEDGER)[1:]
    with pytest.raises(FormatTooNew):
        decode_managed_ledger("k", NAME, data)


@given(st.integers(0, len(encode(CURSOR)) - 1), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(at: int, bit: int) -> None:
    data = bytearray(encode(CURSOR))
    data[at] ^= 1 << bit
    with pytest.raises((CorruptMetadata, FormatTooNew)):
        decode_cursor("k", NAME, bytes(data))


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((CorruptMetadata, FormatTooNew)):
        decode_managed_ledger("k", NAME, data)


def test_a_record_of_another_kind_or_name_is_refused() -> None:
    with pytest.raises(CorruptMetadata):
        decode_cursor("k", NAME, encode(MANAGED_LEDGER))
    with pytest.raises(CorruptMetadata):
        decode_managed_ledger("k", "another", encode(MANAGED_LEDGER))
    with pytest.raises(CorruptMetadata):
        decode_cursor("k", "another", encode(CURSOR))
    with pytest.raises(CorruptMetadata):
        decode_table("k", b"\xff")


@given(st.binary(max_size=100), st.integers(6, 40))
def test_pieces_join_to_the_whole_and_stay_below_the_limit(data: bytes, limit: int) -> None:
    pieces = split(data, limit)
    assert b"".join(piece_body("k", piece) for piece in pieces) == data
    assert max(len(piece) for piece in pieces) <= limit
