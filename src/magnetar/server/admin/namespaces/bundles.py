"""Work on all topics of a namespace at once, and its one bundle, through which tools ask for it.

Invariants:
1. A namespace is one bundle, which spans all hashes; another one is 412.
2. Topics are taken one after the other, loaded where they are not, and others have their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from magnetar.broker.policy.values import ResourceQuota
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import ListMode
from magnetar.errors import NotAllowed, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import NAMESPACE
from magnetar.server.admin.exchange import (
    done,
    has_part,
    namespace_of,
    needed_body_of,
    part_of,
    shown,
    topics_of,
)
from magnetar.server.admin.namespaces.namespaces import unload
from magnetar.server.admin.policies.verbs import with_value

BUNDLE: Final = "0x00000000_0xffffffff"


async def bundles(request: web.Request) -> web.Response:
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    return shown(found.bundles)


async def unload_bundle(request: web.Request) -> web.Response:
    _check_bundle(request)
    return await unload(request)


async def split_bundle(request: web.Request) -> web.Response:
    raise NotAllowed(
        f"namespace {namespace_of(request)} is not divided",
        hint="a scalable topic is divided by its keys: split one of its segments",
    )


async def clear_backlog(request: web.Request) -> web.Response:
    """Skip everything that is waiting: of one subscription, or of all."""
    _check_bundle(request)
    wanted = part_of(request, "subscription") if has_part(request, "subscription") else None
    async for topic in _topics(request):
        # A list: subscriptions come and go while one of them is written.
        for name, subscription in list(topic.subscriptions.items()):
            # What is to be compacted is nobody's backlog, unless it is named.
            if wanted == name or (wanted is None and name != COMPACTION):
                subscription.skip_all()
                await subscription.ack_durable()
    return done()


async def unsubscribe(request: web.Request) -> web.Response:
    """Delete a subscription on all topics that have it; one with consumers is refused."""
    _check_bundle(request)
    name = part_of(request, "subscription")
    async for topic in _topics(request):
        if name in topic.subscriptions:
            await topic.delete_subscription(name)
    return done()


async def _topics(request: web.Request) -> AsyncIterator[Topic]:
    topics, namespace = topics_of(request), namespace_of(request)
    # 404 for a namespace that does not exist, before the first topic.
    await topics.namespaces.policies(namespace)
    for name in await topics.names(namespace, ListMode.PERSISTENT):
        try:
            topic = await topics.get(TopicName.parse(name), create=False)
        except TopicNotFound:
            continue  # deleted since it was listed
        assert isinstance(topic, Topic)
        yield topic
        await asyncio.sleep(0)


async def default_quota(request: web.Request) -> web.Response:
    return shown(ResourceQuota())


async def quota(request: web.Request) -> web.Response:
    _check_bundle(request)
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    return shown(found.resource_quota or ResourceQuota())


async def set_quota(request: web.Request) -> web.Response:
    return await _change_quota(request, await needed_body_of(request, ResourceQuota))


async def reset_quota(request: web.Request) -> web.Response:
    return await _change_quota(request, None)


async def _change_quota(request: web.Request, given: ResourceQuota | None) -> web.Response:
    _check_bundle(request)
    # The record alone: no topic follows it.
    await topics_of(request).namespaces.change(
        namespace_of(request), lambda found: with_value(found, "resource_quota", given)
    )
    return done()


def _check_bundle(request: web.Request) -> None:
    if has_part(request, "bundle") and part_of(request, "bundle") != BUNDLE:
        raise NotAllowed(f"there is no bundle {part_of(request, 'bundle')}: only {BUNDLE}")


_QUOTAS: Final = "/admin/v2/resource-quotas"
_QUOTA: Final = f"{_QUOTAS}/{{tenant}}/{{namespace}}/{{bundle}}"
_BUNDLE: Final = f"{NAMESPACE}/{{bundle:0x[^/]*_0x[^/]*}}"

ROUTES: Final = (
    endpoints.get(f"{NAMESPACE}/bundles", bundles),
    endpoints.get(_QUOTAS, default_quota),
    endpoints.get(_QUOTA, quota, policy="resource_quota"),
    endpoints.post(_QUOTA, set_quota, policy="resource_quota"),
    endpoints.delete(_QUOTA, reset_quota, policy="resource_quota"),
    endpoints.put(f"{_BUNDLE}/unload", unload_bundle),
    endpoints.put(f"{_BUNDLE}/split", split_bundle),
    endpoints.post(f"{NAMESPACE}/clearBacklog", clear_backlog),
    endpoints.post(f"{NAMESPACE}/clearBacklog/{{subscription}}", clear_backlog),
    endpoints.post(f"{_BUNDLE}/clearBacklog", clear_backlog),
    endpoints.post(f"{_BUNDLE}/clearBacklog/{{subscription}}", clear_backlog),
    endpoints.post(f"{NAMESPACE}/unsubscribe/{{subscription}}", unsubscribe),
    endpoints.post(f"{_BUNDLE}/unsubscribe/{{subscription}}", unsubscribe),
)
