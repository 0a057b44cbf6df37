"""The tasks of a batch read: everything between a beginning and an end, all segments at once.

Owns: `BatchPlan`, and `start_text`, where a read begins by its options.

Invariants:
1. The end is found out when the read is planned, and no task reads behind it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.client.client import Client
from magnetar.errors import InvalidSetting
from magnetar.model.hashing import bucket_hash, key_hash, segment_hash
from magnetar.model.names import TopicName
from magnetar.model.ranges import RangePosition
from magnetar.spark.options import Options, Use
from magnetar.spark.source import plan
from magnetar.spark.source.begin import EARLIEST, LATEST, at_time, read_bounds
from magnetar.spark.source.beginnings import begin, end
from magnetar.spark.source.filters import Bounds
from magnetar.spark.source.pace import Pace
from magnetar.spark.source.plan import SegmentSpan, TopicView
from magnetar.spark.source.tasks import ReadTask, Tasks
from magnetar.spark.source.watched_topics import Watched, names_of

_BOTH: Final = "{} and {} are given"


def check_bounds(options: Options) -> None:
    """Refuse what can be refused before a broker is asked."""
    start = start_text(options)
    names = names_of(options)
    # The topics of a pattern are known only to brokers; those are checked when the read begins.
    if names is not None:
        read_bounds("startingOffsets", start, names)


def start_text(options: Options) -> str:
    """Where a read begins, as a sentinel says it."""
    written, time_ms = options["startingOffsets"], options["startingTimestamp"]
    if written is not None and time_ms is not None:
        text = _BOTH.format("startingOffsets", "startingTimestamp")
        raise InvalidSetting(text, hint="leave one of them out")
    if time_ms is not None:
        return at_time(time_ms)
    if written is not None:
        return str(written)
    # As Spark's Kafka source has it: a stream begins with what comes, a batch read with what is
    # there.
    return LATEST if options.use is Use.STREAM else EARLIEST


def _end_text(options: Options) -> str:
    time_ms = options["endingTimestamp"]
    if time_ms is None:
        return str(options["endingOffsets"])
    # It has a default, so only what the user wrote counts as a contradiction.
    if "endingOffsets" in options.given:
        text = _BOTH.format("endingOffsets", "endingTimestamp")
        raise InvalidSetting(text, hint="leave one of them out")
    return at_time(time_ms)


class BatchPlan:
    """Plans one batch read."""

    def __init__(self, client: Client, options: Options) -> None:
        self._options = options
        self._watched = Watched(client, options)
        self._tasks = Tasks(self._watched, Pace(self._watched), options)

    async def tasks(self, bounds: Bounds | None) -> list[ReadTask]:
        """The tasks of the read; with `bounds`, only of what may pass the filters."""
        views = await self._watched.look(await self._watched.names(), {})
        # The end before the beginning: a read from `latest` then is empty, rather than holding what
        # came between the two questions (invariant 1).
        last = await end(self._watched, _end_text(self._options), views)
        first = await begin(self._watched, self._options, start_text(self._options))
        spans = [
            span
            for topic, view in views.items()
            for span in plan.batch_spans(topic, first.topics[topic], last.topics[topic], view)
        ]
        if bounds is not None:
            spans = await self._bounded(spans, bounds, views)
        return await self._tasks.of(spans, last, views)

    async def _bounded(
        self, spans: list[SegmentSpan], bounds: Bounds, views: dict[str, TopicView]
    ) -> list[SegmentSpan]:
        names = {
            (topic, each.number): each.name
            for topic, view in views.items()
            for each in view.layout.segments
        }
        # Segments first, by number and key, which costs nothing; then times, a request for each.
        chosen = [span for span in spans if _may_hold(span, bounds, names[span.topic, span.number])]
        cut = await asyncio.gather(*(self._in_time(span, bounds) for span in chosen))
        return [span for span in cut if span.end is None or span.start < span.end]

    async def _in_time(self, span: SegmentSpan, bounds: Bounds) -> SegmentSpan:
        ranges = await self._watched.ranges(span.topic)
        isolation = self._watched.isolation

        async def at(time_ms: int) -> RangePosition:
            return await ranges.at_time(span.number, time_ms, isolation=isolation)

        start, stop = span.start, span.end
        assert stop is not None, "the spans of a batch read have ends"
        if bounds.from_ms is not None:
            start = max(start, await at(bounds.from_ms))
        if bounds.to_ms is not None:
            stop = min(stop, await at(bounds.to_ms))
        return span._replace(start=start, end=stop)


def _may_hold(span: SegmentSpan, bounds: Bounds, name: str) -> bool:
    # A segment that is named, or else one whose range the hash of a key falls into. A segment of a
    # regular topic has no range, and may hold every key.
    if bounds.segments is not None and span.number not in bounds.segments:
        return False
    descriptor = TopicName.parse(name).descriptor
    if bounds.keys is None or descriptor is None:
        return True
    hashes = map(key_hash, bounds.keys)
    # Clients of the first preview of version 5 choose by the other half of the hash.
    places = [place for each in hashes for place in (segment_hash(each), bucket_hash(each))]
    return any(place in descriptor.hash_range for place in places)
