"""The segment DAG: rules of each change, and random histories that keep every invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import InvalidLayout, InvariantBroken
from magnetar.model.hashing import RING_SIZE, HashRange, key_hash
from magnetar.model.segments import (
    NEVER,
    Segment,
    SegmentLayout,
    SegmentState,
    bucket_splits,
)
from tests.examples import examples


def ranges(layout: SegmentLayout) -> list[str]:
    return [str(segment.descriptor) for segment in layout.active]


def test_create_gives_the_remainder_to_the_last() -> None:
    layout = SegmentLayout.create(3, now_ms=5)
    layout.check_invariants()
    assert ranges(layout) == ["0000-5554-0", "5555-aaa9-1", "aaaa-ffff-2"]
    assert (layout.epoch, layout.next_segment_id) == (0, 3)
    assert layout.segment(0).created_at_ms == 5


@pytest.mark.parametrize("count", [0, -1, RING_SIZE + 1])
def test_create_refuses_impossible_counts(count: int) -> None:
    with pytest.raises(InvalidLayout):
        SegmentLayout.create(count, now_ms=0)


def test_split_at_the_midpoint_by_default() -> None:
    layout = SegmentLayout.create(1, now_ms=1).split(0, now_ms=9)
    layout.check_invariants()
    assert ranges(layout) == ["0000-7fff-1", "8000-ffff-2"]
    parent = layout.segment(0)
    assert (parent.state, parent.child_ids) == (SegmentState.SEALED, (1, 2))
    assert (parent.sealed_at_epoch, parent.sealed_at_ms, layout.epoch) == (1, 9, 1)
    child = layout.segment(1)
    assert (child.parent_ids, child.created_at_epoch, child.created_at_ms) == ((0,), 1, 9)
    assert (child.sealed_at_epoch, child.sealed_at_ms) == (NEVER, NEVER)


def test_split_at_any_point() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0, after=0x00FF)
    assert ranges(layout) == ["0000-00ff-1", "0100-ffff-2"]
    with pytest.raises(InvalidLayout, match="cannot be split after"):
        layout.split(1, now_ms=0, after=0x00FF)


def test_split_refusals() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0)
    with pytest.raises(InvalidLayout, match="sealed"):
        layout.split(0, now_ms=0)
    with pytest.raises(InvalidLayout, match="no segment 7"):
        layout.split(7, now_ms=0)
    with pytest.raises(InvalidLayout, match="one position"):
        SegmentLayout.create(RING_SIZE, now_ms=0).split(0, now_ms=0)


def test_merge_of_several_adjacent_in_any_order() -> None:
    layout = SegmentLayout.create(4, now_ms=0).merge([2, 0, 1], now_ms=3)
    layout.check_invariants()
    assert ranges(layout) == ["0000-bfff-4", "c000-ffff-3"]
    assert layout.segment(4).parent_ids == (0, 1, 2)
    assert all(layout.segment(each).child_ids == (4,) for each in (0, 1, 2))
    assert (layout.epoch, layout.segment(1).sealed_at_ms) == (1, 3)


def test_merge_needs_no_buddies() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0).split(1, now_ms=0)
    assert ranges(layout.merge([4, 2], now_ms=0)) == ["0000-3fff-3", "4000-ffff-5"]


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [([0, 2], "not adjacent"), ([1], "at least two"), ([1, 1], "at least two"), ([0, 9], "no seg")],
)
def test_merge_refusals(chosen: list[int], reason: str) -> None:
    with pytest.raises(InvalidLayout, match=reason):
        SegmentLayout.create(3, now_ms=0).merge(chosen, now_ms=0)


def test_the_ends_of_the_ring_are_not_adjacent() -> None:
    with pytest.raises(InvalidLayout, match="not adjacent"):
        SegmentLayout.create(3, now_ms=0).merge([2, 0], now_ms=0)


def test_prune_forgets_a_sealed_segment() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0)
    pruned = layout.prune([0])
    pruned.check_invariants()
    assert list(pruned.segments) == [1, 2]
    assert pruned.segment(1).parent_ids == ()
    assert (pruned.epoch, pruned.next_segment_id) == (2, 3)


def test_prune_refusals() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0).split(1, now_ms=0)
    with pytest.raises(InvalidLayout, match="active"):
        layout.prune([2])
    with pytest.raises(InvalidLayout, match="before its parent 0"):
        layout.prune([1])
    with pytest.raises(InvalidLayout, match="at least one"):
        layout.prune([])
    layout.prune([1, 0]).check_invariants()


def test_lineage() -> None:
    layout = SegmentLayout.create(2, now_ms=0).merge([0, 1], now_ms=0)
    layout = layout.split(2, now_ms=0).merge([3, 4], now_ms=0)
    assert [each.segment_id for each in layout.ancestors(5)] == [0, 1, 2, 3, 4]
    assert [each.segment_id for each in layout.parents(5)] == [3, 4]
    assert [each.segment_id for each in layout.children(2)] == [3, 4]
    assert [layout.merge_depth(each) for each in range(6)] == [0, 0, 1, 1, 1, 2]


def test_entry_buckets() -> None:
    assert bucket_splits(1) == ()
    assert bucket_splits(4) == (0x4000, 0x8000, 0xC000)
    layout = SegmentLayout.create(2, now_ms=0, bucket_budget=7)
    assert layout.segment(0).bucket_count == 3
    segment = Segment(0, HashRange(0, 1), entry_bucket_splits=bucket_splits(4))
    assert [segment.bucket_of(each) for each in (0, 0x3FFF, 0x4000, 0xFFFF)] == [0, 0, 1, 3]
    merged = layout.merge([0, 1], now_ms=0)
    assert merged.segment(2).bucket_count == 6
    split = merged.split(2, now_ms=0)
    assert [segment.bucket_count for segment in split.active] == [3, 3]
    assert SegmentLayout.create(5, now_ms=0, bucket_budget=1).segment(0).bucket_count == 1
    with pytest.raises(InvalidLayout):
        bucket_splits(0)


def test_route_uses_the_high_half() -> None:
    layout = SegmentLayout.create(2, now_ms=0)
    assert layout.route(key_hash("k-0")).segment_id == 0
    assert layout.route(key_hash("k-1")).segment_id == 1
    assert layout.route(0xFFFF_0000).segment_id == 1


def test_a_layout_cannot_be_changed_in_place() -> None:
    layout = SegmentLayout.create(1, now_ms=0)
    with pytest.raises(TypeError):
        layout.segments[1] = layout.segment(0)  # type: ignore[index]  # that is the point


def broken_layouts() -> list[SegmentLayout]:
    good = SegmentLayout.create(1, now_ms=0).split(0, now_ms=0)
    zero, one, two = good.segments.values()

    def having(*segments: Segment, next_id: int = 3, epoch: int = 1) -> SegmentLayout:
        return SegmentLayout(epoch, next_id, {each.segment_id: each for each in segments})

    return [
        having(),
        having(zero, one),
        having(zero, replace(one, hash_range=HashRange(0, 0x8000)), two),
        having(zero, replace(one, hash_range=HashRange(1, 0x7FFF)), two),
        having(zero, one, two, next_id=2),
        having(zero, one, two, epoch=0),
        having(one, two),
        having(zero, replace(one, parent_ids=()), two),
        having(replace(zero, child_ids=()), one, two),
        having(replace(zero, sealed_at_epoch=NEVER), one, two),
        having(zero, replace(one, sealed_at_ms=4), two),
        having(zero, replace(one, entry_bucket_splits=(5, 5)), two),
        SegmentLayout(1, 3, {0: zero, 1: one, 2: replace(two, segment_id=4)}),
    ]


@pytest.mark.parametrize("layout", broken_layouts())
def test_a_broken_layout_is_found(layout: SegmentLayout) -> None:
    with pytest.raises(InvariantBroken):
        layout.check_invariants()


def test_routing_off_a_broken_ring_is_a_bug() -> None:
    layout = SegmentLayout(0, 1, {0: Segment(0, HashRange(4, 9))})
    for position in (3, 10):
        with pytest.raises(InvariantBroken):
            layout.route(position << 16)


def random_change(layout: SegmentLayout, data: st.DataObject, now_ms: int) -> SegmentLayout:
    """One change that the rules permit, or the same layout if the drawn one is not possible."""
    kind = data.draw(st.sampled_from(["split", "merge", "prune"]))
    active = layout.active
    if kind == "split":
        chosen = data.draw(st.sampled_from(active))
        if chosen.hash_range.size == 1:
            return layout
        points = st.integers(chosen.hash_range.start, chosen.hash_range.end - 1)
        after = data.draw(st.none() | points)
        return layout.split(chosen.segment_id, now_ms=now_ms, after=after)
    if kind == "merge":
        if len(active) < 2:
            return layout
        first = data.draw(st.integers(0, len(active) - 2))
        last = data.draw(st.integers(first + 2, len(active)))
        return layout.merge([each.segment_id for each in active[first:last]], now_ms=now_ms)
    roots = [
        each.segment_id
        for each in layout.segments.values()
        if not each.is_active and not each.parent_ids
    ]
    if not roots:
        return layout
    return layout.prune(data.draw(st.sets(st.sampled_from(roots), min_size=1)))


@settings(max_examples=examples(60))
@given(st.integers(1, 5), st.integers(1, 16), st.data())
def test_random_histories_keep_the_invariants(
    count: int, buckets: int, data: st.DataObject
) -> None:
    layout = SegmentLayout.create(count, now_ms=0, bucket_budget=buckets)
    seen = set(layout.segments)
    for step in range(data.draw(st.integers(1, 15))):
        before = layout
        layout = random_change(before, data, step)
        layout.check_invariants()
        if layout is before:
            continue
        assert layout.epoch == before.epoch + 1
        new = set(layout.segments) - set(before.segments)
        assert not new & seen, "an id was given twice"
        seen |= new
        assert sum(each.hash_range.size for each in layout.active) == RING_SIZE
        position = data.draw(st.integers(0, RING_SIZE - 1))
        assert position in layout.route(position << 16).hash_range
        for each in new:
            overlap = [
                parent.segment_id
                for parent in before.active
                if parent.hash_range.overlaps(layout.segment(each).hash_range)
            ]
            assert overlap == list(layout.segment(each).parent_ids), "lineage follows the ring"
