"""Endpoints that Pulsar has and this server does not: 501 and why, instead of a bare 404."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.server.admin.errors import NOT_BUILT
from magnetar.server.admin.exchange import refused

# From Pulsar's REST reference. A name moves out of these lists when its endpoint is built.
_POLICIES: Final = "bundles|clearBacklog|entryFilters|permissions|properties|property"
_OF_TOPICS: Final = (
    f"{_POLICIES}|backlog|backlogSize|compaction|examinemessage|messageid|offload|"
    "replicatedSubscriptionStatus|shadowTopics|trim|truncate|internal-info"
)
_FAMILIES: Final = (
    "bookies|broker-stats|functions|functions-worker|loadManager|packages|persistent-topics|"
    "resource-quotas|resourcegroups|segments|sinks|sources|source|sink|worker|worker-stats"
)
_REST: Final = "{rest:(/.*)?}"


async def not_built(request: web.Request) -> web.Response:
    what = request.match_info["what"]
    return refused(NOT_BUILT, f"{what} is not supported by this server")


_NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
_TOPIC: Final = "/admin/v2/{domain:persistent|non-persistent}/{tenant}/{namespace}/{topic}"

# Every method: 501 is the same answer for a look and for a change.
ROUTES: Final = (
    web.route("*", f"{_NAMESPACE}/{{what:{_POLICIES}}}{_REST}", not_built),
    web.route("*", f"{_TOPIC}/{{what:{_OF_TOPICS}}}{_REST}", not_built),
    web.route("*", f"/admin/v2/{{what:{_FAMILIES}}}{_REST}", not_built),
    # All of v3 but transactions.
    web.route("*", f"/admin/v3/{{what:(?!transactions/)[^/]+}}{_REST}", not_built),
)
