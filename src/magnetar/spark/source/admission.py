"""Pure: how much of what could be read one micro-batch takes, and how many tasks read it.

Owns: `shares`, a limit split over segments; `hold`, up to when others may go while a segment waits
for its parents; `level`, the same for segments that a limit stops at different times;
`piece_counts`, how many tasks read each segment, and `gathered`, which of them one task reads.

Invariants:
1. Shares never add up to more than the limit, and nobody is passed over for ever: with fewer to
   give than takers, they take turns.
2. Something can always go on: the segments that others are held for are held for nobody.

Why hold: Spark's watermark is one per query. A segment that waits for its parents while others run
ahead would bring rows then that are late, though a computation over all of them would keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import ceil
from typing import Final, NamedTuple

from magnetar.model.ranges import RangeCount
from magnetar.spark.source.offsets import TopicOffset
from magnetar.spark.source.plan import Frozen, TopicView

GATHERED_MESSAGES: Final = 2000
GATHERED_BYTES: Final = 256 * 1024
"""The most that one task reads of several ranges: less work than a task costs by itself."""


class SegmentShare(NamedTuple):
    """A segment of a topic."""

    topic: str
    number: int


def shares(
    amounts: Mapping[SegmentShare, int], limit: int, turn: int = 0
) -> dict[SegmentShare, int]:
    """How much each may take: its part of the limit, at least 1, at most what it has."""
    # Sorted, so that `turn` means the same segments at every call (invariant 1).
    takers = sorted(part for part, amount in amounts.items() if amount > 0)
    total = sum(amounts[part] for part in takers)
    if total <= limit:
        return {part: amounts[part] for part in takers}
    # Fewer messages than segments: a window over the takers that moves on with every batch.
    if limit < len(takers):
        first = turn * limit % len(takers)
        return {takers[(first + at) % len(takers)]: 1 for at in range(limit)}
    # One for each, and the rest of the limit in proportion to what is left of each.
    spare, left = limit - len(takers), total - len(takers)
    found = {part: 1 + (amounts[part] - 1) * spare // left for part in takers}
    # Divisions were rounded down: what they left goes to the largest backlogs, one each.
    rest = limit - sum(found.values())
    for part in sorted(takers, key=lambda each: -amounts[each]):
        more = min(rest, amounts[part] - found[part], 1)
        found[part] += more
        rest -= more
    return found


class Hold(NamedTuple):
    """Before which publish time a batch ends, and who may go on regardless."""

    time_ms: int
    exempt: Set[SegmentShare]


def hold(
    places: Mapping[str, TopicOffset],
    views: Mapping[str, TopicView],
    frozen: Mapping[str, Frozen] | None = None,
) -> Hold | None:
    """The segment that began first, of those that wait for their parents, holds the others."""
    # A child waits until the place names it, that is until its parents are drained. Where the time
    # of its beginning is not known there is nothing to level by; in a frozen run, a segment that
    # came later is not read at all.
    waiting = [
        (each.created_ms, topic, each.number)
        for topic, view in views.items()
        for each in view.layout.segments
        if topic in places
        and each.number not in places[topic].segments
        and each.created_ms > 0
        and each.parents
        and (frozen is None or each.number in frozen[topic].ends)
    ]
    if not waiting:
        return None
    time_ms, topic, number = min(waiting)
    # Invariant 2: what the waiting segment waits for goes on regardless, all generations of it, or
    # it would hold up its own parents for ever.
    ancestors: set[int] = set()
    by_number = {each.number: each for each in views[topic].layout.segments}
    found = [number]
    while found:
        segment = by_number.get(found.pop())
        if segment is not None:
            new = set(segment.parents) - ancestors
            ancestors |= new
            found += new
    return Hold(time_ms, {SegmentShare(topic, each) for each in ancestors})


def level(times_ms: Mapping[SegmentShare, int]) -> Hold | None:
    """The segment that stopped earliest, of those that a limit stopped, holds the others."""
    if not times_ms:
        return None
    part = min(times_ms, key=lambda each: (times_ms[each], each))
    # A hold ends before its time: 1 ms later, so that others reach messages of the same moment.
    return Hold(times_ms[part] + 1, {part})


def piece_counts(
    counts: Mapping[SegmentShare, RangeCount], min_partitions: int | None, max_records: int | None
) -> dict[SegmentShare, int]:
    """Into how many pieces each segment's range is cut; at least 1 each."""
    # `maxRecordsPerPartition` first: it is a promise about memory, `minPartitions` only a wish.
    found = {
        part: 1 if max_records is None else max(1, ceil(count.messages / max_records))
        for part, count in counts.items()
    }
    spare = (min_partitions or 0) - sum(found.values())
    total = sum(count.bytes for count in counts.values())
    if spare <= 0 or total <= 0:
        return found
    # The tasks still missing go where the bytes are; rounding up may give a few more than asked.
    for part, count in counts.items():
        found[part] += ceil(spare * count.bytes / total)
    return found


def gathered(counts: Sequence[RangeCount | None]) -> list[range]:
    """Which ranges, next to each other, one task reads; None: too large, or not known."""
    found: list[range] = []
    messages = bytes_ = 0
    for number, count in enumerate(counts):
        is_small = count is not None and count.is_exact
        # What is not small counts as full, so that neither it nor its successor is gathered.
        messages += count.messages if count is not None and is_small else GATHERED_MESSAGES + 1
        bytes_ += count.bytes if count is not None else 0
        if found and messages <= GATHERED_MESSAGES and bytes_ <= GATHERED_BYTES:
            found[-1] = range(found[-1].start, number + 1)
            continue
        found.append(range(number, number + 1))
        if count is not None and is_small:
            messages, bytes_ = count.messages, count.bytes
    return found
