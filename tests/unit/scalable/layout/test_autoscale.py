"""Auto-scale: the policy that holds, what is split or merged, and where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import NotAllowed
from magnetar.model.hashing import HASH_MAX, HashRange
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.autoscale import (
    ONE_SIDED,
    SAMPLES_MIN,
    AutoScalePolicy,
    Decision,
    Merge,
    Rates,
    Sample,
    Split,
    broker_policy,
    check_override,
    decide,
    next_report,
    noise_of,
    read_override,
    resolve,
    split_point,
    suppressed,
)
from magnetar.scalable.records import AutoScaleOverride, LoadRecord

BEGIN = 1_700_000_000_000
LATER = BEGIN + 3_600_000
DEFAULTS = broker_policy(Limits())
WHOLE = Segment(0, HashRange(0, HASH_MAX))


def policy(**changes: object) -> AutoScalePolicy:
    return msgspec.structs.replace(DEFAULTS, **changes)


def load(segment_id: int, msg_in: float = 0.0, *, since: int = BEGIN, **rates: float) -> LoadRecord:
    return LoadRecord(segment_id, msg_in, since_ms=since, **rates)


def loads(*rates_in: float, since: int = BEGIN) -> dict[int, LoadRecord]:
    return {number: load(number, rate, since=since) for number, rate in enumerate(rates_in)}


def decided(
    layout: SegmentLayout,
    measured: Mapping[int, LoadRecord],
    *,
    consumers: Iterable[int] = (),
    under: AutoScalePolicy = DEFAULTS,
    now: int = LATER,
    last_split: int = NEVER,
    last_merge: int = NEVER,
    keys: Mapping[int, Sequence[Sample]] | None = None,
) -> Decision:
    return decide(
        layout,
        measured,
        consumers,
        under,
        now,
        last_split_ms=last_split,
        last_merge_ms=last_merge,
        key_loads=keys or {},
    )


def layout_of(count: int, *, at: int = BEGIN) -> SegmentLayout:
    return SegmentLayout.create(count, now_ms=at)


# --- the policy


def test_defaults_are_those_of_pulsar() -> None:
    assert DEFAULTS.enabled
    assert (DEFAULTS.min_segments, DEFAULTS.max_segments, DEFAULTS.max_dag_depth) == (1, 64, 10)
    cooldowns = DEFAULTS.split_cooldown_seconds, DEFAULTS.merge_cooldown_seconds
    assert (*cooldowns, DEFAULTS.merge_window_seconds) == (60, 300, 300)
    assert DEFAULTS.split_rates == Rates(10_000, 50_000_000, 50_000, 250_000_000)
    assert DEFAULTS.merge_rates == Rates(1000, 5_000_000, 5000, 25_000_000)


def test_policies_are_resolved_field_by_field() -> None:
    namespace = AutoScaleOverride(max_segments=8, min_segments=2)
    topic = AutoScaleOverride(max_segments=4, split_msg_rate_in_threshold=5000.0)
    found = resolve(Limits(), namespace, topic)
    assert (found.max_segments, found.min_segments, found.max_dag_depth) == (4, 2, 10)
    assert found.split_rates.msg_in == 5000
    assert resolve(Limits(), None, None) == DEFAULTS
    on, off = AutoScaleOverride(enabled=True), AutoScaleOverride(enabled=False)
    assert resolve(Limits(), on, None, enabled=False).enabled
    assert not resolve(Limits(), None, None, enabled=False).enabled
    assert not resolve(Limits(), on, off).enabled


@pytest.mark.parametrize(
    ("namespace", "topic", "reason"),
    [
        (AutoScaleOverride(max_segments=4), AutoScaleOverride(min_segments=5), "min_segments 5"),
        (None, AutoScaleOverride(split_msg_rate_in_threshold=1000.0), "not above merge_msg"),
        (AutoScaleOverride(merge_bytes_rate_out_threshold=1e9), None, "split_bytes_rate_out"),
        (None, AutoScaleOverride(merge_window_seconds=0), "merge_window_seconds is 0"),
        (None, AutoScaleOverride(split_msg_rate_out_threshold=float("nan")), "not above 0"),
    ],
)
def test_an_invalid_override_combination_falls_back_to_disabled(
    namespace: AutoScaleOverride | None, topic: AutoScaleOverride | None, reason: str
) -> None:
    found = resolve(Limits(), namespace, topic)
    assert not found.enabled
    assert reason in found.reason
    assert decided(layout_of(1), loads(1e9), under=found) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (AutoScaleOverride(max_segments=0), "max_segments is 0, not above 0"),
        (AutoScaleOverride(split_cooldown_seconds=-1), "not above 0"),
        (AutoScaleOverride(min_segments=3, max_segments=2), "min_segments 3 is above"),
        (
            AutoScaleOverride(split_bytes_rate_in_threshold=5.0, merge_bytes_rate_in_threshold=5.0),
            "split_bytes_rate_in_threshold 5.0 is not above",
        ),
    ],
)
def test_an_override_that_contradicts_itself_is_refused(
    override: AutoScaleOverride, message: str
) -> None:
    with pytest.raises(NotAllowed, match=message):
        check_override(override)


def test_an_override_says_only_what_it_sets() -> None:
    check_override(AutoScaleOverride())
    # Right or wrong only together with what it is put upon.
    check_override(AutoScaleOverride(split_msg_rate_in_threshold=1.0))
    assert read_override({"maxSegments": 3, "enabled": None}) == AutoScaleOverride(max_segments=3)
    with pytest.raises(NotAllowed, match="no 'maxSegmnts'"):
        read_override({"maxSegmnts": 3})
    with pytest.raises(NotAllowed, match="cannot be read"):
        read_override({"maxSegments": "three"})


# --- splits


def test_nothing_is_done_if_it_is_off() -> None:
    assert decided(layout_of(1), loads(1e9), under=policy(enabled=False)) is None


def test_consumer_count_uses_the_largest_group_not_the_sum() -> None:
    assert decided(layout_of(3), loads(5, 5, 5), consumers=[2, 2, 3]) is None
    assert decided(layout_of(3), loads(5, 5, 5), consumers=[2, 4]) == Split(0, "consumers")


def test_a_consumer_driven_split_targets_the_busiest_segment() -> None:
    assert decided(layout_of(3), loads(10, 30, 20), consumers=[4]) == Split(1, "consumers")
    assert decided(layout_of(3), loads(30, 10, 30), consumers=[4]) == Split(0, "consumers")
    assert decided(layout_of(3), {}, consumers=[4]) == Split(0, "consumers")


def test_a_load_driven_split_picks_the_most_overloaded() -> None:
    assert decided(layout_of(3), loads(11_000, 30_000, 12_000)) == Split(1, "load")
    by_bytes = loads(11_000, 0) | {1: load(1, bytes_rate_out=1e9)}
    assert decided(layout_of(2), by_bytes) == Split(1, "load")
    assert decided(layout_of(2), loads(10_000, 10_000)) is None  # at the threshold, not above


def test_there_are_at_most_max_segments() -> None:
    assert decided(layout_of(4), loads(*[20_000] * 4), under=policy(max_segments=4)) is None
    assert decided(layout_of(4), {}, consumers=[9], under=policy(max_segments=4)) is None


def test_sealed_segments_that_are_kept_count_in_the_total() -> None:
    grown = layout_of(2).split(0, now_ms=BEGIN)
    hot = {1: load(1, 20_000)}
    assert decided(grown, hot, under=policy(total_segments_max=6)) == Split(1, "load")
    assert decided(grown, hot, under=policy(total_segments_max=5)) is None
    cold = {1: load(1), 2: load(2), 3: load(3)}
    assert isinstance(decided(grown, cold, under=policy(total_segments_max=5)), Merge)
    assert decided(grown, cold, under=policy(total_segments_max=4)) is None


def test_a_split_takes_priority_over_a_merge() -> None:
    assert decided(layout_of(3), loads(0, 0, 20_000)) == Split(2, "load")
    assert decided(layout_of(3), loads(0, 0, 0)) == Merge((0, 1, 2))


@pytest.mark.parametrize("noted", [True, False])
def test_the_split_cooldown_survives_a_change_of_leader(noted: bool) -> None:
    """From the topic's record, or from the times of the segments alone."""
    grown = layout_of(1).split(0, now_ms=LATER)
    last = LATER if noted else NEVER
    hot = {1: load(1, 20_000), 2: load(2, 20_000)}
    assert decided(grown, hot, now=LATER + 59_999, last_split=last) is None
    assert decided(grown, hot, now=LATER + 60_000, last_split=last) == Split(1, "load")


def test_a_time_far_ahead_does_not_block() -> None:
    assert decided(layout_of(1), loads(20_000), last_split=LATER + 30_000) is None
    assert decided(layout_of(1), loads(20_000), last_split=LATER + 86_400_000) is not None


# --- where to split


def spread(count: int, start: int = 0, end: int = HASH_MAX) -> list[Sample]:
    step = (end - start) / count
    return [Sample(start + int(step * number)) for number in range(count)]


def test_without_samples_a_segment_is_split_in_the_middle() -> None:
    assert split_point(WHOLE, []) == 0x7FFF
    assert split_point(WHOLE, [Sample(5)] * (SAMPLES_MIN - 1)) == 0x7FFF
    outside = [Sample(0x9000)] * 100
    assert split_point(Segment(0, HashRange(0, 0xFF)), outside) == 0x7F


def test_the_point_follows_the_load_of_the_keys() -> None:
    crowded = spread(300, 0, 0x0FFF) + spread(20)
    point = split_point(WHOLE, crowded)
    assert point is not None
    lower = sum(sample.position <= point for sample in crowded)
    assert 0.45 < lower / len(crowded) < 0.55


def test_samples_have_weights() -> None:
    two = [Sample(100, 1, 1)] * 20 + [Sample(200, 1, 100)] * 20 + [Sample(300, 1, 99)] * 20
    assert split_point(WHOLE, two) in range(100, 300)
    assert split_point(WHOLE, two, by_bytes=True) == 299
    heavy = [Sample(100, 50), *spread(40, 101, 1000)]
    assert split_point(WHOLE, heavy) == 100
    weightless = [Sample(number, 1, 0) for number in range(40)]
    assert split_point(WHOLE, weightless, by_bytes=True) == 0x7FFF


def test_one_hot_key_has_no_point() -> None:
    assert split_point(WHOLE, [Sample(77)] * 100) is None
    assert split_point(WHOLE, [Sample(77)] * 90 + spread(10)) is None
    assert split_point(WHOLE, [Sample(77)] * 85 + spread(15, 100)) == 99
    assert split_point(Segment(0, HashRange(7, 7)), []) is None


def test_a_segment_with_a_hot_key_is_passed_over() -> None:
    hot = {0: [Sample(3)] * 100}
    assert decided(layout_of(2), loads(30_000, 0), keys=hot) is None
    assert decided(layout_of(2), loads(30_000, 11_000), keys=hot) == Split(1, "load")
    assert decided(layout_of(2), loads(30, 0), consumers=[3], keys=hot) == Split(1, "consumers")
    even = {0: spread(100, 0, 0x7FFF)}
    found = decided(layout_of(2), loads(30_000, 0), keys=even)
    assert isinstance(found, Split)
    assert found.after is not None
    assert 0x3800 < found.after < 0x4800


def test_what_is_overloaded_decides_which_load_is_balanced() -> None:
    large = [Sample(10, 1, 1_000_000)] * 40 + [Sample(20 + n, 1, 1) for n in range(40)]
    by_bytes = {0: load(0, 1, bytes_rate_in=1e9)}
    assert decided(layout_of(1), by_bytes, keys={0: large}) is None
    assert decided(layout_of(1), loads(20_000), keys={0: large}) is not None


@settings(derandomize=True, deadline=None)
@given(
    start=st.integers(0, HASH_MAX),
    size=st.integers(1, HASH_MAX),
    positions=st.lists(
        st.tuples(st.integers(0, HASH_MAX), st.integers(1, 1000)), min_size=0, max_size=80
    ),
)
def test_a_point_divides_the_range_and_leaves_neither_part_with_nearly_all(
    start: int, size: int, positions: list[tuple[int, int]]
) -> None:
    whole = HashRange(start, min(start + size - 1, HASH_MAX))
    samples = [Sample(whole.start + place % whole.size, weight) for place, weight in positions]
    point = split_point(Segment(0, whole), samples)
    if point is None:
        places = {sample.position for sample in samples}
        heaviest = max(
            (sum(s.messages for s in samples if s.position == place) for place in places),
            default=0,
        )
        total = sum(sample.messages for sample in samples)
        # With no key above 80 %, some point leaves less than 90 % on either side.
        assert whole.size == 1 or heaviest > 0.8 * total
        return
    whole.split(point)
    if len(samples) >= SAMPLES_MIN:
        total = sum(sample.messages for sample in samples)
        lower = sum(sample.messages for sample in samples if sample.position <= point)
        assert max(lower, total - lower) < ONE_SIDED * total


# --- merges


def test_between_the_thresholds_nothing_happens() -> None:
    assert decided(layout_of(2), loads(5000, 5000)) is None
    assert decided(layout_of(2), loads(999, 9999)) is None


def test_together_they_must_stay_below_the_thresholds() -> None:
    assert decided(layout_of(2), loads(600, 400)) is None
    assert decided(layout_of(2), loads(600, 399)) == Merge((0, 1))
    one_metric = {0: load(0, bytes_rate_out=2e7), 1: load(1, bytes_rate_out=6e6)}
    assert decided(layout_of(2), one_metric) is None


def test_a_merge_requires_cold_for_the_full_window() -> None:
    steady = loads(1, 1, since=LATER)
    assert decided(layout_of(2), steady, now=LATER + 299_999) is None
    assert decided(layout_of(2), steady, now=LATER + 300_000) == Merge((0, 1))


def test_a_merge_requires_a_load_record() -> None:
    assert decided(layout_of(2), loads(1)) is None
    assert decided(layout_of(3), {0: load(0), 2: load(2)}) is None


def test_what_was_just_split_is_not_merged_back() -> None:
    grown = layout_of(1).split(0, now_ms=LATER)
    quiet = {1: load(1, since=BEGIN), 2: load(2, since=BEGIN)}
    assert decided(grown, quiet, now=LATER + 299_999, last_split=LATER) is None
    assert decided(grown, quiet, now=LATER + 300_000, last_split=LATER) == Merge((1, 2))


def test_a_merge_respects_the_depth_of_the_dag() -> None:
    deep = layout_of(4).merge((0, 1), now_ms=BEGIN).merge((2, 3), now_ms=BEGIN)
    quiet = {4: load(4), 5: load(5)}
    assert decided(deep, quiet, under=policy(max_dag_depth=2)) == Merge((4, 5))
    assert decided(deep, quiet, under=policy(max_dag_depth=1)) is None


def test_a_merge_respects_min_segments() -> None:
    quiet = loads(0, 0, 0, 0)
    assert decided(layout_of(4), quiet, under=policy(min_segments=4)) is None
    found = decided(layout_of(4), quiet, under=policy(min_segments=3))
    assert found == Merge((0, 1))
    assert decided(layout_of(4), quiet, under=policy(min_segments=2)) == Merge((0, 1, 2))


@pytest.mark.parametrize("noted", [True, False])
def test_a_merge_respects_the_merge_cooldown(noted: bool) -> None:
    merged = layout_of(4).merge((0, 1), now_ms=LATER)
    last = LATER if noted else NEVER
    quiet = {2: load(2), 3: load(3), 4: load(4, 999)}
    assert decided(merged, quiet, now=LATER + 299_999, last_merge=last) is None
    assert decided(merged, quiet, now=LATER + 300_000, last_merge=last) is not None


def test_no_consumer_loses_its_segment_by_a_merge() -> None:
    quiet = loads(0, 0, 0, 0)
    assert decided(layout_of(4), quiet, consumers=[4]) is None
    assert decided(layout_of(4), quiet, consumers=[3, 2]) == Merge((0, 1))


def test_the_longest_run_with_the_least_load_is_merged() -> None:
    busy = 5000
    assert decided(layout_of(5), loads(9, 8, busy, 7, 2)) == Merge((3, 4))
    assert decided(layout_of(6), loads(1, 1, busy, 300, 300, 300)) == Merge((3, 4, 5))
    # Not all of them fit into one.
    assert decided(layout_of(4), loads(400, 400, 300, 200)) == Merge((1, 2, 3))


# --- reports


def report(before: LoadRecord | None, *rates: float, at: int = LATER) -> LoadRecord | None:
    noise = noise_of(Limits())
    return next_report(before, 7, Rates(*rates), at, change_percent=25, noise=noise)


def test_the_first_report_is_always_written() -> None:
    assert report(None) == LoadRecord(7, since_ms=LATER)


def test_what_hardly_moved_is_not_reported() -> None:
    before = LoadRecord(7, 1000.0, 1e6, 0.0, 0.0, BEGIN)
    assert report(before, 1000.0, 1e6) is None
    assert report(before, 1250.0, 0.75e6) is None
    assert report(before, 1251.0, 1e6) == LoadRecord(7, 1251.0, 1e6, since_ms=LATER)
    assert report(before, 749.0, 1e6) is not None


def test_to_and_from_zero_is_reported() -> None:
    before = LoadRecord(7, 1000.0, 1e6, 0.0, 0.0, BEGIN)
    assert report(before, 1000.0, 1e6, 0.1, 1.0) == LoadRecord(7, 1000, 1e6, 0.1, 1, BEGIN)
    assert report(before, 0.0, 1e6) == LoadRecord(7, 0.0, 1e6, since_ms=LATER)


def test_a_message_now_and_then_leaves_a_segment_cold() -> None:
    record = LoadRecord(7, since_ms=BEGIN)
    for rate in (0.1, 0.0, 3.0, 0.2, 90.0, 0.0):
        found = report(record, rate, rate * 100)
        assert found is not None
        assert found.since_ms == BEGIN
        record = found
    found = report(record, 150.0, 1.0)
    assert found is not None
    assert found.since_ms == LATER


def test_what_a_limit_forbids_is_named() -> None:
    small = policy(max_segments=2, max_dag_depth=1)
    layout = SegmentLayout.create(2, now_ms=0)
    busy = {0: LoadRecord(0, msg_rate_in=1e9)}
    assert suppressed(layout, busy, [], small, LATER) == ["max_segments"]
    assert suppressed(layout, {}, [3], small, LATER) == ["max_segments"]
    assert suppressed(layout, {}, [2], small, LATER) == []
    merged = SegmentLayout.create(3, now_ms=0).merge([0, 1], now_ms=0)
    idle = {number: LoadRecord(number) for number in merged.segments}
    assert suppressed(merged, idle, [], small, LATER) == ["max_depth"]
