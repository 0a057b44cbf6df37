"""`.../properties` and `.../property/{key}` of a namespace: texts that tools keep there.

Relies on: the record of the namespace, in which they stand beside its policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.policies import Policies
from magnetar.errors import InvalidArgument
from magnetar.model.names import NamespaceName
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import NAMESPACE
from magnetar.server.admin.exchange import (
    DOCUMENT_BYTES_MAX,
    done,
    namespace_of,
    needed_body_of,
    part_of,
    shown,
    topics_of,
)

_NAMESPACES_PER_TURN: Final = 50


async def show(request: web.Request) -> web.Response:
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    return shown(found.properties)


async def add(request: web.Request) -> web.Response:
    given = await needed_body_of(request, dict[str, str])
    return await _change(request, lambda held: held | given)


async def clear(request: web.Request) -> web.Response:
    return await _change(request, lambda _: {})


async def show_one(request: web.Request) -> web.Response:
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    return _text(found.properties.get(part_of(request, "key")))


async def set_one(request: web.Request) -> web.Response:
    key, value = part_of(request, "key"), part_of(request, "value")
    return await _change(request, lambda held: {**held, key: value})


async def remove_one(request: web.Request) -> web.Response:
    key = part_of(request, "key")
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    await _change(request, lambda held: {name: held[name] for name in held if name != key})
    # What it was, as Pulsar answers.
    return _text(found.properties.get(key))


async def apart(request: web.Request) -> web.Response:
    """The namespaces of a tenant that are in one group of those to be kept apart."""
    tenant = request.query.get("tenant", "")
    if not tenant:
        raise InvalidArgument("the request needs a query value tenant")
    group, found = part_of(request, "group"), []
    namespaces = topics_of(request).namespaces
    for number, name in enumerate(await namespaces.names(tenant), start=1):
        if (await namespaces.policies(name)).anti_affinity_group == group:
            found.append(str(name))
        if number % _NAMESPACES_PER_TURN == 0:
            await asyncio.sleep(0)
    return shown(found)


async def _change(
    request: web.Request, change: Callable[[dict[str, str]], dict[str, str]]
) -> web.Response:
    name: NamespaceName = namespace_of(request)

    def changed(found: Policies) -> Policies:
        after = change(found.properties)
        size = len(msgspec.json.encode(after))
        if size > DOCUMENT_BYTES_MAX:
            raise InvalidArgument(
                f"the properties would have {size} bytes, at most {DOCUMENT_BYTES_MAX}"
            )
        return msgspec.structs.replace(found, properties=after)

    # The record alone: no topic follows properties.
    await topics_of(request).namespaces.change(name, changed)
    return done()


def _text(value: str | None) -> web.Response:
    return done() if value is None else web.Response(text=value, content_type="text/plain")


_PROPERTY: Final = f"{NAMESPACE}/property/{{key}}"

ROUTES: Final = (
    endpoints.get(f"{NAMESPACE}/properties", show),
    endpoints.put(f"{NAMESPACE}/properties", add),
    endpoints.delete(f"{NAMESPACE}/properties", clear),
    endpoints.get(_PROPERTY, show_one),
    endpoints.delete(_PROPERTY, remove_one),
    endpoints.put(f"{_PROPERTY}/{{value}}", set_one),
    endpoints.get("/admin/v2/namespaces/{cluster}/antiAffinity/{group}", apart),
)
