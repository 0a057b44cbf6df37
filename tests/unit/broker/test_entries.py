"""EntryView: what it reads from metadata, and entries that cannot be read."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.dispatcher import messages_in
from magnetar.broker.entries import (
    NO_MARKER,
    UNPLACED,
    EntryView,
    may_be_batch,
    may_be_delayed,
    may_have_batches,
    may_have_delays,
    publish_time_of,
    wrong_count,
)
from magnetar.model.hashing import HASH_MAX, key_hash
from magnetar.model.ids import Position
from magnetar.wire.messages import Send, TxnId, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

AT = Position(3, 4)


ENTRIES = st.binary(max_size=14) | st.builds(
    lambda count, checksum, name, payload: encode_entry(
        pb.MessageMetadata(
            producer_name=name,
            sequence_id=1,
            publish_time=1,
            num_messages_in_batch=count or None,
            deliver_at_time=5 if count == 1 else None,
        ),
        payload,
        checksum=checksum,
    ),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["p", "X", "p" * 300]),
    st.binary(max_size=5),
)


@given(st.lists(ENTRIES, max_size=4))
def test_many_entries_are_judged_as_each_of_them(payloads: list[bytes]) -> None:
    assert may_have_batches(payloads) == any(may_be_batch(each) for each in payloads)
    assert may_have_delays(payloads) == any(may_be_delayed(each) for each in payloads)


def view(**fields: object) -> EntryView:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=9)
    for name, value in fields.items():
        setattr(metadata, name, value)
    return EntryView(AT, encode_entry(metadata, b"payload"))


def test_a_plain_message() -> None:
    plain = view()
    assert plain.readable
    assert plain.position == AT
    assert (plain.num_messages, plain.is_batch) == (1, False)
    assert (plain.producer_name, plain.sequence_id, plain.highest_sequence_id) == ("p", 7, 7)
    assert (plain.publish_time, plain.deliver_at, plain.txn_id) == (9, None, None)
    assert (plain.marker_type, plain.is_marker) == (NO_MARKER, False)
    assert plain.is_last_chunk
    assert not plain.is_chunk
    assert plain.key is None
    assert publish_time_of(plain.payload) == 9


def test_a_batch() -> None:
    batch = view(num_messages_in_batch=5, highest_sequence_id=11)
    assert (batch.num_messages, batch.is_batch, batch.highest_sequence_id) == (5, True, 11)
    assert view(num_messages_in_batch=1).is_batch
    assert view(num_messages_in_batch=-3).num_messages == 1


def test_chunks() -> None:
    chunks = [view(chunk_id=n, num_chunks_from_msg=3) for n in range(3)]
    assert [each.is_chunk for each in chunks] == [True] * 3
    assert [each.is_last_chunk for each in chunks] == [False, False, True]


def test_the_ordering_key_goes_before_the_key() -> None:
    assert view(partition_key="k").key_hash == key_hash(b"k")
    assert view(partition_key="k", ordering_key=b"o").key_hash == key_hash(b"o")
    encoded = b64encode(b"\x00\xff").decode()
    assert view(partition_key=encoded, partition_key_b64_encoded=True).key == b"\x00\xff"
    assert view(partition_key="no base64", partition_key_b64_encoded=True).key == b"no base64"
    assert view().key_hash == key_hash(b"p-7")


def test_the_bucket_is_what_the_producer_says_else_that_of_the_key() -> None:
    assert view(entry_hash_min=0, entry_hash_max=9, partition_key="k-0").bucket_hash == 0
    assert view(entry_hash_min=70_000).bucket_hash == HASH_MAX
    assert view(partition_key="k-0").bucket_hash == 0x1F53
    assert view(partition_key="k-0", ordering_key=b"hello").bucket_hash == 0xFA47
    encoded = b64encode(b"k-0").decode()
    assert view(partition_key=encoded, partition_key_b64_encoded=True).bucket_hash == 0x1F53
    assert view().bucket_hash == 0


def test_markers_transactions_and_delays() -> None:
    assert view(marker_type=21).marker_type == 21
    assert view(txnid_most_bits=1, txnid_least_bits=2).txn_id == TxnId(1, 2)
    assert view(txnid_most_bits=1).txn_id is None
    assert view(deliver_at_time=5).deliver_at == 5


@given(st.binary(max_size=60))
def test_any_bytes_are_an_entry(data: bytes) -> None:
    found = EntryView(AT, data)
    assert found.num_messages >= 1
    assert found.is_last_chunk or found.is_chunk
    assert 0 <= found.key_hash < 2**32
    assert 0 <= found.bucket_hash <= HASH_MAX
    if not found.readable:
        assert found.num_messages == 1


# --- what is claimed


def claimed(count: int, in_metadata: int | None = None, size: int = 50, **fields: Any) -> Send:
    """A send of a payload of so many bytes."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, **fields)
    if in_metadata is not None:
        metadata.num_messages_in_batch = in_metadata
    return Send(1, 1, count, encode_entry(metadata, b"x" * size))


@pytest.mark.parametrize(
    "send",
    [
        claimed(1),
        claimed(1, 1),
        claimed(1, 1, size=0),
        claimed(10, 10),
        claimed(100, 100, size=20, compression=pb.ZSTD, uncompressed_size=600),
        claimed(200_000, 200_000, size=1_000_000),
        # A chunk is one message, whatever it is a part of.
        claimed(1, chunk_id=1, num_chunks_from_msg=3),
    ],
)
def test_an_honest_number_of_messages_is_believed(send: Send) -> None:
    assert wrong_count(send) is None


@pytest.mark.parametrize(
    "send",
    [
        claimed(0),
        claimed(0, 0),
        claimed(-1, -1),
        claimed(1, 0),
        claimed(1, -1),
        claimed(1_000_000),
        claimed(1, 2**31 - 1),
        claimed(5, 6),
        claimed(5, 1),
        claimed(2**31 - 1, 2**31 - 1),
        claimed(1000, 1000),
        claimed(1000, 1000, compression=pb.LZ4, uncompressed_size=100),
        # Nothing unfolds that far.
        claimed(2**31 - 1, 2**31 - 1, compression=pb.ZSTD, uncompressed_size=2**32 - 1),
    ],
)
def test_a_number_of_messages_that_cannot_be_is_refused(send: Send) -> None:
    refused = wrong_count(send)
    assert refused is not None
    assert refused.wire_code == 22
    stored = EntryView(UNPLACED, send.headers_and_payload)
    # Should it stand in a log already: dispatch does not believe it either.
    assert 1 <= stored.num_messages <= stored.messages_max
    assert messages_in(send.headers_and_payload) == stored.num_messages


def test_a_stored_lie_does_not_use_up_everybodys_permits() -> None:
    lie = EntryView(UNPLACED, claimed(1, 2**31 - 1).headers_and_payload)
    assert lie.num_messages < 50


@given(
    name=st.text(max_size=30) | st.just("x" * 300) | st.just("x" * 70_000),
    sequence=st.integers(0, 2**40),
    batch=st.none() | st.integers(0, 9),
    at=st.none() | st.integers(-(2**63), 2**63 - 1),
    payload=st.binary(max_size=20),
    checksum=st.booleans(),
)
def test_what_is_not_parsed_has_neither_a_batch_nor_a_time(
    name: str, sequence: int, batch: int | None, at: int | None, payload: bytes, checksum: bool
) -> None:
    metadata = pb.MessageMetadata(producer_name=name, sequence_id=sequence, publish_time=9)
    if batch is not None:
        metadata.num_messages_in_batch = batch
    if at is not None:
        metadata.deliver_at_time = at
    stored = encode_entry(metadata, payload, checksum=checksum)
    assert batch is None or may_be_batch(stored)
    assert at is None or may_be_delayed(stored)
    plain = encode_entry(pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=9), b"")
    assert may_have_batches([plain, stored]) == may_be_batch(stored)
    assert may_have_delays([plain, stored]) == may_be_delayed(stored)
    assert EntryView(AT, stored).deliver_at == at


@given(st.binary(max_size=14) | st.binary(max_size=9).map(b"\x0e\x01".__add__))
def test_any_bytes_may_be_looked_at(stored: bytes) -> None:
    assert may_be_batch(stored) in (True, False)
    assert may_be_delayed(stored) in (True, False)
    assert may_have_batches([stored]) == may_be_batch(stored)
    assert may_have_delays([stored]) == may_be_delayed(stored)
    assert messages_in(stored) >= 1


def test_most_entries_are_not_parsed_for_it() -> None:
    stored = encode_entry(
        pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=9), b"X\x98\x01" * 100
    )
    assert not may_be_batch(stored)
    assert not may_be_delayed(stored)
    assert not may_have_batches([stored, stored])
    assert not may_have_delays([stored, stored])
