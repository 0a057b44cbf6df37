"""Thin consumers of scalable topics: they follow layouts and assignments, and hide no failure.

Owns: `QueueConsumer`, `StreamConsumer` and `CheckpointConsumer` (with or without a group), and
`AssignmentSession`, a member's place at the controller. The producer is in `scalable_producer`,
connections and the layout watch are in `scalable_links`.

Invariants:
1. A queue consumer is subscribed to every segment of the layout, sealed ones too.
2. A stream consumer is subscribed to what it is assigned. A segment that it loses, or that becomes
   shared, is given up only once everything of it that was handed out is acknowledged.
3. A cumulative acknowledgement covers what had been handed out when its message was: never what
   still waited for the application.
4. A checkpoint consumer without a group opens a segment only when all its parents were read to
   their end. A checkpoint names what the application has, and every segment that began later than
   at its earliest message.

Relies on: `record` being told everything in the step in which it happens.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from harness.simulation.scalable.feeds import Delivery, Inbox, Mark, ReaderFeed, SegmentFeed
from harness.simulation.scalable.history import Checkpointed, Kind, Restored, Subscribed
from harness.simulation.scalable.links import (
    CLIENT_ERRORS,
    OWNED_REQUESTS,
    DagWatch,
    Line,
    Links,
    Pauses,
    Record,
    unrecorded,
)
from magnetar.errors import DeadlineExceeded
from magnetar.model.ids import (
    EARLIEST,
    LATEST,
    Checkpoint,
    CheckpointKind,
    MessageId,
    SegmentPosition,
)
from magnetar.model.segments import SegmentLayout
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Command, Received
from magnetar.wire.pb import pulsar_pb2 as pb

FROM_EARLIEST: Final = Checkpoint(CheckpointKind.EARLIEST).to_bytes()
FROM_LATEST: Final = Checkpoint(CheckpointKind.LATEST).to_bytes()

_STOP_S: Final = 60.0


class _Consumer(Service):
    """Feeds of segments, kept in step with what the consumer should have."""

    def __init__(
        self, links: Links, topic: str, subscription: str, name: str, record: Record
    ) -> None:
        super().__init__(f"consumer {name} of {subscription}", stop_seconds=_STOP_S)
        self.consumer_name = name
        self.feeds: dict[int, SegmentFeed] = {}
        self._links = links
        self._topic = topic
        self._subscription = subscription
        self._record = record
        self._receive_queue = Inbox()
        self._stirred = Signal()
        """Advances when the feeds may have to change."""
        self._reconciled = Signal()
        """Advances when they were looked through because of that."""

    async def receive(self, timeout_s: float | None = None) -> Delivery:
        """The next message; the application has it from now on."""
        return await self._receive_queue.take(
            self._links.wait_s if timeout_s is None else timeout_s
        )

    @abstractmethod
    def _reconcile(self) -> None:
        """Open the feeds that are wanted, and release the others."""

    async def _keep_in_step(self) -> None:
        version = -1
        while True:
            version = await self._stirred.past(version)
            self._reconcile()
            self._reconciled.advance()

    async def _forward(self, changes: Signal) -> None:
        version = changes.version
        while True:
            version = await changes.past(version)
            self._stirred.advance()

    def _add(self, feed: SegmentFeed) -> None:
        self.feeds[feed.segment_id] = feed
        self.spawn(self._run(feed), f"segment {feed.segment_id}")
        self.spawn(self._notice(feed), f"news of segment {feed.segment_id}")

    async def _run(self, feed: SegmentFeed) -> None:
        await feed.run()
        if self.feeds.get(feed.segment_id) is feed:
            del self.feeds[feed.segment_id]
        self._left(feed)
        self._stirred.advance()

    async def _notice(self, feed: SegmentFeed) -> None:
        """Look again once it has reached its end."""
        while not feed.reached_end and not feed.ended:
            await feed.news.past(feed.news.version)
        self._stirred.advance()

    def _left(self, feed: SegmentFeed) -> None:
        """A feed is over."""

    async def _until_subscribed(self, wanted: frozenset[int]) -> None:
        """Until these segments are subscribed to, or were."""
        for segment_id in sorted(wanted):
            while segment_id not in self.feeds:
                await self._reconciled.past(self._reconciled.version)
            feed = self.feeds[segment_id]
            while not feed.subscribed and not feed.ended:
                await feed.news.past(feed.news.version)

    async def _release_all(self) -> None:
        feeds = list(self.feeds.values())
        for feed in feeds:
            feed.release()
        for feed in feeds:
            while not feed.ended:
                await feed.news.past(feed.news.version)


class QueueConsumer(_Consumer):
    """Shared on every segment; each message is acknowledged on its own."""

    def __init__(
        self,
        links: Links,
        topic: str,
        subscription: str,
        name: str,
        *,
        earliest: bool = True,
        record: Record = unrecorded,
    ) -> None:
        super().__init__(links, topic, subscription, name, record)
        self._earliest = earliest
        self._watch = DagWatch(links, topic, f"of {name}", record=record)

    async def _start(self) -> None:
        await self._watch.start()
        layout = await self._watch.first()
        self.spawn(self._forward(self._watch.changes), "layouts")
        self._stirred.advance()
        self.spawn(self._keep_in_step(), "reconcile")
        if not self._earliest:
            await _within(self._links.wait_s, self._until_subscribed(frozenset(layout.segments)))
        self._record(Subscribed(self._subscription, Kind.QUEUE, self._earliest))

    async def _stop(self) -> None:
        await self._watch.stop()
        await self._release_all()

    def ack(self, delivery: Delivery) -> None:
        delivery.feed.ack(delivery.generation, delivery.position)

    def _reconcile(self) -> None:
        layout = self._watch.layout
        assert layout is not None
        for segment_id, feed in self.feeds.items():
            if segment_id not in layout.segments:
                feed.release()
        if self.stopping:
            return
        for segment_id, segment in layout.segments.items():
            if segment_id not in self.feeds:
                self._add(
                    SegmentFeed(
                        self._links,
                        self._receive_queue,
                        segment_id=segment_id,
                        topic=self._watch.topic_of(segment),
                        subscription=self._subscription,
                        consumer=self.consumer_name,
                        options={
                            "subType": pb.CommandSubscribe.Shared,
                            "initialPosition": _initial(self._earliest),
                        },
                        cumulative=False,
                        record=self._record,
                    )
                )


class StreamConsumer(_Consumer):
    """What the controller assigns, in order, with cumulative acknowledgements."""

    def __init__(
        self,
        links: Links,
        topic: str,
        subscription: str,
        name: str,
        *,
        earliest: bool = True,
        record: Record = unrecorded,
    ) -> None:
        super().__init__(links, topic, subscription, name, record)
        self.session = AssignmentSession(links, topic, subscription, name, pb.STREAM)
        self._earliest = earliest
        self._marks: dict[int, Mark] = {}

    async def _start(self) -> None:
        await self.session.start()
        assignment = await self.session.first()
        self.spawn(self._forward(self.session.changes), "assignments")
        self._stirred.advance()
        self.spawn(self._keep_in_step(), "reconcile")
        if not self._earliest:
            wanted = frozenset(each.segment_id for each in assignment.segments)
            await _within(self._links.wait_s, self._until_subscribed(wanted))
        self._record(Subscribed(self._subscription, Kind.STREAM, self._earliest))

    async def _stop(self) -> None:
        await self._release_all()
        await self.session.leave()
        await self.session.stop()

    async def receive(self, timeout_s: float | None = None) -> Delivery:
        delivery = await super().receive(timeout_s)
        feed = delivery.feed
        self._marks[feed.segment_id] = Mark(feed, delivery.generation, delivery.position)
        delivery.marks = tuple(self._marks.values())
        return delivery

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge everything that was handed out up to this message, in every segment."""
        for mark in delivery.marks:
            mark.feed.ack_through(mark.generation, mark.position)

    def _left(self, feed: SegmentFeed) -> None:
        mark = self._marks.get(feed.segment_id)
        if mark is not None and mark.feed is feed:
            del self._marks[feed.segment_id]

    def _reconcile(self) -> None:
        assignment = self.session.assignment
        assert assignment is not None
        wanted = {each.segment_id: each for each in assignment.segments}
        options = {number: self._options(each) for number, each in wanted.items()}
        for segment_id, feed in self.feeds.items():
            if segment_id not in wanted or feed.options != options[segment_id]:
                feed.release()
        if self.stopping:
            return
        for segment_id, each in wanted.items():
            if segment_id not in self.feeds:
                self._add(
                    SegmentFeed(
                        self._links,
                        self._receive_queue,
                        segment_id=segment_id,
                        topic=each.segment_topic,
                        subscription=self._subscription,
                        consumer=self.consumer_name,
                        options=options[segment_id],
                        cumulative=not each.bucket_ranges,
                        record=self._record,
                    )
                )

    def _options(self, assigned: pb.ScalableAssignedSegment) -> Mapping[str, object]:
        initial = {"initialPosition": _initial(self._earliest)}
        if not assigned.bucket_ranges:
            return {"subType": pb.CommandSubscribe.Exclusive, **initial}
        ranges = [{"start": each.start, "end": each.end} for each in assigned.bucket_ranges]
        shared = {
            "keySharedMode": pb.STICKY,
            "hashRanges": ranges,
            "entryBucketDispatch": True,
        }
        return {"subType": pb.CommandSubscribe.Key_Shared, "keySharedMeta": shared, **initial}


class CheckpointConsumer(_Consumer):
    """Reads from a checkpoint; with `group`, the segments that the controller assigns it."""

    def __init__(
        self,
        links: Links,
        topic: str,
        name: str,
        *,
        start: bytes = FROM_EARLIEST,
        group: str | None = None,
        record: Record = unrecorded,
    ) -> None:
        super().__init__(links, topic, group or name, name, record)
        self._start_at = start
        begin = Checkpoint.from_bytes(start)
        self._at_latest = begin.kind is CheckpointKind.LATEST
        self._positions = dict(begin.positions)
        """Where segments that are not open now were left."""
        self._finished: set[int] = set()
        self._first: frozenset[int] = frozenset()
        self._watch = DagWatch(links, topic, f"of {name}", record=record)
        self._session = (
            AssignmentSession(links, topic, group, name, pb.CHECKPOINT) if group else None
        )

    async def _start(self) -> None:
        await self._watch.start()
        layout = await self._watch.first()
        self._first = frozenset(layout.segments)
        self.spawn(self._forward(self._watch.changes), "layouts")
        wanted = self._first
        if self._session is not None:
            await self._session.start()
            assignment = await self._session.first()
            wanted = frozenset(each.segment_id for each in assignment.segments)
            self.spawn(self._forward(self._session.changes), "assignments")
        self._stirred.advance()
        self.spawn(self._keep_in_step(), "reconcile")
        if self._at_latest:
            await _within(self._links.wait_s, self._until_placed(wanted))
        self._record(Subscribed(self._subscription, Kind.CHECKPOINT, not self._at_latest))
        self._record(Restored(self._subscription, self.consumer_name, self._start_at))

    async def _stop(self) -> None:
        await self._release_all()
        await self._watch.stop()
        if self._session is not None:
            await self._session.leave()
            await self._session.stop()

    def checkpoint(self) -> bytes:
        """Where the application is: a consumer that starts there gets exactly the rest."""
        positions = dict(self._positions)
        for segment_id, feed in self.feeds.items():
            assert isinstance(feed, ReaderFeed)
            positions[segment_id] = feed.position
        named = tuple(
            SegmentPosition(segment_id, position)
            for segment_id, position in sorted(positions.items())
            if position != EARLIEST
        )
        data = Checkpoint(CheckpointKind.REGULAR, named).to_bytes()
        self._record(Checkpointed(self._subscription, self.consumer_name, data))
        return data

    async def _until_placed(self, wanted: frozenset[int]) -> None:
        """Until the end of every segment that there was has a place that a checkpoint can name."""
        while not wanted <= (self._finished | set(self.feeds)):
            await self._reconciled.past(self._reconciled.version)
        await self._until_subscribed(wanted & set(self.feeds))

    def _reconcile(self) -> None:
        layout = self._watch.layout
        assert layout is not None
        topics = self._wanted(layout)
        for segment_id, feed in self.feeds.items():
            if segment_id not in topics:
                feed.release()
        for segment_id in [each for each in self._positions if each not in topics]:
            # Without a group a position is forgotten with its segment, in a group with its owner.
            if self._session is not None or segment_id not in layout.segments:
                del self._positions[segment_id]
        if self.stopping:
            return
        for segment_id, topic in topics.items():
            if segment_id not in self.feeds and segment_id not in self._finished:
                self._add(self._reader(segment_id, topic))

    def _wanted(self, layout: SegmentLayout) -> dict[int, str]:
        """The topics of the segments that may be open now."""
        for segment_id, feed in self.feeds.items():
            if feed.reached_end:
                self._finished.add(segment_id)
        if self._session is not None:
            assert self._session.assignment is not None
            return {
                each.segment_id: each.segment_topic for each in self._session.assignment.segments
            }
        return {
            segment_id: self._watch.topic_of(segment)
            for segment_id, segment in layout.segments.items()
            if all(
                parent in self._finished or parent not in layout.segments
                for parent in segment.parent_ids
            )
        }

    def _reader(self, segment_id: int, topic: str) -> ReaderFeed:
        return ReaderFeed(
            self._links,
            self._receive_queue,
            segment_id=segment_id,
            topic=topic,
            subscription=self._subscription,
            consumer=self.consumer_name,
            start=self._start_of(segment_id),
            record=self._record,
        )

    def _start_of(self, segment_id: int) -> MessageId:
        """Segments that came later are read from their beginning."""
        at_latest = self._at_latest and segment_id in self._first
        return self._positions.get(segment_id, LATEST if at_latest else EARLIEST)

    def _left(self, feed: SegmentFeed) -> None:
        assert isinstance(feed, ReaderFeed)
        if self._session is not None and feed.releasing:
            # It has another owner now; should it come back, it is read from its beginning.
            self._finished.discard(feed.segment_id)
            return
        self._positions[feed.segment_id] = feed.position
        if feed.reached_end:
            self._finished.add(feed.segment_id)


# --- the controller


class AssignmentSession(Service):
    """A member of a group: commands 73, 74, 75 and 82, over lost connections."""

    def __init__(
        self,
        links: Links,
        topic: str,
        subscription: str,
        name: str,
        kind: pb.ScalableConsumerType,
    ) -> None:
        super().__init__(f"member {name} of {subscription}", stop_seconds=_STOP_S)
        self.assignment: pb.ScalableConsumerAssignment | None = None
        self.changes = Signal()
        """Advances with every assignment that is not older than the last."""
        self._links = links
        self._topic = topic
        self._subscription = subscription
        self._member = name
        self._kind = kind
        self._open: tuple[Line, int] | None = None
        self._connection = Signal()

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")

    async def first(self) -> pb.ScalableConsumerAssignment:
        await _within(self._links.wait_s, self.changes.past(0))
        assert self.assignment is not None
        return self.assignment

    async def leave(self) -> None:
        """Give the place up at once; without a connection the broker does after a while."""
        if self._open is not None:
            line, number = self._open
            await line.request(
                "SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=number, timeout_s=self._links.wait_s
            )

    async def _follow(self) -> None:
        pauses = Pauses()
        while True:
            known = self.changes.version
            try:
                await self._serve()
            except CLIENT_ERRORS:
                # Refused, lost or late: segments are consumed meanwhile, and `first` has a limit.
                if self.changes.version > known:
                    pauses.reset()
            await pauses.wait()

    async def _serve(self) -> None:
        """On one connection, until it is lost: raises why."""
        async with DagWatch(self._links, self._topic, f"of member {self._member}") as watch:
            await watch.first()
            url = watch.controller_url
        line = await self._links.line(url)
        number = line.register("consumer_id", self)
        request = line.register("request_id", self)
        self._connection = Signal()
        try:
            await line.request(
                "SCALABLE_TOPIC_SUBSCRIBE",
                request_id=OWNED_REQUESTS + request,
                topic=self._topic,
                subscription=self._subscription,
                consumer_name=self._member,
                consumer_id=number,
                consumer_type=self._kind,
                timeout_s=self._links.wait_s,
            )
            self._open = (line, number)
            await self._connection.past(self._connection.version)
        finally:
            self._open = None
            line.unregister("consumer_id", number)
            line.unregister("request_id", request)

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if body.HasField("assignment"):
            before = self.assignment
            if before is None or body.assignment.layout_epoch >= before.layout_epoch:
                self.assignment = body.assignment
                self.changes.advance()

    def lost(self, error: Exception) -> None:
        self._connection.close(error)


def _initial(earliest: bool) -> pb.CommandSubscribe.InitialPosition:
    return pb.CommandSubscribe.Earliest if earliest else pb.CommandSubscribe.Latest


async def _within(timeout_s: float, awaited: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await awaited
    except TimeoutError as error:
        raise DeadlineExceeded(f"not ready within {timeout_s} s") from error
