"""The rate of subscribing: how many in a period, and what is remembered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy.values import SubscribeRate
from magnetar.broker.subscribe.subscribe_rate import ConsumerKey, SubscribeCounts

ONE = ConsumerKey("10.0.0.1", "c", 1)
PERIOD_S = 30


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_no_period_admits_more_than_its_rate(pauses: list[int], most: int) -> None:
    counts, now = SubscribeCounts(10), 0
    admitted: list[int] = []
    began: int | None = None
    for pause in pauses:
        now += pause
        if counts.admits(ONE, SubscribeRate(most, PERIOD_S), now):
            admitted.append(now)
        # A new period begins with the first request behind the end of the last one.
        if began is None or now - began >= PERIOD_S:
            began = now
            assert admitted[-1] == now
        assert len([each for each in admitted if each >= began]) <= most


def test_consumers_are_counted_one_by_one() -> None:
    counts, rate = SubscribeCounts(10), SubscribeRate(1, PERIOD_S)
    others = [ONE._replace(host="10.0.0.2"), ONE._replace(name="d"), ONE._replace(consumer_id=2)]
    for each in (ONE, *others):
        assert counts.admits(each, rate, 0)
        assert not counts.admits(each, rate, 1)


def test_what_is_remembered_is_bounded_and_goes_with_the_rate() -> None:
    counts, rate = SubscribeCounts(3), SubscribeRate(1, PERIOD_S)
    for number in range(100):
        assert counts.admits(ONE._replace(consumer_id=number), rate, number)
    assert len(counts) == 3
    assert not counts.admits(ONE._replace(consumer_id=99), rate, 100)
    assert counts.admits(ONE, SubscribeRate(), 100)
    assert len(counts) == 0
