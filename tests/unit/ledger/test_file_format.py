"""The bytes of ledgers: entries, indexes and headers."""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import accumulate

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.journal.format import FileHeader, decode_batch, encode_batch
from magnetar.ledger.api import ENTRY_BYTES_MAX, LedgerState
from magnetar.ledger.file_format import (
    ENTRIES_START,
    ENTRY_OVERHEAD,
    KIND_CLOSE,
    KIND_ENTRY,
    LedgerHeader,
    decode_header,
    decode_index,
    decode_ledger_id,
    encode_entry,
    encode_index,
    encode_ledger_record,
    entry_ids,
    entry_size,
    whole_payloads,
)

IDS = st.integers(0, 2**64 - 1)


@given(IDS, IDS, st.binary(max_size=300))
def test_an_entry_comes_back(ledger_id: int, entry_id: int, payload: bytes) -> None:
    record = encode_entry(ledger_id, entry_id, payload)
    assert len(record) == ENTRY_OVERHEAD + len(payload)
    assert entry_ids(record) == (ledger_id, entry_id)
    assert whole_payloads(record, ledger_id, entry_id, entry_id) == [payload]
    assert entry_size(b"before" + record, 6, ledger_id, entry_id) == len(record)


def test_an_entry_is_a_record_of_the_journal() -> None:
    record = encode_entry(5, 6, b"payload")
    data = b"".join(encode_batch([record], len(record), 1, 0, 9))
    found = decode_batch(data, 0, FileHeader(1, 0, 9, bytes(16)), 1)
    assert found is not None
    assert (found.records[0].kind, found.records[0].raw) == (KIND_ENTRY, record)


@given(st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_noticed(payload: bytes, data: st.DataObject) -> None:
    record = bytearray(encode_entry(5, 6, payload))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert whole_payloads(bytes(record), 5, 6, 6) == []


RUNS = st.lists(st.binary(max_size=40), min_size=1, max_size=12)


@given(RUNS, st.data())
def test_of_many_entries_those_in_front_of_a_damage_come_back(
    payloads: list[bytes], data: st.DataObject
) -> None:
    records = [encode_entry(5, 7 + number, each) for number, each in enumerate(payloads)]
    whole = b"".join(records)
    last = 6 + data.draw(st.integers(1, len(payloads)))
    assert whole_payloads(whole, 5, 7, last) == payloads[: last - 6]
    # Cut off, or one bit is another one: up to the record in which that is.
    at = data.draw(st.integers(0, len(whole) - 1))
    sound = bisect_right(list(accumulate(map(len, records))), at)
    expected = payloads[: min(sound, last - 6)]
    assert whole_payloads(whole[:at], 5, 7, last) == expected
    damaged = bytearray(whole)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    assert whole_payloads(bytes(damaged), 5, 7, last) == expected


def test_of_many_entries_none_is_taken_for_another() -> None:
    records = [encode_entry(5, 6, b"a"), encode_entry(5, 8, b"b"), encode_entry(4, 7, b"c")]
    assert whole_payloads(b"".join(records), 5, 6, 9) == [b"a"]
    assert whole_payloads(records[0] + records[2], 5, 6, 9) == [b"a"]
    assert whole_payloads(records[0], 4, 6, 6) == []
    # A size that leads backwards, or beyond the end.
    for size in (0, 15, 2**32 - 1):
        head = struct.pack("<IIBQQ", 0, size, KIND_ENTRY, 5, 6)
        assert whole_payloads(head + bytes(50), 5, 6, 6) == []


def test_an_entry_read_at_a_wrong_place_is_not_taken_for_another() -> None:
    record = encode_entry(5, 6, b"payload")
    assert entry_size(record, 0, 5, 7) is None
    assert entry_size(record, 0, 6, 6) is None
    assert entry_size(record, 1, 5, 6) is None
    assert entry_size(record[:10], 0, 5, 6) is None
    huge = struct.pack("<IIBQQ", 0, ENTRY_BYTES_MAX + 17, KIND_ENTRY, 5, 6)
    assert entry_size(huge, 0, 5, 6) is None


def test_a_record_of_a_whole_ledger_comes_back() -> None:
    record = encode_ledger_record(KIND_CLOSE, 77)
    data = b"".join(encode_batch([record], len(record), 1, 0, 9))
    found = decode_batch(data, 0, FileHeader(1, 0, 9, bytes(16)), 1)
    assert found is not None
    assert decode_ledger_id(found.records[0].body) == 77


@given(st.lists(st.binary(max_size=20)), st.integers(0, 2**40))
def test_an_index_comes_back(records: list[bytes], offset: int) -> None:
    slots = encode_index(offset, records)
    expected = [offset + sum(map(len, records[:n])) for n in range(len(records))]
    assert decode_index(slots) == expected
    assert decode_index(slots + b"half") == expected


HEADERS = st.builds(
    LedgerHeader,
    IDS,
    st.sampled_from(LedgerState),
    st.integers(0, 2**32 - 1),
    st.integers(-1, 2**62),
    st.integers(0, 2**62),
)


@given(HEADERS, st.data())
def test_a_header_survives_the_loss_of_either_sector(
    header: LedgerHeader, data: st.DataObject
) -> None:
    sectors = header.encode()
    assert len(sectors) == ENTRIES_START
    assert decode_header(sectors, "x") == (header, True)
    lost = bytearray(sectors)
    place = data.draw(st.integers(0, 43))
    sector = data.draw(st.sampled_from([0, 512]))
    lost[sector + place] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_header(bytes(lost), "x") == (header, False)
    lost[512 - sector + place] ^= 1
    with pytest.raises(CorruptData, match="both copies"):
        decode_header(bytes(lost), "x")


def test_the_newer_of_two_headers_counts() -> None:
    old = LedgerHeader(1, LedgerState.OPEN, 3)
    new = LedgerHeader(1, LedgerState.CLOSED, 4, 9, 90)
    for first, second in ((old, new), (new, old)):
        torn = first.encode()[:512] + second.encode()[512:]
        assert decode_header(torn, "x") == (new, True)
    with pytest.raises(CorruptData, match=r"5\.ledger"):
        decode_header(b"", "5.ledger")


def test_a_newer_header_is_refused() -> None:
    head = struct.pack("<8sHBxIQqQ", b"MAGLEDG\n", 2, 0, 0, 1, -1, 0)
    sector = (head + struct.pack("<I", crc32c(head))).ljust(512, b"\0")
    with pytest.raises(FormatTooNew, match="ledger format 2, this is 1"):
        decode_header(2 * sector, "x")
