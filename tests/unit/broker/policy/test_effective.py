"""How the policies of a topic, its namespace and the broker are put together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.policy.defaults import PolicyDefaults, all_policy_defaults
from magnetar.broker.policy.effective import BROKER_POLICIES, TopicPolicies, effective, resolved
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    AutoUpdateStrategy,
    BacklogQuota,
    DelayedDeliveryPolicies,
    DispatchRate,
    RetentionPolicies,
    SubscriptionPolicies,
    check_quotas,
)
from magnetar.errors import ConfigError, NotAllowed
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.runtime.limits import Limits

NUMBERS = [each.name for each in msgspec.structs.fields(Policies) if each.type == (int | None)]
_WIRE = {each.name: each.encode_name for each in msgspec.structs.fields(Policies)}
LEVELS = st.fixed_dictionaries({}, optional={name: st.integers(0, 5) for name in NUMBERS}).map(
    lambda values: msgspec.convert({_WIRE[name]: value for name, value in values.items()}, Policies)
)


@given(topic=LEVELS, namespace=LEVELS, broker=LEVELS)
def test_the_first_level_that_sets_a_policy_decides(
    topic: Policies, namespace: Policies, broker: Policies
) -> None:
    held = resolved(namespace, topic, broker)
    for name in NUMBERS:
        levels = [getattr(each, name) for each in (topic, namespace, broker)]
        assert getattr(held, name) == next((each for each in levels if each is not None), None)


def test_a_broker_without_settings_has_the_defaults_of_topics() -> None:
    kept = TopicPolicies(max_unacked_per_consumer=50_000, max_unacked_per_subscription=200_000)
    shown = msgspec.to_builtins(effective(Policies()))
    expected = msgspec.to_builtins(kept)
    # Rates say 0 or -1 for none.
    for name in ("publish_rate", "dispatch_rate", "subscription_dispatch_rate", "subscribe_rate"):
        for member, value in expected[name].items():
            assert shown[name][member] in (value, 0 if value == -1 else value)
            shown[name][member] = value
    assert shown == expected


def test_quotas_are_put_together_by_type() -> None:
    broker = PolicyDefaults(backlog_quota_default_limit_second=9).as_policies(Limits())
    namespace = Policies(backlog_quota_map={"destination_storage": BacklogQuota(limit=7)})
    own = Policies(backlog_quota_map={"destination_storage": BacklogQuota(limit_size=5)})
    assert effective(namespace, own, broker).size_quota.limit_size == 5
    assert effective(namespace, None, broker).size_quota.limit_size == 7
    assert effective(namespace, None, broker).age_quota.limit_time == 9


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"limit": 5}, 5),
        ({"limitSize": 5}, 5),
        ({"limit": 6, "limitSize": 5}, 5),
        ({"limit": 5, "limitSize": None}, 5),
        ({}, -1),
    ],
)
def test_the_old_name_of_a_quota_is_read_and_written(body: Any, expected: int) -> None:
    quota = msgspec.convert(body, BacklogQuota)
    assert (quota.limit, quota.limit_size) == (expected, expected)
    shown = msgspec.to_builtins(quota)
    assert (shown["limit"], shown["limitSize"]) == (expected, expected)


@pytest.mark.parametrize(
    ("time", "size", "quota", "fits"),
    [
        (10, 1, BacklogQuota(limit=2**20 - 1), True),
        (10, 1, BacklogQuota(limit=2**20), False),
        (-1, -1, BacklogQuota(limit=2**40), True),
        (0, 0, BacklogQuota(limit=2**40), True),
    ],
)
def test_a_quota_must_be_below_what_is_kept(
    time: int, size: int, quota: BacklogQuota, fits: bool
) -> None:
    retention = RetentionPolicies(time, size)
    if fits:
        check_quotas({"destination_storage": quota}, retention)
        return
    with pytest.raises(NotAllowed):
        check_quotas({"destination_storage": quota}, retention)


@pytest.mark.parametrize(
    ("older", "expected"), [("AutoUpdateDisabled", "ALWAYS_INCOMPATIBLE"), ("Forward", "FORWARD")]
)
def test_the_older_way_to_set_a_strategy(older: AutoUpdateStrategy, expected: str) -> None:
    namespace = Policies(schema_auto_update_compatibility_strategy=older)
    assert effective(namespace).schema_strategy == expected
    newer = msgspec.structs.replace(namespace, schema_compatibility_strategy="BACKWARD")
    assert effective(newer).schema_strategy == "BACKWARD"
    taken_back = msgspec.structs.replace(namespace, schema_compatibility_strategy="UNDEFINED")
    assert effective(taken_back).schema_strategy == expected
    own = Policies(schema_compatibility_strategy="ALWAYS_COMPATIBLE")
    assert effective(newer, own).schema_strategy == "ALWAYS_COMPATIBLE"


def test_who_only_switches_delays_keeps_the_tick() -> None:
    namespace = Policies(delayed_delivery_policies=DelayedDeliveryPolicies(active=True))
    assert effective(namespace).delayed_delivery == DelayedDeliveryPolicies(True, 1000, 0)


def test_segments_have_other_defaults() -> None:
    week = Retention(7 * 24 * 3600.0, None)
    found = effective(Policies(), is_segment=True, segment_retention=week)
    assert (found.deduplication, found.retention) == (True, week)
    off = Policies(deduplication_enabled=False, retention_policies=RetentionPolicies(1, 1))
    found = effective(off, is_segment=True, segment_retention=week)
    assert (found.deduplication, found.retention_from) == (False, "namespace")


def test_rates_of_single_subscriptions_are_the_topics_own() -> None:
    rate = DispatchRate(3)
    own = Policies(
        subscription_policies={"s": SubscriptionPolicies(rate), "t": SubscriptionPolicies()}
    )
    assert effective(own, own).own_dispatch_rates == {"s": rate}
    assert effective(own).own_dispatch_rates == {}


# --- the broker's


def test_every_policy_with_an_effect_has_a_value_of_the_broker() -> None:
    # What is None by its meaning, or is for namespaces and subscriptions alone.
    without = {
        "schema_auto_update_compatibility_strategy",
        "scalable_topic_auto_scale_policy",
        "scalable_topic_lifecycle_policy",
        "transaction_kind",
        "subscription_auth_mode",
    }
    names = [each.name for each in msgspec.structs.fields(Policies)]
    acted_upon = names[names.index("retention_policies") : names.index("persistence")]
    found = {name for name in acted_upon if getattr(BROKER_POLICIES, name) is None}
    assert found == without


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_duration_default_in_seconds": -1},
        {"backlog_quota_default_limit_bytes": -2},
        {"backlog_quota_default_retention_policy": "shrug"},
        {"default_retention_time_in_minutes": 5},
        {"schema_compatibility_strategy": "UNDEFINED"},
        {"delayed_delivery_tick_time_millis": 0},
        {"max_producers_per_topic": 2**31},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PolicyDefaults().override(wrong)


def test_settings_become_policies() -> None:
    names = {each.name for each in all_policy_defaults()}
    # Each of them is seen in some policy: none is read by nobody.
    for name in names:
        default = getattr(PolicyDefaults(), name)
        other = {True: False, False: True}.get(default) if isinstance(default, bool) else None
        changes: dict[str, Any] = {name: other}
        if isinstance(default, int) and other is None:
            changes = {name: default + 7}
        elif isinstance(default, str):
            changes = {name: _OTHERS[name]}
        if name.startswith("default_retention"):
            changes = {
                "default_retention_time_in_minutes": 7,
                "default_retention_size_in_mb": 7,
            }
        if name == "default_num_partitions":
            changes["allow_auto_topic_creation_type"] = "partitioned"
        assert PolicyDefaults().override(changes).as_policies(Limits()) != BROKER_POLICIES


_OTHERS = {
    "broker_delete_inactive_topics_mode": "delete_when_subscriptions_caught_up",
    "backlog_quota_default_retention_policy": "producer_exception",
    "schema_compatibility_strategy": "BACKWARD",
    "allow_auto_topic_creation_type": "partitioned",
}
