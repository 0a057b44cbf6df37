"""The state machine of a scalable topic's record, from step to step of a change (pure).

Owns: the state machine of layout changes. Each function takes a record and returns the next one;
who stores it does so by compare-and-set, so that of two movers one wins.

    split, merge   prepare -> seal -> committed      (prepare -> undo -> as before)
    create         prepare ---------> committed      (prepare -> undo -> no record)
    migrate        prepare -> seal -> committed      (prepare -> undo -> no record)
    delete         delete  ---------> no record

Invariants:
1. At most one change is under way, and what it leads to (`after`) is fixed when it begins.
2. Clients see `layout`: the epoch of that grows, by one, with each commit and each prune, and never
   otherwise. Its active ranges tile the ring at every moment.
3. Nothing is sealed before `seal` is stored, and from then on the change can only be committed. So
   a change can be undone as long as it has done nothing that a client could see.
4. Ids of children are never given again, not even those of a change that was undone.
5. What is no longer in the layout is in `garbage` until its topic is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from magnetar.errors import Conflict, InvalidLayout, InvariantBroken, TopicNotFound
from magnetar.model.hashing import FULL_RING
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout, SegmentState
from magnetar.scalable.records import (
    ChangeKind,
    LayoutChange,
    LayoutRecord,
    ScalableRecord,
    segment_topic,
)

# --- beginnings


def begin_create(
    topic: TopicName,
    count: int,
    *,
    now_ms: int,
    bucket_budget: int,
    properties: Mapping[str, str] | None = None,
) -> ScalableRecord:
    """A new topic of `count` segments."""
    layout = SegmentLayout.create(count, now_ms=now_ms, bucket_budget=bucket_budget)
    change = LayoutChange(
        kind="create",
        step="prepare",
        after=LayoutRecord.of(layout),
        children=tuple(layout.segments),
    )
    return ScalableRecord(
        name=str(topic), created_ms=now_ms, change=change, properties=dict(properties or {})
    )


def begin_split(
    record: ScalableRecord,
    segment_id: int,
    *,
    now_ms: int,
    segments_max: int,
    after: int | None = None,
    cause: str = "request",
) -> ScalableRecord:
    """Replace a segment by two; `after` is the last position of the lower one."""
    layout = idle_layout(record)
    wanted = layout.split(segment_id, now_ms=now_ms, after=after)
    return _begin(record, layout, wanted, "split", (segment_id,), segments_max, cause)


def begin_merge(
    record: ScalableRecord,
    segment_ids: Iterable[int],
    *,
    now_ms: int,
    segments_max: int,
    cause: str = "request",
) -> ScalableRecord:
    """Replace adjacent segments by one."""
    layout = idle_layout(record)
    # Sorted, without doubles: the same request gives the same record, whatever its order.
    parents = tuple(sorted(set(segment_ids)))
    wanted = layout.merge(parents, now_ms=now_ms)
    return _begin(record, layout, wanted, "merge", parents, segments_max, cause)


def begin_migrate(
    topic: TopicName,
    regular: Sequence[TopicName],
    *,
    now_ms: int,
    bucket_budget: int,
    properties: Mapping[str, str] | None = None,
    force: bool = False,
) -> ScalableRecord:
    """Put as many segments behind the regular topics (the partitions) as there are of those."""
    count = len(regular)
    # The partitions keep the ids 0 to n - 1 that consumer groups know them by (`synthetic_layout`).
    children = tuple(range(count, 2 * count))
    fresh = SegmentLayout.create(count, now_ms=now_ms, bucket_budget=bucket_budget)
    # Each partition may hold any key, so each covers the whole ring and is a parent of every new
    # segment; sealed from the start, for `after` shows it as it will be.
    segments = {
        number: Segment(
            number,
            FULL_RING,
            state=SegmentState.SEALED,
            child_ids=children,
            sealed_at_epoch=0,
            created_at_ms=now_ms,
            sealed_at_ms=now_ms,
            legacy_topic_name=str(name),
        )
        for number, name in enumerate(regular)
    }
    for number, segment in fresh.segments.items():
        segments[count + number] = Segment(
            count + number,
            segment.hash_range,
            parent_ids=tuple(range(count)),
            created_at_ms=now_ms,
            entry_bucket_splits=segment.entry_bucket_splits,
        )
    layout = SegmentLayout(0, 2 * count, segments)
    change = LayoutChange(
        kind="migrate",
        step="prepare",
        after=LayoutRecord.of(layout),
        children=children,
        parents=tuple(range(count)),
        force=force,
    )
    return ScalableRecord(
        name=str(topic), created_ms=now_ms, change=change, properties=dict(properties or {})
    )


def begin_delete(record: ScalableRecord, *, force: bool) -> ScalableRecord:
    """Take the topic from its clients; its segments go with it."""
    # Not during another change: what that has made would be left behind.
    layout = idle_layout(record)
    doomed = _topics(record, layout.segments.values())
    # Clients lose it with this write; all that was in the layout is garbage from now on, so that a
    # repeated step knows what to delete.
    return replace(
        record,
        layout=None,
        change=LayoutChange(kind="delete", step="delete", force=force),
        garbage=(*record.garbage, *doomed),
    )


def _begin(
    record: ScalableRecord,
    layout: SegmentLayout,
    wanted: SegmentLayout,
    kind: ChangeKind,
    parents: tuple[int, ...],
    segments_max: int,
    cause: str,
) -> ScalableRecord:
    # Sealed ones count: they stand in the record until they are pruned (invariant 3 of `records`).
    if len(wanted.segments) > segments_max:
        raise InvalidLayout(
            f"{record.name} would have {len(wanted.segments)} segments, sealed ones included; "
            f"the limit is {segments_max}",
            hint="wait until drained segments are pruned, or merge some",
        )
    children = tuple(each for each in wanted.segments if each not in layout.segments)
    change = LayoutChange(
        kind=kind,
        step="prepare",
        after=LayoutRecord.of(wanted),
        children=children,
        parents=parents,
        cause=cause,
    )
    # A request that waits sees by `last_failure` whether this change was undone: it starts empty.
    return replace(record, change=change, last_failure="")


# --- steps of a change under way


def prepared(record: ScalableRecord) -> ScalableRecord:
    """Every child is there with its cursors: seal the parents, or commit if there are none."""
    change = _at(record, "prepare")
    # A new topic has no parents: nothing to seal, so it is committed at once.
    if not change.parents:
        return _commit(record, change)
    return replace(record, change=replace(change, step="seal"))


def sealed(record: ScalableRecord) -> ScalableRecord:
    """Every parent is sealed, and its children know what it knew: commit."""
    return _commit(record, _at(record, "seal"))


def begin_undo(record: ScalableRecord, reason: str) -> ScalableRecord:
    """The children cannot be made: go back."""
    change = _at(record, "prepare")
    return replace(record, change=replace(change, step="undo"), last_failure=reason)


def undone(record: ScalableRecord) -> ScalableRecord | None:
    """Nothing of the children is left; None: nor of the topic."""
    change = _at(record, "undo")
    # It was to be created or migrated: without a layout to go back to there is no topic.
    if record.layout is None:
        return None
    assert change.after is not None, "only a delete leads to nothing"
    # Someone may still be making a child: its id is never given to another one.
    layout = replace(record.layout, next_segment_id=change.after.next_segment_id)
    return replace(record, layout=layout, change=None)


def _commit(record: ScalableRecord, change: LayoutChange) -> ScalableRecord:
    if change.after is None:
        raise InvariantBroken(f"{record.name}: a {change.kind} leads to no layout")
    change.after.layout().check_invariants()
    # One record, one compare-and-set: the new layout shows and the change ends together.
    moved = replace(record, layout=change.after, change=None)
    created_ms = max(each.created_at_ms for each in change.after.segments)
    # Cool-downs count from when the change began, as the children say: that is in the layout, too.
    if change.kind == "split":
        return replace(moved, last_split_ms=created_ms)
    if change.kind == "merge":
        return replace(moved, last_merge_ms=created_ms)
    return moved


def _at(record: ScalableRecord, step: str) -> LayoutChange:
    # Nobody can have overtaken it: `ScalableStore.step` has compared the change. A mistake in code.
    if record.change is None or record.change.step != step:
        at = "idle" if record.change is None else f"at step {record.change.step!r}"
        raise InvariantBroken(f"{record.name} is {at}, not at {step!r}")
    return record.change


# --- the end of segments


def pruned(record: ScalableRecord, segment_ids: Iterable[int]) -> ScalableRecord:
    """Take drained segments out of the layout; their topics are deleted afterwards."""
    layout = idle_layout(record)
    gone = tuple(segment_ids)
    doomed = _topics(record, [layout.segment(each) for each in gone])
    # Layout and garbage change together: a crash can lose no topic that is still to be deleted.
    return replace(
        record,
        layout=LayoutRecord.of(layout.prune(gone)),
        garbage=(*record.garbage, *doomed),
        pruned=record.pruned + len(doomed),
    )


def pruned_from(
    record: ScalableRecord, judged: ScalableRecord, segment_ids: Iterable[int]
) -> ScalableRecord:
    """Prune by a judgement of the record as it was seen; Conflict if a change came in between."""
    if record.layout != judged.layout or record.change is not None:
        raise Conflict(f"{record.name} has changed meanwhile")
    return pruned(record, segment_ids)


def swept(record: ScalableRecord, names: Iterable[str]) -> ScalableRecord:
    """Topics that were to be deleted are gone."""
    gone = set(names)
    return replace(record, garbage=tuple(each for each in record.garbage if each not in gone))


# --- questions


def layout_of(record: ScalableRecord) -> SegmentLayout:
    """What clients see; TopicNotFound while they see nothing."""
    if record.layout is None:
        raise TopicNotFound(f"{record.name} does not exist")
    return record.layout.layout()


def idle_layout(record: ScalableRecord) -> SegmentLayout:
    """The layout, if it can be changed now."""
    layout = layout_of(record)
    if record.change is not None:
        raise Conflict(
            f"{record.name}: a {record.change.kind} is under way", hint="try again when it is done"
        )
    return layout


def synthetic_layout(regular: Sequence[TopicName]) -> SegmentLayout:
    """A regular topic (its partitions) as v5 clients see it: each partition a segment."""
    return SegmentLayout.of_regular([str(name) for name in regular])


def _topics(record: ScalableRecord, segments: Iterable[Segment]) -> list[str]:
    topic = record.topic
    return [str(segment_topic(topic, segment)) for segment in segments]
