"""Transactions where they take part: the segments that they write to, and what waits behind them.

Owns: what holds a segment's maxReadPosition and how much is behind it, and its JSON. "Segment" is
any topic that keeps its messages in a log.

Invariants:
1. The maxReadPosition, its holder and the end of a segment are read in one turn of the loop: they
   belong together.
2. No topic is loaded to look at it. Of one that is not loaded here the pins are told, and what the
   record of its legacy transactions says, not what is behind them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import NamedTuple

from aiohttp import web

from magnetar.broker.topic.topic import Topic
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.managed_ledger.names import encode_name
from magnetar.model.ids import Position
from magnetar.model.names import Domain, TopicName
from magnetar.scalable.records import segment_topic
from magnetar.server.admin.exchange import AdminServer, server_of
from magnetar.server.admin.scalable.state import read_record
from magnetar.server.admin.topics.topics import existing
from magnetar.server.admin.transactions.records import (
    OPS_IN_LIST_MAX,
    SCANNED_MAX,
    Json,
    TransactionRecords,
    header_json,
    java_id,
)
from magnetar.txn.ids import from_text, to_text
from magnetar.txn.legacy.stream_state import StreamRecord, stream_key
from magnetar.txn.records import WRITES_BY_SEGMENT, Pin, decode
from magnetar.wire.messages import TxnId


class Lag(NamedTuple):
    """The lag of a segment: what stands between its maxReadPosition and its end."""

    max_read_position: Position
    end: Position
    entries: int
    size_bytes: int
    """About: entries of one ledger count as equally large."""


def lag_of(topic: Topic) -> Lag:
    # One turn of the loop: nothing moves between the two (invariant 1).
    max_read_position, end = topic.max_read_position(), topic.ledger.last_position()
    entries = topic.ledger.count_between(max_read_position, end)
    # The common case has nothing behind it: no walk over ledgers.
    size = bytes_between(topic.ledger.ledger_spans, max_read_position, end) if entries else 0
    return Lag(max_read_position, end, entries, size)


def bytes_between(spans: Iterable[LedgerSpan], above: Position, through: Position) -> int:
    """About how large the entries in (above, through] are."""
    total = 0
    for span in spans:
        if not above.ledger_id <= span.ledger_id <= through.ledger_id:
            continue
        # Only the first and the last ledger are cut.
        first, last = 0, span.entries - 1
        if span.ledger_id == above.ledger_id:
            first = above.entry_id + 1
        if span.ledger_id == through.ledger_id:
            last = min(last, through.entry_id)
        if last >= first:
            total += span.size_bytes * (last - first + 1) // span.entries
    return total


async def segments_of(request: web.Request, name: TopicName) -> list[TopicName]:
    """The segments of a scalable topic, the partitions of a partitioned one, or the topic."""
    if name.domain is not Domain.TOPIC:
        return await existing(request, name)
    record = await read_record(request, name)
    assert record.layout is not None, "a record that clients see has a layout"
    # In the order of ids: parents stand before their children.
    segments = record.layout.layout().segments
    return [segment_topic(name, segments[number]) for number in sorted(segments)]


# --- what holds a maxReadPosition


class BlockingTransaction(NamedTuple):
    """The transaction that holds a maxReadPosition."""

    txn: TxnId
    bound: Position


def hold_of(topic: Topic) -> BlockingTransaction | None:
    """Which transaction of either kind holds the maxReadPosition of a topic, and from where on."""
    held = []
    # Both kinds may hold it at once; the lower bound is the one that counts.
    for buffer in (topic.transactions, topic.legacy_transactions):
        if buffer is not None:
            txn, bound = buffer.blocker(), buffer.lowest_bound()
            if txn is not None and bound is not None:
                held.append(BlockingTransaction(txn, bound))
    return _lowest(held)


def _lowest(held: Iterable[BlockingTransaction]) -> BlockingTransaction | None:
    return min(held, key=lambda each: each.bound, default=None)


async def blocked_json(request: web.Request, segment: TopicName) -> Json:
    """Which transaction holds the maxReadPosition of a segment, if any, and what is behind it."""
    server = server_of(request)
    found: Json = {"segment": str(segment), "loaded": False, "open": None}
    found |= {"ceiling": None, "end": None, "entriesBehind": None, "bytesBehind": None}
    topic = server.topics.loaded.get(segment)
    # Loaded here: all of it is known, and belongs to one moment.
    if isinstance(topic, Topic) and topic.transactions is not None:
        lag, hold = lag_of(topic), hold_of(topic)
        found |= {
            "loaded": True,
            "open": topic.undecided,
            "ceiling": str(lag.max_read_position),
            "end": str(lag.end),
            "entriesBehind": lag.entries,
            "bytesBehind": lag.size_bytes,
        }
    else:
        # Elsewhere: what the store says, without loading it (invariant 2).
        stored = (await _lowest_pin(server, segment), await _lowest_legacy(server, segment))
        hold = _lowest(each for each in stored if each is not None)
    found["blocker"] = None if hold is None else await _holder_json(server, hold)
    return found


async def _lowest_pin(server: AdminServer, segment: TopicName) -> BlockingTransaction | None:
    """The lowest pin of a segment that is not loaded here."""
    index_key, name = encode_name(str(segment)), str(segment)
    lowest: BlockingTransaction | None = None
    scanned = 0
    pins = server.metadata.scan_index(WRITES_BY_SEGMENT, index_key, index_key)
    async with aclosing(pins) as records:
        async for record in records:
            scanned += 1
            # As good as it gets: the lowest of those that were looked at.
            if scanned > SCANNED_MAX:
                break
            pin = decode(record, Pin)
            # Index keys of long names are hashed, so another segment may stand here.
            if pin.segment == name and (lowest is None or pin.bound < lowest.bound):
                lowest = BlockingTransaction(from_text(pin.txn), pin.bound)
    return lowest


async def _lowest_legacy(server: AdminServer, segment: TopicName) -> BlockingTransaction | None:
    """The lowest open legacy transaction of a segment, as of its last record."""
    record = await server.metadata.get(stream_key(str(segment)))
    if record is None:
        return None
    stream = decode(record, StreamRecord)
    return _lowest(BlockingTransaction(from_text(each.txn), each.first) for each in stream.open)


async def _holder_json(server: AdminServer, hold: BlockingTransaction) -> Json:
    records = TransactionRecords(server)
    known = await records.find(hold.txn)
    # Collected, or another broker coordinates it: its id is still worth knowing.
    if known is None:
        what: Json = {"txnId": java_id(hold.txn), "id": to_text(hold.txn), "status": None}
    else:
        what = header_json(*known, server.clock.now_ms())
        what |= records.clients(known.header, await records.ops(hold.txn, OPS_IN_LIST_MAX))
    return what | {"from": str(hold.bound)}
