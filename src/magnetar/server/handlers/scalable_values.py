"""Layouts and assignments of scalable topics as the protocol has them.

Invariants:
1. What says when a segment was sealed is absent while it is active; when it was created is always
   there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from magnetar.model.segments import Segment, SegmentLayout
from magnetar.scalable.groups.sessions import Assignment
from magnetar.server.context import BrokerUrls
from magnetar.wire.pb import pulsar_pb2 as pb

Fields = dict[str, Any]


def dag_fields(
    layout: SegmentLayout,
    brokers: Mapping[int, BrokerUrls],
    controller: BrokerUrls | None,
) -> Fields:
    """The fields of a ScalableTopicDAG; `brokers` by segment id, as far as they are to be told."""
    fields: Fields = {
        "epoch": layout.epoch,
        "segments": [_segment_fields(each) for each in layout.segments.values()],
        "segment_brokers": [
            _with_tls({"segment_id": segment_id, "broker_url": urls.plain}, "broker_url_tls", urls)
            for segment_id, urls in brokers.items()
        ],
    }
    # Unknown leaders are left out: any broker does what a controller is asked for.
    if controller is not None:
        fields["controller_broker_url"] = controller.plain
        _with_tls(fields, "controller_broker_url_tls", controller)
    return fields


def _segment_fields(segment: Segment) -> Fields:
    fields: Fields = {
        "segment_id": segment.segment_id,
        "hash_start": segment.hash_range.start,
        "hash_end": segment.hash_range.end,
        "state": pb.ACTIVE if segment.is_active else pb.SEALED,
        "parent_ids": segment.parent_ids,
        "child_ids": segment.child_ids,
        "created_at_epoch": segment.created_at_epoch,
        "created_at_ms": segment.created_at_ms,
        "entry_bucket_splits": segment.entry_bucket_splits,
    }
    # Invariant 1: clients take a field that is set for a fact.
    if not segment.is_active:
        fields["sealed_at_epoch"] = segment.sealed_at_epoch
        fields["sealed_at_ms"] = segment.sealed_at_ms
    if segment.legacy_topic_name is not None:
        fields["legacy_topic_name"] = segment.legacy_topic_name
    return fields


def _with_tls(fields: Fields, name: str, urls: BrokerUrls) -> Fields:
    if urls.tls is not None:
        fields[name] = urls.tls
    return fields


def assignment_fields(assignment: Assignment) -> Fields:
    """The fields of a ScalableConsumerAssignment."""
    return {
        "layout_epoch": max(0, assignment.layout_epoch),  # nothing was assigned yet
        "segments": [
            {
                "segment_id": each.segment.segment_id,
                "hash_start": each.segment.hash_range.start,
                "hash_end": each.segment.hash_range.end,
                "segment_topic": str(each.topic),
                "bucket_ranges": [
                    {"start": bucket.start, "end": bucket.end} for bucket in each.bucket_ranges
                ],
            }
            for each in assignment.segments
        ],
    }


def supersedes(new: SegmentLayout, told: SegmentLayout) -> bool:
    """Whether a client that was told one layout must be told another.

    Epochs only grow. A topic that was deleted and created anew begins again at 0; it has no segment
    of the former one.
    """
    return new.epoch > told.epoch or not _is_same_topic(new, told)


def _is_same_topic(new: SegmentLayout, told: SegmentLayout) -> bool:
    # Epochs may be equal by chance after a deletion; creation times of segments are not.
    for segment_id, segment in new.segments.items():
        known = told.segments.get(segment_id)
        if known is not None and known.created_at_ms == segment.created_at_ms:
            return True
    return False
