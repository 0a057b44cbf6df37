"""The segment DAG of a scalable topic, as an immutable value (pure).

Owns: `Segment`, `SegmentLayout` and the rules by which one layout follows from another. A change
returns a new layout; storing it, and doing what it means to topics, is the controller's work.

Invariants (`check_invariants`):
1. The ranges of the ACTIVE segments tile the ring 0..65535 exactly.
2. Every change raises the epoch by one; segment ids are given once and never again.
3. Parent and child lists mirror each other, and a parent's id is below its children's, so the
   graph has no cycle. A child's range overlaps each parent's.
4. A SEALED segment has children: only whole oldest generations are pruned, so the order "parents
   before children" stays known for every segment that still holds messages.
5. Entry buckets of a segment are fixed for its life.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from magnetar.errors import InvalidLayout, InvariantBroken
from magnetar.model.hashing import FULL_RING, HASH_MAX, RING_SIZE, HashRange, segment_hash
from magnetar.model.names import SegmentDescriptor

NEVER: Final = -1
"""When a segment that is still active was sealed."""


class SegmentState(Enum):
    ACTIVE = "ACTIVE"
    """Takes messages."""
    SEALED = "SEALED"
    """Takes no more messages; its children do."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of the ring for one period of the topic's life."""

    segment_id: int
    hash_range: HashRange
    state: SegmentState = SegmentState.ACTIVE
    parent_ids: tuple[int, ...] = ()
    child_ids: tuple[int, ...] = ()
    created_at_epoch: int = 0
    sealed_at_epoch: int = NEVER
    created_at_ms: int = 0
    sealed_at_ms: int = NEVER
    legacy_topic_name: str | None = None
    """The regular topic that holds its messages, if it was migrated from one."""
    entry_bucket_splits: tuple[int, ...] = ()
    """Where the second and each later entry bucket begins."""

    @property
    def is_active(self) -> bool:
        return self.state is SegmentState.ACTIVE

    @property
    def descriptor(self) -> SegmentDescriptor:
        return SegmentDescriptor(self.hash_range, self.segment_id)

    @property
    def bucket_count(self) -> int:
        return len(self.entry_bucket_splits) + 1

    def bucket_of(self, position: int) -> int:
        """The entry bucket of a bucket hash (the low half of a key's hash)."""
        return bisect_right(self.entry_bucket_splits, position)


def bucket_splits(buckets: int) -> tuple[int, ...]:
    """The boundaries of this many equal entry buckets."""
    if not 1 <= buckets <= RING_SIZE:
        raise InvalidLayout(f"{buckets} entry buckets; there may be 1 to {RING_SIZE}")
    return tuple(index * RING_SIZE // buckets for index in range(1, buckets))


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """All segments of a scalable topic at one epoch."""

    epoch: int
    next_segment_id: int
    segments: Mapping[int, Segment]
    """By id, ascending."""
    active: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    """The active segments in ring order."""

    def __post_init__(self) -> None:
        # Sorted once, here: `route` searches `active` for every key that is sent.
        ordered = dict(sorted(self.segments.items()))
        active = sorted(filter(_is_active, ordered.values()), key=_range_start)
        object.__setattr__(self, "segments", MappingProxyType(ordered))
        object.__setattr__(self, "active", tuple(active))

    # --- changes: each returns the next layout

    @classmethod
    def create(cls, count: int, *, now_ms: int, bucket_budget: int = 1) -> SegmentLayout:
        """A new topic of `count` segments that share `bucket_budget` entry buckets."""
        if not 1 <= count <= RING_SIZE:
            raise InvalidLayout(f"{count} segments; there may be 1 to {RING_SIZE}")
        width = RING_SIZE // count
        # The budget is the topic's: many segments have few buckets each, but never none.
        splits = bucket_splits(max(1, bucket_budget // count))
        segments = {}
        for index in range(count):
            # The last one also takes what the division left over: invariant 1 allows no gap.
            end = HASH_MAX if index == count - 1 else (index + 1) * width - 1
            segments[index] = Segment(
                index,
                HashRange(index * width, end),
                created_at_ms=now_ms,
                entry_bucket_splits=splits,
            )
        return cls(0, count, segments)

    @classmethod
    def of_regular(cls, topics: Sequence[str]) -> SegmentLayout:
        """A regular topic (its partitions) as v5 clients see it: each partition a segment."""
        # The ranges only make it a legal layout: clients choose among
        # partitions by the hash modulo their number, as v4 does.
        plain = cls.create(len(topics), now_ms=0)
        segments = {
            number: Segment(number, plain.segments[number].hash_range, legacy_topic_name=name)
            for number, name in enumerate(topics)
        }
        return cls(0, len(topics), segments)

    def split(self, segment_id: int, *, now_ms: int, after: int | None = None) -> SegmentLayout:
        """Replace an active segment by two; `after` is the last position of the lower one."""
        parent = self._active(segment_id)
        point = parent.hash_range.midpoint if after is None else after
        ranges = parent.hash_range.split(point)
        # Half of the buckets each, so that a topic does not gain buckets by splitting.
        return self._succeed((parent,), ranges, max(1, parent.bucket_count // 2), now_ms)

    def merge(self, segment_ids: Iterable[int], *, now_ms: int) -> SegmentLayout:
        """Replace two or more adjacent active segments by one."""
        wanted = set(segment_ids)
        if len(wanted) < 2:
            raise InvalidLayout("a merge takes at least two different segments")
        # Neighbours only: a segment has one range, and two with a gap between them are none.
        parents = tuple(sorted(map(self._active, wanted), key=_range_start))
        for lower, upper in pairwise(parents):
            if not lower.hash_range.is_before(upper.hash_range):
                raise InvalidLayout(
                    f"segments {lower.descriptor} and {upper.descriptor} are not adjacent",
                    hint="merge segments whose ranges follow each other without a gap",
                )
        union = HashRange(parents[0].hash_range.start, parents[-1].hash_range.end)
        buckets = min(RING_SIZE, sum(parent.bucket_count for parent in parents))
        return self._succeed(parents, (union,), buckets, now_ms)

    def prune(self, segment_ids: Iterable[int]) -> SegmentLayout:
        """Forget sealed segments, together with or after all their parents."""
        gone = set(segment_ids)
        if not gone:
            raise InvalidLayout("a prune takes at least one segment")
        for segment_id in sorted(gone):
            segment = self.segment(segment_id)
            if segment.is_active:
                raise InvalidLayout(f"segment {segment.descriptor} is active and cannot be pruned")
            # Invariant 4: were the parent kept, nothing would say any more that it is read first.
            if not gone.issuperset(segment.parent_ids):
                kept = min(set(segment.parent_ids) - gone)
                raise InvalidLayout(
                    f"segment {segment.descriptor} cannot be pruned before its parent {kept}",
                    hint="prune the oldest segments first",
                )
        left = {}
        for segment_id, segment in self.segments.items():
            if segment_id not in gone:
                # Those whose parents are forgotten become the oldest generation.
                parents = tuple(each for each in segment.parent_ids if each not in gone)
                left[segment_id] = replace(segment, parent_ids=parents)
        return SegmentLayout(self.epoch + 1, self.next_segment_id, left)

    def _succeed(
        self, parents: tuple[Segment, ...], ranges: Iterable[HashRange], buckets: int, now_ms: int
    ) -> SegmentLayout:
        """Seal the parents and put a child on each of the ranges, which together are theirs."""
        # One epoch for the whole change: the parents end in it
        # and the children begin (invariant 2).
        epoch = self.epoch + 1
        parent_ids = tuple(parent.segment_id for parent in parents)
        children = {
            segment_id: Segment(
                segment_id,
                hash_range,
                parent_ids=parent_ids,
                created_at_epoch=epoch,
                created_at_ms=now_ms,
                entry_bucket_splits=bucket_splits(buckets),
            )
            # Ids go on from the counter, never from the largest that
            # exists: that one may be pruned.
            for segment_id, hash_range in enumerate(ranges, self.next_segment_id)
        }
        sealed = {
            parent.segment_id: replace(
                parent,
                state=SegmentState.SEALED,
                child_ids=tuple(children),
                sealed_at_epoch=epoch,
                sealed_at_ms=now_ms,
            )
            for parent in parents
        }
        # `sealed` comes behind the old values, which it replaces.
        segments = {**self.segments, **sealed, **children}
        return SegmentLayout(epoch, self.next_segment_id + len(children), segments)

    # --- questions

    def segment(self, segment_id: int) -> Segment:
        """A segment that exists (pruned ones do not)."""
        found = self.segments.get(segment_id)
        if found is None:
            raise InvalidLayout(f"there is no segment {segment_id}")
        return found

    def route(self, hash32: int) -> Segment:
        """The active segment that takes keys of this hash."""
        position = segment_hash(hash32)
        # By invariant 1 the last range that begins at or below the position holds it.
        index = bisect_right(self.active, position, key=_range_start) - 1
        if index < 0 or position not in self.active[index].hash_range:
            raise InvariantBroken(f"no active segment holds {position:04x} at epoch {self.epoch}")
        return self.active[index]

    def parents(self, segment_id: int) -> list[Segment]:
        return [self.segment(each) for each in self.segment(segment_id).parent_ids]

    def children(self, segment_id: int) -> list[Segment]:
        return [self.segment(each) for each in self.segment(segment_id).child_ids]

    def ancestors(self, segment_id: int) -> list[Segment]:
        """Every segment that must be read before this one, oldest first."""
        found: dict[int, Segment] = {}
        waiting = list(self.segment(segment_id).parent_ids)
        while waiting:
            each = waiting.pop()
            # A DAG, not a tree: behind a merge several ways lead to one ancestor.
            if each not in found:
                found[each] = self.segment(each)
                waiting.extend(found[each].parent_ids)
        # Invariant 3: ids grow from parents to children, so their order is "oldest first".
        return [found[each] for each in sorted(found)]

    def merge_depth(self, segment_id: int) -> int:
        """How many merges lead to this segment, its own included."""
        lineage = [*self.ancestors(segment_id), self.segment(segment_id)]
        return sum(len(segment.parent_ids) >= 2 for segment in lineage)

    def _active(self, segment_id: int) -> Segment:
        segment = self.segment(segment_id)
        if not segment.is_active:
            raise InvalidLayout(
                f"segment {segment.descriptor} is sealed", hint="choose one of its active children"
            )
        return segment

    # --- invariants

    def check_invariants(self) -> None:
        """Raise `InvariantBroken` if this is not a layout that the rules can lead to."""
        self._check_tiling()
        self._check_relatives()
        for segment_id, segment in self.segments.items():
            _check(segment.segment_id == segment_id, f"segment {segment_id} is filed wrongly")
            _check(0 <= segment_id < self.next_segment_id, f"segment id {segment_id} is not given")
            self._check_epochs(segment)
            bounds = (0, *segment.entry_bucket_splits, RING_SIZE)
            growing = all(lower < upper for lower, upper in pairwise(bounds))
            _check(growing, f"segment {segment_id} has an empty entry bucket")

    def _check_tiling(self) -> None:
        ranges = [segment.hash_range for segment in self.active]
        _check(bool(ranges), "no segment is active")
        _check(ranges[0].start == FULL_RING.start, "the ring's start is not covered")
        _check(ranges[-1].end == FULL_RING.end, "the ring's end is not covered")
        for lower, upper in pairwise(ranges):
            _check(lower.is_before(upper), f"active ranges {lower} and {upper} do not fit")

    def _check_epochs(self, segment: Segment) -> None:
        name = f"segment {segment.segment_id}"
        _check(0 <= segment.created_at_epoch <= self.epoch, f"{name} is from a later epoch")
        if segment.is_active:
            never = segment.sealed_at_epoch == NEVER and segment.sealed_at_ms == NEVER
            _check(never and not segment.child_ids, f"{name} is active, yet sealed or a parent")
        else:
            in_life = segment.created_at_epoch <= segment.sealed_at_epoch <= self.epoch
            _check(in_life and bool(segment.child_ids), f"{name} was sealed outside its life")

    def _check_relatives(self) -> None:
        """Check invariant 3, by sets: a migrated partition is a parent of each first segment."""
        # Segments with the same parents are counted together: n partitions with n
        # segments behind them are n * n pairs, which sets take n at a time.
        siblings: dict[tuple[int, ...], list[int]] = {}
        for segment in self.segments.values():
            siblings.setdefault(segment.parent_ids, []).append(segment.segment_id)
        children: dict[int, set[int]] = {}
        for parent_ids, segment_ids in siblings.items():
            for parent_id in parent_ids:
                children.setdefault(parent_id, set()).update(segment_ids)
        for segment_id, segment in self.segments.items():
            name = f"segment {segment_id} and its children"
            found = children.pop(segment_id, set())
            mirrored = found == set(segment.child_ids) and segment_id < min(
                found, default=self.next_segment_id
            )
            _check(mirrored, f"{name} are not kin both ways")
            # The whole ring overlaps all: a partition that was migrated, or a topic's only segment.
            if segment.hash_range != FULL_RING:
                ranges = (self.segments[each].hash_range for each in found)
                overlapping = all(map(segment.hash_range.overlaps, ranges))
                _check(overlapping, f"{name} are kin without a common range")
        _check(not children, f"segments {sorted(children)} are parents, yet unknown")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantBroken(otherwise)


def _is_active(segment: Segment) -> bool:
    return segment.is_active


def _range_start(segment: Segment) -> int:
    return segment.hash_range.start
