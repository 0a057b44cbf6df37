"""Random layouts, and what the tests of assignments ask of them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from hypothesis import strategies as st

from magnetar.model.segments import SegmentLayout
from magnetar.scalable.groups.assignment import MemberView
from magnetar.scalable.records import GroupKind

Owners = Mapping[int, tuple[str, ...]]


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    """What a history of splits, merges and prunes leads to."""
    layout = SegmentLayout.create(
        draw(st.integers(1, 6)), now_ms=0, bucket_budget=draw(st.integers(1, 24))
    )
    for kind in draw(st.lists(st.sampled_from(("split", "split", "merge", "prune")), max_size=10)):
        layout = _changed(draw, layout, kind)
    layout.check_invariants()
    return layout


def _changed(draw: st.DrawFn, layout: SegmentLayout, kind: str) -> SegmentLayout:
    active = layout.active
    if kind == "split":
        return layout.split(draw(st.sampled_from(active)).segment_id, now_ms=0)
    if kind == "merge" and len(active) >= 2:
        first = draw(st.integers(0, len(active) - 2))
        last = draw(st.integers(first + 2, min(len(active), first + 4)))
        return layout.merge([each.segment_id for each in active[first:last]], now_ms=0)
    roots = [
        each for each in layout.segments.values() if not each.is_active and not each.parent_ids
    ]
    if kind == "prune" and roots:
        return layout.prune([draw(st.sampled_from(roots)).segment_id])
    return layout


@st.composite
def drained_sets(draw: st.DrawFn, layout: SegmentLayout) -> frozenset[int]:
    """Sealed segments, most often in the order in which consumers drain them."""
    drained: set[int] = set()
    for segment_id, segment in layout.segments.items():
        in_order = drained.issuperset(segment.parent_ids)
        if not segment.is_active and draw(st.integers(0, 9)) < (7 if in_order else 1):
            drained.add(segment_id)
    return frozenset(drained)


def member_lists(
    *, min_size: int = 0, shares: bool | None = None
) -> st.SearchStrategy[list[MemberView]]:
    can_share = st.booleans() if shares is None else st.just(shares)
    names = st.sampled_from([f"c{number}" for number in range(12)])
    members = st.builds(MemberView, names, can_share)
    return st.lists(members, min_size=min_size, max_size=9, unique_by=lambda each: each.name)


kinds: st.SearchStrategy[GroupKind] = st.sampled_from(("STREAM", "CHECKPOINT"))


def assignable(layout: SegmentLayout, finished: Set[int]) -> set[int]:
    """Segments that someone has to read now, said in another way than the code does."""
    return {
        segment_id
        for segment_id in layout.segments
        if segment_id not in finished
        and all(each.segment_id in finished for each in layout.ancestors(segment_id))
    }


def loads(owners: Owners, members: list[MemberView], finished: Set[int]) -> dict[str, int]:
    result = dict.fromkeys((member.name for member in members), 0)
    for segment_id, names in owners.items():
        if segment_id not in finished:
            for name in names:
                result[name] += 1
    return result


def most_that_can_stay(had: Mapping[str, int], segments: int) -> int:
    """Of what each present member had: with fair shares, nobody could leave more in place."""
    floor, extras = divmod(segments, len(had))
    above = sum(number > floor for number in had.values())
    return sum(min(number, floor) for number in had.values()) + min(extras, above)
