"""Transitions of a group's record."""

from __future__ import annotations

from magnetar.model.segments import NEVER, SegmentLayout
from magnetar.scalable.groups.group_records import (
    assigned,
    assignment_of,
    attached,
    detached,
    expired,
    left,
    lost_brokers,
    member_of,
)
from magnetar.scalable.records import GroupKind, GroupRecord, MemberRecord


def group_of(*names: str, kind: GroupKind = "STREAM") -> GroupRecord:
    group = GroupRecord("g", kind)
    for name in names:
        group = attached(group, name, "broker-1", f"first-{name}", shares=False)
    return group


def member(group: GroupRecord, name: str) -> MemberRecord:
    found = member_of(group, name)
    assert found is not None
    return found


def test_members_stand_by_name_and_attaching_twice_is_attaching_once() -> None:
    group = group_of("b", "a")
    assert [each.name for each in group.members] == ["a", "b"]
    assert attached(group, "a", "broker-1", "first-a", shares=False) is group


def test_a_member_is_placed_by_the_first_assignment_and_stays_so() -> None:
    group = assigned(group_of("a"), 3, {0: ("a",)})
    assert member(group, "a").placed
    group = attached(group, "b", "broker-1", "first-b", shares=False)
    assert member(group, "a").placed
    assert not member(group, "b").placed, "nobody has counted on it yet"
    again = assigned(group, 3, {0: ("a",)})
    assert member(again, "b").placed
    assert again.revision == group.revision == 1, "the owners did not change"
    assert assigned(again, 3, {0: ("a",)}) is again
    back = attached(again, "a", "broker-2", "second-a", shares=False)
    assert member(back, "a").placed
    assert back.owners == {0: ("a",)}


def test_a_member_that_learns_to_share_is_placed_anew() -> None:
    group = assigned(group_of("a"), 0, {0: ("a",)})
    assert not member(attached(group, "a", "broker-1", "c", shares=True), "a").placed


def test_only_the_present_connection_detaches() -> None:
    group = attached(group_of("a"), "a", "broker-2", "second-a", shares=False)
    assert detached(group, "a", "first-a", 10) is group
    lost = detached(group, "a", "second-a", 10)
    assert member(lost, "a").lost_ms == 10
    assert detached(lost, "a", "second-a", 20) is lost, "the grace period began at 10"
    assert member(attached(lost, "a", "broker-1", "third-a", shares=False), "a").lost_ms == NEVER


def test_leaving_gives_the_segments_back_at_once() -> None:
    group = assigned(group_of("a", "b"), 0, {0: ("a",), 1: ("b", "a")})
    gone = left(group, "a", "first-a")
    assert [each.name for each in gone.members] == ["b"]
    assert gone.owners == {1: ("b",)}
    assert gone.revision == group.revision + 1
    assert left(gone, "a", "first-a") is gone
    assert left(group, "a", "another") is group
    assert left(group, "a") == gone


def test_members_of_dead_brokers_are_lost_and_expire() -> None:
    group = attached(group_of("a"), "b", "broker-2", "first-b", shares=False)
    assert lost_brokers(group, {"broker-1", "broker-2"}, 10) is group
    lost = lost_brokers(group, {"broker-1"}, 10)
    assert [each.lost_ms for each in lost.members] == [NEVER, 10]
    assert lost_brokers(lost, {"broker-1"}, 20) is lost
    assert expired(lost, 69, 60) is lost
    assert [each.name for each in expired(lost, 70, 60).members] == ["a"]


def test_an_assignment_for_an_older_layout_is_not_taken() -> None:
    group = assigned(group_of("a"), 3, {5: ("a",)})
    assert assigned(group, 2, {0: ("a",)}) is group


def test_assignment_of_a_member_in_ring_order_without_pruned_segments() -> None:
    layout = SegmentLayout.create(2, now_ms=0).split(0, now_ms=1)
    owners: dict[int, tuple[str, ...]] = {1: ("a",), 2: ("a", "b"), 3: ("b",), 9: ("a",)}
    group = assigned(group_of("a", "b"), 1, owners)
    found = [(each.segment.segment_id, each.shared) for each in assignment_of(group, "a", layout)]
    assert found == [(2, True), (1, False)]
    assert assignment_of(group, "nobody", layout) == ()
