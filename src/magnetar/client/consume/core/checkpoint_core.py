"""The inside of a checkpoint consumer: where each segment begins, and how far it was read.

Owns: `CheckpointCore`, alone or as a member of a group. `CheckpointConsumer`, which applications
have, stands on it.

Invariants:
1. A segment is read after all its parents were read to their end, so a key's messages come in
   order. (In a group the controller sees to that.)
2. `checkpoint` names every segment that this consumer knows, silent ones too, at what the
   application has received: whoever starts there gets exactly the rest. A segment that was read to
   its end is named at the latest message: whoever starts there can tell that nothing is missing
   when it is deleted.
3. A consumer that starts at the latest has places of its own before it is open; segments that come
   later are read from their beginning.
4. A segment that is deleted is skipped only if nothing of it was owed: the checkpoint says that it
   was read to its end, or had not begun with it. Else `DataLost` is raised, or, with
   `fail_on_data_loss=False`, warned of.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.all_segments import marked
from magnetar.client.consume.core.consumer_core import ConsumerCore
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segment.stream_segment import ReaderSegment
from magnetar.client.layout.assignment import AssignmentSession
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.message.layouts import held_back
from magnetar.client.message.message import Checkpoint, MessageId
from magnetar.client.schema.info import Schema
from magnetar.errors import DataLost, MagnetarError
from magnetar.model.ids import EARLIEST, LATEST, CheckpointKind, SegmentPosition
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.logs import logger
from magnetar.wire.pb import pulsar_pb2 as pb

T = TypeVar("T")

_LOG: Final = logger(__name__)


class CheckpointCore(ConsumerCore[T]):
    """One reader of a scalable topic, over all its segments or those that are assigned to it."""

    waits_for_others = True

    def __init__(
        self,
        connections: Connections,
        topic: TopicName,
        *,
        start: Checkpoint,
        group: str | None,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
    ) -> None:
        super().__init__(connections, schema, settings, name)
        self.topic = str(topic)
        # Where segments begin: at a given place, where they were left, or at an end of the topic.
        self._given: dict[int, MessageId] = dict(start.positions)
        """Where segments begin, whenever they become this member's."""
        self._positions: dict[int, MessageId] = {}
        """Where segments that are not open now were left."""
        self._at_latest = start.kind is CheckpointKind.LATEST
        self._finished: set[int] = set()
        self._first: frozenset[int] = frozenset()
        self._watch = LayoutWatch(connections, topic)
        self._session = (
            None
            if group is None
            else AssignmentSession(
                connections,
                self._watch,
                subscription=group,
                consumer_name=name,
                kind=pb.CHECKPOINT,
            )
        )

    def checkpoint(self) -> Checkpoint:
        """Where the application is, in every segment that this consumer knows."""
        self.check_open()
        positions = dict(self._positions)
        for (_, segment_id), segment in self._segments.present.items():
            assert isinstance(segment, ReaderSegment), "nothing else is made"
            positions[segment_id] = LATEST if segment.reached_end else segment.position
        layout = self._watch.layout
        assert layout is not None, "it is open"
        # Invariant 2: silent segments, and those that wait for their parents, have a place too.
        for segment_id in layout.segments if self._session is None else self._topics(layout):
            positions.setdefault(segment_id, self._start_of(segment_id))
        named = [
            SegmentPosition(segment_id, position)
            for segment_id, position in sorted(positions.items())
        ]
        return Checkpoint(CheckpointKind.REGULAR, tuple(named))

    # --- its parts

    async def _open(self) -> None:
        await self._watch.start()
        layout = await self._watch.first()
        self._first = frozenset(layout.segments)
        self._check_present(layout)
        self._segments.follow(self._watch.changes, "layouts")
        if self._session is not None:
            await self._session.start()
            await self._session.first()
            self._segments.follow(self._session.changes, "assignments")
        if self._at_latest and self._session is None:
            # Nothing of a sealed segment is later than now; its children need not wait for it.
            self._finished |= {
                segment_id
                for segment_id, segment in layout.segments.items()
                if not segment.is_active
            }

    def _check_present(self, layout: SegmentLayout) -> None:
        """Raise `DataLost` (or warn) if segments are gone that were not read to their end."""
        # The segments of a group are kept until the group has read them: what is gone, another
        # member has read.
        if self._session is not None:
            return
        losses = [
            f"segment {segment_id} of {self.topic} was deleted before all of it was read"
            for segment_id, place in self._given.items()
            if segment_id not in layout.segments and place not in (EARLIEST, LATEST)
        ]
        if losses and self._settings.fail_on_data_loss:
            more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
            raise DataLost(losses[0] + more)
        for each in losses:
            _LOG.warning("data-lost", what=each)

    async def _close_sources(self) -> None:
        async with AsyncExitStack() as parts:
            parts.push_async_callback(self._watch.stop)
            if self._session is not None:
                parts.push_async_callback(self._session.stop)
                try:
                    await self._session.leave()
                except MagnetarError as error:
                    _LOG.info("member-not-left", member=self.name, reason=str(error))

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        layout = self._watch.layout
        assert layout is not None, "it is open"
        # Noted before the look: children may begin in this one.
        for (_, segment_id), segment in self._segments.present.items():
            if segment.reached_end:
                self._finished.add(segment_id)
        topics = self._topics(layout)
        if self._session is not None:
            # What has another owner now is read from its beginning, should it come back.
            self._finished &= topics.keys()
        for segment_id in [each for each in self._positions if each not in topics]:
            # Alone, a position is forgotten with its segment; in a group, with its owner.
            if self._session is not None or segment_id not in layout.segments:
                del self._positions[segment_id]
        present = {segment_id for _, segment_id in self._segments.present}
        # What is being read goes on, even if a layout says that it should have waited.
        waiting = held_back(layout, topics, self._finished) - present
        return {
            (self.topic, segment_id): self._spec(segment_id, topic)
            for segment_id, topic in topics.items()
            if segment_id not in self._finished and segment_id not in waiting
        }

    def _topics(self, layout: SegmentLayout) -> dict[int, str]:
        """The topics of the segments that may be read now."""
        if self._session is not None:
            assert self._session.assignment is not None, "it is open"
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

    def _spec(self, segment_id: int, topic: str) -> SegmentSpec:
        fields: dict[str, Any] = {
            "subType": int(SubscriptionType.EXCLUSIVE),
            # A regular topic that it reads may become a scalable one meanwhile.
            "metadata": marked(self._settings.properties),
        }
        return SegmentSpec(
            wire_topic=topic,
            topic=self.topic,
            subscription=f"reader-{self.name}-seg-{segment_id}",
            consumer_name=f"{self.name}-seg-{segment_id}",
            fields=fields,
            segment_id=segment_id,
        )

    def _start_of(self, segment_id: int) -> MessageId:
        known = self._positions.get(segment_id) or self._given.get(segment_id)
        if known is not None:
            return known
        # Invariant 3.
        return LATEST if self._at_latest and segment_id in self._first else EARLIEST

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        start = self._start_of(key[1])
        return ReaderSegment(self, spec, start=start, owed_from=self._owed_from(key[1], start))

    def _owed_from(self, segment_id: int, start: MessageId) -> MessageId | None:
        """The place behind which nothing of a segment may be missing; None: there is none."""
        if start != EARLIEST:
            return start
        layout = self._watch.layout
        segment = None if layout is None else layout.segments.get(segment_id)
        parents = () if segment is None else segment.parent_ids
        # From its first message, if it is newer than the checkpoint, or waited there for a parent.
        # Who begins at the earliest takes what there is.
        is_new = self._session is None and segment_id not in self._given
        waited = any(parent in self._given for parent in parents)
        return start if self._given and (is_new or waited) else None

    def left(self, key: SegmentKey, segment: SegmentConsumer) -> None:
        assert isinstance(segment, ReaderSegment), "nothing else is made"
        segment_id = key[1]
        if self._session is not None and segment.is_releasing and segment_id not in self._finished:
            return  # it has another owner now
        # Kept for a checkpoint, and for the next consumer of this segment here.
        self._positions[segment_id] = LATEST if segment.reached_end else segment.position
        if segment.reached_end:
            self._finished.add(segment_id)
