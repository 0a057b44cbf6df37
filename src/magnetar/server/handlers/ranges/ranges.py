"""The commands of ranges: positions, and what is between them, without a consumer.

Owns: RANGE_LAYOUT, which any broker answers, and RANGE_STATES, RANGE_READ, RANGE_COUNTS, RANGE_CUT,
RANGE_PIECES and RANGE_AT_TIME, which go to the broker that has the topic. (RANGE_NEWS is in `news`,
RANGE_MOVE in `cursors`.) `range_layout`: the partitions of a regular topic are segments without
parents; a topic without partitions is one segment; a topic that is migrated to a scalable one gets
another creation id, so that its readers begin anew.

Nothing is kept for a client between two commands, so a topic may move to another broker at any
time: a command that comes to the wrong one, or is under way when the topic is unloaded, is refused
as a lookup would be (not ready), and is asked again there, with the same positions and the same
result. A segment that is sealed meanwhile is read as before; one that is pruned is not found; what
is trimmed is `RangeLost`.

Limits: an answer to RANGE_READ is about 1 MiB; one of a connection is made at a time, and only
while its peer takes what is written. Other commands name at most `range_topics_max` topics and look
at `range_scan_entries` entries.
"""

from __future__ import annotations

from magnetar.broker.ranges import sizes
from magnetar.broker.ranges.read import read_page
from magnetar.errors import NotAllowed, ServiceNotReady, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.model.ranges import RangeLayout, RangeSegment
from magnetar.runtime.metrics import RANGE_BYTES, RANGE_ENTRIES
from magnetar.scalable.records import ScalableRecord, segment_topic
from magnetar.server.authority import Action
from magnetar.server.context import Context
from magnetar.server.handlers.ranges.values import (
    Fields,
    for_each,
    named_view,
    position_fields,
    position_from,
    runs_of,
)
from magnetar.server.session import Session
from magnetar.wire.frames import base_command, command, encode_with_entries
from magnetar.wire.pb import pulsar_pb2 as pb


async def layout(session: Session, body: pb.CommandRangeLayout) -> None:
    name = TopicName.parse(body.topic)
    session.authorise(Action.LOOK_UP, name)
    found = await range_layout(session.context, name)
    segments = [
        {
            "number": each.number,
            "topic": each.name,
            "parents": each.parents,
            "children": each.children,
            "is_sealed": each.is_sealed,
            "created_at_ms": each.created_ms,
        }
        for each in found.segments
    ]
    # Any broker answers from the store: no topic is loaded, and nobody has to own one.
    session.write(
        command(
            "RANGE_LAYOUT_RESPONSE",
            request_id=body.request_id,
            topic=found.topic,
            creation_id=found.creation_id,
            epoch=found.epoch,
            segments=segments,
        )
    )


async def states(session: Session, body: pb.CommandRangeStates) -> None:
    async def state(topic: str) -> Fields:
        found = (await named_view(session, topic, body.isolation)).state()
        return {
            "first": position_fields(found.first),
            "end": position_fields(found.stable),
            "is_final": found.is_sealed,
        }

    found = await for_each(session, body.topics, state)
    session.write(command("RANGE_STATES_RESPONSE", request_id=body.request_id, states=found))


async def read(session: Session, body: pb.CommandRangeRead) -> None:
    view = await named_view(session, body.topic, body.isolation)
    start, end = position_from(body.start), position_from(body.end)
    page = await read_page(view, start, end, session.limits, body.bytes_max)
    # Entries follow the answer in its frame, as they are stored: nothing is copied or decoded.
    payloads = [entry.payload for entry in page.entries]
    # Told apart, so that a client can cut the frame without looking into entries.
    sizes = [len(payload) for payload in payloads]
    RANGE_ENTRIES.inc(len(payloads))
    RANGE_BYTES.inc(sum(sizes))
    answer = base_command(
        "RANGE_READ_RESPONSE",
        request_id=body.request_id,
        runs=runs_of(page.entries),
        sizes=sizes,
        next=position_fields(page.next),
        is_exhausted=page.is_exhausted,
    )
    session.outbound.write_all(encode_with_entries(answer, payloads))


async def counts(session: Session, body: pb.CommandRangeCounts) -> None:
    async def count(span: pb.RangeSpan) -> Fields:
        view = await named_view(session, span.topic, body.isolation)
        found = await sizes.count(view, position_from(span.start), position_from(span.end))
        return {"messages": found.messages, "bytes": found.bytes, "is_exact": found.is_exact}

    found = await for_each(session, body.spans, count)
    session.write(command("RANGE_COUNTS_RESPONSE", request_id=body.request_id, counts=found))


async def cut(session: Session, body: pb.CommandRangeCut) -> None:
    view = await named_view(session, body.span.topic, body.isolation)
    found = await sizes.cut(
        view,
        position_from(body.span.start),
        position_from(body.span.end),
        session.limits,
        messages_max=body.messages_max if body.HasField("messages_max") else None,
        bytes_max=body.bytes_max if body.HasField("bytes_max") else None,
    )
    session.write(
        command(
            "RANGE_CUT_RESPONSE",
            request_id=body.request_id,
            position=position_fields(found.position),
            messages=found.messages,
            bytes=found.bytes,
            is_partial=found.is_partial,
        )
    )


async def pieces(session: Session, body: pb.CommandRangePieces) -> None:
    view = await named_view(session, body.span.topic, body.isolation)
    start, end = position_from(body.span.start), position_from(body.span.end)
    found = sizes.pieces(view, start, end, body.count)
    session.write(
        command(
            "RANGE_PIECES_RESPONSE",
            request_id=body.request_id,
            positions=[position_fields(each) for each in found],
        )
    )


async def at_time(session: Session, body: pb.CommandRangeAtTime) -> None:
    view = await named_view(session, body.topic, body.isolation)
    found = await sizes.at_time(view, body.publish_time)
    session.write(
        command(
            "RANGE_AT_TIME_RESPONSE", request_id=body.request_id, position=position_fields(found)
        )
    )


async def range_layout(context: Context, name: TopicName) -> RangeLayout:
    """The layout of a topic, as it is stored now."""
    if name.domain not in (Domain.TOPIC, Domain.PERSISTENT):
        raise NotAllowed(
            f"{name} has no segments to read ranges of", hint="use topic:// or persistent://"
        )
    if name.domain is Domain.TOPIC:
        context.check_scalable()
    # The store, not the cache: whoever plans by this must not miss a change that was committed.
    if context.has_scalable and name.partition is None:
        record = await context.scalable.layouts.read(name.scalable_topic())
        if record is not None and record.layout is not None:
            return _of_scalable(record)
        # Neither there nor absent: its first layout is about to be committed.
        if record is not None and record.change is not None and record.change.kind == "create":
            raise ServiceNotReady(f"{name} is being created")
    # A v5 name, and no record of it.
    if name.domain is Domain.TOPIC:
        raise TopicNotFound(f"{name} does not exist")
    return await _of_regular(context, name)


def _of_scalable(record: ScalableRecord) -> RangeLayout:
    assert record.layout is not None, "its caller has checked"
    layout, topic = record.layout.layout(), record.topic
    segments = [
        RangeSegment(
            each.segment_id,
            str(segment_topic(topic, each)),
            each.parent_ids,
            each.child_ids,
            is_sealed=not each.is_active,
            created_ms=each.created_at_ms,
        )
        for each in layout.segments.values()
    ]
    return RangeLayout(str(topic), str(record.created_ms), layout.epoch, tuple(segments))


async def _of_regular(context: Context, name: TopicName) -> RangeLayout:
    partitioned = await context.topics.partitioned.get(name)
    count = 0 if partitioned is None else partitioned.partitions
    # A topic without partitions is one segment, number 0.
    names = [name.with_partition(number) for number in range(count)] or [name]
    # Made anew under its name it has another time of creation: positions of before are void.
    created_ms = await context.topics.created_ms(names[0])
    if created_ms is None:
        raise TopicNotFound(f"{names[0]} does not exist")
    segments = [RangeSegment(number, str(each)) for number, each in enumerate(names)]
    return RangeLayout(str(name), str(created_ms), count, tuple(segments))
