"""The driver's side of a read: what the next batch is, its tasks, and what is told about it.

Owns: `Planner`: the rules of `plan` and `admission`, with the brokers' answers to what they ask.

Invariants:
1. Whatever a batch holds is decided in the offsets that it returns: planned again from those, tasks
   read the same messages.
2. An offset is returned as it was given unless there is something to do: Spark would run a batch.
3. Whatever the query may still read is held by its subscription, unless the user wants none: that
   exists before a start is resolved, and is moved only over what Spark has committed.
4. Data that is gone raises `DataLost`, or is warned of if the query wants to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from magnetar.client.client import Client
from magnetar.client.ranges.ranges import Ranges
from magnetar.errors import RangeLost, SubscriptionNotFound, TopicNotFound, WrongCheckpoint
from magnetar.model.ranges import ORIGIN, RangePosition
from magnetar.runtime.clock import SystemClock
from magnetar.spark.options import Options
from magnetar.spark.source import plan
from magnetar.spark.source.admission import SegmentShare, hold
from magnetar.spark.source.beginnings import begin
from magnetar.spark.source.offsets import (
    Offset,
    Sentinel,
    TopicOffset,
    base_of,
    format_offset,
    parse_offset,
    parse_start,
)
from magnetar.spark.source.pace import BatchLimits, Pace
from magnetar.spark.source.plan import Frozen, TopicView
from magnetar.spark.source.tasks import ReadTask, Tasks, tell
from magnetar.spark.source.watched_topics import Watched, subscription_of

R = TypeVar("R")

_MS_PER_SECOND: Final = 1000
_PLANS_MAX: Final = 3
_UNPLANNED_PAUSE_S: Final = 0.1
"""After news that gave nothing to do, so that they are not asked for at once again."""


class Planner:
    """Plans the batches of one query."""

    def __init__(self, client: Client, options: Options) -> None:
        self._options = options
        self._watched = Watched(client, options)
        self._pace = Pace(self._watched)
        self._tasks = Tasks(self._watched, self._pace, options)
        self._clock = SystemClock()
        # Where a run on `AvailableNow` ends; None for a query that goes on for ever.
        self._frozen: dict[str, Frozen] | None = None
        # What the last plan saw, so that waiting for news is about what came after it.
        self._epochs: dict[str, int] = {}
        self._seen: Offset | None = None
        """Up to where the last plan saw messages: news are those behind it."""
        # Since when a batch waits to have `minMessagesPerTrigger`.
        self._waits_since: float | None = None
        self._subscription = subscription_of(options)
        self._followed: dict[str, dict[int, RangePosition | None]] = {}
        """Where the subscription is known to be, and was moved to."""
        self.lag: dict[str, Any] = {"lagBytes": 0, "lagMessages": 0, "lagSeconds": 0.0}

    # --- streams

    async def freeze(self) -> None:
        """Fix the end of the run: from now on plan up to what there is now."""
        topics = await self._watched.names()
        views = await self._watched.look(topics, {})
        self._frozen = {topic: plan.freeze(view) for topic, view in views.items()}

    async def next_offset(self, given: Mapping[str, Any], limits: BatchLimits) -> dict[str, Any]:
        """The end of the batch that begins at `given`; `given` itself if there is none."""
        start = parse_start(given)
        # The first batch. Its start is resolved once and goes into the offset as `base`: Spark asks
        # again after a crash, and `latest` would then be another place.
        if isinstance(start, Sentinel):
            # The subscription comes first, at the first message that there is: what the start is
            # resolved to must not be trimmed before it is held.
            await self._hold(await self._watched.names())
            base = await begin(self._watched, self._options, start.start)
            await self._follow(base)
            end = await _again(lambda: self._planned(base, limits)) or base
            return format_offset(end, base)
        await self._check_topics(start)
        # The first plan of this process: the checkpoint may be older than the subscription, or
        # somebody may have deleted that.
        if not self._followed:
            await self._follow(start)
        # Nothing new: the offset goes back as it came, and Spark runs no batch (invariant 2). Spark
        # plans behind a batch that is committed, and tells `committed` only with the next one: a
        # query that rests would seem to be a batch behind.
        if self._frozen is None and not await self._is_news(start):
            await self._follow(start)
            return dict(given)
        planned = await _again(lambda: self._planned(start, limits))
        # News without work: fewer messages than the wanted minimum, or a new layout that changes
        # nothing here.
        if planned is None:
            await self._follow(start)
            if self._frozen is None:
                await asyncio.sleep(min(_UNPLANNED_PAUSE_S, self._poll_ms / _MS_PER_SECOND))
            return dict(given)
        return format_offset(planned)

    @property
    def _poll_ms(self) -> int:
        return int(self._options["pollWaitMs"])

    async def _check_topics(self, start: Offset) -> None:
        names = await self._watched.names()
        # A pattern may lose topics, which is a loss that `_checked` tells; a name that is not in
        # the options any more means the checkpoint of another query.
        foreign = sorted(start.topics.keys() - set(names))
        if foreign and not self._watched.is_pattern:
            raise WrongCheckpoint(
                f"the checkpoint is of a query that read {foreign[0]}, and this one reads "
                f"{', '.join(names)}"
            )

    async def _is_news(self, start: Offset) -> bool:
        """Wait a moment for something behind what was seen."""
        # While a batch waits for more messages, what it already counted is no news.
        seen = start if self._seen is None or self._waits_since is None else self._seen
        names = await self._watched.names()
        # A topic came or went: planning names it or tells of the loss.
        if set(names) != start.topics.keys():
            return True
        polls = [
            asyncio.create_task(self._poll(topic, place)) for topic, place in seen.topics.items()
        ]
        try:
            # The first topic with news ends the wait; the others must not hold their requests open.
            for poll in asyncio.as_completed(polls):
                if await poll:
                    return True
        finally:
            for each in polls:
                each.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
        # Silence, but a batch that is too small has waited long enough.
        return self._is_patience_over()

    async def _poll(self, topic: str, place: TopicOffset) -> bool:
        # Never planned in this process, as after a restart: look rather than wait.
        if topic not in self._epochs:
            return True
        ranges = await self._watched.ranges(topic)
        # Drained segments have no news; a new layout has, by its epoch.
        positions = {
            number: position for number, position in place.segments.items() if position is not None
        }
        epoch = max(place.epoch, self._epochs.get(topic, 0))
        try:
            return await ranges.news(
                positions, epoch, self._poll_ms, isolation=self._watched.isolation
            )
        # That it is gone is news too; planning says what was lost.
        except TopicNotFound:
            return True

    async def _planned(self, start: Offset, limits: BatchLimits) -> Offset | None:
        """Where a batch from `start` on ends; None: there is nothing to do, or not yet."""
        names = await self._watched.names()
        # Topics that a pattern finds after the freeze are not part of this run.
        if self._frozen is not None:
            names = tuple(name for name in names if name in self._frozen)
        # A topic that a pattern has just found is held before it is looked at.
        await self._hold(name for name in names if name not in start.topics)
        views = await self._watched.look(names, start.topics)
        # The order: what is lost, how far one could go, who is held, and only then limits, which
        # need counts from the brokers.
        places = self._checked(start, views)
        targets = self._targets(start, places, views)
        # A run on `AvailableNow` has to end: it does not wait for more.
        minimum = None if self._frozen is not None else self._options["minMessagesPerTrigger"]
        waiting = hold(places, views, self._frozen)
        paced = await self._pace.ends(
            places, targets, limits, waiting, is_counted=minimum is not None
        )
        self._epochs = {topic: view.layout.epoch for topic, view in views.items()}
        # Too few messages: remember what was counted, so that only more of them are news.
        if minimum is not None and not self._is_enough(paced.total or 0, minimum):
            self._seen = self._after(places, views, targets)
            return None
        # New topics and drained segments are news even where no message is read: the next batch
        # begins with what they name.
        end = self._after(places, views, paced.ends)
        is_news = end.topics.keys() != start.topics.keys() or any(
            plan.is_news(start.topics.get(topic), place) for topic, place in end.topics.items()
        )
        await self._measure(end, views, paced.oldest_ms)
        if is_news:
            self._waits_since = None
        return end if is_news else None

    def _checked(self, start: Offset, views: Mapping[str, TopicView]) -> dict[str, TopicOffset]:
        losses: list[str] = []
        places: dict[str, TopicOffset] = {}
        for topic, view in views.items():
            # A topic that a pattern has just found: all of it is new.
            known = start.topics.get(topic)
            if known is None:
                places[topic] = plan.earliest(view)
                continue
            checked = plan.check(topic, known, view)
            places[topic] = checked.place
            losses += checked.losses
        # Only a pattern gets here without a view: a named topic has raised `TopicNotFound`.
        gone = sorted(start.topics.keys() - views.keys())
        losses += [f"{topic} was deleted before all of it was read" for topic in gone]
        tell(losses, self._options)
        return places

    def _targets(
        self, start: Offset, places: Mapping[str, TopicOffset], views: Mapping[str, TopicView]
    ) -> dict[SegmentShare, RangePosition]:
        """How far each segment may go; a topic that the start does not name is not read yet."""
        return {
            SegmentShare(topic, number): end
            for topic, place in places.items()
            if topic in start.topics and start.topics[topic].creation_id == place.creation_id
            for number, end in plan.targets(
                place, views[topic], self._frozen_of(topic, place)
            ).items()
        }

    def _frozen_of(self, topic: str, place: TopicOffset) -> Frozen | None:
        if self._frozen is None:
            return None
        frozen = self._frozen[topic]
        # Made again since the freeze: nothing of the new topic belongs to this run.
        is_same = frozen.creation_id == place.creation_id
        return frozen if is_same else Frozen(place.creation_id, {}, frozenset())

    def _after(
        self,
        places: Mapping[str, TopicOffset],
        views: Mapping[str, TopicView],
        ends: Mapping[SegmentShare, RangePosition],
    ) -> Offset:
        return Offset(
            {
                topic: plan.after(
                    place,
                    views[topic],
                    {part.number: end for part, end in ends.items() if part.topic == topic},
                    self._frozen_of(topic, place),
                )
                for topic, place in places.items()
            }
        )

    # --- waiting for enough

    def _is_enough(self, total: int, minimum: int) -> bool:
        if total >= minimum:
            return True
        # Patience begins with the first message: an idle topic makes no empty batches.
        if total == 0:
            return False
        if self._waits_since is None:
            self._waits_since = self._clock.monotonic()
        return self._is_patience_over()

    def _is_patience_over(self) -> bool:
        since = self._waits_since
        delay: float = self._options["maxTriggerDelay"]
        return since is not None and self._clock.monotonic() - since >= delay

    # --- lag

    async def _measure(
        self, end: Offset, views: Mapping[str, TopicView], oldest_ms: int | None
    ) -> None:
        """What is left behind a batch; nothing is asked if that is nothing."""
        # A segment that is not named yet is all lag, from its first message on.
        spans = {}
        for topic, place in end.topics.items():
            for number, state in views[topic].states.items():
                at = place.segments.get(number, state.first)
                if at is not None and at < state.stable:
                    spans[SegmentShare(topic, number)] = (at, state.stable)
        counts = (await self._pace.counts(spans)).values()
        age_ms = 0 if not spans or oldest_ms is None else self._clock.now_ms() - oldest_ms
        self.lag = {
            "lagBytes": sum(each.bytes for each in counts),
            "lagMessages": sum(each.messages for each in counts),
            "lagSeconds": max(0, age_ms) / _MS_PER_SECOND,
        }

    # --- tasks

    async def stream_tasks(
        self, start: Mapping[str, Any], end: Mapping[str, Any]
    ) -> list[tuple[ReadTask, ...]]:
        """The tasks of a batch, from its offsets alone; one may have the ranges of several."""
        # After a crash Spark hands the sentinel out again as the start of the first batch; what it
        # was resolved to is in the batch's end (`offsets`, invariant 3).
        begun = parse_start(start)
        first = base_of(end) if isinstance(begun, Sentinel) else begun

        async def tasks() -> list[tuple[ReadTask, ...]]:
            return await self._tasks.gathered(await self._tasks.between(first, parse_offset(end)))

        return await _again(tasks)

    # --- the subscription that follows

    async def committed(self, end: Mapping[str, Any]) -> None:
        """Move the subscription to `end`: everything up to there was processed."""
        await self._follow(parse_offset(end))

    async def _hold(self, topics: Iterable[str]) -> None:
        """Make the subscription where this process has not seen it, and leave it where it is."""
        subscription = self._subscription
        if subscription is None:
            return
        for topic in topics:
            if topic in self._followed:
                continue
            try:
                ranges = await self._watched.ranges(topic)
                numbers = [each.number for each in (await ranges.layout()).segments]
            # A pattern goes on without it; a topic that is named is told of by the look at it.
            except TopicNotFound:
                continue
            await self._move(ranges, subscription, dict.fromkeys(numbers, ORIGIN), ())
            self._followed[topic] = {}

    async def _follow(self, offset: Offset) -> None:
        subscription = self._subscription
        # The checkpoint is the truth; a subscription is only there for backlog and retention.
        if subscription is None:
            return
        for topic, place in offset.topics.items():
            # Segments where nothing changed since the last commit cost no request.
            known = self._followed.get(topic, {})
            new = {n: at for n, at in place.segments.items() if n not in known or known[n] != at}
            if not new:
                continue
            try:
                ranges = await self._watched.ranges(topic)
                is_same = (await ranges.layout()).creation_id == place.creation_id
            # A loss is told by the next plan, not by a commit of what was read.
            except TopicNotFound:
                continue
            if not is_same:
                continue  # its subscriptions went with it
            begun = {number: at for number, at in new.items() if at is not None}
            drained = [number for number, at in new.items() if at is None]
            await self._move(ranges, subscription, begun, drained)
            # After the move, so that one that failed is made again with the next commit.
            self._followed[topic] = dict(place.segments)

    async def _move(
        self,
        ranges: Ranges,
        subscription: str,
        positions: Mapping[int, RangePosition],
        drained: Iterable[int],
    ) -> None:
        initial = self._options["subscriptionInitialPosition"]
        try:
            await ranges.move_cursor(subscription, positions, drained=drained, initial=initial)
        # The namespace forbids subscriptions that nobody created: the user may not know of ours.
        except SubscriptionNotFound as error:
            raise SubscriptionNotFound(
                f"nothing keeps what the query has not read: {error.args[0]}",
                hint="create it (magnetar subscriptions create), or set the option subscription to "
                "none",
            ) from error


async def _again(plan_it: Callable[[], Awaitable[R]]) -> R:
    """Plan anew if a segment goes away in the middle: the next look at the layout tells why."""
    # A segment may be deleted between the layout and a question about it. A new look finds out; if
    # segments go away again and again, the error is told.
    for _ in range(_PLANS_MAX - 1):
        try:
            return await plan_it()
        except RangeLost:
            continue
    return await plan_it()
