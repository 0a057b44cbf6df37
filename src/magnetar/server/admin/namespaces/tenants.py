"""`/admin/v2/tenants`: who owns namespaces."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.broker.policy.namespaces import Namespaces, Tenant
from magnetar.errors import NotAllowed, TopicNotFound
from magnetar.model.names import NamespaceName
from magnetar.server.admin import endpoints
from magnetar.server.admin.errors import CONFLICT
from magnetar.server.admin.exchange import (
    done,
    needed_body_of,
    part_of,
    refused,
    shown,
    topics_of,
)


async def names(request: web.Request) -> web.Response:
    return shown(await topics_of(request).namespaces.tenants.names())


async def show(request: web.Request) -> web.Response:
    name = part_of(request, "tenant")
    found = await topics_of(request).namespaces.tenants.get(name)
    if found is None:
        raise _missing(name)
    return shown(found)


async def create(request: web.Request) -> web.Response:
    name = part_of(request, "tenant")
    # A tenant's name is the first part of every namespace, so it must be fit for one.
    NamespaceName(name, name)  # the same characters are allowed
    namespaces = topics_of(request).namespaces
    body = await needed_body_of(request, Tenant)
    await _check_clusters(namespaces, body)
    if not await namespaces.tenants.create(name, body):
        return refused(CONFLICT, f"tenant {name} exists already")
    return done()


async def update(request: web.Request) -> web.Response:
    name = part_of(request, "tenant")
    namespaces = topics_of(request).namespaces
    body = await needed_body_of(request, Tenant)
    await _check_clusters(namespaces, body)
    if await namespaces.tenants.change(name, lambda _: body) is None:
        raise _missing(name)
    return done()


async def delete(request: web.Request) -> web.Response:
    name = part_of(request, "tenant")
    namespaces = topics_of(request).namespaces
    # Asked here for a 409; the broker refuses it as well, with a 412.
    if await namespaces.names(name):
        return refused(CONFLICT, f"tenant {name} still has namespaces (delete them first)")
    if not await namespaces.delete_tenant(name):
        raise _missing(name)
    return done()


async def _check_clusters(namespaces: Namespaces, tenant: Tenant) -> None:
    # As Pulsar: a tenant that may be served nowhere is a mistake.
    if not tenant.allowed_clusters:
        raise NotAllowed("a tenant needs at least one allowed cluster")
    unknown = set(tenant.allowed_clusters) - set(await namespaces.clusters.names())
    if unknown:
        raise NotAllowed(f"there is no cluster {', '.join(sorted(unknown))}")


def _missing(name: str) -> TopicNotFound:
    return TopicNotFound(f"there is no tenant {name!r}")


ROUTES: Final = (
    endpoints.get("/admin/v2/tenants", names),
    endpoints.get("/admin/v2/tenants/{tenant}", show),
    endpoints.put("/admin/v2/tenants/{tenant}", create),
    endpoints.post("/admin/v2/tenants/{tenant}", update),
    endpoints.delete("/admin/v2/tenants/{tenant}", delete),
)
