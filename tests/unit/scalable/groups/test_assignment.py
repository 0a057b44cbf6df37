"""Assignments over random layouts, members and drained sets, and the cases that matter by name."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.model.hashing import HashRange
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.scalable.groups import assignment
from magnetar.scalable.groups.assignment import MemberView, assign, bucket_ranges
from magnetar.scalable.records import GroupKind
from tests.unit.scalable.layout_histories import (
    assignable,
    drained_sets,
    kinds,
    layouts,
    loads,
    member_lists,
    most_that_can_stay,
)

A, B, C = MemberView("a"), MemberView("b"), MemberView("c")


def world(data: st.DataObject) -> tuple[SegmentLayout, frozenset[int]]:
    layout = data.draw(layouts())
    return layout, data.draw(drained_sets(layout))


# --- properties


@given(st.data(), member_lists(), member_lists())
def test_stream_groups(
    data: st.DataObject, earlier: list[MemberView], members: list[MemberView]
) -> None:
    layout, drained = world(data)
    before = assign(layout, "STREAM", earlier, data.draw(drained_sets(layout)), {})
    owners = assign(layout, "STREAM", members, drained, before)
    if not members:
        assert owners == {}
        return
    assert set(owners) == assignable(layout, drained)
    shares = {member.name: member.shares for member in members}
    for segment_id, names in owners.items():
        assert 1 <= len(names) == len(set(names)) <= layout.segment(segment_id).bucket_count
        assert set(names) <= set(shares)
        assert len(names) == 1 or all(shares[name] for name in names)
    spread = loads(owners, members, drained).values()
    assert max(spread) - min(spread) <= 1
    # Nobody shares while someone could have a segment alone.
    assert max(map(len, owners.values()), default=1) == 1 or len(members) > len(owners)


@given(st.data(), member_lists(min_size=1), member_lists(min_size=1))
def test_checkpoint_groups(
    data: st.DataObject, earlier: list[MemberView], members: list[MemberView]
) -> None:
    layout, done = world(data)
    before: dict[int, tuple[str, ...]] = {}
    # Owners come by generations: what is done must have had one.
    for generation in range(len(layout.segments)):
        known = frozenset(sorted(done)[: generation + 1])
        before = assign(layout, "CHECKPOINT", earlier, known, before)
    owners = assign(layout, "CHECKPOINT", members, done, before)
    present = {member.name for member in members}
    finished = {each for each in done if set(before.get(each, ())) & present}
    assert set(owners) == assignable(layout, finished) | finished
    for segment_id, names in owners.items():
        assert len(names) == 1
        assert segment_id not in finished or names == before[segment_id], "withdrawn"
    held = {name for names in before.values() for name in names}
    if present <= held:
        stayed = {each: names for each, names in before.items() if set(names) <= present}
        assert {each: owners[each] for each in stayed if each in owners} == {
            each: names for each, names in stayed.items() if each in owners
        }, "who gets a segment that another reads begins anew"
    else:
        spread = loads(owners, members, finished).values()
        assert max(spread) - min(spread) <= 1


@given(st.data(), kinds, member_lists())
def test_nothing_changes_by_itself(
    data: st.DataObject, kind: GroupKind, members: list[MemberView]
) -> None:
    layout, drained = world(data)
    before = assign(layout, kind, members, data.draw(drained_sets(layout)), {})
    if kind == "CHECKPOINT":
        drained = drained.intersection(before)  # only an owner can have read a segment
    owners = assign(layout, kind, members, drained, before)
    assert assign(layout, kind, members, drained, owners) == owners
    shuffled = data.draw(st.permutations(members))
    turned = dict(reversed(before.items()))
    assert assign(layout, kind, shuffled, drained, turned) == owners


@given(st.data(), kinds, member_lists(min_size=1, shares=False), member_lists(min_size=1))
def test_members_come_and_go_with_the_fewest_moves(
    data: st.DataObject, kind: GroupKind, earlier: list[MemberView], members: list[MemberView]
) -> None:
    layout, drained = world(data)
    if kind == "CHECKPOINT":
        drained = frozenset()
    before = assign(layout, kind, earlier, drained, {})
    owners = assign(layout, kind, members, drained, before)
    had = Counter(name for names in before.values() for name in names)
    present = {member.name: had[member.name] for member in members}
    stayed = sum(before[each][0] in owners[each] for each in owners)
    assert stayed == most_that_can_stay(present, len(owners))


@given(st.data(), member_lists(min_size=2, shares=False))
def test_a_join_takes_one_share_and_a_leave_moves_nothing_else(
    data: st.DataObject, members: list[MemberView]
) -> None:
    layout, drained = world(data)
    few, (newcomer,) = members[:-1], members[-1:]
    before = assign(layout, "STREAM", few, drained, {})
    joined = assign(layout, "STREAM", members, drained, before)
    moved = [each for each in joined if joined[each] != before[each]]
    assert len(moved) == len(joined) // len(members)
    assert all(joined[each] == (newcomer.name,) for each in moved)
    after = assign(layout, "STREAM", few, drained, joined)
    assert all(after[each] == joined[each] for each in joined if newcomer.name not in joined[each])


@given(st.data(), kinds, member_lists(min_size=1, shares=False))
def test_a_child_stays_with_an_owner_of_its_parents(
    data: st.DataObject, kind: GroupKind, members: list[MemberView]
) -> None:
    layout, drained = world(data)
    before = assign(layout, kind, members, frozenset(), {})
    owners = assign(layout, kind, members, drained, before)
    finished = drained if kind == "STREAM" else drained & set(before)
    load = loads(owners, members, finished)
    for segment_id in set(owners) - set(before):
        (name,) = owners[segment_id]
        parents = layout.segment(segment_id).parent_ids
        kin = {owner for parent in parents for owner in before.get(parent, ())}
        # Elsewhere only if every one of them has as much as the one that got it.
        assert not kin or name in kin or all(load[each] >= load[name] for each in kin)


@given(st.data(), member_lists(min_size=1, shares=True))
def test_surplus_members_share_evenly_up_to_the_buckets(
    data: st.DataObject, members: list[MemberView]
) -> None:
    layout, drained = world(data)
    owners = assign(layout, "STREAM", members, drained, {})
    room = sum(layout.segment(each).bucket_count for each in owners)
    busy = {name for names in owners.values() for name in names}
    assert len(busy) == min(len(members), max(room, len(owners)))
    for fewer, names in owners.items():
        if len(names) < layout.segment(fewer).bucket_count:
            assert max(map(len, owners.values())) <= len(names) + 1


@given(layouts())
def test_bucket_ranges_tile_the_ring(layout: SegmentLayout) -> None:
    for segment in layout.segments.values():
        ranges = bucket_ranges(segment)
        assert len(ranges) == segment.bucket_count
        assert sum(each.size for each in ranges) == 65536
        for index, each in enumerate(ranges):
            assert segment.bucket_of(each.start) == segment.bucket_of(each.end) == index


# --- cases


def test_two_stream_members_after_the_first_split_own_one_active_segment_each() -> None:
    layout = SegmentLayout.create(1, now_ms=0)
    before = assign(layout, "STREAM", [A, B], set(), {})
    assert before == {0: ("a",)}
    layout = layout.split(0, now_ms=1)
    sealed = assign(layout, "STREAM", [A, B], set(), before)
    assert sealed == {0: ("a",)}, "the children wait for their parent"
    assert assign(layout, "STREAM", [A, B], {0}, sealed) == {1: ("a",), 2: ("b",)}


def test_both_children_stay_with_the_parents_owner_if_that_is_fair() -> None:
    layout = SegmentLayout.create(2, now_ms=0).split(0, now_ms=1)
    before: dict[int, tuple[str, ...]] = {0: ("b",), 1: ("a",)}
    assert assign(layout, "STREAM", [A, B], {0}, before) == {1: ("a",), 2: ("b",), 3: ("b",)}


def test_sharers_of_a_parent_divide_its_children() -> None:
    members = [MemberView(name, shares=True) for name in "abc"]
    layout = SegmentLayout.create(1, now_ms=0, bucket_budget=4)
    before = assign(layout, "STREAM", members, set(), {})
    assert before == {0: ("a", "b", "c")}
    layout = layout.split(0, now_ms=1)
    assert assign(layout, "STREAM", members, {0}, before) == {1: ("a", "c"), 2: ("b",)}


def test_a_member_that_cannot_share_keeps_its_segment_alone() -> None:
    members = [A, MemberView("b", shares=True), MemberView("c", shares=True)]
    layout = SegmentLayout.create(1, now_ms=0, bucket_budget=4)
    assert assign(layout, "STREAM", members, set(), {0: ("a",)}) == {0: ("a",)}
    assert assign(layout, "STREAM", members, set(), {0: ("b",)}) == {0: ("b", "c")}


def test_readers_of_a_checkpoint_group_never_share() -> None:
    members = [MemberView(name, shares=True) for name in "ab"]
    layout = SegmentLayout.create(1, now_ms=0, bucket_budget=4)
    assert assign(layout, "CHECKPOINT", members, set(), {}) == {0: ("a",)}


def test_sharers_are_evened_out_when_some_leave() -> None:
    members = [MemberView(name, shares=True) for name in "abcd"]
    layout = SegmentLayout.create(2, now_ms=0, bucket_budget=8)
    before: dict[int, tuple[str, ...]] = {0: ("a", "c", "d"), 1: ("b",)}
    assert assign(layout, "STREAM", members, set(), before) == {0: ("a", "c"), 1: ("b", "d")}


def test_what_a_checkpoint_member_has_read_goes_with_it() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=1)
    before: dict[int, tuple[str, ...]] = {0: ("a",), 1: ("a",), 2: ("b",)}
    assert assign(layout, "CHECKPOINT", [A, B], {0}, before) == before
    assert assign(layout, "CHECKPOINT", [B], {0}, before) == {0: ("b",)}, "to be read again"


def test_done_segments_are_no_load() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=1)
    owners = assign(layout, "CHECKPOINT", [A, B], {0}, {0: ("a",)})
    assert owners == {0: ("a",), 1: ("a",), 2: ("b",)}


def test_bucket_ranges_of_an_undivided_segment() -> None:
    assert bucket_ranges(Segment(0, HashRange(0, 1))) == [HashRange(0, 65535)]


# --- the rules, switched off


def test_without_parents_first_children_are_read_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=1)
    monkeypatch.setattr(
        assignment, "_cleared", lambda layout, finished: list(layout.segments.values())
    )
    owners = assign(layout, "STREAM", [A, B, C], set(), {})
    assert set(owners) - assignable(layout, set()) == {1, 2}


def test_without_the_exclusion_of_drained_segments_a_member_has_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=1)
    monkeypatch.setattr(assignment, "_unfinished", lambda segments, finished: list(segments))
    owners = assign(layout, "STREAM", [A, B, C], {0}, {0: ("a",)})
    assert owners == {0: ("a",), 1: ("b",), 2: ("c",)}, "a sits on the drained parent"
