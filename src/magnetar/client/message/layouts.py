"""Pure: the layout of a topic, as brokers send it and as clients use it.

Owns: `layout_from`; `is_regular`: whether a layout is that of a regular topic; `ancestors`;
`held_back`: what a member of a group must not read yet.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from magnetar.model.hashing import HashRange
from magnetar.model.segments import NEVER, Segment, SegmentLayout, SegmentState
from magnetar.wire.pb import pulsar_pb2 as pb


def layout_from(dag: pb.ScalableTopicDAG) -> SegmentLayout:
    """What a SCALABLE_TOPIC_UPDATE says."""
    # Brokers give ids out in order and do not say the next one: it is above the highest.
    segments = {each.segment_id: _segment_from(each) for each in dag.segments}
    return SegmentLayout(dag.epoch, max(segments, default=-1) + 1, segments)


def is_regular(layout: SegmentLayout) -> bool:
    """Whether these are the partitions of a regular topic: keys are routed as v4 clients do.

    A topic that was migrated has them among its sealed segments.
    """
    segments = layout.active or layout.segments.values()
    return all(segment.legacy_topic_name is not None for segment in segments)


def held_back(
    layout: SegmentLayout, assigned: Collection[int], finished: Container[int]
) -> set[int]:
    """The segments of one member that come after others of its own which are not read yet.

    A key's messages are in order only if a segment is read after all that it comes from. Magnetar
    assigns them so; Pulsar 5.0.0-M1 assigns a sealed segment together with its sealed parents.
    """
    return {
        segment_id
        for segment_id in assigned
        if any(each in assigned and each not in finished for each in ancestors(layout, segment_id))
    }


def ancestors(layout: SegmentLayout, segment_id: int) -> set[int]:
    """All ancestors of a segment that the layout still has, and the ids of their parents."""
    found: set[int] = set()
    waiting = [segment_id]
    while waiting:
        segment = layout.segments.get(waiting.pop())
        # A merge has two parents, whose ancestors may be the same ones: each is looked at once.
        new = set() if segment is None else set(segment.parent_ids) - found
        found |= new
        waiting.extend(new)
    return found


def _segment_from(info: pb.SegmentInfoProto) -> Segment:
    return Segment(
        info.segment_id,
        HashRange(info.hash_start, info.hash_end),
        SegmentState(pb.SegmentState.Name(info.state)),
        tuple(info.parent_ids),
        tuple(info.child_ids),
        info.created_at_epoch,
        info.sealed_at_epoch if info.HasField("sealed_at_epoch") else NEVER,
        info.created_at_ms,
        info.sealed_at_ms if info.HasField("sealed_at_ms") else NEVER,
        info.legacy_topic_name if info.HasField("legacy_topic_name") else None,
        tuple(info.entry_bucket_splits),
    )
