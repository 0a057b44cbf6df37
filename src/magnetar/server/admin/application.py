"""The admin interface put together: all endpoints behind one place for errors and one for access.

Owns: `ENDPOINTS`, the whole table: from path and method to handler, policy and what access it
takes, those that are not built included.

Invariants:
1. Every answer to an error has a `reason`; an endpoint that does not exist is 404, one that is
   known and not built 501.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from magnetar.server.admin import metrics, unbuilt
from magnetar.server.admin.access import authorise
from magnetar.server.admin.brokers import broker_stats, brokers, configuration
from magnetar.server.admin.endpoints import Endpoint, add_endpoints
from magnetar.server.admin.errors import answer_errors
from magnetar.server.admin.exchange import BODY_BYTES_MAX, SERVER, AdminServer
from magnetar.server.admin.namespaces import bundles, clusters, namespaces, properties, tenants
from magnetar.server.admin.policies import keyed, verbs
from magnetar.server.admin.scalable import compaction as scalable_compaction
from magnetar.server.admin.scalable import scalable_subscriptions, scalable_topics
from magnetar.server.admin.topics import (
    analysis,
    compaction,
    lookup,
    messages,
    schemas,
    statistics,
    storage,
    subscriptions,
    topics,
)
from magnetar.server.admin.topics.peek import PEEKS
from magnetar.server.admin.transactions import transactions

# What is not built comes last: the first route that fits a path is taken.
ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    *brokers.ROUTES,
    *configuration.ROUTES,
    *broker_stats.ROUTES,
    *clusters.ROUTES,
    *tenants.ROUTES,
    *namespaces.ROUTES,
    *properties.ROUTES,
    *bundles.ROUTES,
    *topics.ROUTES,
    *statistics.ROUTES,
    *subscriptions.ROUTES,
    *messages.ROUTES,
    *storage.ROUTES,
    *analysis.ROUTES,
    *compaction.ROUTES,
    *verbs.ROUTES,
    *keyed.ROUTES,
    *scalable_topics.ROUTES,
    *scalable_subscriptions.ROUTES,
    *scalable_compaction.ROUTES,
    *schemas.ROUTES,
    *transactions.ROUTES,
    *lookup.ROUTES,
    *metrics.ROUTES,
    *unbuilt.ROUTES,
)


def create_admin(server: AdminServer) -> web.Application:
    """The application that serves the admin interface of a server."""
    # Errors on the outside: a refusal of access becomes an answer like any other.
    application = web.Application(
        middlewares=[answer_errors, authorise], client_max_size=BODY_BYTES_MAX
    )
    application[SERVER] = server
    application[PEEKS] = asyncio.Lock()
    add_endpoints(application, ENDPOINTS)
    return application
