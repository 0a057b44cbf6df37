"""`/admin/v2/persistent` and `/admin/v2/non-persistent`: topics, with or without partitions.

Invariants:
1. PUT creates, POST changes; what exists already is 409.
2. Nothing here creates a topic because somebody looked at it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import ListMode
from magnetar.errors import InvalidArgument, TopicNotFound
from magnetar.model.ids import Position
from magnetar.model.names import Domain, TopicName
from magnetar.server.admin import endpoints
from magnetar.server.admin.endpoints import TOPIC
from magnetar.server.admin.errors import CONFLICT
from magnetar.server.admin.exchange import (
    Refusal,
    body_of,
    converted,
    done,
    flag_of,
    namespace_of,
    needed_body_of,
    part_of,
    refused,
    server_of,
    shown,
    topic_of,
    topics_of,
)
from magnetar.server.context import coordinator_count

_MODES: Final = {
    Domain.PERSISTENT.value: ListMode.PERSISTENT,
    Domain.NON_PERSISTENT.value: ListMode.NON_PERSISTENT,
}


class PartitionsBody(msgspec.Struct, frozen=True):
    """The long form of a number of partitions."""

    partitions: int
    properties: dict[str, str] = {}


# --- lists


async def names(request: web.Request) -> web.Response:
    mode = _MODES[part_of(request, "domain")]
    return shown(await names_in(request, mode))


async def names_in(request: web.Request, mode: ListMode) -> list[str]:
    """The topics of a namespace; one that does not exist is a 404 here, not an empty list."""
    topics, namespace = topics_of(request), namespace_of(request)
    await topics.namespaces.policies(namespace)
    return await topics.names(namespace, mode)


async def partitioned_names(request: web.Request) -> web.Response:
    topics = topics_of(request)
    namespace = namespace_of(request)
    # A namespace that does not exist is a 404, not an empty list.
    await topics.namespaces.policies(namespace)
    domain = Domain(part_of(request, "domain"))
    found = await topics.partitioned.names(namespace)
    return shown([str(name) for name in found if name.domain is domain])


# --- topics


async def create(request: web.Request) -> web.Response:
    name = topic_of(request)
    topics = topics_of(request)
    properties = await body_of(request, dict[str, str])
    if await topics.partitioned.get(name) is not None:
        return refused(CONFLICT, f"{name} exists already, with partitions")
    # It has no record: loading it is all that creating it can mean.
    if name.domain is Domain.NON_PERSISTENT:
        if await topics.exists(name):
            return refused(CONFLICT, f"{name} exists already")
        await topics.get(name)
        return done()
    if not await topics.create(name, properties):
        return refused(CONFLICT, f"{name} exists already")
    return done()


async def delete(request: web.Request) -> web.Response:
    name = topic_of(request)
    await topics_of(request).delete(name, force=flag_of(request, "force"))
    return done()


async def unload(request: web.Request) -> web.Response:
    # A partitioned topic is unloaded partition by partition; those that are not loaded are passed.
    for name in await existing(request, topic_of(request)):
        await topics_of(request).unload(name)
    return done()


async def terminate(request: web.Request) -> web.Response:
    name = await whole_topic(request)
    topic = await topics_of(request).get(name, create=False)
    return shown(message_id(await topic.terminate(), name))


async def terminate_partitions(request: web.Request) -> web.Response:
    found = {}
    for name in await existing(request, topic_of(request)):
        topic = await topics_of(request).get(name, create=False)
        # By partition, as Java's tools read it; a topic without partitions is number 0.
        found[str(name.partition or 0)] = message_id(await topic.terminate(), name)
    return shown(found)


async def last_message_id(request: web.Request) -> web.Response:
    name = await whole_topic(request)
    topic = await topics_of(request).get(name, create=False)
    return shown(last_id_json(await topic.last_message(), name))


def last_id_json(last: tuple[Position, int], name: TopicName) -> dict[str, int]:
    position, batch_index = last
    found = message_id(position, name)
    # Tools know a message of a batch by its index; others have none.
    if batch_index >= 0:
        found["batchIndex"] = batch_index
    return found


# --- partitions


async def partitions(request: web.Request) -> web.Response:
    name = topic_of(request)
    # A look creates nothing unless it is asked to.
    create = flag_of(request, "checkAllowAutoCreation")
    # Clients with an http:// address count the coordinators of transactions here, too.
    found = coordinator_count(server_of(request).context, name)
    if found is None:
        found = await topics_of(request).partitions(name, create=create)
    return shown({"partitions": found})


async def create_partitioned(request: web.Request) -> web.Response:
    name = topic_of(request)
    topics = topics_of(request)
    given = await _partitions_body(request)
    # Asked first: the broker refuses a plain topic of that name as "not allowed", which is a 412.
    present = await topics.partitioned.get(name) is not None or await topics.exists(name)
    if present or not await topics.create_partitioned(name, given.partitions, given.properties):
        return refused(CONFLICT, f"{name} exists already")
    return done()


async def grow(request: web.Request) -> web.Response:
    name = topic_of(request)
    topics = topics_of(request)
    given = await _partitions_body(request)
    if await topics.partitioned.get(name) is None:
        # Two different mistakes: a topic of another kind, or none at all.
        if await topics.exists(name):
            return refused(CONFLICT, f"{name} is not a partitioned topic")
        raise TopicNotFound(f"{name} does not exist")
    await topics.grow(name, given.partitions)
    return done()


async def delete_partitioned(request: web.Request) -> web.Response:
    force = flag_of(request, "force")
    await topics_of(request).delete_partitioned(topic_of(request), force=force)
    return done()


async def _partitions_body(request: web.Request) -> PartitionsBody:
    found = await needed_body_of(request, object)
    # Tools send a bare number, or an object with properties.
    given = converted({"partitions": found} if isinstance(found, int) else found, PartitionsBody)
    if given.partitions < 1:
        raise InvalidArgument(f"a partitioned topic needs partitions, not {given.partitions}")
    return given


# --- shared with statistics and subscriptions


async def existing(request: web.Request, name: TopicName) -> list[TopicName]:
    """The topic, or all its partitions; TopicNotFound if there is none."""
    topics = topics_of(request)
    record = await topics.partitioned.get(name)
    if record is not None:
        return [name.with_partition(number) for number in range(record.partitions)]
    if not await topics.exists(name):
        # The namespace is told first if it is that which is missing.
        await topics.namespaces.policies(name.namespace)
        raise TopicNotFound(f"{name} does not exist")
    return [name]


async def whole_topic(request: web.Request) -> TopicName:
    """The topic of a request that makes sense for a single one only."""
    name = topic_of(request)
    record = await topics_of(request).partitioned.get(name)
    if record is not None:
        last = f"-{record.partitions - 1}"
        raise Refusal(405, f"{name} is partitioned (name one of {name}-partition-0 to {last})")
    return name


async def stored_topic(request: web.Request) -> Topic:
    """The topic of a request that looks into one log."""
    return await persistent(request, await whole_topic(request))


async def persistent(request: web.Request, name: TopicName) -> Topic:
    """A topic, refused if nothing of it is stored."""
    if name.domain is Domain.NON_PERSISTENT:
        raise Refusal(405, f"{name} is not persistent: it keeps no messages and no positions")
    topic = await topics_of(request).get(name, create=False)
    assert isinstance(topic, Topic)
    return topic


def message_id(position: Position, name: TopicName) -> dict[str, Any]:
    # -1 is MessageIdImpl's "not partitioned".
    partition = -1 if name.partition is None else name.partition
    return {
        "ledgerId": position.ledger_id,
        "entryId": position.entry_id,
        "partitionIndex": partition,
    }


_NAMESPACE: Final = "/admin/v2/{domain:persistent|non-persistent}/{tenant}/{namespace}"

ROUTES: Final = (
    endpoints.get(_NAMESPACE, names),
    endpoints.get(f"{_NAMESPACE}/partitioned", partitioned_names),
    endpoints.put(TOPIC, create),
    endpoints.delete(TOPIC, delete),
    endpoints.put(f"{TOPIC}/unload", unload),
    endpoints.post(f"{TOPIC}/terminate", terminate),
    endpoints.post(f"{TOPIC}/terminate/partitions", terminate_partitions),
    endpoints.get(f"{TOPIC}/lastMessageId", last_message_id),
    endpoints.get(f"{TOPIC}/partitions", partitions),
    endpoints.put(f"{TOPIC}/partitions", create_partitioned),
    endpoints.post(f"{TOPIC}/partitions", grow),
    endpoints.delete(f"{TOPIC}/partitions", delete_partitioned),
)
