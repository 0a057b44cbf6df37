"""Access to endpoints: who asks, and whether that is allowed, once for every request.

Relies on: `server/authority.py`, where the rules are, and the rows of the table, which say what is
asked for. A request that names no namespace (lists of tenants and clusters, health, metrics) has no
target and is not asked about.
"""

from __future__ import annotations

from aiohttp import web

from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.admin.endpoints import endpoint_of
from magnetar.server.admin.errors import Handler
from magnetar.server.admin.exchange import has_part, namespace_of, server_of, topic_of
from magnetar.server.authority import ANYBODY


@web.middleware
async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    endpoint = endpoint_of(request)
    # A target that cannot be parsed raises here: nobody learns more about it than that.
    target = None if endpoint is None else _target(request)
    if endpoint is not None and target is not None:
        authority = server_of(request).context.authority
        for action in endpoint.actions:
            # Without authentication everybody is the same principal, as on connections of clients.
            authority.authorise(ANYBODY, action, target)
    return await handler(request)


def _target(request: web.Request) -> TopicName | NamespaceName | None:
    # A topic is the closer target: rules for it may differ from those of its namespace.
    if has_part(request, "topic"):
        return topic_of(request)
    return namespace_of(request) if has_part(request, "namespace") else None
