"""The checker of scalable topics: good histories pass, and every broken promise is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.simulation.scalable.history import (
    AckDurable,
    AckSent,
    Checkpointed,
    Delivered,
    Event,
    Expiring,
    ExpiryOver,
    Kind,
    LayoutSeen,
    Published,
    Receipted,
    Restored,
    Subscribed,
    violations,
)
from magnetar.model.hashing import HashRange, key_hash
from magnetar.model.ids import Checkpoint, CheckpointKind, MessageId, Position, SegmentPosition
from magnetar.model.segments import Segment, SegmentLayout

ONE = SegmentLayout.create(1, now_ms=0)
TWO = ONE.split(0, now_ms=1)
MERGED = TWO.merge((1, 2), now_ms=2)

LOW, HIGH = "hello", "k-1"
"""Keys of segments 1 and 2 after the split."""

START = Checkpoint(CheckpointKind.EARLIEST).to_bytes()


def _seen(layout: SegmentLayout, observer: str = "w") -> LayoutSeen:
    return LayoutSeen(observer, layout.epoch, tuple(layout.segments.values()))


def _sent(sequence: int, key: str = LOW) -> list[Event]:
    return [Published("p", sequence, key), Receipted("p", sequence)]


def _given(
    sequence: int, segment: int, key: str = LOW, name: str = "s", consumer: str = "c"
) -> Delivered:
    return Delivered(name, consumer, "p", sequence, key, segment, Position(segment, sequence))


def _acked(sequence: int, name: str = "s") -> list[Event]:
    return [AckSent(name, "p", sequence), AckDurable(name, "p", sequence)]


def _history(kind: Kind) -> list[Event]:
    """Two messages before a split, two after it, one after a merge; all consumed as they came."""
    events: list[Event] = [Subscribed("s", kind), _seen(ONE)]
    for sequence, segment, key in (
        (0, 0, LOW),
        (1, 0, HIGH),
        (2, 1, LOW),
        (3, 2, HIGH),
        (4, 3, LOW),
    ):
        if sequence == 2:
            events.append(_seen(TWO))
        elif sequence == 4:
            events.append(_seen(MERGED))
        events += [*_sent(sequence, key), _given(sequence, segment, key)]
        if kind is not Kind.CHECKPOINT:
            events += _acked(sequence)
    return events


def _without(events: list[Event], gone: Callable[[Event], bool]) -> list[Event]:
    return [event for event in events if not gone(event)]


def _only(events: list[Event], *words: str) -> None:
    found = violations(events)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


def test_the_keys_are_where_the_tests_say() -> None:
    for key, segment in ((LOW, 1), (HIGH, 2)):
        assert TWO.route(key_hash(key)).segment_id == segment


@pytest.mark.parametrize("kind", Kind)
def test_a_good_history(kind: Kind) -> None:
    assert violations(_history(kind)) == []


# --- layouts


@pytest.mark.parametrize(
    "active", [HashRange(0, 65534), HashRange(1, 65535), None], ids=["end", "start", "nothing"]
)
def test_active_ranges_must_tile(active: HashRange | None) -> None:
    segments = () if active is None else (Segment(0, active),)
    _only([LayoutSeen("w", 0, segments)], "does not tile")


def test_active_ranges_must_neither_overlap_nor_leave_a_gap() -> None:
    for end, start in ((100, 102), (100, 100)):
        segments = (Segment(0, HashRange(0, end)), Segment(1, HashRange(start, 65535)))
        _only([LayoutSeen("w", 0, segments)], "does not tile")


def test_epochs_do_not_go_back_in_a_session() -> None:
    _only([_seen(TWO), _seen(ONE)], "epoch 0 after epoch 1")
    assert violations([_seen(TWO, "w1"), _seen(ONE, "w2")]) == []
    assert violations([_seen(TWO), _seen(TWO)]) == []


def test_an_epoch_has_one_layout() -> None:
    other = SegmentLayout(ONE.epoch, 2, SegmentLayout.create(2, now_ms=0).segments)
    _only([_seen(ONE, "w1"), _seen(other, "w2")], "two different layouts")


def test_a_sealed_segment_stays_sealed() -> None:
    again = (replace(TWO.segments[0], state=ONE.segments[0].state),)
    _only([_seen(ONE), _seen(TWO), LayoutSeen("w", 2, again)], "active and was sealed")


def test_a_segment_keeps_its_range_and_parents() -> None:
    ranges = SegmentLayout.create(2, now_ms=0)
    moved = tuple(
        replace(segment, hash_range=hash_range)
        for segment, hash_range in zip(
            ranges.segments.values(), (HashRange(0, 9), HashRange(10, 65535)), strict=True
        )
    )
    found = violations([_seen(ranges), LayoutSeen("w", 1, moved)])
    assert len(found) == 2
    assert all("had the range" in text for text in found)
    parents = tuple(
        replace(segment, parent_ids=(7,)) if segment.segment_id == 1 else segment
        for segment in TWO.segments.values()
    )
    _only([_seen(TWO), LayoutSeen("w", 2, parents)], "had the parents")


def test_pruning_is_no_violation() -> None:
    assert violations([_seen(ONE), _seen(TWO), _seen(TWO.prune([0]))]) == []


# --- where messages are


def test_a_child_serves_nothing_before_its_parents_are_sealed() -> None:
    events: list[Event] = [Subscribed("s", Kind.QUEUE), _seen(ONE), _seen(TWO)]
    events += [*_sent(0), _given(0, 1), *_sent(1, HIGH), _given(1, 0, HIGH)]
    _only(events, "segment 0 took p/1 when its child 1 served")


def test_a_message_is_stored_once() -> None:
    events = [*_history(Kind.QUEUE), Subscribed("t", Kind.QUEUE)]
    events += [_given(n, s, k, "t") for n, s, k in ((1, 0, HIGH), (2, 1, LOW), (3, 2, HIGH))]
    events += [_given(4, 3, LOW, "t"), _given(0, 1, LOW, "t")]
    _only(events, "p/0 is stored twice")


def test_a_message_is_in_a_segment_of_its_key() -> None:
    events = [Subscribed("s", Kind.QUEUE), _seen(TWO), *_sent(0, HIGH), _given(0, 1, HIGH)]
    _only(events, "of key 'k-1' is in segment 0000-7fff-1")


def test_a_message_was_published_as_it_is() -> None:
    _only([Subscribed("s", Kind.QUEUE), _given(0, 0)], "never published")
    wrong = [Subscribed("s", Kind.QUEUE), *_sent(0, HIGH), _given(0, 0, LOW)]
    _only(wrong, "has the key 'hello', not 'k-1'")


# --- loss and second deliveries


@pytest.mark.parametrize("kind", Kind)
def test_nothing_with_a_receipt_is_lost(kind: Kind) -> None:
    events = _without(
        _history(kind), lambda event: isinstance(event, Delivered) and event.sequence == 4
    )
    _only(events, "1 messages have a receipt and were not delivered: p/4")
    assert violations(events, drained=False) == []


def test_a_message_without_a_receipt_may_be_missing() -> None:
    assert violations([Subscribed("s", Kind.QUEUE), Published("p", 0, LOW)]) == []


def test_what_was_published_before_a_subscription_at_latest_may_be_missing() -> None:
    events = [*_sent(0), Subscribed("s", Kind.STREAM, earliest=False), *_sent(1)]
    assert violations([*events, _given(1, 0)]) == []
    _only(events, "not delivered: p/1")


@pytest.mark.parametrize("kind", [Kind.QUEUE, Kind.STREAM])
def test_nothing_comes_again_after_its_durable_acknowledgement(kind: Kind) -> None:
    events = [*_history(kind), _given(4, 3)]
    _only(events, "p/4 after", "durable")


@pytest.mark.parametrize("kind", [Kind.QUEUE, Kind.STREAM])
def test_what_is_not_acknowledged_durably_may_come_again(kind: Kind) -> None:
    history = _without(_history(kind), lambda event: event == AckDurable("s", "p", 4))
    assert violations([*history, _given(4, 3, consumer="d")]) == []


def test_every_event_needs_its_subscription() -> None:
    _only([*_sent(0), _given(0, 0)], "before it was subscribed")


# --- order


def test_the_order_of_a_key_over_a_split() -> None:
    """The child's message comes while one of the parent is still missing."""
    events = [Subscribed("s", Kind.STREAM), _seen(ONE), *_sent(0), _seen(TWO), *_sent(1)]
    found = violations([*events, _given(1, 1), _given(0, 0)])
    assert any("key hello: c was given p/1, not p/0" in text for text in found)
    assert any("after messages of its child 1" in text for text in found)


def test_parents_come_first_whatever_the_key() -> None:
    events = [Subscribed("s", Kind.STREAM), _seen(ONE), *_sent(0, HIGH), _seen(TWO), *_sent(1)]
    _only([*events, _given(1, 1), _given(0, 0, HIGH)], "p/0 of segment 0 after", "child 1")


def test_a_queue_has_no_order() -> None:
    events = [Subscribed("s", Kind.QUEUE), _seen(ONE), *_sent(0), _seen(TWO), *_sent(1)]
    assert violations([*events, _given(1, 1), _given(0, 0)]) == []


def test_a_stream_may_go_back_to_the_first_that_is_not_acknowledged() -> None:
    events = [Subscribed("s", Kind.STREAM), *_sent(0), *_sent(1), *_sent(2)]
    events += [_given(0, 0), *_acked(0), _given(1, 0), _given(2, 0)]
    assert violations([*events, _given(1, 0), _given(2, 0)]) == []
    _only([*events, _given(2, 0)], "was given p/2, not p/1")
    _only([*events, _given(1, 0), _given(2, 0), _given(0, 0)], "p/0 after the durable")


def test_a_stream_does_not_go_back_behind_an_acknowledged_successor() -> None:
    events = [Subscribed("s", Kind.STREAM), *_sent(0), *_sent(1), _given(0, 0), _given(1, 0)]
    events += [AckSent("s", "p", 0), *_acked(1)]
    _only([*events, _given(0, 0)], "p/0 after the durable acknowledgement of p/1")


def test_an_acknowledgement_without_an_answer_may_have_been_applied() -> None:
    events = [Subscribed("s", Kind.STREAM), *_sent(0), *_sent(1), _given(0, 0), _given(1, 0)]
    assert violations([*events, AckSent("s", "p", 0), _given(1, 0)]) == []


def test_a_stream_skips_nothing() -> None:
    events = [Subscribed("s", Kind.STREAM), *_sent(0), *_sent(1), *_sent(2)]
    events += [_given(0, 0), *_acked(0)]
    found = violations([*events, _given(2, 0), _given(1, 0), _given(2, 0)])
    assert found == ["s: key hello: c was given p/2, not p/1"]


# --- checkpoints


def _checkpoint(entry: int) -> bytes:
    position = SegmentPosition(0, MessageId(1, entry))
    return Checkpoint(CheckpointKind.REGULAR, (position,)).to_bytes()


def _restored_after(*after: int) -> list[Event]:
    """Three messages; a checkpoint after the first, one message more, and a restart there."""
    events: list[Event] = [Subscribed("s", Kind.CHECKPOINT), Restored("s", "c", START)]
    events += [*_sent(0), *_sent(1), *_sent(2), _given(0, 0)]
    events += [Checkpointed("s", "c", _checkpoint(0)), _given(1, 0)]
    events += [Restored("s", "d", _checkpoint(0))]
    # The first consumer is gone, and what it had counts no more.
    events += [Restored("s", "c", START)]
    return [*events, *(_given(sequence, 0, consumer="d") for sequence in after)]


def test_a_restored_consumer_gets_exactly_the_rest() -> None:
    assert violations(_restored_after(1, 2)) == []
    _only(_restored_after(0, 1, 2), "d was given p/0 again")
    found = violations(_restored_after(2))
    assert "s: key hello: d was given p/2, not p/1" in found
    _only(_restored_after(1), "not delivered: p/2")


def test_a_checkpoint_consumer_gets_nothing_twice() -> None:
    _only([*_history(Kind.CHECKPOINT), _given(4, 3)], "c was given p/4 again")


def test_a_group_shares_the_work() -> None:
    events: list[Event] = [Subscribed("s", Kind.CHECKPOINT), *_sent(0), *_sent(1)]
    assert violations([*events, _given(0, 0, consumer="a"), _given(1, 0, consumer="b")]) == []


def test_only_a_checkpoint_that_was_taken_can_be_restored() -> None:
    events: list[Event] = [Subscribed("s", Kind.CHECKPOINT), Restored("s", "c", _checkpoint(5))]
    _only(events, "a checkpoint that nobody took")


def test_a_durable_subscription_has_no_checkpoints() -> None:
    _only([Subscribed("s", Kind.QUEUE), Checkpointed("s", "c", START)], "keeps acknowledgements")


def _timed(sent_at: float, kind: Kind) -> list[Event]:
    """One message with a time of delivery, and when it was given."""
    return [
        Subscribed("s", kind),
        _seen(ONE),
        Published("p", 0, LOW, not_before=10.0),
        Receipted("p", 0),
        replace(_given(0, 0), sent_at=sent_at),
    ]


def test_a_queue_is_given_nothing_before_its_time() -> None:
    assert violations(_timed(10.0, Kind.QUEUE)) == []
    (found,) = violations(_timed(9.5, Kind.QUEUE))
    assert "0.500 s before its time" in found


def test_a_stream_is_given_all_at_once() -> None:
    assert violations(_timed(1.0, Kind.STREAM)) == []


def _expired(*, done: bool, again: bool) -> list[Event]:
    """Two messages with a receipt expire; another is sent meanwhile, and one afterwards."""
    events: list[Event] = [Subscribed("s", Kind.QUEUE), _seen(ONE), *_sent(0), *_sent(1)]
    events += [Expiring("s"), *_sent(2), ExpiryOver("s", done), *_sent(3)]
    return [*events, *([_given(1, 0)] if again else []), _given(3, 0)]


def test_what_has_expired_is_not_lost_and_does_not_come_again() -> None:
    assert violations(_expired(done=True, again=False)) == []
    (found,) = violations(_expired(done=True, again=True))
    assert "after its durable acknowledgement" in found
    assert violations(_expired(done=False, again=True)) == []


def test_what_is_sent_after_an_expiry_may_not_be_missing() -> None:
    (found,) = violations(_expired(done=True, again=False)[:-1])
    assert "were not delivered" in found
