"""Which segments a topic has, for those who read ranges of it.

Owns: `range_layout`. The partitions of a regular topic are segments without parents; a topic
without partitions is one segment. Nothing is created by asking.

A topic that is migrated to a scalable one gets another creation id: its readers begin anew.
"""

from __future__ import annotations

from magnetar.errors import NotAllowed, ServiceNotReady, TopicNotFound
from magnetar.model.names import Domain, TopicName
from magnetar.model.ranges import RangeLayout, RangeSegment
from magnetar.scalable.records import ScalableRecord, segment_topic
from magnetar.server.context import Context


async def range_layout(context: Context, name: TopicName) -> RangeLayout:
    """As it is stored now."""
    if name.domain not in (Domain.TOPIC, Domain.PERSISTENT):
        raise NotAllowed(
            f"{name} has no segments to read ranges of", hint="use topic:// or persistent://"
        )
    if name.domain is Domain.TOPIC:
        context.check_scalable()
    if context.has_scalable and name.partition is None:
        record = await context.scalable.layouts.read(name.scalable_topic())
        if record is not None and record.layout is not None:
            return _of_scalable(record)
        if record is not None and record.change is not None and record.change.kind == "create":
            raise ServiceNotReady(f"{name} is being created")
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
    names = [name.with_partition(number) for number in range(count)] or [name]
    created_ms = await context.topics.created_ms(names[0])
    if created_ms is None:
        raise TopicNotFound(f"{names[0]} does not exist")
    segments = [RangeSegment(number, str(each)) for number, each in enumerate(names)]
    return RangeLayout(str(name), str(created_ms), count, tuple(segments))
