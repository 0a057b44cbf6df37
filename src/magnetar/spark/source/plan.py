"""Pure: which ranges of a topic's segments one micro-batch reads, and where the query is after it.

Owns: the rules of moving over the segment DAG: what planning has to know (`wanted`), what was lost
(`check`), how far a batch may go (`targets`), where the query is then (`after`), what the batch
reads (`spans`), and where a run on `AvailableNow` ends (`freeze`).

Invariants:
1. A batch reads a segment from where its start says to where its end says; a segment that its start
   does not name, or names as drained, is not read. So what a batch holds is a function of both.
2. No batch holds messages of a segment and of its ancestor: a segment is named only when all its
   parents are drained or gone, and is read only if they were so when the batch began.
3. Every message that is kept is read exactly once: a segment is named at its first message, and
   drained only when it is sealed and was read to its end.
4. A drained segment is forgotten only when it is gone from the layout. Its children are named at
   the moment it is drained, so whatever is gone and was not drained is a loss that is noticed: it,
   or the ancestor that it waited for, is named.

Relies on: layouts that are never older than the offset's epoch (`is_stale`); brokers that delete no
segment before its parents, and name no parents that are deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from magnetar.model.ranges import ORIGIN, RangeLayout, RangePosition, RangeSegment, RangeState
from magnetar.spark.source.offsets import Offset, TopicOffset


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as the broker has it now."""

    layout: RangeLayout
    states: Mapping[int, RangeState]
    """Of the segments that `wanted` names."""


class SegmentSpan(NamedTuple):
    """A range of one segment that a batch reads."""

    topic: str
    number: int
    start: RangePosition
    end: RangePosition | None
    """None: to the end of the sealed segment."""


def is_stale(place: TopicOffset, layout: RangeLayout) -> bool:
    """Whether the layout is older than what the query has used: it must be asked for again."""
    return layout.creation_id == place.creation_id and layout.epoch < place.epoch


def wanted(place: TopicOffset | None, layout: RangeLayout) -> set[int]:
    """The segments whose state planning needs: all but those that are drained."""
    numbers = {each.number for each in layout.segments}
    # New to the query, or made again under its old name: nothing of it is drained.
    if place is None or place.creation_id != layout.creation_id:
        return numbers
    return {number for number in numbers if place.segments.get(number, 0) is not None}


# --- loss


@dataclass(frozen=True, slots=True)
class Checked:
    """A place that can be gone on from, and what was lost on the way there."""

    place: TopicOffset
    losses: tuple[str, ...] = ()


def check(topic: str, place: TopicOffset, view: TopicView) -> Checked:
    """What of the place is gone, and where to go on behind the gap."""
    layout = view.layout
    # Case 1: another topic stands under the name. Its segment numbers mean other segments.
    if layout.creation_id != place.creation_id:
        lost = f"{topic} was deleted and made again: what the query had not read is gone"
        return Checked(earliest(view), (lost,))
    losses: list[str] = []
    segments = dict(place.segments)
    numbers = {each.number for each in layout.segments}
    for number, position in place.segments.items():
        # Drained: deleting it later loses nothing.
        if position is None:
            continue
        # Case 2: the segment is gone with messages that were not read. It counts as drained, so
        # that its children are named and the query can go on behind the gap (invariant 4).
        if number not in numbers:
            segments[number] = None
            losses.append(f"segment {number} of {topic} was deleted before all of it was read")
        # Case 3: retention trimmed the segment past where the query is.
        elif position < view.states[number].first:
            first = view.states[number].first
            segments[number] = first
            losses.append(
                f"segment {number} of {topic} was to be read from {shown(position)} on, but its "
                f"first message is now {shown(first)}"
            )
    # Case 4: a segment that waits for its parents was trimmed before it was ever named. `after`
    # names it at its first message, so nothing needs to be moved, only told.
    losses += [
        f"the first messages of segment {each.number} of {topic} were deleted before it was read"
        for each in layout.segments
        if each.number not in segments and view.states[each.number].first != ORIGIN
    ]
    return Checked(replace(place, segments=segments), tuple(losses))


def shown(position: RangePosition) -> str:
    """A position as text, in the form of the column `messageId`."""
    return f"{position.ledger}:{position.entry}:{position.batch_index}"


# --- the start


def earliest(view: TopicView) -> TopicOffset:
    """The place at the first message of every segment that has no living parent."""
    return after(_place(view, {}), view, {})


def latest(view: TopicView) -> TopicOffset:
    """The place behind everything that can be read now."""
    return _place(
        view,
        {
            # A sealed segment that is passed over is drained. `stable` is Pulsar's maxReadPosition:
            # what an open transaction has written above it is still to come.
            each.number: None if each.is_sealed and state.is_sealed else state.stable
            for each in view.layout.segments
            for state in (view.states[each.number],)
        },
    )


def from_positions(view: TopicView, positions: Mapping[int, RangePosition]) -> TopicOffset:
    """The place at these positions; ancestors in the DAG count as read, what follows does not."""
    by_number = {each.number: each for each in view.layout.segments}
    segments: dict[int, RangePosition | None] = dict(positions)
    # Ancestors, up to those that the layout has forgotten: as drained ones, or invariant 2 would
    # keep the named segments waiting for them.
    before = [parent for number in positions for parent in by_number[number].parents]
    while before:
        number = before.pop()
        if number not in segments:
            segments[number] = None
            before += by_number[number].parents if number in by_number else ()
    return after(_place(view, segments), view, {})


def from_times(view: TopicView, positions: Mapping[int, RangePosition]) -> TopicOffset:
    """The place at the first message since a time; segments that end before it count as read."""
    segments: dict[int, RangePosition | None] = {}
    # A child of a segment that still has messages since then is not named yet (invariant 2);
    # `after` names it when that one is drained.
    for each in _parents_first(view.layout):
        if all(segments.get(parent, 0) is None for parent in each.parents):
            position = positions[each.number]
            is_read = _is_read(position, each, view.states[each.number])
            segments[each.number] = None if is_read else position
    return after(_place(view, segments), view, {})


def _place(view: TopicView, segments: Mapping[int, RangePosition | None]) -> TopicOffset:
    return TopicOffset(view.layout.creation_id, view.layout.epoch, segments)


def _parents_first(layout: RangeLayout) -> list[RangeSegment]:
    """The segments in an order in which parents come first: children have greater numbers."""
    return sorted(layout.segments, key=lambda each: each.number)


# --- one batch


class Frozen(NamedTuple):
    """The end of a run on `AvailableNow` in one topic."""

    creation_id: str
    ends: Mapping[int, RangePosition]
    sealed: frozenset[int]


def freeze(view: TopicView) -> Frozen:
    """What can be read of a topic now; segments that come later are not in it."""
    return Frozen(
        view.layout.creation_id,
        {number: state.stable for number, state in view.states.items()},
        frozenset(
            each.number
            for each in view.layout.segments
            if each.is_sealed and view.states[each.number].is_sealed
        ),
    )


def targets(place: TopicOffset, view: TopicView, frozen: Frozen | None) -> dict[int, RangePosition]:
    """How far a batch that begins at `place` may go, in the segments that it may read."""
    found: dict[int, RangePosition] = {}
    # Not named, drained, or behind a parent: none of these is read by this batch (invariant 2).
    for each in view.layout.segments:
        position = place.segments.get(each.number)
        if position is None or not _parents_are_drained(each, place):
            continue
        end = view.states[each.number].stable
        # A segment that is younger than the freeze stays where it is.
        if frozen is not None:
            end = min(end, frozen.ends.get(each.number, position))
        found[each.number] = max(position, end)
    return found


def _parents_are_drained(segment: RangeSegment, place: TopicOffset) -> bool:
    # 0 stands for "not named": a parent that waits itself is as little drained as one being read.
    return all(place.segments.get(parent, 0) is None for parent in segment.parents)


def after(
    place: TopicOffset,
    view: TopicView,
    ends: Mapping[int, RangePosition],
    frozen: Frozen | None = None,
) -> TopicOffset:
    """Where the query is once a batch from `place` on has read up to `ends`."""
    by_number = {each.number: each for each in view.layout.segments}
    # A segment that the place names is drained, not in this batch, or read up to `end`.
    segments: dict[int, RangePosition | None] = {}
    for number, position in place.segments.items():
        # Kept only while the layout has it (invariant 4).
        if position is None:
            if number in by_number:
                segments[number] = None
            continue
        # A run on `AvailableNow` drains only what was sealed when it began: draining names the
        # children, and those that came later are not in the run.
        end = ends.get(number, position)
        may_drain = frozen is None or number in frozen.sealed
        is_read = may_drain and _is_read(end, by_number[number], view.states[number])
        segments[number] = None if is_read else end
    _name_children(segments, view, frozen)
    return _place(view, segments)


def _is_read(end: RangePosition, segment: RangeSegment, state: RangeState) -> bool:
    """The layout must know of the seal too, and so of the children, which are named then."""
    return segment.is_sealed and state.is_sealed and end >= state.stable


def _name_children(
    segments: dict[int, RangePosition | None], view: TopicView, frozen: Frozen | None
) -> None:
    """Name those whose parents are all drained; one that is sealed and empty is drained itself."""
    for each in _parents_first(view.layout):
        is_named = each.number in segments
        # Parents come first, so one pass names a whole line of sealed and empty segments.
        if is_named or (frozen is not None and each.number not in frozen.ends):
            continue
        if all(segments.get(parent, 0) is None for parent in each.parents):
            state = view.states[each.number]
            segments[each.number] = None if _is_read(state.first, each, state) else state.first


def is_news(start: TopicOffset | None, end: TopicOffset) -> bool:
    """Whether there is something to do: a newer epoch alone, or a segment to forget, is not."""
    if start is None or start.creation_id != end.creation_id:
        return True
    # Segments of the start that the end has forgotten are drained ones that are gone: no news.
    return any(
        number not in start.segments or start.segments[number] != position
        for number, position in end.segments.items()
    )


def spans(start: Offset, end: Offset) -> list[SegmentSpan]:
    """What a batch reads."""
    found: list[SegmentSpan] = []
    for topic, to in end.topics.items():
        # Invariant 1: a topic or segment that only the end names is named by this batch, and read
        # by the next one.
        begun = start.topics.get(topic)
        if begun is None or begun.creation_id != to.creation_id:
            continue
        for number, position in sorted(begun.segments.items()):
            if position is None or number not in to.segments:
                continue
            end_position = to.segments[number]
            if end_position is None or position < end_position:
                found.append(SegmentSpan(topic, number, position, end_position))
    return found


def batch_spans(
    topic: str, start: TopicOffset, end: TopicOffset, view: TopicView
) -> list[SegmentSpan]:
    """What a read that is no stream has of a topic: all segments at once, there are no batches."""
    found: list[SegmentSpan] = []
    for each in _parents_first(view.layout):
        # A segment that the start does not name follows one that it names: all of it is read.
        number, state = each.number, view.states[each.number]
        position = start.segments.get(number, state.first)
        if position is None or number not in end.segments:
            continue
        stop = end.segments[number]
        # The end was resolved a moment before: what is readable by now bounds it as well.
        stop = state.stable if stop is None else min(stop, state.stable)
        if position < stop:
            found.append(SegmentSpan(topic, number, position, stop))
    return found
