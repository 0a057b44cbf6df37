"""Token buckets: never more than the rate and one burst, whatever comes when."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.rates.token_bucket import TokenBucket

RATES = st.floats(0.01, 1e9)
PERIODS = st.sampled_from([1.0, 2.0, 60.0])
GAPS = st.floats(0, 100)
SIZES = st.floats(1, 1e6)
SLACK: Final = 1e-4
"""Of sums of many floats."""


@given(RATES, PERIODS, st.lists(st.tuples(GAPS, SIZES), max_size=40))
def test_no_span_of_time_has_more_than_its_rate_and_one_burst(
    rate: float, period: float, steps: list[tuple[float, float]]
) -> None:
    now, bucket = 0.0, TokenBucket(rate, period, 0)
    taken: list[tuple[float, float]] = []

    for gap, size in steps:
        now += gap
        now += bucket.seconds_until_next(now)
        assert bucket.has_token(now)
        bucket.take(size, now)
        taken.append((now, size))

    for first in range(len(taken)):
        total = 0.0
        for at, size in taken[first:]:
            # All before the last one: that one may be larger than what is left.
            burst = max(rate, 1.0)
            assert total <= (rate / period * (at - taken[first][0]) + burst) * (1 + SLACK) + SLACK
            total += size


@given(RATES, PERIODS, st.floats(0, 1e6))
def test_a_long_rest_gives_no_more_than_one_period(rate: float, period: float, rest: float) -> None:
    bucket = TokenBucket(rate, period, 0)
    bucket.take(max(rate, 1.0), 0)

    assert bucket.available(rest) == pytest.approx(min(rest * rate / period, max(rate, 1.0)))


@given(RATES, st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_a_wait_that_was_computed_is_long_enough(rate: float, sizes: list[float]) -> None:
    now, bucket = 12_345.678, TokenBucket(rate, 1, 12_345.678)

    for size in sizes:
        bucket.take(size, now)
        wait = bucket.seconds_until_next(now)
        now += wait
        # Below the clock's own steps nothing can be waited for.
        if wait > 1e-3:
            assert bucket.has_token(now)
            assert bucket.seconds_until_next(now) == 0


@given(RATES, RATES, RATES, PERIODS, st.floats(0, 1e9))
def test_a_change_makes_nobody_wait_longer_and_keeps_the_order_of_rates(
    before: float, one: float, other: float, period: float, taken: float
) -> None:
    def wait_after(*changes: float) -> float:
        bucket = TokenBucket(before, period, 0)
        bucket.take(taken, 0)
        for each in changes:
            bucket.change(each, period, 0)
        return bucket.seconds_until_next(0)

    assert wait_after(one) <= wait_after() * (1 + SLACK) + SLACK
    low, high = sorted((one, other))
    assert wait_after(high) <= wait_after(low) * (1 + SLACK) + SLACK


@given(st.lists(st.tuples(RATES, st.floats(0, 10)), min_size=2, max_size=10))
def test_tokens_never_exceed_the_present_period(steps: list[tuple[float, float]]) -> None:
    now, bucket = 0.0, TokenBucket(5, 1, 0)

    for rate, gap in steps:
        bucket.change(rate, 1, now)
        now += gap
        assert bucket.available(now) <= max(rate, 1.0)


def test_tokens_that_are_given_back_count_again_up_to_the_period() -> None:
    bucket = TokenBucket(10, 1, 0)

    bucket.take(8, 0)
    bucket.take(-3, 0)
    assert bucket.available(0) == 5
    bucket.take(-50, 0)
    assert bucket.available(0) == 10


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10, 1, 100)
    bucket.take(10, 100)

    assert [bucket.available(at) for at in (100, 99, 100)] == [0, 0, 0]


def test_waits_are_in_order_of_what_was_taken() -> None:
    waits = []
    for taken in (0, 9.5, 10, 11, 100):
        bucket = TokenBucket(10, 1, 0)
        bucket.take(taken, 0)
        waits.append(bucket.seconds_until_next(0))

    assert waits == [0, 0.05, 0.1, 0.2, pytest.approx(9.1)]
    assert all(one <= other for one, other in pairwise(waits))
