"""The commands of consumers: SUBSCRIBE, ACK, FLOW, REDELIVER, SEEK and the like.

Invariants:
1. ACK, FLOW and REDELIVER are applied in the order of their frames; a consumer that is not there
   is not an error for those that nobody waits on.
2. SUCCESS goes out before the first MESSAGE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sized
from typing import Any, Final

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import TYPE_NAMES, Subscription
from magnetar.errors import (
    ConsumerAssign,
    ConsumerBusy,
    ConsumerNotFound,
    MetadataError,
    NotAllowed,
    ServiceNotReady,
)
from magnetar.model.batch_indexes import unacked_of
from magnetar.model.ids import Position
from magnetar.model.isolation import with_isolation
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import (
    InitialPosition,
    KeySharedPolicy,
    SubscriptionType,
)
from magnetar.runtime.slices import SLICE_ITEMS, slices
from magnetar.server.authority import Action
from magnetar.server.handlers.names import admit, may_create, used
from magnetar.server.handlers.values import (
    id_fields,
    message_id_of,
    metadata_of,
    name_of,
    position_of,
    schema_of,
)
from magnetar.server.handles import ConsumerHandle, OpenSubscription, release
from magnetar.server.keepalive import is_alive
from magnetar.server.session import Session
from magnetar.wire.frames import command, encode_ack_answer
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb

# Faster than the call of a named tuple, and this is once per message.
_new: Final = tuple.__new__

# --- opening and closing


async def subscribe(session: Session, body: pb.CommandSubscribe) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.CONSUME, name)
    # As ServerCnx: an id that is open already succeeds once more, one that is being opened is
    # retried.
    held = session.consumers.get(body.consumer_id)
    if held is not None:
        if not held.is_open:
            raise ServiceNotReady(f"consumer {body.consumer_id} is being opened or closed")
        session.succeed(body.request_id)
        return
    options = _options(session, body)
    session.check_room()
    handle = ConsumerHandle(session, body.consumer_id)
    # Registered before the first await: a second command with this id finds it.
    session.consumers[body.consumer_id] = handle
    try:
        context = session.context
        await admit(context, name)
        # On a segment the subscription is one of the whole scalable topic, and is made there first.
        if options.durable and context.has_scalable:
            options = await context.scalable.subscribing(name, options)
        create = body.force_topic_creation and may_create(context, name)
        with used(context, name):
            topic = await context.topics.get(name, create=create)
        subscription = await topic.subscription(options)
        try:
            consumer = await _admitted(session, subscription, options)
        except BaseException:
            await release(topic, subscription)  # it may have been made for this consumer alone
            raise
    # Also when cancelled: the client's next attempt must not find a handle that never opens.
    except BaseException:
        session.consumers.pop(body.consumer_id, None)
        raise
    finally:
        handle.opening.set()
    # Invariant 2: answered before the loop that delivers is started.
    session.succeed(body.request_id)
    handle.open(topic, subscription, consumer)


async def close_consumer(session: Session, body: pb.CommandCloseConsumer) -> None:
    handle = session.consumers.get(body.consumer_id)
    if handle is not None:
        await handle.close()
        # While it closed, a new consumer may have taken the id.
        if session.consumers.get(body.consumer_id) is handle:
            del session.consumers[body.consumer_id]
    session.succeed(body.request_id)


async def unsubscribe(session: Session, body: pb.CommandUnsubscribe) -> None:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.topic is None or handle.subscription is None:
        raise MetadataError(f"there is no consumer {body.consumer_id}")
    topic, subscription = handle.topic, handle.subscription
    # The broker ends all consumers of it, this one too; its client waits for SUCCESS, not for a
    # CLOSE_CONSUMER.
    handle.leaving = True
    try:
        await topic.delete_subscription(subscription.name, by=handle.consumer, force=body.force)
    except BaseException as error:
        handle.leaving = False
        handle.tell_if_stopped()
        # Pulsar's code for it, a ServerMetadataException, when others are connected.
        if isinstance(error, ConsumerBusy):
            raise MetadataError(str(error)) from error
        raise
    await handle.close()
    if session.consumers.get(body.consumer_id) is handle:
        del session.consumers[body.consumer_id]
    # If this was its last consumer on any segment, the subscription of the whole topic goes too.
    if session.context.has_scalable and subscription.durable:
        await session.context.scalable.unsubscribed(topic.name, subscription.name)
    session.succeed(body.request_id)


async def _admitted(
    session: Session, subscription: OpenSubscription, options: SubscribeRequest
) -> Consumer:
    """The consumer, in the place of an exclusive one whose connection turns out to be dead."""
    try:
        return subscription.add_consumer(options)
    except ConsumerBusy:
        # The others can be shared, or have a rule of their own for who is active.
        if options.type is not SubscriptionType.EXCLUSIVE:
            raise
        # Asked of the peers, not of their topics: a dead one learns nothing until its connection
        # times out (Pulsar's connectionLivenessCheckTimeoutMillis).
        others = {each.options.connection for each in subscription.consumers} - {session}
        dead = [
            other
            for other in others
            if isinstance(other, Session) and not await is_alive(other, session.limits)
        ]
        if not dead:
            raise
        for other in dead:
            # Until it has left its topics: only then is the place free.
            await other.ended.wait()
    return subscription.add_consumer(options)


def _options(session: Session, body: pb.CommandSubscribe) -> SubscribeRequest:
    kind = SubscriptionType(body.subType)
    # For readers alone: a durable subscription begins at its `initialPosition`.
    start = body.start_message_id if body.HasField("start_message_id") else None
    metadata = metadata_of(body.metadata, session.limits)
    return SubscribeRequest(
        subscription=body.subscription,
        type=kind,
        consumer_id=body.consumer_id,
        connection=session,
        name=name_of(body.consumer_name, session.limits),
        priority_level=body.priority_level,
        durable=body.durable,
        initial_position=InitialPosition(body.initialPosition),
        start=None if start is None else message_id_of(start),
        rollback_seconds=body.start_message_rollback_duration_sec,
        key_shared=_key_shared(session, body) if kind is SubscriptionType.KEY_SHARED else None,
        metadata=metadata,
        # The isolation may stand in the consumer's metadata too, for clients that can set only
        # that.
        subscription_properties=with_isolation(
            metadata_of(body.subscription_properties, session.limits), metadata
        ),
        read_compacted=body.read_compacted,
        schema=schema_of(body.schema) if body.HasField("schema") else None,
        consumer_epoch=body.consumer_epoch if body.HasField("consumer_epoch") else None,
        address=session.address,
        client_version=session.client_version,
    )


def _key_shared(session: Session, body: pb.CommandSubscribe) -> KeySharedPolicy:
    meta, most = body.keySharedMeta, session.limits.subscribe_ranges_max
    # Before anything is made of them.
    if len(meta.hashRanges) > most:
        raise ConsumerAssign(
            f"{len(meta.hashRanges)} hash ranges; the limit is {most}",
            hint="join neighbours, or raise subscribe_ranges_max",
        )
    out_of_order, bucketed = meta.allowOutOfOrderDelivery, meta.entryBucketDispatch
    ranges = [(each.start, each.end) for each in meta.hashRanges]
    try:
        # AUTO_SPLIT is also what a client means that leaves the field out.
        if not body.HasField("keySharedMeta") or meta.keySharedMode == pb.AUTO_SPLIT:
            return KeySharedPolicy(out_of_order=out_of_order, entry_buckets=bucketed)
        if bucketed:
            # Who lets keys move out of order takes them in order too.
            return KeySharedPolicy.bucketed(ranges)
        return KeySharedPolicy.sticky(ranges, out_of_order=out_of_order)
    # Wrong ranges are the consumer's fault in Pulsar's terms: ConsumerAssignError, not NotAllowed.
    except NotAllowed as error:
        raise ConsumerAssign(str(error)) from error


# --- in frame order


def flow(session: Session, body: pb.CommandFlow) -> None:
    handle = session.consumers.get(body.consumer_id)
    # FLOW crosses CLOSE_CONSUMER: permits of a consumer that is gone are worth nothing.
    if handle is not None and handle.consumer is not None:
        handle.consumer.flow(body.messagePermits)


def ack(session: Session, body: pb.CommandAck) -> Coroutine[Any, Any, None] | None:
    count = _counted(session, body.message_id, "ACK")
    handle, subscription, consumer = _consumer_of(session, body)
    cumulative = body.ack_type == pb.CommandAck.Cumulative
    # What "everything up to" means of several ids is not defined.
    if cumulative and count != 1:
        raise NotAllowed(f"a cumulative acknowledgement of {count} messages")
    if count > SLICE_ITEMS:
        return _ack_many(session, body)
    acks = _acks_of(session, body.message_id)
    if body.HasField("txnid_most_bits") and body.HasField("txnid_least_bits"):
        _ack_in_txn(session, body, acks, subscription, consumer)
        return None
    subscription.ack(consumer, acks, cumulative=cumulative)
    _answer_ack(handle, subscription, body)
    return None


async def _ack_many(session: Session, body: pb.CommandAck) -> None:
    """More ids than a turn of the loop has time for: slice by slice, none of them twice."""
    ids = body.message_id
    # In a transaction they are all acknowledged, or none of them.
    if body.HasField("txnid_most_bits") and body.HasField("txnid_least_bits"):
        acks: list[Ack] = []
        for part in slices(ids):
            acks += _acks_of(session, part)
            await asyncio.sleep(0)
        _, subscription, consumer = _consumer_of(session, body)
        _ack_in_txn(session, body, acks, subscription, consumer)
        return
    for part in slices(ids):
        # Asked for each: the consumer may have been closed between two slices.
        handle, subscription, consumer = _consumer_of(session, body)
        subscription.ack(consumer, _acks_of(session, part))
        await asyncio.sleep(0)
    handle, subscription, _ = _consumer_of(session, body)
    _answer_ack(handle, subscription, body)


def _counted(session: Session, ids: Sized, name: str) -> int:
    """How many ids a command names; they count against this turn of the loop."""
    count, most = len(ids), session.limits.command_ids_max
    if count > most:
        raise NotAllowed(
            f"{name} of {count} message ids; the limit is {most}",
            hint="send several commands, or raise command_ids_max",
        )
    session.spend(count)
    return count


def _consumer_of(
    session: Session, body: pb.CommandAck
) -> tuple[ConsumerHandle, OpenSubscription, Consumer]:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.subscription is None or handle.consumer is None:
        raise ConsumerNotFound(f"there is no consumer {body.consumer_id}")
    return handle, handle.subscription, handle.consumer


def _acks_of(session: Session, ids: Iterable[pb.MessageIdData]) -> list[Ack]:
    # A set of open messages says how large it is: without a limit a few bytes would cost megabytes.
    words_max = session.limits.ack_set_words
    acks: list[Ack] = []
    for each in ids:
        ledger, entry, words = each.ledgerId, each.entryId, each.ack_set
        # As `position_of`, without its calls: only an id that stands for no entry has the high bit.
        is_placed = not (ledger | entry) >> 63
        position = _new(Position, (ledger, entry)) if is_placed else position_of(each)
        acks.append(_new(Ack, (position, unacked_of(words, words_max) if words else 0)))
    return acks


def _ack_in_txn(
    session: Session,
    body: pb.CommandAck,
    acks: list[Ack],
    subscription: OpenSubscription,
    consumer: Consumer,
) -> None:
    # PIP-31: held until the transaction ends. Answered by work that outlives this session.
    if not isinstance(subscription, Subscription):
        raise NotAllowed("a topic that keeps nothing takes no transactional acknowledgements")
    work = subscription.ack_in_txn(
        consumer,
        TxnId(body.txnid_most_bits, body.txnid_least_bits),
        acks,
        cumulative=body.ack_type == pb.CommandAck.Cumulative,
    )
    session.answer_at_end(work, pb.BaseCommand.ACK, body, _acked_in_txn)


def _answer_ack(
    handle: ConsumerHandle, subscription: OpenSubscription, body: pb.CommandAck
) -> None:
    # With ackReceiptEnabled the client waits; others trust that acks become durable soon.
    if body.HasField("request_id"):
        handle.answer_when_durable(subscription, body.request_id)


def _acked_in_txn(body: pb.CommandAck, _: None) -> bytes | None:
    if not body.HasField("request_id"):
        return None
    txn = TxnId(body.txnid_most_bits, body.txnid_least_bits)
    return encode_ack_answer(body.consumer_id, body.request_id, txn)


def redeliver(
    session: Session, body: pb.CommandRedeliverUnacknowledgedMessages
) -> Coroutine[Any, Any, None] | None:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.subscription is None or handle.consumer is None:
        return None
    subscription, consumer = handle.subscription, handle.consumer
    # No ids means all that this consumer has.
    count = _counted(session, body.message_ids, "REDELIVER_UNACKNOWLEDGED_MESSAGES")
    if (
        count or consumer.unacked
    ) > SLICE_ITEMS and not consumer.options.type.takes_cumulative_acks:
        return _redeliver_many(subscription, consumer, body)
    positions = [position_of(each) for each in body.message_ids]
    epoch = body.consumer_epoch if body.HasField("consumer_epoch") else None
    subscription.redeliver(consumer, positions or None, epoch)
    return None


async def _redeliver_many(
    subscription: OpenSubscription,
    consumer: Consumer,
    body: pb.CommandRedeliverUnacknowledgedMessages,
) -> None:
    # What it has at this moment: nothing is asked for twice that comes again between two slices.
    if not body.message_ids:
        for some in slices(consumer.pending()):
            subscription.redeliver(consumer, some)
            await asyncio.sleep(0)
    for part in slices(body.message_ids):
        subscription.redeliver(consumer, [position_of(each) for each in part])
        await asyncio.sleep(0)


# --- requests


async def seek(session: Session, body: pb.CommandSeek) -> None:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.subscription is None:
        raise MetadataError(f"there is no consumer {body.consumer_id}")
    subscription = handle.subscription
    if body.HasField("message_id"):
        target = body.message_id
        unacked = unacked_of(target.ack_set, session.limits.ack_set_words)
        await subscription.seek(position_of(target), unacked)
    elif body.HasField("message_publish_time"):
        await subscription.seek_time(body.message_publish_time)
    else:
        raise NotAllowed("a seek needs a message id or a time")
    # A client that has heard of the success first would come back to where it had read up to.
    handle.tell_if_stopped()
    session.succeed(body.request_id)


async def get_last_message_id(session: Session, body: pb.CommandGetLastMessageId) -> None:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.topic is None or handle.subscription is None:
        raise MetadataError(f"there is no consumer {body.consumer_id}")
    topic, subscription = handle.topic, handle.subscription
    compacted = handle.consumer is not None and handle.consumer.options.read_compacted
    position, batch_index = await topic.last_message(subscription.isolation, compacted=compacted)
    partition = -1 if topic.name.partition is None else topic.name.partition
    marked = position
    # hasMessageAvailable of readers compares the two: from where on, and up to where.
    if isinstance(subscription, Subscription):
        marked = subscription.cursor.mark_delete
    session.write(
        command(
            "GET_LAST_MESSAGE_ID_RESPONSE",
            request_id=body.request_id,
            last_message_id=id_fields(position, partition) | {"batch_index": batch_index},
            consumer_mark_delete_position=id_fields(marked, partition),
        )
    )


async def consumer_stats(session: Session, body: pb.CommandConsumerStats) -> None:
    handle = session.consumers.get(body.consumer_id)
    if handle is None or handle.subscription is None or handle.consumer is None:
        raise ConsumerNotFound(f"there is no consumer {body.consumer_id}")
    stats = handle.consumer.stats()
    session.write(
        command(
            "CONSUMER_STATS_RESPONSE",
            request_id=body.request_id,
            msgRateOut=stats.msg_rate_out,
            msgThroughputOut=stats.msg_throughput_out,
            msgRateRedeliver=stats.msg_rate_redeliver,
            consumerName=stats.consumer_name,
            # The field is unsigned, and a batch may have brought permits below 0.
            availablePermits=max(stats.available_permits, 0),
            unackedMessages=stats.unacked_messages,
            blockedConsumerOnUnackedMsgs=stats.blocked_consumer_on_unacked_msgs,
            address=stats.address,
            connectedSince=stats.connected_since,
            type=TYPE_NAMES[handle.consumer.options.type],
            msgBacklog=handle.subscription.visible_backlog(),
        )
    )
