"""Endpoints that Pulsar has and this server does not: 501 and why, instead of a bare 404.

Owns: the rows of the table that answer so. A row goes when its endpoint is built; one may cover
everything below a path.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from magnetar.server.admin.endpoints import ANY, NAMESPACE, TOPIC, Endpoint
from magnetar.server.admin.errors import NOT_BUILT
from magnetar.server.admin.exchange import refused
from magnetar.server.authority import Action

_REST: Final = "{rest:(/.*)?}"
_CLUSTER: Final = "/admin/v2/clusters/{cluster}"
_BUNDLE: Final = f"{NAMESPACE}/{{bundle:0x[^/]*_0x[^/]*}}"

_AUTHORIZATION: Final = "authorization is not enabled: there are no permissions"
_ONE_CLUSTER: Final = "there is one cluster: nothing is replicated, isolated or migrated"
_ONE_MACHINE: Final = "all entries are on this machine: there are no bookies and no other tiers"
_FUNCTIONS: Final = "this server runs no functions and keeps no packages"
_GROUPS: Final = "there are no resource groups"
_NO_JVM: Final = "this server has no JVM and no allocators of Netty; see /metrics"


def _whole(path: str, why: str) -> Endpoint:
    """All of a path, and everything below it."""
    return _one(f"{path}{_REST}", why)


def _one(path: str, why: str, method: str = ANY) -> Endpoint:
    async def not_built(request: web.Request) -> web.Response:
        return refused(NOT_BUILT, f"{request.path} is not supported by this server: {why}")

    return Endpoint(method, path, not_built, tuple(Action), unbuilt=why)


# Every method, where none is named: 501 is the same answer for a look and for a change.
ROUTES: Final = (
    _whole("/admin/v2/brokers/shutdown", "end its process by a signal"),
    _whole("/admin/v2/broker-stats/metrics", "see /metrics"),
    _whole("/admin/v2/broker-stats/mbeans", _NO_JVM),
    _whole("/admin/v2/broker-stats/allocator-stats", _NO_JVM),
    _whole("/admin/v2/broker-stats", "there is no load manager"),
    _whole("/admin/v2/loadManager", "there is no load manager"),
    _whole("/admin/v2/{what:bookies|metadata}", _ONE_MACHINE),
    _one("/admin/v2/resource-quotas", "a namespace is one bundle, which is not balanced"),
    _whole("/admin/v2/resourcegroups", _GROUPS),
    _whole(
        "/admin/v2/{what:functions|functions-worker|sinks|sources|source|sink|worker|worker-stats}",
        _FUNCTIONS,
    ),
    _whole("/admin/v2/segments", "brokers ask each other for segments by the binary protocol"),
    _whole("/admin/v2/persistent-topics", "topics stand below /admin/v2/persistent"),
    # All of v3 but transactions.
    _whole("/admin/v3/{what:functions|sinks|sources|packages}", _FUNCTIONS),
    _one(
        "/admin/v3/transactions/positionStatsInPendingAck/{rest:.*}",
        "positions are told by pendingAckInternalStats",
    ),
    _whole("/admin/v3/transactions/transactionCoordinator", "there are always as many"),
    # Clusters.
    _whole(f"{_CLUSTER}/{{what:peers|failureDomains|namespaceIsolationPolicies}}", _ONE_CLUSTER),
    _whole(f"{_CLUSTER}/migrate", _ONE_CLUSTER),
    # Namespaces. `permissions`, then what stands below it.
    _whole(f"{NAMESPACE}/permissions", _AUTHORIZATION),
    _one("/admin/v2/namespaces/{what:(grant|revoke)PermissionsOnTopics}", _AUTHORIZATION),
    _whole(f"{NAMESPACE}/entryFilters", "entries are filtered by no plug-in"),
    _whole(f"{NAMESPACE}/resourcegroup", _GROUPS),
    _whole(f"{NAMESPACE}/{{what:migration|migrate}}", _ONE_CLUSTER),
    _whole(f"{_BUNDLE}", "a namespace is one bundle"),
    # Topics.
    _one("/admin/v2/schemas/{tenant}/{namespace}/{topic}/metadata", "see the list of its versions"),
    _whole(f"{TOPIC}/permissions", _AUTHORIZATION),
    _whole(f"{TOPIC}/entryFilters", "entries are filtered by no plug-in"),
    _whole(f"{TOPIC}/shadowTopics", _ONE_CLUSTER),
    _whole(f"{TOPIC}/offload", _ONE_MACHINE),
    _one(
        f"{TOPIC}/subscription/{{subscription}}/replicatedSubscriptionStatus", _ONE_CLUSTER, "POST"
    ),
    _whole(f"{TOPIC}/backlog", "a topic that is not loaded is loaded to be asked: see its stats"),
)
