"""Policies with one value for each key: backlog quotas by type, dispatch rates by subscription.

Relies on: `verbs.py` for what is changed and checked; here is only which part of the value.
"""

from __future__ import annotations

from typing import Final, get_args

import msgspec
from aiohttp import web

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    BacklogQuota,
    DispatchRate,
    QuotaType,
    SubscriptionPolicies,
)
from magnetar.errors import InvalidArgument
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import NAMESPACE, TOPIC
from magnetar.server.admin.exchange import (
    done,
    namespace_of,
    needed_body_of,
    part_of,
    shown,
    shown_or_nothing,
    topics_of,
)
from magnetar.server.admin.policies.verbs import (
    change_topic,
    check_together,
    policies_shown,
)

SUBSCRIPTIONS_MAX: Final = 1000
"""Of one topic that have a rate of their own: they stand in its record."""

# --- backlog quotas


async def show_namespace_quotas(request: web.Request) -> web.Response:
    found = await topics_of(request).namespaces.policies(namespace_of(request))
    return shown(found.backlog_quota_map)


async def set_namespace_quota(request: web.Request) -> web.Response:
    return await _change_namespace_quota(request, await needed_body_of(request, BacklogQuota))


async def clear_namespace_quota(request: web.Request) -> web.Response:
    return await _change_namespace_quota(request, None)


async def _change_namespace_quota(request: web.Request, quota: BacklogQuota | None) -> web.Response:
    kind = _quota_type(request)
    broker = topics_of(request).namespaces.broker

    def changed(found: Policies) -> Policies:
        after = _with_quota(found, kind, quota)
        if quota is not None:
            check_together(after, None, broker)
        return after

    await topics_of(request).change_namespace(namespace_of(request), changed)
    return done()


async def show_topic_quotas(request: web.Request) -> web.Response:
    return shown((await policies_shown(request)).backlog_quota_map)


async def set_topic_quota(request: web.Request) -> web.Response:
    kind, quota = _quota_type(request), await needed_body_of(request, BacklogQuota)
    return await change_topic(request, lambda found: _with_quota(found, kind, quota))


async def clear_topic_quota(request: web.Request) -> web.Response:
    kind = _quota_type(request)
    return await change_topic(
        request, lambda found: _with_quota(found, kind, None), is_removal=True
    )


def _quota_type(request: web.Request) -> QuotaType:
    text = request.query.get("backlogQuotaType", "destination_storage")
    for kind in _QUOTA_TYPES:
        if text == kind:
            return kind
    raise InvalidArgument(
        f"backlogQuotaType must be one of {', '.join(_QUOTA_TYPES)}, not {text!r}"
    )


def _with_quota(policies: Policies, kind: QuotaType, quota: BacklogQuota | None) -> Policies:
    quotas = {each: given for each, given in policies.backlog_quota_map.items() if each != kind}
    if quota is not None:
        quotas[kind] = quota
    return msgspec.structs.replace(policies, backlog_quota_map=quotas)


# --- the rates of single subscriptions


async def show_subscription_rate(request: web.Request) -> web.Response:
    found = await policies_shown(request)
    own = found.subscription_policies.get(part_of(request, "subscription"))
    rate = None if own is None else own.dispatch_rate
    # What holds, where the subscription has none: `policies_shown` knows whether that is asked for.
    if rate is None and request.query.get("applied", "").lower() == "true":
        rate = found.subscription_dispatch_rate
    return shown_or_nothing(rate)


async def set_subscription_rate(request: web.Request) -> web.Response:
    rate = await needed_body_of(request, DispatchRate)
    return await _change_rate(request, rate)


async def clear_subscription_rate(request: web.Request) -> web.Response:
    return await _change_rate(request, None)


async def _change_rate(request: web.Request, rate: DispatchRate | None) -> web.Response:
    name = part_of(request, "subscription")

    def changed(found: Policies) -> Policies:
        kept = {each: own for each, own in found.subscription_policies.items() if each != name}
        if rate is not None:
            kept[name] = SubscriptionPolicies(rate)
        if len(kept) > SUBSCRIPTIONS_MAX:
            raise InvalidArgument(
                f"more than {SUBSCRIPTIONS_MAX} subscriptions with a rate of their own",
                hint="set subscriptionDispatchRate, which holds for all",
            )
        return msgspec.structs.replace(found, subscription_policies=kept)

    return await change_topic(request, changed, is_removal=rate is None)


_QUOTA_TYPES: Final[tuple[QuotaType, ...]] = get_args(QuotaType)
_RATE: Final = f"{TOPIC}/{{subscription}}/dispatchRate"

ROUTES: Final = (
    endpoints.get(f"{NAMESPACE}/backlogQuotaMap", show_namespace_quotas),
    endpoints.post(f"{NAMESPACE}/backlogQuota", set_namespace_quota),
    endpoints.delete(f"{NAMESPACE}/backlogQuota", clear_namespace_quota),
    endpoints.get(f"{TOPIC}/backlogQuotaMap", show_topic_quotas),
    endpoints.post(f"{TOPIC}/backlogQuota", set_topic_quota),
    endpoints.delete(f"{TOPIC}/backlogQuota", clear_topic_quota),
    endpoints.get(_RATE, show_subscription_rate),
    endpoints.post(_RATE, set_subscription_rate),
    endpoints.delete(_RATE, clear_subscription_rate),
)
