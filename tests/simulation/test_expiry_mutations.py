"""The simulation of the broker finds it if a rule of delays, expiry or quotas is missing.

As in `test_broker_mutations`, a rule is taken away by patching it from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.simulation.broker.run import simulate_broker
from magnetar.broker.dispatch.delays import Delays
from magnetar.broker.entries import EntryView
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic import quota_rules, quotas
from magnetar.broker.topic.quota_rules import Exceeded
from magnetar.ledger.api import Entry
from tests.simulation.search import first_violation

SEEDS = 40


def _first_violation(first: int) -> str:
    return first_violation(simulate_broker, SEEDS, first)


# --- messages with a time of delivery


def test_delays_that_a_restart_forgets_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sift = Delays.__init__, Delays.sift
    began: dict[int, int] = {}

    def dated(delays: Delays, *parts: Any, **options: Any) -> None:
        made(delays, *parts, **options)
        began[id(delays)] = delays._clock.now_ms()

    def only_new(delays: Delays, entries: list[Entry], marked: list[Entry]) -> list[Entry]:
        """What was to come so long after this began was sent after it began."""
        since = began[id(delays)]
        late = [each for each in marked if (EntryView.of(each).deliver_at or 0) < since + 1000]
        return sift(delays, entries, [each for each in marked if each not in late])

    monkeypatch.setattr(Delays, "__init__", dated)
    monkeypatch.setattr(Delays, "sift", only_new)
    assert "s early" in _first_violation(first=0)


def test_acknowledgements_that_take_waiting_ones_along_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ack = Subscription._ack_in_cursor

    def through(subscription: Subscription, acks: Sequence[Ack]) -> None:
        ack(subscription, acks)
        if acks and subscription._dispatcher.delayed:
            subscription.cursor.ack_cumulative(max(each.position for each in acks))

    monkeypatch.setattr(Subscription, "_ack_in_cursor", through)
    found = _first_violation(first=0)
    assert "is open" in found or "needs it" in found


# --- time to live


def test_messages_that_expire_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expire = Subscription.expire

    async def sooner(subscription: Subscription, seconds: float) -> None:
        await expire(subscription, seconds / 3)

    monkeypatch.setattr(Subscription, "expire", sooner)
    found = _first_violation(first=2)
    assert "is open" in found or "needs it" in found


def test_messages_that_never_expire_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return

    monkeypatch.setattr(Subscription, "expire", nothing)
    assert "still has" in _first_violation(first=1)


# --- quotas


def test_eviction_of_more_than_needed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "KEPT", 0.7)
    assert "too many or too few" in _first_violation(first=1)


def test_eviction_below_the_quota_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(policies: TopicPolicies, size_bytes: int, age_seconds: float) -> Exceeded | None:
        limit = policies.size_quota.limit
        return None if limit < 0 else Exceeded("size", limit // 2, policies.size_quota.policy)

    monkeypatch.setattr(quota_rules, "exceeded", always)
    assert "too many or too few" in _first_violation(first=1)


# --- subscriptions


def test_subscriptions_that_expire_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    unused_seconds = Subscription.unused_seconds

    def longer(subscription: Subscription) -> float:
        return unused_seconds(subscription) + 40.0

    monkeypatch.setattr(Subscription, "unused_seconds", longer)
    assert "is gone after" in _first_violation(first=1)


def test_subscriptions_that_never_expire_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscription, "unused_seconds", lambda _: 0.0)
    assert "is still there" in _first_violation(first=1)
