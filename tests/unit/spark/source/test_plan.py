"""Planning over a topic that splits and merges: everything once, keys in order, and an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.model.ranges import ORIGIN, RangeLayout, RangePosition, RangeSegment, RangeState
from magnetar.spark.source import plan
from magnetar.spark.source.offsets import Offset, TopicOffset
from magnetar.spark.source.plan import TopicView
from tests.unit.spark.dag_world import ACTIONS, TOPIC, Action, play, trouble

HISTORIES = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.integers(1, 5)), max_size=40
)


@given(HISTORIES)
def test_any_history_is_read_exactly_once_and_in_order(actions: list[Action]) -> None:
    assert trouble(*play(actions)) == []


def _no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are named at once, and read beside their parents."""

    def name_all(segments: dict[int, Any], view: TopicView, frozen: object) -> None:
        for each in view.layout.segments:
            if each.number not in segments:
                segments[each.number] = view.states[each.number].first

    monkeypatch.setattr(plan, "_name_children", name_all)
    monkeypatch.setattr(plan, "_parents_are_drained", lambda *_: True)


def _forgotten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained segment is forgotten while it is still in the layout: it would be read again."""
    real = plan.after

    def after(*args: Any) -> TopicOffset:
        place = real(*args)
        kept = {number: at for number, at in place.segments.items() if at is not None}
        return TopicOffset(place.creation_id, place.epoch, kept)

    monkeypatch.setattr(plan, "after", after)


def _drained_though_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read to what is stable now, and taken for drained: what comes later would be lost."""
    monkeypatch.setattr(plan, "_is_read", lambda end, segment, state: end >= state.stable)


def _later_segments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is frozen: a run on AvailableNow goes on with what comes after its begin."""
    targets, after = plan.targets, plan.after
    monkeypatch.setattr(plan, "targets", lambda place, view, frozen: targets(place, view, None))
    monkeypatch.setattr(plan, "after", lambda place, view, ends, *_: after(place, view, ends))


CHANGES: list[Action] = [
    ("publish", 0, 5),
    ("publish", 7, 2),
    ("step", 0, 1),
    ("split", 0, 1),
    ("publish", 0, 5),
    ("publish", 7, 5),
    ("step", 0, 2),
    ("split", 1, 1),
    ("merge", 0, 1),
    ("publish", 7, 3),
    ("step", 0, 9),
    ("step", 0, 9),
    ("step", 0, 9),
    ("publish", 7, 1),
]

AVAILABLE_NOW: list[Action] = [("publish", 0, 5), ("split", 0, 1), ("available", 0, 1)]


@pytest.mark.parametrize(
    ("switched_off", "actions"),
    [
        (_no_gate, CHANGES),
        (_forgotten_too_early, CHANGES),
        (_drained_though_not_sealed, CHANGES),
        (_later_segments_too, AVAILABLE_NOW),
    ],
)
def test_without_one_of_the_rules_something_is_wrong(
    switched_off: Any, actions: list[Action], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trouble(*play(actions)) == []
    switched_off(monkeypatch)
    with pytest.raises(AssertionError):
        assert trouble(*play(actions)) == []


# --- loss


def _view(
    segments: list[RangeSegment], *, id_: str = "id", first: RangePosition = ORIGIN
) -> TopicView:
    layout = RangeLayout(TOPIC, id_, 3, tuple(segments))
    states = {
        each.number: RangeState(first, RangePosition(each.number, 9), each.is_sealed)
        for each in segments
    }
    return TopicView(layout, states)


def test_a_start_below_the_first_message_is_a_loss_and_goes_on_there() -> None:
    place = TopicOffset("id", 3, {1: RangePosition(1, 2, 4)})
    checked = plan.check(TOPIC, place, _view([RangeSegment(1, "")], first=RangePosition(1, 5)))
    (said,) = checked.losses
    assert "from 1:2:4 on, but its first message is now 1:5:0" in said
    assert checked.place.segments == {1: RangePosition(1, 5)}


def test_a_segment_that_is_gone_before_it_was_drained_is_a_loss() -> None:
    place = TopicOffset("id", 1, {0: RangePosition(0, 2)})
    view = _view([RangeSegment(1, ""), RangeSegment(2, "")])
    checked = plan.check(TOPIC, place, view)
    assert len(checked.losses) == 1
    assert plan.after(checked.place, view, {}).segments.keys() == {1, 2}


def test_a_segment_that_lost_its_beginning_before_it_was_begun_is_a_loss() -> None:
    view = _view([RangeSegment(0, "", is_sealed=True), RangeSegment(1, "", (0,))])
    states = {**view.states, 1: RangeState(RangePosition(1, 5), RangePosition(1, 9), False)}
    checked = plan.check(
        TOPIC, TopicOffset("id", 1, {0: RangePosition(0, 4)}), TopicView(view.layout, states)
    )
    assert checked.losses == (
        f"the first messages of segment 1 of {TOPIC} were deleted before it was read",
    )


def test_a_topic_that_was_made_again_is_a_loss_and_begins_anew() -> None:
    view = _view([RangeSegment(0, "")], id_="another")
    checked = plan.check(TOPIC, TopicOffset("id", 9, {0: RangePosition(0, 7)}), view)
    assert "deleted and made again" in checked.losses[0]
    assert checked.place == TopicOffset("another", 3, {0: ORIGIN})
    start = Offset({TOPIC: TopicOffset("id", 9, {0: RangePosition(0, 7)})})
    assert plan.spans(start, Offset({TOPIC: checked.place})) == []


def test_a_drained_segment_that_is_gone_is_none() -> None:
    place = TopicOffset("id", 1, {0: None, 1: RangePosition(1, 3)})
    view = _view([RangeSegment(1, "")])
    checked = plan.check(TOPIC, place, view)
    assert checked.losses == ()
    assert plan.after(checked.place, view, {}).segments == {1: RangePosition(1, 3)}


# --- starts and ends


def test_latest_names_every_segment() -> None:
    segments = [RangeSegment(0, "", is_sealed=True), RangeSegment(1, "", parents=(0,))]
    assert plan.latest(_view(segments)).segments == {0: None, 1: RangePosition(1, 9)}


def test_earliest_begins_without_living_parents() -> None:
    segments = [RangeSegment(1, "", is_sealed=True), RangeSegment(3, "", (1,))]
    assert plan.earliest(_view(segments)).segments == {1: ORIGIN}


def test_what_is_before_a_named_position_counts_as_read() -> None:
    segments = [
        RangeSegment(0, "", is_sealed=True),
        RangeSegment(1, "", (0,)),
        RangeSegment(2, "", (0,)),
    ]
    place = plan.from_positions(_view(segments), {1: RangePosition(1, 4)})
    assert place.segments == {0: None, 1: RangePosition(1, 4), 2: ORIGIN}


def test_a_time_skips_segments_that_ended_before_it() -> None:
    segments = [
        RangeSegment(0, "", is_sealed=True),
        RangeSegment(1, "", (0,), is_sealed=True),
        RangeSegment(2, "", (0,)),
        RangeSegment(3, "", (1,)),
    ]
    found = {0: RangePosition(0, 9), 1: RangePosition(1, 4), 2: RangePosition(2, 2)}
    found[3] = RangePosition(3, 0)
    place = plan.from_times(_view(segments), found)
    assert place.segments == {0: None, 1: RangePosition(1, 4), 2: RangePosition(2, 2)}


def test_a_child_named_beside_its_parent_waits_for_it() -> None:
    """An offset that a user wrote may name both."""
    view = _view([RangeSegment(0, "", is_sealed=True), RangeSegment(1, "", (0,))])
    place = TopicOffset("id", 3, {0: RangePosition(0, 3), 1: RangePosition(1, 1)})
    assert plan.targets(place, view, None) == {0: RangePosition(0, 9)}


def test_a_newer_epoch_alone_is_no_news() -> None:
    old = TopicOffset("id", 1, {0: None, 1: RangePosition(1, 3)})
    assert not plan.is_news(old, TopicOffset("id", 2, {1: RangePosition(1, 3)}))
    assert plan.is_news(old, TopicOffset("id", 1, {0: None, 1: RangePosition(1, 4)}))
    assert plan.is_news(old, TopicOffset("other", 1, old.segments))


def test_an_older_layout_is_stale() -> None:
    view = _view([RangeSegment(0, "")])
    assert plan.is_stale(TopicOffset("id", 4, {}), view.layout)
    assert not plan.is_stale(TopicOffset("id", 3, {}), view.layout)
    assert not plan.is_stale(TopicOffset("other", 4, {}), view.layout)
