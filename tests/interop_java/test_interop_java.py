"""The official Java client for scalable topics against our server, and its bytes against ours."""

from __future__ import annotations

import re

import pytest

from magnetar.model.ids import (
    EARLIEST,
    LATEST,
    SCALABLE_EARLIEST,
    SCALABLE_LATEST,
    Checkpoint,
    CheckpointKind,
    MessageId,
    ScalableMessageId,
    SegmentPosition,
    TopicPositions,
)
from tests.interop.program import Program, Shown
from tests.interop_java.program import SCALABLE

# The first test may wait for Maven to fetch the client.
pytestmark = pytest.mark.slow

TOPIC = "topic://public/default/x"
SINGLE = MessageId(5, 7)
BATCHED = MessageId(5, 7, batch_index=2, batch_size=10)
POSITIONS = (SegmentPosition(1, BATCHED), SegmentPosition(3, SINGLE))
V4_IDS = {
    "v4-single": SINGLE,
    "v4-batched": BATCHED,
    "v4-partition": MessageId(5, 7, partition=4),
    "v4-earliest": EARLIEST,
    "v4-latest": LATEST,
}
IDS = {
    "single": ScalableMessageId(3, SINGLE),
    "batched": ScalableMessageId(3, BATCHED),
    "positions": ScalableMessageId(3, SINGLE, POSITIONS),
    "parent": ScalableMessageId(3, SINGLE, POSITIONS, TOPIC),
    "topics": ScalableMessageId(3, SINGLE, (), TOPIC, (TopicPositions(TOPIC, POSITIONS),)),
    "earliest": SCALABLE_EARLIEST,
    "latest": SCALABLE_LATEST,
}
CHECKPOINTS = {
    "checkpoint-earliest": Checkpoint(CheckpointKind.EARLIEST),
    "checkpoint-latest": Checkpoint(CheckpointKind.LATEST),
}
JAVA_TEXT = re.compile(r"MessageIdV5\{segment=(-?\d+), id=([-:\d]+), positions=(\d+)\}")


PLAIN = [name for name in SCALABLE.scenarios() if not name.startswith("transaction")]


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "byte-forms"])
def test_scenario(program: Program, name: str) -> None:
    for shown in _shown(program, name):
        _is_understood(shown)


def _shown(program: Program, name: str, *arguments: str) -> tuple[Shown, ...]:
    outcome = program.run(name, *arguments)
    if outcome.failure is not None:
        pytest.fail(outcome.failure, pytrace=False)
    return outcome.shown


def _is_understood(shown: Shown) -> None:
    """We read the bytes as the client means them, and write the same ones."""
    if shown.kind == "checkpoint":
        checkpoint = Checkpoint.from_bytes(shown.data)
        assert checkpoint.kind is CheckpointKind.REGULAR
        assert checkpoint.to_bytes() == shown.data
        return
    found = ScalableMessageId.from_bytes(shown.data)
    said = JAVA_TEXT.fullmatch(shown.text)
    assert said is not None, shown.text
    assert (found.segment_id, str(found.message_id)) == (int(said[1]), said[2])
    assert len(found.positions) == int(said[3])
    assert found.to_bytes() == shown.data


def test_ids_have_the_bytes_that_the_client_writes(program: Program) -> None:
    shown = _shown(program, "byte-forms")
    ours = {name: known.to_bytes() for name, known in (V4_IDS | IDS | CHECKPOINTS).items()}
    assert {known.kind: known.data.hex() for known in shown} == {
        name: data.hex() for name, data in ours.items()
    }


def test_the_client_reads_the_bytes_that_we_write(program: Program) -> None:
    regular = Checkpoint(CheckpointKind.REGULAR, POSITIONS)
    ids = [known.to_bytes() for known in IDS.values()]
    checkpoints = [known.to_bytes() for known in (*CHECKPOINTS.values(), regular)]
    shown = _shown(
        program,
        "byte-forms",
        *(f"message-id={data.hex()}" for data in ids),
        *(f"checkpoint={data.hex()}" for data in checkpoints),
    )
    assert [known.data for known in shown] == ids + checkpoints
    for known in shown[: len(ids)]:
        _is_understood(known)
