"""The records of scalable topics: what is stored of them, and how large it gets."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from magnetar.metadata.api import VALUE_BYTES_MAX
from magnetar.model.hashing import RING_SIZE, HashRange
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout import changes
from magnetar.scalable.records import LayoutRecord, ScalableRecord, encode

MOST = Limits().scalable_total_segments_max
NOW_MS = 1_999_999_999_999
TOPIC = TopicName.parse(f"topic://{'t' * 30}/{'n' * 30}/{'x' * 80}")


def committed(record: ScalableRecord) -> ScalableRecord:
    record = changes.prepared(record)
    return record if record.change is None else changes.sealed(record)


def widest(layout: SegmentLayout) -> int:
    """The active segment that can be split most often."""
    active = layout.active
    return max(active, key=lambda each: each.hash_range.end - each.hash_range.start).segment_id


def grown(record: ScalableRecord, segments: int) -> ScalableRecord:
    """After many changes, the last of them splits: ids and epochs have seven digits."""
    assert record.layout is not None
    aged = replace(record.layout, epoch=1_000_000, next_segment_id=1_000_000)
    layout = aged.layout()
    while len(layout.segments) < segments:
        layout = layout.split(widest(layout), now_ms=NOW_MS)
    return replace(record, layout=LayoutRecord.of(layout))


def created() -> ScalableRecord:
    return committed(changes.begin_create(TOPIC, 1, now_ms=NOW_MS, bucket_budget=4))


def migrated() -> ScalableRecord:
    name = f"persistent://{TOPIC.namespace}/{TOPIC.local_name}-partition-"
    regular = [TopicName.parse(f"{name}{number}") for number in range(MOST // 2 - 4)]
    begun = changes.begin_migrate(TOPIC, regular, now_ms=NOW_MS, bucket_budget=4)
    assert len(encode(begun)) < VALUE_BYTES_MAX
    return committed(begun)


@pytest.mark.slow
@pytest.mark.parametrize("beginning", [created, migrated])
def test_the_largest_topic_fits_while_a_change_is_under_way(
    beginning: Callable[[], ScalableRecord],
) -> None:
    full = grown(beginning(), MOST - 3)
    layout = changes.layout_of(full)
    split = changes.begin_split(full, widest(layout), now_ms=NOW_MS, segments_max=MOST)
    assert split.change is not None
    assert split.change.after is not None
    assert len(split.change.after.segments) >= MOST - 2
    everything = [each.segment_id for each in layout.active]
    merge = changes.begin_merge(full, everything, now_ms=NOW_MS, segments_max=MOST)
    for begun in (split, merge):
        sealing = changes.prepared(begun)
        assert len(encode(sealing)) < VALUE_BYTES_MAX
        assert msgspec.json.decode(encode(sealing), type=ScalableRecord) == sealing
        committed(begun)
    deleting = changes.begin_delete(full, force=True)
    assert len(encode(deleting)) < VALUE_BYTES_MAX


@given(st.lists(st.integers(0, 60), unique=True), st.lists(st.integers(0, 60), unique=True))
def test_ids_are_read_back_in_their_order(parents: list[int], children: list[int]) -> None:
    segment = Segment(
        7, HashRange(0, RING_SIZE - 1), parent_ids=tuple(parents), child_ids=tuple(children)
    )
    layout = SegmentLayout(3, 100, {7: segment})
    assert LayoutRecord.of(layout).layout() == layout
