"""Transactions of topics and subscriptions, below `/admin/v3/transactions`.

A topic is named as in Pulsar by `{tenant}/{namespace}/{topic}`, which is a `persistent://` one, or
with its domain before: `segment/{tenant}/{namespace}/{topic}`.

Invariants:
1. A look loads its topic, as statistics do, and changes nothing. `blocked` loads none. `abort_on`
   alone ends transactions: those that a coordinator knows as a whole, others on this topic.
2. Lists of records are bounded by `limit` and say if they are cut (`truncated`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.errors import (
    InvalidTxnStatus,
    NotAllowed,
    ServiceNotReady,
    SubscriptionNotFound,
    TransactionNotFound,
)
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import Record
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import part_of, server_of, shown, topic_of, topics_of
from magnetar.server.admin.topics.topics import whole_topic
from magnetar.server.admin.transactions.places import blocked_json, lag_of, segments_of
from magnetar.server.admin.transactions.records import (
    Dated,
    Json,
    TransactionRecords,
    aborted_json,
    acks_json,
    check_here,
    coordinators_of,
    dated,
    in_buffer_json,
    in_pending_acks_json,
    limit_of,
    operator_text,
    pin_json,
    txn_of,
)
from magnetar.server.authority import ANYBODY, Action
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import from_text, is_metadata, to_text
from magnetar.txn.records import (
    ABORTED_BY_POSITION,
    ACKS_BY_SUBSCRIPTION,
    WRITES_BY_SEGMENT,
    Aborted,
    AckOp,
    Pin,
    decode,
    subscription_index,
)
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

NO_WATERMARK: Final = -1
"""An end that says nothing of other transactions."""

_APPLIED_SECONDS: Final = 5.0
"""For a topic to carry out the end of a transaction."""
_SUMMED_MAX: Final = 20_000
"""Ack ops that are looked at for a sum."""

Body = TypeVar("Body", bound=msgspec.Struct)


async def _topic(request: web.Request) -> tuple[Topic, MetadataTransactionBuffer]:
    # 503 first where there are no transactions at all (transactions, invariant 3).
    coordinators_of(request)
    name = await whole_topic(request)
    topic = await topics_of(request).get(name, create=False)
    if not isinstance(topic, Topic):
        raise NotAllowed(f"{name} is not persistent: it has no transactions")
    if topic.transactions is None:
        raise ServiceNotReady(f"{name} takes no transactions")
    return topic, topic.transactions


# --- what they write


async def buffer_stats(request: web.Request) -> web.Response:
    topic, buffer = await _topic(request)
    lag = lag_of(topic)
    # Members of Java's TransactionBufferStats; those without a meaning here say "nothing".
    return shown(
        {
            "state": "Ready",
            "maxReadPosition": str(lag.max_read_position),
            "lastSnapshotTimestamps": 0,
            "ongoingTxnSize": topic.undecided,
            "totalAbortedTransactions": buffer.hidden,
            "lowWaterMarks": None,
            "recoverStartTime": 0,
            "recoverEndTime": 0,
            "lastPosition": str(lag.end),
            "entriesBehind": lag.entries,
            "bytesBehind": lag.size_bytes,
        }
    )


async def in_buffer(request: web.Request) -> web.Response:
    topic, _ = await _topic(request)
    txn, segment = txn_of(request), str(topic.name)
    store = TxnStore(server_of(request).metadata)
    pin = await store.pin(txn, segment)
    legacy = topic.legacy_transactions
    # A metadata-driven transaction has a pin; a legacy one is known to its buffer alone.
    first = pin.pin.bound if pin is not None else legacy.first_of(txn) if legacy else None
    aborted = await store.aborted_record(txn, segment) is not None
    return shown(in_buffer_json(first, aborted=aborted))


async def buffer_internal_stats(request: web.Request) -> web.Response:
    """The records that its buffer keeps in the metadata store."""
    topic, _ = await _topic(request)
    limit, segment = limit_of(request), str(topic.name)
    name = encode_name(segment)
    scan_index = server_of(request).metadata.scan_index
    # Index keys are names: long ones are cut, so each record is checked for its own name.
    written = scan_index(WRITES_BY_SEGMENT, name, name)
    pins, pins_cut = await _read(written, Pin, limit, lambda pin: pin.segment == segment)
    # ";" follows ":" in ASCII: all keys that begin with this name, and no others.
    hidden = scan_index(ABORTED_BY_POSITION, f"{name}:", f"{name};")
    aborted, cut = await _read(hidden, Aborted, limit, lambda each: each.segment == segment)
    return shown(
        {
            "snapshotType": "Metadata",
            "pins": [pin_json(*each) for each in pins],
            "aborted": [aborted_json(*each) for each in aborted],
            "truncated": pins_cut or cut,
        }
    )


# --- what they acknowledge


async def _subscription(request: web.Request) -> tuple[str, Subscription]:
    """The topic and the subscription that are named; the latter must exist."""
    topic, _ = await _topic(request)
    name = part_of(request, "subscription")
    if name not in topic.subscriptions:
        raise SubscriptionNotFound(f"{topic.name} has no subscription {name!r}")
    return str(topic.name), topic.subscriptions[name]


async def _acks(request: web.Request, limit: int) -> tuple[list[tuple[Dated, AckOp]], bool]:
    """The ack ops of the subscription that is named."""
    segment, subscription = await _subscription(request)
    place = (segment, subscription.name)
    pair = subscription_index(*place)
    records = server_of(request).metadata.scan_index(ACKS_BY_SUBSCRIPTION, pair, pair)
    return await _read(records, AckOp, limit, lambda ack: (ack.segment, ack.subscription) == place)


async def pending_ack_stats(request: web.Request) -> web.Response:
    acks, cut = await _acks(request, _SUMMED_MAX)
    _, subscription = await _subscription(request)
    # Those of the legacy kind have no ops.
    names = {to_text(txn) for txn in subscription.pending_txns} | {ack.txn for _, ack in acks}
    return shown(
        {
            "state": "Ready",
            "lowWaterMarks": None,
            "ongoingTxnSize": len(names),
            "recoverStartTime": 0,
            "recoverEndTime": 0,
            "acknowledgements": len(acks),
            "truncated": cut,
        }
    )


async def in_pending_acks(request: web.Request) -> web.Response:
    segment, subscription = await _subscription(request)
    place = (segment, subscription.name)
    ops = await TransactionRecords(server_of(request)).ops(txn_of(request))
    mine = [ack for _, ack in ops.acks if (ack.segment, ack.subscription) == place]
    return shown(in_pending_acks_json(mine))


async def pending_ack_internal_stats(request: web.Request) -> web.Response:
    """The records of what transactions acknowledge on a subscription."""
    acks, cut = await _acks(request, limit_of(request))
    return shown({"acks": await acks_json(acks), "truncated": cut})


async def _read(
    records: AsyncGenerator[Record, None],
    kind: type[Body],
    limit: int,
    fits: Callable[[Body], bool],
) -> tuple[list[tuple[Dated, Body]], bool]:
    """Records of an index, and whether there are more; index keys may be those of others too."""
    found: list[tuple[Dated, Body]] = []
    async with aclosing(records) as each_record:
        async for record in each_record:
            body = decode(record, kind)
            if fits(body):
                # One more than asked for would fit: that is what `truncated` says.
                if len(found) >= limit:
                    return found, True
                found.append((dated(record), body))
            # A record of many acknowledgements takes milliseconds: others come between two.
            await asyncio.sleep(0)
    return found, False


# --- what waits


async def blocked(request: web.Request) -> web.Response:
    """Our own: for each segment of a topic, which transaction holds its maxReadPosition."""
    coordinators_of(request)
    limit = limit_of(request)
    segments = await segments_of(request, topic_of(request))
    # Cut before anything is read: each segment may cost a scan.
    found: list[Json] = [await blocked_json(request, each) for each in segments[:limit]]
    return shown({"segments": found, "truncated": len(segments) > limit})


# --- what frees a topic


async def abort_on(request: web.Request) -> web.Response:
    """Our own: end every transaction that is undecided on a topic, or the one that is named."""
    coordinators_of(request)
    named = request.query.get("txn")
    only = None if named is None else from_text(named)
    segments = await segments_of(request, topic_of(request))
    authority = server_of(request).context.authority
    # All rights on all of them before the first is touched.
    for segment in segments:
        for action in Action:
            authority.authorise(ANYBODY, action, segment)
    ended: list[Json] = []
    for segment in segments:
        topic = await topics_of(request).get(segment, create=False)
        if isinstance(topic, Topic):
            for txn in await _undecided(topic):
                if only in (None, txn):
                    state = await _end_on(request, topic, txn)
                    await _carried_out(topic, txn)
                    ended.append({"id": to_text(txn), "segment": str(segment), "status": state})
    if only is not None and not ended:
        raise TransactionNotFound(f"transaction {named} is not undecided on {topic_of(request)}")
    return shown({"transactions": ended})


async def _undecided(topic: Topic) -> list[TxnId]:
    """What waits for a decision: messages in either buffer, acknowledgements."""
    found: dict[TxnId, None] = {}
    for buffer in (topic.transactions, topic.legacy_transactions):
        if buffer is not None:
            found |= dict.fromkeys(buffer.undecided_txns)
    for subscription in list(topic.subscriptions.values()):
        found |= dict.fromkeys(await subscription.undecided_txns())
    return list(found)


async def _end_on(request: web.Request, topic: Topic, txn: TxnId) -> str | None:
    """Abort a transaction as a whole, or carry out here what was decided; its state."""
    own = coordinators_of(request)
    # A number that no coordinator has cannot be asked for.
    if txn.most < PARTITIONS:
        check_here(own, txn)
    if is_metadata(txn):
        try:
            return await own.of(txn).end(txn, commit=False, owner=None, by=operator_text(request))
        except InvalidTxnStatus:
            return "COMMITTED"  # which its topics are being told
        except TransactionNotFound:
            return None  # its header is gone: the segment aborts it by itself
    known = await own.legacy.find(txn) if txn.most < PARTITIONS else None
    if known is not None and not known.is_finished:
        commit = known.commits
        # Decided, but not carried out everywhere: asked again, now.
        return await own.legacy.end(txn, commit=commit, owner=None, by=operator_text(request))
    # Nobody gave it out, or its end passed this topic by: no coordinator will ask for it again.
    commit, ends = known is not None and known.commits, own.legacy.participants
    name = str(topic.name)
    await ends.end_on_topic(name, txn, commit=commit, low_watermark=NO_WATERMARK)
    for each, subscription in list(topic.subscriptions.items()):
        if txn in subscription.pending_txns:
            await ends.end_on_subscription(
                name, each, txn, commit=commit, low_watermark=NO_WATERMARK
            )
    return "COMMITTED" if commit else "ABORTED"


async def _carried_out(topic: Topic, txn: TxnId) -> None:
    """Wait until consumers of a topic wait for a transaction no longer: a moment after its end."""
    with suppress(TimeoutError):  # it is decided, and will be carried out
        async with asyncio.timeout(_APPLIED_SECONDS):
            for buffer in (topic.transactions, topic.legacy_transactions):
                while buffer is not None and buffer.tracks(txn):
                    await buffer.moved.past(buffer.moved.version)


_HANDLERS: Final[dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = {
    "transactionBufferStats/{topic}": buffer_stats,
    "transactionBufferInternalStats/{topic}": buffer_internal_stats,
    "transactionInBufferStats/{topic}/{id}": in_buffer,
    "pendingAckStats/{topic}/{subscription}": pending_ack_stats,
    "pendingAckInternalStats/{topic}/{subscription}": pending_ack_internal_stats,
    "transactionInPendingAckStats/{topic}/{subscription}/{id}": in_pending_acks,
}


def routes(base: str, txn_id: str) -> Iterator[endpoints.Endpoint]:
    """The routes, each with and without the domain of the topic."""
    name = "{tenant}/{namespace}/{topic}"
    for template, handler in _HANDLERS.items():
        path = f"{base}/{template.replace('{id}', txn_id)}"
        yield endpoints.get(path.replace("{topic}", name), handler)
        yield endpoints.get(
            path.replace("{topic}", f"{{domain:persistent|segment}}/{name}"), handler
        )
    domains = "{domain:persistent|non-persistent|segment|topic|scalable}"
    yield endpoints.get(f"{base}/blocked/{domains}/{name}", blocked)
    yield endpoints.post(f"{base}/abortOn/{domains}/{name}", abort_on)
