"""The drawing of a layout: every segment once, parents first, readable at any size."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.cli.dag import draw, id_list
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.scalable.records import LayoutRecord, ScalableRecord
from magnetar.server.admin.scalable.state import record_json
from tests.examples import examples

TOPIC = TopicName.parse("topic://public/default/x")


def as_record(layout: SegmentLayout) -> dict[str, Any]:
    return record_json(ScalableRecord(str(TOPIC), 0, LayoutRecord.of(layout)))


def test_a_split_and_a_merge() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=1).split(1, now_ms=2)
    layout = layout.merge([4, 2], now_ms=3)
    assert [line.text for line in draw(as_record(layout))] == [
        "0      0000-ffff  sealed  " + "░" * 32 + "  into 1,2",
        "├─1    0000-7fff  sealed  " + "░" * 16 + "·" * 16 + "  from 0  into 3,4",
        "│ ├─3  0000-3fff  active  " + "█" * 8 + "·" * 24 + "  from 1",
        "│ └─4  4000-7fff  sealed  " + "·" * 8 + "░" * 8 + "·" * 16 + "  from 1  into 5",
        "└─2    8000-ffff  sealed  " + "·" * 16 + "░" * 16 + "  from 0  into 5",
        "  └─5  4000-ffff  active  " + "·" * 8 + "█" * 24 + "  from 2,4  2 buckets",
    ]


def test_ids_that_follow_one_another_are_one_piece() -> None:
    assert id_list([7]) == "7"
    assert id_list([8, 7]) == "7,8"
    assert id_list([1, 2, 3, 9]) == "1-3,9"
    assert id_list(range(0, 40, 2)) == "0,2,4,6,8,10,12,14,... (20)"


def test_sixty_four_segments_fit_a_terminal() -> None:
    layout = SegmentLayout.create(1, now_ms=0)
    while len(layout.active) < 64:
        for segment in layout.active:
            layout = layout.split(segment.segment_id, now_ms=1)
    lines = draw(as_record(layout))
    assert len(lines) == 127
    assert sum(line.active for line in lines) == 64
    assert max(len(line.text) for line in lines) <= 100
    merged = draw(as_record(layout.merge([each.segment_id for each in layout.active], now_ms=2)))
    assert merged[-1].text.endswith("from 63-126  64 buckets")


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=30))
def test_every_segment_has_one_line_below_its_parents(steps: list[tuple[bool, int]]) -> None:
    layout = SegmentLayout.create(2, now_ms=0)
    for splits, choice in steps:
        active = layout.active
        index = choice % len(active)
        if splits or len(active) < 2:
            layout = layout.split(active[index].segment_id, now_ms=1)
        else:
            index = min(index, len(active) - 2)
            pair = [each.segment_id for each in active[index : index + 2]]
            layout = layout.merge(pair, now_ms=1)
    order = [_id_of(line.text) for line in draw(as_record(layout))]
    assert sorted(order) == list(layout.segments)
    places = {number: place for place, number in enumerate(order)}
    for segment in layout.segments.values():
        assert all(places[parent] < places[segment.segment_id] for parent in segment.parent_ids)


def _id_of(text: str) -> int:
    return int(text.lstrip("│├└─ ").split(" ", 1)[0])
