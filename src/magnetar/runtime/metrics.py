"""Prometheus metrics, each defined once.

Owns: the registry of Magnetar's own metrics (not the library's global one, so an application that
embeds Magnetar decides what it exposes), and their text exposition.

Invariants:
1. A name is defined once, starts with `magnetar_` (but for the few that a proposal of Pulsar has
   named, `_ADOPTED`), and a counter's ends with `_total`.
2. Labels take values from small fixed sets: never a topic, key or address.
3. `docs/reference/metrics.md` lists every one of them (a test compares).

An increment takes a lock and about half a microsecond: hot paths count once per batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as PrometheusFamily
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX: Final = "magnetar_"
_ADOPTED: Final = "pulsar_txn_metadata_store_"
"""PIP-473 names these; whoever follows it looks for them."""

# One for the whole process: pipelines define theirs elsewhere, and are exposed together with these.
_REGISTRY: Final = CollectorRegistry()
_DEFINED: Final[dict[str, Metric]] = {}


class Metric(NamedTuple):
    """One metric, as documentation shows it."""

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...]


class _Counter(Counter):
    """A counter whose increments are known to be positive, and to have their labels."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        # The library asks for both on each of them, in as many calls again.
        self._value.inc(amount)


class _Gauge(Gauge):
    """A gauge that has its labels."""

    def set(self, value: float) -> None:
        self._value.set(value)


class _Histogram(Histogram):
    """A histogram that has its labels."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


def counter(name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
    """Define a count that only grows; its name ends with `_total`."""
    if not name.endswith("_total"):
        raise ValueError(f"counter {name} must end with _total")
    _define(Metric(name, "counter", doc, tuple(labels)))
    return _Counter(name, doc, labels, registry=_REGISTRY)


def gauge(name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
    """Define a value that goes up and down."""
    _define(Metric(name, "gauge", doc, tuple(labels)))
    return _Gauge(name, doc, labels, registry=_REGISTRY)


def histogram(
    name: str, doc: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
) -> Histogram:
    """Define a distribution; `buckets` are upper bounds, ascending."""
    _define(Metric(name, "histogram", doc, tuple(labels)))
    return _Histogram(name, doc, labels, registry=_REGISTRY, buckets=buckets)


def all_metrics() -> tuple[Metric, ...]:
    """Every metric, in the order of definition."""
    return tuple(_DEFINED.values())


def render() -> bytes:
    """All values in Prometheus' text format (`CONTENT_TYPE`)."""
    return generate_latest(_WithoutCreationTimes())


class _WithoutCreationTimes(Collector):
    """The registry without the `_created` series, which would double the output."""

    def collect(self) -> Iterator[PrometheusFamily]:
        for family in _REGISTRY.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


def _define(metric: Metric) -> None:
    if not metric.name.startswith((_PREFIX, _ADOPTED)):
        raise ValueError(f"metric {metric.name} must start with {_PREFIX}")
    if metric.name in _DEFINED:
        raise ValueError(f"metric {metric.name} is defined twice")
    _DEFINED[metric.name] = metric


# --- storage ---

# From a sync that a cache of the disk answers (50 us) to a disk that is nearly stuck.
_SYNC_BUCKETS: Final = (
    *(0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)

JOURNAL_BATCHES = counter("magnetar_journal_batches_total", "Batches made durable by the journal.")
JOURNAL_RECORDS = counter("magnetar_journal_records_total", "Records made durable by the journal.")
JOURNAL_BYTES = counter("magnetar_journal_bytes_total", "Bytes written to the journal.")
JOURNAL_SYNC_SECONDS = histogram(
    "magnetar_journal_sync_seconds",
    "Time of one write and sync of the journal.",
    buckets=_SYNC_BUCKETS,
)
JOURNAL_QUEUE_BYTES = gauge(
    "magnetar_journal_queue_bytes", "Bytes submitted to the journal and not yet durable."
)
JOURNAL_FILES = gauge("magnetar_journal_files", "Journal files on disk, recycled ones included.")

METADATA_CHANGES = counter(
    "magnetar_metadata_changes_total", "Changes acknowledged by the metadata store.", ["kind"]
)
METADATA_UNAPPLIED_RECORDS = gauge(
    "magnetar_metadata_unapplied_records", "Durable changes that SQLite does not hold yet."
)
METADATA_CONFLICTS = counter(
    "magnetar_metadata_conflicts_total", "Changes refused because the version had moved on."
)
METADATA_WATCH_RESYNCS = counter(
    "magnetar_metadata_watch_resyncs_total", "Watches whose reader was too slow and must re-read."
)

LEDGER_APPENDS = counter("magnetar_ledger_appends_total", "Entries acknowledged by ledgers.")
LEDGER_READS = counter(
    "magnetar_ledger_reads_total", "Entries read, by where they were found.", ["source"]
)
LEDGER_CACHE_BYTES = gauge("magnetar_ledger_cache_bytes", "Payload bytes in the read cache.")
LEDGER_CORRUPT_ENTRIES = counter(
    "magnetar_ledger_corrupt_entries_total", "Reads that met a damaged entry."
)
LEDGER_INDEX_REPAIRS = counter(
    "magnetar_ledger_index_repairs_total", "Ledger file indexes rebuilt from the entries."
)
CURSOR_FLUSHES = counter("magnetar_cursor_flushes_total", "Durable writes of cursor state.")
DISK_FULL = counter("magnetar_disk_full_total", "Operations refused for lack of disk space.")
DISK_FREE_BYTES = gauge("magnetar_disk_free_bytes", "Bytes free on the disk of the data folder.")
DISK_FLOOR_BYTES = gauge(
    "magnetar_disk_floor_bytes", "Bytes that have to be free for publishes to be taken."
)
DISK_RESERVE_BYTES = gauge(
    "magnetar_disk_reserve_bytes", "Bytes kept for acknowledgements and deletes on a full disk."
)
PUBLISHES_REFUSED = gauge(
    "magnetar_publishes_refused", "1 while publishes are refused, for the disk is full, else 0."
)

# --- the event loop ---

LOOP_TURN_SECONDS = histogram(
    "magnetar_loop_turn_seconds",
    "How late a timer of the event loop came: about as long as the turn that held it up.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
LOOP_LONGEST_TURN_SECONDS = gauge(
    "magnetar_loop_longest_turn_seconds", "The longest of these of the last one to two minutes."
)
LOOP_LONGEST_TURN_CPU_SECONDS = gauge(
    "magnetar_loop_longest_turn_cpu_seconds",
    "The most processor time that the loop's thread used in one of these.",
)

# --- dispatch ---

DISPATCHED_ENTRIES = counter(
    "magnetar_dispatched_entries_total", "Entries handed to consumers, repeated ones included."
)
RANGE_ENTRIES = counter(
    "magnetar_range_entries_total", "Entries given to readers of ranges, without a consumer."
)
RANGE_BYTES = counter("magnetar_range_bytes_total", "Bytes of these entries.")
OUTBOX_BYTES = gauge(
    "magnetar_outbox_bytes", "Bytes offered to consumers and not yet taken by their connections."
)
DELAYED_ENTRIES = gauge(
    "magnetar_delayed_entries", "Entries that wait for their time of delivery, by subscription."
)
EXPIRED_ENTRIES = counter(
    "magnetar_expired_entries_total", "Entries that subscriptions passed over because of their age."
)
EXPIRED_SUBSCRIPTIONS = counter(
    "magnetar_expired_subscriptions_total", "Subscriptions deleted because nobody used them."
)
EVICTED_ENTRIES = counter(
    "magnetar_evicted_entries_total",
    "Entries that subscriptions passed over because of a backlog quota.",
)
DISPATCH_THROTTLED = counter(
    "magnetar_dispatch_throttled_total",
    "Times that a subscription waited for the dispatch rate of itself or its topic.",
)
COMPACTIONS = counter(
    "magnetar_compactions_total", "Compactions of topics that ended.", ["outcome"]
)
COMPACTION_REMOVED_MESSAGES = counter(
    "magnetar_compaction_removed_messages_total",
    "Messages that compactions left out of the view of their topic.",
)
SUBSCRIPTION_FAILURES = counter(
    "magnetar_subscription_failures_total", "Subscriptions whose dispatch stopped at an error."
)
DROPPED_ENTRIES = counter(
    "magnetar_dropped_entries_total",
    "Entries of non-persistent topics that a subscription had no consumer for.",
)

# --- connections ---

CONNECTIONS = gauge("magnetar_connections", "Clients connected now.")
CONNECTIONS_OPENED = counter(
    "magnetar_connections_opened_total", "Connections that clients opened."
)
CONNECTION_PAUSES = counter(
    "magnetar_connection_pauses_total", "Times that a connection was not read: back-pressure."
)
PUBLISH_THROTTLED = counter(
    "magnetar_publish_throttled_total",
    "Times that a connection waited for the publish rate of a topic.",
)
REFUSED_COMMANDS = counter(
    "magnetar_refused_commands_total", "Commands answered with an error.", ["error"]
)

# --- scalable topics ---

SCALABLE_SPLITS = counter(
    "magnetar_scalable_splits_total", "Segments split, by who wanted it.", ["cause"]
)
SCALABLE_MERGES = counter(
    "magnetar_scalable_merges_total", "Merges of segments, by who wanted it.", ["cause"]
)
SCALABLE_SUPPRESSED = counter(
    "magnetar_scalable_suppressed_total",
    "Splits and merges that the load asked for and a rule forbade.",
    ["reason"],
)
SCALABLE_CHANGES = counter(
    "magnetar_scalable_changes_total", "Layout changes that ended, by how.", ["kind", "outcome"]
)
SCALABLE_CHANGE_SECONDS = histogram(
    "magnetar_scalable_change_seconds",
    "Time of one layout change from its intent to its commit.",
    ["kind"],
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
SCALABLE_SEALED_SEGMENTS = counter(
    "magnetar_scalable_sealed_segments_total", "Segments that were sealed."
)
SCALABLE_PRUNED_SEGMENTS = counter(
    "magnetar_scalable_pruned_segments_total", "Sealed segments that were removed."
)
SCALABLE_CONTROLLERS = gauge(
    "magnetar_scalable_controllers", "Scalable topics that this broker controls."
)
SCALABLE_CONTROLLER_FAILOVERS = counter(
    "magnetar_scalable_controller_failovers_total",
    "Times that this broker took the control of topics over from another one.",
)
SCALABLE_REBALANCES = counter(
    "magnetar_scalable_rebalances_total",
    "Times that the segments of a consumer group were dealt out anew.",
    ["kind"],
)
SCALABLE_ASSIGNMENT_CHANGES = counter(
    "magnetar_scalable_assignment_changes_total",
    "Segments that came to a consumer, or left one.",
    ["kind"],
)
SCALABLE_EXPIRED_CONSUMERS = counter(
    "magnetar_scalable_expired_consumers_total",
    "Consumers that did not come back within the grace period.",
)
SCALABLE_DRAINED_SEGMENTS = counter(
    "magnetar_scalable_drained_segments_total",
    "Sealed segments of which a subscription has acknowledged everything.",
)
SCALABLE_CONSUMERS = gauge(
    "magnetar_scalable_consumers", "Stream and checkpoint consumers connected to this broker."
)
SCALABLE_WATCHES = gauge(
    "magnetar_scalable_watches", "Watches that clients hold at this broker.", ["kind"]
)
SCALABLE_UPDATES = counter(
    "magnetar_scalable_updates_total", "Changes that clients were told unasked.", ["kind"]
)
SCALABLE_LULLS = counter(
    "magnetar_scalable_lulls_total",
    "Layout changes that sealed segments: no transaction was open (quiet), or too long (late).",
    ["outcome"],
)

# --- transactions ---

TXN_COORDINATORS = gauge(
    "magnetar_txn_coordinators", "Transaction coordinators that this broker leads."
)
TXN_OPEN = gauge("magnetar_txn_open", "Open transactions that this broker coordinates.")
TXN_HELD = gauge(
    "magnetar_txn_held", "Transactions that begin once a layout change of their topic is through."
)
TXN_BEGUN = counter(
    "magnetar_txn_begun_total", "Transactions begun at this broker.", ["coordinator_id"]
)
TXN_ENDED = counter(
    "magnetar_txn_ended_total",
    "Transactions decided at this broker, by how.",
    ["coordinator_id", "outcome"],
)
TXN_OPEN_SECONDS = histogram(
    "magnetar_txn_open_seconds",
    "Time of a transaction from its beginning to its decision.",
    # Those of `pulsar_txn_execution_latency_le_*`.
    buckets=(0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 1500.0, 3000.0),
)
TXN_LATE_SECONDS = histogram(
    "magnetar_txn_late_seconds",
    "How long after its deadline a transaction was aborted.",
    buckets=(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0),
)
TXN_LOG_APPENDS = counter(
    "magnetar_txn_log_appends_total",
    "Entries written to logs of coordinators, for legacy transactions.",
    ["coordinator_id"],
)
TXN_END_RETRIES = counter(
    "magnetar_txn_end_retries_total",
    "Topics and subscriptions that could not end a legacy transaction at once and are asked again.",
)
TXN_COLLECTED = counter(
    "magnetar_txn_collected_total", "Records of finished transactions that were removed."
)
TXN_REPAIRS = counter(
    "magnetar_txn_repairs_total",
    "Topics and subscriptions that were asked to finish a transaction that ended long ago.",
)
TXN_GROUP_COMMITS = counter(
    "magnetar_txn_group_commits_total", "Commits of transaction groups, by how.", ["outcome"]
)
TXN_OP_WRITES = counter(
    "pulsar_txn_metadata_store_op_writes_total",
    "Op records written: pins of segments, and acknowledgements.",
)
TXN_HEADER_CAS = counter(
    "pulsar_txn_metadata_store_header_cas_total",
    "Attempts to decide a transaction by its header, by how they ended.",
    ["result"],
)
TXN_INDEX_SECONDS = histogram(
    "pulsar_txn_metadata_store_index_query_seconds",
    "Time that the store took for one query of an index of transactions.",
    buckets=_SYNC_BUCKETS,
)
