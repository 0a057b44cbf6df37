"""The transitions of a consumer group's record (pure).

Owns: every transition of `GroupRecord`, and what one member is to read by it.

Invariants:
1. Each transition returns the same record when it changes nothing, and doing it twice is doing it
   once: a write whose outcome is unknown is simply decided again.
2. Only the connection that attached last can detach a member or make it leave.
3. `owners` names members only: who leaves or expires loses its segments in that very change, so
   what a checkpoint member had read does not count when another of its name joins later.
4. `layout_epoch` never falls: an assignment made for an older layout is not taken.
5. A member is `placed` from the first assignment made with it in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from msgspec.structs import replace

from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.scalable.records import GroupRecord, MemberRecord


@dataclass(frozen=True, slots=True)
class AssignedSegment:
    """A segment that a member is to read; shared: by its entry buckets, with others."""

    segment: Segment
    shared: bool


# --- members


def member_of(group: GroupRecord, name: str) -> MemberRecord | None:
    return next((member for member in group.members if member.name == name), None)


def attached(
    group: GroupRecord, name: str, broker: str, connection: str, shares: bool
) -> GroupRecord:
    """A consumer has connected: a new member, or one that comes back to what it had."""
    known = member_of(group, name)
    # What it was given while it could share may not be what it can take now, and the reverse.
    placed = known is not None and known.placed and known.shares == shares
    member = MemberRecord(name, broker, connection, NEVER, shares, placed)
    # A write whose outcome was unknown, decided again: no change, no second revision.
    if member == known:
        return group
    others = [each for each in group.members if each.name != name]
    return replace(group, members=_by_name([*others, member]))


def detached(group: GroupRecord, name: str, connection: str, now_ms: int) -> GroupRecord:
    """A connection was lost. If the member has another one by now, nothing happens."""

    def is_gone(member: MemberRecord) -> bool:
        # By the connection, not the name alone (invariant 2): the consumer may be back already, and
        # a detach of the old connection arrives late.
        return member.name == name and member.connection == connection

    return _lost(group, is_gone, now_ms)


def left(group: GroupRecord, name: str, connection: str | None = None) -> GroupRecord:
    """A member goes for good; with a `connection`, only if that is its present one."""

    def goes(member: MemberRecord) -> bool:
        return member.name == name and connection in (None, member.connection)

    return _without(group, goes)


def lost_brokers(group: GroupRecord, live_brokers: Set[str], now_ms: int) -> GroupRecord:
    """Connections to brokers that live no more are lost."""
    return _lost(group, lambda member: member.broker not in live_brokers, now_ms)


def expired(group: GroupRecord, now_ms: int, grace_ms: int) -> GroupRecord:
    """Members that were without a connection for the whole grace period go."""

    def goes(member: MemberRecord) -> bool:
        # Counted from the stored time: a new controller does not begin the grace period anew.
        return member.lost_ms != NEVER and now_ms - member.lost_ms >= grace_ms

    return _without(group, goes)


# --- segments


def assigned(
    group: GroupRecord, layout_epoch: int, owners: Mapping[int, tuple[str, ...]]
) -> GroupRecord:
    """The owners, as they were computed for the members of this very record."""
    # A controller that has lost its leadership computed it: the newer one stands.
    if layout_epoch < group.layout_epoch:
        return group
    changed = group.owners != dict(owners)
    result = replace(
        group,
        # `placed`: sessions wait for it, so that nobody takes the assignment of an earlier life.
        members=tuple(replace(member, placed=True) for member in group.members),
        owners=dict(owners),
        layout_epoch=layout_epoch,
        # Counts changes of owners alone: that is what clients and metrics care about.
        revision=group.revision + changed,
    )
    return group if result == group else result


def assignment_of(
    group: GroupRecord, member: str, layout: SegmentLayout
) -> tuple[AssignedSegment, ...]:
    """What a member is to read, in ring order; segments that were pruned meanwhile are left out."""
    found = [
        AssignedSegment(layout.segments[segment_id], len(owners) > 1)
        for segment_id, owners in group.owners.items()
        if member in owners and segment_id in layout.segments
    ]
    return tuple(sorted(found, key=lambda each: (each.segment.hash_range, each.segment.segment_id)))


# --- the parts


def _lost(group: GroupRecord, is_gone: Callable[[MemberRecord], bool], now_ms: int) -> GroupRecord:
    members = tuple(
        # The first loss counts: a second look must not prolong the grace period.
        replace(member, lost_ms=now_ms) if member.lost_ms == NEVER and is_gone(member) else member
        for member in group.members
    )
    return group if members == group.members else replace(group, members=members)


def _without(group: GroupRecord, goes: Callable[[MemberRecord], bool]) -> GroupRecord:
    staying = tuple(member for member in group.members if not goes(member))
    if len(staying) == len(group.members):
        return group
    # Invariant 3: owners follow in the same change, so no segment names a member that is gone.
    names = {member.name for member in staying}
    owners = {
        segment_id: here
        for segment_id, all_owners in group.owners.items()
        if (here := tuple(name for name in all_owners if name in names))
    }
    changed = owners != group.owners
    return replace(group, members=staying, owners=owners, revision=group.revision + changed)


def _by_name(members: Iterable[MemberRecord]) -> tuple[MemberRecord, ...]:
    return tuple(sorted(members, key=lambda member: member.name))
