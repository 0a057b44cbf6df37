"""A reader of a regular topic: from a message on, without a subscription.

Owns: `Reader`.

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
from magnetar.client.consume.all_segments import AllSegmentsConsumer
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segment.stream_segment import ReaderSegment
from magnetar.client.consume.segments import SegmentKey
from magnetar.client.message.message_ids import id_from
from magnetar.client.message.times import milliseconds
from magnetar.client.schema.info import Schema
from magnetar.errors import DeadlineExceeded, InvalidSetting
from magnetar.model.ids import EARLIEST, LATEST, MessageId
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType

T = TypeVar("T")


class Reader(AllSegmentsConsumer[T]):
    """Reads a regular topic.

    async with await client.reader("orders", start=EARLIEST) as reader:
        while await reader.has_message_available():
            message = await reader.receive()
    """

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
        self._check_open()
        if len(self._receive_queue):
            return True
        for feed in self._readers():
            answer = await feed.ask_again("GET_LAST_MESSAGE_ID")
            last = id_from(answer.last_message_id)
            position = feed.position
            if last.entry_id < 0:
                continue
            if position == EARLIEST or last.position > position.position:
                return True
            if last.position == position.position and 0 <= position.batch_index < last.batch_index:
                return True
        return False

    async def seek(self, target: MessageId | datetime | int, *, inclusive: bool = False) -> None:
        """Go on behind another message (`inclusive`: with it), or with what was published since.

            await reader.seek(EARLIEST)
            await reader.seek(datetime.now(UTC) - timedelta(hours=1))

        Times are datetimes or milliseconds since 1970.
        """
        self._check_open()
        readers = self._readers()
        if isinstance(target, MessageId):
            self._check_start(target, len(readers))
            for feed in readers:
                feed.jump(target, inclusive=inclusive)
        else:
            for feed in readers:
                feed.jump(EARLIEST, published_from_ms=milliseconds(target))
        timeout_s = self._connections.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout_s):
                for feed in readers:
                    await feed.until_subscribed()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._name} was not moved within {timeout_s} s") from error

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
        feeds = self._feeds.present.values()
        return [feed for feed in feeds if isinstance(feed, ReaderSegment)]

    def _subscribe_fields(self) -> Mapping[str, Any]:
        return {"subType": int(SubscriptionType.EXCLUSIVE)}

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        is_later = key[1] not in self._first[key[0]]
        start = EARLIEST if is_later else self._start
        return ReaderSegment(self, spec, start=start, inclusive=self._inclusive and not is_later)
