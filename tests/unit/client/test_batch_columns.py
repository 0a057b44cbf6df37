"""The columns of a batch: what `messages_in` says of each message, and no more is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.batch import OpenedEntry, Outgoing, Stamp, batch_entry, messages_in, open_entry
from magnetar.client.batch_columns import columns_in
from magnetar.client.entry_rows import EntryRows
from magnetar.client.message import Message
from magnetar.errors import UnreadableMessage
from magnetar.model.ids import Position
from tests.unit.client.nowhere import Nowhere

STAMP = Stamp("p", 1)
MESSAGES = st.lists(
    st.builds(
        Outgoing,
        payload=st.binary(max_size=300),
        sequence_id=st.integers(0, 2**63 - 1) | st.integers(0, 300),
        key=st.none() | st.text(max_size=5) | st.binary(max_size=5) | st.just("k" * 200),
        ordering_key=st.none() | st.binary(max_size=3),
        properties=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
        event_time_ms=st.sampled_from([0, 0, 5]),
        null_value=st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=20,
)


@given(MESSAGES)
def test_columns_say_what_the_messages_do(messages: list[Outgoing]) -> None:
    opened = open_entry(batch_entry(messages, STAMP).headers_and_payload)
    columns = columns_in(opened)
    assert len(columns) == len(messages)
    rows = EntryRows(Nowhere(), Position(1, 2), -1, opened, columns, 0, 0)
    for index, message in enumerate(rows.messages(lambda data, _: data)):
        assert columns.values[index] == (None if message.is_null else message.data)
        assert columns.keys[index] == message.key_bytes
        assert columns.sequence_ids[index] == message.sequence_id
        if index not in columns.rare:
            assert (message.properties, message.event_time_ms) == ({}, None)
            assert message.ordering_key is None


@given(MESSAGES, st.integers(0, 2**20 - 1), st.integers(0, 20))
def test_parts_are_parts(messages: list[Outgoing], mask: int, cut: int) -> None:
    opened = open_entry(batch_entry(messages, STAMP).headers_and_payload)
    columns = columns_in(opened).among(mask)
    chosen = [index for index in range(len(messages)) if mask >> index & 1]
    assert list(columns.indexes) == chosen
    rows = EntryRows(Nowhere(), Position(1, 2), 3, opened, columns, 0, 0)
    first, rest = rows.take(min(cut, len(chosen)))
    both: list[Message[bytes]] = [
        message for part in (first, rest) for message in part.messages(lambda data, _: data)
    ]
    assert [message.raw_id.batch_index for message in both] == chosen
    assert [message.data for message in both] == [
        messages_in(opened)[index].payload for index in chosen
    ]


@given(MESSAGES, st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_batch_is_read_as_messages_are_or_refused(
    messages: list[Outgoing], at: int, byte: int
) -> None:
    opened = open_entry(batch_entry(messages, STAMP).headers_and_payload)
    data = bytearray(opened.payload)
    data[at % len(data)] = byte
    damaged = OpenedEntry(opened.metadata, bytes(data), True)
    try:
        expected = messages_in(damaged)
    except UnreadableMessage:
        with pytest.raises(UnreadableMessage):
            columns_in(damaged)
        return
    columns = columns_in(damaged)
    for index, (single, payload) in enumerate(expected):
        assert columns.values[index] == (None if single.null_value else payload)
        number = single if single.HasField("sequence_id") else opened.metadata
        assert columns.sequence_ids[index] % 2**64 == number.sequence_id


def test_a_batch_that_ends_early_is_refused() -> None:
    opened = open_entry(
        batch_entry([Outgoing(payload=b"x", sequence_id=1)] * 2, STAMP).headers_and_payload
    )
    for stop in range(len(opened.payload)):
        with pytest.raises(UnreadableMessage):
            columns_in(OpenedEntry(opened.metadata, opened.payload[:stop], True))
