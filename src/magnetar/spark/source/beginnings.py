"""Beginnings and ends of reads: what a user wrote, as a place in every topic.

Owns: `begin` and `end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from magnetar.errors import InvalidSetting
from magnetar.model.ranges import RangePosition
from magnetar.spark.options import Options
from magnetar.spark.source import plan
from magnetar.spark.source.begin import Bound, read_bounds
from magnetar.spark.source.offsets import Offset, TopicOffset
from magnetar.spark.source.plan import TopicView
from magnetar.spark.source.watched_topics import Watched


async def begin(watched: Watched, options: Options, text: str) -> Offset:
    """Where a query begins that has no checkpoint."""
    names = await watched.names()
    bounds = read_bounds("startingOffsets", text, names)
    views = await watched.look(names, {})
    return Offset(
        {
            topic: await _place(watched, options, topic, bounds[topic], view)
            for topic, view in views.items()
        }
    )


async def _place(
    watched: Watched, options: Options, topic: str, bound: Bound, view: TopicView
) -> TopicOffset:
    # Written out by the user: taken as it is, if such segments are there.
    if bound.place is not None or bound.segments is not None:
        return _written("startingOffsets", topic, bound, view)
    if bound.time_ms is None:
        return plan.earliest(view) if bound.word == "earliest" else plan.latest(view)
    positions = await _at_time(watched, topic, bound.time_ms, view)
    # Nothing since that time. To begin with what comes may be meant, or the time is a mistake: the
    # option says which.
    is_behind = all(at >= view.states[number].stable for number, at in positions.items())
    if is_behind and options["startingTimestampStrategy"] == "error":
        raise InvalidSetting(
            f"nothing was published to {topic} since the startingTimestamp",
            hint='set startingTimestampStrategy to "latest" to begin with what comes',
        )
    return plan.from_times(view, positions)


async def end(watched: Watched, text: str, views: Mapping[str, TopicView]) -> Offset:
    """Where a batch read ends."""
    bounds = read_bounds("endingOffsets", text, views)
    places: dict[str, TopicOffset] = {}
    # Written out, a time, or a word. A time gives every segment an end of its own.
    for topic, view in views.items():
        bound = bounds[topic]
        if bound.place is not None or bound.segments is not None:
            places[topic] = _written("endingOffsets", topic, bound, view)
        elif bound.time_ms is not None:
            positions = await _at_time(watched, topic, bound.time_ms, view)
            places[topic] = TopicOffset(view.layout.creation_id, view.layout.epoch, positions)
        elif bound.word == "earliest":
            raise InvalidSetting(
                "a read cannot end at earliest", hint="use latest, or leave it out"
            )
        else:
            places[topic] = plan.latest(view)
    return Offset(places)


async def _at_time(
    watched: Watched, topic: str, time_ms: int, view: TopicView
) -> dict[int, RangePosition]:
    ranges = await watched.ranges(topic)
    numbers = list(view.states)
    found = await asyncio.gather(
        *(ranges.at_time(number, time_ms, isolation=watched.isolation) for number in numbers)
    )
    return dict(zip(numbers, found, strict=True))


def _written(option: str, topic: str, bound: Bound, view: TopicView) -> TopicOffset:
    """A place that stands in the option itself."""
    if bound.place is not None:
        # Positions of a topic that was deleted point anywhere in the one that has its name now.
        if bound.place.creation_id != view.layout.creation_id:
            raise InvalidSetting(
                f"the option {option} is of an earlier topic with the name {topic}"
            )
        return bound.place
    positions: dict[int, RangePosition] = {}
    for number, at in (bound.segments or {}).items():
        state = view.states.get(number)
        if state is None:
            known = ", ".join(map(str, sorted(view.states)))
            raise InvalidSetting(
                f"the option {option} names segment {number} of {topic}", hint=f"there are {known}"
            )
        # A word is resolved now; a position may lie behind a gap, which planning tells as a loss.
        if isinstance(at, str):
            positions[number] = state.first if at == "earliest" else state.stable
        else:
            positions[number] = at
    return plan.from_positions(view, positions)
