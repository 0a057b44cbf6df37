"""Which segments of a member wait for others, by layouts of any history."""

from __future__ import annotations

from magnetar.client.message.layouts import held_back
from magnetar.model.segments import SegmentLayout


def after_two_splits_and_a_merge() -> SegmentLayout:
    """0 became 1 and 2; 1 became 3 and 4; 4 and 2 became 5."""
    layout = SegmentLayout.create(1, now_ms=0)
    layout = layout.split(0, now_ms=1)
    layout = layout.split(1, now_ms=2)
    return layout.merge((4, 2), now_ms=3)


def test_descendants_wait_until_everything_before_them_is_read() -> None:
    layout = after_two_splits_and_a_merge()
    everything = set(layout.segments)
    assert held_back(layout, everything, set()) == {1, 2, 3, 4, 5}
    assert held_back(layout, everything, {0}) == {3, 4, 5}
    assert held_back(layout, everything, {0, 1}) == {5}
    assert held_back(layout, everything, {0, 1, 2, 4}) == set()


def test_what_another_member_reads_is_not_waited_for() -> None:
    layout = after_two_splits_and_a_merge()
    assert held_back(layout, {3, 5}, set()) == set()
    # But an ancestor further up is, though nobody here has what lies between.
    assert held_back(layout, {0, 5}, set()) == {5}


def test_a_segment_that_the_layout_does_not_know_waits_for_nothing() -> None:
    layout = after_two_splits_and_a_merge()
    assert held_back(layout, {0, 9}, set()) == set()
