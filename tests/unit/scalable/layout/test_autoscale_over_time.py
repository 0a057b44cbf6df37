"""Auto-scale over an hour and more of made-up load: it follows, settles, and does not thrash."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import pi, sin

import pytest

from magnetar.model.hashing import HASH_MAX, HashRange
from magnetar.model.segments import NEVER, SegmentLayout
from magnetar.runtime.limits import Limits
from magnetar.scalable.layout.autoscale import (
    AutoScalePolicy,
    Decision,
    Merge,
    Rates,
    Sample,
    Split,
    broker_policy,
    decide,
    next_report,
    noise_of,
)
from magnetar.scalable.records import LoadRecord

BEGIN_MS = 1_700_000_000_000
REPORT_S = 10
DECIDE_S = 60
SAMPLES = 400
MESSAGE_BYTES = 1000
LIMITS = Limits()
NOISE = noise_of(LIMITS)


@dataclass
class Keys:
    """Shares of the load by ring position, sorted."""

    positions: list[int]
    weights: list[float]
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = [0.0, *accumulate(self.weights)]

    def share(self, part: HashRange) -> float:
        low = bisect_left(self.positions, part.start)
        high = bisect_right(self.positions, part.end)
        return (self.sums[high] - self.sums[low]) / self.sums[-1]

    def samples(self, part: HashRange, chance: random.Random) -> list[Sample]:
        low = bisect_left(self.positions, part.start)
        high = bisect_right(self.positions, part.end)
        if low == high:
            return []
        found = chance.choices(self.positions[low:high], self.weights[low:high], k=SAMPLES)
        return [Sample(position, 1, MESSAGE_BYTES) for position in found]


def even(count: int = 5000) -> Keys:
    positions = [number * (HASH_MAX + 1) // count for number in range(count)]
    return Keys(positions, [1.0] * count)


def with_hot_key(share: float, count: int = 5000) -> Keys:
    keys = even(count)
    keys.weights[1234] = share / (1 - share) * (count - 1)
    return Keys(keys.positions, keys.weights)


class Simulation:
    """One topic: its load is measured every 10 s, and decided upon every minute."""

    def __init__(
        self,
        rate: Callable[[float], float],
        keys: Keys,
        *,
        seed: int = 1,
        policy: AutoScalePolicy | None = None,
        segments: int = 1,
    ) -> None:
        self.layout = SegmentLayout.create(segments, now_ms=BEGIN_MS)
        self.changes: list[tuple[int, Decision]] = []
        self.counts: dict[int, int] = {}
        self._rate = rate
        self._keys = keys
        self._chance = random.Random(seed)
        self._policy = policy or broker_policy(LIMITS)
        self._loads: dict[int, LoadRecord] = {}
        self._last_split = self._last_merge = NEVER

    def run(self, seconds: int) -> Simulation:
        first = max(self.counts, default=0)
        for now in range(first + REPORT_S, first + seconds + 1, REPORT_S):
            self._report(now)
            if now % DECIDE_S == 0:
                self._decide(now)
            self.counts[now] = len(self.layout.active)
        return self

    def overloaded(self, now: int) -> float:
        """The largest rate of a segment."""
        return max(self._rate_of(each.hash_range, now) for each in self.layout.active)

    def kinds(self) -> list[str]:
        return [type(change).__name__ for _, change in self.changes]

    def _rate_of(self, part: HashRange, now: int) -> float:
        return self._rate(now) * self._keys.share(part)

    def _report(self, now: int) -> None:
        for segment in self.layout.active:
            number = segment.segment_id
            rate = self._rate_of(segment.hash_range, now)
            rates = Rates(rate, rate * MESSAGE_BYTES, rate, rate * MESSAGE_BYTES)
            before, now_ms = self._loads.get(number), BEGIN_MS + now * 1000
            record = next_report(before, number, rates, now_ms, change_percent=25, noise=NOISE)
            self._loads[number] = record or self._loads[number]

    def _decide(self, now: int) -> None:
        now_ms = BEGIN_MS + now * 1000
        samples: dict[int, list[Sample]] = {}
        while True:
            found = decide(
                self.layout,
                self._loads,
                (),
                self._policy,
                now_ms,
                last_split_ms=self._last_split,
                last_merge_ms=self._last_merge,
                key_loads=samples,
            )
            if not isinstance(found, Split) or found.segment_id in samples:
                break
            part = self.layout.segment(found.segment_id).hash_range
            samples[found.segment_id] = self._keys.samples(part, self._chance)
        if isinstance(found, Split):
            self.layout = self.layout.split(found.segment_id, after=found.after, now_ms=now_ms)
            self._last_split = now_ms
        elif isinstance(found, Merge):
            self.layout = self.layout.merge(found.segment_ids, now_ms=now_ms)
            self._last_merge = now_ms
        else:
            return
        self.layout.check_invariants()
        self.changes.append((now, found))


def test_load_that_rises_and_falls_is_followed_within_an_hour() -> None:
    def rate(now: float) -> float:
        return 70_000.0 if now <= 1800 else 100.0

    simulation = Simulation(rate, even()).run(1800)
    assert simulation.overloaded(1800) <= 10_000
    assert len(simulation.layout.active) in range(8, 13)
    gaps = [now for now, _ in simulation.changes]
    assert all(later - earlier >= 60 for earlier, later in pairwise(gaps))
    assert gaps == list(range(60, gaps[-1] + 1, 60)), "a split a minute until it is enough"
    simulation.run(1800)
    assert len(simulation.layout.active) == 1
    merges = [now for now, change in simulation.changes if isinstance(change, Merge)]
    assert merges, "merged back"
    assert merges[0] >= 1800 + 300, "not before it was cold for the window"
    assert merges[-1] <= 1800 + 300 + 2 * 300
    assert set(simulation.kinds()[len(gaps) :]) == {"Merge"}


def test_crowded_keys_need_no_more_splits_than_even_ones() -> None:
    crowded = Keys(list(range(2000)), [1.0] * 2000)
    simulation = Simulation(lambda _: 70_000.0, crowded).run(1800)
    assert simulation.overloaded(1800) <= 10_000
    assert len(simulation.layout.active) <= 13, "by midpoints, the first five would be in vain"


def test_min_segments_stay() -> None:
    policy = broker_policy(Limits(scalable_min_segments=3))
    simulation = Simulation(lambda _: 10.0, even(), policy=policy, segments=8).run(3600)
    assert len(simulation.layout.active) == 3


@pytest.mark.parametrize("period_s", [120, 600, 1800])
@pytest.mark.parametrize(("middle", "swing"), [(10_000, 2000), (1000, 300), (5000, 4900)])
def test_a_wave_around_the_thresholds_does_not_thrash(
    period_s: int, middle: float, swing: float
) -> None:
    def rate(now: float) -> float:
        return middle + swing * sin(2 * pi * now / period_s)

    simulation = Simulation(rate, even(), segments=2).run(4 * 3600)
    assert len(simulation.changes) <= 2, simulation.changes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("middle", [1000.0, 10_000.0, 20_000.0])
def test_a_random_walk_around_the_thresholds_does_not_thrash(seed: int, middle: float) -> None:
    chance = random.Random(seed)
    walk, steps = middle, []
    for _ in range(4 * 360 + 1):
        walk = min(max(walk * chance.uniform(0.85, 1 / 0.85), middle * 0.7), middle * 1.4)
        steps.append(walk)
    simulation = Simulation(lambda now: steps[int(now) // REPORT_S], even(), seed=seed, segments=2)
    simulation.run(4 * 3600)
    assert len(simulation.changes) <= 4, simulation.changes


def test_even_the_wildest_load_changes_a_topic_rarely() -> None:
    """All or nothing, at the pace that does the most harm: cool-downs and window still hold."""

    def rate(now: float) -> float:
        return 80_000.0 if now % 900 < 300 else 0.0

    simulation = Simulation(rate, even()).run(4 * 3600)
    kinds = simulation.kinds()
    assert kinds.count("Merge") <= 4 * 3600 / 600
    assert kinds.count("Split") <= 6 * (kinds.count("Merge") + 1)


@pytest.mark.parametrize("share", [1 - 1e-9, 0.97, 0.8, 0.5])
def test_a_hot_key_is_split_off_a_few_times_at_most(share: float) -> None:
    simulation = Simulation(lambda _: 40_000.0, with_hot_key(share)).run(3600)
    splits = len(simulation.changes)
    assert splits <= 5
    assert simulation.kinds() == ["Split"] * splits
    simulation.run(3 * 3600)
    assert len(simulation.changes) == splits, "then it stays as it is"
    assert simulation.overloaded(0) >= 40_000 * share * 0.99, "no split can help that key"
