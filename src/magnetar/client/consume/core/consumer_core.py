"""The inside of a consumer of any kind: its segments, its receive queue, and its life.

Owns: `ConsumerCore`, the base of the cores on which the consumers of applications stand. (Pulsar's
multi-topics consumer: a sub-consumer for each partition, one queue for all.)

Invariants:
1. After `close` every call raises `AlreadyClosed`; acknowledgements that were handed in before are
   sent first. What was received and not acknowledged is delivered again, to whoever is next.
2. A segment that is gone is no failure of a consumer; what no retry can heal is, and every receive
   raises it.

Relies on: subclasses, which say what is consumed (`wanted`) and how (`make`); `ConsumedSegments`,
which keeps the segments in step with that.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Generic, TypeVar

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.segments import ConsumedSegments, SegmentKey
from magnetar.client.consume.segment.receive_queue import ReceiveQueue
from magnetar.client.consume.segment.schema_versions import SchemaVersions
from magnetar.client.consume.segment.segment_consumer import (
    ConsumerContext,
    SegmentConsumer,
    SegmentSpec,
)
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.encryption.decryptor import Decryptor
from magnetar.client.message.message import AnyMessageId, Message, MessageId
from magnetar.client.message.options import check_schema
from magnetar.client.schema.info import Schema
from magnetar.errors import AlreadyClosed, MagnetarError, TopicNotFound
from magnetar.model.ids import ScalableMessageId

T = TypeVar("T")

# Beyond what segments themselves take to let go: a close that hangs is cut off in the end.
CLOSE_GRACE_S: Final = 5.0


class ConsumerCore(ABC, Generic[T]):
    """One consumer, which is the parent of its segments."""

    waits_for_others: ClassVar[bool] = False
    """Whether another consumer on a segment is waited for, and no error: so in groups."""

    def __init__(
        self, connections: Connections, schema: Schema[T], settings: ConsumerSettings, name: str
    ) -> None:
        # Before anything is begun that would have to be closed.
        check_schema(schema)
        self.on_close: Callable[[], None] | None = None
        """Called once, when it is closed."""
        self.name = name
        self.receive_queue: ReceiveQueue[T] = ReceiveQueue(
            SchemaVersions(connections, schema), bytes_max=settings.queue_bytes
        )
        # One for all segments: the data keys of a producer are the same on each.
        decryptor = Decryptor(settings.key_reader)
        self.context = ConsumerContext(
            connections, settings, self.receive_queue, decryptor, self.waits_for_others
        )
        self._connections = connections
        self._settings = settings
        self._gone: set[SegmentKey] = set()
        """Segments that cannot be consumed, though the layout or the controller has them."""
        self._closing: asyncio.Task[None] | None = None
        timeout_s = connections.settings.operation_timeout
        self._segments = ConsumedSegments(
            self,
            f"consumer {name}",
            open_timeout=timeout_s,
            stop_seconds=timeout_s + settings.release_timeout + CLOSE_GRACE_S,
        )

    # --- what subclasses decide

    @abstractmethod
    async def _open(self) -> None:
        """Open what tells which segments there are, and follow it."""

    @abstractmethod
    async def _close_sources(self) -> None:
        """Close what `_open` opened."""

    @abstractmethod
    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        """The segments that should be consumed now."""

    @abstractmethod
    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        """Make the consumer of one segment."""

    def left(self, key: SegmentKey, segment: SegmentConsumer) -> None:
        """Note that the consumer of a segment is over."""

    def tolerates(self, segment: SegmentConsumer, error: MagnetarError) -> bool:
        """Whether the others can be consumed without this segment: here, one that was deleted."""
        return isinstance(error, TopicNotFound) and segment.spec.segment_id is not None

    # --- its life

    @property
    def is_closing(self) -> bool:
        """Whether it was told to close."""
        return self._closing is not None

    def check_open(self) -> None:
        """Raise `AlreadyClosed` if it was told to close."""
        if self._closing is not None:
            raise AlreadyClosed(f"consumer {self.name} is closed")

    async def open(self) -> None:
        """Begin; called by the client that made it."""
        try:
            await self._open()
            await self._segments.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Send what was acknowledged, and give everything else back."""
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), name=f"close {self.name}")
        # Whoever is cancelled while waiting leaves the end to go on (others may wait for it).
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Whoever waits for a message hears first. Then the segments, which send acknowledgements;
        # what they learn of layouts and assignments from is closed only behind them.
        self.receive_queue.fail(AlreadyClosed(f"consumer {self.name} is closed"))
        try:
            await self._segments.stop()
        finally:
            try:
                await self._close_sources()
            finally:
                if self.on_close is not None:
                    self.on_close()

    # --- the segments' side

    def id_of(self, segment: SegmentConsumer, message_id: MessageId, turn: int) -> AnyMessageId:
        """The id of a message of a scalable topic, as the application has it."""
        assert segment.spec.segment_id is not None, "a regular topic has plain ids"
        return ScalableMessageId(segment.spec.segment_id, message_id, parent_topic=segment.topic)

    def failed(self, segment: SegmentConsumer, error: MagnetarError) -> None:
        """Go on without a segment, or not at all."""
        self._gone |= {key for key, each in self._segments.present.items() if each is segment}
        if not self.tolerates(segment, error):
            self.receive_queue.fail(error)

    def _by_topic(self) -> dict[tuple[str, int | None], SegmentConsumer]:
        """The segments as the columns of record batches name them."""
        return {(each.topic, each.segment_id): each for each in self._segments.present.values()}


def not_consumed(topic: str) -> AlreadyClosed:
    """Why something cannot be acknowledged here any more."""
    hint = "what was not acknowledged is delivered again"
    return AlreadyClosed(f"{topic}: its segment is not consumed here any more", hint=hint)


def source_of(message: Message[Any]) -> SegmentConsumer:
    """The segment that a message came from."""
    segment = message._source
    assert isinstance(segment, SegmentConsumer), "consumers hand out nothing else"
    return segment
