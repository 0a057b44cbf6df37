"""The commands of transactions: coordinators and where they are, begin, end, groups.

Owns: 50, 52, 54, 56, 62 and 79 to 81, with and without `scalable`: the two generations of clients
find coordinators in different ways; 58 and 60, which only superusers may send; and Magnetar's own
1000, 1002 and 1004. v4 clients find coordinators by lookups (`context`).

A transaction that is begun with `scalable`, or in a group, is a metadata-driven one. For the others
the setting `transaction_kind` says of which kind they are. From then on the id tells it.

Invariants:
1. Every answer, a refusal too, names the coordinator (the upper half of the id): clients find their
   request by it.
2. A watch of coordinators is told all of them, at first and after every change; several changes at
   once are told as one. Nothing is pushed while the peer does not take what was written.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from magnetar.errors import NotAllowed, ServiceNotReady, TransactionNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.metrics import SCALABLE_UPDATES
from magnetar.server.authority import Action
from magnetar.server.context import Context, urls_of
from magnetar.server.scalable_handles import OpenWatch
from magnetar.server.session import Session
from magnetar.txn.api import TransactionCoordinator
from magnetar.txn.coordinator_partitions import (
    PARTITIONS,
    CoordinatorAssignment,
    partition_of,
)
from magnetar.txn.ids import from_text, is_metadata, to_text
from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.txn.records import GroupMembership, Header, State
from magnetar.txn.transitions import BY_CLIENT
from magnetar.wire.frames import command, encode_txn_answer
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

_BY_MARKERS: Final = (Domain.PERSISTENT,)
_IN_RECORDS: Final = (Domain.PERSISTENT, Domain.SEGMENT)
"""Where legacy transactions can be kept in either way."""


def _owner(session: Session) -> str:
    # Without authentication everybody is one owner, and may end everybody's transactions.
    return session.principal.role or ""


# --- where coordinators are


async def connect(session: Session, body: pb.CommandTcClientConnectRequest) -> None:
    session.context.coordinators.partitions.check(body.tc_id)
    session.write(command("TC_CLIENT_CONNECT_RESPONSE", request_id=body.request_id))


async def watch(session: Session, body: pb.CommandWatchTcAssignments) -> None:
    partitions = session.context.coordinators.partitions
    if not partitions.is_known:
        raise ServiceNotReady("coordinators are being elected")
    watches = session.scalable.coordinators
    # The same id again is a new watch, and ends the old one.
    held = watches.pop(body.watch_id, None)
    if held is not None:
        held.close()
    session.check_room()
    # Registered before the first await: a close that overtakes the answer finds it.
    watch = watches[body.watch_id] = OpenWatch("coordinators")
    await session.outbound.writable()
    if watch.is_closed:
        return
    # Both in one step: a change behind it is told by the loop.
    seen, told = partitions.changes.version, partitions.assignments()
    session.write(_assigned(session.context, body.watch_id, told))
    watch.follow(session, _tell(session, body.watch_id, told, seen))


async def close_watch(session: Session, body: pb.CommandWatchTcAssignmentsClose) -> None:
    held = session.scalable.coordinators.pop(body.watch_id, None)
    if held is not None:
        held.close()


async def _tell(
    session: Session, watch_id: int, told: list[CoordinatorAssignment], seen: int
) -> None:
    partitions = session.context.coordinators.partitions
    while True:
        seen = await partitions.changes.past(seen)
        await session.outbound.writable()
        # Read after the peer has taken what was written: changes meanwhile are one (invariant 2).
        present = partitions.assignments()
        if present != told:
            told = present
            session.write(_assigned(session.context, watch_id, told))
            SCALABLE_UPDATES.labels("coordinators").inc()


def _assigned(context: Context, watch_id: int, assignments: list[CoordinatorAssignment]) -> bytes:
    """One that nobody leads is left out."""
    found = []
    for each in assignments:
        if each.url is not None:
            urls = urls_of(context, each.url)
            tls = {} if urls.tls is None else {"broker_service_url_tls": urls.tls}
            found.append({"tc_id": each.partition, "broker_service_url": urls.plain} | tls)
    snapshot = {"parallelism": PARTITIONS, "assignments": found}
    return command("WATCH_TC_ASSIGNMENTS_UPDATE", watch_id=watch_id, snapshot=snapshot)


# --- transactions


def begin(session: Session, body: pb.CommandNewTxn) -> None:
    """Begin a transaction: without a task, if nobody has to be asked before."""
    work = None
    # v5 clients; what others ask for depends on settings, on groups, on a legacy coordinator.
    if body.scalable and not body.HasField("group"):
        work = _beginning(session, body)
    if work is None:
        session.run_request(pb.BaseCommand.NEW_TXN, body, _begin)
    else:
        session.answer_at_end(work, pb.BaseCommand.NEW_TXN, body, _begun_answer)


def _beginning(session: Session, body: pb.CommandNewTxn) -> asyncio.Future[Header] | None:
    """A transaction that is alone; None: a layout change or the numbers have to be awaited."""
    context = session.context
    beginning = context.coordinators.beginning
    if not context.has_scalable:
        return beginning(body.tc_id, body.txn_ttl_millis, _owner(session), session.client_text)
    barrier, lasts = context.scalable.txn_barrier, session.keeps_transactions
    # What is said of the barrier in `_begun` holds here.
    admitted = None if lasts else barrier.admitted_at_once(session)
    if admitted is None and not lasts:
        return None
    work = None
    try:
        work = beginning(body.tc_id, body.txn_ttl_millis, _owner(session), session.client_text)
    finally:
        if admitted is not None and work is None:
            barrier.over(session, admitted)

    def over(done: asyncio.Future[Header]) -> None:
        txn = None if done.cancelled() or done.exception() is not None else done.result().id
        if admitted is None:
            if txn is not None:
                barrier.lasts(txn)
            return
        if txn is not None:
            admitted.began(txn)
        barrier.over(session, admitted)

    if work is not None:
        work.add_done_callback(over)
    return work


def _begun_answer(body: pb.CommandNewTxn, header: Header) -> bytes:
    return encode_txn_answer("NEW_TXN_RESPONSE", body.request_id, header.id)


async def _begin(session: Session, body: pb.CommandNewTxn) -> None:
    member = None
    if body.HasField("group"):
        given = body.group
        member = GroupMembership(given.application, given.epoch, given.sequence)
    # v5 clients, members of groups, and v4 clients where the setting says so; other v4 clients get
    # a legacy one, which a coordinator's log decides.
    if body.scalable or member is not None or not _has_markers(session.context):
        txn = await _begun(session, body, member)
    else:
        legacy = session.context.coordinators.legacy
        txn = await legacy.begin(
            body.tc_id, body.txn_ttl_millis, _owner(session), session.client_text
        )
    _answer(session, "NEW_TXN_RESPONSE", body.request_id, txn)


async def _begun(session: Session, body: pb.CommandNewTxn, member: GroupMembership | None) -> TxnId:
    """A metadata-driven transaction, alone or a member of a group."""
    context, owner, client = session.context, _owner(session), session.client_text
    begin = context.coordinators.begin
    if not context.has_scalable:
        return (await begin(body.tc_id, body.txn_ttl_millis, owner, member, client)).id
    barrier = context.scalable.txn_barrier
    # Clients that repeat a send without giving the transaction up, as those do that have groups: no
    # layout change need wait for theirs.
    if member is not None or session.keeps_transactions:
        lasting = (await begin(body.tc_id, body.txn_ttl_millis, owner, member, client)).id
        barrier.lasts(lasting)
        return lasting
    # A client would fail its sends to segments that are sealed under it: it waits
    # until it knows the new layout.
    beginning = await barrier.admitted(session)
    try:
        header = await begin(body.tc_id, body.txn_ttl_millis, owner, client=client)
        beginning.began(header.id)
    finally:
        # Also when it did not begin: a layout change may be waiting for it.
        barrier.over(session, beginning)
    return header.id


def _has_markers(context: Context) -> bool:
    """Whether transactions of v4 clients end by markers."""
    return context.config.transaction_kind != "metadata"


def _coordinator(session: Session, txn: TxnId, body: Any) -> TransactionCoordinator:
    return session.context.coordinators.of(txn, scalable=body.scalable)


def add_partitions(session: Session, body: pb.CommandAddPartitionToTxn) -> None:
    """Add topics: without a task, if the transaction is known to be open."""
    names = [TopicName.parse(topic) for topic in body.partitions]
    for name in names:
        # All of them before the first is noted: a refusal leaves nothing behind.
        session.authorise(Action.PRODUCE, name)
    txn = _txn(body)
    # Nothing is noted of it: its topics write pins of their own.
    if is_metadata(txn) and session.context.coordinators.is_open_here(txn, _owner(session)):
        _answer(session, "ADD_PARTITION_TO_TXN_RESPONSE", body.request_id, txn)
    else:
        session.run_request(pb.BaseCommand.ADD_PARTITION_TO_TXN, body, _add_partitions)


async def _add_partitions(session: Session, body: pb.CommandAddPartitionToTxn) -> None:
    names = [TopicName.parse(topic) for topic in body.partitions]
    txn = _txn(body)
    in_records = await _in_records(session.context, txn, names)
    await _coordinator(session, txn, body).add_partitions(
        txn, map(str, names), _owner(session), in_records=in_records
    )
    _answer(session, "ADD_PARTITION_TO_TXN_RESPONSE", body.request_id, txn)


async def add_subscriptions(session: Session, body: pb.CommandAddSubscriptionToTxn) -> None:
    names = [TopicName.parse(each.topic) for each in body.subscription]
    for name in names:
        session.authorise(Action.CONSUME, name)
    txn = _txn(body)
    in_records = await _in_records(session.context, txn, names)
    places = [
        Acknowledging(str(name), each.subscription)
        for name, each in zip(names, body.subscription, strict=True)
    ]
    await _coordinator(session, txn, body).add_subscriptions(
        txn, places, _owner(session), in_records=in_records
    )
    _answer(session, "ADD_SUBSCRIPTION_TO_TXN_RESPONSE", body.request_id, txn)


def end(session: Session, body: pb.CommandEndTxn) -> None:
    if not body.HasField("txn_action"):
        raise NotAllowed("END_TXN must say whether to commit or to abort")
    txn, commit = _txn(body), body.txn_action == pb.COMMIT
    # Work of the coordinator: a decision that has begun is made, whatever becomes of this
    # connection.
    by = f"{BY_CLIENT} {session.client_text}"
    coordinator = _coordinator(session, txn, body)
    work = coordinator.ending(txn, commit=commit, owner=_owner(session), by=by)
    session.answer_at_end(work, pb.BaseCommand.END_TXN, body, _ended)


def _ended(body: pb.CommandEndTxn, _: State) -> bytes:
    return encode_txn_answer("END_TXN_RESPONSE", body.request_id, _txn(body))


async def _in_records(context: Context, txn: TxnId, names: list[TopicName]) -> bool:
    """Whether one of these topics keeps a legacy transaction in records; raises unless each may
    take part."""
    # In records everywhere; the question is only about ids of v4 clients.
    if is_metadata(txn):
        return False
    found = False
    for name in names:
        policies = await context.topics.namespaces.policies(name.namespace)
        # Each topic by the policy of its namespace; a segment has no markers, and needs records.
        has_records = policies.transaction_kind == "metadata"
        if name.domain not in (_IN_RECORDS if has_records else _BY_MARKERS):
            raise NotAllowed(
                f"{name} cannot take part in the legacy transaction {to_text(txn)}",
                hint="set the transactionKind of its namespace to metadata, or use a v5 client",
            )
        found = found or has_records
    return found


# --- what brokers and their operators do


async def end_on_partition(session: Session, body: pb.CommandEndTxnOnPartition) -> None:
    txn = _check_end_of_part(session, body)
    session.authorise(Action.PRODUCE, name := TopicName.parse(body.topic))
    await session.context.coordinators.legacy.participants.end_on_topic(
        str(name),
        txn,
        commit=body.txn_action == pb.COMMIT,
        low_watermark=body.txnid_least_bits_of_low_watermark,
    )
    _answer(session, "END_TXN_ON_PARTITION_RESPONSE", body.request_id, txn)


async def end_on_subscription(session: Session, body: pb.CommandEndTxnOnSubscription) -> None:
    txn = _check_end_of_part(session, body)
    session.authorise(Action.CONSUME, name := TopicName.parse(body.subscription.topic))
    await session.context.coordinators.legacy.participants.end_on_subscription(
        str(name),
        body.subscription.subscription,
        txn,
        commit=body.txn_action == pb.COMMIT,
        low_watermark=body.txnid_least_bits_of_low_watermark,
    )
    _answer(session, "END_TXN_ON_SUBSCRIPTION_RESPONSE", body.request_id, txn)


def _check_end_of_part(session: Session, body: Any) -> TxnId:
    """Raise unless one topic or subscription may be told the end of a transaction."""
    # A part that ends on its own word, and not on its coordinator's, breaks 'all or nothing'.
    if not session.context.authority.is_superuser(session.principal):
        raise NotAllowed("only brokers end transactions of topics and subscriptions; use END_TXN")
    if not body.HasField("txn_action"):
        raise NotAllowed("it must be said whether to commit or to abort")
    txn = _txn(body)
    # Its participants follow the header ('one decision'): nobody is asked one by one.
    if is_metadata(txn):
        raise TransactionNotFound(
            f"transaction {to_text(txn)} is decided by its header alone", hint="use END_TXN"
        )
    return txn


def _txn(body: Any) -> TxnId:
    return TxnId(body.txnid_most_bits, body.txnid_least_bits)


def _answer(session: Session, reply: str, request_id: int, txn: TxnId) -> None:
    session.write(encode_txn_answer(reply, request_id, txn))


# --- groups


async def open_group(session: Session, body: pb.CommandOpenGroup) -> None:
    group = await session.context.coordinators.open_group(
        body.application, body.generation, body.run, _owner(session)
    )
    session.write(
        command(
            "OPEN_GROUP_RESPONSE",
            request_id=body.request_id,
            # A group has its coordinator by its name: invariant 1, without an id.
            tc_id=partition_of(body.application),
            epoch=group.epoch,
            committed_sequence=group.sequence,
        )
    )


async def commit_group(session: Session, body: pb.CommandCommitGroup) -> None:
    txns = [TxnId(each.most_bits, each.least_bits) for each in body.transactions]
    outcome = await session.context.coordinators.commit_group(
        body.application, body.epoch, body.sequence, txns, _owner(session), body.note
    )
    session.write(
        command(
            "COMMIT_GROUP_RESPONSE",
            request_id=body.request_id,
            tc_id=partition_of(body.application),
            replayed=outcome.replayed,
        )
    )


async def group_status(session: Session, body: pb.CommandGroupStatus) -> None:
    group = await session.context.coordinators.group_status(body.application, _owner(session))
    decided = [from_text(name) for name in group.decided]
    session.write(
        command(
            "GROUP_STATUS_RESPONSE",
            request_id=body.request_id,
            tc_id=partition_of(body.application),
            epoch=group.epoch,
            generation=group.generation,
            run=group.run,
            committed_sequence=group.sequence,
            committed=[{"most_bits": txn.most, "least_bits": txn.least} for txn in decided],
            note=group.note,
        )
    )
