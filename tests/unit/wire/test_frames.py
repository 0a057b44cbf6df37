"""The hand-written encoders write what protobuf writes, and bad commands are refused locally."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import LocalProtocolError
from magnetar.model.ids import Position
from magnetar.wire.frames import (
    SIZES,
    base_command,
    command,
    encode_ack,
    encode_ack_answer,
    encode_command,
    encode_message,
    encode_messages,
    encode_receipt,
    encode_send,
    encode_txn_answer,
    encode_with_payload,
    frame_bytes_max,
    varint,
)
from magnetar.wire.pb import pulsar_pb2 as pb

# Around every change of length, and anything else.
EDGES = st.sampled_from([2**n + d for n in range(7, 64, 7) for d in (-1, 0, 1)])
UINT64 = st.integers(0, 2**64 - 1) | st.integers(0, 300) | EDGES
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(UINT64)
def test_varints_are_those_of_protobuf(value: int) -> None:
    assert varint(value) == _encoded_id(value)[1:]


def test_a_negative_number_is_its_twos_complement() -> None:
    assert varint(-1) == varint(2**64 - 1)
    assert encode_receipt(1, 2, -1, -1) == encode_receipt(1, 2, 2**64 - 1, 2**64 - 1)


@given(
    UINT64,
    UINT64,
    st.integers(1, 2**31 - 1),
    st.none() | st.tuples(UINT64, UINT64),
    st.none() | UINT64,
    st.booleans(),
    st.binary(max_size=20),
)
def test_sends_are_those_of_protobuf(
    producer_id: int,
    sequence_id: int,
    count: int,
    txn: tuple[int, int] | None,
    highest: int | None,
    is_chunk: bool,
    entry: bytes,
) -> None:
    base = base_command(
        "SEND",
        producer_id=producer_id,
        sequence_id=sequence_id,
        num_messages=None if count == 1 else count,
        txnid_most_bits=None if txn is None else txn[0],
        txnid_least_bits=None if txn is None else txn[1],
        highest_sequence_id=highest,
        is_chunk=is_chunk or None,
    )
    made = encode_send(
        producer_id,
        sequence_id,
        entry,
        num_messages=count,
        txn=txn,
        highest_sequence_id=highest,
        is_chunk=is_chunk,
    )
    assert made == encode_with_payload(base, entry)


@given(UINT64, UINT64, UINT64, UINT64, st.none() | UINT64)
def test_receipts_are_those_of_protobuf(
    producer_id: int, sequence_id: int, ledger: int, entry: int, highest: int | None
) -> None:
    expected = command(
        "SEND_RECEIPT",
        producer_id=producer_id,
        sequence_id=sequence_id,
        message_id={"ledgerId": ledger, "entryId": entry},
        highest_sequence_id=highest,
    )
    assert encode_receipt(producer_id, sequence_id, ledger, entry, highest) == expected


@given(
    UINT64,
    st.builds(Position, UINT64, UINT64),
    st.just(-1) | st.integers(0, 2**31 - 1),
    st.integers(0, 2**32 - 1),
    st.none() | st.lists(INT64, max_size=40),
    st.binary(max_size=20),
    st.none() | UINT64,
)
def test_messages_are_those_of_protobuf(
    consumer_id: int,
    position: Position,
    partition: int,
    redeliveries: int,
    ack_set: list[int] | None,
    entry: bytes,
    epoch: int | None,
) -> None:
    message_id = {"ledgerId": position.ledger_id, "entryId": position.entry_id}
    base = base_command(
        "MESSAGE",
        consumer_id=consumer_id,
        message_id=message_id | ({"partition": partition} if partition >= 0 else {}),
        redelivery_count=redeliveries or None,
        ack_set=ack_set,
        consumer_epoch=epoch,
    )
    made = encode_message(
        consumer_id, position, partition, redeliveries, ack_set, entry, consumer_epoch=epoch
    )
    assert made == encode_with_payload(base, entry)


@given(
    UINT64,
    st.integers(-1, 2**31 - 1),
    st.none() | UINT64,
    st.lists(
        st.tuples(st.builds(Position, UINT64, UINT64 | INT64), st.binary(max_size=20)), max_size=6
    ),
)
def test_messages_together_are_those_one_by_one(
    consumer_id: int, partition: int, epoch: int | None, entries: list[tuple[Position, bytes]]
) -> None:
    together = encode_messages(consumer_id, partition, epoch, entries)
    one_by_one = [
        piece
        for position, payload in entries
        for piece in encode_message(consumer_id, position, partition, 0, (), payload, epoch)
    ]
    assert together == one_by_one


@given(
    UINT64,
    UINT64,
    st.lists(
        st.tuples(
            st.builds(Position, UINT64, UINT64),
            st.lists(INT64, max_size=20),
            st.integers(0, 2**31 - 1),
        ),
        max_size=5,
    ),
    st.booleans(),
    st.none() | st.tuples(UINT64, UINT64),
)
def test_acks_are_those_of_protobuf(
    consumer_id: int,
    request_id: int,
    items: list[tuple[Position, list[int], int]],
    cumulative: bool,
    txn: tuple[int, int] | None,
) -> None:
    ids = [
        {"ledgerId": ledger, "entryId": entry, "ack_set": words}
        | ({"batch_size": size} if size else {})
        for (ledger, entry), words, size in items
    ]
    fields: dict[str, object] = {} if txn is None else {
        "txnid_most_bits": txn[0], "txnid_least_bits": txn[1]
    }  # fmt: skip
    expected = command(
        "ACK",
        consumer_id=consumer_id,
        ack_type=pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual,
        message_id=ids,
        request_id=request_id,
        **fields,
    )
    assert encode_ack(consumer_id, request_id, items, cumulative=cumulative, txn=txn) == expected


@given(
    st.sampled_from(
        [
            "NEW_TXN_RESPONSE",
            "ADD_PARTITION_TO_TXN_RESPONSE",
            "ADD_SUBSCRIPTION_TO_TXN_RESPONSE",
            "END_TXN_RESPONSE",
            "END_TXN_ON_PARTITION_RESPONSE",
            "END_TXN_ON_SUBSCRIPTION_RESPONSE",
        ]
    ),
    UINT64,
    st.tuples(UINT64, UINT64),
)
def test_answers_about_transactions_are_those_of_protobuf(
    name: str, request_id: int, txn: tuple[int, int]
) -> None:
    expected = command(name, request_id=request_id, txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    assert encode_txn_answer(name, request_id, txn) == expected


@given(UINT64, UINT64, st.tuples(UINT64, UINT64))
def test_answers_to_acks_in_transactions_are_those_of_protobuf(
    consumer_id: int, request_id: int, txn: tuple[int, int]
) -> None:
    expected = command(
        "ACK_RESPONSE",
        consumer_id=consumer_id,
        request_id=request_id,
        txnid_most_bits=txn[0],
        txnid_least_bits=txn[1],
    )
    assert encode_ack_answer(consumer_id, request_id, txn) == expected


def test_more_values_than_the_cache_holds() -> None:
    receipts = {encode_receipt(producer, 1, 2, 3) for producer in range(20_000)}
    assert len(receipts) == 20_000
    assert encode_receipt(0, 1, 2, 3) in receipts


def test_a_command_without_fields_still_has_its_body() -> None:
    total, size = SIZES.unpack_from(command("PING"))
    assert total == size + 4
    assert pb.BaseCommand.FromString(command("PING")[8:]).HasField("ping")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NO_SUCH_COMMAND", {}),
        ("FLOW", {"consumer_id": 1, "no_such_field": 2}),
        ("FLOW", {"consumer_id": "one", "messagePermits": 1}),
        ("FLOW", {"consumer_id": -1, "messagePermits": 1}),
        ("FLOW", {"consumer_id": 1}),
    ],
)
def test_what_no_command_can_be_is_refused(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        command(name, **fields)


def test_an_empty_envelope_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        encode_command(pb.BaseCommand())


def test_frames_have_headroom_over_messages() -> None:
    # A chunk of the official client had 5,242,923 bytes after the command at a limit of 5 MiB.
    assert frame_bytes_max() >= 5_242_935 + 4


def _encoded_id(value: int) -> bytes:
    return pb.CommandReachedEndOfTopic(consumer_id=value).SerializeToString()
