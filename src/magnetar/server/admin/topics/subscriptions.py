"""`.../subscriptions` and `.../subscription/{name}`: reading positions, and how to move them.

Invariants:
1. What names no single message goes to every partition of a partitioned topic; the rest is refused
   for one.
2. What moves a cursor is durable when it is answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.errors import InvalidArgument, NotAllowed, SubscriptionNotFound
from magnetar.managed_ledger.managed_ledger import EARLIEST as BEFORE_ALL
from magnetar.model.ids import EARLIEST, LATEST, Position
from magnetar.model.isolation import asked_isolation
from magnetar.model.subscriptions import COMPACTION
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.errors import CONFLICT, NOT_FOUND
from magnetar.server.admin.exchange import (
    DOCUMENT_BYTES_MAX,
    body_of,
    done,
    flag_of,
    needed_body_of,
    part_of,
    refused,
    shown,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.server.admin.topics.peek import as_response
from magnetar.server.admin.topics.topics import existing, persistent, stored_topic

# MessageId.earliest and MessageId.latest: they mean an end of the topic, not a position.
_SENTINELS: Final = (EARLIEST.position, LATEST.position)


class MessageIdBody(msgspec.Struct, frozen=True, rename="camel"):
    """A message id as tools send it; `excluded`: begin behind it."""

    ledger_id: int = LATEST.ledger_id
    entry_id: int = LATEST.entry_id
    partition_index: int = -1
    excluded: bool = False
    properties: dict[str, str] = {}

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    @property
    def is_sentinel(self) -> bool:
        return self.position in _SENTINELS

    def first(self) -> Position:
        """The first position to be delivered; the sentinels mean the ends of the topic."""
        # "Behind earliest" is not the first message: sentinels are taken as they are.
        if self.is_sentinel or not self.excluded:
            return self.position
        return self.position.next


class ExpiryBody(msgspec.Struct, frozen=True, rename="camel"):
    """A message up to which a subscription is to be done."""

    ledger_id: int
    entry_id: int
    partition_index: int = -1
    is_excluded: bool = False
    batch_index: int = -1


async def names(request: web.Request) -> web.Response:
    found: set[str] = set()
    for name in await existing(request, topic_of(request)):
        found |= (await topics_of(request).get(name, create=False)).subscriptions.keys()
    return shown(sorted(found))


async def create(request: web.Request) -> web.Response:
    """Create a subscription at a message id, or at the end without one."""
    subscription = part_of(request, "subscription")
    start = await body_of(request, MessageIdBody) or MessageIdBody()
    targets = await existing(request, topic_of(request))
    # Invariant 1, before the first partition gets one.
    if len(targets) > 1:
        _check_place(start)
    created = False
    for name in targets:
        topic = await persistent(request, name)
        mark_delete = _mark_delete(topic, start)
        # Some partitions may have it from an attempt that stopped half-way: only all of them is a
        # 409.
        created |= await topic.create_subscription(subscription, mark_delete, start.properties)
    if not created:
        return refused(CONFLICT, f"subscription {subscription!r} exists already")
    return done()


async def delete(request: web.Request) -> web.Response:
    subscription = part_of(request, "subscription")
    force = flag_of(request, "force")
    missing = 0
    targets = await existing(request, topic_of(request))
    for name in targets:
        topic = await topics_of(request).get(name, create=False)
        # Partitions are alike in the end, not at every moment.
        if subscription in topic.subscriptions:
            await topic.delete_subscription(subscription, force=force)
        else:
            missing += 1
    if missing == len(targets):
        raise _missing(subscription)
    return done()


# --- moving


async def skip_all(request: web.Request) -> web.Response:
    async def skip(subscription: Subscription) -> None:
        # In memory at once; durable before the answer (invariant 2).
        subscription.skip_all()
        await subscription.ack_durable()

    return await _for_each(request, skip)


async def skip(request: web.Request) -> web.Response:
    count = whole_number(part_of(request, "count"), "the number of messages", least=1)
    subscription = await _single(request)
    await subscription.skip(count)
    await subscription.ack_durable()
    return done()


async def expire(request: web.Request) -> web.Response:
    # At least a second: 0 would expire what was published just now.
    seconds = whole_number(part_of(request, "seconds"), "the age in seconds", least=1)

    async def skip_old(subscription: Subscription) -> None:
        await subscription.expire(seconds)
        await subscription.ack_durable()

    return await _for_each(request, skip_old)


async def expire_to_id(request: web.Request) -> web.Response:
    """Leave everything out up to a message, itself included unless it is excluded."""
    subscription = await _single(request)
    place = await needed_body_of(request, ExpiryBody)
    position = Position(place.ledger_id, place.entry_id)
    subscription.expire_through(position.previous if place.is_excluded else position)
    await subscription.ack_durable()
    return done()


async def expire_all(request: web.Request) -> web.Response:
    """Leave out what is older, for every subscription of the topic."""
    seconds = whole_number(part_of(request, "seconds"), "the age in seconds", least=1)
    for name in await existing(request, topic_of(request)):
        # A list: subscriptions come and go while one of them is written.
        for subscription in list((await persistent(request, name)).subscriptions.values()):
            # As for what expires by itself: compaction has to see everything.
            if subscription.name == COMPACTION:
                continue
            await subscription.expire(seconds)
            await subscription.ack_durable()
    return done()


async def properties(request: web.Request) -> web.Response:
    """What a subscription was made with; of a partitioned topic, that of its first partition."""
    names = await existing(request, topic_of(request))
    subscription = subscription_of(request, await persistent(request, names[0]))
    return shown(subscription.cursor.properties)


async def change_properties(request: web.Request) -> web.Response:
    given = await needed_body_of(request, dict[str, str])
    size = len(msgspec.json.encode(given))
    if size > DOCUMENT_BYTES_MAX:
        raise InvalidArgument(f"the properties have {size} bytes, at most {DOCUMENT_BYTES_MAX}")
    return await _for_each(request, lambda each: each.change_properties(given))


async def replicated(request: web.Request) -> web.Response:
    """Whether a subscription is replicated: there is one cluster, so none is."""
    name = part_of(request, "subscription")
    found = {}
    for topic in await existing(request, topic_of(request)):
        if name in (await persistent(request, topic)).subscriptions:
            found[str(topic)] = False
    if not found:
        raise _missing(name)
    return shown(found)


async def reset_to_time(request: web.Request) -> web.Response:
    moment = whole_number(part_of(request, "timestamp"), "the time in milliseconds")
    return await _for_each(request, lambda subscription: subscription.seek_time(moment))


async def reset_to_id(request: web.Request) -> web.Response:
    place = await needed_body_of(request, MessageIdBody)
    if len(await existing(request, topic_of(request))) > 1:
        _check_place(place)
    return await _for_each(request, lambda subscription: subscription.seek(place.first()))


async def peek(request: web.Request) -> web.Response:
    number = whole_number(part_of(request, "number"), "the number of a message", least=1)
    subscription = await _single(request)
    entry = await subscription.peek(number)
    if entry is None:
        return refused(NOT_FOUND, f"the backlog has no message {number}")
    return await as_response(request, entry)


# --- parts


async def _for_each(
    request: web.Request, work: Callable[[Subscription], Awaitable[None]]
) -> web.Response:
    # All are looked up before the first is moved: a missing one leaves all as they are.
    found = [
        subscription_of(request, await persistent(request, name))
        for name in await existing(request, topic_of(request))
    ]
    for subscription in found:
        await work(subscription)
    return done()


async def _single(request: web.Request) -> Subscription:
    """The subscription of a topic that is not partitioned (one partition is none either)."""
    return subscription_of(request, await stored_topic(request))


def subscription_of(request: web.Request, topic: Topic) -> Subscription:
    """The subscription that a request names; SubscriptionNotFound if the topic has none."""
    name = part_of(request, "subscription")
    found = topic.subscriptions.get(name)
    if found is None:
        raise _missing(name)
    return found


def _mark_delete(topic: Topic, start: MessageIdBody) -> Position:
    """The position behind which a new subscription begins."""
    # Two sentinels, then a message: the mark-delete position stands before the first to be
    # delivered.
    if start.position == EARLIEST.position:
        return BEFORE_ALL
    if start.position == LATEST.position:
        return topic.end_for(asked_isolation(start.properties))
    first = start.first()
    return first.previous


def _check_place(place: MessageIdBody) -> None:
    if not place.is_sentinel:
        raise NotAllowed(
            "a message id is of one partition, and the topic has several",
            hint="name the partition, or use a time",
        )


def _missing(name: str) -> SubscriptionNotFound:
    return SubscriptionNotFound(f"there is no subscription {name!r}")


SUBSCRIPTION: Final = f"{TOPIC}/subscription/{{subscription}}"

ROUTES: Final = (
    endpoints.get(f"{TOPIC}/subscriptions", names),
    endpoints.put(SUBSCRIPTION, create),
    endpoints.delete(SUBSCRIPTION, delete),
    endpoints.post(f"{SUBSCRIPTION}/skip_all", skip_all),
    endpoints.post(f"{SUBSCRIPTION}/skip/{{count}}", skip),
    endpoints.post(f"{SUBSCRIPTION}/expireMessages/{{seconds}}", expire),
    endpoints.post(f"{SUBSCRIPTION}/expireMessages", expire_to_id),
    endpoints.post(f"{TOPIC}/all_subscription/expireMessages/{{seconds}}", expire_all),
    endpoints.get(f"{SUBSCRIPTION}/properties", properties),
    endpoints.put(f"{SUBSCRIPTION}/properties", change_properties),
    endpoints.get(f"{SUBSCRIPTION}/replicatedSubscriptionStatus", replicated),
    endpoints.post(f"{SUBSCRIPTION}/resetcursor", reset_to_id),
    endpoints.post(f"{SUBSCRIPTION}/resetcursor/{{timestamp}}", reset_to_time),
    endpoints.get(f"{SUBSCRIPTION}/position/{{number}}", peek),
)
