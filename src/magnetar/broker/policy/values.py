"""Pure: the values that single policies have, in the JSON shape of Pulsar's admin interface.

Owns: one structure for each policy that is more than a number or a flag, with the rules of what
makes sense in it.

Invariants:
1. A number that no rule allows is refused when the value is made, also from JSON.
2. 0 or -1 switch a limit or a rate off, as in Pulsar; which of them, the structure says.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from magnetar.errors import NotAllowed
from magnetar.managed_ledger.ledger_list import Retention

UNLIMITED: Final = -1

# The bounds of Java's int and long: tools would not read back what is beyond them.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
CountOrNone: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
SizeOrNone: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]

SubscriptionKind: TypeAlias = Literal["Exclusive", "Shared", "Failover", "Key_Shared"]
SchemaStrategy: TypeAlias = Literal[
    "UNDEFINED",
    "ALWAYS_INCOMPATIBLE",
    "ALWAYS_COMPATIBLE",
    "BACKWARD",
    "FORWARD",
    "FULL",
    "BACKWARD_TRANSITIVE",
    "FORWARD_TRANSITIVE",
    "FULL_TRANSITIVE",
]
AutoUpdateStrategy: TypeAlias = Literal[
    "AutoUpdateDisabled",
    "Backward",
    "Forward",
    "Full",
    "AlwaysCompatible",
    "BackwardTransitive",
    "ForwardTransitive",
    "FullTransitive",
]
"""The older way to say which changes of a schema a namespace takes."""
QuotaType: TypeAlias = Literal["destination_storage", "message_age"]
QuotaPolicy: TypeAlias = Literal[
    "producer_request_hold", "producer_exception", "consumer_backlog_eviction"
]
DeleteMode: TypeAlias = Literal[
    "delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"
]

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


class BacklogQuota(msgspec.Struct, frozen=True, rename="camel"):
    """A quota of what subscriptions may leave behind, and what happens when it is used up."""

    limit: SizeOrNone = UNLIMITED
    """The old name of `limit_size`: tools write one or the other, and read either."""
    limit_size: SizeOrNone | None = None
    limit_time: CountOrNone = UNLIMITED
    policy: QuotaPolicy = "producer_request_hold"

    def __post_init__(self) -> None:
        # The new name is the stronger one, where both are given.
        size = self.limit if self.limit_size is None else self.limit_size
        msgspec.structs.force_setattr(self, "limit", size)
        msgspec.structs.force_setattr(self, "limit_size", size)


def check_quotas(quotas: dict[QuotaType, BacklogQuota], retention: RetentionPolicies) -> None:
    """NotAllowed if a quota is as large as what is kept anyway: it could not be met."""
    time, size = retention.retention_time_in_minutes, retention.retention_size_in_m_b
    for kind, quota in quotas.items():
        # Nothing is kept (0), or all of it (-1): then there is nothing to compare with.
        over_size = 0 < size * _MIB <= quota.limit
        over_time = 0 < time * _SECONDS_PER_MINUTE <= quota.limit_time
        if (over_size and kind == "destination_storage") or (over_time and kind == "message_age"):
            raise NotAllowed(
                f"a backlog quota of {quota.limit} bytes and {quota.limit_time} s is not below the"
                f" retention of {size} MB and {time} minutes",
                hint="make the quota smaller, or the retention larger",
            )


class DelayedDeliveryPolicies(msgspec.Struct, frozen=True, rename="camel"):
    """The rule for messages that are to be delivered later."""

    active: bool = False
    tick_time: Size = 0
    """Milliseconds; 0: the broker's."""
    max_delivery_delay_in_millis: Size = 0
    """0: no limit."""


class PersistencePolicies(msgspec.Struct, frozen=True, rename="camel"):
    """The copies of entries on other machines; shown to tools, for there is one machine here."""

    bookkeeper_ensemble: CountOrNone = 2
    bookkeeper_write_quorum: CountOrNone = 2
    bookkeeper_ack_quorum: CountOrNone = 2
    managed_ledger_max_mark_delete_rate: float = 1.0
    managed_ledger_storage_class_name: str | None = None

    @property
    def is_consistent(self) -> bool:
        """Whether each number is possible given the one before it."""
        written, acknowledged = self.bookkeeper_write_quorum, self.bookkeeper_ack_quorum
        ordered = self.bookkeeper_ensemble >= written >= acknowledged > 0
        # A comparison is false for a number that is none, too.
        return ordered and 0 <= self.managed_ledger_max_mark_delete_rate < float("inf")


class PublishRate(msgspec.Struct, frozen=True, rename="camel"):
    """A limit of what producers of one topic send in a second; 0 or -1: none."""

    publish_throttling_rate_in_msg: CountOrNone = UNLIMITED
    publish_throttling_rate_in_byte: SizeOrNone = UNLIMITED


class DispatchRate(msgspec.Struct, frozen=True, rename="camel"):
    """A limit of what consumers get in one period; 0 or -1: none."""

    dispatch_throttling_rate_in_msg: CountOrNone = UNLIMITED
    dispatch_throttling_rate_in_byte: SizeOrNone = UNLIMITED
    rate_period_in_second: Seconds = 1
    relative_to_publish_rate: bool = False
    """Whether the rate of publishing is added to it."""


class SubscribeRate(msgspec.Struct, frozen=True, rename="camel"):
    """A limit of how often one consumer may subscribe in one period; 0 or -1: none."""

    subscribe_throttling_rate_per_consumer: CountOrNone = UNLIMITED
    rate_period_in_second: Seconds = 30


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

    inactive_topic_delete_mode: DeleteMode = "delete_when_no_subscriptions"
    # Pulsar's brokerDeleteInactiveTopicsMaxInactiveDurationSeconds. Unlike there, nothing is
    # deleted unless a policy says so: data goes only at somebody's wish.
    max_inactive_duration_seconds: int = 60
    delete_while_inactive: bool = False


class SubscriptionPolicies(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The policies of one subscription of a topic."""

    dispatch_rate: DispatchRate | None = None


class BookieAffinity(msgspec.Struct, frozen=True, rename="camel"):
    """The groups of machines that are to keep a namespace; shown to tools, for there is one."""

    bookkeeper_affinity_group_primary: str | None = None
    bookkeeper_affinity_group_secondary: str | None = None


class ResourceQuota(msgspec.Struct, frozen=True, rename="camel"):
    """The share of a broker that a bundle is expected to need; shown to tools, for there is one."""

    msg_rate_in: Rate = 40.0
    msg_rate_out: Rate = 120.0
    bandwidth_in: Rate = 100_000.0
    bandwidth_out: Rate = 300_000.0
    memory: Rate = 80.0
    dynamic: bool = True


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
