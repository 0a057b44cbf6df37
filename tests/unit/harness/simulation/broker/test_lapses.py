"""The reckoning of what may expire: policies of unknown outcome, and times out of order."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from harness.simulation.broker.lapses import (
    Lapses,
    all_before,
    evicted_through,
    last_before,
    share_bytes,
)
from magnetar.broker.topic import quota_rules
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position

NOWHERE = Position(-1, -1)


class Message(NamedTuple):
    published_at: float


LOG = {Position(1, number): Message(at) for number, at in enumerate((10.0, 20.0, 11.0, 30.0))}

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=6).map(
    lambda ledgers: [
        LedgerSpan(number, 0, entries=entries, size_bytes=size if entries else 0)
        for number, (entries, size) in enumerate(ledgers)
    ]
)


def test_a_policy_that_was_not_answered_may_hold() -> None:
    lapses = Lapses()
    lapses.setting_ttl(5)
    assert lapses.ttl is None
    lapses.follow(LOG, 16.0)
    assert lapses.may_lapse(Position(1, 0))
    assert not lapses.may_lapse(Position(1, 3))


def test_what_was_answered_holds_alone_and_takes_nothing_back() -> None:
    lapses = Lapses()
    lapses.setting_ttl(5)
    lapses.follow(LOG, 12.0)
    lapses.ttl_is(0)
    lapses.follow(LOG, 100.0)
    assert not lapses.may_lapse(Position(1, 0))
    lapses.setting_ttl(5)
    lapses.ttl_is(5)
    assert lapses.ttl == 5
    lapses.follow(LOG, 16.5)
    assert lapses.may_lapse(Position(1, 2))
    lapses.setting_ttl(0)
    lapses.ttl_is(0)
    assert lapses.may_lapse(Position(1, 2))


def test_below_one_that_is_old_enough_all_may_go() -> None:
    assert last_before(LOG, 12.0) == Position(1, 2)
    assert all_before(LOG, 12.0) == Position(1, 0)
    assert all_before(LOG, 10.0) == NOWHERE


def test_a_quota_of_unknown_outcome_spares_nothing() -> None:
    lapses = Lapses()
    lapses.is_quota_open = True
    assert lapses.may_lapse(Position(9, 9))


@given(SPANS, st.integers(0, 20_000))
def test_eviction_is_reckoned_as_the_product_does(spans: list[LedgerSpan], limit: int) -> None:
    assert evicted_through(spans, limit) == (
        quota_rules.evicted_through(spans, int(limit * quota_rules.KEPT)) or NOWHERE
    )


@given(SPANS, st.integers(0, 6), st.integers(0, 9))
def test_sizes_are_reckoned_as_the_product_does(
    spans: list[LedgerSpan], ledger: int, entry: int
) -> None:
    first = Position(ledger, entry)
    assert int(share_bytes(spans, first)) == quota_rules.bytes_from(spans, first)
