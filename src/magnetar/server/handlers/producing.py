"""The commands of producers: PRODUCER and CLOSE_PRODUCER (SEND goes straight from the session)."""

from __future__ import annotations

from magnetar.broker.api import AccessMode, ProducerRequest
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.errors import ProducerBusy, ServiceNotReady
from magnetar.model.names import TopicName
from magnetar.server.authority import Action
from magnetar.server.handlers.names import admit, admit_producer, may_create, used
from magnetar.server.handlers.values import metadata_of, name_of, schema_of
from magnetar.server.handles import ProducerHandle
from magnetar.server.keepalive import is_alive
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb


async def producer(session: Session, body: pb.CommandProducer) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.PRODUCE, name)
    held = session.producers.get(body.producer_id)
    # As ServerCnx: PRODUCER again for an open id gets its answer again. One that the broker has
    # closed lately is opened anew.
    if held is not None and not held.is_closed_by_broker:
        if held.producer is None:
            raise ServiceNotReady(f"producer {body.producer_id} is being opened or closed")
        session.write(_success(body.request_id, held.producer))
        return
    options = _options(session, body)
    session.check_room()
    handle = ProducerHandle(session, body.producer_id)
    # Before the first await, so that a second PRODUCER with this id finds it.
    session.producers[body.producer_id] = handle
    try:
        if held is not None:
            await held.close()  # it may not have left its topic yet
        await admit(session.context, name)
        create = may_create(session.context, name)
        await admit_producer(session.context, name)
        with used(session.context, name):
            topic = await session.context.topics.get(name, create=create)
            opened = await _admitted(session, topic, options)
    except BaseException:
        del session.producers[body.producer_id]
        if held is not None:  # what was sent to it may still be on its way
            session.producers[body.producer_id] = held
        raise
    finally:
        handle.opening.set()
    # The answer goes out before the first receipt can (handles, invariant 2).
    session.write(_success(body.request_id, opened))
    handle.open(topic, opened)
    # PIP-68, WaitForExclusive: answered twice, at once with `producer_ready` false, and when it is.
    if not opened.ready:
        session.spawn(_tell_when_ready(session, body.request_id, opened), "wait for the topic")


async def close_producer(session: Session, body: pb.CommandCloseProducer) -> None:
    handle = session.producers.get(body.producer_id)
    if handle is not None:
        await handle.close()
        if session.producers.get(body.producer_id) is handle:
            del session.producers[body.producer_id]
    session.succeed(body.request_id)


async def _admitted(session: Session, topic: LoadedTopic, options: ProducerRequest) -> Producer:
    """The producer on its topic, in the place of one whose connection turns out to be dead."""
    try:
        return await topic.add_producer(options)
    except ProducerBusy:
        # A name that the broker made up is nobody else's.
        holder = topic.producers.named(options.name) if options.name else None
        if holder is None or not isinstance(holder.connection, Session):
            raise
        other = holder.connection
        # On the same connection it is the client's own mistake; a living peer keeps its name.
        if other is session or await is_alive(other, session.limits):
            raise
        await other.ended.wait()
    return await topic.add_producer(options)


def _options(session: Session, body: pb.CommandProducer) -> ProducerRequest:
    return ProducerRequest(
        producer_id=body.producer_id,
        connection=session,
        name=name_of(body.producer_name, session.limits) or None,
        user_provided_name=body.user_provided_producer_name,
        epoch=body.epoch,
        access_mode=AccessMode(body.producer_access_mode),
        topic_epoch=body.topic_epoch if body.HasField("topic_epoch") else None,
        metadata=metadata_of(body.metadata, session.limits),
        schema=schema_of(body.schema) if body.HasField("schema") else None,
        encrypted=body.encrypted,
        initial_subscription=body.initial_subscription_name or None,
        address=session.address,
        client_version=session.client_version,
    )


def _success(request_id: int, opened: Producer) -> bytes:
    fields: dict[str, object] = {}
    # None until somebody had the topic for itself; clients show it again when they reconnect.
    if opened.topic_epoch is not None:
        fields["topic_epoch"] = opened.topic_epoch
    return command(
        "PRODUCER_SUCCESS",
        request_id=request_id,
        producer_name=opened.name,
        last_sequence_id=opened.last_sequence_id,
        schema_version=opened.schema_version,
        producer_ready=opened.ready,
        **fields,
    )


async def _tell_when_ready(session: Session, request_id: int, opened: Producer) -> None:
    if await opened.until_ready():
        session.write(_success(request_id, opened))
