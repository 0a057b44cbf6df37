"""The rules of auto-scaling: whether to split or merge, and where a segment is split (pure).

Owns: `AutoScalePolicy` and how it follows from broker, namespace and topic; `decide`; the choice of
a split point; and which measured load is worth a report.

Invariants:
1. One decision at a time, a split before a merge; it follows from its arguments alone, so a new
   leader decides as the old one would: cool-downs count from what the records say.
2. What would have to be split again soon is not merged: merged segments together stay below every
   merge threshold, which is below the split threshold; no consumer of a group loses its segment;
   and a segment that is younger, or whose load moved, within the merge window stays as it is.
3. A segment whose load is nearly all of one key is not split: it would not help, and never end.
4. A policy that contradicts itself is off, and says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from magnetar.errors import NotAllowed
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import AutoScaleOverride, LoadRecord

# A hot key stays whole in either part: such a split would be followed by another, and another.
ONE_SIDED: Final = 0.9
"""A split that leaves this share of the load on one side does not help."""

SAMPLES_MIN: Final = 32
"""Fewer say nothing about where the load is: such a segment is split in the middle."""

NOISE: Final = 0.1
"""Below this share of the merge thresholds, a load that moves is still the same load."""

_MS: Final = 1000


class Rates(NamedTuple):
    """The load of one or more segments, or thresholds of it; per second."""

    msg_in: float = 0.0
    bytes_in: float = 0.0
    msg_out: float = 0.0
    bytes_out: float = 0.0

    @classmethod
    def of(cls, load: LoadRecord) -> Rates:
        return cls(load.msg_rate_in, load.bytes_rate_in, load.msg_rate_out, load.bytes_rate_out)

    def plus(self, other: Rates) -> Rates:
        return Rates(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def per(self, thresholds: Rates) -> Rates:
        """Express rates as shares of thresholds."""
        return Rates(*(rate / least for rate, least in zip(self, thresholds, strict=True)))


# --- the policy


class AutoScalePolicy(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The policy that holds for one topic; the fields are those of `AutoScaleOverride`."""

    enabled: bool
    reason: str = ""
    """Why it is off although it was to be on."""
    max_segments: int
    min_segments: int
    max_dag_depth: int
    split_cooldown_seconds: float
    merge_cooldown_seconds: float
    merge_window_seconds: float
    split_msg_rate_in_threshold: float
    split_bytes_rate_in_threshold: float
    split_msg_rate_out_threshold: float
    split_bytes_rate_out_threshold: float
    merge_msg_rate_in_threshold: float
    merge_bytes_rate_in_threshold: float
    merge_msg_rate_out_threshold: float
    merge_bytes_rate_out_threshold: float
    total_segments_max: int
    """Sealed ones included; no override changes it."""

    @property
    def split_rates(self) -> Rates:
        return Rates(
            self.split_msg_rate_in_threshold,
            self.split_bytes_rate_in_threshold,
            self.split_msg_rate_out_threshold,
            self.split_bytes_rate_out_threshold,
        )

    @property
    def merge_rates(self) -> Rates:
        return Rates(
            self.merge_msg_rate_in_threshold,
            self.merge_bytes_rate_in_threshold,
            self.merge_msg_rate_out_threshold,
            self.merge_bytes_rate_out_threshold,
        )


def broker_policy(limits: Limits, *, enabled: bool = True) -> AutoScalePolicy:
    """What holds where neither namespace nor topic say anything."""
    return AutoScalePolicy(
        enabled=enabled,
        max_segments=limits.scalable_max_segments,
        min_segments=limits.scalable_min_segments,
        max_dag_depth=limits.scalable_max_dag_depth,
        split_cooldown_seconds=limits.scalable_split_cooldown_seconds,
        merge_cooldown_seconds=limits.scalable_merge_cooldown_seconds,
        merge_window_seconds=limits.scalable_merge_window_seconds,
        split_msg_rate_in_threshold=limits.scalable_split_msg_rate_in,
        split_bytes_rate_in_threshold=limits.scalable_split_bytes_rate_in,
        split_msg_rate_out_threshold=limits.scalable_split_msg_rate_out,
        split_bytes_rate_out_threshold=limits.scalable_split_bytes_rate_out,
        merge_msg_rate_in_threshold=limits.scalable_merge_msg_rate_in,
        merge_bytes_rate_in_threshold=limits.scalable_merge_bytes_rate_in,
        merge_msg_rate_out_threshold=limits.scalable_merge_msg_rate_out,
        merge_bytes_rate_out_threshold=limits.scalable_merge_bytes_rate_out,
        total_segments_max=limits.scalable_total_segments_max,
    )


def resolve(
    limits: Limits,
    namespace: AutoScaleOverride | None,
    topic: AutoScaleOverride | None,
    *,
    enabled: bool = True,
) -> AutoScalePolicy:
    """The policy of a topic, field by field: its own, its namespace's, the broker's."""
    broker = broker_policy(limits, enabled=enabled)
    # The narrower one wins, field by field: later parts of the union replace earlier ones.
    values = {name: getattr(broker, name) for name in _FIELDS} | _given(namespace) | _given(topic)
    problem = next(_problems(values), None)
    # Each part may be sound and their sum is not, so it is judged again here; a contradiction turns
    # scaling off instead of failing the controller.
    if problem is not None and values["enabled"]:
        values |= {"enabled": False, "reason": problem}
    return msgspec.structs.replace(broker, **values)


def read_override(given: Mapping[str, object]) -> AutoScaleOverride:
    """What the admin interface or a namespace's policies say; NotAllowed if it is no override."""
    # A misspelt name would silently change nothing.
    unknown = sorted(given.keys() - _JSON_NAMES)
    if unknown:
        raise NotAllowed(f"the auto-scale policy has no {unknown[0]!r}")
    try:
        return msgspec.convert(given, AutoScaleOverride)
    except msgspec.ValidationError as error:
        raise NotAllowed(f"the auto-scale policy cannot be read: {error}") from error


def check_override(override: AutoScaleOverride) -> None:
    """NotAllowed if an override contradicts itself, whatever it is put upon."""
    problem = next(_problems(_given(override)), None)
    if problem is not None:
        raise NotAllowed(f"auto-scale policy: {problem}")


_FIELDS: Final = AutoScaleOverride.__struct_fields__
_JSON_NAMES: Final = frozenset(AutoScaleOverride.__struct_encode_fields__)
_METRICS: Final = ("msg_rate_in", "bytes_rate_in", "msg_rate_out", "bytes_rate_out")


def _given(override: AutoScaleOverride | None) -> dict[str, float | str]:
    if override is None:
        return {}
    values = {name: getattr(override, name) for name in _FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _problems(values: Mapping[str, float | str]) -> Iterator[str]:
    """What is wrong with a policy or with a part of one."""
    numbers = {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for name, value in numbers.items():
        # Also not-a-number, with which every comparison below would be false.
        if value <= 0 or not isfinite(value):
            yield f"{name} is {value}, not above 0"
    # An override need not give both: what is missing contradicts nothing.
    if numbers.get("min_segments", 0) > numbers.get("max_segments", float("inf")):
        yield f"min_segments {numbers['min_segments']} is above max_segments"
    for metric in _METRICS:
        split, merge = f"split_{metric}_threshold", f"merge_{metric}_threshold"
        if numbers.get(split, float("inf")) <= numbers.get(merge, 0.0):
            yield f"{split} {numbers[split]} is not above {merge} {numbers[merge]}"


# --- decisions


class Sample(NamedTuple):
    """Messages of one key that were published lately."""

    position: int
    """On the ring of segments."""
    messages: float = 1.0
    size_bytes: float = 0.0


class Split(NamedTuple):
    """Make two of a segment."""

    segment_id: int
    cause: Literal["load", "consumers"]
    after: int | None = None
    """The last position of the lower part; None: the middle."""


class Merge(NamedTuple):
    """Make one of adjacent segments, in ring order."""

    segment_ids: tuple[int, ...]


Decision: TypeAlias = Split | Merge | None


def decide(
    layout: SegmentLayout,
    loads: Mapping[int, LoadRecord],
    consumers_per_group: Iterable[int],
    policy: AutoScalePolicy,
    now_ms: int,
    *,
    last_split_ms: int,
    last_merge_ms: int,
    key_loads: Mapping[int, Sequence[Sample]] = MappingProxyType({}),
) -> Decision:
    """What to do next, if anything.

    `key_loads` need not hold every segment: if the answer is a split of a segment that it does not
    hold, take the samples of that one and decide again; without them it is split in the middle.
    """
    if not policy.enabled:
        return None
    wanted = max(consumers_per_group, default=0)
    # From the record or from the segments themselves, whichever is later: a new leader waits until
    # the same time (invariant 1).
    split_at = max(last_split_ms, _last_created(layout, by_split=True))
    # Splits first: too much load hurts now, too many segments only cost a little.
    if _is_over(now_ms, split_at, policy.split_cooldown_seconds):
        found = _split(layout, loads, wanted, policy, key_loads)
        if found is not None:
            return found
    merge_at = max(last_merge_ms, _last_created(layout, by_split=False))
    if _is_over(now_ms, merge_at, policy.merge_cooldown_seconds):
        return _merge(layout, loads, wanted, policy, now_ms)
    return None


def suppressed(
    layout: SegmentLayout,
    loads: Mapping[int, LoadRecord],
    consumers_per_group: Iterable[int],
    policy: AutoScalePolicy,
    now_ms: int,
) -> list[str]:
    """Which limits of the policy forbid what load or consumers ask for now; for metrics."""
    if not policy.enabled:
        return []
    found = []
    active = layout.active
    # What would be done without that limit, and is not: one count for each limit.
    overloaded = any(max(_rates(loads, each).per(policy.split_rates)) > 1 for each in active)
    wanted = max(consumers_per_group, default=0) > len(active)
    if (overloaded or wanted) and len(active) >= policy.max_segments:
        found.append("max_segments")
    deeper = msgspec.structs.replace(policy, max_dag_depth=len(layout.segments) + 1)
    cold = [_is_cold(layout, each, loads, policy, now_ms) for each in active]
    colder = [_is_cold(layout, each, loads, deeper, now_ms) for each in active]
    pairs = zip(pairwise(cold), pairwise(colder), strict=True)
    if any(all(without) and not all(with_it) for with_it, without in pairs):
        found.append("max_depth")
    return found


def _split(
    layout: SegmentLayout,
    loads: Mapping[int, LoadRecord],
    wanted: int,
    policy: AutoScalePolicy,
    key_loads: Mapping[int, Sequence[Sample]],
) -> Split | None:
    active = layout.active
    # Two limits: of active segments, which the policy sets, and of all in the record,
    # which a split makes two more.
    if len(active) >= policy.max_segments:
        return None
    if len(layout.segments) + 2 > policy.total_segments_max:
        return None
    rates = {each.segment_id: _rates(loads, each) for each in active}
    cause: Literal["load", "consumers"] = "consumers"
    # A consumer without a segment is idle whatever the load: then the busiest one is split, though
    # it may be far from its threshold.
    if wanted > len(active):
        rank = {number: each.msg_in for number, each in rates.items()}
    else:
        cause = "load"
        shares = {number: max(each.per(policy.split_rates)) for number, each in rates.items()}
        rank = {number: share for number, share in shares.items() if share > 1}
    # The next one, if no point in this one would help (invariant 3).
    for number in sorted(rank, key=lambda each: (-rank[each], each)):
        segment = layout.segment(number)
        samples = key_loads.get(number, ())
        # Halved by what made it hot: few large messages and many small ones lie differently.
        by_bytes = cause == "load" and _is_by_bytes(rates[number].per(policy.split_rates))
        after = split_point(segment, samples, by_bytes=by_bytes)
        if after is not None:
            return Split(number, cause, after if samples else None)
    return None


def split_point(
    segment: Segment, samples: Sequence[Sample], *, by_bytes: bool = False
) -> int | None:
    """The last position of the lower part, so that both parts get about the same load.

    None: no point would help, because one position has nearly all of the load.
    """
    whole = segment.hash_range
    if whole.size == 1:
        return None
    inside = [sample for sample in samples if sample.position in whole]
    # No samples yet (the caller takes them, and asks again) or too few to tell.
    if len(inside) < SAMPLES_MIN:
        return whole.midpoint
    weights: dict[int, float] = {}
    for sample in inside:
        weight = sample.size_bytes if by_bytes else sample.messages
        weights[sample.position] = weights.get(sample.position, 0.0) + weight
    total = sum(weights.values())
    if total <= 0:
        return whole.midpoint
    lower = 0.0
    best: tuple[float, int, int] | None = None
    for position, following in pairwise(sorted(weights)):
        lower += weights[position]
        # Every point up to the next key divides the load alike: the one that divides the range
        # best is as good as can be for the keys that are not among the samples.
        after = min(max(whole.midpoint, position), following - 1)
        found = max(lower, total - lower), abs(after - whole.midpoint), after
        best = found if best is None else min(best, found)
    if best is None or best[0] >= ONE_SIDED * total:
        return None
    return best[2]


def _merge(
    layout: SegmentLayout,
    loads: Mapping[int, LoadRecord],
    wanted: int,
    policy: AutoScalePolicy,
    now_ms: int,
) -> Merge | None:
    """The longest run of cold segments, of those the one with the least load."""
    active = layout.active
    # A consumer without a segment would have one of them split again.
    least = max(policy.min_segments, min(wanted, policy.max_segments))
    longest = len(active) - least + 1
    if longest < 2 or len(layout.segments) >= policy.total_segments_max:
        return None
    cold = [_is_cold(layout, each, loads, policy, now_ms) for each in active]
    best: tuple[int, float, int] | None = None
    for first in range(len(active)):
        total = Rates()
        for last in range(first, min(first + longest, len(active))):
            total = total.plus(_rates(loads, active[last]))
            shares = total.per(policy.merge_rates)
            # A run ends at the first segment that is not cold, or with which all
            # of them would be too hot.
            if not cold[last] or max(shares) >= 1:
                break
            if last > first:
                # Longest first, as a negative number, then the least load, then the
                # lowest place: `min` takes it.
                found = first - last, sum(shares), first
                best = found if best is None else min(best, found)
    if best is None:
        return None
    run = active[best[2] : best[2] - best[0] + 1]
    return Merge(tuple(segment.segment_id for segment in run))


def _is_cold(
    layout: SegmentLayout,
    segment: Segment,
    loads: Mapping[int, LoadRecord],
    policy: AutoScalePolicy,
    now_ms: int,
) -> bool:
    """Whether a segment may be merged, if it fits with its neighbours."""
    load = loads.get(segment.segment_id)
    window = policy.merge_window_seconds
    return (
        # Without a report nobody knows: a segment whose broker is away is not cold, it is unknown.
        load is not None
        and _is_over(now_ms, load.since_ms, window)
        and _is_over(now_ms, segment.created_at_ms, window)
        # Merges and splits of one range in turn would make the DAG deeper each time.
        and layout.merge_depth(segment.segment_id) < policy.max_dag_depth
    )


def _rates(loads: Mapping[int, LoadRecord], segment: Segment) -> Rates:
    load = loads.get(segment.segment_id)
    return Rates() if load is None else Rates.of(load)


def _is_by_bytes(shares: Rates) -> bool:
    return max(shares.bytes_in, shares.bytes_out) > max(shares.msg_in, shares.msg_out)


def _last_created(layout: SegmentLayout, *, by_split: bool) -> int:
    """When the last segment was made that has one parent (by a split), or more (by a merge)."""
    made = (
        each.created_at_ms
        for each in layout.segments.values()
        # A migrated topic's segments, with several partitions as parents, count as made by a merge.
        if each.parent_ids and (len(each.parent_ids) == 1) == by_split
    )
    return max(made, default=0)


def _is_over(now_ms: int, since_ms: int, seconds: float) -> bool:
    # A moment that is still to come was noted by another clock: it must not block for ever.
    return abs(now_ms - since_ms) >= seconds * _MS


# --- reports


def next_report(
    before: LoadRecord | None,
    segment_id: int,
    rates: Rates,
    now_ms: int,
    *,
    change_percent: int,
    noise: Rates,
) -> LoadRecord | None:
    """The record to write for a measured load; None: the last one still says it.

    A load that stays below `noise` is reported like any other, but counts as unmoved: else a
    segment with a message now and then would never be cold for long.
    """
    # The first report of a segment: its windows begin now.
    if before is None:
        return LoadRecord(segment_id, *rates, since_ms=now_ms)
    moved = [
        max(old, new) > least
        for old, new, least in zip(Rates.of(before), rates, noise, strict=True)
        if _moved(old, new, change_percent)
    ]
    if not moved:
        return None
    # The time moves only with a load that matters: the merge window counts from it.
    return LoadRecord(segment_id, *rates, since_ms=now_ms if any(moved) else before.since_ms)


def noise_of(limits: Limits) -> Rates:
    """The loads that are next to nothing on a broker."""
    return Rates(*(NOISE * rate for rate in broker_policy(limits).merge_rates))


def _moved(old: float, new: float, change_percent: int) -> bool:
    # From or to nothing is always a move: no percentage tells it.
    return (old == 0) != (new == 0) or abs(new - old) * 100 > change_percent * old
