"""The commands of scalable topics: layouts and their watches, consumers, lists of topics.

Invariants:
1. A watch of a layout is told every layout that was committed, or a later one, in ascending order
   of epochs; several changes at once are told as one.
2. A consumer is told its assignment in the answer to its command, then every change of it. Nobody
   is sent to another broker for it: any broker attaches any consumer.
3. Nothing is pushed while the peer does not take what was written.
4. The updates of a watch of topics, put upon its snapshot, are always the present list.

Relies on: signals that advance after what they stand for has changed; who looks after `past` sees
the change or a later one. Requests begin in the order of their frames: a close that follows its
watch at once, though nobody answers it, finds what the watch has registered before its first await.
"""

from __future__ import annotations

from typing import Any, Final

from magnetar.broker.topic.topics import topics_hash
from magnetar.errors import (
    InvalidTopicName,
    MagnetarError,
    NotAllowed,
    ServiceNotReady,
    TopicNotFound,
)
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.model.subscriptions import check_subscription_name
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import SCALABLE_UPDATES
from magnetar.scalable.groups.sessions import Assignment, ConsumerSession
from magnetar.scalable.records import GroupKind, segment_topic
from magnetar.scalable.service import Dag, ScalableTopics
from magnetar.server.authority import Action
from magnetar.server.context import BrokerUrls, urls_of
from magnetar.server.handlers.scalable_values import assignment_fields, dag_fields, supersedes
from magnetar.server.handlers.values import metadata_of, name_of
from magnetar.server.scalable_handles import MemberHandle, OpenWatch
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb

_log: Final = logger(__name__)

_GATHER_SECONDS: Final = 0.005
"""Topics that come and go within this time after a change was told are told together."""

_CANNOT_SHARE: Final = "5.0.0-M1"
"""Clients of this version do not know entry buckets; they own whole segments only."""

_KINDS: Final[dict[int, GroupKind]] = {pb.STREAM: "STREAM", pb.CHECKPOINT: "CHECKPOINT"}


# --- layouts


async def watch_layout(session: Session, body: pb.CommandScalableTopicLookup) -> None:
    scalable = session.context.scalable
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    if name.domain is Domain.NON_PERSISTENT:
        raise NotAllowed(f"{name} is not persistent and cannot be a scalable topic")
    watches = session.scalable.layouts
    # A client that reconnects may reuse its session id before it has closed the first.
    held = watches.pop(body.session_id, None)
    if held is not None:
        held.close()
    session.check_room()
    # Registered before the first await: a close that overtakes the answer finds it.
    watch = watches[body.session_id] = OpenWatch("layout")
    # Before the lookup: a change that is committed meanwhile is told afterwards.
    seen = scalable.layouts.changed(name.scalable_topic()).version
    try:
        dag = await _found(scalable, name, create=body.create_if_missing)
        frame = await _update(session, body.session_id, dag.topic, dag.layout, dag.synthetic)
        # Invariant 3; and the frame is dropped if the client closed the watch in the meantime.
        await session.outbound.writable()
    except BaseException as error:
        if _is_unwanted(watches, body.session_id, watch, error):
            return
        raise
    if not watch.is_closed:
        session.write(frame)
        watch.follow(session, _tell_layouts(session, body.session_id, dag, seen))


async def close_layout(session: Session, body: pb.CommandScalableTopicClose) -> None:
    held = session.scalable.layouts.pop(body.session_id, None)
    if held is not None:
        held.close()


def _is_unwanted(
    watches: dict[int, OpenWatch], number: int, watch: OpenWatch, error: BaseException
) -> bool:
    """Forget a watch that could not be opened; whether its client closed it and wants no answer."""
    was_closed = watch.is_closed
    watch.close()
    if watches.get(number) is watch:
        del watches[number]
    return was_closed and isinstance(error, MagnetarError)


async def _found(scalable: ScalableTopics, name: TopicName, *, create: bool) -> Dag:
    """Whatever rule keeps the topic from being there, to clients it is not there."""
    try:
        return await scalable.lookup(name, create=create)
    except InvalidTopicName:
        raise
    except NotAllowed as error:
        raise TopicNotFound(str(error)) from error


async def _tell_layouts(session: Session, session_id: int, dag: Dag, seen: int) -> None:
    topic = dag.topic.scalable_topic()
    scalable = session.context.scalable
    # A synthetic layout stands for a regular topic: whatever is committed later is new to its
    # client.
    told = None if dag.synthetic else dag.layout
    follower = scalable.layout_watchers.add(topic, session, -1 if told is None else told.epoch)
    try:
        while True:
            seen = await scalable.layouts.changed(topic).past(seen)
            await session.outbound.writable()
            # Read after both waits: several changes at once are told as the last of them (invariant
            # 1).
            record = scalable.layouts.cached(topic)
            if record is None or record.layout is None:
                continue  # deleted, or not created yet; clients are not told of that
            layout = record.layout.layout()
            if told is None or supersedes(layout, told):
                told = layout
                frame = await _update(session, session_id, topic, layout, synthetic=False)
                session.write(frame)
                # The transaction barrier of a layout change ends once every watch was told the new
                # layout.
                scalable.layout_watchers.told(follower, layout.epoch)
                SCALABLE_UPDATES.labels("layout").inc()
    finally:
        scalable.layout_watchers.remove(follower)


async def _update(
    session: Session, session_id: int, topic: TopicName, layout: SegmentLayout, synthetic: bool
) -> bytes:
    context, resolved = session.context, topic.scalable_topic()
    brokers: dict[int, BrokerUrls] = {}
    controller: BrokerUrls | None = None
    # Without an address that clients can use, they go on with the one they came by.
    if not synthetic and context.is_reachable:
        brokers = await _brokers(session, resolved, layout)
        controller = await _controller(session, resolved)
    return command(
        "SCALABLE_TOPIC_UPDATE",
        session_id=session_id,
        dag=dag_fields(layout, brokers, controller),
        resolved_topic_name=str(resolved),
    )


async def _controller(session: Session, topic: TopicName) -> BrokerUrls | None:
    """None: it is not known now; any broker will do."""
    context = session.context
    try:
        url = await context.scalable.controllers.leader_url(topic)
    except MagnetarError as error:
        _log.info("controller-unknown", topic=str(topic), error=str(error))
        return None
    return None if url is None else urls_of(context, url)


async def _brokers(
    session: Session, topic: TopicName, layout: SegmentLayout
) -> dict[int, BrokerUrls]:
    """The broker of each segment, by its id. Unknown ones are left out: clients can look up."""
    found = {}
    for segment in layout.segments.values():
        try:
            urls = await session.context.owner_urls(segment_topic(topic, segment))
        except MagnetarError as error:
            _log.info("segment-owner-unknown", topic=str(topic), error=str(error))
            # The store does not answer: the others would fail alike, and clients look up what is
            # missing.
            break
        found[segment.segment_id] = urls
    return found


# --- consumers


async def subscribe(session: Session, body: pb.CommandScalableTopicSubscribe) -> None:
    scalable = session.context.scalable
    name = TopicName.parse(body.topic)
    session.authorise(Action.CONSUME, name)
    if name.domain in (Domain.NON_PERSISTENT, Domain.SEGMENT):
        raise NotAllowed(f"{name} is no scalable topic")
    if not body.consumer_name or not body.subscription:
        raise NotAllowed("a consumer of a scalable topic needs a name and a subscription")
    topic, kind = name.scalable_topic(), _KINDS[body.consumer_type]
    check_subscription_name(body.subscription)
    consumer_name = name_of(body.consumer_name, session.limits)
    handle = MemberHandle((str(topic), kind, body.subscription, consumer_name))
    members = session.scalable.members
    # A client that lost its place registers again with the same name, or reuses an id.
    replaced = _replaced(session, body.consumer_id, handle)
    if not replaced:
        session.check_room()
    members[body.consumer_id] = handle
    try:
        # Detached, not removed: it keeps its segments for its successor.
        for each in replaced:
            await each.detach()
        member = await scalable.sessions.attach(
            topic,
            body.subscription,
            consumer_name,
            kind,
            session.scalable.connection_name(session),
            # Only clients that know entry buckets may share a segment with others.
            _CANNOT_SHARE not in session.client_version,
        )
        _answer(session, body, handle, member)
    # A later SUBSCRIBE with this id must not find a consumer that was never attached.
    except BaseException:
        if members.get(body.consumer_id) is handle:
            del members[body.consumer_id]
        raise
    finally:
        handle.opening.set()


def _replaced(session: Session, consumer_id: int, handle: MemberHandle) -> list[MemberHandle]:
    """What the same consumer, or another of this id, had before on this connection."""
    members = session.scalable.members
    numbers = [
        number
        for number, each in members.items()
        if number == consumer_id or each.key == handle.key
    ]
    # Two attempts at once would detach each other.
    if any(not members[number].opening.is_set() for number in numbers):
        raise ServiceNotReady(f"consumer {consumer_id} is being opened")
    return [members.pop(number) for number in numbers]


def _answer(
    session: Session,
    body: pb.CommandScalableTopicSubscribe,
    handle: MemberHandle,
    member: ConsumerSession,
) -> None:
    # Version first: a change between the two is told once more than needed, never once too few.
    seen, told = member.changes.version, member.assignment
    session.write(
        command(
            "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE",
            request_id=body.request_id,
            assignment=assignment_fields(told),
        )
    )
    work = _tell_assignments(session, body.consumer_id, member, told, seen)
    handle.open(member, session.spawn(work, "assignments"))


async def _tell_assignments(
    session: Session, consumer_id: int, member: ConsumerSession, told: Assignment, seen: int
) -> None:
    while True:
        try:
            seen = await member.changes.past(seen)
        # The topic was deleted. If it comes back, its consumers are not known any more.
        except TopicNotFound:
            await _created_again(session, member.topic)
            # No command makes a client register anew but the end of its connection.
            session.close()
            return
        except MagnetarError as error:
            _log.info("assignments-ended", address=session.address, error=str(error))
            return
        await session.outbound.writable()
        assignment = member.assignment
        # Signals say "look", not "changed": an equal assignment is not told.
        if assignment != told:
            told = assignment
            session.write(
                command(
                    "SCALABLE_TOPIC_ASSIGNMENT_UPDATE",
                    consumer_id=consumer_id,
                    assignment=assignment_fields(assignment),
                )
            )
            SCALABLE_UPDATES.labels("assignment").inc()


async def _created_again(session: Session, topic: TopicName) -> None:
    """Until a topic that was deleted is there again, if ever."""
    layouts = session.context.scalable.layouts
    changed = layouts.changed(topic)
    while True:
        seen = changed.version
        record = layouts.cached(topic)
        # `change` is None: created all the way, so that a client that registers now succeeds.
        if record is not None and record.layout is not None and record.change is None:
            return
        await changed.past(seen)


async def unsubscribe(session: Session, body: pb.CommandScalableTopicUnsubscribe) -> None:
    session.context.check_scalable()
    handle = session.scalable.members.get(body.consumer_id)
    if handle is not None:
        # It stays registered if this fails: the client tries again.
        await handle.leave()
        if session.scalable.members.get(body.consumer_id) is handle:
            del session.scalable.members[body.consumer_id]
    session.succeed(body.request_id)


# --- lists of topics


async def watch_topics(session: Session, body: pb.CommandWatchScalableTopics) -> None:
    context = session.context
    layouts = context.scalable.layouts
    namespace = NamespaceName.parse(body.namespace)
    session.authorise(Action.LIST, namespace)
    filters = metadata_of(body.property_filters, session.limits)
    watches = session.scalable.topics
    held = watches.pop(body.watch_id, None)
    if held is not None:
        held.close()
    session.check_room()
    watch = watches[body.watch_id] = OpenWatch("topics")
    try:
        await context.topics.namespaces.policies(namespace)  # refused if there is none
        await session.outbound.writable()
    except BaseException as error:
        if _is_unwanted(watches, body.watch_id, watch, error):
            return
        raise
    # Closed while this waited: nothing is sent for it any more (handles, invariant 1).
    if watch.is_closed:
        return
    # No await from here to the answer: list and version belong together (invariant 4).
    seen = layouts.namespace_changed(namespace).version
    names = layouts.names(namespace, filters)
    # PIP-145's way: a client that reconnects names the hash of what it knows, and is spared the
    # list.
    if not body.HasField("current_hash") or body.current_hash != topics_hash(names):
        session.write(_listed(body.watch_id, snapshot={"topics": names}))
    work = _tell_topics(session, body.watch_id, namespace, filters, names, seen)
    watch.follow(session, work)


async def close_topics(session: Session, body: pb.CommandWatchScalableTopicsClose) -> None:
    held = session.scalable.topics.pop(body.watch_id, None)
    if held is not None:
        held.close()


async def _tell_topics(
    session: Session,
    watch_id: int,
    namespace: NamespaceName,
    filters: dict[str, str],
    names: list[str],
    seen: int,
) -> None:
    layouts = session.context.scalable.layouts
    changes = layouts.namespace_changed(namespace)
    known = set(names)
    while True:
        await changes.past(seen)
        await session.outbound.writable()
        # Taken before the list: what comes in between is looked at again.
        seen = changes.version
        present = set(layouts.names(namespace, filters))
        if present != known:
            diff = {"added": sorted(present - known), "removed": sorted(known - present)}
            known = present
            session.write(_listed(watch_id, diff=diff))
            SCALABLE_UPDATES.labels("topics").inc()
        await session.context.clock.sleep(_GATHER_SECONDS)


def _listed(watch_id: int, **fields: Any) -> bytes:
    return command("WATCH_SCALABLE_TOPICS_UPDATE", watch_id=watch_id, **fields)
