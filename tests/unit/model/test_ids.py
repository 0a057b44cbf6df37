"""Message ids and checkpoints: golden bytes, round trips, damaged bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import RequestError
from magnetar.model.ids import (
    EARLIEST,
    LATEST,
    SCALABLE_EARLIEST,
    SCALABLE_LATEST,
    Checkpoint,
    CheckpointKind,
    MessageId,
    Position,
    ScalableMessageId,
    SegmentPosition,
    TopicPositions,
)
from tests.examples import examples

_INT64 = st.integers(-(2**63), 2**63 - 1)
_INT31 = st.integers(-1, 2**31 - 1)
_SIZES = st.integers(0, 2**31 - 1)
_IDS = st.builds(MessageId, _INT64, _INT64, _INT31, _INT31, _SIZES)
_VECTORS = st.lists(st.builds(SegmentPosition, _INT64, _IDS), max_size=3).map(tuple)
_TOPICS = st.lists(st.builds(TopicPositions, st.text(max_size=8), _VECTORS), max_size=2).map(tuple)
_SCALABLE_IDS = st.builds(
    ScalableMessageId,
    _INT64,
    _IDS,
    _VECTORS,
    st.none() | st.text(max_size=12),
    st.none() | _TOPICS,
)


def test_golden_message_id() -> None:
    assert MessageId(5, 7).to_bytes().hex() == "080510073000"
    assert MessageId.from_bytes(bytes.fromhex("080510073000")) == MessageId(5, 7)


def test_golden_scalable_id() -> None:
    golden = "00000000000000030000000608051007300000000000ffffffffffffffff"
    sample = ScalableMessageId(3, MessageId(5, 7))
    assert sample.to_bytes().hex() == golden
    assert ScalableMessageId.from_bytes(bytes.fromhex(golden)) == sample


def test_golden_checkpoint() -> None:
    golden = "0000000001000000000000000300000006080510073000"
    sample = Checkpoint(CheckpointKind.REGULAR, (SegmentPosition(3, MessageId(5, 7)),))
    assert sample.to_bytes().hex() == golden
    assert Checkpoint.from_bytes(bytes.fromhex(golden)) == sample
    assert Checkpoint(CheckpointKind.EARLIEST).to_bytes() == b"\x01"
    assert Checkpoint(CheckpointKind.LATEST).to_bytes() == b"\x02"


def test_partition_and_batch_index_are_written_only_if_there_are_any() -> None:
    assert MessageId(5, 7, 2, 1, 10).to_bytes().hex() == "080510071802" + "2001" + "300a"
    assert MessageId(5, 7, 0, 0, 1).to_bytes().hex() == "080510071800" + "2000" + "3001"


def test_the_ends_of_a_topic() -> None:
    assert EARLIEST.to_bytes().hex() == "08" + "ff" * 9 + "01" + "10" + "ff" * 9 + "01" + "3000"
    assert LATEST.to_bytes().hex() == "08" + "ff" * 8 + "7f" + "10" + "ff" * 8 + "7f" + "3000"
    assert EARLIEST < MessageId(0, 0) < LATEST
    for each in (SCALABLE_EARLIEST, SCALABLE_LATEST):
        assert each.segment_id == -1
        assert ScalableMessageId.from_bytes(each.to_bytes()) == each


def test_order_and_text() -> None:
    assert Position(1, 9) < Position(2, 0)
    assert MessageId(1, 9) < MessageId(2, 0)
    assert MessageId(1, 1, -1, 0, 5) < MessageId(1, 1, -1, 1, 5)
    assert MessageId(1, 1, -1, 0, 5) == MessageId(1, 1, -1, 0, 6)
    assert MessageId(1, 2).position == Position(1, 2)
    assert (str(Position(1, 2)), str(MessageId(1, 2)), str(MessageId(1, 2, 0, 3))) == (
        "1:2",
        "1:2:-1",
        "1:2:0:3",
    )


def test_ids_print_short() -> None:
    seen = tuple(SegmentPosition(number, MessageId(number, 4)) for number in range(50))
    message_id = ScalableMessageId(7, MessageId(12, 3, -1, 5, 10), seen, "topic://a/b/c")
    assert (str(message_id), repr(message_id)) == (
        "7/12:3:-1:5",
        "<ScalableMessageId 7/12:3:-1:5>",
    )
    assert repr(message_id.message_id) == "<MessageId 12:3:-1:5>"


def test_only_segment_and_v4_id_count_in_comparisons() -> None:
    bare = ScalableMessageId(3, MessageId(5, 7))
    full = ScalableMessageId(3, MessageId(5, 7), (SegmentPosition(1, EARLIEST),), "topic://t/n/x")
    assert bare == full
    assert hash(bare) == hash(full)
    assert ScalableMessageId(2, MessageId(9, 9)) < bare


def test_trailing_sections_may_be_absent() -> None:
    whole = ScalableMessageId(3, MessageId(5, 7)).to_bytes()
    for size in (len(whole) - 4, len(whole) - 8, len(whole) - 12):
        assert ScalableMessageId.from_bytes(whole[:size]) == ScalableMessageId(3, MessageId(5, 7))


def test_other_fields_of_an_id_are_skipped() -> None:
    ack_set_and_chunk = bytes.fromhex("2801" + "3a0408011001" + "4100000000000000004d00000000")
    assert MessageId.from_bytes(MessageId(5, 7).to_bytes() + ack_set_and_chunk) == MessageId(5, 7)


@pytest.mark.parametrize(
    "data",
    ["", "0805", "1007", "08", "080510", "08" + "ff" * 11, "080510073b", "080510073aff"],
)
def test_damaged_message_ids_are_refused(data: str) -> None:
    with pytest.raises(RequestError):
        MessageId.from_bytes(bytes.fromhex(data))


@pytest.mark.parametrize(
    "data",
    [
        "",
        "03",
        "00",
        "00ffffffff",
        "0000000001",
        "0100",
        "0000000001000000000000000380000000",
    ],
)
def test_damaged_checkpoints_are_refused(data: str) -> None:
    with pytest.raises(RequestError):
        Checkpoint.from_bytes(bytes.fromhex(data))


def test_an_end_of_the_topic_has_no_positions() -> None:
    with pytest.raises(RequestError):
        Checkpoint(CheckpointKind.LATEST, (SegmentPosition(0, EARLIEST),))


@given(_IDS)
def test_message_id_round_trip(message_id: MessageId) -> None:
    again = MessageId.from_bytes(message_id.to_bytes())
    assert again == message_id
    assert again.batch_size == message_id.batch_size


@settings(max_examples=examples(50))
@given(_SCALABLE_IDS)
def test_scalable_id_round_trip(message_id: ScalableMessageId) -> None:
    again = ScalableMessageId.from_bytes(message_id.to_bytes())
    assert again == message_id
    assert (again.positions, again.parent_topic, again.topics) == (
        message_id.positions,
        message_id.parent_topic,
        message_id.topics,
    )


@given(_VECTORS)
def test_checkpoint_round_trip(positions: tuple[SegmentPosition, ...]) -> None:
    checkpoint = Checkpoint(CheckpointKind.REGULAR, positions)
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint


@given(st.binary(max_size=60) | _SCALABLE_IDS.map(ScalableMessageId.to_bytes), st.integers(0, 60))
def test_any_bytes_are_an_id_or_refused(data: bytes, cut: int) -> None:
    for kind in (MessageId, ScalableMessageId, Checkpoint):
        for each in (data, data[:cut], data + b"\xff"):
            try:
                kind.from_bytes(each)
            except RequestError:
                continue
