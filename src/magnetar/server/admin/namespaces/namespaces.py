"""`/admin/v2/namespaces`: namespaces and the topics in them (their policies: `policies.py`)."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.effective import effective
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.stats import RetentionStats
from magnetar.broker.policy.values import BacklogQuota, QuotaType
from magnetar.broker.topic.topics import ListMode
from magnetar.errors import Conflict, InvalidArgument, NotAllowed, TopicNotFound
from magnetar.model.names import NamespaceName, TopicName
from magnetar.runtime.slices import SlicePace
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import NAMESPACE
from magnetar.server.admin.errors import CONFLICT
from magnetar.server.admin.exchange import (
    body_of,
    converted,
    done,
    flag_of,
    namespace_of,
    part_of,
    refused,
    server_of,
    shown,
    topics_of,
)
from magnetar.server.admin.policies.table import POLICIES
from magnetar.server.admin.policies.verbs import check_together, checked, with_value
from magnetar.server.admin.topics.topics import names_in

_MODES: Final = {
    "PERSISTENT": ListMode.PERSISTENT,
    "NON_PERSISTENT": ListMode.NON_PERSISTENT,
    "ALL": ListMode.ALL,
}


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
    body = await body_of(request, dict[str, object]) or {}
    namespaces = topics_of(request).namespaces
    clusters = converted(body.get("replication_clusters", []), list[str])
    # Checked before anything is stored (exchange, invariant 3).
    unknown = set(clusters) - set(await namespaces.clusters.names())
    if unknown:
        raise NotAllowed(f"there is no cluster {', '.join(sorted(unknown))}")
    policies = _given(request, body, Policies(replication_clusters=clusters))
    check_together(policies, None, namespaces.broker)
    if not await namespaces.create(name, policies):
        return refused(CONFLICT, f"namespace {name} exists already")
    return done()


def _given(request: web.Request, body: dict[str, object], found: Policies) -> Policies:
    """What a body in the shape of Java's `Policies` sets, checked as if it were set one by one."""
    own = topics_of(request).namespaces.cluster
    for policy in POLICIES:
        wire = _WIRE_NAMES[policy.field]
        value = body.get(wire)
        if wire in _BY_CLUSTER and value is not None:
            value = converted(value, dict[str, object]).get(own)
        # A new `Policies` of Java has these: they say that nothing is set.
        is_unset = value is None or (wire in _UNSET and value == _UNSET[wire])
        if policy.namespace_name is not None and not policy.is_always_set and not is_unset:
            value = checked(request, policy, converted(value, policy.kind))
            found = with_value(found, policy.field, value)
    quotas = converted(body.get("backlog_quota_map") or {}, dict[QuotaType, BacklogQuota])
    properties = converted(body.get("properties") or {}, dict[str, str])
    return msgspec.structs.replace(found, backlog_quota_map=quotas, properties=properties)


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
    pace = SlicePace()
    for name in list(topics.loaded):
        if name.namespace == namespace:
            await topics.unload(name)
        await pace.after()
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
_WIRE_NAMES: Final = {each.name: each.encode_name for each in msgspec.structs.fields(Policies)}
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

ROUTES: Final = (
    endpoints.get("/admin/v2/namespaces/{tenant}", names),
    endpoints.get(NAMESPACE, show),
    endpoints.put(NAMESPACE, create),
    endpoints.delete(NAMESPACE, delete),
    endpoints.get(f"{NAMESPACE}/topics", topics_in),
    endpoints.put(f"{NAMESPACE}/unload", unload),
)
