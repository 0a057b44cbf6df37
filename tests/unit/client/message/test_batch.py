"""Batches: round trips, buckets and their order, limits, garbage, hand-made bytes."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.message.batch import (
    OpenBatches,
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    open_entry,
    plain_layout,
    single_entry,
    single_metadata,
)
from magnetar.client.message.routing import entry_bucket_hash
from magnetar.errors import UnreadableMessage
from magnetar.model.segments import bucket_splits
from magnetar.wire.compression import Compression
from magnetar.wire.messages import TxnId, checksum_holds, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.outgoing import MESSAGES, STAMPS, WITH_CONTEXT

STAMP = Stamp("p", 1_700_000_000_000)


def _same_fields(
    message: Outgoing, found: pb.MessageMetadata | pb.SingleMessageMetadata, payload: bytes
) -> None:
    assert payload == message.payload
    assert found.sequence_id == message.sequence_id
    assert found.event_time == message.event_time_ms
    assert found.null_value == message.null_value
    assert {each.key: each.value for each in found.properties} == message.properties
    is_bytes = isinstance(message.key, bytes)
    key = b64encode(message.key).decode() if isinstance(message.key, bytes) else message.key
    assert (found.partition_key if found.HasField("partition_key") else None) == key
    assert found.partition_key_b64_encoded == is_bytes
    ordering_key = found.ordering_key if found.HasField("ordering_key") else None
    assert ordering_key == message.ordering_key


@given(st.lists(MESSAGES, min_size=1, max_size=8), STAMPS, st.booleans())
def test_a_batch_gives_back_its_messages(
    messages: list[Outgoing], stamp: Stamp, hashes: bool
) -> None:
    entry = batch_entry(messages, stamp, hashes=hashes)
    assert checksum_holds(entry.headers_and_payload)
    opened = open_entry(entry.headers_and_payload)
    assert opened.is_batch
    assert opened.num_messages == entry.num_messages == len(messages)
    for message, single in zip(messages, messages_in(opened), strict=True):
        _same_fields(message, single.metadata, single.payload)
    metadata = opened.metadata
    assert (metadata.producer_name, metadata.publish_time) == (
        stamp.producer_name,
        stamp.publish_time_ms,
    )
    assert metadata.sequence_id == entry.sequence_id
    last = messages[-1].sequence_id
    assert (
        entry.sequence_id if entry.highest_sequence_id is None else entry.highest_sequence_id
    ) == last
    assert metadata.HasField("entry_hash_min") == metadata.HasField("entry_hash_max") == hashes
    for message in messages if hashes else ():
        place = entry_bucket_hash(message.key, message.ordering_key)
        assert metadata.entry_hash_min <= place <= metadata.entry_hash_max


@given(MESSAGES, STAMPS)
def test_a_single_message_gives_back_its_fields(message: Outgoing, stamp: Stamp) -> None:
    entry = single_entry(message, stamp)
    opened = open_entry(entry.headers_and_payload)
    assert not opened.is_batch
    assert opened.num_messages == entry.num_messages == 1
    _same_fields(message, opened.metadata, opened.payload)


def test_a_single_message_says_what_only_its_broker_reads() -> None:
    message = Outgoing(
        payload=b"x",
        sequence_id=4,
        deliver_at_ms=77,
        replicate_to=("a", "b"),
        schema_version=b"v",
        txn=TxnId(3, 9),
    )
    entry = single_entry(message, STAMP)
    metadata = open_entry(entry.headers_and_payload).metadata
    assert metadata.deliver_at_time == 77
    assert list(metadata.replicate_to) == ["a", "b"]
    assert metadata.schema_version == b"v"
    assert (metadata.txnid_most_bits, metadata.txnid_least_bits) == entry.txn == (3, 9)


@given(MESSAGES)
def test_metadata_made_by_hand_is_what_protobuf_makes(message: Outgoing) -> None:
    encoded = single_metadata(message)
    parsed = pb.SingleMessageMetadata.FromString(encoded)
    assert parsed.SerializeToString() == encoded
    assert parsed.payload_size == len(message.payload)


def test_golden_batch() -> None:
    messages = [
        Outgoing(payload=b"one", sequence_id=0, key="k"),
        Outgoing(payload=b"", sequence_id=300),
    ]
    opened = open_entry(batch_entry(messages, STAMP).headers_and_payload)
    assert opened.payload.hex() == (
        "00000007" "12016b" "1803" "4000" "6f6e65" "00000005" "1800" "40ac02"
    )  # fmt: skip


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=60),
    st.integers(1, 8),
    st.booleans(),
)
def test_buckets_keep_their_order_and_sequences_grow(
    keys: list[str | None], buckets: int, by_key: bool
) -> None:
    splits = None if by_key else bucket_splits(buckets)
    open_batches = OpenBatches(bucket_splits=splits, by_key=by_key)
    messages = [Outgoing(payload=b"", sequence_id=n, key=key) for n, key in enumerate(keys)]
    for message in messages:
        open_batches.add(message)
    taken = open_batches.take()
    assert sorted(each.sequence_id for batch in taken for each in batch) == list(range(len(keys)))
    place: dict[str | bytes | None, int] = {
        key: entry_bucket_hash(key) * buckets // 65536 for key in keys
    }
    for batch in taken:
        assert [each.sequence_id for each in batch] == sorted(each.sequence_id for each in batch)
        assert len({each.key if by_key else place[each.key] for each in batch}) == 1
    assert len(taken) == len(set(keys) if by_key else set(place.values()))
    ends = [batch[-1].sequence_id for batch in taken]
    assert ends == sorted(ends)
    assert not open_batches.messages
    assert not open_batches.take()


@given(st.lists(WITH_CONTEXT, max_size=40), st.integers(1, 6), st.integers(1, 120))
def test_limits_and_contexts_end_a_batch(
    messages: list[Outgoing], messages_max: int, bytes_max: int
) -> None:
    batches = OpenBatches(bucket_splits=(), messages_max=messages_max, bytes_max=bytes_max)
    sent: list[list[Outgoing]] = []
    for message in messages:
        if not batches.takes(message):
            sent += batches.take()
        if not message.may_be_batched:
            sent.append([message])
            continue
        assert batches.takes(message)
        batches.add(message)
        if batches.is_full:
            sent += batches.take()
    sent += batches.take()
    assert [each for batch in sent for each in batch] == messages
    for batch in sent:
        assert len(batch) <= messages_max
        assert len(batch) == 1 or sum(each.size for each in batch) <= bytes_max
        assert len({(each.txn, each.schema_version) for each in batch}) == 1
        assert len(batch) == 1 or all(each.may_be_batched for each in batch)


def test_a_batch_of_one_key_says_so_for_consumers_by_key() -> None:
    one = [Outgoing(payload=b"", sequence_id=n, key="k") for n in range(2)]
    assert open_entry(batch_entry(one, STAMP).headers_and_payload).metadata.partition_key == "k"
    two = [*one, Outgoing(payload=b"", sequence_id=3, key="other")]
    metadata = open_entry(batch_entry(two, STAMP).headers_and_payload).metadata
    assert not metadata.HasField("partition_key")


@given(st.binary(max_size=60))
def test_garbage_is_refused(data: bytes) -> None:
    with suppress(UnreadableMessage):
        messages_in(open_entry(data))


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_damaged_batch_is_refused_or_read_within_its_bounds(
    messages: list[Outgoing], data: st.DataObject
) -> None:
    payload = open_entry(batch_entry(messages, STAMP).headers_and_payload).payload
    cut = data.draw(st.integers(0, len(payload)))
    flipped = bytearray(payload[:cut])
    if flipped:
        flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= data.draw(st.integers(1, 255))
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
    metadata.num_messages_in_batch = data.draw(st.sampled_from([len(messages), 2**31 - 1, 1]))
    opened = open_entry(encode_entry(metadata, bytes(flipped)))
    try:
        found = messages_in(opened)
    except UnreadableMessage:
        return
    assert sum(len(payload) for _, payload in found) <= len(flipped)


def test_an_impossible_batch_and_an_encrypted_message_are_refused() -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
    metadata.num_messages_in_batch = 0
    with pytest.raises(UnreadableMessage, match="a batch of 0 messages"):
        open_entry(encode_entry(metadata, b""))
    metadata.num_messages_in_batch = 1
    metadata.encryption_keys.add(key="k", value=b"v")
    with pytest.raises(UnreadableMessage, match="encrypted"):
        open_entry(encode_entry(metadata, b""))


def test_a_batch_is_compressed_as_a_whole() -> None:
    messages = [Outgoing(payload=b"x" * 100, sequence_id=n) for n in range(50)]
    plain = batch_entry(messages, STAMP).headers_and_payload
    small = batch_entry(messages, Stamp("p", 0, Compression.LZ4)).headers_and_payload
    assert len(small) < len(plain) / 5
    assert [single.payload for single in messages_in(open_entry(small))] == [b"x" * 100] * 50


@given(
    st.text(max_size=5) | st.just("n" * 130),
    st.sampled_from([0, 5, 2**40, 2**64 - 1]),
    st.none() | st.text(max_size=5) | st.binary(max_size=4) | st.just("k" * 200),
    st.sampled_from([{}, {"event_time": 5}, {"null_value": True}, {"num_messages_in_batch": 1}]),
    st.binary(max_size=5),
    st.integers(0, 60),
    st.none() | st.integers(0, 255),
)
def test_plain_messages_are_what_protobuf_says(
    name: str,
    number: int,
    key: str | bytes | None,
    more: dict[str, Any],
    payload: bytes,
    at: int,
    byte: int | None,
) -> None:
    metadata = pb.MessageMetadata(producer_name=name, sequence_id=number, publish_time=7, **more)
    if isinstance(key, bytes):
        metadata.partition_key, metadata.partition_key_b64_encoded = key.hex(), True
    elif key is not None:
        metadata.partition_key = key
    data = bytearray(encode_entry(metadata, payload))
    if byte is not None:
        data[at % len(data)] = byte
    plain = plain_layout(bytes(data))
    if byte is None and name.isascii() and len(name) < 128 and not more and key is None:
        assert (plain is None) == (number > 2**63)
    if plain is not None:
        opened = open_entry(bytes(data))
        start, stop = plain
        assert pb.MessageMetadata.FromString(bytes(data[start:stop])) == opened.metadata
        assert (bytes(data[stop:]), False) == (opened.payload, opened.is_batch)
        assert not opened.metadata.compression
        assert opened.metadata.num_chunks_from_msg <= 1
