"""Statistics of topics: counters, rates over windows, and their JSON shapes.

Owns: `Rate`, and the structures of the admin interface's topic statistics (the field names are
those that Pulsar's tools read).

Invariants:
1. A rate is that of the last whole window; before the first one has passed, of the time so far.
2. Reading statistics changes nothing but closes a window that is over.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import msgspec

from magnetar.broker.policy.effective import PolicySource, TopicPolicies
from magnetar.model.isolation import ReadIsolation
from magnetar.runtime.clock import Clock

# Pulsar updates its rates as often (statsUpdateFrequencyInSecs).
WINDOW_S: Final = 60.0


class Rate:
    """Per second, of a total that only grows."""

    __slots__ = ("_clock", "_rate", "_since", "_total")

    def __init__(self, clock: Clock, total: float = 0) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._total = total
        self._rate: float | None = None

    def of(self, total: float) -> float:
        """The rate, given the present total."""
        now = self._clock.monotonic()
        elapsed = now - self._since
        # The window is over: its rate stands until the next one is, so that two readers see the
        # same.
        if elapsed >= WINDOW_S:
            self._rate = (total - self._total) / elapsed
            self._since = now
            self._total = total
        if self._rate is not None:
            return self._rate
        return (total - self._total) / elapsed if elapsed > 0 else 0.0


def time_text(ms: int) -> str:
    """A wall time as the admin interface writes it."""
    moment = datetime.fromtimestamp(ms / 1000, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class PublisherStats(msgspec.Struct, rename="camel", kw_only=True):
    """One producer."""

    producer_id: int
    producer_name: str
    access_mode: str
    msg_rate_in: float = 0.0
    msg_throughput_in: float = 0.0
    average_msg_size: float = 0.0
    address: str = ""
    connected_since: str = ""
    client_version: str = ""
    metadata: dict[str, str] = {}


class ConsumerStats(msgspec.Struct, rename="camel", kw_only=True):
    """One consumer."""

    consumer_name: str
    available_permits: int = 0
    unacked_messages: int = 0
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    msg_rate_redeliver: float = 0.0
    msg_out_counter: int = 0
    bytes_out_counter: int = 0
    last_consumed_flow_timestamp: int = 0
    """When it last gave permits; 0: it gave none yet."""
    blocked_consumer_on_unacked_msgs: bool = False
    key_hash_ranges: list[str] = []
    address: str = ""
    connected_since: str = ""
    client_version: str = ""
    metadata: dict[str, str] = {}


class SubscriptionStats(msgspec.Struct, rename="camel", kw_only=True):
    """One subscription."""

    type: str = ""
    msg_backlog: int = 0
    msg_backlog_no_delayed: int = 0
    """Those that do not wait for their time."""
    msg_delayed: int = 0
    """Those that do, as far as they were read for consumers of the present connection."""
    delayed_message_index_size_in_bytes: int = 0
    """Memory that it takes to know them, estimated."""
    unacked_messages: int = 0
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    msg_rate_redeliver: float = 0.0
    msg_rate_expired: float = 0.0
    total_msg_expired: int = 0
    """Entries that were too old, since the topic was loaded."""
    last_expire_timestamp: int = 0
    """When it was looked for such last; 0: not yet."""
    msg_out_counter: int = 0
    bytes_out_counter: int = 0
    msg_drop_rate: float = 0.0
    last_consumed_flow_timestamp: int = 0
    """When a consumer last gave permits since the topic was loaded; 0: none did."""
    blocked_subscription_on_unacked_msgs: bool = False
    active_consumer_name: str | None = None
    consumers: list[ConsumerStats] = []
    is_durable: bool = True
    is_replicated: bool = False
    subscription_properties: dict[str, str] = {}
    dispatch_throttled_msg_events_by_subscription_limit: int = 0
    """How often it had to wait for a rate of its own, since the topic was loaded."""
    dispatch_throttled_bytes_events_by_subscription_limit: int = 0
    dispatch_throttled_msg_events_by_topic_limit: int = 0
    """How often for the rate of its topic."""
    dispatch_throttled_bytes_events_by_topic_limit: int = 0
    consumers_after_mark_delete_position: dict[str, str] = {}
    """Consumers that wait as a whole until others have acknowledged: none ever does, since single
    hashes are held back in their place (PIP-379)."""
    read_isolation: str = ReadIsolation.COMMITTED.value
    """Ours: whether it gets messages of transactions that are undecided or aborted."""


class RetentionStats(msgspec.Struct, frozen=True, rename="camel"):
    """The retention in force for messages that no subscription needs; ours. None: no limit."""

    seconds: float | None
    size_bytes: int | None
    source: PolicySource = msgspec.field(name="from")
    """Who set it."""

    @classmethod
    def of(cls, policies: TopicPolicies) -> RetentionStats:
        return cls(*policies.retention, policies.retention_from)


class CompactionStats(msgspec.Struct, frozen=True, rename="camel"):
    """The compactions of a topic since it was loaded; times are in ms, 0: there was none."""

    last_compaction_removed_event_count: int = 0
    last_compaction_succeed_timestamp: int = 0
    last_compaction_failed_timestamp: int = 0
    last_compaction_duration_time_in_mills: int = 0

    def __add__(self, other: CompactionStats) -> CompactionStats:
        """Put partitions together: all that was removed, and the last times."""
        removed = (
            self.last_compaction_removed_event_count + other.last_compaction_removed_event_count
        )
        times = map(max, msgspec.structs.astuple(self)[1:], msgspec.structs.astuple(other)[1:])
        return CompactionStats(removed, *times)


class TopicStats(msgspec.Struct, rename="camel", kw_only=True):
    """One topic; of a partitioned topic, the sum over its partitions."""

    msg_rate_in: float = 0.0
    msg_throughput_in: float = 0.0
    msg_rate_out: float = 0.0
    msg_throughput_out: float = 0.0
    bytes_in_counter: int = 0
    msg_in_counter: int = 0
    bytes_out_counter: int = 0
    msg_out_counter: int = 0
    average_msg_size: float = 0.0
    topic_creation_time_stamp: int = 0
    last_publish_time_stamp: int = 0
    """0: nothing was published yet, as far as is known."""
    storage_size: int = 0
    backlog_size: int = 0
    delayed_message_index_size_in_bytes: int = 0
    publishers: list[PublisherStats] = []
    waiting_publishers: int = 0
    subscriptions: dict[str, SubscriptionStats] = {}
    deduplication_status: str = "Disabled"
    topic_epoch: int | None = None
    owner_broker: str = ""
    retention: RetentionStats | None = None
    backlog_quota_limit_size: int = -1
    """Bytes of backlog; -1: no quota."""
    backlog_quota_limit_time: int = -1
    """Seconds of its age; -1: no quota."""
    oldest_backlog_message_age_seconds: int = -1
    """As it was found for a quota by age; -1: it was not."""
    oldest_backlog_message_subscription_name: str | None = None
    publish_rate_limited_times: int = 0
    """How often a connection had to wait for the rate of publishing, since the topic was loaded."""
    compaction: CompactionStats = CompactionStats()


def with_sums(stats: TopicStats) -> TopicStats:
    """Fill in the sums and averages that follow from a topic's parts."""
    subscriptions = stats.subscriptions.values()
    stats.msg_rate_out = sum(each.msg_rate_out for each in subscriptions)
    stats.msg_throughput_out = sum(each.msg_throughput_out for each in subscriptions)
    stats.msg_out_counter = sum(each.msg_out_counter for each in subscriptions)
    stats.delayed_message_index_size_in_bytes = sum(
        each.delayed_message_index_size_in_bytes for each in subscriptions
    )
    stats.bytes_out_counter = sum(each.bytes_out_counter for each in subscriptions)
    if stats.msg_in_counter:
        stats.average_msg_size = stats.bytes_in_counter / stats.msg_in_counter
    return stats


def summed(parts: list[TopicStats]) -> TopicStats:
    """The sum over partitions: numbers add up, lists are put together."""
    total = TopicStats()
    for part in parts:
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.publishers = [*total.publishers, *part.publishers]
        total.deduplication_status = part.deduplication_status
        total.owner_broker = part.owner_broker
        latest = max(total.last_publish_time_stamp, part.last_publish_time_stamp)
        total.last_publish_time_stamp = latest
        # The partitioned topic is as old as its oldest partition.
        created = (total.topic_creation_time_stamp, part.topic_creation_time_stamp)
        total.topic_creation_time_stamp = min(filter(None, created), default=0)
        total.retention = part.retention
        total.compaction += part.compaction
        # Each partition has the quota for itself.
        total.backlog_quota_limit_size = part.backlog_quota_limit_size
        total.backlog_quota_limit_time = part.backlog_quota_limit_time
        if part.oldest_backlog_message_age_seconds > total.oldest_backlog_message_age_seconds:
            total.oldest_backlog_message_age_seconds = part.oldest_backlog_message_age_seconds
            oldest_of = part.oldest_backlog_message_subscription_name
            total.oldest_backlog_message_subscription_name = oldest_of
        for name, subscription in part.subscriptions.items():
            present = total.subscriptions.get(name)
            added = subscription if present is None else _added(present, subscription)
            total.subscriptions = {**total.subscriptions, name: added}
    # Anew from the sums: an average of averages would weigh small partitions like large ones.
    if total.msg_in_counter:
        total.average_msg_size = total.bytes_in_counter / total.msg_in_counter
    return total


def _added(one: SubscriptionStats, other: SubscriptionStats) -> SubscriptionStats:
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUBSCRIPTION_SUMMED}
    consumers = [*one.consumers, *other.consumers]
    flow = max(one.last_consumed_flow_timestamp, other.last_consumed_flow_timestamp)
    return msgspec.structs.replace(
        one, **sums, consumers=consumers, last_consumed_flow_timestamp=flow
    )


def _numbers(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    # By type: `int | None` (an epoch) is a number that must not be added up, and neither is a time
    # or a quota.
    numbers = [each.name for each in msgspec.structs.fields(kind) if each.type in (int, float)]
    others = ("_time_stamp", "_timestamp", "_limit_size", "_limit_time", "_age_seconds")
    return tuple(name for name in numbers if not name.endswith(others))


_SUMMED: Final = _numbers(TopicStats)
_SUBSCRIPTION_SUMMED: Final = _numbers(SubscriptionStats)
