"""`/metrics`: our own registry, and the series by namespace and topic that Pulsar's tools read.

Owns: the `pulsar_*` series. They are made at the scrape, from the layouts of scalable topics, the
statistics of the topics that are loaded, and what this broker knows of transactions, so they cost
nothing in between.

Invariants:
1. All series of a name stand together, behind one TYPE line.
2. A scrape of many topics lets other work run: it pauses after every few of them.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Final

from aiohttp import web
from prometheus_client import Counter

from magnetar.broker.policy.stats import TopicStats
from magnetar.broker.subscribe.subscription import TYPE_NAMES, Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime import metrics
from magnetar.scalable.records import LayoutRecord, ScalableRecord, segment_topic
from magnetar.server.admin import endpoints
from magnetar.server.admin.brokers.brokers import check_ready
from magnetar.server.admin.exchange import AdminServer, server_of
from magnetar.server.admin.transactions.places import lag_of
from magnetar.txn.records import OPS, State

# Few enough that no client notices the pause (invariant 2).
_TOPICS_PER_TURN: Final = 50
_SHARED_BY_BUCKETS: Final = TYPE_NAMES[SubscriptionType.KEY_SHARED]

# Everything else is a gauge. Names ending in _count are counters here where Pulsar's are.
_COUNTERS: Final = frozenset(
    {
        "pulsar_in_messages_total",
        "pulsar_in_bytes_total",
        "pulsar_out_messages_total",
        "pulsar_out_bytes_total",
        "pulsar_txn_created_total",
        "pulsar_txn_committed_total",
        "pulsar_txn_aborted_total",
        "pulsar_txn_timeout_total",
        "pulsar_txn_append_log_total",
        "pulsar_txn_tb_committed_total",
        "pulsar_txn_tb_aborted_total",
        "pulsar_txn_tp_committed_count",
        "pulsar_txn_tp_aborted_count",
    }
)

# Counting costs a scan of keys; beyond this the exact number says no more than "too many".
_OPS_COUNTED_MAX: Final = 10_000


class Series:
    """The text of one scrape, collected by name."""

    def __init__(self, cluster: str) -> None:
        self._cluster = _escaped(cluster)
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        # In the order given: equal label sets make equal series.
        text = "".join(f',{label}="{_escaped(each)}"' for label, each in labels.items())
        line = f'{name}{{cluster="{self._cluster}"{text}}} {value}'
        self._lines.setdefault(name, []).append(line)

    def render(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            # Invariant 1: one TYPE line per name, whatever order topics came in.
            kind = "counter" if name in _COUNTERS else "gauge"
            parts += [f"# TYPE {name} {kind}", *lines]
        return "\n".join(parts) + "\n" if parts else ""


async def scrape(request: web.Request) -> web.Response:
    server = server_of(request)
    await check_ready(server)  # many take the first answer here for the readiness of the broker
    series = Series(server.config.cluster)
    by_namespace: dict[str, int] = {}
    # A list: topics are loaded and unloaded in the pauses.
    for number, topic in enumerate(list(server.topics.loaded.values()), start=1):
        _add_topic(series, topic.name, topic.stats())
        # Non-persistent topics, and brokers without transactions, have no such series.
        if isinstance(topic, Topic) and topic.transactions is not None:
            _add_buffers(series, topic)
            for subscription in topic.subscriptions.values():
                _add_acks(series, topic, subscription)
        namespace = str(topic.name.namespace)
        by_namespace[namespace] = by_namespace.get(namespace, 0) + 1
        if number % _TOPICS_PER_TURN == 0:
            await asyncio.sleep(0)
    _add_namespaces(series, by_namespace.items())
    await _add_scalable_topics(series, server)
    await _add_transactions(series, server)
    body = metrics.render() + series.render().encode()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


def _add_namespaces(series: Series, counts: Iterable[tuple[str, int]]) -> None:
    for namespace, count in counts:
        series.add("pulsar_topics_count", count, namespace=namespace)


def _add_topic(series: Series, name: TopicName, stats: TopicStats) -> None:
    labels = {"namespace": str(name.namespace), "topic": str(name)}
    subscriptions = stats.subscriptions
    # Names and meanings are Pulsar's, so that its dashboards work as they are.
    values = {
        "pulsar_subscriptions_count": len(subscriptions),
        "pulsar_producers_count": len(stats.publishers),
        "pulsar_consumers_count": sum(len(each.consumers) for each in subscriptions.values()),
        "pulsar_rate_in": stats.msg_rate_in,
        "pulsar_rate_out": stats.msg_rate_out,
        "pulsar_throughput_in": stats.msg_throughput_in,
        "pulsar_throughput_out": stats.msg_throughput_out,
        "pulsar_storage_size": stats.storage_size,
        "pulsar_storage_backlog_size": stats.backlog_size,
        "pulsar_msg_backlog": sum(each.msg_backlog for each in subscriptions.values()),
        "pulsar_in_messages_total": stats.msg_in_counter,
        "pulsar_in_bytes_total": stats.bytes_in_counter,
        "pulsar_out_messages_total": stats.msg_out_counter,
        "pulsar_out_bytes_total": stats.bytes_out_counter,
    }
    for metric, value in values.items():
        series.add(metric, value, **labels)
    # Per subscription only what alerts are made of: there may be very many of them.
    for subscription, each in subscriptions.items():
        own = {**labels, "subscription": subscription}
        series.add("pulsar_subscription_back_log", each.msg_backlog, **own)
        series.add("pulsar_subscription_unacked_messages", each.unacked_messages, **own)
        series.add("pulsar_subscription_msg_rate_out", each.msg_rate_out, **own)
        series.add("pulsar_subscription_msg_rate_redeliver", each.msg_rate_redeliver, **own)


# --- transactions


def _add_acks(series: Series, topic: Topic, subscription: Subscription) -> None:
    """Add a subscription that had acknowledgements in transactions since it was loaded."""
    acks = subscription.transactional_acks
    # Absent instead of zero: most topics never see a transaction.
    if acks is None or not (acks.held or acks.ends):
        return
    labels = {"namespace": str(topic.name.namespace), "topic": str(topic.name)}
    labels["subscription"] = subscription.name
    series.add("pulsar_txn_tp_committed_count", acks.ends["COMMITTED"], **labels)
    series.add("pulsar_txn_tp_aborted_count", acks.ends["ABORTED"], **labels)
    series.add("pulsar_txn_tp_pending_acks", acks.held, **labels)


def _add_buffers(series: Series, topic: Topic) -> None:
    """Add a topic that had a transaction of either kind since it was loaded."""
    ends: collections.Counter[State] = collections.Counter()
    for buffer in (topic.transactions, topic.legacy_transactions):
        if buffer is not None:
            ends += buffer.ends
    if not topic.undecided and not ends:
        return
    labels = {"namespace": str(topic.name.namespace), "topic": str(topic.name)}
    series.add("pulsar_txn_tb_active_total", topic.undecided, **labels)
    series.add("pulsar_txn_tb_committed_total", ends["COMMITTED"], **labels)
    series.add("pulsar_txn_tb_aborted_total", ends["ABORTED"], **labels)
    held = sum(each.held for each in topic.producers.connected.values())
    series.add("pulsar_txn_tb_held_sends", held, **labels)
    # A maxReadPosition that nobody holds has no lag.
    if topic.undecided:
        lag = lag_of(topic)
        series.add("pulsar_txn_tb_ceiling_lag_entries", lag.entries, **labels)
        series.add("pulsar_txn_tb_ceiling_lag_bytes", lag.size_bytes, **labels)


async def _add_transactions(series: Series, server: AdminServer) -> None:
    if not server.context.has_transactions:
        return
    begun = _by_coordinator(metrics.TXN_BEGUN)
    logged = _by_coordinator(metrics.TXN_LOG_APPENDS)
    ended = {
        outcome: _by_coordinator(metrics.TXN_ENDED, outcome=outcome)
        for outcome in ("committed", "aborted", "timeout")
    }
    # Coordinators that this broker leads; each is counted by whoever leads it.
    for number, count in server.context.coordinators.open_by_coordinator().items():
        own = str(number)
        values = {
            "pulsar_txn_active_count": count,
            "pulsar_txn_created_total": begun.get(own, 0),
            "pulsar_txn_committed_total": ended["committed"].get(own, 0),
            # One that timed out was aborted, too.
            "pulsar_txn_aborted_total": ended["aborted"].get(own, 0) + ended["timeout"].get(own, 0),
            "pulsar_txn_timeout_total": ended["timeout"].get(own, 0),
            "pulsar_txn_append_log_total": logged.get(own, 0),
        }
        for metric, value in values.items():
            series.add(metric, value, coordinator_id=own)
    for bound, ended_within in _latencies():
        series.add(f"pulsar_txn_execution_latency_le_{bound}", ended_within)
    left = len(await server.metadata.scan_keys(OPS, limit=_OPS_COUNTED_MAX))
    series.add("pulsar_txn_metadata_store_outstanding_op_records", left)


def _latencies() -> Iterator[tuple[str, float]]:
    """How many transactions took up to so many milliseconds, and longer than the bound before."""
    before = 0.0
    for family in metrics.TXN_OPEN_SECONDS.collect():
        # Prometheus' buckets are cumulative, Pulsar's are not: the difference to the one before.
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                name = f"{bound * 1000:.0f}" if isfinite(bound) else "overflow"
                yield name, sample.value - before
                before = sample.value


def _by_coordinator(counter: Counter, **wanted: str) -> dict[str, float]:
    """The values of a counter with these labels, by coordinator."""
    return {
        sample.labels["coordinator_id"]: sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and wanted.items() <= sample.labels.items()
    }


# --- scalable topics


async def _add_scalable_topics(series: Series, server: AdminServer) -> None:
    if not server.context.has_scalable:
        return
    # A copy: layouts come and go in the pauses.
    records = list(server.context.scalable.layouts.records.values())
    for number, record in enumerate(records, start=1):
        if record.layout is not None:
            _add_scalable(series, server, record, record.layout)
        if number % _TOPICS_PER_TURN == 0:
            await asyncio.sleep(0)


def _add_scalable(
    series: Series, server: AdminServer, record: ScalableRecord, layout: LayoutRecord
) -> None:
    topic = record.topic
    labels = {"namespace": str(topic.namespace), "topic": record.name}
    states = [each.state for each in layout.segments]
    active = states.count("ACTIVE")
    values = {
        "pulsar_scalable_topic_epoch": layout.epoch,
        "pulsar_scalable_topic_active_segments": active,
        "pulsar_scalable_topic_sealed_segments": len(states) - active,
        "pulsar_scalable_topic_pruned_segments": layout.next_segment_id - len(states),
        "pulsar_scalable_topic_change_under_way": int(record.change is not None),
    }
    for metric, value in values.items():
        series.add(metric, value, **labels)
    for segment in layout.layout().segments.values():
        # Segments on other brokers are told by those.
        loaded = server.topics.loaded.get(segment_topic(topic, segment))
        if loaded is not None:
            _add_segment(series, labels, segment, loaded.stats())


def _add_segment(
    series: Series, labels: dict[str, str], segment: Segment, stats: TopicStats
) -> None:
    """Add a segment that is loaded here."""
    own = {**labels, "segment": str(segment.segment_id), "state": segment.state.value.lower()}
    subscriptions = stats.subscriptions.values()
    # Segments that several consumers share by entry buckets.
    shared = [len(each.consumers) for each in subscriptions if each.type == _SHARED_BY_BUCKETS]
    values = {
        "pulsar_scalable_segment_rate_in": stats.msg_rate_in,
        "pulsar_scalable_segment_rate_out": stats.msg_rate_out,
        "pulsar_scalable_segment_throughput_in": stats.msg_throughput_in,
        "pulsar_scalable_segment_throughput_out": stats.msg_throughput_out,
        "pulsar_scalable_segment_storage_size": stats.storage_size,
        "pulsar_scalable_segment_msg_backlog": sum(each.msg_backlog for each in subscriptions),
        "pulsar_scalable_segment_producers": len(stats.publishers),
        "pulsar_scalable_segment_consumers": sum(len(each.consumers) for each in subscriptions),
        "pulsar_scalable_segment_entry_buckets": segment.bucket_count,
        "pulsar_scalable_segment_sharers": max(shared, default=0),
    }
    for metric, value in values.items():
        series.add(metric, value, **own)


def _escaped(text: str) -> str:
    # In this order: a backslash that stands for another character must not be escaped again.
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


ROUTES: Final = (endpoints.get("/metrics", scrape), endpoints.get("/metrics/", scrape))
