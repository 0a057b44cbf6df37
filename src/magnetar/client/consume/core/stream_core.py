"""The inside of a stream consumer: assigned segments, cumulative acknowledgements, and moving.

Owns: `StreamCore`, a member of a group that shares the segments of a scalable topic.
`StreamConsumer`, which applications have, stands on it.

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
from magnetar.client.consume.core.all_segments import marked
from magnetar.client.consume.core.consumer_core import ConsumerCore, not_consumed, source_of
from magnetar.client.consume.core.segment_seek import SegmentSeek
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.ack_state import SegmentMark
from magnetar.client.consume.segment.acknowledged import Acknowledged, abandoned
from magnetar.client.consume.segment.queue_segment import SharedStreamSegment
from magnetar.client.consume.segment.seeking import SeekTarget, one_message, seek_fields
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segment.stream_segment import StreamSegment
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


class StreamCore(ConsumerCore[T]):
    """One member of a group, over the segments that are its own."""

    waits_for_others = True

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
        self.topic = str(topic)
        self.subscription = subscription
        self._watch = LayoutWatch(connections, topic)
        # Which segments are this member's, as the controller says over the session.
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
    def segment_ids(self) -> tuple[int, ...]:
        """The segments that are this member's now."""
        return tuple(sorted(segment_id for _, segment_id in self._segments.present))

    # --- acknowledging

    def ack_cumulative(
        self, message: Message[Any] | ScalableMessageId, txn: AckTransaction | None
    ) -> Acknowledged:
        """Acknowledge everything that was received up to a message, in all segments."""
        self.check_open()
        if isinstance(message, ScalableMessageId):
            return self._ack_positions(message, txn)
        segment = source_of(message)
        # Without a turn it was never handed out: an id of one would say more than is known.
        if segment.parent is not self or not message._turn:
            raise InvalidValue(f"{message!r} was not received by this consumer")
        if txn is not None:
            segment.refuse_stale(message)
        # Its segment went to another member meanwhile, which gets the message again.
        if segment.has_ended:
            return abandoned(_not_here(segment))
        segment.acknowledging(message, is_cumulative=True)
        acked = []
        # Invariant 2: each segment up to what had been handed out when this message was.
        for each in list(self._segments.present.values()):
            assert isinstance(each, StreamSegment | SharedStreamSegment), "nothing else is made"
            acked.append(each.ack_turns(message._turn, txn))
        return Acknowledged.all_of(acked)

    def ack_rows(self, batch: pa.RecordBatch, txn: AckTransaction | None) -> Acknowledged:
        """Acknowledge, in each segment, everything up to its last row in a record batch."""
        self.check_open()
        segments = self._by_topic()
        acked = []
        last: dict[int | None, tuple[StreamSegment, SegmentMark]] = {}
        for entry in arrow.entries_in(batch):
            segment = segments.get((entry.topic, entry.segment_id))
            place = (entry.position, entry.mask, entry.batch_size)
            # One that this member has alone: all up to the last row, with one acknowledgement.
            if isinstance(segment, StreamSegment):
                mark = SegmentMark(entry.position, entry.last_index, entry.batch_size)
                known = last.get(entry.segment_id)
                if known is None or known[1].place < mark.place:
                    last[entry.segment_id] = (segment, mark)
            # One that others share by entry buckets: exactly these rows.
            elif isinstance(segment, SharedStreamSegment):
                acked.append(
                    segment.ack_rows(*place) if txn is None else segment.ack_rows_in(txn, *place)
                )
            else:
                acked.append(abandoned(not_consumed(entry.topic)))
        for each, mark in last.values():
            acked.append(each.ack_through(mark) if txn is None else each.ack_through_in(txn, mark))
        return Acknowledged.all_of(acked)

    def _ack_positions(
        self, message_id: ScalableMessageId, txn: AckTransaction | None
    ) -> Acknowledged:
        """Acknowledge up to where a stored id says that each segment had been received."""
        places = {message_id.segment_id: message_id.message_id, **dict(message_id.positions)}
        acked = []
        for segment_id, raw in places.items():
            segment = self._segments.present.get((self.topic, segment_id))
            if segment is not None and segment_id == message_id.segment_id:
                segment.acknowledging(message_id, is_cumulative=True)
            if isinstance(segment, StreamSegment):
                mark = SegmentMark(raw.position, raw.batch_index, raw.batch_size)
                acked.append(
                    segment.ack_through(mark) if txn is None else segment.ack_through_in(txn, mark)
                )
            elif isinstance(segment, SharedStreamSegment) and txn is None:
                acked.append(segment.ack_through(raw))
            # Another segment that is not here now is its next owner's business; that of the message
            # itself is what was asked for.
            elif segment_id == message_id.segment_id:
                raise AlreadyClosed(
                    f"segment {segment_id} cannot be acknowledged here by a stored id",
                    hint="it is another member's, or shared with others",
                )
        return Acknowledged.all_of(acked)

    def id_of(self, segment: SegmentConsumer, message_id: MessageId, turn: int) -> AnyMessageId:
        """The id of a message, with where every segment was when it was handed out."""
        positions = []
        for (_, segment_id), each in sorted(self._segments.present.items()):
            if isinstance(each, StreamSegment | SharedStreamSegment):
                # Of other segments, what had been handed out by then: an acknowledgement by this
                # id, after a restart, covers exactly that (invariant 2).
                last = message_id if each is segment else each.last_handed(turn)
                if last is not None:
                    positions.append(SegmentPosition(segment_id, last))
        assert segment.spec.segment_id is not None, "a member has segments only"
        return ScalableMessageId(
            segment.spec.segment_id, message_id, tuple(positions), parent_topic=self.topic
        )

    # --- moving

    async def seek(self, target: SeekTarget) -> None:
        """Move the subscription, in one segment or in all."""
        self.check_open()
        layout = self._watch.layout
        assert layout is not None, "it is open"
        message = one_message(target)
        # A time, the earliest or the latest message: all segments. A message: its own.
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
            # Back in time sealed segments have messages again, and come before their children.
            if target not in (LATEST, SCALABLE_LATEST):
                await self._until_parents_first(layout, moved)
        # Moved or not: what is assigned is consumed again.
        finally:
            self._away = frozenset()
            self._segments.stirred.advance()

    async def _release_away(self) -> None:
        for (_, segment_id), segment in list(self._segments.present.items()):
            if segment_id in self._away:
                segment.release(wait=False)
                # The broker must have closed it: occupying the segment would be refused otherwise.
                while not segment.has_ended:
                    await segment.ends.past(segment.ends.version)

    async def _move(self, layout: SegmentLayout, moved: Set[int], fields: dict[str, Any]) -> None:
        seeks = [
            SegmentSeek(
                self._connections,
                self._watch.topic_of(layout.segments[segment_id]),
                self.subscription,
                f"{self.name}-seg-{segment_id}",
            )
            for segment_id in sorted(moved)
        ]
        try:
            for each in seeks:  # all of them or none
                await each.occupy()
            for each in seeks:
                await each.seek(fields)
        # A seek lets go of its segment itself; those that were only occupied are let go of here.
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
                # The controller takes the children back once it knows that their parents are not
                # read.
                while any(waiting & ancestors(layout, each) for each in self._assigned()):
                    await changes.past(changes.version)
        except TimeoutError:
            _LOG.info("parents-not-first", consumer=self.name, topic=self.topic)

    def _assigned(self) -> list[int]:
        assignment = self._session.assignment
        assert assignment is not None, "it is open"
        return [each.segment_id for each in assignment.segments]

    # --- its parts

    async def _open(self) -> None:
        await self._watch.start()
        layout = await self._watch.first()
        self._first = frozenset(layout.segments)
        await self._session.start()
        await self._session.first()
        self._segments.follow(self._session.changes, "assignments")
        self._segments.follow(self._watch.changes, "layouts")

    async def _close_sources(self) -> None:
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._watch.stop)
            # Told at once: otherwise the controller keeps the segments for this member for a while.
            parts.push_async_callback(self._session.stop)
            try:
                await self._session.leave()
            except MagnetarError as error:
                _LOG.info("member-not-left", member=self.name, reason=str(error))

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        assignment = self._session.assignment
        assert assignment is not None, "it is open"
        found = {(self.topic, each.segment_id): self._spec(each) for each in assignment.segments}
        # Assigned to another member meanwhile: should it come back, it is tried anew.
        self._gone &= found.keys()
        waiting = self._held_back({segment_id for _, segment_id in found})
        return {
            key: spec
            for key, spec in found.items()
            if key not in self._gone
            and key[1] not in self._away
            # One that is consumed already goes on: its parents were finished when it began.
            and (key[1] not in waiting or key in self._segments.present)
        }

    def _held_back(self, assigned: set[int]) -> set[int]:
        """Segments that are read after others of this member."""
        layout = self._watch.layout
        assert layout is not None, "it is open"
        finished = {segment_id for _, segment_id in self._gone}
        for (_, segment_id), segment in self._segments.present.items():
            if segment.reached_end:
                finished.add(segment_id)
        return held_back(layout, assigned, finished)

    def _spec(self, assigned: pb.ScalableAssignedSegment) -> SegmentSpec:
        fields: dict[str, Any] = {"subType": int(SubscriptionType.EXCLUSIVE)}
        # The segment is shared with other members by entry buckets: these are ours.
        if assigned.bucket_ranges:
            ranges = [{"start": each.start, "end": each.end} for each in assigned.bucket_ranges]
            fields["subType"] = int(SubscriptionType.KEY_SHARED)
            fields["keySharedMeta"] = {
                "keySharedMode": pb.STICKY,
                "hashRanges": ranges,
                "entryBucketDispatch": True,
            }
        # A regular topic that is consumed as a stream.
        if not assigned.segment_topic.startswith(_SEGMENT_SCHEME):
            fields["metadata"] = marked(self._settings.properties)
        if assigned.segment_id not in self._first:
            fields["initialPosition"] = int(InitialPosition.EARLIEST)
        return SegmentSpec(
            wire_topic=assigned.segment_topic,
            topic=self.topic,
            subscription=self.subscription,
            consumer_name=f"{self.name}-seg-{assigned.segment_id}",
            fields=fields,
            segment_id=assigned.segment_id,
        )

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        if "keySharedMeta" in spec.fields:
            return SharedStreamSegment(self, spec)
        return StreamSegment(self, spec)


def _not_here(segment: SegmentConsumer) -> MagnetarError:
    return AlreadyClosed(
        f"segment {segment.spec.segment_id} is not consumed here any more",
        hint="its messages that were not acknowledged go to another member",
    )
