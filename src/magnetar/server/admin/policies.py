"""Policies of namespaces and of single topics: one table, the same three verbs for each.

Owns: which policies can be set, under which names. What is not in the table is not built, and says
so (`unsupported.py`).

Invariants:
1. A policy that is not set is 204 without a body; `?applied=true` asks for what holds for a topic.
2. Setting one changes the loaded topics before the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, get_args

import msgspec
from aiohttp import web

from magnetar.broker.policy.policies import (
    AutoSubscriptionCreation,
    AutoTopicCreation,
    DelayedDeliveryPolicies,
    InactiveTopicPolicies,
    Policies,
    RetentionPolicies,
    TransactionKind,
)
from magnetar.errors import InvalidArgument, NotAllowed
from magnetar.model.names import Domain, TopicName
from magnetar.scalable.layout.autoscale import check_override, read_override
from magnetar.server.admin.exchange import (
    done,
    flag_of,
    namespace_of,
    needed_body_of,
    server_of,
    shown_or_nothing,
    topic_of,
    topics_of,
)

Handler = Callable[[web.Request], Awaitable[web.Response]]


class Policy(NamedTuple):
    """One policy."""

    namespace_name: str
    """As a part of a namespace's path."""
    topic_name: str | None
    """As a part of a topic's path; None: it is for namespaces only."""
    field: str
    kind: type[Any]
    default: Any = None
    """What `applied` gives where nothing is set."""
    check: Callable[[Any], Any] | None = None
    """What more is checked of a value, and what is stored."""
    allowed: Callable[[web.Request, Any], None] | None = None
    """Raises if this server cannot have it."""


def _checked_override(given: dict[str, object]) -> dict[str, object]:
    # Read, checked and written back: unknown members are refused, not stored.
    override = read_override(given)
    check_override(override)
    stored: dict[str, object] = msgspec.to_builtins(override)
    return stored


def _checked_kind(given: str) -> str:
    if given not in get_args(TransactionKind):
        kinds = ", ".join(get_args(TransactionKind))
        raise InvalidArgument(f"transactionKind must be one of {kinds}, not {given!r}")
    return given


def _check_kind(request: web.Request, kind: str) -> None:
    # The setting of the broker is stronger: the namespace would wait for markers that never come.
    if kind == "markers" and server_of(request).config.transaction_kind == "metadata":
        raise NotAllowed(
            "no transaction of this broker ends by markers: its transaction_kind is metadata",
            hint="change that setting, or leave the namespace to it",
        )


# Names are Pulsar's, and differ between namespaces and topics.
POLICIES: Final = (
    Policy("retention", "retention", "retention_policies", RetentionPolicies, RetentionPolicies()),
    Policy("deduplication", "deduplicationEnabled", "deduplication_enabled", bool, False),
    Policy("autoTopicCreation", None, "auto_topic_creation", AutoTopicCreation),
    Policy(
        "autoSubscriptionCreation",
        "autoSubscriptionCreation",
        "auto_subscription_creation",
        AutoSubscriptionCreation,
        AutoSubscriptionCreation(),
    ),
    Policy(
        "inactiveTopicPolicies",
        "inactiveTopicPolicies",
        "inactive_topic_policies",
        InactiveTopicPolicies,
        InactiveTopicPolicies(),
    ),
    Policy(
        "delayedDelivery", "delayedDelivery", "delayed_delivery_policies", DelayedDeliveryPolicies
    ),
    Policy("maxProducersPerTopic", "maxProducers", "max_producers_per_topic", int, 0),
    Policy("maxConsumersPerTopic", "maxConsumers", "max_consumers_per_topic", int, 0),
    Policy(
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
        "max_subscriptions_per_topic",
        int,
        0,
    ),
    Policy(
        "scalableTopicAutoScalePolicy",
        None,
        "scalable_topic_auto_scale_policy",
        dict,
        check=_checked_override,
    ),
    Policy(
        "transactionKind", None, "transaction_kind", str, check=_checked_kind, allowed=_check_kind
    ),
)


# --- of namespaces


def _show_for_namespace(policy: Policy) -> Handler:
    async def show(request: web.Request) -> web.Response:
        found = await topics_of(request).namespaces.policies(namespace_of(request))
        return shown_or_nothing(getattr(found, policy.field))

    return show


def _set_for_namespace(policy: Policy) -> Handler:
    async def change(request: web.Request) -> web.Response:
        value = _checked(policy, await needed_body_of(request, policy.kind))
        # After the value itself: whether this server can have it is another kind of refusal.
        if policy.allowed is not None:
            policy.allowed(request, value)
        name = namespace_of(request)
        await topics_of(request).change_namespace(name, lambda found: _with(found, policy, value))
        return done()

    return change


def _clear_for_namespace(policy: Policy) -> Handler:
    async def clear(request: web.Request) -> web.Response:
        name = namespace_of(request)
        await topics_of(request).change_namespace(name, lambda found: _with(found, policy, None))
        return done()

    return clear


# --- of topics


def _show_for_topic(policy: Policy) -> Handler:
    async def show(request: web.Request) -> web.Response:
        name = _persistent(request)
        topics = topics_of(request)
        value = getattr(await topics.topic_policies(await _first(request, name)), policy.field)
        # Topic, namespace, default: the order of `effective`.
        if value is None and flag_of(request, "applied"):
            namespace = await topics.namespaces.policies(name.namespace)
            value = getattr(namespace, policy.field)
            value = policy.default if value is None else value
        return shown_or_nothing(value)

    return show


def _set_for_topic(policy: Policy) -> Handler:
    async def change(request: web.Request) -> web.Response:
        value = _checked(policy, await needed_body_of(request, policy.kind))
        return await _change_topic(request, policy, value)

    return change


def _clear_for_topic(policy: Policy) -> Handler:
    async def clear(request: web.Request) -> web.Response:
        return await _change_topic(request, policy, None)

    return clear


async def _change_topic(request: web.Request, policy: Policy, value: Any) -> web.Response:
    topics = topics_of(request)
    # A partitioned topic's record has no policies: each partition has them.
    for name in await _targets(request, _persistent(request)):
        await topics.change_topic(name, lambda found: _with(found, policy, value))
    return done()


async def _targets(request: web.Request, name: TopicName) -> list[TopicName]:
    """A partitioned topic's policies are those of its partitions."""
    record = await topics_of(request).partitioned.get(name)
    if record is None:
        return [name]
    return [name.with_partition(number) for number in range(record.partitions)]


async def _first(request: web.Request, name: TopicName) -> TopicName:
    return (await _targets(request, name))[0]


def _persistent(request: web.Request) -> TopicName:
    name = topic_of(request)
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(f"{name} is not persistent: it has only the policies of its namespace")
    return name


# --- parts


def _with(policies: Policies, policy: Policy, value: Any) -> Policies:
    return msgspec.structs.replace(policies, **{policy.field: value})


def _checked(policy: Policy, value: Any) -> Any:
    # 0 means no limit; below it nothing is meant.
    if policy.kind is int and value < 0:
        raise InvalidArgument(f"{policy.namespace_name} must be at least 0, not {value}")
    return value if policy.check is None else policy.check(value)


_NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
_TOPIC: Final = "/admin/v2/{domain:persistent|non-persistent}/{tenant}/{namespace}/{topic}"


# POST and PUT alike: Java's tools use one or the other, depending on the policy.
def _routes(policy: Policy) -> list[web.RouteDef]:
    path = f"{_NAMESPACE}/{policy.namespace_name}"
    routes = [
        web.get(path, _show_for_namespace(policy)),
        web.post(path, _set_for_namespace(policy)),
        web.put(path, _set_for_namespace(policy)),
        web.delete(path, _clear_for_namespace(policy)),
    ]
    if policy.topic_name is not None:
        path = f"{_TOPIC}/{policy.topic_name}"
        routes += [
            web.get(path, _show_for_topic(policy)),
            web.post(path, _set_for_topic(policy)),
            web.put(path, _set_for_topic(policy)),
            web.delete(path, _clear_for_topic(policy)),
        ]
    return routes


ROUTES: Final = tuple(route for policy in POLICIES for route in _routes(policy))
