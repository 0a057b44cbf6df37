"""Policies of namespaces and of single topics: the same three verbs for each row of the table.

Invariants:
1. A policy that is not set is 204 without a body, or what its row says; `?applied=true` asks for
   what holds for a topic.
2. Setting one changes the loaded topics before the answer.
3. A value is checked together with what its own level sets inside the change, so that two changes
   at once cannot pass each other; with what a namespace sets, as it is when a topic is changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.effective import resolved
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import check_quotas
from magnetar.errors import InvalidArgument, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import NAMESPACE, TOPIC
from magnetar.server.admin.exchange import (
    Refusal,
    converted,
    done,
    flag_of,
    namespace_of,
    needed_body_of,
    shown_or_nothing,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.server.admin.policies.table import MISSING, OF_BROKER, POLICIES, Policy

Handler = Callable[[web.Request], Awaitable[web.Response]]


# --- of namespaces


def _show_for_namespace(policy: Policy) -> Handler:
    async def show(request: web.Request) -> web.Response:
        namespaces = topics_of(request).namespaces
        value = getattr(await namespaces.policies(namespace_of(request)), policy.field)
        if value is None and policy.unset is MISSING:
            raise TopicNotFound(f"{policy.namespace_name} of {namespace_of(request)} is not set")
        if value is None and policy.unset is OF_BROKER:
            value = getattr(namespaces.broker, policy.field)
        return shown_or_nothing(policy.unset if value is None else value)

    return show


def _set_for_namespace(policy: Policy) -> Handler:
    async def change(request: web.Request) -> web.Response:
        value = await _value_of(request, policy)
        namespaces = topics_of(request).namespaces

        def changed(found: Policies) -> Policies:
            after = with_value(found, policy.field, value)
            check_together(after, None, namespaces.broker)
            return after

        await topics_of(request).change_namespace(namespace_of(request), changed)
        return done()

    return change


def _clear_for_namespace(policy: Policy) -> Handler:
    async def clear(request: web.Request) -> web.Response:
        name = namespace_of(request)
        await topics_of(request).change_namespace(
            name, lambda found: with_value(found, policy.field, None)
        )
        return done()

    return clear


# --- of topics


def _show_for_topic(policy: Policy) -> Handler:
    async def show(request: web.Request) -> web.Response:
        found = await policies_shown(request)
        value = getattr(found, policy.field)
        return shown_or_nothing(None if value == _NOT_SET[policy.field] else value)

    return show


async def policies_shown(request: web.Request) -> Policies:
    """What a topic sets, or what holds for it if `applied` is asked for."""
    name = persistent_of(request)
    topics = topics_of(request)
    own = await topics.topic_policies((await targets_of(request, name))[0])
    if not flag_of(request, "applied"):
        return own
    namespaces = topics.namespaces
    return resolved(await namespaces.policies(name.namespace), own, namespaces.broker)


def _set_for_topic(policy: Policy) -> Handler:
    async def change(request: web.Request) -> web.Response:
        value = await _value_of(request, policy, by_query=policy.by_query)
        return await change_topic(request, lambda found: with_value(found, policy.field, value))

    return change


def _clear_for_topic(policy: Policy) -> Handler:
    async def clear(request: web.Request) -> web.Response:
        return await change_topic(
            request, lambda found: with_value(found, policy.field, None), is_removal=True
        )

    return clear


async def change_topic(
    request: web.Request, change: Callable[[Policies], Policies], *, is_removal: bool = False
) -> web.Response:
    """Change what a topic sets: of a partitioned one, what each of its partitions does."""
    topics = topics_of(request)
    name = persistent_of(request)
    namespace = await topics.namespaces.policies(name.namespace)

    def changed(found: Policies) -> Policies:
        after = change(found)
        # What is left after a removal was there before, or is the namespace's.
        if not is_removal:
            check_together(namespace, after, topics.namespaces.broker)
        return after

    # A partitioned topic's record has no policies: each partition has them.
    await topics.change_topics(await targets_of(request, name), changed)
    return done()


async def targets_of(request: web.Request, name: TopicName) -> list[TopicName]:
    """A partitioned topic's policies are those of its partitions."""
    record = await topics_of(request).partitioned.get(name)
    if record is None:
        return [name]
    return [name.with_partition(number) for number in range(record.partitions)]


def persistent_of(request: web.Request) -> TopicName:
    """The topic of a request, refused if it can have no policies of its own."""
    name = topic_of(request)
    if name.domain is not Domain.PERSISTENT:
        raise Refusal(405, f"{name} is not persistent: it has only its namespace's policies")
    return name


# --- parts


def with_value(policies: Policies, field: str, value: Any) -> Policies:
    """The policies with one of them set, or with None not set."""
    value = _NOT_SET[field] if value is None else value
    return msgspec.structs.replace(policies, **{field: value})


def check_together(namespace: Policies, topic: Policies | None, broker: Policies) -> None:
    """NotAllowed if policies that were set contradict each other."""
    retention = resolved(namespace, topic, broker).retention_policies
    quotas = namespace.backlog_quota_map | (topic.backlog_quota_map if topic else {})
    # Those of the broker are its operator's business: no request could mend them.
    if retention is not None:
        check_quotas(quotas, retention)


async def _value_of(request: web.Request, policy: Policy, *, by_query: bool = False) -> Any:
    if by_query:
        name = policy.topic_name or ""
        text = request.query.get(name)
        if text is None:
            raise InvalidArgument(f"the request needs a query value {name}")
        value = converted(whole_number(text, name), policy.kind)
    else:
        value = await needed_body_of(request, policy.kind)
    return checked(request, policy, value)


def checked(request: web.Request, policy: Policy, value: Any) -> Any:
    """A value of the right kind, as it is stored; refused if this server cannot have it."""
    if policy.check is not None:
        value = policy.check(value)
    # After the value itself: whether this server can have it is another kind of refusal.
    if policy.allowed is not None:
        policy.allowed(request, value)
    return value


_NOT_SET: Final = {
    each.name: getattr(Policies(), each.name) for each in msgspec.structs.fields(Policies)
}


# POST and PUT alike: Java's tools use one or the other, depending on the policy.
def _routes(policy: Policy) -> list[endpoints.Endpoint]:
    routes: list[endpoints.Endpoint] = []
    if policy.namespace_name is not None:
        path = f"{NAMESPACE}/{policy.namespace_name}"
        routes += [
            endpoints.get(path, _show_for_namespace(policy), policy=policy.field),
            endpoints.post(path, _set_for_namespace(policy), policy=policy.field),
            endpoints.put(path, _set_for_namespace(policy), policy=policy.field),
        ]
        clear = _clear_for_namespace(policy)
        if not policy.is_always_set:
            routes.append(endpoints.delete(path, clear, policy=policy.field))
        if policy.field == "offload_policies":  # Pulsar's path for it
            path = f"{NAMESPACE}/removeOffloadPolicies"
            routes.append(endpoints.delete(path, clear, policy=policy.field))
    if policy.topic_name is not None:
        path = f"{TOPIC}/{policy.topic_name}"
        routes += [
            endpoints.get(path, _show_for_topic(policy), policy=policy.field),
            endpoints.post(path, _set_for_topic(policy), policy=policy.field),
            endpoints.put(path, _set_for_topic(policy), policy=policy.field),
            endpoints.delete(path, _clear_for_topic(policy), policy=policy.field),
        ]
    return routes


ROUTES: Final = tuple(route for policy in POLICIES for route in _routes(policy))
