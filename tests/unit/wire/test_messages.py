"""What follows a SEND or MESSAGE: its parts, its checksum, and damage to either."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import RemoteProtocolError
from magnetar.wire.messages import (
    TxnId,
    broker_entry_metadata_of,
    checksum_holds,
    encode_entry,
    metadata_of,
    payload_offset,
    txn_trailer,
    with_txn,
)
from magnetar.wire.pb import pulsar_pb2 as pb


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_trailer_of_a_transaction_is_that_of_protobuf(most: int, least: int) -> None:
    expected = pb.MessageMetadata(txnid_least_bits=least, txnid_most_bits=most)
    assert txn_trailer(TxnId(most, least)) == expected.SerializePartialToString()


METADATA = pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=9)
BROKER_ENTRY = pb.BrokerEntryMetadata(broker_timestamp=5, index=41)


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_parts_are_found(payload: bytes, checksum: bool, broker_entry: bool) -> None:
    entry = encode_entry(METADATA, payload, checksum=checksum)
    if broker_entry:
        entry = _with_broker_entry(entry)
    assert metadata_of(entry) == METADATA
    assert entry[payload_offset(entry) :] == payload
    assert checksum_holds(entry)
    assert broker_entry_metadata_of(entry) == (BROKER_ENTRY if broker_entry else None)


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_a_transaction_is_written_behind_the_other_metadata(
    payload: bytes, checksum: bool, broker_entry: bool
) -> None:
    entry = encode_entry(METADATA, payload, checksum=checksum)
    named = pb.MessageMetadata(txnid_least_bits=5, txnid_most_bits=1 << 63)
    named.MergeFrom(METADATA)
    expected = encode_entry(named, payload, checksum=checksum)
    if broker_entry:
        entry, expected = _with_broker_entry(entry), _with_broker_entry(expected)
    assert with_txn(entry, TxnId(1 << 63, 5)) == expected


def test_bytes_of_an_entry() -> None:
    rest = b"\0\0\0\x07\x0a\x01p\x10\x07\x18\x09hello"
    assert encode_entry(METADATA, b"hello", checksum=False) == rest
    assert encode_entry(METADATA, b"hello") == b"\x0e\x01" + crc32c(rest).to_bytes(4, "big") + rest


@given(st.integers(2, 40), st.integers(1, 255))
def test_a_changed_byte_breaks_the_checksum(at: int, change: int) -> None:
    entry = bytearray(encode_entry(METADATA, bytes(40)))
    entry[at] ^= change
    assert not checksum_holds(bytes(entry))
    assert not checksum_holds(_with_broker_entry(bytes(entry)))


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\x09short",
        b"\x0e\x01\0\0\0\0",
        b"\x0e\x02\0\0\0\x09short",
        b"\x0e\x02\0",
        b"\0\0\0\x02\xff\xff",
        b"\0\0\0\x03\x0a\x01\xff",
    ],
)
def test_metadata_that_is_not_there_is_refused(entry: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        metadata_of(entry)


@given(st.binary(max_size=60))
def test_nothing_but_our_errors(entry: bytes) -> None:
    for look in (metadata_of, payload_offset, broker_entry_metadata_of, checksum_holds):
        try:
            look(entry)
        except RemoteProtocolError:
            continue


def _with_broker_entry(entry: bytes) -> bytes:
    encoded = BROKER_ENTRY.SerializeToString()
    return b"\x0e\x02" + len(encoded).to_bytes(4, "big") + encoded + entry
