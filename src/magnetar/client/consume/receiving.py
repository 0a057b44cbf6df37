"""What all consumers have in common: receiving, and the end.

Owns: `Receiving`, the base of the consumers that applications use.

Invariants:
1. A receive that is cancelled, or that times out, takes no message with it.
2. After `close` every call raises `AlreadyClosed`; acknowledgements that were handed in before are
   sent first. What was received and not acknowledged is delivered again, to whoever is next.
3. A segment that is gone is no failure of a consumer; what no retry can heal is, and every receive
   raises it.

Relies on: subclasses, which say what is consumed (`wanted`) and how (`make`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from magnetar.client.arrow import arrow
from magnetar.client.connection.pool import Connections
from magnetar.client.consume.segment.receive_queue import ReceiveQueue
from magnetar.client.consume.segment.schema_versions import SchemaVersions
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consume.segments import ConsumedSegments, SegmentKey
from magnetar.client.message.message import AnyMessageId, Message, MessageId
from magnetar.client.schema.info import Schema
from magnetar.errors import (
    AlreadyClosed,
    DeadlineExceeded,
    InvalidSetting,
    MagnetarError,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.model.ids import ScalableMessageId

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

CLOSE_GRACE_S = 5.0


class Receiving(ABC, Generic[T]):
    """A consumer of any kind."""

    def __init__(
        self, connections: Connections, schema: Schema[T], settings: ConsumerSettings, name: str
    ) -> None:
        self.on_close: Callable[[], None] | None = None
        """Called once, when it is closed."""
        self._connections = connections
        self._settings = settings
        self._name = name
        self._receive_queue: ReceiveQueue[T] = ReceiveQueue(SchemaVersions(connections, schema))
        self._gone: set[SegmentKey] = set()
        self._closing: asyncio.Task[None] | None = None
        timeout_s = connections.settings.operation_timeout
        self._feeds = ConsumedSegments(
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
    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]: ...

    @abstractmethod
    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer: ...

    def left(self, key: SegmentKey, feed: SegmentConsumer) -> None:
        """A segment is over."""

    def tolerates(self, feed: SegmentConsumer, error: MagnetarError) -> bool:
        return isinstance(error, TopicNotFound) and feed.spec.segment_id is not None

    # --- what it is

    @property
    def name(self) -> str:
        """The name under which the broker knows it; on a segment, `-seg-<id>` is added."""
        return self._name

    # --- receiving

    async def receive(self, timeout: float | None = None) -> Message[T]:  # noqa: ASYNC109
        """The next message; the application has it from now on.

            message = await consumer.receive(timeout=5.0)

        Raises `DeadlineExceeded` if none came within `timeout` seconds.
        """
        self._check_open()
        message = self._receive_queue.take_now()
        return await self._receive_queue.take(timeout) if message is None else message

    async def receive_many(
        self,
        max_messages: int = 100,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[Message[T]]:
        """The messages that are there, up to a limit; waits only until there is one.

            for message in await consumer.receive_many(500, timeout=1.0):
                ...

        Empty if none came within `timeout` seconds.
        """
        self._check_open()
        if max_messages < 1:
            raise InvalidSetting(f"max_messages must be 1 or more, not {max_messages}")
        try:
            return await self._receive_queue.take_many(max_messages, timeout)
        except DeadlineExceeded:
            return []

    async def receive_arrow(
        self,
        max_rows: int = 10_000,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> pa.RecordBatch:
        """The messages that are there as an Arrow record batch; waits only until there is one.

            batch = await consumer.receive_arrow(50_000, timeout=1.0)
            frame = batch.to_pandas()

        Without rows if none came within `timeout` seconds. Values are the payloads as they were
        sent; `magnetar.client.arrow.arrow` describes the columns. Needs `magnetar[arrow]`.
        """
        self._check_open()
        if max_rows < 1:
            raise InvalidSetting(f"max_rows must be 1 or more, not {max_rows}")
        arrow.pyarrow()
        return arrow.record_batch(await self._receive_queue.take_rows(max_rows, timeout))

    def _feeds_by_topic(self) -> dict[tuple[str, int | None], SegmentConsumer]:
        return {(feed.topic, feed.segment_id): feed for feed in self._feeds.present.values()}

    def __aiter__(self) -> AsyncIterator[Message[T]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message[T]]:
        """Until the consumer is closed, or its topic was terminated and nothing is left."""
        while self._closing is None:
            try:
                message = await self._receive_queue.take()
            except (AlreadyClosed, TopicTerminated):
                return
            yield message

    # --- the end

    async def open(self) -> None:
        """Begin; called by the client that made it."""
        try:
            await self._open()
            await self._feeds.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Send what was acknowledged, and give everything else back."""
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._close(), name=f"close {self._name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._receive_queue.fail(AlreadyClosed(f"consumer {self._name} is closed"))
        try:
            await self._feeds.stop()
        finally:
            try:
                await self._close_sources()
            finally:
                if self.on_close is not None:
                    self.on_close()

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise AlreadyClosed(f"consumer {self._name} is closed")

    # --- the segments' side

    @property
    def connections(self) -> Connections:
        return self._connections

    @property
    def settings(self) -> ConsumerSettings:
        return self._settings

    @property
    def receive_queue(self) -> ReceiveQueue[Any]:
        return self._receive_queue

    @property
    def waits_for_others(self) -> bool:
        return False

    def id_of(self, feed: SegmentConsumer, message_id: MessageId, turn: int) -> AnyMessageId:
        assert feed.spec.segment_id is not None, "a regular topic has plain ids"
        return ScalableMessageId(feed.spec.segment_id, message_id, parent_topic=feed.topic)

    def failed(self, feed: SegmentConsumer, error: MagnetarError) -> None:
        self._gone |= {key for key, each in self._feeds.present.items() if each is feed}
        if not self.tolerates(feed, error):
            self._receive_queue.fail(error)


def not_consumed(topic: str) -> AlreadyClosed:
    """Why something cannot be acknowledged here any more."""
    hint = "what was not acknowledged is delivered again"
    return AlreadyClosed(f"{topic}: its segment is not consumed here any more", hint=hint)


def feed_of(message: Message[Any]) -> SegmentConsumer:
    """Where a message came from."""
    feed = message.source
    assert isinstance(feed, SegmentConsumer), "consumers hand out nothing else"
    return feed
