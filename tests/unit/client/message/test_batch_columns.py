"""The columns of a batch: what `messages_in` says of each message, and no more is believed."""

from __future__ import annotations

import struct
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.client.arrow.arrow import (
    UNREADABLE,
    RawEntry,
    entries_batch,
    entries_schema,
    record_batch,
)
from magnetar.client.message import batch_columns, batch_tails
from magnetar.client.message.batch import (
    OpenedEntry,
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    open_entry,
)
from magnetar.client.message.batch_columns import columns_in, signed
from magnetar.client.message.chunks import chunk_entries
from magnetar.client.message.entry_rows import EntryRows
from magnetar.client.message.message import Message
from magnetar.errors import InvalidValue, UnreadableMessage
from magnetar.model.ids import Position
from magnetar.wire.compression import Compression
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.examples import examples
from tests.unit.client.nowhere import Nowhere

pa: Any = import_module("pyarrow")

STAMP = Stamp("p", 1)
MESSAGES = st.lists(
    st.builds(
        Outgoing,
        payload=st.binary(max_size=300) | st.just(b"large" * 5000),
        sequence_id=st.integers(0, 2**63 - 1) | st.integers(0, 300),
        key=st.none() | st.text(max_size=5) | st.binary(max_size=5) | st.just("k" * 200),
        ordering_key=st.none() | st.binary(max_size=3),
        properties=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        | st.just({"p" * 200: "t"}),
        event_time_ms=st.sampled_from([0, 0, 5, 1_700_000_000_000, 2**63 - 1]),
        null_value=st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=20,
)
ALIKE = st.builds(
    lambda keys, first, time, has_properties: [
        Outgoing(
            payload=b"v" * (90 + number % 40),
            sequence_id=first + number,
            key=keys and f"{keys}{number}",
            event_time_ms=time and time + number,
            properties={"kind": "x", "number": str(number)} if has_properties else {},
        )
        for number in range(150)
    ],
    st.none() | st.sampled_from(["k", "key-"]),
    st.integers(0, 2**21),
    st.sampled_from([0, 10, 1_700_000_000_000]),
    st.booleans(),
)
"""As a program sends them: the usual forms, over the borders at which numbers get longer."""


def opened(messages: list[Outgoing]) -> OpenedEntry:
    return open_entry(batch_entry(messages, STAMP).headers_and_payload)


def rows_of(entry: OpenedEntry, indexes: Any = None) -> EntryRows:
    found = columns_in(entry)
    return EntryRows(
        Nowhere(),
        Position(1, 2),
        3,
        entry,
        found,
        range(len(found)) if indexes is None else indexes,
        0,
        0,
    )


def check(batch: Any, messages: list[Message[bytes]]) -> None:
    batch.validate(full=True)
    table = batch.drop_columns(["event_time", "publish_time"]).to_pylist()
    assert len(table) == len(messages)
    times = batch.column("event_time").cast(pa.int64()).to_pylist()
    for row, time, message in zip(table, times, messages, strict=True):
        assert row["value"] == (None if message.is_null else message.data)
        try:
            assert row["key"] == message.key_bytes
        except UnreadableMessage:
            assert row["key"] is None
        assert dict(row["properties"]) == message.properties
        assert time == (signed(message.event_time_ms) if message.event_time_ms else None)
        assert row["sequence_id"] == signed(message.sequence_id)
        assert row["batch_index"] == message._raw_id.batch_index


def as_they_are(data: bytes, _version: bytes) -> bytes:
    return data


@given(MESSAGES | ALIKE)
def test_columns_say_what_the_messages_do(messages: list[Outgoing]) -> None:
    rows = rows_of(opened(messages))
    check(record_batch([rows]), rows.messages(as_they_are))


@given(ALIKE)
def test_messages_as_programs_send_them_are_not_read_by_protobuf(messages: list[Outgoing]) -> None:
    entry = opened(messages)
    assert columns_in(entry).data is entry.payload


@settings(max_examples=examples(50))
@given(MESSAGES | ALIKE, MESSAGES, st.integers(0, 2**20 - 1), st.integers(0, 20))
def test_parts_are_parts(
    messages: list[Outgoing], others: list[Outgoing], mask: int, cut: int
) -> None:
    entry = opened(messages)
    chosen = [index for index in range(len(messages)) if mask >> index & 1]
    first, rest = rows_of(entry, chosen).take(min(cut, len(chosen)))
    parts = [part for part in (first, rows_of(opened(others)), rest) if part.num_rows]
    check(record_batch(parts), [each for part in parts for each in part.messages(as_they_are)])
    both = [each for part in (first, rest) for each in part.messages(as_they_are)]
    assert [message._raw_id.batch_index for message in both] == chosen
    singles = messages_in(entry)
    assert [message.data for message in both] == [singles[index].payload for index in chosen]


@given(MESSAGES | ALIKE, st.integers(0, 100_000), st.integers(0, 255))
def test_a_damaged_batch_is_read_as_messages_are_or_refused(
    messages: list[Outgoing], at: int, byte: int
) -> None:
    entry = opened(messages)
    data = bytearray(entry.payload)
    data[at % len(data)] = byte
    damaged = OpenedEntry(entry.metadata, bytes(data), True)
    try:
        messages_in(damaged)
    except UnreadableMessage:
        with pytest.raises(UnreadableMessage):
            columns_in(damaged)
        return
    rows = rows_of(damaged)
    check(record_batch([rows]), rows.messages(as_they_are))


def test_a_batch_that_ends_early_is_refused() -> None:
    entry = opened([Outgoing(payload=b"x", sequence_id=1, key="k", properties={"a": "b"})] * 2)
    for stop in range(len(entry.payload)):
        with pytest.raises(UnreadableMessage):
            columns_in(OpenedEntry(entry.metadata, entry.payload[:stop], True))


def batch_of(singles: list[tuple[bytes, bytes]], **metadata: Any) -> OpenedEntry:
    """Metadata as it is on the wire, and payloads."""
    pieces = [struct.pack(">I", len(said)) + said + payload for said, payload in singles]
    said = pb.MessageMetadata(
        producer_name="p",
        sequence_id=7,
        publish_time=1,
        num_messages_in_batch=len(singles),
        **metadata,
    )
    return OpenedEntry(said, b"".join(pieces), True)


@pytest.mark.parametrize(
    "tail",
    [
        "",  # no number of its own
        "40 05",
        "40 85 00",  # longer than it must be
        "40 05 48 01",  # without a value
        "30 00 40 05",  # a key that is not base64, said aloud
        "30 01 40 05",
        "40 05 28 06",  # another order
        "28 05 28 06",  # twice
        "28 80 80 80 80 80 80 80 80 80 01",
        "3a 02 ff ff 40 05",
        "48 02",  # no boolean that anybody writes
        "50 01",
        "9a 06 01 61",  # a field that nobody knows
        "20 01",  # compacted out
    ],
)
def test_forms_that_others_write(tail: str) -> None:
    said = b"\x12\x04abcd\x18\x01" + bytes.fromhex(tail)
    entry = batch_of([(said, b"x"), (b"\x18\x01\x40\x09", b"y"), (said, b"z")])
    rows = rows_of(entry)
    check(record_batch([rows]), rows.messages(as_they_are))


@pytest.mark.parametrize("text", [b"\xff", b"\xc3\xa9"])
def test_text_that_is_not_ascii_is_for_protobuf_to_judge(text: bytes) -> None:
    said = b"\x12" + bytes((len(text),)) + text + b"\x18\x01"
    entry = batch_of([(said, b"x")])
    if text == b"\xff":
        with pytest.raises(UnreadableMessage):
            columns_in(entry)
    else:
        assert record_batch([rows_of(entry)]).column("key").to_pylist() == [text]


def test_control_tails_that_are_not_compared_are_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two tails of a length has another field: without the comparison nobody notices."""
    entry = batch_of([(b"\x18\x01\x40\x05", b"x"), (b"\x18\x01\x28\x06", b"y")])
    rows = rows_of(entry)
    check(record_batch([rows]), rows.messages(as_they_are))
    monkeypatch.setattr(batch_tails._Form, "fits_all", lambda *_: True)
    with pytest.raises(AssertionError):
        check(record_batch([rows_of(entry)]), rows.messages(as_they_are))


def test_what_is_kept_of_heads_is_limited() -> None:
    batch_columns._heads.clear()
    for start in range(0, 2 * batch_columns._KNOWN_MAX, 1000):
        messages = [
            Outgoing(payload=bytes(start + number), sequence_id=0) for number in range(0, 1000, 10)
        ]
        assert len(columns_in(opened(messages))) == 100
        assert 0 < len(batch_columns._heads) <= batch_columns._KNOWN_MAX


# --- entries as a broker has them


def raw(messages: list[Outgoing], entry_id: int = 0, **asked: Any) -> RawEntry:
    return RawEntry(1, entry_id, batch_entry(messages, STAMP).headers_and_payload, **asked)


def test_only_the_columns_that_were_asked_for() -> None:
    messages = [Outgoing(payload=b"%d" % n, sequence_id=n, properties={"a": "b"}) for n in range(5)]
    schema = entries_schema(("entry_id", "value", "batch_index", "segment_id"))
    batch = entries_batch(
        [raw(messages), raw(messages, 1, first=3), raw(messages, 2, end=1)], schema
    )
    assert batch.schema == schema
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        *((0, b"%d" % n, n, None) for n in range(5)),
        (1, b"3", 3, None),
        (1, b"4", 4, None),
        (2, b"0", 0, None),
    ]
    with pytest.raises(InvalidValue, match="size"):
        entries_schema(("size",))


def test_what_cannot_be_read_is_a_row_that_says_why() -> None:
    broken = raw([Outgoing(payload=b"x", sequence_id=1)])
    damaged = broken.headers_and_payload[:-1] + b"y"
    chunk = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_chunks_from_msg=2, chunk_id=0
    )
    alone = pb.MessageMetadata(
        producer_name="p-seg-4",
        sequence_id=9,
        publish_time=1,
        partition_key="k",
        event_time=5,
        schema_version=b"\x01",
    )
    alone.properties.add(key="a", value="b")
    entries = [
        broken._replace(headers_and_payload=damaged),
        RawEntry(1, 1, encode_entry(chunk, b"part")),
        RawEntry(1, 2, encode_entry(alone, b"alone")),
    ]
    first, third, last = entries_batch(
        entries, entries_schema(), topic="t", segment_id=4
    ).to_pylist()
    for row, reason in ((first, "checksum"), (last, "chunk")):
        assert row["value"] is None
        assert reason in dict(row["properties"])[UNREADABLE]
    assert (third["value"], third["key"], third["properties"]) == (b"alone", b"k", [("a", "b")])
    assert (third["producer"], third["sequence_id"], third["batch_index"]) == ("p", 9, -1)
    assert (third["topic"], third["segment_id"], third["schema_version"]) == ("t", 4, b"\x01")


def test_chunks_in_a_row_are_one_message() -> None:
    message = Outgoing(payload=b"0123456789", sequence_id=3, key="k")
    stamp = Stamp("p", 7, Compression.ZLIB)
    chunks = chunk_entries(message, stamp, uuid="u", chunk_bytes=5)
    entries = [RawEntry(1, number, each.headers_and_payload) for number, each in enumerate(chunks)]
    assert len(entries) > 1
    (row,) = entries_batch(entries, entries_schema()).to_pylist()
    assert (row["value"], row["key"], row["sequence_id"]) == (b"0123456789", b"k", 3)
    assert row["entry_id"] == len(entries) - 1


def test_what_compaction_took_out_is_no_row() -> None:
    entry = batch_of([(b"\x18\x01\x20\x01", b"x"), (b"\x18\x01", b"y")])
    data = encode_entry(entry.metadata, entry.payload)
    batch = entries_batch([RawEntry(1, 0, data)], entries_schema(("value", "batch_index")))
    assert batch.to_pylist() == [{"value": b"y", "batch_index": 1}]


def test_no_entries_are_an_empty_batch() -> None:
    assert entries_batch([], entries_schema()).num_rows == 0


@given(MESSAGES, st.integers(0, 5))
def test_ordering_keys_are_a_column_if_they_are_asked_for(
    messages: list[Outgoing], first: int
) -> None:
    schema = entries_schema(("ordering_key", "batch_index"))
    batch = entries_batch([raw(messages), raw(messages, 1, first=first)], schema)
    keys = [each.ordering_key for each in messages]
    assert batch.column("ordering_key").to_pylist() == keys + keys[first:]


def on_a_page(entries: list[RawEntry]) -> list[RawEntry]:
    """The same entries, each of which says where it stands in all of them."""
    page = b"".join(each.headers_and_payload for each in entries)
    at, found = 0, []
    for each in entries:
        at += len(each.headers_and_payload)
        found.append(each._replace(page=page, ends_at=at))
    return found


ENTRY = st.one_of(
    st.tuples(MESSAGES | ALIKE, st.sampled_from([Compression.NONE, Compression.ZLIB])).map(
        lambda asked: batch_entry(asked[0], Stamp("p", 1, asked[1])).headers_and_payload
    ),
    # Alone, some of one byte, which Python has but once; and what cannot be read.
    st.sampled_from([b"x", b"", b"alone"]).map(
        lambda payload: encode_entry(
            pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1), payload
        )
    ),
    st.just(b"\x0e\x01broken"),
    st.just(
        encode_entry(
            pb.MessageMetadata(
                producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=9
            ),
            b"\0\0\0\x02\x18\x02",
        )
    ),
)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(ENTRY, st.integers(0, 3), st.none() | st.integers(0, 9)), max_size=6))
def test_entries_read_on_their_page_are_those_read_alone(
    parts: list[tuple[bytes, int, int | None]],
) -> None:
    entries = [RawEntry(1, number, *part) for number, part in enumerate(parts)]
    found = entries_batch(on_a_page(entries), entries_schema())
    found.validate(full=True)
    assert found.equals(entries_batch(entries, entries_schema()))


def test_a_batch_that_claims_more_than_it_has_does_not_read_on_in_the_next_entry() -> None:
    def entry(count: int) -> bytes:
        whole = opened([Outgoing(payload=b"%d" % n, sequence_id=n, key="k") for n in range(3)])
        whole.metadata.num_messages_in_batch = count
        return encode_entry(whole.metadata, whole.payload, checksum=False)

    page = on_a_page([RawEntry(1, 0, entry(4)), RawEntry(1, 1, entry(3))])
    # Without headers in between, a walk over the border would find messages there.
    payload = open_entry(entry(3)).payload
    both = payload + payload
    with pytest.raises(UnreadableMessage):
        columns_in(open_entry(entry(4)), within=(both, 0))
    rows = entries_batch(page, entries_schema(("value", "entry_id"))).to_pylist()
    assert [row["value"] for row in rows] == [None, b"0", b"1", b"2"]


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from(["a", "b", "key-7", "\xe4", "k" * 127, "k" * 128]), max_size=80))
def test_keys_that_come_again_are_what_they_were(keys: list[str]) -> None:
    messages = [
        Outgoing(payload=bytes(number % 3 * 100), sequence_id=number, key=key)
        for number, key in enumerate(keys or ["a"])
    ]
    # Twice: the second time, heads are known.
    for _ in range(2):
        rows = rows_of(opened(messages))
        check(record_batch([rows]), rows.messages(as_they_are))


def test_the_table_of_keys_is_bounded_and_left_alone_where_none_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[bytes, Any] = {}
    monkeypatch.setattr(batch_columns, "_keyed_heads", known)
    for first in range(0, 100_000, 1000):
        columns_in(
            opened(
                [
                    Outgoing(payload=b"x", sequence_id=n, key=f"{n}")
                    for n in range(first, first + 200)
                ]
            )
        )
    assert 0 < len(known) <= batch_columns._KNOWN_MAX


def test_the_ordering_key_of_a_message_alone() -> None:
    alone = pb.MessageMetadata(producer_name="p", sequence_id=9, publish_time=1, ordering_key=b"o")
    entry = RawEntry(1, 2, encode_entry(alone, b"alone"))
    batch = entries_batch([entry], entries_schema(("ordering_key",)))
    assert batch.to_pylist() == [{"ordering_key": b"o"}]
