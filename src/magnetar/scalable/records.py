"""The records of scalable topics in the metadata store (pure).

Owns: what is stored of a scalable topic, where, and in which form.

`/scalable/topics/<topic>` is the topic's one record: its layout, and the change that is under way.
`/scalable/state/<topic>/...` is what changes beside the layout: subscriptions, consumer groups,
which segment a subscription has drained, and the load of the segments. One watch of that directory
tells a controller everything.

Invariants:
1. Every record holds the full names that its key stands for: keys of long names are cut and hashed.
2. Every change is a compare-and-set of one whole record; nothing relies on two records at once.
3. The record of a topic with `scalable_total_segments_max` segments, and a change of it under way,
   fits into one value of the metadata store.
4. What cannot be decoded raises `CorruptMetadata` and stays as it is.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from magnetar.broker.policy.paths import SCALABLE_TOPICS, scalable_key
from magnetar.errors import CorruptMetadata
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import Record
from magnetar.model.hashing import HashRange
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout, SegmentState

TOPICS: Final = SCALABLE_TOPICS
CONTROLLERS: Final = "/scalable/controllers"
BROKERS: Final = "/scalable/brokers"

_STATE: Final = "/scalable/state"

Body = TypeVar("Body", bound=msgspec.Struct)

# What is stored of a change: its kind says where it leads, its step how far it has come (see
# `layout.changes` for the state machine).
ChangeKind: TypeAlias = Literal["create", "split", "merge", "migrate", "delete"]
ChangeStep: TypeAlias = Literal["prepare", "seal", "undo", "delete"]
SubscriptionKind: TypeAlias = Literal["STREAM", "QUEUE"]
GroupKind: TypeAlias = Literal["STREAM", "CHECKPOINT"]
StartPosition: TypeAlias = Literal["earliest", "latest"]
Ids: TypeAlias = tuple[int | tuple[int, int], ...]
"""Ids of segments; those that follow each other may stand as the first and the last of them."""


# --- the topic


class SegmentRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A `Segment`, as it is stored."""

    # One range of the ring and its place in the DAG; `NEVER` and the other defaults are left out,
    # which keeps a large layout within one value of the store (invariant 3).
    segment_id: int
    start: int
    end: int
    state: Literal["ACTIVE", "SEALED"] = "ACTIVE"
    parent_ids: Ids = ()
    child_ids: Ids = ()
    created_at_epoch: int = 0
    sealed_at_epoch: int = NEVER
    created_at_ms: int = 0
    sealed_at_ms: int = NEVER
    legacy_topic_name: str | None = None
    entry_bucket_splits: tuple[int, ...] = ()


class LayoutRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A `SegmentLayout`, as it is stored."""

    epoch: int
    next_segment_id: int
    segments: tuple[SegmentRecord, ...]

    @classmethod
    def of(cls, layout: SegmentLayout) -> LayoutRecord:
        segments = tuple(_segment_record(each) for each in layout.segments.values())
        return cls(layout.epoch, layout.next_segment_id, segments)

    def layout(self) -> SegmentLayout:
        segments = {each.segment_id: _segment(each) for each in self.segments}
        return SegmentLayout(self.epoch, self.next_segment_id, segments)


class LayoutChange(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A layout change under way: what it leads to, and how far it has come."""

    kind: ChangeKind
    step: ChangeStep
    # Fixed when the change begins: whoever carries it out, after whatever crash, makes the same.
    after: LayoutRecord | None = None
    """The layout once it is committed; None: the topic is deleted."""
    children: tuple[int, ...] = ()
    """Segments to prepare."""
    parents: tuple[int, ...] = ()
    """Segments to seal: of the present layout, or of `after` for a migration."""
    force: bool = False
    cause: str = ""
    """Who wanted it, for logs and statistics: "request", "load", "consumers"."""


class AutoScaleOverride(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The auto-scale settings that a namespace or a topic gives; None: not set there."""

    enabled: bool | None = None
    max_segments: int | None = None
    min_segments: int | None = None
    max_dag_depth: int | None = None
    split_cooldown_seconds: int | None = None
    merge_cooldown_seconds: int | None = None
    merge_window_seconds: int | None = None
    split_msg_rate_in_threshold: float | None = None
    split_bytes_rate_in_threshold: float | None = None
    split_msg_rate_out_threshold: float | None = None
    split_bytes_rate_out_threshold: float | None = None
    merge_msg_rate_in_threshold: float | None = None
    merge_bytes_rate_in_threshold: float | None = None
    merge_msg_rate_out_threshold: float | None = None
    merge_bytes_rate_out_threshold: float | None = None


class LifecycleOverride(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The times for which a namespace or a topic keeps what lost its use; None: not set there."""

    grace_period_seconds: float | None = None
    sealed_seconds: float | None = None


class ScalableRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A scalable topic."""

    name: str
    """`topic://...`"""
    created_ms: int
    # The committed layout and the change beside it: readers never see a half-made layout.
    layout: LayoutRecord | None = None
    """What clients see; None: not created (or migrated) yet, or being deleted."""
    change: LayoutChange | None = None
    garbage: tuple[str, ...] = ()
    """Topics of pruned segments that are still to be deleted."""
    properties: dict[str, str] = {}
    auto_scale: AutoScaleOverride | None = None
    lifecycle: LifecycleOverride | None = None
    # In the record, not in memory: cool-downs outlive the controller that began them.
    last_split_ms: int = NEVER
    last_merge_ms: int = NEVER
    last_failure: str = ""
    """Why the last change was undone; empty: it was not."""
    pruned: int = 0
    """How many segments were pruned so far."""

    @property
    def topic(self) -> TopicName:
        return TopicName.parse(self.name)


# --- beside the topic


class SubscriptionRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A durable subscription of the whole topic, recorded at the first subscribe."""

    name: str
    kind: SubscriptionKind
    position: StartPosition
    created_ms: int
    # Two steps: asked for, then established. The controller alone moves it on.
    established: bool = False
    """Whether every segment there was at its beginning has its cursor."""
    deleting: bool = False
    properties: dict[str, str] = {}


class MemberRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A consumer of a group; it stays for the grace period after its connection is lost."""

    name: str
    # Who holds the connection: by these two a late detach, or the death of a broker, is told from a
    # member that has connected again.
    broker: str
    """Which broker process holds its connection: `BROKERS/<this>` lives as long as that does."""
    connection: str
    """Tells the connections of one consumer apart: only the one that attached last may detach."""
    lost_ms: int = NEVER
    """When its connection was lost; NEVER: it is connected, if its broker is."""
    shares: bool = False
    """Whether it can share a segment by entry buckets."""
    placed: bool = False
    """Whether `owners` of the group was made with this member in it, as it is now."""


class GroupRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The consumers that share a topic, and which of them has which segment."""

    name: str
    kind: GroupKind
    members: tuple[MemberRecord, ...] = ()
    """By name, ascending."""
    owners: dict[int, tuple[str, ...]] = {}
    """Members by segment; more than one: they share it by entry buckets."""
    # Sessions compare it with the layout they know: an assignment never names segments that a
    # client cannot have seen.
    layout_epoch: int = NEVER
    """Of the layout for which `owners` was made."""
    revision: int = 0
    """Counts the changes of `owners`."""


class DrainedRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """All of a sealed segment was acknowledged (or, by a checkpoint group's member, read)."""

    segment_id: int
    group: str
    """The subscription, or the checkpoint group."""
    member: str = ""
    """Of a checkpoint group: who read it; it counts only while that one has the segment."""


class LoadRecord(msgspec.Struct, frozen=True, rename="camel"):
    """The rates of an active segment, per second, when they last moved."""

    segment_id: int
    msg_rate_in: float = 0.0
    bytes_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    bytes_rate_out: float = 0.0
    since_ms: int = 0
    """When it was written: rates have been about these since then."""


# --- where they are


def topic_key(topic: TopicName) -> str:
    return scalable_key(topic)


def state_directory(topic: TopicName) -> str:
    return f"{_STATE}/{encode_name(_full(topic))}"


def subscription_key(topic: TopicName, name: str) -> str:
    # One directory for all of it: a controller follows its topic with one watch.
    return f"{state_directory(topic)}/sub-{encode_name(name)}"


def group_key(topic: TopicName, kind: GroupKind, name: str) -> str:
    return f"{state_directory(topic)}/group-{kind.lower()}-{encode_name(name)}"


def drained_key(topic: TopicName, segment_id: int, subscription: str) -> str:
    """The key of a subscription's mark; it outlives the connections of its consumers."""
    return f"{state_directory(topic)}/drained-{segment_id}-{encode_name(subscription)}"


def done_key(topic: TopicName, segment_id: int, group: str) -> str:
    """The key of a checkpoint group's mark."""
    return f"{state_directory(topic)}/done-{segment_id}-{encode_name(group)}"


def load_key(topic: TopicName, segment_id: int) -> str:
    return f"{state_directory(topic)}/load-{segment_id}"


def kind_of_key(key: str) -> str:
    """`sub`, `group`, `drained`, `done` or `load`."""
    return key.rpartition("/")[2].partition("-")[0]


def segment_of_key(key: str) -> int:
    """The segment of a `drained`, `done` or `load` key."""
    return int(key.rpartition("/")[2].split("-")[1])


# --- forms


def encode(body: msgspec.Struct) -> bytes:
    return msgspec.json.encode(body)


def decode(record: Record, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(record.value, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error


def segment_topic(topic: TopicName, segment: Segment) -> TopicName:
    """The topic that holds a segment's messages: a regular one if it was migrated from that."""
    # A migrated partition stays where it is: nothing is copied, it is only sealed.
    if segment.legacy_topic_name is not None:
        return TopicName.parse(segment.legacy_topic_name)
    return topic.segment(segment.descriptor)


def sealed_topics(record: ScalableRecord) -> dict[TopicName, int]:
    """The topics that hold the sealed segments of a topic, and the ids of those."""
    if record.layout is None:
        return {}
    topic = record.topic
    sealed = [_segment(each) for each in record.layout.segments if each.state == "SEALED"]
    return {segment_topic(topic, each): each.segment_id for each in sealed}


def _full(topic: TopicName) -> str:
    return str(topic.scalable_topic())


def _segment_record(segment: Segment) -> SegmentRecord:
    return SegmentRecord(
        segment_id=segment.segment_id,
        start=segment.hash_range.start,
        end=segment.hash_range.end,
        state=segment.state.value,
        parent_ids=_packed(segment.parent_ids),
        child_ids=_packed(segment.child_ids),
        created_at_epoch=segment.created_at_epoch,
        sealed_at_epoch=segment.sealed_at_epoch,
        created_at_ms=segment.created_at_ms,
        sealed_at_ms=segment.sealed_at_ms,
        legacy_topic_name=segment.legacy_topic_name,
        entry_bucket_splits=segment.entry_bucket_splits,
    )


def _packed(ids: tuple[int, ...]) -> Ids:
    """Write ids as ranges, in order: a migrated topic's partitions are parents of each segment."""
    # The usual case, all of them in a row, without the general search.
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[-1] + 1)):
        return ((ids[0], ids[-1]),)
    found: list[int | tuple[int, int]] = []
    for _, run in groupby(enumerate(ids), key=lambda each: each[1] - each[0]):
        numbers = [number for _, number in run]
        # A pair would be no shorter than two numbers.
        found += [(numbers[0], numbers[-1])] if len(numbers) > 2 else numbers
    return tuple(found)


def _unpacked(ids: Ids) -> tuple[int, ...]:
    found: list[int] = []
    for each in ids:
        found += [each] if isinstance(each, int) else range(each[0], each[1] + 1)
    return tuple(found)


def _segment(record: SegmentRecord) -> Segment:
    return Segment(
        segment_id=record.segment_id,
        hash_range=HashRange(record.start, record.end),
        state=SegmentState(record.state),
        parent_ids=_unpacked(record.parent_ids),
        child_ids=_unpacked(record.child_ids),
        created_at_epoch=record.created_at_epoch,
        sealed_at_epoch=record.sealed_at_epoch,
        created_at_ms=record.created_at_ms,
        sealed_at_ms=record.sealed_at_ms,
        legacy_topic_name=record.legacy_topic_name,
        entry_bucket_splits=record.entry_bucket_splits,
    )
