"""`/admin/v2/scalable/.../subscriptions`: subscriptions of whole scalable topics.

Invariants:
1. What moves a subscription moves it on all segments, and is durable when it is answered.
"""

from __future__ import annotations

from typing import Final, cast

from aiohttp import web

from magnetar.errors import InvalidArgument, SubscriptionNotFound
from magnetar.scalable.records import SubscriptionKind
from magnetar.server.admin.exchange import (
    body_of,
    done,
    part_of,
    server_of,
    shown,
    topic_of,
    whole_number,
)
from magnetar.server.admin.scalable.scalable_topics import SCALABLE
from magnetar.server.admin.scalable.state import (
    group_json,
    read_record,
    read_view,
    subscription_json,
)

# Checkpoint consumers have no subscription: their client keeps the positions.
_KINDS: Final = ("STREAM", "QUEUE")


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
    # 404 if there is no such topic: creating a subscription must not look like creating it.
    await read_record(request, topic)
    wanted = cast("SubscriptionKind", kind)
    properties = await body_of(request, dict[str, str]) or {}
    scalable = server_of(request).context.scalable
    await scalable.create_subscription(topic, name, wanted, properties)
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


_SUBSCRIPTION: Final = f"{SCALABLE}/subscriptions/{{subscription}}"

ROUTES: Final = (
    web.get(f"{SCALABLE}/subscriptions", states),
    web.get(_SUBSCRIPTION, state),
    web.put(_SUBSCRIPTION, create),
    web.delete(_SUBSCRIPTION, delete),
    web.post(f"{_SUBSCRIPTION}/seek", seek),
    web.post(f"{_SUBSCRIPTION}/skip-all", skip_all),
)
