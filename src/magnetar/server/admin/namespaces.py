"""`/admin/v2/namespaces`: namespaces and the topics in them (their policies: `policies.py`)."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.effective import effective
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.stats import RetentionStats
from magnetar.broker.topic.topics import ListMode
from magnetar.errors import Conflict, InvalidArgument, NotAllowed, TopicNotFound
from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.admin.errors import CONFLICT
from magnetar.server.admin.exchange import (
    body_of,
    done,
    flag_of,
    namespace_of,
    part_of,
    refused,
    server_of,
    shown,
    topics_of,
)
from magnetar.server.admin.topics.topics import names_in

_MODES: Final = {
    "PERSISTENT": ListMode.PERSISTENT,
    "NON_PERSISTENT": ListMode.NON_PERSISTENT,
    "ALL": ListMode.ALL,
}


class NamespaceBody(msgspec.Struct, frozen=True):
    """The policies that a new namespace takes; the rest have endpoints of their own."""

    replication_clusters: list[str] = []


async def names(request: web.Request) -> web.Response:
    found = await topics_of(request).namespaces.names(part_of(request, "tenant"))
    return shown([str(name) for name in found])


async def show(request: web.Request) -> web.Response:
    namespaces = topics_of(request).namespaces
    found = await namespaces.policies(namespace_of(request))
    # Beside what is set: what holds, for most people set nothing.
    in_force = {"persistent": effective(found, broker=namespaces.broker)}
    context = server_of(request).context
    if context.has_scalable:
        in_force["topic"] = context.scalable.policies(found)
    retention = {domain: RetentionStats.of(each) for domain, each in in_force.items()}
    shown_policies = set_policies(found, namespaces.cluster) | {
        "retentionInForce": msgspec.to_builtins(retention)
    }
    return shown(shown_policies)


async def create(request: web.Request) -> web.Response:
    name = namespace_of(request)
    body = await body_of(request, NamespaceBody) or NamespaceBody()
    namespaces = topics_of(request).namespaces
    # Checked before anything is stored (exchange, invariant 3).
    unknown = set(body.replication_clusters) - set(await namespaces.clusters.names())
    if unknown:
        raise NotAllowed(f"there is no cluster {', '.join(sorted(unknown))}")
    policies = Policies(replication_clusters=body.replication_clusters)
    if not await namespaces.create(name, policies):
        return refused(CONFLICT, f"namespace {name} exists already")
    return done()


async def delete(request: web.Request) -> web.Response:
    name = namespace_of(request)
    topics = topics_of(request)
    force = flag_of(request, "force")
    # Looked up once: the same list is what `force` deletes.
    scalable = _scalable_topics(request, name)
    # Asked here for a 409 with a hint; `delete_namespace` checks again for itself.
    if not force:
        present = await topics.names(name, ListMode.ALL) or await topics.partitioned.names(name)
        if present or scalable:
            return refused(CONFLICT, f"namespace {name} has topics (delete them first, or force)")
    # Scalable topics first: their segments are deleted with them, not one by one.
    for each in scalable:
        await _delete_scalable(request, each)
    if not await topics.delete_namespace(name, force=force):
        raise TopicNotFound(f"namespace {name} does not exist")
    return done()


async def _delete_scalable(request: web.Request, topic: TopicName) -> None:
    scalable = server_of(request).context.scalable
    try:
        await scalable.delete(topic, force=True)
    except TopicNotFound:
        # Its record is there without a layout: a change is under way that this cannot wait for.
        if await scalable.layouts.read(topic) is not None:
            raise Conflict(f"{topic} is being created or deleted", hint="try again") from None


def _scalable_topics(request: web.Request, namespace: NamespaceName) -> list[TopicName]:
    """All of them, also those that are being created or deleted."""
    context = server_of(request).context
    if not context.has_scalable:
        return []
    found = [record.topic for record in context.scalable.layouts.records.values()]
    return [topic for topic in found if topic.namespace == namespace]


async def topics_in(request: web.Request) -> web.Response:
    mode = _MODES.get(request.query.get("mode", "PERSISTENT").upper())
    if mode is None:
        raise InvalidArgument(f"mode must be one of {', '.join(_MODES)}")
    return shown(await names_in(request, mode))


async def unload(request: web.Request) -> web.Response:
    namespace = namespace_of(request)
    topics = topics_of(request)
    # 404 for a namespace that does not exist: nothing of it is loaded either.
    await topics.namespaces.policies(namespace)
    # Segments of its scalable topics included; a list, for topics come and go in the pauses.
    for name in [each for each in topics.loaded if each.namespace == namespace]:
        await topics.unload(name)
    return done()


def set_policies(policies: Policies, cluster: str) -> dict[str, Any]:
    """What is set; tools take what is missing for the default."""
    found = msgspec.to_builtins(policies)
    kept = _UNSET | {name: value for name, value in found.items() if value is not None}
    for name in _BY_CLUSTER & kept.keys():
        kept[name] = {cluster: kept[name]}
    return kept


# Java's `Policies` has no value for "not set" in these.
_UNSET: Final = {
    "encryption_required": False,
    "schema_compatibility_strategy": "UNDEFINED",
    "schema_validation_enforced": False,
    "subscription_auth_mode": "None",
    "subscription_types_enabled": [],
    "offload_threshold": -1,
    "offload_threshold_in_seconds": -1,
}
# There, each cluster has its own.
_BY_CLUSTER: Final = frozenset(
    {
        "publishMaxMessageRate",
        "topicDispatchRate",
        "subscriptionDispatchRate",
        "clusterSubscribeRate",
        "replicatorDispatchRate",
    }
)

_NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"

ROUTES: Final = (
    web.get("/admin/v2/namespaces/{tenant}", names),
    web.get(_NAMESPACE, show),
    web.put(_NAMESPACE, create),
    web.delete(_NAMESPACE, delete),
    web.get(f"{_NAMESPACE}/topics", topics_in),
    web.put(f"{_NAMESPACE}/unload", unload),
)
