"""`/admin/v2/scalable`: scalable topics, their layouts, and their auto-scale policies.

Invariants:
1. A segment that there is not is 404; a change that the layout does not permit is 412; what exists
   already, or a change that is under way and cannot be waited for, is 409.
2. A change that is answered with success is committed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from typing import Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.stats import RetentionStats
from magnetar.errors import Conflict, InvalidArgument, ServiceNotReady, TopicNotFound
from magnetar.model.hashing import HASH_MAX
from magnetar.model.names import Domain, TopicName
from magnetar.scalable.layout.autoscale import check_override, read_override, resolve
from magnetar.scalable.layout.changes import layout_of
from magnetar.scalable.lifecycle import read_lifecycle
from magnetar.scalable.records import ScalableRecord, segment_topic
from magnetar.server.admin import endpoints
from magnetar.server.admin.exchange import (
    body_of,
    done,
    flag_of,
    has_part,
    namespace_of,
    needed_body_of,
    part_of,
    server_of,
    shown,
    shown_or_nothing,
    topic_of,
    topics_of,
    whole_number,
)
from magnetar.server.admin.scalable.state import (
    read_record,
    read_view,
    record_json,
    statistics_json,
)
from magnetar.server.admin.topics.topics import last_id_json

# Hexadecimal as layouts are printed, or decimal.
_POINT: Final = re.compile(r"0[xX][0-9a-fA-F]{1,4}|[0-9]{1,5}")


# --- topics


async def names(request: web.Request) -> web.Response:
    namespace = namespace_of(request)
    filters = dict(_filter(text) for text in request.query.getall("property", []))
    server = server_of(request)
    # 404 for a namespace that does not exist, instead of an empty list.
    await server.topics.namespaces.policies(namespace)
    return shown(server.context.scalable.layouts.names(namespace, filters))


async def create(request: web.Request) -> web.Response:
    topic = topic_of(request)
    # A name that differs by a space from another one would be found by nobody.
    if topic.local_name != topic.local_name.strip():
        raise InvalidArgument(f"{str(topic)!r} begins or ends with a space")
    count = whole_number(request.query.get("numInitialSegments", "1"), "the segments", least=1)
    properties = await body_of(request, dict[str, str])
    scalable = server_of(request).context.scalable
    await _carried_out(request, topic, scalable.create(topic, count, properties))
    return done()


async def show(request: web.Request) -> web.Response:
    return shown(record_json(await read_record(request, topic_of(request))))


async def delete(request: web.Request) -> web.Response:
    topic = topic_of(request)
    await read_record(request, topic)
    scalable = server_of(request).context.scalable
    await _carried_out(request, topic, scalable.delete(topic, force=flag_of(request, "force")))
    return done()


async def statistics(request: web.Request) -> web.Response:
    view = await read_view(request, topic_of(request))
    found = statistics_json(request, view)
    found["autoScalePolicy"] = await _effective_policy(request, view.record)
    namespace = await topics_of(request).namespaces.policies(view.topic.namespace)
    scalable = server_of(request).context.scalable
    found["lifecyclePolicy"] = msgspec.to_builtins(await scalable.lifecycle(view.record))
    policies = scalable.policies(namespace)
    found["retention"] = msgspec.to_builtins(RetentionStats.of(policies))
    # Of the last look that a quota made: nothing is loaded or read here.
    backlog = scalable.backlog(view.topic, policies)
    found |= {
        "backlogQuotaLimitSize": policies.size_quota.limit,
        "backlogQuotaLimitTime": policies.age_quota.limit_time,
        "backlogSize": backlog.size_bytes,
        "oldestBacklogMessageAgeSeconds": backlog.oldest_seconds,
        "oldestBacklogMessageSubscriptionName": backlog.oldest_of,
    }
    return shown(found)


async def last_message_ids(request: web.Request) -> web.Response:
    """The last message of each segment, by its id: a topic of several has no single last one."""
    topic = topic_of(request)
    found = {}
    for number, segment in layout_of(await read_record(request, topic)).segments.items():
        name = segment_topic(topic, segment)
        loaded = await topics_of(request).get(name, create=False)
        found[str(number)] = last_id_json(await loaded.last_message(), name)
    return shown(found)


# --- layouts


async def split(request: web.Request) -> web.Response:
    """Split a segment: in the middle, at a given position, or where the load is halved."""
    topic = topic_of(request)
    segment_id = whole_number(part_of(request, "segment"), "the id of a segment")
    by_load = flag_of(request, "byLoad")
    point = request.query.get("at")
    # Three ways to say where; two of them at once contradict each other.
    if by_load and point is not None:
        raise InvalidArgument("a split is at a given point or by load, not both")
    # The layout wants the last position of the lower part.
    after = None if point is None else _first_of_upper(point) - 1
    # Before the change: 404 for a segment that there is not (invariant 1).
    await _check_segments(request, topic, (segment_id,))
    scalable = server_of(request).context.scalable
    work = scalable.split(topic, segment_id, after=after, by_load=by_load)
    await _carried_out(request, topic, work)
    return done()


async def merge(request: web.Request) -> web.Response:
    topic = topic_of(request)
    # A variable number of ids is part of the path.
    parts = request.match_info["segments"].split("/")
    segment_ids = [whole_number(each, "the id of a segment") for each in parts]
    await _check_segments(request, topic, segment_ids)
    scalable = server_of(request).context.scalable
    await _carried_out(request, topic, scalable.merge(topic, segment_ids))
    return done()


async def delete_segment(request: web.Request) -> web.Response:
    """Delete a sealed segment that nobody needs, or by force, one that is not drained."""
    topic = topic_of(request)
    segment_id = whole_number(part_of(request, "segment"), "the id of a segment")
    await _check_segments(request, topic, (segment_id,))
    scalable = server_of(request).context.scalable
    work = scalable.delete_segment(topic, segment_id, force=flag_of(request, "force"))
    await _carried_out(request, topic, work)
    return done()


async def migrate(request: web.Request) -> web.Response:
    """Make a regular topic of this name, with or without partitions, a scalable one."""
    topic = topic_of(request)
    # The regular topic is named by the same tenant, namespace and name.
    regular = TopicName(Domain.PERSISTENT, topic.namespace, topic.local_name)
    scalable = server_of(request).context.scalable
    force = flag_of(request, "force")
    await _carried_out(request, topic, scalable.migrate(regular, force=force))
    return done()


async def unload(request: web.Request) -> web.Response:
    """Close every segment, or the one that the path names; clients come back to them."""
    topic = topic_of(request)
    segments = layout_of(await read_record(request, topic)).segments
    wanted = list(segments)
    if has_part(request, "segment"):
        wanted = [whole_number(part_of(request, "segment"), "the id of a segment")]
        await _check_segments(request, topic, wanted)
    # Sealed ones too: consumers may still be at them. Those that are not loaded are passed.
    for number in wanted:
        await topics_of(request).unload(segment_topic(topic, segments[number]))
    return done()


async def _carried_out(request: web.Request, topic: TopicName, work: Awaitable[object]) -> None:
    """Await a change; Conflict if it, or another one, takes longer than anybody can wait."""
    try:
        await work
    # Not carried out in time. A change that is under way is a conflict, anything else may pass.
    except ServiceNotReady as error:
        record = await server_of(request).context.scalable.layouts.read(topic)
        if record is None or record.change is None:
            raise
        raise Conflict(str(error), hint="") from error


async def _check_segments(
    request: web.Request, topic: TopicName, segment_ids: Iterable[int]
) -> None:
    record = await read_record(request, topic)
    assert record.layout is not None, "a record that clients see has a layout"
    known = {each.segment_id for each in record.layout.segments}
    missing = sorted(set(segment_ids) - known)
    if missing:
        raise TopicNotFound(f"{topic} has no segment {missing[0]}")


# --- policies


async def show_policy(request: web.Request) -> web.Response:
    record = await read_record(request, topic_of(request))
    if flag_of(request, "applied"):
        return shown(await _effective_policy(request, record))
    return shown_or_nothing(record.auto_scale)


async def set_policy(request: web.Request) -> web.Response:
    topic = topic_of(request)
    override = read_override(await needed_body_of(request, dict[str, object]))
    # All that is wrong with it is said before the topic is looked for.
    check_override(override)
    await read_record(request, topic)
    await server_of(request).context.scalable.set_auto_scale(topic, override)
    return done()


async def clear_policy(request: web.Request) -> web.Response:
    topic = topic_of(request)
    await read_record(request, topic)
    await server_of(request).context.scalable.set_auto_scale(topic, None)
    return done()


async def show_lifecycle(request: web.Request) -> web.Response:
    record = await read_record(request, topic_of(request))
    if flag_of(request, "applied"):
        return shown(await server_of(request).context.scalable.lifecycle(record))
    return shown_or_nothing(record.lifecycle)


async def set_lifecycle(request: web.Request) -> web.Response:
    topic = topic_of(request)
    override = read_lifecycle(await needed_body_of(request, dict[str, object]))
    await read_record(request, topic)
    await server_of(request).context.scalable.set_lifecycle(topic, override)
    return done()


async def clear_lifecycle(request: web.Request) -> web.Response:
    topic = topic_of(request)
    await read_record(request, topic)
    await server_of(request).context.scalable.set_lifecycle(topic, None)
    return done()


async def _effective_policy(request: web.Request, record: ScalableRecord) -> object:
    """What holds for a topic once broker, namespace and its own policy are put together."""
    config = server_of(request).config
    policies = await topics_of(request).namespaces.policies(record.topic.namespace)
    given = policies.scalable_topic_auto_scale_policy
    # Broker, then namespace, then topic: each overrides the one before.
    resolved = resolve(
        config.limits,
        None if given is None else read_override(given),
        record.auto_scale,
        enabled=config.scalable_auto_scale_enabled,
    )
    return msgspec.to_builtins(resolved)


# --- parts


def _filter(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise InvalidArgument(f"property must be name=value, not {text!r}")
    return name, value


def _first_of_upper(text: str) -> int:
    """The first position of the upper part of a split."""
    if not _POINT.fullmatch(text):
        raise InvalidArgument(
            f"{text!r} is no position of the ring", hint="use 0x8000, or 32768 without 0x"
        )
    # `int(text, 0)` would read more notations than are promised.
    point = int(text, 16) if text[:2].lower() == "0x" else int(text)
    if not 1 <= point <= HASH_MAX:
        raise InvalidArgument(f"a split is at a position from 1 to {HASH_MAX}, not at {point}")
    return point


NAMESPACE: Final = "/admin/v2/{domain:scalable}/{tenant}/{namespace}"
SCALABLE: Final = f"{NAMESPACE}/{{topic}}"

ROUTES: Final = (
    endpoints.get(NAMESPACE, names),
    endpoints.get(f"{NAMESPACE}/", names),
    endpoints.put(SCALABLE, create),
    endpoints.get(SCALABLE, show),
    endpoints.delete(SCALABLE, delete),
    endpoints.get(f"{SCALABLE}/stats", statistics),
    endpoints.get(f"{SCALABLE}/lastMessageId", last_message_ids),
    endpoints.post(f"{SCALABLE}/split/{{segment}}", split),
    endpoints.post(f"{SCALABLE}/merge/{{segments:.+}}", merge),
    endpoints.delete(f"{SCALABLE}/segment/{{segment}}", delete_segment),
    endpoints.post(f"{SCALABLE}/migrate", migrate),
    endpoints.put(f"{SCALABLE}/unload", unload),
    endpoints.put(f"{SCALABLE}/unload/{{segment}}", unload),
    endpoints.get(f"{SCALABLE}/autoScalePolicy", show_policy),
    endpoints.post(f"{SCALABLE}/autoScalePolicy", set_policy),
    endpoints.delete(f"{SCALABLE}/autoScalePolicy", clear_policy),
    endpoints.get(f"{SCALABLE}/lifecyclePolicy", show_lifecycle),
    endpoints.post(f"{SCALABLE}/lifecyclePolicy", set_lifecycle),
    endpoints.delete(f"{SCALABLE}/lifecyclePolicy", clear_lifecycle),
)
