"""A stream consumer: messages in the order of their keys, acknowledged up to one.

Owns: `StreamConsumer`, a member of a group that shares the segments of a scalable topic.

Invariants:
1. It consumes what the controller assigns to it. A segment that it loses is kept until everything
   that was handed out of it is acknowledged: only then may the next member have it.
2. A cumulative acknowledgement covers what had been handed out when its message was, in every
   segment, and nothing that still waited for the application. Only segments that advanced send one.
3. A segment that was there at first begins at `initial_position`, a later one at its beginning.
4. While the subscription is moved, nothing is handed out of what is moved, nor of what comes after
   it. All segments are this member's to move, or none is moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.connection.pool import Connections
from magnetar.client.consume.all_segments import marked
from magnetar.client.consume.receiving import Receiving, feed_of, not_consumed
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.ack_state import SegmentMark
from magnetar.client.consume.segment.acknowledged import Acknowledged, abandoned
from magnetar.client.consume.segment.queue_segment import SharedStreamSegment
from magnetar.client.consume.segment.seeking import SeekTarget, one_message, seek_fields
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segment.stream_segment import StreamSegment
from magnetar.client.consume.segment_seek import SegmentSeek
from magnetar.client.consume.segments import SegmentKey
from magnetar.client.layout.assignment import AssignmentSession
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.message.layouts import ancestors, held_back
from magnetar.client.message.message import AnyMessageId, Message, MessageId
from magnetar.client.schema.info import Schema
from magnetar.errors import (
    AlreadyClosed,
    ConsumerNotFound,
    InvalidValue,
    MagnetarError,
    NotAllowed,
)
from magnetar.model.ids import LATEST, SCALABLE_LATEST, ScalableMessageId, SegmentPosition
from magnetar.model.names import Domain, TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.runtime.logs import logger
from magnetar.wire.pb import pulsar_pb2 as pb

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

PARENTS_FIRST_S: Final = 5.0
"""After a seek the controller has this long to give out parents before their children."""

_LOG: Final = logger(__name__)
_SEGMENT_SCHEME: Final = f"{Domain.SEGMENT.value}://"


class StreamConsumer(Receiving[T]):
    """Gets the messages of each key in order.

    async with await client.stream_consumer("topic://public/default/orders", "billing") as consumer:
        async for message in consumer:
            apply(message.value)
            consumer.ack_cumulative(message)
    """

    def __init__(
        self,
        connections: Connections,
        topic: TopicName,
        *,
        subscription: str,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
    ) -> None:
        super().__init__(connections, schema, settings, name)
        self._topic = topic
        self._subscription = subscription
        self._watch = LayoutWatch(connections, topic)
        self._session = AssignmentSession(
            connections,
            self._watch,
            subscription=subscription,
            consumer_name=name,
            kind=pb.STREAM,
        )
        self._first: frozenset[int] = frozenset()
        self._away: frozenset[int] = frozenset()
        """Segments that are not consumed while the subscription is moved."""

    @property
    def topic(self) -> str:
        return str(self._topic)

    @property
    def subscription(self) -> str:
        return self._subscription

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are this member's now."""
        return tuple(sorted(segment_id for _, segment_id in self._feeds.present))

    # --- acknowledging

    def ack_cumulative(
        self, message: Message[Any] | ScalableMessageId, *, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge everything that was received up to a message, in all segments.

            consumer.ack_cumulative(message)            # soon
            await consumer.ack_cumulative(message)      # the broker has it for good

        In a transaction that is aborted, what is not acknowledged is delivered again.
        """
        self._check_open()
        if isinstance(message, ScalableMessageId):
            return self._ack_positions(message, txn)
        feed = feed_of(message)
        if feed.home is not self or not message.turn:
            raise InvalidValue(f"{message!r} was not received by this consumer")
        if txn is not None:
            feed.refuse_stale(message)
        if feed.has_ended:
            return abandoned(_not_here(feed))
        feed.acknowledging(message, is_cumulative=True)
        acked = []
        for each in list(self._feeds.present.values()):
            assert isinstance(each, StreamSegment | SharedStreamSegment), "nothing else is made"
            acked.append(each.ack_turns(message.turn, txn))
        return Acknowledged.all_of(acked)

    def ack_arrow(
        self, batch: pa.RecordBatch, *, txn: AckTransaction | None = None
    ) -> Acknowledged:
        """Acknowledge, in each segment, everything up to its last row in a record batch.

        batch = await consumer.receive_arrow(timeout=1.0)
        await consumer.ack_arrow(batch)
        """
        self._check_open()
        feeds = self._feeds_by_topic()
        acked = []
        last: dict[int | None, tuple[StreamSegment, SegmentMark]] = {}
        for entry in arrow.entries_in(batch):
            feed = feeds.get((entry.topic, entry.segment_id))
            place = (entry.position, entry.mask, entry.batch_size)
            if isinstance(feed, StreamSegment):
                mark = SegmentMark(entry.position, entry.last_index, entry.batch_size)
                known = last.get(entry.segment_id)
                if known is None or known[1].place < mark.place:
                    last[entry.segment_id] = (feed, mark)
            elif isinstance(feed, SharedStreamSegment):
                acked.append(
                    feed.ack_rows(*place) if txn is None else feed.ack_rows_in(txn, *place)
                )
            else:
                acked.append(abandoned(not_consumed(entry.topic)))
        for each, mark in last.values():
            acked.append(each.ack_through(mark) if txn is None else each.ack_through_in(txn, mark))
        return Acknowledged.all_of(acked)

    def _ack_positions(
        self, message_id: ScalableMessageId, txn: AckTransaction | None
    ) -> Acknowledged:
        """Up to where an id that was stored says that each segment had been received."""
        places = {message_id.segment_id: message_id.message_id, **dict(message_id.positions)}
        acked = []
        for segment_id, raw in places.items():
            feed = self._feeds.present.get((self.topic, segment_id))
            if feed is not None and segment_id == message_id.segment_id:
                feed.acknowledging(message_id, is_cumulative=True)
            if isinstance(feed, StreamSegment):
                mark = SegmentMark(raw.position, raw.batch_index, raw.batch_size)
                acked.append(
                    feed.ack_through(mark) if txn is None else feed.ack_through_in(txn, mark)
                )
            elif isinstance(feed, SharedStreamSegment) and txn is None:
                acked.append(feed.ack_through(raw))
            elif segment_id == message_id.segment_id:
                raise AlreadyClosed(
                    f"segment {segment_id} cannot be acknowledged here by a stored id",
                    hint="it is another member's, or shared with others",
                )
        return Acknowledged.all_of(acked)

    def id_of(self, feed: SegmentConsumer, message_id: MessageId, turn: int) -> AnyMessageId:
        positions = []
        for (_, segment_id), each in sorted(self._feeds.present.items()):
            if isinstance(each, StreamSegment | SharedStreamSegment):
                last = message_id if each is feed else each.last_handed(turn)
                if last is not None:
                    positions.append(SegmentPosition(segment_id, last))
        assert feed.spec.segment_id is not None, "a member has segments only"
        return ScalableMessageId(
            feed.spec.segment_id, message_id, tuple(positions), parent_topic=self.topic
        )

    # --- moving

    async def seek(self, target: SeekTarget) -> None:
        """Move the subscription: to a message, which is the next one, or to a time.

            await consumer.seek(EARLIEST)
            await consumer.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970. A message moves its own segment and no
        other; a time, the earliest or the latest message moves all, those too that were finished:
        each key comes in order again. Receive nothing meanwhile: what was received before cannot be
        acknowledged any more. Raises `NotAllowed` if another member of the group has a segment.
        """
        self._check_open()
        layout = self._watch.layout
        assert layout is not None, "it is open"
        message = one_message(target)
        if message is None:
            moved = set(layout.segments)
        elif isinstance(message, ScalableMessageId) and message.segment_id in layout.segments:
            moved = {message.segment_id}
        else:
            raise ConsumerNotFound(f"{message} is of no segment of {self.topic}")
        if self._away:
            raise NotAllowed("it is being moved already")
        # What comes after them must not be handed out before the controller knows.
        self._away = frozenset(
            each for each in layout.segments if each in moved or moved & ancestors(layout, each)
        )
        try:
            await self._release_away()
            await self._move(layout, moved, seek_fields(target))
            if target not in (LATEST, SCALABLE_LATEST):
                await self._until_parents_first(layout, moved)
        finally:
            self._away = frozenset()
            self._feeds.stirred.advance()

    async def _release_away(self) -> None:
        for (_, segment_id), feed in list(self._feeds.present.items()):
            if segment_id in self._away:
                feed.release(wait=False)
                while not feed.has_ended:
                    await feed.ends.past(feed.ends.version)

    async def _move(self, layout: SegmentLayout, moved: Set[int], fields: dict[str, Any]) -> None:
        seeks = [
            SegmentSeek(
                self._connections,
                self._watch.topic_of(layout.segments[segment_id]),
                self._subscription,
                f"{self._name}-seg-{segment_id}",
            )
            for segment_id in sorted(moved)
        ]
        try:
            for each in seeks:  # all of them or none
                await each.occupy()
            for each in seeks:
                await each.seek(fields)
        finally:
            for each in seeks:
                each.leave()

    async def _until_parents_first(self, layout: SegmentLayout, moved: Set[int]) -> None:
        """Until what comes after sealed segments that were moved is not this member's any more.

        Nobody tells if something is left in these; then the wait ends after `PARENTS_FIRST_S`.
        """
        waiting = {each for each in moved if not layout.segments[each].is_active}
        changes = self._session.changes
        try:
            async with asyncio.timeout(PARENTS_FIRST_S):
                while any(waiting & ancestors(layout, each) for each in self._assigned()):
                    await changes.past(changes.version)
        except TimeoutError:
            _LOG.info("parents-not-first", consumer=self._name, topic=self.topic)

    def _assigned(self) -> list[int]:
        assignment = self._session.assignment
        assert assignment is not None, "it is open"
        return [each.segment_id for each in assignment.segments]

    # --- its parts

    @property
    def waits_for_others(self) -> bool:
        return True

    async def _open(self) -> None:
        await self._watch.start()
        layout = await self._watch.first()
        self._first = frozenset(layout.segments)
        await self._session.start()
        await self._session.first()
        self._feeds.follow(self._session.changes, "assignments")
        self._feeds.follow(self._watch.changes, "layouts")

    async def _close_sources(self) -> None:
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._watch.stop)
            parts.push_async_callback(self._session.stop)
            try:
                await self._session.leave()
            except MagnetarError as error:
                _LOG.info("member-not-left", member=self._name, reason=str(error))

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        assignment = self._session.assignment
        assert assignment is not None, "it is open"
        found = {(self.topic, each.segment_id): self._spec(each) for each in assignment.segments}
        self._gone &= found.keys()
        waiting = self._held_back({segment_id for _, segment_id in found})
        return {
            key: spec
            for key, spec in found.items()
            if key not in self._gone
            and key[1] not in self._away
            and (key[1] not in waiting or key in self._feeds.present)
        }

    def _held_back(self, assigned: set[int]) -> set[int]:
        """Segments that are read after others of this member."""
        layout = self._watch.layout
        assert layout is not None, "it is open"
        finished = {segment_id for _, segment_id in self._gone}
        for (_, segment_id), feed in self._feeds.present.items():
            if feed.reached_end:
                finished.add(segment_id)
        return held_back(layout, assigned, finished)

    def _spec(self, assigned: pb.ScalableAssignedSegment) -> SegmentSpec:
        fields: dict[str, Any] = {"subType": int(SubscriptionType.EXCLUSIVE)}
        if assigned.bucket_ranges:
            ranges = [{"start": each.start, "end": each.end} for each in assigned.bucket_ranges]
            fields["subType"] = int(SubscriptionType.KEY_SHARED)
            fields["keySharedMeta"] = {
                "keySharedMode": pb.STICKY,
                "hashRanges": ranges,
                "entryBucketDispatch": True,
            }
        if not assigned.segment_topic.startswith(_SEGMENT_SCHEME):
            fields["metadata"] = marked(self._settings.properties)
        if assigned.segment_id not in self._first:
            fields["initialPosition"] = int(InitialPosition.EARLIEST)
        return SegmentSpec(
            wire_topic=assigned.segment_topic,
            topic=self.topic,
            subscription=self._subscription,
            consumer_name=f"{self._name}-seg-{assigned.segment_id}",
            fields=fields,
            segment_id=assigned.segment_id,
        )

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        if "keySharedMeta" in spec.fields:
            return SharedStreamSegment(self, spec)
        return StreamSegment(self, spec)


def _not_here(feed: SegmentConsumer) -> MagnetarError:
    return AlreadyClosed(
        f"segment {feed.spec.segment_id} is not consumed here any more",
        hint="its messages that were not acknowledged go to another member",
    )
