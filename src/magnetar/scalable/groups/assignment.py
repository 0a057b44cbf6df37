"""The assignment of segments to the members of a consumer group (pure).

Owns: `assign`, a function of the layout, the members, what is drained and who had what before, and
`bucket_ranges`, what the members that share a segment declare.

Invariants:
1. Parents first: a segment is given out only when all its ancestors (still in the DAG) are drained.
2. A stream group is never given a drained segment. A checkpoint group's drained ("done") segment
   stays with its owner, whose client would forget its position otherwise, and is no load; it counts
   as done only while that owner is a member.
3. Every segment that can be given out has an owner as long as there is a member.
4. Loads (segments given out that are not done) differ by at most one. Not so in a checkpoint group
   whose members all have something: there nothing moves, for who gets a segment reads it anew.
5. As many segments as 4 allows stay where they were: with an unchanged world, all of them.
6. A segment that moves or is new goes to an owner of one of its parents if 4 allows it.
7. Only stream members that can share do, and only segments whose owners all can: up to one owner
   per entry bucket, and only members that would have nothing else. A checkpoint group's readers
   each read a whole segment, so they never share.
8. Equal arguments give equal results, whatever the order of members and mappings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from magnetar.model.hashing import RING_SIZE, HashRange
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.scalable.records import GroupKind

Owners = Mapping[int, tuple[str, ...]]


class MemberView(NamedTuple):
    """The member of a group, as far as it matters here; names are unique in a group."""

    name: str
    shares: bool = False


def assign(
    layout: SegmentLayout,
    kind: GroupKind,
    members: Sequence[MemberView],
    drained: Set[int],
    before: Owners,
) -> dict[int, tuple[str, ...]]:
    """The owners of every segment that can be given out, by segment id, ascending."""
    if not members:
        return {}
    # Sorted once: the result must not depend on the order of records (invariant 8).
    names = sorted(member.name for member in members)
    kept = _still_there(before, frozenset(names))
    finished = _finished(layout, kind, drained, kept)
    live = _ring_order(_unfinished(_cleared(layout, finished), finished))
    owned = {name for owners in kept.values() for name in owners}
    # Checkpoint readers keep their own positions, so a move costs a second reading: as long as each
    # has something, nothing moves (invariant 4). A member with nothing justifies a new deal.
    if kind == "CHECKPOINT" and owned.issuperset(names):
        owners = _where_they_are(layout, live, names, kept)
    else:
        owners = _one_owner_each(layout, live, names, kept)
    # Stream members may share a segment by entry buckets; done segments of a checkpoint group stay
    # with who read them (invariant 2).
    if kind == "STREAM":
        sharers = {member.name for member in members if member.shares}
        result = _shared_out(live, owners, sharers, kept)
    else:
        done = {segment_id: kept[segment_id] for segment_id in finished}
        result = {**done, **{segment_id: (name,) for segment_id, name in owners.items()}}
    return dict(sorted(result.items()))


def bucket_ranges(segment: Segment) -> list[HashRange]:
    """The entry buckets of a segment: together the whole ring, the same list for every sharer."""
    bounds = (0, *segment.entry_bucket_splits, RING_SIZE)
    return [HashRange(lower, upper - 1) for lower, upper in pairwise(bounds)]


# --- what can be given out


def _still_there(before: Owners, names: frozenset[str]) -> dict[int, tuple[str, ...]]:
    left = {
        segment_id: tuple(name for name in owners if name in names)
        for segment_id, owners in before.items()
    }
    return {segment_id: owners for segment_id, owners in left.items() if owners}


def _finished(
    layout: SegmentLayout, kind: GroupKind, drained: Set[int], kept: Owners
) -> frozenset[int]:
    finished = frozenset(drained).intersection(layout.segments)
    # Who read a checkpoint group's segment has its position; without that member it is lost.
    return finished if kind == "STREAM" else finished.intersection(kept)


def _cleared(layout: SegmentLayout, finished: Set[int]) -> list[Segment]:
    """Invariant 1: segments with nothing left to be read before them."""
    cleared: dict[int, Segment] = {}
    for segment_id, segment in layout.segments.items():  # ascending: parents come first
        # Through `cleared`, not only `finished`: a mark of a parent whose own parents are not
        # drained says nothing yet.
        if all(parent in finished and parent in cleared for parent in segment.parent_ids):
            cleared[segment_id] = segment
    return list(cleared.values())


def _unfinished(segments: Iterable[Segment], finished: Set[int]) -> list[Segment]:
    """Invariant 2: what is drained is no work any more."""
    return [segment for segment in segments if segment.segment_id not in finished]


def _ring_order(segments: Iterable[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda segment: (segment.hash_range, segment.segment_id))


# --- one owner for each


def _where_they_are(
    layout: SegmentLayout, live: Sequence[Segment], names: Sequence[str], kept: Owners
) -> dict[int, str]:
    """What a member reads stays with it: another would begin anew. Only the rest is dealt."""
    owners = {each.segment_id: kept[each.segment_id][0] for each in live if each.segment_id in kept}
    loads = Counter(owners.values())
    for segment in live:
        if segment.segment_id not in owners:
            kin = _kin(layout, segment, kept)
            # Balance first, then kinship (invariant 6), then the name,
            # which makes it deterministic.
            name = min(names, key=lambda each: (loads[each], each not in kin, each))
            owners[segment.segment_id] = name
            loads[name] += 1
    return owners


class _Loads:
    """The number of segments of each member, and who may have one more.

    Of n segments among m members, n % m members have one more than the others.
    """

    def __init__(self, names: Sequence[str], segments: int) -> None:
        self.floor, self.extras = divmod(segments, len(names))
        self._loads = dict.fromkeys(names, 0)

    def has_room(self, name: str) -> bool:
        load = self._loads[name]
        # Below the floor anyone has room; at it only `extras` members may have one more.
        return load < self.floor or (load == self.floor and self.extras > 0)

    def give(self, name: str) -> None:
        if self._loads[name] == self.floor:
            self.extras -= 1
        self._loads[name] += 1

    def least(self, names: Iterable[str]) -> str | None:
        """The one with the least of these, if any has room."""
        roomy = [name for name in names if self.has_room(name)]
        return min(roomy, key=lambda name: (self._loads[name], name), default=None)


def _one_owner_each(
    layout: SegmentLayout, live: Sequence[Segment], names: Sequence[str], kept: Owners
) -> dict[int, str]:
    loads = _Loads(names, len(live))
    owners: dict[int, str] = {}

    def give(segment: Segment, name: str) -> None:
        loads.give(name)
        owners[segment.segment_id] = name

    # First whoever had it, then kin, then anyone: each step takes only what balance leaves.
    _keep(live, names, kept, loads, owners)
    homeless = [segment for segment in live if segment.segment_id not in owners]
    kin = {segment.segment_id: _kin(layout, segment, kept) for segment in homeless}
    # Who has the fewest choices chooses first. Only then come those that can go anywhere: they
    # must not take a place that an owner of the parents could have given to a child.
    for segment in sorted(homeless, key=lambda each: len(kin[each.segment_id])):
        name = loads.least(kin[segment.segment_id])
        if name is not None:
            give(segment, name)
    for segment in homeless:
        if segment.segment_id not in owners:
            name = loads.least(names)
            assert name is not None, "floor and extras add up to the number of segments"
            give(segment, name)
    return owners


def _keep(
    live: Sequence[Segment],
    names: Sequence[str],
    kept: Owners,
    loads: _Loads,
    owners: dict[int, str],
) -> None:
    """Leave with each member what it had, as far as its fair share goes."""
    had: dict[str, list[int]] = {name: [] for name in names}
    for segment in live:
        if segment.segment_id in kept:
            had[kept[segment.segment_id][0]].append(segment.segment_id)
    # Whoever had the most is asked first, so that the places above the floor go to them.
    for name in sorted(names, key=lambda each: (-len(had[each]), each)):
        for segment_id in had[name]:
            if loads.has_room(name):
                loads.give(name)
                owners[segment_id] = name


def _kin(layout: SegmentLayout, segment: Segment, kept: Owners) -> tuple[str, ...]:
    """The members that shared a segment before, else the owners of its parents."""
    # Without its first owner, who did not get it again: the others who shared
    # it have it open already.
    own = kept.get(segment.segment_id, ())[1:]
    inherited = [name for parent in segment.parent_ids for name in kept.get(parent, ())]
    return own or tuple(dict.fromkeys(inherited))


# --- more members than segments


def _shared_out(
    live: Sequence[Segment], owners: Mapping[int, str], sharers: Set[str], kept: Owners
) -> dict[int, tuple[str, ...]]:
    """Let members without a segment share those that have entry buckets left."""
    busy = frozenset(owners.values())
    # Only members that would have nothing at all: who owns a segment does not also share one.
    surplus = sorted(sharers - busy)
    # Invariant 7: an owner that cannot share has the whole segment for itself.
    extra: dict[int, list[str]] = {
        segment.segment_id: [] for segment in live if owners[segment.segment_id] in sharers
    }
    # One place is the owner's; more sharers than buckets would leave some without messages.
    limits = {segment.segment_id: segment.bucket_count - 1 for segment in live}

    def roomiest() -> int | None:
        roomy = [each for each, names in extra.items() if len(names) < limits[each]]
        return min(roomy, key=lambda each: len(extra[each]), default=None)

    waiting = []
    for name in surplus:
        # Back to where they were, as long as there is room (invariant 5); the rest is dealt evenly.
        old = [each for each in extra if name in kept.get(each, ())]
        place = next((each for each in old if len(extra[each]) < limits[each]), None)
        if place is None:
            waiting.append(name)
        else:
            extra[place].append(name)
    for name in waiting:
        place = roomiest()
        if place is not None:
            extra[place].append(name)
    _level(extra, roomiest)
    return {
        segment_id: (name, *sorted(extra.get(segment_id, ())))
        for segment_id, name in owners.items()
    }


def _level(extra: dict[int, list[str]], roomiest: Callable[[], int | None]) -> None:
    """Move sharers from crowded segments until no move would make the numbers more even."""
    while (receiver := roomiest()) is not None:
        donor = max(extra, key=lambda each: len(extra[each]))
        # A move would only swap the two: even enough, and it ends here.
        if len(extra[donor]) - len(extra[receiver]) < 2:
            return
        extra[receiver].append(extra[donor].pop())
