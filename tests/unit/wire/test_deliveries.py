"""MESSAGEs that are read by hand say what protobuf says of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import ProtocolError
from magnetar.model.ids import Position
from magnetar.wire import connection, deliveries
from magnetar.wire.frames import base_command, encode_with_payload
from magnetar.wire.messages import CHECKSUM, MAGIC_BROKER_ENTRY, Command, Delivered, RareDelivered
from tests.unit.wire.support import entry, open_client

NUMBERS = st.sampled_from([0, 1, 127, 128, 2**14 - 1, 2**14, 2**35, 2**63 - 1, 2**63, 2**64 - 1])
BROKER_ENTRY = CHECKSUM.pack(MAGIC_BROKER_ENTRY, 2) + b"\x08\x01"
ENTRIES = st.sampled_from(
    [
        entry(),
        entry(bytes(300)),
        entry(b""),
        entry()[:-1] + b"?",
        entry(checksum=False),
        BROKER_ENTRY + entry(),
    ]
)
MESSAGES = st.builds(
    lambda consumer, ledger, number, more, rest, data: message(
        data,
        consumer_id=consumer,
        message_id={"ledgerId": ledger, "entryId": number, **more},
        **rest,
    ),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.fixed_dictionaries(
        {},
        optional={
            "partition": st.sampled_from([-1, 0, 5, 127, 128]),
            "batch_index": st.sampled_from([-1, 3]),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "redelivery_count": st.sampled_from([0, 1, 127, 128, 2**32 - 1]),
            "ack_set": st.sampled_from([[], [-1, 5]]),
            "consumer_epoch": st.sampled_from([0, 3]),
        },
    ),
    ENTRIES,
)


def message(headers_and_payload: bytes, **fields: Any) -> bytes:
    return b"".join(encode_with_payload(base_command("MESSAGE", **fields), headers_and_payload))


def received(data: bytes) -> list[Command] | str:
    try:
        return open_client().receive(data)
    except ProtocolError as error:
        return str(error)


def by_protobuf(data: bytes) -> list[Command] | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "_DELIVERIES", None)
        return received(data)


def check(data: bytes) -> None:
    found, expected = received(data), by_protobuf(data)
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, Delivered):
            assert isinstance(other, RareDelivered)
            for name in ("consumer_id", "position", "partition", "redelivery_count", "checksum_ok"):
                assert getattr(one, name) == getattr(other, name), name
            assert list(one.ack_set) == list(other.ack_set)


@given(st.lists(MESSAGES, min_size=1, max_size=5))
def test_what_is_read_by_hand_is_what_protobuf_reads(frames: list[bytes]) -> None:
    check(b"".join(frames))


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_a_damaged_message_is_read_as_protobuf_reads_it(
    frames: list[bytes], data: st.DataObject
) -> None:
    damaged = bytearray(b"".join(frames))
    at = data.draw(st.integers(8, min(len(damaged) - 1, 60)))
    damaged[at] = data.draw(st.integers(0, 255))
    check(bytes(damaged))


def test_the_common_form_is_read_by_hand() -> None:
    frames = [
        message(entry(), consumer_id=3, message_id={"ledgerId": 2**20, "entryId": number})
        for number in (0, 5, 127, 128, 2**30)
    ]
    found = received(b"".join(frames))
    assert [type(each) for each in found] == [Delivered] * 5
    assert isinstance(found[-1], Delivered)
    assert found[-1].position == Position(2**20, 2**30)


def test_control_a_length_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of one ledger begin alike but for their length: it must be read for each."""
    first = message(entry(), consumer_id=1, message_id={"ledgerId": 1, "entryId": 1})
    other = message(
        entry(), consumer_id=1, message_id={"ledgerId": 1, "entryId": 1, "partition": 2}
    )
    check(first + other)
    taken = deliveries._id_before_entry

    def careless(data: bytes, at: int) -> Any:
        found = taken(data, at)
        return found and (*found[:2], found[2] + 2, found[3])

    monkeypatch.setattr(deliveries, "_id_before_entry", careless)
    with pytest.raises(AssertionError):
        test_the_common_form_is_read_by_hand()
