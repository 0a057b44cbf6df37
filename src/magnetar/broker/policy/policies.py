"""Pure: what a namespace, a topic or the broker sets of the policies, under Pulsar's names.

Owns: `Policies`. What one policy consists of is in `values.py`, what holds for a topic in
`effective.py`.

Invariants:
1. What is not set is None, so that `Policies` of a topic say only what they override.
2. They are records on disk: a field is neither renamed nor made to refuse what it took before.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from magnetar.broker.policy.values import (
    AuthPolicies,
    AutoSubscriptionCreation,
    AutoTopicCreation,
    AutoUpdateStrategy,
    BacklogQuota,
    BookieAffinity,
    BundlesData,
    DelayedDeliveryPolicies,
    DispatchRate,
    InactiveTopicPolicies,
    PersistencePolicies,
    PublishRate,
    QuotaType,
    ResourceQuota,
    RetentionPolicies,
    SubscribeRate,
    SubscriptionKind,
    SubscriptionPolicies,
)

TransactionKind: TypeAlias = Literal["auto", "metadata", "markers"]


class Policies(msgspec.Struct, frozen=True):
    """The policies that a namespace (or, with fewer fields, a topic) sets."""

    # Only of namespaces. Always in the answer: tools read them without asking whether they are set.
    auth_policies: AuthPolicies = AuthPolicies()
    replication_clusters: list[str] = []
    bundles: BundlesData = BundlesData()
    properties: dict[str, str] = {}
    deleted: bool = False

    # From here on None means "not set" (invariant 1). Names are Pulsar's, which mixes two styles.
    retention_policies: RetentionPolicies | None = None
    deduplication_enabled: bool | None = msgspec.field(default=None, name="deduplicationEnabled")
    auto_topic_creation: AutoTopicCreation | None = msgspec.field(
        default=None, name="autoTopicCreationOverride"
    )
    auto_subscription_creation: AutoSubscriptionCreation | None = msgspec.field(
        default=None, name="autoSubscriptionCreationOverride"
    )
    inactive_topic_policies: InactiveTopicPolicies | None = None
    schema_compatibility_strategy: str | None = None
    schema_validation_enforced: bool | None = None
    is_allow_auto_update_schema: bool | None = None
    encryption_required: bool | None = None
    max_producers_per_topic: int | None = None
    max_consumers_per_topic: int | None = None
    max_consumers_per_subscription: int | None = None
    max_subscriptions_per_topic: int | None = None
    max_topics_per_namespace: int | None = None
    max_unacked_messages_per_consumer: int | None = None
    max_unacked_messages_per_subscription: int | None = None
    message_ttl_in_seconds: int | None = None
    scalable_topic_auto_scale_policy: dict[str, object] | None = msgspec.field(
        default=None, name="scalableTopicAutoScalePolicy"
    )
    """What it overrides of the broker's auto-scale policy, as `scalable` reads it."""
    scalable_topic_lifecycle_policy: dict[str, object] | None = msgspec.field(
        default=None, name="scalableTopicLifecyclePolicy"
    )
    """How long lost consumers and sealed segments are kept, as `scalable` reads it."""
    transaction_kind: TransactionKind | None = msgspec.field(default=None, name="transactionKind")
    """How topics of a namespace keep legacy transactions."""

    backlog_quota_map: dict[QuotaType, BacklogQuota] = {}
    """A topic's quota of one type goes before its namespace's of that type."""
    subscription_expiration_time_minutes: int | None = None
    delayed_delivery_policies: DelayedDeliveryPolicies | None = None
    deduplication_snapshot_interval_seconds: int | None = msgspec.field(
        default=None, name="deduplicationSnapshotIntervalSeconds"
    )
    compaction_threshold: int | None = None
    publish_rate: PublishRate | None = msgspec.field(default=None, name="publishMaxMessageRate")
    dispatch_rate: DispatchRate | None = msgspec.field(default=None, name="topicDispatchRate")
    subscription_dispatch_rate: DispatchRate | None = msgspec.field(
        default=None, name="subscriptionDispatchRate"
    )
    subscribe_rate: SubscribeRate | None = msgspec.field(default=None, name="clusterSubscribeRate")
    subscription_policies: dict[str, SubscriptionPolicies] = {}
    """Of single subscriptions of a topic, by name."""
    max_message_size: int | None = None
    subscription_types_enabled: list[SubscriptionKind] | None = None
    schema_auto_update_compatibility_strategy: AutoUpdateStrategy | None = None
    subscription_auth_mode: Literal["None", "Prefix"] | None = None

    dispatch_by_entries: bool | None = msgspec.field(
        default=None, name="dispatchThrottlingOnBatchMessageEnabled"
    )
    """Of the broker alone: rates of dispatching count a batch as one message."""

    # Kept and shown, and nothing else: what they are about does not exist here.
    persistence: PersistencePolicies | None = None
    replicator_dispatch_rate: DispatchRate | None = msgspec.field(
        default=None, name="replicatorDispatchRate"
    )
    allowed_clusters: list[str] | None = None
    offload_policies: dict[str, object] | None = None
    offload_threshold: int | None = None
    offload_threshold_in_seconds: int | None = None
    offload_deletion_lag_ms: int | None = None
    anti_affinity_group: str | None = None
    bookie_affinity: BookieAffinity | None = None
    resource_quota: ResourceQuota | None = None
    dispatcher_pause_on_ack_state_persistent: bool | None = None
    allowed_topic_property_keys_for_metrics: list[str] | None = None
