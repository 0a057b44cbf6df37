"""The inside of consumers that have every segment of one or more topics.

Owns: `AllSegmentsCore`: it follows the layouts of its topics, and consumes each segment of them,
the sealed ones too. The cores of queue consumers, consumers of regular topics and readers are made
from it.

Invariants:
1. Every segment of the present layouts is consumed, and no other.
2. `initial_position` is for the segments that were there at first. Those that come later are read
   from their beginning: they hold nothing from before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.consumer_core import ConsumerCore
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.segment_consumer import SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.produce.segment_producer import V5_MARK
from magnetar.client.schema.info import Schema
from magnetar.errors import AlreadyClosed
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment
from magnetar.model.subscriptions import InitialPosition

T = TypeVar("T")


class AllSegmentsCore(ConsumerCore[T]):
    """Consumes all segments of its topics."""

    def __init__(
        self,
        connections: Connections,
        topics: Iterable[TopicName],
        *,
        subscription: str,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
        create_if_missing: bool = True,
    ) -> None:
        super().__init__(connections, schema, settings, name)
        self.subscription = subscription
        self._create = create_if_missing
        # The topics, each with its layout, and the segments that each had at first (invariant 2).
        self._first_topics = tuple(topics)
        self._watches: dict[str, LayoutWatch] = {}
        self._first: dict[str, frozenset[int]] = {}

    @abstractmethod
    def _subscribe_fields(self) -> Mapping[str, Any]:
        """The fields of SUBSCRIBE that depend on the kind of consumer."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are consumed now."""
        return tuple(self._watches)

    async def _open(self) -> None:
        for topic in self._first_topics:
            await self._add_topic(topic, are_new=False)

    async def _close_sources(self) -> None:
        async with AsyncExitStack() as parts:
            for watch in self._watches.values():
                parts.push_async_callback(watch.stop)

    async def _add_topic(self, topic: TopicName, *, are_new: bool) -> None:
        """`are_new`: its messages came after the consumer did, all of them."""
        watch = LayoutWatch(self._connections, topic, create_if_missing=self._create)
        try:
            await watch.start()
            layout = await watch.first()
        except BaseException:
            await watch.stop()
            raise
        # Only now: `wanted` must not see a topic whose layout is not known.
        self._watches[str(topic)] = watch
        self._first[str(topic)] = frozenset() if are_new else frozenset(layout.segments)
        self._segments.follow(watch.changes, f"layouts of {topic}")
        self._segments.stirred.advance()

    async def _remove_topic(self, topic: str) -> None:
        watch = self._watches.pop(topic)
        self._first.pop(topic, None)
        self._segments.stirred.advance()
        await watch.stop()
        # The task that follows it ends by that.
        watch.changes.close(AlreadyClosed(f"{topic} is not consumed any more"))

    def wanted(self) -> Mapping[SegmentKey, SegmentSpec]:
        found: dict[SegmentKey, SegmentSpec] = {}
        for topic, watch in self._watches.items():
            # It is being added.
            if watch.layout is None or topic not in self._first:
                continue
            for segment_id, segment in watch.layout.segments.items():
                found[topic, segment_id] = self._spec(topic, watch, segment)
        # One that is gone from the layout too is forgotten: its number is never given again.
        self._gone &= found.keys()
        return {key: spec for key, spec in found.items() if key not in self._gone}

    def _spec(self, topic: str, watch: LayoutWatch, segment: Segment) -> SegmentSpec:
        fields = {**self._subscribe_fields(), "force_topic_creation": self._create}
        # Invariant 2. Without it, what was sent between the split and this subscription would be
        # lost to a consumer that begins at the latest message.
        if segment.segment_id not in self._first[topic]:
            fields["initialPosition"] = int(InitialPosition.EARLIEST)
        # Partitions are consumed under the plain name, as Pulsar's clients do.
        is_legacy = segment.legacy_topic_name is not None
        name = self.name
        if is_legacy:
            fields["metadata"] = marked(self._settings.properties)
        else:
            name = f"{name}-seg-{segment.segment_id}"
        return SegmentSpec(
            wire_topic=watch.topic_of(segment),
            topic=segment.legacy_topic_name or topic,
            subscription=self.subscription,
            consumer_name=name,
            fields=fields,
            segment_id=None if is_legacy else segment.segment_id,
        )


def marked(properties: Mapping[str, str]) -> list[dict[str, str]]:
    """The properties of a consumer of a regular topic.

    The mark says that it follows when the topic becomes a scalable one, which else it could not.
    """
    return [{"key": key, "value": value} for key, value in (*properties.items(), V5_MARK)]
