"""Entries as compaction opens and rebuilds them, read back by the client's own reader."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.compact.batches import (
    SLICE_MESSAGES,
    Opened,
    last_index,
    last_of_keys,
    opened,
    packed_entry,
    rebuilt,
    survivors_of,
    unfolded,
)
from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    open_entry,
    single_entry,
)
from magnetar.errors import UnreadableMessage
from magnetar.wire.compression import Compression
from magnetar.wire.messages import checksum_holds, encode_entry, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb

Result = TypeVar("Result")


def done(work: Generator[None, None, Result]) -> Result:
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def outgoing(number: int, key: str | bytes | None, value: bytes | None) -> Outgoing:
    return Outgoing(payload=value or b"", sequence_id=number, key=key, null_value=value is None)


def batch(messages: Sequence[Outgoing], kind: Compression = Compression.NONE) -> bytes:
    return batch_entry(messages, Stamp("p", 1, kind)).headers_and_payload


def found(entry: bytes) -> Opened:
    it = opened(entry)
    assert it is not None
    if not it.is_batch:
        return it
    it = unfolded(it)
    assert it is not None
    return it


def cut(entry: bytes, survivors: Sequence[int]) -> bytes:
    it = found(entry)
    left = done(rebuilt(it, survivors))
    return entry if left is None else packed_entry(entry, it.metadata, left, survivors)


def values(entry: bytes) -> list[tuple[str, bytes] | None]:
    singles = messages_in(open_entry(entry))
    return [
        None if said.compacted_out else (said.partition_key, payload) for said, payload in singles
    ]


@given(st.data(), st.sampled_from(Compression), st.integers(1, 20))
def test_survivors_keep_their_index_and_their_bytes(
    data: st.DataObject, kind: Compression, count: int
) -> None:
    messages = [outgoing(n, f"k{n % 5}", data.draw(st.binary(max_size=9))) for n in range(count)]
    entry = batch(messages, kind)
    survivors = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    left = cut(entry, survivors)
    whole = values(entry)
    assert values(left) == [whole[n] if n in survivors else None for n in range(count)]
    said = metadata_of(left)
    assert said.num_messages_in_batch == count
    assert checksum_holds(left)
    if len(survivors) < count:
        assert list(said.compacted_batch_indexes) == survivors
        assert int(said.compression) == kind
    else:
        assert left == entry
    assert last_index(left) == survivors[-1]
    some = None if len(survivors) == count else sum(1 << each for each in survivors)
    assert survivors_of(left, count) == some
    # Once more: what is gone stays gone, and the list is made anew.
    again = sorted(data.draw(st.sets(st.sampled_from(survivors), min_size=1)))
    fewer = cut(left, again)
    assert values(fewer) == [whole[n] if n in again else None for n in range(count)]
    if len(again) < len(survivors):
        assert list(metadata_of(fewer).compacted_batch_indexes) == again
    else:
        assert fewer == left


def test_what_is_not_of_messages_stays_as_it_was() -> None:
    metadata = metadata_of(batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")]))
    body = batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")])
    metadata.txnid_most_bits, metadata.txnid_least_bits = 1, 2
    metadata.schema_version = b"v"
    entry = encode_entry(metadata, found(body).payload, checksum=False)
    broker = pb.BrokerEntryMetadata(broker_timestamp=7, index=8).SerializeToString()
    entry = b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker + entry
    left = cut(entry, [1])
    assert left.startswith(b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker + b"\x0e\x01")
    said = metadata_of(left)
    assert (said.txnid_most_bits, said.txnid_least_bits, said.schema_version) == (1, 2, b"v")
    assert list(said.compacted_batch_indexes) == [1]


def test_of_each_key_of_a_batch_the_last_message_counts() -> None:
    messages = [
        outgoing(0, "a", b"1"),
        outgoing(1, None, b"x"),
        outgoing(2, "b", b"1"),
        outgoing(3, "a", b"2"),
        outgoing(4, "b", None),
        outgoing(5, "c", b""),
        outgoing(6, b"a", b"3"),
        outgoing(7, "YQ==", b"4"),
    ]
    last = done(last_of_keys(found(batch(messages))))
    assert last.pop(b"\xffYQ==") == 6, "bytes are another key than the text of their base64"
    assert last == {b"a": 3, b"b": ~4, b"c": ~5, b"YQ==": 7}
    # What was compacted out before says nothing.
    left = cut(batch(messages), [0, 2])
    assert done(last_of_keys(found(left))) == {b"a": 0, b"b": 2}


def test_a_large_batch_is_looked_at_in_slices() -> None:
    messages = [outgoing(n, f"k{n}", b"v") for n in range(3 * SLICE_MESSAGES)]
    entry = batch(messages)
    assert len(list(last_of_keys(found(entry)))) == 3
    assert len(list(rebuilt(found(entry), [1]))) == 3
    packed = opened(batch(messages, Compression.ZSTD))
    assert packed is not None
    assert packed.size == len(found(entry).payload) > len(packed.payload)


@pytest.mark.parametrize(
    ("message", "key", "null"),
    [
        (outgoing(0, "a", b"1"), b"a", False),
        (outgoing(0, "a", b""), b"a", True),
        (outgoing(0, "a", None), b"a", True),
        (outgoing(0, None, b"1"), None, False),
        (outgoing(0, b"a", b"1"), b"\xffYQ==", False),
    ],
)
@pytest.mark.parametrize("kind", [Compression.NONE, Compression.ZLIB])
def test_an_entry_of_one_message(
    message: Outgoing, key: bytes | None, null: bool, kind: Compression
) -> None:
    entry = single_entry(message, Stamp("p", 1, kind)).headers_and_payload
    it = found(entry)
    assert (it.is_batch, it.key, it.is_null, it.chunk) == (False, key, null, None)
    assert last_index(entry) == -1


def test_an_encrypted_batch_is_one_message() -> None:
    metadata = metadata_of(batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")]))
    metadata.partition_key = "outer"
    metadata.encryption_keys.add(key="k", value=b"v")
    it = found(encode_entry(metadata, b"\x00secret"))
    assert (it.is_batch, it.key, it.is_null) == (False, b"outer", False)


def test_what_cannot_be_opened_is_not_judged() -> None:
    whole = batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")], Compression.LZ4)
    metadata = metadata_of(whole)
    assert opened(b"\x00") is None
    assert opened(b"\x00\x00\x00\x03abc") is None
    it = opened(encode_entry(metadata, b"\xff not LZ4"))
    assert it is not None
    assert unfolded(it) is None
    assert last_index(b"\x00") == -1
    plain = batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")])
    said, payload = metadata_of(plain), found(plain).payload
    for broken in (payload[:-1], payload + b"x", b"\xff" * 9, payload[:9]):
        it = found(encode_entry(said, broken))
        with pytest.raises(UnreadableMessage):
            done(last_of_keys(it))
    # A size that would lead back.
    back = pb.SingleMessageMetadata(payload_size=-4, partition_key="a").SerializeToString()
    said.num_messages_in_batch = 1
    it = found(encode_entry(said, len(back).to_bytes(4, "big") + back))
    with pytest.raises(UnreadableMessage):
        done(last_of_keys(it))


def test_a_list_that_a_producer_made_up_is_not_believed() -> None:
    plain = batch([outgoing(0, "a", b"1"), outgoing(1, "b", b"2")])
    said = metadata_of(plain)
    said.compacted_batch_indexes.extend([-1, 1, 2**31 - 1])
    lying = encode_entry(said, found(plain).payload)
    assert last_index(lying) == 1
    assert survivors_of(lying, 2) == 0b10
    # Nothing of it is left out, and yet it is made anew.
    left = cut(lying, [0, 1])
    assert list(metadata_of(left).compacted_batch_indexes) == [0, 1]
    assert values(left) == values(plain)
    said.ClearField("compacted_batch_indexes")
    said.compacted_batch_indexes.append(-7)
    assert survivors_of(encode_entry(said, found(plain).payload), 2) is None


@given(st.lists(st.builds(
    Outgoing,
    payload=st.sampled_from([b"", b"v", bytes(200), bytes(20_000)]),
    sequence_id=st.integers(0, 2**63 - 1) | st.integers(0, 300),
    key=st.none() | st.sampled_from(["", "a", "b" * 130, "\u00e4", b"a"]),
    event_time_ms=st.sampled_from([0, 0, 0, 7]),
    null_value=st.booleans(),
    properties=st.sampled_from([{}, {}, {"a": "b"}]),
), min_size=1, max_size=8))  # fmt: skip
def test_keys_are_those_that_a_client_reads(messages: list[Outgoing]) -> None:
    entry = batch(messages)
    expected: dict[bytes, int] = {}
    for index, (said, payload) in enumerate(messages_in(open_entry(entry))):
        if said.HasField("partition_key"):
            mark = b"\xff" if said.partition_key_b64_encoded else b""
            is_null = said.null_value or not payload
            expected[mark + said.partition_key.encode()] = ~index if is_null else index
    assert done(last_of_keys(found(entry))) == expected


def test_what_follows_a_sequence_id_is_not_passed_over() -> None:
    """A number that seems to be longer than it is, and a flag behind it."""
    flags = (b"\x20\x01", b"\x48\x01", b"\x30\x01")
    for tail in (b"\x40\x05", b"\x40\x85\x01", b"\x40\x85\x85\x85\x01", b""):
        results = []
        for flag in (b"", *flags):
            said = b"\x12\x01a\x18\x01" + tail + flag
            metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
            metadata.num_messages_in_batch = 1
            body = len(said).to_bytes(4, "big") + said + b"v"
            results.append(done(last_of_keys(found(encode_entry(metadata, body)))))
        assert results == [{b"a": 0}, {}, {b"a": ~0}, {b"\xffa": 0}]
