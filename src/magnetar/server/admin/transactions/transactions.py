"""`/admin/v3/transactions`: what coordinators, topics and subscriptions know of transactions.

Invariants:
1. But for `abortTransaction` and `abortOn` nothing here changes anything.
2. Lists are bounded by `limit`, which has a default and a maximum. The oldest transactions come
   first.
3. Without transactions on this server every endpoint is 503.
4. Who aborts a transaction needs every right on all that it has touched.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.errors import TransactionCoordinatorNotFound
from magnetar.model.names import TopicName
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import (
    done,
    part_of,
    refused,
    server_of,
    shown,
    whole_number,
)
from magnetar.server.admin.topics.statistics import ledger_json
from magnetar.server.admin.transactions import topics
from magnetar.server.admin.transactions.records import (
    OPS_IN_LIST_MAX,
    Dated,
    Found,
    Json,
    TransactionRecords,
    aborted_json,
    acks_json,
    check_here,
    coordinators_of,
    group_json,
    header_json,
    legacy_timeline,
    limit_of,
    operator_text,
    participants_json,
    pin_json,
    summary_json,
    timeline,
    txn_of,
)
from magnetar.server.authority import ANYBODY, Action
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import is_metadata
from magnetar.txn.legacy.coordinator_log import log_name
from magnetar.txn.records import Aborted, Header
from magnetar.wire.messages import TxnId

# Pulsar's status for a coordinator without a log.
_NO_LOG: Final = 405
_READY: Final = "Ready"


def _coordinator_id(request: web.Request) -> int | None:
    text = request.query.get("coordinatorId")
    return None if text is None else _known_coordinator(text)


def _known_coordinator(text: str) -> int:
    found = whole_number(text, "the id of a coordinator")
    if found >= PARTITIONS:
        raise TransactionCoordinatorNotFound(f"there is no coordinator {found}")
    return found


# --- coordinators


async def coordinators(request: web.Request) -> web.Response:
    """The coordinators that somebody leads now."""
    found = coordinators_of(request).partitions.assignments()
    return shown(
        [{"id": each.partition, "brokerServiceUrl": each.url} for each in found if each.url]
    )


async def coordinator_stats(request: web.Request) -> web.Response:
    own = coordinators_of(request)
    wanted = _coordinator_id(request)
    open_here = own.open_by_coordinator()
    # All are led here, the usual case: no scan. Otherwise the store knows those of the others.
    counts = {} if len(open_here) == PARTITIONS else await _records(request).open_counts()
    found: dict[str, Json] = {}
    for each in own.partitions.assignments():
        number = each.partition
        found[str(number)] = {
            "state": "None" if each.url is None else _READY,
            "brokerServiceUrl": each.url,
            "ongoingTxnSize": open_here.get(number, counts.get(number, 0)),
            # Of the log of legacy transactions, if it is led here (below); otherwise -1, Pulsar's
            # "none".
            "leastSigBits": -1,
            "lowWaterMark": -1,
            "recoverStartTime": 0,
            "recoverEndTime": 0,
        }
        # Only who leads it knows its log.
        legacy = own.legacy.at(number)
        if legacy is not None:
            marks = {"leastSigBits": legacy.last_number, "lowWaterMark": legacy.low_watermark}
            found[str(number)] |= marks
    return shown(found if wanted is None else found[str(wanted)])


async def coordinator_internal_stats(request: web.Request) -> web.Response:
    """The log of its legacy transactions."""
    own = coordinators_of(request)
    number = _known_coordinator(part_of(request, "coordinator"))
    legacy = own.legacy.at(number)
    if legacy is None:
        return refused(_NO_LOG, f"coordinator {number} has no log at this broker")
    log = {
        "managedLedgerName": log_name(number),
        "managedLedgerInternalStats": ledger_json(legacy.log.ledger),
    }
    return shown({"transactionLogStats": log})


# --- transactions


def _records(request: web.Request) -> TransactionRecords:
    return TransactionRecords(server_of(request))


async def open_transactions(request: web.Request) -> web.Response:
    """Our own: the open transactions, oldest first, with what they touch."""
    coordinators_of(request)
    limit, query = limit_of(request), request.query
    # All that can be wrong with the query is said before anything is read.
    least_ms = whole_number(query.get("olderThanMs", "0"), "the age")
    owner, application = query.get("owner"), query.get("application")
    coordinator = _coordinator_id(request)
    now = server_of(request).clock.now_ms()

    # Filters apply before the limit: the oldest of those that were asked for.
    def wanted(header: Header) -> bool:
        member = header.group
        return (
            now - header.created_ms >= least_ms
            and owner in (None, header.owner)
            and coordinator in (None, header.id.most)
            and (application is None or (member is not None and member.application == application))
        )

    records = _records(request)
    found = await records.open_ones(limit, wanted)
    transactions = [
        # A list shows the first few topics of each; the story of one shows all.
        await _summary(records, each, now)
        for each in found.found
    ]
    return shown({"transactions": transactions, "total": found.total, "truncated": found.truncated})


async def _summary(records: TransactionRecords, found: Found, now_ms: int) -> Json:
    ops = await records.ops(found.header.id, OPS_IN_LIST_MAX)
    return summary_json(found, ops, now_ms) | records.clients(found.header, ops)


async def slow_transactions(request: web.Request) -> web.Response:
    """Open for longer than so many milliseconds."""
    coordinators_of(request)
    least_ms = whole_number(part_of(request, "timeout"), "the timeout")
    coordinator = _coordinator_id(request)
    now = server_of(request).clock.now_ms()
    records = _records(request)
    found = await records.open_ones(
        limit_of(request),
        lambda header: (
            now - header.created_ms >= least_ms and coordinator in (None, header.id.most)
        ),
    )
    # Keyed by id, as Java's tools read it.
    slow = {}
    for each in found.found:
        told = header_json(*each, now)
        ops = await records.ops(each.header.id, OPS_IN_LIST_MAX)
        slow[told["txnId"]] = told | participants_json(ops)
    return shown(slow)


async def transaction_metadata(request: web.Request) -> web.Response:
    """All that is known of one transaction."""
    coordinators_of(request)
    return shown(await _story(request, txn_of(request)))


async def _story(request: web.Request, txn: TxnId) -> Json:
    server, records = server_of(request), _records(request)
    header, state = await records.header(txn)
    ops = await records.ops(txn)
    aborted: list[tuple[Dated, Aborted]] = []
    cut = False
    # Records of hidden messages are written only for aborts, and finding them costs a scan.
    if state in ("ABORTING", "ABORTED"):
        aborted, cut = await records.aborted(txn)
    assignment = coordinators_of(request).partitions.assignments()[txn.most % PARTITIONS]
    story = header_json(header, state, server.clock.now_ms())
    story |= participants_json(ops, [each for _, each in aborted])
    story |= records.clients(header, ops)
    story |= {
        "coordinatorUrl": assignment.url,
        "pins": [pin_json(*each) for each in ops.pins],
        "acks": await acks_json(ops.acks),
        "aborted": [aborted_json(*each) for each in aborted],
        "timeline": timeline(header, state, ops, aborted),
        "truncated": ops.truncated or cut,
    }
    # A legacy transaction has no records of its own to date.
    if not is_metadata(txn):
        story["timeline"] = legacy_timeline(await records.legacy(txn))
    if header.group is not None:
        group = await records.group(header.group.application)
        story["groupRecord"] = None if group is None else group_json(group)
    return story


async def abort_transaction(request: web.Request) -> web.Response:
    """Abort a transaction as its owner would; again: the same answer."""
    own, records, txn = coordinators_of(request), _records(request), txn_of(request)
    # 404 if there is none, before anything is asked about rights.
    await records.header(txn)  # there is one
    await _check_rights(request, txn)
    # After the rights, since the answer names another broker.
    check_here(own, txn)
    await own.of(txn).end(txn, commit=False, owner=None, by=operator_text(request))
    return done()


async def _check_rights(request: web.Request, txn: TxnId) -> None:
    authority = server_of(request).context.authority
    # Sorted: the same refusal each time.
    for segment in sorted(await _records(request).touched(txn)):
        for action in Action:
            authority.authorise(ANYBODY, action, TopicName.parse(segment))


# --- the rest


BASE: Final = "/admin/v3/transactions"
_ID: Final = "{most}/{least}"

ROUTES: Final = (
    endpoints.get(f"{BASE}/coordinators", coordinators),
    endpoints.get(f"{BASE}/coordinatorStats", coordinator_stats),
    endpoints.get(f"{BASE}/coordinatorInternalStats/{{coordinator}}", coordinator_internal_stats),
    endpoints.get(f"{BASE}/open", open_transactions),
    endpoints.get(f"{BASE}/slowTransactions/{{timeout}}", slow_transactions),
    endpoints.get(f"{BASE}/transactionMetadata/{_ID}", transaction_metadata),
    endpoints.post(f"{BASE}/abortTransaction/{_ID}", abort_transaction),
    *topics.routes(BASE, _ID),
)
