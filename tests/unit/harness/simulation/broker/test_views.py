"""The oracle of compacted views tells right from wrong."""

from __future__ import annotations

import struct

import pytest

from harness.simulation.broker.history import Part, ProducerStory, TopicStory
from harness.simulation.broker.views import wrong_with
from harness.simulation.storage.history import Findings
from magnetar.model.ids import Position
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.pb import pulsar_pb2 as pb

Seen = list[tuple[Position, bytes]]


def part(key: str | None, value: bytes, *, is_gone: bool = False) -> Part:
    head = pb.SingleMessageMetadata(partition_key=key, payload_size=len(value))
    if is_gone:
        head.compacted_out = True
    data = head.SerializeToString()
    return Part(key, not value, struct.pack(">I", len(data)) + data + value)


def batch(parts: list[Part], sequence_id: int) -> bytes:
    payload = b"".join(each.data for each in parts)
    return build_message(
        payload, producer_name="p", sequence_id=sequence_id, num_messages_in_batch=len(parts)
    )


class _Scene:
    """A log: a=0, (a=1, b=1, c=1), b deleted, what cannot be opened, a=2, c=2."""

    def __init__(self, *, trims: bool = False) -> None:
        self.topic = TopicStory(Findings(), "t", dedup=True, trims=trims)
        self.producer = ProducerStory(Findings(), self.topic, "p")
        made = [part("a", b"1"), part("b", b"1"), part("c", b"1")]
        self.log: Seen = []
        self.add(1, b"a0", (Part("a", False, b""),))
        self.add(3, batch(made, 1), tuple(made))
        self.add(1, b"b-", (Part("b", True, b""),))
        self.add(2, b"closed", ())
        self.add(1, b"a2", (Part("a", False, b""),))
        self.add(1, b"c2", (Part("c", False, b""),))
        left = [made[0], part(None, b"", is_gone=True), made[2]]
        # Up to the batch that cannot be opened, up to a=2, and up to the end.
        self.at_3: Seen = [(Position(1, 1), batch(left, 1)), *self.log[3:]]
        left[0] = part(None, b"", is_gone=True)
        self.at_4: Seen = [(Position(1, 1), batch(left, 1)), *self.log[3:]]
        self.at_5: Seen = self.log[3:]

    def add(self, messages: int, payload: bytes, parts: tuple[Part, ...]) -> None:
        sent = self.producer.prepare(messages, "k", payload, parts=parts)
        self.producer.sending(sent)
        position = Position(1, len(self.log))
        self.topic.stored(position, sent)
        self.log.append((position, payload))

    def wrong(self, seen: Seen, first: int = 0) -> str:
        return wrong_with(self.topic, [position for position, _ in self.log][first:], seen)


@pytest.mark.parametrize("view", ["log", "at_3", "at_4", "at_5"])
def test_every_horizon_is_right(view: str) -> None:
    scene = _Scene()
    assert not scene.wrong(getattr(scene, view))


def test_a_horizon_does_not_go_back_behind_a_success() -> None:
    scene = _Scene()
    scene.topic.horizon_min = Position(1, 4)
    assert "is seen, and is not due" in scene.wrong(scene.at_3)
    assert not scene.wrong(scene.at_4)


def test_what_was_trimmed_must_be_in_the_view() -> None:
    scene = _Scene(trims=True)
    assert "is not seen" in scene.wrong(scene.log[2:], first=2)
    assert not scene.wrong(scene.at_3, first=2)


def test_what_is_missing_strange_or_out_of_order_is_found() -> None:
    scene = _Scene()
    assert "is not seen" in scene.wrong(scene.at_5[:-1])
    assert "is not seen" in scene.wrong(scene.at_5[1:])
    strange = build_message(b"", producer_name="q")
    assert "nobody sent" in scene.wrong([*scene.at_5, (Position(1, 9), strange)])
    assert "out of order" in scene.wrong(scene.at_5[::-1])
    assert scene.wrong([*scene.at_5[:-1], (Position(1, 5), b"c3")])


def test_a_deletion_that_nobody_saw_may_hold_where_the_log_is_trimmed() -> None:
    for trims in (False, True):
        scene = _Scene(trims=trims)
        lost = scene.producer.prepare(1, "k", b"x", parts=(Part("c", True, b""),))
        scene.producer.sending(lost)
        scene.topic.horizon_min = Position(1, 5)
        assert bool(scene.wrong(scene.at_5[:-1])) is not trims
