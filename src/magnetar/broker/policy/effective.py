"""Pure: the policies in force for one topic, once topic, namespace and broker are put together.

Owns: `resolved`, which says what each policy is, and `TopicPolicies`, what a topic reads of it.

Invariants:
1. A policy of the topic goes before one of its namespace, that before the broker's. Backlog quotas
   are one policy for each type.
2. Every level is a `Policies`; None alone means not set: False, 0 and an empty list are settings.
3. `TopicPolicies` holds no "not set": whoever reads it decides nothing about levels.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

import msgspec

from magnetar.broker.policy.defaults import PolicyDefaults
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    BacklogQuota,
    DelayedDeliveryPolicies,
    DispatchRate,
    InactiveTopicPolicies,
    PublishRate,
    SubscribeRate,
)
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention
from magnetar.runtime.limits import Limits

PolicySource: TypeAlias = Literal["broker", "namespace", "topic"]
"""Who set what is in force: the broker's default, the namespace, or the topic itself."""

BROKER_POLICIES: Final = PolicyDefaults().as_policies(Limits())
"""Of a broker without settings."""


class TopicPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies in force for one topic. A limit or rate of 0 is none."""

    retention: Retention = KEEP_NOTHING
    retention_from: PolicySource = "broker"
    message_ttl_seconds: int = 0
    subscription_expiration_minutes: int = 0
    inactive: InactiveTopicPolicies = InactiveTopicPolicies()
    size_quota: BacklogQuota = BacklogQuota()
    """`limit_size` counts; -1: none."""
    age_quota: BacklogQuota = BacklogQuota()
    """`limit_time` counts; -1: none."""
    compaction_threshold: int = 0
    """Bytes; 0: not compacted by itself."""
    deduplication: bool = False
    deduplication_snapshot_seconds: int = 120
    """0: by the number of entries alone."""
    auto_subscription_creation: bool = True
    schema_strategy: str = "FULL"
    schema_required: bool = False
    schema_updates: bool = True
    encryption_required: bool = False
    delayed_delivery: DelayedDeliveryPolicies = DelayedDeliveryPolicies(True, 1000)
    """Its `tick_time` is never 0."""
    publish_rate: PublishRate = PublishRate()
    dispatch_rate: DispatchRate = DispatchRate()
    subscription_dispatch_rate: DispatchRate = DispatchRate()
    """Of each subscription that has none of its own."""
    own_dispatch_rates: dict[str, DispatchRate] = {}
    """Of single subscriptions, by name."""
    dispatch_by_entries: bool = False
    """Whether these count a batch as one message."""
    subscribe_rate: SubscribeRate = SubscribeRate()
    max_producers: int = 0
    max_consumers: int = 0
    max_consumers_per_subscription: int = 0
    max_subscriptions: int = 0
    max_unacked_per_consumer: int = 0
    max_unacked_per_subscription: int = 0
    max_message_bytes: int = 0
    """0: as large as the broker takes them."""
    subscription_types: frozenset[str] = frozenset()
    """Empty: all."""
    legacy_in_records: bool = False
    """Whether legacy transactions are kept as metadata-driven ones are, and not by markers."""


def resolved(namespace: Policies, topic: Policies | None, broker: Policies) -> Policies:
    """What each policy is for a topic; the broker's own values included."""
    own = topic or _NOTHING
    levels = zip(_OPTIONAL, _values(own), _values(namespace), _values(broker), strict=True)
    # All at once: it is done for every loaded topic whenever its namespace changes.
    found: dict[str, Any] = {
        name: (third if second is None else second) if first is None else first
        for name, first, second, third in levels
    }
    found["backlog_quota_map"] = (
        broker.backlog_quota_map | namespace.backlog_quota_map | own.backlog_quota_map
    )
    found["subscription_policies"] = own.subscription_policies
    found["replication_clusters"] = own.replication_clusters or namespace.replication_clusters
    found["schema_compatibility_strategy"] = _strategy(own, namespace, broker)
    delayed = found["delayed_delivery_policies"]
    # Tools that only switch it on or off say nothing of the tick.
    if delayed is not None and not delayed.tick_time and broker.delayed_delivery_policies:
        tick = broker.delayed_delivery_policies.tick_time
        delayed = msgspec.structs.replace(delayed, tick_time=tick)
        found["delayed_delivery_policies"] = delayed
    return Policies(**found)


def _strategy(own: Policies, namespace: Policies, broker: Policies) -> str | None:
    # Admin tools write UNDEFINED to take a setting back. The older policy of a namespace counts
    # where the newer one is not set.
    older = _AUTO_UPDATES.get(namespace.schema_auto_update_compatibility_strategy or "")
    given = (own.schema_compatibility_strategy, namespace.schema_compatibility_strategy, older)
    found = (each for each in given if each is not None and each != "UNDEFINED")
    return next(found, broker.schema_compatibility_strategy)


def effective(
    namespace: Policies,
    topic: Policies | None = None,
    broker: Policies = BROKER_POLICIES,
    *,
    is_segment: bool = False,
    segment_retention: Retention = KEEP_NOTHING,
) -> TopicPolicies:
    """The policies of a topic (or segment) from those of its namespace and its own.

    `segment_retention` is the broker's default for segments.
    """
    own = topic or _NOTHING
    held = resolved(namespace, own, broker)
    given: dict[str, Any] = {ours: getattr(held, theirs) for ours, theirs in _SAME.items()}
    # Three of the broker's values are others for a segment, and one holds for a namespace only.
    retention = own.retention_policies or namespace.retention_policies
    if retention is not None:
        given["retention"] = retention.as_retention()
        given["retention_from"] = "namespace" if own.retention_policies is None else "topic"
    elif is_segment:
        given["retention"] = segment_retention
    elif broker.retention_policies is not None:
        given["retention"] = broker.retention_policies.as_retention()
    # A send that crossed the end of a segment comes again to its children.
    if is_segment and own.deduplication_enabled is namespace.deduplication_enabled is None:
        given["deduplication"] = True
    # All topics of a namespace have to agree on how a transaction is kept.
    given["legacy_in_records"] = namespace.transaction_kind == "metadata"
    created = held.auto_subscription_creation
    given["auto_subscription_creation"] = (
        None if created is None else created.allow_auto_subscription_creation
    )
    given["size_quota"] = held.backlog_quota_map.get("destination_storage")
    given["age_quota"] = held.backlog_quota_map.get("message_age")
    given["subscription_types"] = frozenset(held.subscription_types_enabled or ())
    given["own_dispatch_rates"] = {
        name: each.dispatch_rate
        for name, each in own.subscription_policies.items()
        if each.dispatch_rate is not None
    }
    return TopicPolicies(**{name: value for name, value in given.items() if value is not None})


_NOTHING: Final = Policies()
_AUTO_UPDATES: Final = {
    "AutoUpdateDisabled": "ALWAYS_INCOMPATIBLE",
    "Backward": "BACKWARD",
    "Forward": "FORWARD",
    "Full": "FULL",
    "AlwaysCompatible": "ALWAYS_COMPATIBLE",
    "BackwardTransitive": "BACKWARD_TRANSITIVE",
    "ForwardTransitive": "FORWARD_TRANSITIVE",
    "FullTransitive": "FULL_TRANSITIVE",
}

_OPTIONAL: Final = tuple(
    each.name for each in msgspec.structs.fields(Policies) if each.default is None
)

_values: Final = attrgetter(*_OPTIONAL)

_SAME: Final = {
    "message_ttl_seconds": "message_ttl_in_seconds",
    "subscription_expiration_minutes": "subscription_expiration_time_minutes",
    "inactive": "inactive_topic_policies",
    "compaction_threshold": "compaction_threshold",
    "deduplication": "deduplication_enabled",
    "deduplication_snapshot_seconds": "deduplication_snapshot_interval_seconds",
    "schema_strategy": "schema_compatibility_strategy",
    "schema_required": "schema_validation_enforced",
    "schema_updates": "is_allow_auto_update_schema",
    "encryption_required": "encryption_required",
    "delayed_delivery": "delayed_delivery_policies",
    "publish_rate": "publish_rate",
    "dispatch_rate": "dispatch_rate",
    "subscription_dispatch_rate": "subscription_dispatch_rate",
    "dispatch_by_entries": "dispatch_by_entries",
    "subscribe_rate": "subscribe_rate",
    "max_producers": "max_producers_per_topic",
    "max_consumers": "max_consumers_per_topic",
    "max_consumers_per_subscription": "max_consumers_per_subscription",
    "max_subscriptions": "max_subscriptions_per_topic",
    "max_unacked_per_consumer": "max_unacked_messages_per_consumer",
    "max_unacked_per_subscription": "max_unacked_messages_per_subscription",
    "max_message_bytes": "max_message_size",
}
"""Fields that need no translation, by the name here."""
