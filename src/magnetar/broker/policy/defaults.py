"""Pure: the broker's own policies, which hold where neither a topic nor its namespace sets one.

Owns: `PolicyDefaults`, whose fields are settings with the names of Pulsar's (its
`ttlDurationDefaultInSeconds` is `ttl_duration_default_in_seconds` here), and their translation into
`Policies`.

Invariants:
1. A default says everything: no policy that the broker acts upon is None in `as_policies`, but for
   those of which not to have one is a meaning of its own.
2. Defaults are Pulsar's, but for one: no topic is deleted for being idle unless somebody says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple, TypeVar, cast, get_args

import msgspec

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    AutoSubscriptionCreation,
    AutoTopicCreation,
    BacklogQuota,
    DelayedDeliveryPolicies,
    DeleteMode,
    DispatchRate,
    InactiveTopicPolicies,
    PublishRate,
    QuotaPolicy,
    QuotaType,
    RetentionPolicies,
    SchemaStrategy,
    SubscribeRate,
)
from magnetar.errors import ConfigError
from magnetar.runtime.limits import Limits

_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1
_TOPIC_TYPES: Final = ("non-partitioned", "partitioned")

Value = TypeVar("Value", str, int, bool)


class PolicyDefault(NamedTuple):
    """A default of a policy, as documentation and tools show it."""

    name: str
    default: str | int
    unit: str
    doc: str


def _of(
    default: Value,
    unit: str,
    doc: str,
    *,
    least: int = 0,
    most: int = _INT_MAX,
    choices: tuple[str, ...] = (),
) -> Value:
    rule = {"unit": unit, "doc": doc, "least": least, "most": most, "choices": choices}
    return field(default=default, metadata=rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDefaults:
    """The broker's policies; every value is checked when it is made."""

    # What is kept, and for how long.
    default_retention_time_in_minutes: int = _of(
        0, "minutes", "acknowledged messages are kept; -1: for ever", least=-1
    )
    default_retention_size_in_mb: int = _of(
        0, "MiB", "of acknowledged messages are kept; -1: all", least=-1
    )
    ttl_duration_default_in_seconds: int = _of(
        0, "seconds", "until a message counts as acknowledged; 0: never"
    )
    subscription_expiration_time_minutes: int = _of(
        0, "minutes", "until a subscription that nobody uses is deleted; 0: never"
    )
    broker_delete_inactive_topics_enabled: bool = _of(
        False, "true|false", "whether topics that nobody uses are deleted"
    )
    broker_delete_inactive_topics_mode: str = _of(
        "delete_when_no_subscriptions", "mode", "which of them", choices=get_args(DeleteMode)
    )
    broker_delete_inactive_topics_max_inactive_duration_seconds: int = _of(
        60, "seconds", "until a topic counts as one that nobody uses"
    )
    backlog_quota_default_limit_bytes: int = _of(
        -1, "bytes", "of backlog on one topic; -1: no limit", least=-1, most=_LONG_MAX
    )
    backlog_quota_default_limit_second: int = _of(
        -1, "seconds", "of age of a backlog; -1: no limit", least=-1
    )
    backlog_quota_default_retention_policy: str = _of(
        "producer_request_hold",
        "policy",
        "what happens to a backlog above its limit",
        choices=get_args(QuotaPolicy),
    )
    broker_service_compaction_threshold_in_bytes: int = _of(
        0, "bytes", "of backlog until a topic is compacted; 0: never by itself", most=_LONG_MAX
    )
    broker_deduplication_enabled: bool = _of(
        False, "true|false", "whether regular topics drop what a producer sends again"
    )
    broker_deduplication_snapshot_interval_seconds: int = _of(
        120, "seconds", "between two records of what producers sent"
    )
    # Delivery.
    delayed_delivery_enabled: bool = _of(
        True, "true|false", "whether messages can be delivered later"
    )
    delayed_delivery_tick_time_millis: int = _of(
        1000, "milliseconds", "a delayed message may come early by", least=1
    )
    delayed_delivery_max_delay_in_millis: int = _of(
        0, "milliseconds", "a message may be delayed at most; 0: no limit", most=_LONG_MAX
    )
    # Rates; 0 is none.
    max_publish_rate_per_topic_in_messages: int = _of(0, "messages/s", "published on one topic")
    max_publish_rate_per_topic_in_bytes: int = _of(
        0, "bytes/s", "published on one topic", most=_LONG_MAX
    )
    dispatch_throttling_rate_per_topic_in_msg: int = _of(
        0, "messages/s", "delivered from one topic"
    )
    dispatch_throttling_rate_per_topic_in_byte: int = _of(
        0, "bytes/s", "delivered from one topic", most=_LONG_MAX
    )
    dispatch_throttling_rate_per_subscription_in_msg: int = _of(
        0, "messages/s", "delivered to one subscription"
    )
    dispatch_throttling_rate_per_subscription_in_byte: int = _of(
        0, "bytes/s", "delivered to one subscription", most=_LONG_MAX
    )
    dispatch_throttling_on_batch_message_enabled: bool = _of(
        False, "true|false", "whether rates of delivery count a batch as one message"
    )
    subscribe_throttling_rate_per_consumer: int = _of(
        0, "requests", "to subscribe of one consumer in a period"
    )
    subscribe_rate_period_per_consumer_in_second: int = _of(
        30, "seconds", "that period lasts", least=1
    )
    # Maxima; 0 is none.
    max_producers_per_topic: int = _of(0, "producers", "of one topic")
    max_consumers_per_topic: int = _of(0, "consumers", "of one topic")
    max_consumers_per_subscription: int = _of(0, "consumers", "of one subscription")
    max_subscriptions_per_topic: int = _of(0, "subscriptions", "of one topic")
    max_topics_per_namespace: int = _of(0, "topics", "of one namespace, partitions one by one")
    # Schemas, and what is created because somebody asks for it.
    schema_compatibility_strategy: str = _of(
        "FULL",
        "strategy",
        "which changes a schema may have",
        choices=tuple(each for each in get_args(SchemaStrategy) if each != "UNDEFINED"),
    )
    is_allow_auto_update_schema_enabled: bool = _of(
        True, "true|false", "whether producers may bring new versions of a schema"
    )
    is_schema_validation_enforced: bool = _of(
        False, "true|false", "whether producers need a schema where the topic has one"
    )
    allow_auto_topic_creation: bool = _of(
        True, "true|false", "whether topics are created when a client asks for them"
    )
    allow_auto_topic_creation_type: str = _of(
        "non-partitioned", "kind", "of topics that are created so", choices=_TOPIC_TYPES
    )
    default_num_partitions: int = _of(1, "partitions", "of such a topic", least=1)
    allow_auto_subscription_creation: bool = _of(
        True, "true|false", "whether subscriptions are created when a consumer asks for them"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), each.metadata)
        time, size = self.default_retention_time_in_minutes, self.default_retention_size_in_mb
        # As of the policy itself: one of them alone would contradict itself.
        if (time == 0) != (size == 0):
            raise ConfigError(
                "default_retention_time_in_minutes and default_retention_size_in_mb: both are 0,"
                f" or none of them, not {time} and {size}"
            )

    def override(self, given: Mapping[str, object]) -> PolicyDefaults:
        """Other values for some of them; ConfigError names what is wrong."""
        return replace(self, **given)  # type: ignore[arg-type]  # checked as any other value

    def as_policies(self, limits: Limits) -> Policies:
        """What namespaces and topics would set to have the same."""
        return Policies(
            **self._kept(),
            **self._rates(),
            **self._created(),
            delayed_delivery_policies=DelayedDeliveryPolicies(
                self.delayed_delivery_enabled,
                self.delayed_delivery_tick_time_millis,
                self.delayed_delivery_max_delay_in_millis,
            ),
            max_producers_per_topic=self.max_producers_per_topic,
            max_consumers_per_topic=self.max_consumers_per_topic,
            max_consumers_per_subscription=self.max_consumers_per_subscription,
            max_subscriptions_per_topic=self.max_subscriptions_per_topic,
            max_topics_per_namespace=self.max_topics_per_namespace,
            max_unacked_messages_per_consumer=limits.consumer_unacked_messages,
            max_unacked_messages_per_subscription=limits.subscription_unacked_messages,
            max_message_size=0,
            subscription_types_enabled=[],
            schema_compatibility_strategy=self.schema_compatibility_strategy,
            is_allow_auto_update_schema=self.is_allow_auto_update_schema_enabled,
            schema_validation_enforced=self.is_schema_validation_enforced,
            encryption_required=False,
        )

    def _kept(self) -> dict[str, Any]:
        # Quotas by way of their JSON form, which checks the policy's name.
        policy = self.backlog_quota_default_retention_policy
        size, time = self.backlog_quota_default_limit_bytes, self.backlog_quota_default_limit_second
        quotas = {
            "destination_storage": {"limitSize": size, "policy": policy},
            "message_age": {"limitTime": time, "policy": policy},
        }
        return {
            "retention_policies": RetentionPolicies(
                self.default_retention_time_in_minutes, self.default_retention_size_in_mb
            ),
            "message_ttl_in_seconds": self.ttl_duration_default_in_seconds,
            "subscription_expiration_time_minutes": self.subscription_expiration_time_minutes,
            "inactive_topic_policies": InactiveTopicPolicies(
                cast("DeleteMode", self.broker_delete_inactive_topics_mode),
                self.broker_delete_inactive_topics_max_inactive_duration_seconds,
                self.broker_delete_inactive_topics_enabled,
            ),
            "backlog_quota_map": msgspec.convert(quotas, dict[QuotaType, BacklogQuota]),
            "compaction_threshold": self.broker_service_compaction_threshold_in_bytes,
            "deduplication_enabled": self.broker_deduplication_enabled,
            "deduplication_snapshot_interval_seconds": (
                self.broker_deduplication_snapshot_interval_seconds
            ),
        }

    def _rates(self) -> dict[str, Any]:
        return {
            "publish_rate": PublishRate(
                self.max_publish_rate_per_topic_in_messages,
                self.max_publish_rate_per_topic_in_bytes,
            ),
            "dispatch_rate": DispatchRate(
                self.dispatch_throttling_rate_per_topic_in_msg,
                self.dispatch_throttling_rate_per_topic_in_byte,
            ),
            "subscription_dispatch_rate": DispatchRate(
                self.dispatch_throttling_rate_per_subscription_in_msg,
                self.dispatch_throttling_rate_per_subscription_in_byte,
            ),
            "dispatch_by_entries": self.dispatch_throttling_on_batch_message_enabled,
            "subscribe_rate": SubscribeRate(
                self.subscribe_throttling_rate_per_consumer,
                self.subscribe_rate_period_per_consumer_in_second,
            ),
        }

    def _created(self) -> dict[str, Any]:
        is_partitioned = self.allow_auto_topic_creation_type == "partitioned"
        return {
            "auto_topic_creation": AutoTopicCreation(
                self.allow_auto_topic_creation,
                "partitioned" if is_partitioned else "non-partitioned",
                self.default_num_partitions if is_partitioned else None,
            ),
            "auto_subscription_creation": AutoSubscriptionCreation(
                self.allow_auto_subscription_creation
            ),
        }


def all_policy_defaults() -> tuple[PolicyDefault, ...]:
    """Every setting, in the order of its table."""
    return tuple(
        PolicyDefault(each.name, each.default, each.metadata["unit"], each.metadata["doc"])
        for each in fields(PolicyDefaults)
        if isinstance(each.default, str | int)
    )


def _check(name: str, value: object, rule: Mapping[str, object]) -> None:
    # Its kind was checked where the text was read; here is what the value itself may be.
    least, most, choices = rule["least"], rule["most"], rule["choices"]
    assert isinstance(least, int)
    assert isinstance(most, int)
    assert isinstance(choices, tuple)
    if isinstance(value, int) and not least <= value <= most:
        raise ConfigError(f"setting {name} must be from {least} to {most}, not {value}")
    if choices and value not in choices:
        raise ConfigError(f"setting {name} must be one of {', '.join(choices)}, not {value!r}")
