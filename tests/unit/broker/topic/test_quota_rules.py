"""Backlog quotas, decided: when one is used up, and how much has to go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import BacklogQuota, QuotaPolicy
from magnetar.broker.topic.quota_rules import (
    Exceeded,
    bytes_from,
    evicted_through,
    exceeded,
    has_quota,
)
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position

HOLD: QuotaPolicy = "producer_request_hold"
EVICT: QuotaPolicy = "consumer_backlog_eviction"


def quotas(size: int = -1, age: int = -1) -> TopicPolicies:
    return TopicPolicies(
        size_quota=BacklogQuota(limit_size=size),
        age_quota=BacklogQuota(limit_time=age, policy="consumer_backlog_eviction"),
    )


@pytest.mark.parametrize(
    ("policies", "size", "age", "expected"),
    [
        (quotas(), 10**9, 1e9, None),
        (quotas(100), 99, 1e9, None),
        (quotas(100), 100, 0.0, Exceeded("size", 100, HOLD)),
        # A size of 0 is a quota that nothing fits in, an age of 0 is none.
        (quotas(0), 0, 0.0, Exceeded("size", 0, HOLD)),
        (quotas(age=0), 0, 1e9, None),
        (quotas(age=5), 10**9, 4.9, None),
        (quotas(age=5), 0, 5.0, Exceeded("age", 5, EVICT)),
        (quotas(100, 5), 100, 5.0, Exceeded("size", 100, HOLD)),
    ],
)
def test_a_quota_is_used_up(
    policies: TopicPolicies, size: int, age: float, expected: Exceeded | None
) -> None:
    assert exceeded(policies, size, age) == expected
    assert has_quota(policies) or expected is None


@st.composite
def ledgers(draw: st.DrawFn) -> list[LedgerSpan]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=6))
    return [
        LedgerSpan(3 * number, 0, None, entries, entries * each)
        for number, (entries, each) in enumerate(sizes)
    ]


@given(ledgers(), st.integers(0, 20_000))
def test_what_is_left_fits_and_nothing_more_goes_than_has_to(
    spans: list[LedgerSpan], room: int
) -> None:
    through = evicted_through(spans, room)
    if through is None:
        assert sum(each.size_bytes for each in spans) <= room
        return
    assert bytes_from(spans, through.next) <= room
    # With the last one that goes it would have been too much.
    assert bytes_from(spans, through) > room
    held = next(each for each in spans if each.ledger_id == through.ledger_id)
    assert 0 <= through.entry_id < held.entries
    assert isinstance(through, Position)
