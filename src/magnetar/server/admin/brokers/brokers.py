"""`/admin/v2/brokers`: whether the broker is well and ready, who it is, and its settings.

Invariants:
1. Health goes through the metadata store: a broker whose storage does not answer is not well.
2. The broker is ready from the end of its start until it begins to stop, except while its disk is
   too full for messages; nobody is sent to it else.
3. The broker is alive while its loop answers, also while it is not ready: to restart it would not
   help. A storage that failed ends the process by itself.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.errors import ServiceNotReady, TopicNotFound
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import (
    AdminServer,
    done,
    part_of,
    server_of,
    shown,
    topics_of,
)

_TEXT: Final = "text/plain"


async def health(request: web.Request) -> web.Response:
    server = server_of(request)
    await check_ready(server)
    # Here alone: who cannot publish needs the metrics all the more.
    server.topics.publish_gate.check()
    return web.Response(text="ok", content_type=_TEXT)


async def live(request: web.Request) -> web.Response:
    return web.Response(text="ok", content_type=_TEXT)  # that it answers is all (invariant 3)


async def check_ready(server: AdminServer) -> None:
    """Raise unless the broker serves: its storage answers, and holds what every start creates."""
    # Stopping first: load balancers must take it out before its topics go.
    if server.stopping:
        raise ServiceNotReady("the server is stopping", hint="use another one, or wait")
    # A real read of the store; the namespace is made at every start (invariant 1).
    if not await server.topics.namespaces.exists(DEFAULT):
        raise ServiceNotReady("the server is starting", hint="wait a moment")


async def show_version(request: web.Request) -> web.Response:
    return web.Response(text=version("magnetar"), content_type=_TEXT)


async def leader(request: web.Request) -> web.Response:
    server = server_of(request)
    # One broker, so it leads; tools that look for the leader go on with its address.
    return shown({"brokerId": broker_id(server), "serviceUrl": server.admin_url or ""})


async def brokers_of_cluster(request: web.Request) -> web.Response:
    server = server_of(request)
    cluster = part_of(request, "cluster")
    # Pulsar's path for active brokers: of another cluster nothing is known here.
    if cluster != server.config.cluster:
        raise TopicNotFound(f"there is no broker of cluster {cluster!r} here")
    return shown([broker_id(server)])


async def brokers(request: web.Request) -> web.Response:
    return shown([broker_id(server_of(request))])


async def check_quotas(request: web.Request) -> web.Response:
    await topics_of(request).enforce_quotas()
    context = server_of(request).context
    if context.has_scalable:
        await context.scalable.enforce_quotas()
    return done()


def broker_id(server: AdminServer) -> str:
    """`host:port` of its admin interface, as tools know a broker."""
    # Without an admin interface of its own the service address still tells brokers apart.
    return urlsplit(server.admin_url or server.service_url).netloc


ROUTES: Final = (
    endpoints.get("/health", health),
    endpoints.get("/live", live),
    endpoints.get("/ready", health),
    endpoints.get("/admin/v2/brokers", brokers),
    endpoints.get("/admin/v2/brokers/health", health),
    endpoints.get("/admin/v2/brokers/ready", health),
    endpoints.get("/admin/v2/brokers/version", show_version),
    endpoints.get("/admin/v2/brokers/leaderBroker", leader),
    endpoints.get("/admin/v2/brokers/backlog-quota-check", check_quotas),
    endpoints.get("/admin/v2/brokers/{cluster}", brokers_of_cluster),
)
