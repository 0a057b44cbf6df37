"""The inside of a reader of a regular topic: where it begins, and where it goes on.

Owns: `ReaderCore`. `Reader`, which applications have, stands on it.

Invariants:
1. It reads every message behind its start once, in the order of each partition, over lost
   connections too.
2. Only the earliest and the latest message are a start for more than one partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.all_segments import AllSegmentsCore
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segment.stream_segment import ReaderSegment
from magnetar.client.message.message_ids import id_from
from magnetar.client.message.times import milliseconds
from magnetar.client.schema.info import Schema
from magnetar.errors import DeadlineExceeded, InvalidSetting
from magnetar.model.ids import EARLIEST, LATEST, MessageId
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType

T = TypeVar("T")


class ReaderCore(AllSegmentsCore[T]):
    """One reader, over all partitions of its topic."""

    def __init__(
        self,
        connections: Connections,
        topic: TopicName,
        *,
        start: MessageId,
        inclusive: bool,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
    ) -> None:
        super().__init__(
            connections,
            [topic],
            subscription=f"reader-{name}",
            schema=schema,
            settings=settings,
            name=name,
        )
        self._start = start
        self._inclusive = inclusive

    async def has_message_available(self) -> bool:
        """Whether there is a message that was not received yet."""
        self.check_open()
        # What was fetched is available, whatever the broker says.
        if len(self.receive_queue):
            return True
        for segment in self._readers():
            answer = await segment.ask_again("GET_LAST_MESSAGE_ID")
            last = id_from(answer.last_message_id)
            position = segment.position
            # The partition is empty.
            if last.entry_id < 0:
                continue
            # Later entries; or the same one, a batch in which the reader stands before the last
            # message.
            if position == EARLIEST or last.position > position.position:
                return True
            if last.position == position.position and 0 <= position.batch_index < last.batch_index:
                return True
        return False

    async def seek(self, target: MessageId | datetime | int, *, inclusive: bool = False) -> None:
        """Go on elsewhere, and return once it is subscribed there."""
        self.check_open()
        readers = self._readers()
        if isinstance(target, MessageId):
            self._check_start(target, len(readers))
            for segment in readers:
                segment.jump(target, inclusive=inclusive)
        else:
            for segment in readers:
                segment.jump(EARLIEST, published_from_ms=milliseconds(target))
        timeout_s = self._connections.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout_s):
                for segment in readers:
                    await segment.until_subscribed()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.name} was not moved within {timeout_s} s") from error

    # --- its parts

    async def _open(self) -> None:
        await super()._open()
        (watch,) = self._watches.values()
        assert watch.layout is not None, "it is open"
        self._check_start(self._start, len(watch.layout.segments))

    def _check_start(self, start: MessageId, partitions: int) -> None:
        if partitions > 1 and start not in (EARLIEST, LATEST):
            raise InvalidSetting(
                f"{start} is of one partition, and the topic has {partitions}",
                hint="read the partition by its name, or start at the earliest or latest message",
            )

    def _readers(self) -> list[ReaderSegment]:
        present = self._segments.present.values()
        return [each for each in present if isinstance(each, ReaderSegment)]

    def _subscribe_fields(self) -> Mapping[str, Any]:
        return {"subType": int(SubscriptionType.EXCLUSIVE)}

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        # A partition that was added since is read from its beginning: all of it is later.
        is_later = key[1] not in self._first[key[0]]
        start = EARLIEST if is_later else self._start
        return ReaderSegment(self, spec, start=start, inclusive=self._inclusive and not is_later)
