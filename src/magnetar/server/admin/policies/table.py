"""The table of policies: under which names each can be set, and what is checked of its value.

Owns: `POLICIES`. The rules that a value has by itself are its structure's
(`broker/policy/values.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec
from aiohttp import web

from magnetar.broker.policy.partitioned import PARTITIONS_MAX
from magnetar.broker.policy.policies import TransactionKind
from magnetar.broker.policy.values import (
    AutoSubscriptionCreation,
    AutoTopicCreation,
    AutoUpdateStrategy,
    BookieAffinity,
    Count,
    DelayedDeliveryPolicies,
    DispatchRate,
    InactiveTopicPolicies,
    PersistencePolicies,
    PublishRate,
    RetentionPolicies,
    SchemaStrategy,
    Size,
    SizeOrNone,
    SubscribeRate,
    SubscriptionKind,
)
from magnetar.errors import InvalidArgument, NotAllowed
from magnetar.scalable.layout.autoscale import check_override, read_override
from magnetar.scalable.lifecycle import read_lifecycle
from magnetar.server.admin.exchange import DOCUMENT_BYTES_MAX, Refusal, server_of, topics_of


class Policy(NamedTuple):
    """One policy."""

    field: str
    """Of `Policies`."""
    kind: Any
    namespace_name: str | None = None
    """As a part of a namespace's path; None: it is for topics only."""
    topic_name: str | None = None
    """As a part of a topic's path; None: it is for namespaces only."""
    unset: Any = None
    """What a namespace answers where it is not set; None: 204."""
    is_always_set: bool = False
    """Whether a namespace always has one, which can be changed and not removed."""
    by_query: bool = False
    """Whether the value of a topic is a query value with its name, instead of a body."""
    has_effect: bool = True
    """False: it is kept and shown, and nothing else."""
    check: Callable[[Any], Any] | None = None
    """What more is checked of a value, and what is stored."""
    allowed: Callable[[web.Request, Any], None] | None = None
    """Raises if this server cannot have it."""


OF_BROKER: Final = object()
"""Stands for the broker's own value in `unset`."""
MISSING: Final = object()
"""Stands for 404 in `unset`."""


# --- checks of single policies


def _checked_override(given: dict[str, object]) -> dict[str, object]:
    # Read, checked and written back: unknown members are refused, not stored.
    override = read_override(given)
    check_override(override)
    stored: dict[str, object] = msgspec.to_builtins(override)
    return stored


def _checked_lifecycle(given: dict[str, object]) -> dict[str, object]:
    stored: dict[str, object] = msgspec.to_builtins(read_lifecycle(given))
    return stored


def _checked_kind(given: str) -> str:
    if given not in get_args(TransactionKind):
        kinds = ", ".join(get_args(TransactionKind))
        raise InvalidArgument(f"transactionKind must be one of {kinds}, not {given!r}")
    return given


def _check_kind(request: web.Request, kind: str) -> None:
    # The setting of the broker is stronger: the namespace would wait for markers that never come.
    if kind == "markers" and server_of(request).config.transaction_kind == "metadata":
        raise NotAllowed(
            "no transaction of this broker ends by markers: its transaction_kind is metadata",
            hint="change that setting, or leave the namespace to it",
        )


def _checked_persistence(given: PersistencePolicies) -> PersistencePolicies:
    if not given.is_consistent:
        raise Refusal(
            400,
            "ensemble, write quorum and acknowledgement quorum must be above 0, none above"
            " the one before it, and the rate at least 0",
        )
    return given


def _checked_creation(given: AutoTopicCreation) -> AutoTopicCreation:
    if (given.default_num_partitions or 0) > PARTITIONS_MAX:
        raise Refusal(406, f"{given.default_num_partitions} partitions, at most {PARTITIONS_MAX}")
    return given


def _checked_inactive(given: InactiveTopicPolicies) -> InactiveTopicPolicies:
    if given.max_inactive_duration_seconds < 0:
        raise InvalidArgument("maxInactiveDurationSeconds must be at least 0")
    return given


def _checked_document(given: Any) -> Any:
    size = len(msgspec.json.encode(given))
    if size > DOCUMENT_BYTES_MAX:
        raise InvalidArgument(f"the policy has {size} bytes, at most {DOCUMENT_BYTES_MAX}")
    return given


def _check_size(request: web.Request, size: int) -> None:
    most = server_of(request).config.max_message_bytes
    if size > most:
        raise InvalidArgument(f"maxMessageSize is {size}, at most {most}: that of the broker")


def _check_clusters(request: web.Request, clusters: list[str]) -> None:
    # Nothing is replicated here, so that no other cluster could have what is in a namespace.
    own = topics_of(request).namespaces.cluster
    if clusters != [own]:
        raise NotAllowed(f"a namespace or topic is in the cluster {own}, and in no other")


# Names are Pulsar's, and differ between namespaces and topics.
POLICIES: Final = (
    Policy("retention_policies", RetentionPolicies, "retention", "retention"),
    Policy("message_ttl_in_seconds", Count, "messageTTL", "messageTTL", by_query=True),
    Policy(
        "subscription_expiration_time_minutes",
        Count,
        "subscriptionExpirationTime",
        "subscriptionExpirationTime",
        by_query=True,
    ),
    Policy(
        "inactive_topic_policies",
        InactiveTopicPolicies,
        "inactiveTopicPolicies",
        "inactiveTopicPolicies",
        check=_checked_inactive,
    ),
    Policy("compaction_threshold", Size, "compactionThreshold", "compactionThreshold"),
    Policy("deduplication_enabled", bool, "deduplication", "deduplicationEnabled"),
    Policy(
        "deduplication_snapshot_interval_seconds",
        Count,
        "deduplicationSnapshotInterval",
        "deduplicationSnapshotInterval",
    ),
    Policy(
        "delayed_delivery_policies", DelayedDeliveryPolicies, "delayedDelivery", "delayedDelivery"
    ),
    Policy("auto_topic_creation", AutoTopicCreation, "autoTopicCreation", check=_checked_creation),
    Policy(
        "auto_subscription_creation",
        AutoSubscriptionCreation,
        "autoSubscriptionCreation",
        "autoSubscriptionCreation",
    ),
    Policy("publish_rate", PublishRate, "publishRate", "publishRate"),
    Policy("dispatch_rate", DispatchRate, "dispatchRate", "dispatchRate"),
    Policy(
        "subscription_dispatch_rate",
        DispatchRate,
        "subscriptionDispatchRate",
        "subscriptionDispatchRate",
    ),
    Policy("subscribe_rate", SubscribeRate, "subscribeRate", "subscribeRate"),
    Policy("max_producers_per_topic", Count, "maxProducersPerTopic", "maxProducers"),
    Policy("max_consumers_per_topic", Count, "maxConsumersPerTopic", "maxConsumers"),
    Policy(
        "max_consumers_per_subscription",
        Count,
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
    ),
    Policy(
        "max_subscriptions_per_topic",
        Count,
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
    ),
    Policy("max_topics_per_namespace", Count, "maxTopicsPerNamespace", unset=0),
    Policy(
        "max_unacked_messages_per_consumer",
        Count,
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
    ),
    Policy(
        "max_unacked_messages_per_subscription",
        Count,
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
    ),
    Policy("max_message_size", Count, topic_name="maxMessageSize", allowed=_check_size),
    Policy(
        "subscription_types_enabled",
        list[SubscriptionKind],
        "subscriptionTypesEnabled",
        "subscriptionTypesEnabled",
        unset=[],
    ),
    Policy(
        "schema_compatibility_strategy",
        SchemaStrategy,
        "schemaCompatibilityStrategy",
        "schemaCompatibilityStrategy",
        unset="UNDEFINED",
    ),
    Policy(
        "schema_auto_update_compatibility_strategy",
        AutoUpdateStrategy,
        "schemaAutoUpdateCompatibilityStrategy",
    ),
    Policy(
        "schema_validation_enforced",
        bool,
        "schemaValidationEnforced",
        "schemaValidationEnforced",
        unset=False,
    ),
    Policy("is_allow_auto_update_schema", bool, "isAllowAutoUpdateSchema", unset=OF_BROKER),
    Policy("encryption_required", bool, "encryptionRequired", unset=False),
    Policy(
        "scalable_topic_auto_scale_policy",
        dict,
        "scalableTopicAutoScalePolicy",
        check=_checked_override,
    ),
    Policy(
        "scalable_topic_lifecycle_policy",
        dict,
        "scalableTopicLifecyclePolicy",
        check=_checked_lifecycle,
    ),
    Policy("transaction_kind", str, "transactionKind", check=_checked_kind, allowed=_check_kind),
    # What they are about is not here: one cluster, no other machines, no tiers, no roles.
    Policy(
        "replication_clusters",
        list[str],
        "replication",
        "replication",
        is_always_set=True,
        has_effect=False,
        allowed=_check_clusters,
    ),
    Policy(
        "allowed_clusters",
        list[str],
        "allowedClusters",
        unset=[],
        has_effect=False,
        allowed=_check_clusters,
    ),
    Policy(
        "persistence",
        PersistencePolicies,
        "persistence",
        "persistence",
        has_effect=False,
        check=_checked_persistence,
    ),
    Policy(
        "replicator_dispatch_rate",
        DispatchRate,
        "replicatorDispatchRate",
        "replicatorDispatchRate",
        has_effect=False,
    ),
    Policy(
        "offload_policies",
        dict[str, object],
        "offloadPolicies",
        "offloadPolicies",
        has_effect=False,
        check=_checked_document,
    ),
    Policy("offload_threshold", SizeOrNone, "offloadThreshold", unset=-1, has_effect=False),
    Policy(
        "offload_threshold_in_seconds",
        SizeOrNone,
        "offloadThresholdInSeconds",
        unset=-1,
        has_effect=False,
    ),
    Policy("offload_deletion_lag_ms", SizeOrNone, "offloadDeletionLagMs", has_effect=False),
    Policy("anti_affinity_group", str, "antiAffinity", has_effect=False, check=_checked_document),
    Policy(
        "bookie_affinity",
        BookieAffinity,
        "persistence/bookieAffinity",
        unset=MISSING,
        has_effect=False,
        check=_checked_document,
    ),
    Policy(
        "subscription_auth_mode",
        Literal["None", "Prefix"],
        "subscriptionAuthMode",
        unset="None",
        has_effect=False,
    ),
    Policy(
        "dispatcher_pause_on_ack_state_persistent",
        bool,
        "dispatcherPauseOnAckStatePersistent",
        "dispatcherPauseOnAckStatePersistent",
        has_effect=False,
    ),
    Policy(
        "allowed_topic_property_keys_for_metrics",
        list[str],
        "allowedTopicPropertyKeysForMetrics",
        has_effect=False,
        check=_checked_document,
    ),
)
