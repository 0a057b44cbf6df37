"""The tasks of a read: which ranges they have, and what to do if something of them is gone.

Owns: `ReadTask`, what one task reads; `Tasks`, from offsets to tasks; `tell`, about lost data;
`pages_of`, the pages of a task's range.

Invariants:
1. The ranges of the tasks are exactly those between two offsets, cut, gathered or not.
2. All that is kept of a range is read, in order; what is gone raises `DataLost`, or is warned of
   and skipped if the query wants to go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from magnetar.blocking import Client
from magnetar.client.ranges.ranges import RangePage
from magnetar.errors import DataLost, RangeLost
from magnetar.model.ranges import RangePosition
from magnetar.runtime.logs import logger
from magnetar.spark.options import Options
from magnetar.spark.source import plan
from magnetar.spark.source.admission import SegmentShare, gathered, piece_counts
from magnetar.spark.source.offsets import Offset
from magnetar.spark.source.pace import Pace
from magnetar.spark.source.plan import SegmentSpan, TopicView
from magnetar.spark.source.watched_topics import Watched

_LOG: Final = logger(__name__)
_COUNTED_ENTRIES: Final = 256
"""Of longer ranges it is not asked how small they are."""


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The range of one segment that one task reads."""

    topic: str
    creation_id: str
    number: int
    start: RangePosition
    end: RangePosition


def tell(losses: list[str], options: Options) -> None:
    """Raise `DataLost`, or warn if the query is to go on."""
    if not losses:
        return
    # One error for all losses: Spark shows the first line, and the rest are mostly of one cause.
    if options["failOnDataLoss"]:
        more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
        raise DataLost(losses[0] + more)
    for each in losses:
        _LOG.warning("data-lost", what=each)


class Tasks:
    """Plans the tasks of one query."""

    def __init__(self, watched: Watched, pace: Pace, options: Options) -> None:
        self._watched = watched
        self._pace = pace
        self._options = options

    async def between(self, start: Offset, end: Offset) -> list[ReadTask]:
        """The tasks of a micro-batch."""
        # The offsets decide what is read; brokers are asked only whether it is still there.
        spans = plan.spans(start, end)
        topics = sorted({span.topic for span in spans})
        views = await self._watched.look(topics, start.topics)
        return await self.of(spans, end, views)

    async def of(
        self, spans: Iterable[SegmentSpan], end: Offset, views: Mapping[str, TopicView]
    ) -> list[ReadTask]:
        """What has to be read, cut into pieces if the query wants so many tasks."""
        losses: list[str] = []
        whole = [each for span in spans for each in self._task(span, end, views, losses)]
        tell(losses, self._options)
        return await self._pieces(whole)

    def _task(
        self, span: SegmentSpan, end: Offset, views: Mapping[str, TopicView], losses: list[str]
    ) -> list[ReadTask]:
        topic, number = span.topic, span.number
        # Between planning an offset and its tasks, or after a restart much later, three things may
        # have happened: the topic was deleted, or the segment was, or retention trimmed it.
        creation_id = end.topics[topic].creation_id
        view = views.get(topic)
        if view is None or view.layout.creation_id != creation_id:
            losses.append(f"{topic} was deleted before all of it was read")
            return []
        state = view.states.get(number)
        if state is None:
            losses.append(f"segment {number} of {topic} was deleted before all of it was read")
            return []
        # A sealed segment that was planned to its end has its end from the state: it does not move.
        start, stop = max(span.start, state.first), span.end or state.stable
        if start > span.start:
            losses.append(
                f"segment {number} of {topic} was to be read from {plan.shown(span.start)} on, but "
                f"its first message is now {plan.shown(state.first)}"
            )
        return [ReadTask(topic, creation_id, number, start, stop)] if start < stop else []

    async def _pieces(self, whole: list[ReadTask]) -> list[ReadTask]:
        least, most = self._options["minPartitions"], self._options["maxRecordsPerPartition"]
        # One task for each segment, which is the default, needs no counts.
        if most is None and (least is None or least <= len(whole)):
            return whole
        by_part = {SegmentShare(each.topic, each.number): each for each in whole}
        counts = await self._pace.counts(
            {part: (each.start, each.end) for part, each in by_part.items()}
        )
        found: list[ReadTask] = []
        for part, count in piece_counts(counts, least, most).items():
            task = by_part[part]
            inner = []
            # Pieces are cut by the broker, between entries: no batch is opened by two tasks.
            if count > 1:
                ranges = await self._watched.ranges(part.topic)
                inner = await ranges.pieces(
                    part.number, task.start, task.end, count, isolation=self._watched.isolation
                )
            cuts = [task.start, *inner, task.end]
            found += [
                ReadTask(task.topic, task.creation_id, task.number, start, end)
                # Cuts may coincide where few large entries were asked to give many pieces.
                for start, end in pairwise(cuts)
                if start < end
            ]
        return found

    async def gathered(self, tasks: list[ReadTask]) -> list[tuple[ReadTask, ...]]:
        """The tasks as Spark runs them: small ranges share one, for each costs milliseconds."""
        alone: list[tuple[ReadTask, ...]] = [(each,) for each in tasks]
        # A user who says how many there should be gets them.
        asked = self._options["minPartitions"] or self._options["maxRecordsPerPartition"]
        short = [each for each in tasks if _is_short(each)]
        if asked or len(short) < 2:
            return alone
        counts = await self._pace.counts(
            {SegmentShare(each.topic, each.number): (each.start, each.end) for each in short}
        )
        known = [
            counts[SegmentShare(each.topic, each.number)] if _is_short(each) else None
            for each in tasks
        ]
        return [tuple(tasks[each.start : each.stop]) for each in gathered(known)]


def _is_short(task: ReadTask) -> bool:
    """Whether its positions tell that few entries are between them."""
    first, last = task.start, task.end
    return first.ledger == last.ledger and last.entry - first.entry <= _COUNTED_ENTRIES


def pages_of(client: Client, task: ReadTask, options: Options) -> Iterator[RangePage]:
    """Read the range of one task, page by page; runs in a worker."""
    # Read on where the last page ended: after a gap the rest of the range is tried again.
    at: RangePosition | None = task.start
    while at is not None:
        try:
            # By creation id: a topic that was made again under this name is a loss, not other rows.
            ranges = client.ranges(task.topic, creation_id=task.creation_id)
            pages = ranges.read(task.number, at, task.end, isolation=options["readIsolation"])
            for page in pages:
                at = page.next
                yield page
            return
        # Trimmed or deleted while the task was reading.
        except RangeLost as error:
            if options["failOnDataLoss"]:
                raise DataLost(str(error.args[0])) from error
            _LOG.warning("data-lost", what=str(error.args[0]))
            at = _behind_the_gap(client, task, at)


def _behind_the_gap(client: Client, task: ReadTask, at: RangePosition) -> RangePosition | None:
    """Where the range goes on; None: nowhere."""
    try:
        ranges = client.ranges(task.topic, creation_id=task.creation_id)
    except RangeLost:
        return None
    state = ranges.states([task.number]).get(task.number)
    # Must be ahead of `at`, or the loop would ask for the same range for ever.
    return None if state is None or not at < state.first < task.end else state.first
