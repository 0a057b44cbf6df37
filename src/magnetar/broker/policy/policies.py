"""Pure: the policies of namespaces and topics, in the JSON shape of Pulsar's admin interface.

Owns: `Policies` (what a namespace or a topic sets; None: nothing), and `TopicPolicies`, what holds
for one topic once namespace, topic and defaults are put together.

Invariants:
1. A policy of the topic goes before one of its namespace, that before the default.
2. What is not set is None, so that `Policies` of a topic say only what they override.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from magnetar.errors import NotAllowed
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention

UNLIMITED: Final = -1

PolicySource: TypeAlias = Literal["broker", "namespace", "topic"]
"""Who set what is in force: the broker's default, the namespace, or the topic itself."""

TransactionKind: TypeAlias = Literal["auto", "metadata", "markers"]

_MIB: Final = 1024 * 1024
_SECONDS_PER_MINUTE: Final = 60


class RetentionPolicies(msgspec.Struct, frozen=True, rename="camel"):
    """The retention of acknowledged messages; -1: for ever, whatever the size."""

    retention_time_in_minutes: int = 0
    retention_size_in_m_b: int = msgspec.field(default=0, name="retentionSizeInMB")

    def __post_init__(self) -> None:
        time, size = self.retention_time_in_minutes, self.retention_size_in_m_b
        # Pulsar's rule: zero in one and not in the other would contradict itself.
        if min(time, size) < UNLIMITED or (time == 0) != (size == 0):
            raise NotAllowed(
                f"retention of {time} minutes and {size} MB",
                hint="set both to 0 (keep nothing), or each to -1 or more than 0",
            )

    def as_retention(self) -> Retention:
        time, size = self.retention_time_in_minutes, self.retention_size_in_m_b
        return Retention(
            None if time == UNLIMITED else float(time * _SECONDS_PER_MINUTE),
            None if size == UNLIMITED else size * _MIB,
        )


class AutoTopicCreation(msgspec.Struct, frozen=True, rename="camel"):
    """The rule for topics that somebody asks for: created or not, and of which kind."""

    allow_auto_topic_creation: bool = True
    topic_type: Literal["partitioned", "non-partitioned"] = "non-partitioned"
    default_num_partitions: int | None = None

    def __post_init__(self) -> None:
        # Pulsar refuses it too: there would be nothing to create.
        if self.topic_type == "partitioned" and (self.default_num_partitions or 0) < 1:
            raise NotAllowed("partitioned topics need a default number of partitions above 0")


class AutoSubscriptionCreation(msgspec.Struct, frozen=True, rename="camel"):
    """The rule for subscriptions that a consumer asks for: created or not."""

    allow_auto_subscription_creation: bool = True


class InactiveTopicPolicies(msgspec.Struct, frozen=True, rename="camel"):
    """The rule for topics that nobody uses: deleted or not, and when."""

    inactive_topic_delete_mode: Literal[
        "delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"
    ] = "delete_when_no_subscriptions"
    # Pulsar's brokerDeleteInactiveTopicsMaxInactiveDurationSeconds. Unlike there, nothing is
    # deleted unless a policy says so: data goes only at somebody's wish.
    max_inactive_duration_seconds: int = 60
    delete_while_inactive: bool = False


class DelayedDeliveryPolicies(msgspec.Struct, frozen=True, rename="camel"):
    """The rule for messages that are to be delivered later."""

    active: bool = False
    tick_time: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Milliseconds; 0: the broker's."""
    max_delivery_delay_in_millis: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """0: no limit."""


class DelayedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """The rule in force for messages that are to be delivered later, on one topic."""

    # Defaults of Pulsar's broker.
    active: bool = True
    """False: they are delivered at once."""
    tick_ms: int = 1000
    strict: bool = False
    """True: none is delivered before its time; else a tick before it at most."""
    max_delay_ms: int = 0
    """How late a message may be meant to be when it is published; 0: as late as it likes."""
    fixed_delay_entries: int = 50_000
    """So many that are equally late are read ahead; 0: all."""

    @property
    def step_ms(self) -> int:
        """The largest power of two that is not above the tick."""
        return 1 << max(self.tick_ms, 1).bit_length() - 1

    def is_due(self, deliver_at_ms: int, now_ms: int) -> bool:
        early_ms = 0 if self.strict else self.tick_ms
        return not self.active or deliver_at_ms <= now_ms + early_ms

    def overridden(self, policies: DelayedDeliveryPolicies) -> DelayedDelivery:
        """What holds where this is the broker's, and a namespace or topic sets something."""
        return msgspec.structs.replace(
            self,
            active=policies.active,
            tick_ms=policies.tick_time or self.tick_ms,
            max_delay_ms=policies.max_delivery_delay_in_millis,
        )


DEFAULT_DELAYS: Final = DelayedDelivery()


class AuthPolicies(msgspec.Struct, frozen=True):
    """Permissions: who may do what, by role."""

    namespace_auth: dict[str, list[str]] = {}
    destination_auth: dict[str, dict[str, list[str]]] = {}
    subscription_auth_roles: dict[str, list[str]] = {}


class BundlesData(msgspec.Struct, frozen=True, rename="camel"):
    """Shown for tools that expect it: a namespace is not divided here."""

    # Tools address bundles by these boundaries: one bundle that spans the whole hash range.
    boundaries: tuple[str, ...] = ("0x00000000", "0xffffffff")
    num_bundles: int = 1


class Policies(msgspec.Struct, frozen=True):
    """The policies that a namespace (or, with fewer fields, a topic) sets."""

    # Only of namespaces. Always in the answer: tools read them without asking whether they are set.
    auth_policies: AuthPolicies = AuthPolicies()
    replication_clusters: list[str] = []
    bundles: BundlesData = BundlesData()
    properties: dict[str, str] = {}
    deleted: bool = False

    # From here on None means "not set" (invariant 2). Names are Pulsar's, which mixes two styles.
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
    delayed_delivery_policies: DelayedDeliveryPolicies | None = None
    scalable_topic_auto_scale_policy: dict[str, object] | None = msgspec.field(
        default=None, name="scalableTopicAutoScalePolicy"
    )
    """What it overrides of the broker's auto-scale policy, as `scalable` reads it."""
    transaction_kind: TransactionKind | None = msgspec.field(default=None, name="transactionKind")
    """How topics of a namespace keep legacy transactions."""


class TopicPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies in force for one topic. A limit of 0 is none."""

    # Defaults of Pulsar's broker: nothing is kept once acknowledged, schemas must be FULL
    # compatible.
    retention: Retention = KEEP_NOTHING
    retention_from: PolicySource = "broker"
    deduplication: bool = False
    auto_subscription_creation: bool = True
    inactive: InactiveTopicPolicies = InactiveTopicPolicies()
    schema_strategy: str = "FULL"
    schema_required: bool = False
    schema_updates: bool = True
    encryption_required: bool = False
    max_producers: int = 0
    max_consumers: int = 0
    max_consumers_per_subscription: int = 0
    max_subscriptions: int = 0
    max_unacked_per_consumer: int | None = None
    """None: the broker's own limit."""
    max_unacked_per_subscription: int | None = None
    delayed_delivery: DelayedDelivery = DelayedDelivery()
    legacy_in_records: bool = False
    """Whether legacy transactions are kept as metadata-driven ones are, and not by markers."""


def effective(
    namespace: Policies,
    topic: Policies | None = None,
    *,
    is_segment: bool = False,
    segment_retention: Retention = KEEP_NOTHING,
    delayed_delivery: DelayedDelivery = DEFAULT_DELAYS,
) -> TopicPolicies:
    """The policies of a topic (or segment) from those of its namespace and its own.

    `segment_retention` is the broker's default for segments, `delayed_delivery` that for all.
    """
    own = topic or Policies()

    # Invariant 1; `None` alone means not set: False and 0 are settings.
    def first(name: str) -> object:
        value = getattr(own, name)
        return getattr(namespace, name) if value is None else value

    given = {ours: first(theirs) for ours, theirs in _SAME.items()}
    strategy = first("schema_compatibility_strategy")
    # Admin tools write UNDEFINED to take a setting back.
    given["schema_strategy"] = None if strategy == "UNDEFINED" else strategy
    retention = own.retention_policies or namespace.retention_policies
    if retention is not None:
        given["retention"] = retention.as_retention()
        given["retention_from"] = "namespace" if own.retention_policies is None else "topic"
    elif is_segment:
        given["retention"] = segment_retention
    delays = own.delayed_delivery_policies or namespace.delayed_delivery_policies
    given["delayed_delivery"] = (
        delayed_delivery if delays is None else delayed_delivery.overridden(delays)
    )
    created = own.auto_subscription_creation or namespace.auto_subscription_creation
    # Of the namespace alone: all its topics have to agree on how a transaction is kept.
    given["legacy_in_records"] = namespace.transaction_kind == "metadata"
    given["auto_subscription_creation"] = (
        None if created is None else created.allow_auto_subscription_creation
    )
    kept = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(_SEGMENT_DEFAULTS if is_segment else _DEFAULTS, **kept)


_DEFAULTS: Final = TopicPolicies()
_SEGMENT_DEFAULTS: Final = TopicPolicies(deduplication=True)
"""A send that crossed the end of a segment comes again to its children."""
_SAME: Final = {
    "deduplication": "deduplication_enabled",
    "inactive": "inactive_topic_policies",
    "schema_required": "schema_validation_enforced",
    "schema_updates": "is_allow_auto_update_schema",
    "encryption_required": "encryption_required",
    "max_producers": "max_producers_per_topic",
    "max_consumers": "max_consumers_per_topic",
    "max_consumers_per_subscription": "max_consumers_per_subscription",
    "max_subscriptions": "max_subscriptions_per_topic",
    "max_unacked_per_consumer": "max_unacked_messages_per_consumer",
    "max_unacked_per_subscription": "max_unacked_messages_per_subscription",
}
"""Fields that need no translation, by the name here."""
