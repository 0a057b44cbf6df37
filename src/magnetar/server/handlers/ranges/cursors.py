"""RANGE_MOVE: the cursors of a subscription follow who reads ranges.

Owns: how such a subscription comes to be. On a scalable topic it is one of the whole topic: it is
recorded before it has a cursor, established on every segment there is, and made with every segment
to come. So a sealed segment is kept until the subscription has passed it (its drained mark is
written as for any other), and its backlog is seen by everybody who asks for statistics.

Invariant: a topic that is named is moved only after its subscription exists everywhere.
"""

from __future__ import annotations

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.ranges.cursors import move_cursor
from magnetar.broker.ranges.view import RangeView
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.errors import NotAllowed, SubscriptionNotFound
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.isolation import ReadIsolation
from magnetar.model.subscriptions import (
    InitialPosition,
    SubscriptionType,
    check_subscription_name,
)
from magnetar.server.handlers.ranges.values import Fields, for_each, named_topic, position_from
from magnetar.server.session import Session
from magnetar.wire.frames import command
from magnetar.wire.pb import pulsar_pb2 as pb


async def move(session: Session, body: pb.CommandRangeMove) -> None:
    # Once for all topics of the command: a bad name is one error, not one per topic.
    check_subscription_name(body.subscription)
    is_earliest = body.initial_position == pb.CommandSubscribe.Earliest
    initial = InitialPosition.EARLIEST if is_earliest else InitialPosition.LATEST

    # Each topic by itself: one that moved to another broker does not keep the others waiting.
    async def one(cursor: pb.RangeCursor) -> Fields:
        topic = await named_topic(session, cursor.topic)
        subscription = await _subscription(session, topic, body.subscription, initial)
        has_position = cursor.HasField("position")
        position = position_from(cursor.position) if has_position else None
        view = RangeView(topic, ReadIsolation.COMMITTED)
        await move_cursor(view, topic.name, subscription, position)
        return {}

    moved = await for_each(session, body.cursors, one)
    session.write(command("RANGE_MOVE_RESPONSE", request_id=body.request_id, moved=moved))


async def _subscription(
    session: Session, topic: Topic, name: str, initial: InitialPosition
) -> Subscription:
    """The subscription, made if there is none; on a scalable topic, of all of it."""
    options = SubscribeRequest(
        name, SubscriptionType.FAILOVER, 0, session, initial_position=initial
    )
    context = session.context
    # The invariant: recorded for the scalable topic, and on every segment, before any cursor moves.
    if context.has_scalable:
        options = await context.scalable.subscribing(topic.name, options)
    found = topic.subscriptions.get(name)
    if found is None:
        # A reader of ranges needs the right as a consumer would.
        if not topic.policies.auto_subscription_creation:
            raise SubscriptionNotFound(
                f"{topic.name} has no subscription {name!r}, and none is made by using it"
            )
        is_earliest = options.initial_position is InitialPosition.EARLIEST
        await topic.create_subscription(
            name, EARLIEST if is_earliest else topic.max_read_position()
        )
        found = topic.subscriptions[name]
    # A reader's own position under this name: it would vanish with that reader.
    if not found.durable:
        raise NotAllowed(f"subscription {name!r} of {topic.name} is not durable")
    return found
