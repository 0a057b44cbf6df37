"""Pure: named limits. Everything that queues, waits or grows has one here.

Owns: `Limits`, whose fields are the limits (name, default, unit, what it bounds), and the check
of overridden values. A field with a unit of bytes, records, files, ... bounds memory or disk; one
in seconds bounds a wait or an interval.

Invariants:
1. A limit's name is its field: a duplicate cannot exist.
2. Every value is above 0, and whole unless its unit is seconds.
3. `docs/reference/limits.md` lists every one of them (a test compares).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import isfinite
from typing import Final, NamedTuple, TypeVar

from magnetar.errors import ConfigError

Number = TypeVar("Number", int, float)

_MIB: Final = 1024 * 1024


class Limit(NamedTuple):
    """One limit, as documentation and the command line show it."""

    name: str
    default: int | float
    unit: str
    doc: str


def _limit(default: Number, unit: str, doc: str) -> Number:
    return field(default=default, metadata={"unit": unit, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one instance; every component takes the whole and reads its own."""

    # The journal: what waits for a sync, what one sync takes, and how much disk the files are.
    journal_file_bytes: int = _limit(32 * _MIB, "bytes", "size of one journal file")
    journal_files_max: int = _limit(8, "files", "journal files on disk, recycled ones included")
    journal_queue_bytes: int = _limit(
        64 * _MIB, "bytes", "records submitted to the journal and not yet durable"
    )
    journal_room_seconds: float = _limit(
        30.0, "seconds", "how long a batch may wait for a journal file to be recycled"
    )
    journal_batch_bytes: int = _limit(4 * _MIB, "bytes", "written by one sync of the journal")
    journal_batch_records: int = _limit(8192, "records", "made durable by one sync of the journal")

    # The metadata store: how far SQLite may be behind the journal, and what scans and watches hold.
    metadata_apply_records: int = _limit(
        5000, "records", "changes moved to SQLite in one transaction"
    )
    metadata_unapplied_records: int = _limit(
        100_000, "records", "durable changes that SQLite does not hold yet"
    )
    metadata_snapshots: int = _limit(16, "scans", "open scans at a time")
    metadata_scan_seconds: float = _limit(60.0, "seconds", "how long one scan may stay open")
    watch_queue_events: int = _limit(
        4096, "events", "waiting in one watch; beyond that its reader gets a resync"
    )
    sequence_cache_entries: int = _limit(
        10_000, "entries", "sequence prefixes whose highest key is kept in memory"
    )

    # Ledgers: memory for readers, and how soon entries go from the journal to their own files.
    ledger_cache_bytes: int = _limit(64 * _MIB, "bytes", "entries kept in memory for readers")
    ledger_open_files: int = _limit(512, "files", "ledger files open at a time")
    storage_settle_seconds: float = _limit(
        1.0, "seconds", "how long durable records may wait to be moved to their homes"
    )

    # The disk. Below the floor (the smaller of the two) no messages are taken. It has to hold what
    # the journal may still grow by and bring home; a disk of a few MiB keeps most of them for use.
    disk_floor_bytes: int = _limit(
        1024 * _MIB, "bytes", "free on the disk before publishes are refused"
    )
    disk_floor_percent: int = _limit(
        5, "percent", "of the disk free before publishes are refused, if that is less"
    )
    disk_reserve_bytes: int = _limit(
        32 * _MIB, "bytes", "kept for acknowledgements and deletes on a full disk"
    )

    # Managed ledgers and cursors. One write of a cursor a second is Pulsar's default
    # (managedLedgerDefaultMarkDeleteRateLimit), and four hours are its time to roll a ledger over.
    cursor_flush_seconds: float = _limit(
        1.0, "seconds", "how long an acknowledgement may wait for the next cursor write"
    )
    cursor_record_bytes: int = _limit(
        262_144, "bytes", "one metadata record of a cursor; a larger state is split"
    )
    managed_ledger_ledger_bytes: int = _limit(
        512 * _MIB, "bytes", "in one ledger before the next one is begun"
    )
    managed_ledger_ledger_seconds: float = _limit(
        4 * 3600.0, "seconds", "age of one ledger before the next one is begun"
    )
    managed_ledger_ledger_entries: int = _limit(
        5_000_000, "entries", "in one ledger before the next one is begun"
    )
    managed_ledger_pending_appends: int = _limit(
        100_000, "entries", "appended to one managed ledger and not yet durable"
    )

    # Connections. Keep-alive (30 s), liveness check (5 s) and pending
    # publishes (1000) are Pulsar's defaults, which its clients expect.
    connections_max: int = _limit(10_000, "connections", "clients connected at a time")
    admin_connections_max: int = _limit(128, "connections", "to the admin interface open at a time")
    admin_request_seconds: float = _limit(
        15.0, "seconds", "for a request to arrive at the admin interface, and between two"
    )
    connection_handshake_seconds: float = _limit(
        30.0, "seconds", "from the opening of a connection to the end of its handshake"
    )
    connection_keepalive_seconds: float = _limit(
        30.0, "seconds", "between two pings of a connection, and for the answer to one"
    )
    connection_liveness_seconds: float = _limit(
        5.0, "seconds", "for a client to answer when another one wants its place"
    )
    connection_frame_seconds: float = _limit(
        120.0, "seconds", "from the first bytes of a frame to its end"
    )
    unfinished_frame_bytes: int = _limit(
        256 * _MIB, "bytes", "of frames that have not arrived as a whole, over all connections"
    )
    connection_pending_publishes: int = _limit(
        1000, "entries", "sent on one connection and not yet durable"
    )
    connection_requests_max: int = _limit(
        1000, "requests", "of one connection being answered at a time"
    )
    connection_handles_max: int = _limit(
        20_000, "handles", "producers, consumers and topic watches of one connection"
    )
    client_name_bytes: int = _limit(1024, "bytes", "in the name of one producer or consumer")
    # Pulsar's maxConsumerMetadataSize.
    client_metadata_bytes: int = _limit(
        1024, "bytes", "in the metadata of one producer or consumer, keys and values"
    )
    connection_write_bytes: int = _limit(
        _MIB, "bytes", "written to one connection and not yet taken by its client"
    )

    # Dispatch. The limits of unacknowledged messages are those of Pulsar; an
    # outbox is what a consumer that does not read costs the broker.
    consumer_outbox_bytes: int = _limit(
        _MIB, "bytes", "offered to one consumer and not yet taken by its connection"
    )
    consumer_outbox_entries: int = _limit(
        5000, "entries", "offered to one consumer and not yet taken by its connection"
    )
    consumer_unacked_messages: int = _limit(
        50_000, "messages", "at one consumer of a Shared or Key_Shared subscription, unacknowledged"
    )
    subscription_unacked_messages: int = _limit(
        200_000, "messages", "at all consumers of a Shared or Key_Shared subscription, unacked"
    )
    subscription_read_entries: int = _limit(
        500, "entries", "read at a time for the consumers of one subscription"
    )
    subscription_read_bytes: int = _limit(
        _MIB, "bytes", "read at a time for the consumers of one subscription"
    )
    subscription_look_ahead_entries: int = _limit(
        2000, "entries", "passed over because their key's consumer cannot take them (Key_Shared)"
    )
    subscription_delayed_entries: int = _limit(
        2_000_000, "entries", "that wait for their time on one subscription; more are not read"
    )
    expiry_check_seconds: float = _limit(
        300.0, "seconds", "between two looks for messages and subscriptions whose time is over"
    )
    compaction_check_seconds: float = _limit(
        60.0, "seconds", "between two looks for topics that are to be compacted"
    )
    compaction_keys: int = _limit(
        1_000_000, "keys", "of one topic while it is compacted; only one is at a time"
    )
    compaction_messages_per_second: int = _limit(
        160_000, "messages", "compacted in a second, but for the time that the work takes"
    )
    command_ids_max: int = _limit(
        50_000, "message ids", "in one ACK or REDELIVER_UNACKNOWLEDGED_MESSAGES"
    )
    subscribe_ranges_max: int = _limit(
        2048, "hash ranges", "that one consumer of a Key_Shared subscription names"
    )
    subscribe_rate_consumers: int = _limit(
        10_000, "consumers", "of one topic whose requests to subscribe are counted for a rate"
    )
    ack_set_words: int = _limit(
        2048, "words", "of 64 messages in the batch-index set of one acknowledgement"
    )
    failover_switch_seconds: float = _limit(
        1.0, "seconds", "a new active consumer waits for the acknowledgements of the former one"
    )

    # Ranges: a client asks for as much as it wants, and gets no more than this in one answer.
    range_page_bytes: int = _limit(_MIB, "bytes", "of entries in one answer to RANGE_READ")
    range_page_entries: int = _limit(20_000, "entries", "in one answer to RANGE_READ")
    range_scan_entries: int = _limit(
        50_000, "entries", "looked at for one command of ranges, before it answers with a part"
    )
    range_topics_max: int = _limit(10_000, "topics", "named in one command of ranges")
    range_poll_seconds: float = _limit(60.0, "seconds", "a command of ranges may wait for news")
    connection_range_polls_max: int = _limit(
        100, "polls", "of one connection that wait for news of ranges"
    )

    # Scalable topics: consumer groups, auto-scale, and how long sealed segments are kept. A merge
    # needs rates far below those of a split, or a topic would go to and fro between the two.
    scalable_grace_period_seconds: float = _limit(
        60.0, "seconds", "a lost consumer of a scalable topic keeps its segments"
    )
    scalable_auto_scale_interval_seconds: float = _limit(
        60.0, "seconds", "between two decisions to split or merge segments of a topic"
    )
    scalable_load_report_interval_seconds: float = _limit(
        10.0, "seconds", "between two measurements of the load of a segment"
    )
    scalable_load_report_change_percent: int = _limit(
        25, "percent", "a rate of a segment may move before it is reported again"
    )
    scalable_max_segments: int = _limit(
        64, "segments", "active in one topic before auto-scale stops splitting"
    )
    scalable_min_segments: int = _limit(
        1, "segments", "active in one topic before auto-scale stops merging"
    )
    scalable_max_dag_depth: int = _limit(
        10, "merges", "in the history of a segment before auto-scale stops merging it"
    )
    scalable_entry_bucket_budget: int = _limit(
        4, "buckets", "entry buckets that the first segments of a topic share"
    )
    scalable_split_cooldown_seconds: float = _limit(
        60.0, "seconds", "between two automatic splits of a topic, at least"
    )
    scalable_merge_cooldown_seconds: float = _limit(
        300.0, "seconds", "between two automatic merges of a topic, at least"
    )
    scalable_merge_window_seconds: float = _limit(
        300.0, "seconds", "a segment must exist and be cold before it is merged"
    )
    scalable_split_msg_rate_in: int = _limit(
        10_000, "messages/s", "taken by one segment before it is split"
    )
    scalable_split_bytes_rate_in: int = _limit(
        50_000_000, "bytes/s", "taken by one segment before it is split"
    )
    scalable_split_msg_rate_out: int = _limit(
        50_000, "messages/s", "given by one segment before it is split"
    )
    scalable_split_bytes_rate_out: int = _limit(
        250_000_000, "bytes/s", "given by one segment before it is split"
    )
    scalable_merge_msg_rate_in: int = _limit(
        1000, "messages/s", "taken by segments that are merged, less than this"
    )
    scalable_merge_bytes_rate_in: int = _limit(
        5_000_000, "bytes/s", "taken by segments that are merged, less than this"
    )
    scalable_merge_msg_rate_out: int = _limit(
        5000, "messages/s", "given by segments that are merged, less than this"
    )
    scalable_merge_bytes_rate_out: int = _limit(
        25_000_000, "bytes/s", "given by segments that are merged, less than this"
    )
    scalable_sealed_seconds: float = _limit(
        3600.0, "seconds", "a sealed segment is kept at least, for readers without a subscription"
    )
    scalable_total_segments_max: int = _limit(
        1024, "segments", "in one topic, sealed ones that are still kept included"
    )
    scalable_group_members_max: int = _limit(1000, "consumers", "in one group of a scalable topic")
    scalable_controller_wait_seconds: float = _limit(
        10.0, "seconds", "for the controller of a scalable topic to do what was asked"
    )
    scalable_change_txn_wait_seconds: float = _limit(
        5.0, "seconds", "a split or merge waits for the transactions that are open on its segments"
    )

    # Transactions: what open ones may hold, and how long ended ones are remembered.
    txn_open_per_owner_max: int = _limit(
        100_000, "transactions", "of one owner that are open at a time at one broker"
    )
    txn_participants_max: int = _limit(
        10_000, "participants", "topics and subscriptions of one transaction at one broker"
    )
    txn_pending_acks_max: int = _limit(
        500_000, "entries", "of one subscription acknowledged in transactions that are open"
    )
    txn_ack_records_max: int = _limit(
        100_000, "records", "of acknowledgements of one transaction on one subscription"
    )
    txn_open_per_coordinator_max: int = _limit(
        100_000, "transactions", "of the legacy kind that one coordinator has open at a time"
    )
    txn_finished_per_coordinator_max: int = _limit(
        10_000, "transactions", "of the legacy kind whose outcome one coordinator remembers"
    )
    txn_end_wait_seconds: float = _limit(
        30.0, "seconds", "for all topics and subscriptions to end a legacy transaction"
    )
    txn_timeout_max_seconds: float = _limit(
        86_400.0, "seconds", "a transaction may stay open at most, as its client asks"
    )
    txn_retention_seconds: float = _limit(
        900.0, "seconds", "the outcome of a transaction is kept at least"
    )
    txn_collect_seconds: float = _limit(
        60.0, "seconds", "between two collections of transactions that are no longer kept"
    )
    txn_group_commit_max: int = _limit(
        10_000, "transactions", "decided by one commit of a transaction group"
    )
    txn_group_aborted_max: int = _limit(
        5000, "transactions", "of one group aborted one by one and not yet noted as such"
    )
    txn_group_retired_max: int = _limit(
        100, "runs", "and generations of a transaction group that are known to be over"
    )
    txn_group_retention_seconds: float = _limit(
        14 * 86_400.0, "seconds", "a transaction group is remembered after its last use"
    )

    close_seconds: float = _limit(30.0, "seconds", "how long a component may take to close")

    def __post_init__(self) -> None:
        for each in all_limits():
            _check(each, getattr(self, each.name))

    def override(self, values: Mapping[str, object]) -> Limits:
        """Give limits other values, as configuration has them: names and values are checked."""
        known = {each.name: each for each in all_limits()}
        changes: dict[str, int | float] = {}
        for name, value in values.items():
            if name not in known:
                # Mostly a misspelt name: ignoring it would leave the default in force unnoticed.
                raise ConfigError(f"there is no limit {name!r}", hint=_nearest(name, known))
            changes[name] = _check(known[name], value)
        return replace(self, **changes)  # type: ignore[arg-type]  # _check saw to the types


def all_limits() -> tuple[Limit, ...]:
    """Every limit, in the order of definition."""
    found = []
    for each in fields(Limits):
        assert isinstance(each.default, int | float), f"limit {each.name} has no default"
        found.append(Limit(each.name, each.default, each.metadata["unit"], each.metadata["doc"]))
    return tuple(found)


def _check(limit: Limit, value: object) -> int | float:
    whole = isinstance(limit.default, int)
    # `True` is an int in Python, and no limit.
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"limit {limit.name} must be {kind} of {limit.unit}, not {value!r}")
    # Invariant 2: "no limit" cannot be said; everything that queues has an end.
    if value <= 0 or not isfinite(value):
        raise ConfigError(f"limit {limit.name} must be above 0 and finite, not {value!r}")
    return value


def _nearest(name: str, known: Mapping[str, Limit]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?"
