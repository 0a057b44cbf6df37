"""The journal's bytes: round trips, and what recovery makes of every kind of damage."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.journal import format as journal_format
from magnetar.journal import recovery
from magnetar.journal.format import (
    BATCH_HEADER_BYTES,
    FILE_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    SECTOR_BYTES,
    FileHeader,
    batch_bytes,
    decode_batch,
    decode_file_header,
    decode_settled,
    encode_batch,
    encode_file_header,
    encode_record,
    encode_settled,
)
from tests.unit.journal.support import (
    KIND,
    SALT,
    STORE,
    batch,
    bodies_of,
    ends_of,
    flat,
    image,
    recovered,
)

U64 = st.integers(0, 2**64 - 1)
BODIES = st.lists(st.binary(max_size=700), min_size=1, max_size=6)
BATCHES = st.lists(BODIES, min_size=1, max_size=5)
SEVERAL = st.lists(BODIES, min_size=2, max_size=5)


@given(U64, U64, U64, st.binary(min_size=16, max_size=16))
def test_a_file_header_comes_back(first: int, settled: int, salt: int, store: bytes) -> None:
    header = FileHeader(first, settled, salt, store)
    sector = encode_file_header(header)
    assert len(sector) == FILE_HEADER_BYTES
    assert decode_file_header(sector, "x") == header


@given(st.integers(0, 56 * 8 - 1))
def test_a_damaged_file_header_is_refused(bit: int) -> None:
    sector = bytearray(encode_file_header(FileHeader(1, 0, SALT, STORE)))
    sector[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptData, match="0001"):
        decode_file_header(bytes(sector), "0001")
    with pytest.raises(CorruptData, match="0001"):
        decode_file_header(bytes(sector[:100]), "0001")


def newer_header() -> bytes:
    """The first sector of a file in a format that is not known yet."""
    head = struct.pack("<8sHHQQQ16s", b"MAGJRNL\n", 2, 0, 1, 0, SALT, STORE)
    return (head + struct.pack("<I", crc32c(head))).ljust(FILE_HEADER_BYTES, b"\0")


def test_a_newer_file_is_refused() -> None:
    with pytest.raises(FormatTooNew, match="journal format 2, this is 1"):
        decode_file_header(newer_header(), "0001")


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=900)), min_size=1), U64)
def test_a_batch_comes_back(content: list[tuple[int, bytes]], salt: int) -> None:
    records = [encode_record(kind, body) for kind, body in content]
    payload = sum(map(len, records))
    data = b"".join(encode_batch(records, payload, 5, 4, salt))
    assert len(data) == batch_bytes(payload)
    assert len(data) % SECTOR_BYTES == 0
    found = decode_batch(data, 0, FileHeader(1, 0, salt, STORE), 5)
    assert found is not None
    assert [(each.kind, each.body) for each in found.records] == content
    assert [each.raw for each in found.records] == records
    assert [each.sequence for each in found.records] == list(range(5, 5 + len(content)))
    assert (found.next_sequence, found.end) == (5 + len(content), len(data))
    assert decode_batch(data, 0, FileHeader(1, 0, salt, STORE), 6) is None
    assert decode_batch(data, 0, FileHeader(1, 0, salt ^ 1, STORE), 5) is None


def test_a_settled_record_comes_back() -> None:
    data = b"".join(encode_batch([encode_settled(77)], len(encode_settled(77)), 9, 8, SALT))
    found = decode_batch(data, 0, FileHeader(1, 0, SALT, STORE), 9)
    assert found is not None
    assert decode_settled(found.records[0]) == 77


# --- damage


@given(BATCHES)
def test_whole_files_come_back(batches: list[list[bytes]]) -> None:
    found = recovered(image(batches))
    assert bodies_of(found) == flat(batches)
    assert found.next_sequence == 1 + len(flat(batches))


@given(BATCHES, st.data())
def test_a_cut_last_batch_is_left_out(batches: list[list[bytes]], data: st.DataObject) -> None:
    whole = image(batches)
    start, end = ends_of(batches)[-2:]
    cut = data.draw(st.integers(start, end - 1))
    found = recovered(whole[:cut].ljust(len(whole), b"\0"))
    if whole[cut:end].strip(b"\0"):
        assert bodies_of(found) == flat(batches[:-1])
        assert found.next_sequence == 1 + len(flat(batches[:-1]))
    else:
        assert bodies_of(found) == flat(batches), "only zeros were cut"


@given(BATCHES, st.data(), st.sampled_from([b"\0", b"\xff", b"MBAT"]))
def test_a_last_batch_with_lost_sectors_is_left_out(
    batches: list[list[bytes]], data: st.DataObject, left: bytes
) -> None:
    whole = image(batches)
    torn = bytearray(whole)
    start, end = ends_of(batches)[-2:]
    sectors = range(start, end, SECTOR_BYTES)
    lost = data.draw(st.sets(st.sampled_from(sectors), min_size=1))
    for offset in lost:
        torn[offset : offset + SECTOR_BYTES] = (left * SECTOR_BYTES)[:SECTOR_BYTES]
    found = bodies_of(recovered(bytes(torn)))
    content = (
        start + BATCH_HEADER_BYTES + sum(RECORD_HEADER_BYTES + len(body) for body in batches[-1])
    )
    kept = torn[start:content] == whole[start:content]
    assert found == flat(batches if kept else batches[:-1])


@given(SEVERAL, st.data())
def test_a_bit_flipped_before_the_last_batch_is_found(
    batches: list[list[bytes]], data: st.DataObject
) -> None:
    whole = image(batches)
    ends = ends_of(batches)
    place = data.draw(st.integers(FILE_HEADER_BYTES, ends[-2] - 1))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    if _in_padding(batches, place):
        assert bodies_of(recovered(bytes(damaged))) == flat(batches)
    else:
        with pytest.raises(CorruptData, match="is damaged at byte"):
            recovered(bytes(damaged))


def _in_padding(batches: list[list[bytes]], place: int) -> bool:
    for bodies, (start, end) in zip(batches, pairwise(ends_of(batches)), strict=True):
        content = BATCH_HEADER_BYTES + sum(RECORD_HEADER_BYTES + len(body) for body in bodies)
        if start <= place < end:
            return place >= start + content
    raise AssertionError(f"byte {place} is in no batch")


@given(BATCHES, BATCHES)
def test_batches_of_an_earlier_use_are_not_taken(
    old: list[list[bytes]], new: list[list[bytes]]
) -> None:
    """Even if their numbers are just those that follow."""
    assert bodies_of(recovered(_reused(old, new))) == flat(new)


def _reused(old: list[list[bytes]], new: list[list[bytes]]) -> bytes:
    """A file whose earlier use had batches exactly where, and numbered as, the new use goes on."""
    present = image(new, room=0)
    left_over, first = b"", 1 + len(flat(new))
    for bodies in old:
        left_over += batch(bodies, first, salt=SALT ^ 99)
        first += len(bodies)
    return present + left_over + bytes(2048)


@given(SEVERAL, st.integers(0, 3))
def test_a_batch_inside_a_payload_is_not_taken(batches: list[list[bytes]], shift: int) -> None:
    """A torn batch that carries a forged one is still only a torn batch."""
    torn = _torn_with_forgery(batches, shift)
    assert bodies_of(recovered(torn)) == flat(batches)


def _torn_with_forgery(batches: list[list[bytes]], shift: int) -> bytes:
    whole = image(batches, room=0)
    expected = 1 + len(flat(batches))
    # Whoever writes payloads can know the format and the numbers, but not the salt.
    forged = batch([b"forged"], expected + shift, salt=0)
    filler = SECTOR_BYTES - BATCH_HEADER_BYTES - RECORD_HEADER_BYTES
    last = batch([bytes(filler) + forged], expected)
    assert last[SECTOR_BYTES:].startswith(forged)
    return whole + bytes(SECTOR_BYTES) + last[SECTOR_BYTES:] + bytes(2048)


# --- rules that matter: without them there is harm


def _crc_without_salt(head: bytes, salt: int) -> bytes:
    return struct.pack("<I", crc32c(head))


def test_without_the_salt_old_and_forged_batches_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = [[b"old"]], [[b"new"]]
    monkeypatch.setattr(journal_format, "_batch_crc", _crc_without_salt)
    assert bodies_of(recovered(_reused(old, new))) == [b"new", b"old"]
    with pytest.raises(CorruptData):  # a torn write looks like corruption: the store is refused
        recovered(_torn_with_forgery(new, 1))


def test_without_the_look_behind_acknowledged_records_vanish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = bytearray(image([[b"one"], [b"two"], [b"three"]]))
    damaged[FILE_HEADER_BYTES + SECTOR_BYTES + BATCH_HEADER_BYTES] ^= 1
    with pytest.raises(CorruptData):
        recovered(bytes(damaged))
    monkeypatch.setattr(recovery, "find_later_batch", lambda *_: None)
    assert bodies_of(recovered(bytes(damaged))) == [b"one"], "two and three were durable"


def test_a_record_of_another_kind_keeps_its_kind() -> None:
    (record,) = recovered(image([[b"x"]])).records
    assert (record.kind, record.sequence) == (KIND, 1)
