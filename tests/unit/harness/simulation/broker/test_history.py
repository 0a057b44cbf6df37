"""The checkers of the broker's promises tell right from wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.simulation.broker.history import (
    ALL,
    NOWHERE,
    Ack,
    ConsumerStory,
    Gone,
    ProducerStory,
    SubscriptionStory,
    TopicStory,
)
from harness.simulation.storage.history import Findings
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType


class _Writing:
    ended_at: float | None = None
    lost_words = False

    def was_paused(self, moment: float) -> bool:
        return False


class _Scene:
    """A topic with three entries, of one, two and one messages; keys a, a and b."""

    def __init__(
        self, kind: SubscriptionType = SubscriptionType.SHARED, *, dedup: bool = True
    ) -> None:
        self.findings = Findings()
        self.topic = TopicStory(self.findings, "t", dedup=dedup, trims=False)
        self.producer = ProducerStory(self.findings, self.topic, "p")
        self.subscription = SubscriptionStory(self.findings, self.topic, "s", kind)
        self.producer.connected(-1)
        for messages, key, payload in ((1, "a", b"0"), (2, "a", b"1"), (1, "b", b"2")):
            self.producer.sending(self.producer.prepare(messages, key, payload))
        self.moment = 0.0

    def receipts(self) -> None:
        for sequence, entry in ((0, 0), (1, 1), (3, 2)):
            self.producer.receipt(sequence, Position(1, entry))

    def consumer(self, kind: SubscriptionType | None = None) -> ConsumerStory:
        self.moment += 1
        kind = self.subscription.kind if kind is None else kind
        consumer = ConsumerStory(self.subscription, f"c{self.moment}", kind, _Writing())
        consumer.joined(self.moment)
        consumer.flow(100)
        return consumer

    def deliver(
        self, consumer: ConsumerStory, entry: int, mask: int | None = None, count: int = 0
    ) -> None:
        self.moment += 1
        payload = b"%d" % entry
        consumer.delivered(Position(1, entry), payload, mask, count, self.moment)

    def ack(
        self, consumer: ConsumerStory, entry: int, mask: int = ALL, *, upto: bool = False
    ) -> None:
        self.moment += 1
        ack = Ack(Position(1, entry), mask, upto, consumer)
        self.subscription.acked(ack)
        ack.durable_at = self.moment


def _log() -> list[tuple[Position, bytes]]:
    return [(Position(1, entry), b"%d" % entry) for entry in range(3)]


def test_all_as_it_should_be() -> None:
    scene = _Scene()
    scene.receipts()
    consumer = scene.consumer()
    for entry in range(3):
        scene.deliver(consumer, entry)
    scene.ack(consumer, 1, 0b01)
    scene.subscription.asked_again([Position(1, 1)])
    scene.deliver(consumer, 1, 0b10, count=1)
    scene.ack(consumer, 0)
    log = scene.topic.log_read(_log())
    scene.subscription.verified(log, {Position(1, 1): 0b10, Position(1, 2): 1})
    scene.subscription.life_over(crashed=False)
    assert not scene.findings.violations


def _swapped(scene: _Scene) -> None:
    scene.producer.receipt(1, Position(1, 0))


def _lost(scene: _Scene) -> None:
    scene.receipts()
    scene.topic.log_read(_log()[:2])


def _duplicate_that_is_not_there(scene: _Scene) -> None:
    scene.producer.receipt(0, NOWHERE)
    scene.topic.log_read(_log()[1:])


def _twice(scene: _Scene) -> None:
    scene.topic.log_read([*_log(), (Position(2, 0), b"0")])


def _disordered(scene: _Scene) -> None:
    scene.topic.log_read([(Position(1, 0), b"1"), (Position(1, 1), b"0")])


def _strange(scene: _Scene) -> None:
    scene.deliver(scene.consumer(), 7)


def _without_permits(scene: _Scene) -> None:
    consumer = scene.consumer()
    consumer.flow(-99)
    scene.deliver(consumer, 1)
    scene.deliver(consumer, 2)


def _after_its_ack(scene: _Scene) -> None:
    consumer = scene.consumer()
    scene.deliver(consumer, 1)
    scene.ack(consumer, 1, 0b01)
    scene.deliver(consumer, 1)


def _after_a_cumulative_ack(scene: _Scene) -> None:
    consumer = scene.consumer(SubscriptionType.EXCLUSIVE)
    scene.deliver(consumer, 1)
    scene.ack(consumer, 1, upto=True)
    scene.deliver(scene.consumer(), 0)


def _before_a_seek(scene: _Scene) -> None:
    scene.subscription.seeking(Position(1, 1), scene.moment)
    scene.subscription.sought(Position(1, 1), 5.0)
    scene.moment = 5.0
    scene.deliver(scene.consumer(), 0)


def _after_its_expiry(scene: _Scene) -> None:
    scene.subscription.lapsing(Position(1, 1))
    scene.subscription.lapsed(Gone(Position(1, 1), 3.0, 4.0))
    scene.moment = 5.0
    scene.deliver(scene.consumer(), 1)


def _missing_above_what_expired(scene: _Scene) -> None:
    scene.receipts()
    log = scene.topic.log_read(_log())
    scene.subscription.lapsing(Position(1, 1))
    scene.subscription.verified(log, {})


def _missing(scene: _Scene) -> None:
    scene.receipts()
    log = scene.topic.log_read(_log())
    scene.subscription.verified(log, {Position(1, 0): 1, Position(1, 1): 0b01, Position(1, 2): 1})


def _out_of_order(scene: _Scene) -> None:
    consumer = scene.consumer(SubscriptionType.EXCLUSIVE)
    scene.deliver(consumer, 1)
    scene.deliver(consumer, 0)


def _counted(scene: _Scene) -> None:
    scene.deliver(scene.consumer(), 0, count=1)


def _key_out_of_order(scene: _Scene) -> None:
    consumer = scene.consumer(SubscriptionType.KEY_SHARED)
    scene.deliver(consumer, 1)
    scene.deliver(consumer, 0)


def _key_at_two(scene: _Scene) -> None:
    scene.deliver(scene.consumer(SubscriptionType.KEY_SHARED), 0)
    scene.deliver(scene.consumer(SubscriptionType.KEY_SHARED), 1)
    scene.subscription.life_over(crashed=False)


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (_swapped, "receipt of 1"),
        (_lost, "is lost"),
        (_duplicate_that_is_not_there, "is lost"),
        (_twice, "sent 1 times"),
        (_disordered, "are at"),
        (_strange, "nobody sent"),
        (_without_permits, "without a permit"),
        (_after_its_ack, "was acknowledged"),
        (_after_a_cumulative_ack, "was acknowledged"),
        (_before_a_seek, "was acknowledged"),
        (_missing, "was not delivered"),
        (_after_its_expiry, "was acknowledged"),
        (_missing_above_what_expired, "was not delivered"),
        (_out_of_order, "after"),
        (_counted, "redelivery count"),
        (_key_out_of_order, "came after"),
        (_key_at_two, "has [Position"),
    ],
)
def test_what_is_wrong_is_found(scene: Callable[[_Scene], None], text: str) -> None:
    made = _Scene()
    scene(made)
    assert any(text in violation for violation in made.findings.violations)


def test_a_seek_brings_back_what_expired() -> None:
    scene = _Scene()
    scene.receipts()
    scene.subscription.lapsing(Position(1, 2))
    scene.subscription.lapsed(Gone(Position(1, 2), 3.0, 4.0))
    scene.subscription.seeking(Position(1, 0), 4.5)
    scene.subscription.sought(Position(1, 0), 5.0)
    scene.moment = 5.0
    scene.deliver(scene.consumer(), 1)
    log = scene.topic.log_read(_log())
    scene.subscription.verified(log, {})  # it may have expired again
    assert not scene.findings.violations


def test_an_unanswered_seek_leaves_both_possible() -> None:
    scene = _Scene()
    scene.receipts()
    consumer = scene.consumer()
    for entry in range(3):
        scene.deliver(consumer, entry)
    scene.ack(consumer, 2)
    scene.subscription.seeking(Position(1, 1), scene.moment)
    scene.deliver(scene.consumer(), 2)
    log = scene.topic.log_read(_log())
    scene.subscription.verified(log, {Position(1, 1): 0b11})
    assert not scene.findings.violations


def test_an_answer_to_a_seek_that_is_heard_late_undoes_no_later_one() -> None:
    scene = _Scene()
    scene.receipts()
    for position in (Position(1, 2), Position(1, 0)):
        scene.subscription.seeking(position, 4.0)
    scene.subscription.sought(Position(1, 0), 6.0)
    scene.subscription.sought(Position(1, 2), 5.0)
    scene.moment = 10.0
    scene.deliver(scene.consumer(), 0)
    assert not scene.findings.violations
    assert scene.subscription.open_messages(Position(1, 1))
