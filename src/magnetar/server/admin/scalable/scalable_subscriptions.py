"""`/admin/v2/scalable/.../subscriptions`: subscriptions of whole scalable topics.

Invariants:
1. What moves a subscription moves it on all segments, and is durable when it is answered.
"""

from __future__ import annotations

from typing import Final, cast

from aiohttp import web

from magnetar.broker.topic.topic import Topic
from magnetar.errors import InvalidArgument, SubscriptionNotFound, TopicNotFound
from magnetar.scalable.records import StartPosition, SubscriptionKind, segment_topic
from magnetar.server.admin import endpoints
from magnetar.server.admin.errors import NOT_FOUND
from magnetar.server.admin.exchange import (
    body_of,
    done,
    part_of,
    refused,
    server_of,
    shown,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.server.admin.scalable.scalable_topics import SCALABLE
from magnetar.server.admin.scalable.state import (
    group_json,
    read_record,
    read_view,
    subscription_json,
)
from magnetar.server.admin.topics.peek import as_response

# Checkpoint consumers have no subscription: their client keeps the positions.
_KINDS: Final = ("STREAM", "QUEUE")
_POSITIONS: Final = ("earliest", "latest")


async def states(request: web.Request) -> web.Response:
    view = await read_view(request, topic_of(request))
    subscriptions = {
        each.name: await subscription_json(request, view, each) for each in view.subscriptions
    }
    # Groups of checkpoint consumers belong to no subscription, and stand beside them.
    groups = {each.name: group_json(each) for each in view.groups if each.kind == "CHECKPOINT"}
    return shown({"subscriptions": subscriptions, "checkpointGroups": groups})


async def state(request: web.Request) -> web.Response:
    view = await read_view(request, topic_of(request))
    name = part_of(request, "subscription")
    for each in view.subscriptions:
        if each.name == name:
            return shown(await subscription_json(request, view, each))
    raise SubscriptionNotFound(f"{view.topic} has no subscription {name!r}")


async def create(request: web.Request) -> web.Response:
    topic, name = topic_of(request), part_of(request, "subscription")
    kind = request.query.get("type", "QUEUE").upper()
    # Said before anything is created (exchange, invariant 3).
    if kind not in _KINDS:
        raise InvalidArgument(f"type must be one of {', '.join(_KINDS)}, not {kind!r}")
    position = request.query.get("position", "earliest")
    if position not in _POSITIONS:
        raise InvalidArgument(
            f"position must be one of {', '.join(_POSITIONS)}, not {position!r}",
            hint="create it at one of these, then seek to a time",
        )
    # 404 if there is no such topic: creating a subscription must not look like creating it.
    await read_record(request, topic)
    wanted = cast("SubscriptionKind", kind)
    properties = await body_of(request, dict[str, str]) or {}
    scalable = server_of(request).context.scalable
    start = cast("StartPosition", position)
    await scalable.create_subscription(topic, name, wanted, properties, start)
    return done()


async def delete(request: web.Request) -> web.Response:
    topic, name = topic_of(request), part_of(request, "subscription")
    await read_record(request, topic)
    if not await server_of(request).context.scalable.delete_subscription(topic, name):
        raise SubscriptionNotFound(f"{topic} has no subscription {name!r}")
    return done()


async def seek(request: web.Request) -> web.Response:
    topic, name = topic_of(request), part_of(request, "subscription")
    # By time only: a message id is of one segment, and the topic has several.
    if "timestamp" not in request.query:
        raise InvalidArgument("a seek needs a timestamp, in milliseconds")
    timestamp = whole_number(request.query["timestamp"], "the timestamp")
    await read_record(request, topic)
    await server_of(request).context.scalable.seek_subscription(topic, name, timestamp)
    return done()


async def skip_all(request: web.Request) -> web.Response:
    topic, name = topic_of(request), part_of(request, "subscription")
    # Checked first in all of these: a missing topic is told apart from a missing subscription.
    await read_record(request, topic)
    await server_of(request).context.scalable.skip_all(topic, name)
    return done()


async def expire(request: web.Request) -> web.Response:
    topic, name = topic_of(request), part_of(request, "subscription")
    # At least a second: 0 would expire what was published just now.
    seconds = whole_number(part_of(request, "seconds"), "the age in seconds", least=1)
    await read_record(request, topic)
    await server_of(request).context.scalable.expire(topic, name, seconds)
    return done()


async def peek(request: web.Request) -> web.Response:
    """Show a message of one segment: those of several have no order among each other."""
    view, name = await read_view(request, topic_of(request)), part_of(request, "subscription")
    number = whole_number(part_of(request, "number"), "the number of a message", least=1)
    segment_id = whole_number(part_of(request, "segment"), "the id of a segment")
    # Three things may be missing, and each is said by its name.
    if segment_id not in view.layout.segments:
        raise TopicNotFound(f"{view.topic} has no segment {segment_id}")
    segment = segment_topic(view.topic, view.layout.segments[segment_id])
    topic = await topics_of(request).get(segment, create=False)
    found = topic.subscriptions.get(name) if isinstance(topic, Topic) else None
    if found is None:
        raise SubscriptionNotFound(f"{view.topic} has no subscription {name!r}")
    entry = await found.peek(number)
    if entry is None:
        return refused(NOT_FOUND, f"the backlog of segment {segment_id} has no message {number}")
    return await as_response(request, entry)


_SUBSCRIPTION: Final = f"{SCALABLE}/subscriptions/{{subscription}}"

ROUTES: Final = (
    endpoints.get(f"{SCALABLE}/subscriptions", states),
    endpoints.get(_SUBSCRIPTION, state),
    endpoints.put(_SUBSCRIPTION, create),
    endpoints.delete(_SUBSCRIPTION, delete),
    endpoints.post(f"{_SUBSCRIPTION}/seek", seek),
    endpoints.post(f"{_SUBSCRIPTION}/skip-all", skip_all),
    endpoints.post(f"{_SUBSCRIPTION}/expireMessages/{{seconds}}", expire),
    endpoints.get(f"{_SUBSCRIPTION}/segment/{{segment}}/position/{{number}}", peek),
)
