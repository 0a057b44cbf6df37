"""Layouts as brokers send them, the odd ones too."""

from __future__ import annotations

from dataclasses import replace

from magnetar.client.message.layouts import is_regular
from magnetar.model.segments import SegmentLayout, SegmentState


def sealed(layout: SegmentLayout) -> SegmentLayout:
    """As it is, without an active segment."""
    segments = {
        number: replace(each, state=SegmentState.SEALED) for number, each in layout.segments.items()
    }
    return SegmentLayout(layout.epoch + 1, layout.next_segment_id, segments)


def test_a_topic_is_regular_as_long_as_nothing_of_it_is_not() -> None:
    regular = SegmentLayout.of_regular(["a", "b"])
    assert is_regular(regular)
    assert is_regular(sealed(regular))
    scalable = SegmentLayout.create(2, now_ms=0)
    assert not is_regular(scalable)
    assert not is_regular(sealed(scalable))
