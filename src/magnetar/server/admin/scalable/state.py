"""The state of one scalable topic, in the shapes of the admin interface.

Owns: `ScalableTopicView`, the records of a topic and what stands beside it, read at one time; the
JSON of a topic, its segments, and its subscriptions.

Invariants:
1. The record of a topic has the members that Java's tools know, and their meaning; what we add to
   statistics stands beside them.
2. A look changes nothing. It loads the segments whose backlog it shows, but for those known to be
   drained.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.broker.policy.stats import TopicStats
from magnetar.broker.topic.topic import Topic
from magnetar.errors import ServiceNotReady, TopicNotFound
from magnetar.model.isolation import stored_isolation
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.scalable.records import (
    DrainedRecord,
    GroupRecord,
    LoadRecord,
    ScalableRecord,
    SubscriptionRecord,
    segment_topic,
)
from magnetar.scalable.store import ScalableStore
from magnetar.server.admin.exchange import server_of, topics_of

Json = dict[str, Any]

# Loading a segment awaits by itself; those in memory do not.
_SEGMENTS_PER_TURN: Final = 20


# --- a topic


@dataclass(frozen=True, slots=True)
class ScalableTopicView:
    """One topic, as its records say."""

    record: ScalableRecord
    layout: SegmentLayout
    subscriptions: list[SubscriptionRecord]
    groups: list[GroupRecord]
    drained: list[DrainedRecord]
    loads: dict[int, LoadRecord]

    @property
    def topic(self) -> TopicName:
        return self.record.topic

    def group(self, subscription: str) -> GroupRecord | None:
        """The stream consumers of a subscription."""
        for group in self.groups:
            if group.kind == "STREAM" and group.name == subscription:
                return group
        return None

    def drained_by(self, subscription: str) -> set[int]:
        return {each.segment_id for each in self.drained if each.group == subscription}


async def read_record(request: web.Request, topic: TopicName) -> ScalableRecord:
    """The record of a topic that clients see; TopicNotFound while there is none."""
    server = server_of(request)
    record = await server.context.scalable.layouts.read(topic)
    # Its first layout is not committed yet: clients do not see it either.
    if record is None or record.layout is None:
        # A namespace that does not exist is told first: the more useful of two 404s.
        await server.topics.namespaces.policies(topic.namespace)
        raise TopicNotFound(f"{topic} does not exist")
    return record


async def read_view(request: web.Request, topic: TopicName) -> ScalableTopicView:
    record = await read_record(request, topic)
    assert record.layout is not None, "a record that clients see has a layout"
    # Read one after the other: not one moment, but each record is whole.
    store = ScalableStore(server_of(request).metadata)
    loads = await store.all(topic, "load", LoadRecord)
    return ScalableTopicView(
        record,
        record.layout.layout(),
        await store.all(topic, "sub", SubscriptionRecord),
        await store.all(topic, "group", GroupRecord),
        await store.all(topic, "drained", DrainedRecord),
        {each.segment_id: each for each in loads},
    )


def record_json(record: ScalableRecord) -> Json:
    """A topic's record as Java's tools know it."""
    assert record.layout is not None, "a record that clients see has a layout"
    layout = record.layout.layout()
    policy = record.auto_scale
    # Invariant 1: members that Java's tools know, null where nothing is set.
    return {
        "epoch": layout.epoch,
        "nextSegmentId": layout.next_segment_id,
        "segments": {str(each.segment_id): _segment(each) for each in layout.segments.values()},
        "properties": record.properties,
        "autoScalePolicy": None if policy is None else msgspec.to_builtins(policy),
    }


def _segment(segment: Segment) -> Json:
    return {
        "segmentId": segment.segment_id,
        "hashRange": {"start": segment.hash_range.start, "end": segment.hash_range.end},
        "state": segment.state.value,
        "parentIds": segment.parent_ids,
        "childIds": segment.child_ids,
        "createdAtEpoch": segment.created_at_epoch,
        "sealedAtEpoch": segment.sealed_at_epoch,
        "createdAtMs": segment.created_at_ms,
        "sealedAtMs": segment.sealed_at_ms,
        "legacyTopicName": segment.legacy_topic_name,
        "entryBucketSplits": segment.entry_bucket_splits,
    }


# --- statistics


def _waiting(request: web.Request, topic: TopicName) -> Json:
    """What the change that is under way waits for; nothing if another broker carries it out."""
    wait = server_of(request).context.scalable.txn_barrier.waiting(topic)
    if wait is None:
        return {}
    txn = None if wait.txn is None else f"({wait.txn.most},{wait.txn.least})"
    return {"waitsForTransaction": txn, "waitsAtMostMs": round(wait.seconds_left * 1000)}


# A look loads nothing: of segments that are elsewhere only the layout is told.
def statistics_json(request: web.Request, view: ScalableTopicView) -> Json:
    layout = view.layout
    stats = {
        segment.segment_id: _loaded_stats(request, segment_topic(view.topic, segment))
        for segment in layout.segments.values()
    }
    change = view.record.change
    return {
        "epoch": layout.epoch,
        "totalSegments": len(layout.segments),
        "activeSegments": len(layout.active),
        "sealedSegments": len(layout.segments) - len(layout.active),
        # Ids are never used again, so what is missing was pruned.
        "prunedSegments": layout.next_segment_id - len(layout.segments),
        "change": None
        if change is None
        else {"kind": change.kind, "step": change.step} | _waiting(request, view.topic),
        "segments": {
            str(segment.segment_id): _segment_stats(view, segment, stats[segment.segment_id])
            for segment in layout.segments.values()
        },
        "subscriptions": {
            each.name: {
                "consumerCount": _consumer_count(view, each.name, stats),
                "type": each.kind,
                "msgBacklog": sum(_backlog(found, each.name) for found in stats.values()),
                "readIsolation": stored_isolation(each.properties).value,
            }
            for each in view.subscriptions
        },
    }


def _segment_stats(view: ScalableTopicView, segment: Segment, stats: TopicStats | None) -> Json:
    found: Json = {
        "name": str(segment_topic(view.topic, segment)),
        "state": segment.state.value,
        "hashRange": {"start": segment.hash_range.start, "end": segment.hash_range.end},
        "entryBuckets": segment.bucket_count,
        "loaded": stats is not None,
    }
    # Load is reported by the broker that has the segment, and kept in the store for all to see.
    load = view.loads.get(segment.segment_id)
    if load is not None:
        found["load"] = msgspec.to_builtins(load)
    if stats is not None:
        subscriptions = stats.subscriptions.values()
        found |= {
            "msgRateIn": stats.msg_rate_in,
            "msgThroughputIn": stats.msg_throughput_in,
            "msgRateOut": stats.msg_rate_out,
            "msgThroughputOut": stats.msg_throughput_out,
            "storageSize": stats.storage_size,
            "msgBacklog": sum(each.msg_backlog for each in subscriptions),
            "producerCount": len(stats.publishers),
            "consumerCount": sum(len(each.consumers) for each in subscriptions),
        }
    return found


def _loaded_stats(request: web.Request, name: TopicName) -> TopicStats | None:
    topic = topics_of(request).loaded.get(name)
    return None if topic is None else topic.stats()


def _consumer_count(
    view: ScalableTopicView, subscription: str, stats: dict[int, TopicStats | None]
) -> int:
    # Stream consumers are members of a group; queue consumers connect to each segment themselves,
    # under their name and a suffix.
    group = view.group(subscription)
    if group is not None:
        return len(group.members)
    names = set()
    for segment_id, found in stats.items():
        here = None if found is None else found.subscriptions.get(subscription)
        if here is not None:
            suffix = f"-seg-{segment_id}"
            names |= {each.consumer_name.removesuffix(suffix) for each in here.consumers}
    return len(names)


def _backlog(stats: TopicStats | None, subscription: str) -> int:
    found = None if stats is None else stats.subscriptions.get(subscription)
    return 0 if found is None else found.msg_backlog


# --- subscriptions


async def subscription_json(
    request: web.Request, view: ScalableTopicView, subscription: SubscriptionRecord
) -> Json:
    """A subscription: who reads what, and how much is left in each segment."""
    backlogs = await _backlogs(request, view, subscription.name)
    stats = {
        segment.segment_id: _loaded_stats(request, segment_topic(view.topic, segment))
        for segment in view.layout.segments.values()
    }
    return {
        "type": subscription.kind,
        "position": subscription.position,
        "established": subscription.established,
        "deleting": subscription.deleting,
        "createdMs": subscription.created_ms,
        "properties": subscription.properties,
        "readIsolation": stored_isolation(subscription.properties).value,
        "consumerCount": _consumer_count(view, subscription.name, stats),
        **group_json(view.group(subscription.name)),
        "drained": sorted(view.drained_by(subscription.name)),
        "backlog": {str(number): backlog for number, backlog in backlogs.items()},
        # What is unknown counts as nothing; the single values say so.
        "msgBacklog": sum(each for each in backlogs.values() if each is not None),
    }


def group_json(group: GroupRecord | None) -> Json:
    """The consumers of a group, and which of them has which segment."""
    if group is None:
        return {"members": [], "owners": {}, "layoutEpoch": NEVER, "revision": 0}
    return {
        "members": [
            {
                "name": each.name,
                "broker": each.broker,
                "connected": each.lost_ms == NEVER,
                "lostMs": each.lost_ms,
                "shares": each.shares,
            }
            for each in group.members
        ],
        "owners": {str(number): list(names) for number, names in sorted(group.owners.items())},
        "layoutEpoch": group.layout_epoch,
        "revision": group.revision,
    }


async def _backlogs(
    request: web.Request, view: ScalableTopicView, subscription: str
) -> dict[int, int | None]:
    """Backlogs by segment; None: it has no cursor yet, or cannot be loaded now."""
    drained = view.drained_by(subscription)
    found: dict[int, int | None] = {}
    for number, segment in enumerate(view.layout.segments.values(), start=1):
        name = segment_topic(view.topic, segment)
        # Drained for good: loading it would only show that.
        if segment.segment_id in drained and name not in topics_of(request).loaded:
            found[segment.segment_id] = 0
            continue
        found[segment.segment_id] = await _backlog_of(request, name, subscription)
        if number % _SEGMENTS_PER_TURN == 0:
            await asyncio.sleep(0)
    return found


async def _backlog_of(request: web.Request, name: TopicName, subscription: str) -> int | None:
    try:
        topic = await topics_of(request).get(name, create=False)
    # Another broker has it, or it is just being pruned.
    except (TopicNotFound, ServiceNotReady):
        return None
    if not isinstance(topic, Topic):
        return None
    found = topic.subscriptions.get(subscription)
    return None if found is None else found.backlog()
