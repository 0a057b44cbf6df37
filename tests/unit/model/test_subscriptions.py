"""Subscriptions: names, policies, sticky ranges."""

from __future__ import annotations

import pytest

from magnetar.errors import NotAllowed
from magnetar.model.hashing import HashRange
from magnetar.model.subscriptions import (
    SUBSCRIPTION_NAME_BYTES_MAX,
    InitialPosition,
    KeySharedMode,
    KeySharedPolicy,
    SubscriptionSpec,
    SubscriptionType,
)


def test_numbers_are_those_of_the_protocol() -> None:
    assert [each.value for each in SubscriptionType] == [0, 1, 2, 3]
    assert (InitialPosition.LATEST, InitialPosition.EARLIEST) == (0, 1)
    assert (KeySharedMode.AUTO_SPLIT, KeySharedMode.STICKY) == (0, 1)


def test_defaults() -> None:
    subscription = SubscriptionSpec("billing", SubscriptionType.SHARED)
    assert subscription.initial_position is InitialPosition.LATEST
    assert subscription.durable
    assert subscription.key_shared is None


@pytest.mark.parametrize("name", ["", "  ", "a\x00", "a\n", "a\ud800", "é" * 129])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(NotAllowed):
        SubscriptionSpec(name, SubscriptionType.EXCLUSIVE)


def test_a_name_of_full_length() -> None:
    SubscriptionSpec("é" * (SUBSCRIPTION_NAME_BYTES_MAX // 2), SubscriptionType.EXCLUSIVE)


def test_cumulative_acks_need_one_consumer_in_order() -> None:
    assert [each.takes_cumulative_acks for each in SubscriptionType] == [True, False, True, False]


def test_only_key_shared_has_a_policy() -> None:
    policy = KeySharedPolicy()
    SubscriptionSpec("s", SubscriptionType.KEY_SHARED, key_shared=policy)
    with pytest.raises(NotAllowed, match="Key_Shared"):
        SubscriptionSpec("s", SubscriptionType.SHARED, key_shared=policy)


def test_sticky_ranges_are_kept_in_ring_order() -> None:
    policy = KeySharedPolicy.sticky([(200, 300), (0, 100)])
    assert policy.ranges == (HashRange(0, 100), HashRange(200, 300))


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ([], "at least one"),
        ([(0, 100), (100, 200)], "overlap"),
        ([(0, 300), (100, 200)], "overlap"),
        ([(5, 4)], "not a range"),
        ([(0, 65536)], "not a range"),
    ],
)
def test_bad_sticky_ranges_are_refused(ranges: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(NotAllowed, match=reason):
        KeySharedPolicy.sticky(ranges)


def test_ranges_are_for_sticky_consumers() -> None:
    with pytest.raises(NotAllowed, match="sticky"):
        KeySharedPolicy(ranges=(HashRange(0, 1),))
