"""`/admin/v2/clusters`: the clusters that namespaces may name."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.broker.policy.namespaces import Cluster
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
    return shown(await topics_of(request).namespaces.clusters.names())


async def show(request: web.Request) -> web.Response:
    name = part_of(request, "cluster")
    found = await topics_of(request).namespaces.clusters.get(name)
    if found is None:
        raise _missing(name)
    return shown(found)


async def create(request: web.Request) -> web.Response:
    name = part_of(request, "cluster")
    # Before the body is read: a bad name is a bad name, whatever is in the body.
    NamespaceName(name, name)  # the same characters are allowed
    body = await needed_body_of(request, Cluster)
    if not await topics_of(request).namespaces.clusters.create(name, body):
        return refused(CONFLICT, f"cluster {name} exists already")
    return done()


async def update(request: web.Request) -> web.Response:
    name = part_of(request, "cluster")
    body = await needed_body_of(request, Cluster)
    if await topics_of(request).namespaces.clusters.change(name, lambda _: body) is None:
        raise _missing(name)
    return done()


async def delete(request: web.Request) -> web.Response:
    name = part_of(request, "cluster")
    namespaces = topics_of(request).namespaces
    # Its own record is made anew at every start; deleting it would only hide it until then.
    if name == namespaces.cluster:
        raise NotAllowed(f"cluster {name} is the one that this server belongs to")
    if not await namespaces.clusters.delete(name):
        raise _missing(name)
    return done()


async def nothing_listed(request: web.Request) -> web.Response:
    await _check(request)
    return shown([])


async def nothing_named(request: web.Request) -> web.Response:
    await _check(request)
    return shown({})


async def _check(request: web.Request) -> None:
    name = part_of(request, "cluster")
    if await topics_of(request).namespaces.clusters.get(name) is None:
        raise _missing(name)


def _missing(name: str) -> TopicNotFound:
    return TopicNotFound(f"there is no cluster {name!r}")


_CLUSTER: Final = "/admin/v2/clusters/{cluster}"

ROUTES: Final = (
    endpoints.get("/admin/v2/clusters", names),
    endpoints.get(_CLUSTER, show),
    endpoints.put(_CLUSTER, create),
    endpoints.post(_CLUSTER, update),
    endpoints.delete(_CLUSTER, delete),
    # There are no peers, no domains of failure, and no brokers to be set apart.
    endpoints.get(f"{_CLUSTER}/peers", nothing_listed),
    endpoints.get(f"{_CLUSTER}/failureDomains", nothing_named),
    endpoints.get(f"{_CLUSTER}/namespaceIsolationPolicies", nothing_named),
    endpoints.get(f"{_CLUSTER}/namespaceIsolationPolicies/brokers", nothing_listed),
)
