"""The calls that a controller makes to the broker that has a segment.

Owns: `SegmentHost`, the contract, and `LocalSegments`, which does it with this broker's topics.

Invariants:
1. Every call can be repeated: done twice it is the same as done once, also by two controllers at
   the same time. A call that returned is durable.
2. A call on a segment whose topic is gone (deleted by a later controller) is no error where the
   caller wanted it gone, and TopicNotFound elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from magnetar.broker.api import ProducerRequest, SubscribeRequest
from magnetar.broker.publish.lineage import Lineage
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.quotas import Backlog
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.errors import MagnetarError, SubscriptionNotFound, TopicNotFound
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.isolation import stored_isolation
from magnetar.model.names import Domain, TopicName
from magnetar.model.subscriptions import COMPACTION, SubscriptionType
from magnetar.scalable.layout.autoscale import Sample
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.layout.load_reports import sample_positions
from magnetar.scalable.records import StartPosition, SubscriptionKind


class CursorWanted(NamedTuple):
    """A subscription that a segment is to have."""

    name: str
    position: StartPosition
    properties: Mapping[str, str]


class CursorFound(NamedTuple):
    """A durable subscription that a regular topic has."""

    name: str
    kind: SubscriptionKind
    properties: Mapping[str, str]


class SegmentUse(NamedTuple):
    """The clients that are connected to a segment, by what they are."""

    producers: int
    consumers: int
    readers: int
    """Consumers without a durable subscription that have not read it all."""
    unmanaged: int
    """Those of all whose client does not follow a layout: a migration would cut them off."""


class Kept(NamedTuple):
    """The messages that a segment keeps, needed or not."""

    size_bytes: int
    oldest_ms: int
    """When its oldest ledger was closed, or if it is open, begun."""
    loaded: bool
    is_final: bool
    """It is sealed: the size stays as long as the segment."""


class SegmentHost(Protocol):
    """The broker that has the segments, or a way to those that have."""

    async def prepare(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        """Create a segment's topic if there is none, and the cursors that it lacks."""

    async def add_cursors(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        """Create the cursors that it lacks."""

    async def drop_cursor(self, name: TopicName, subscription: str) -> None:
        """Remove a cursor, whoever uses it; none is fine."""

    async def seal(self, name: TopicName) -> Lineage:
        """Take no more messages; what it knows of its producers' sequences."""

    async def inherit(self, name: TopicName, lineage: Lineage) -> None:
        """Judge repeated sends by what the parents knew."""

    async def delete(self, name: TopicName) -> None:
        """Delete the topic with its data, whoever uses it; none is fine."""

    async def use(self, name: TopicName) -> SegmentUse:
        """Count the clients that use it now; none, if it is not there."""

    async def cursors(self, name: TopicName) -> list[CursorFound]:
        """The durable subscriptions that it has."""

    async def backlog(self, name: TopicName, subscription: str) -> int | None:
        """Entries that are not acknowledged; None: it has no such cursor."""

    async def kept(self, name: TopicName) -> Kept:
        """Measure what it keeps, without loading it."""

    async def trim(self, name: TopicName, retention: Retention) -> None:
        """Drop what nobody needs and this retention lets go; none is fine."""

    async def slowest_backlog(self, name: TopicName, *, with_age: bool) -> Backlog:
        """What its slowest durable subscription has left."""

    async def evict(self, name: TopicName, room: int) -> None:
        """Have its subscriptions pass over all but the last so many bytes; none is fine."""

    async def evict_older(self, name: TopicName, seconds: float) -> None:
        """Have its subscriptions pass over what is older; none is fine."""

    async def stop_producers(self, name: TopicName, error: MagnetarError) -> None:
        """Close the producers that are connected to it now."""

    async def undecided(self, name: TopicName) -> bool:
        """Whether a transaction that is not decided may have written to it."""

    async def seek(self, name: TopicName, subscription: str, ms: int) -> None:
        """Move a cursor to the first message at or after a time."""

    async def seek_earliest(self, name: TopicName, subscription: str) -> None:
        """Move a cursor to the first message that there is."""

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        """Move a cursor to the end."""

    async def expire(self, name: TopicName, subscription: str, seconds: int) -> None:
        """Move a cursor past what is older than so many seconds; never back."""

    async def key_samples(self, name: TopicName, entries_max: int) -> list[Sample]:
        """Where on the ring the last messages stand."""

    async def forget_schema(self, topic: TopicName) -> None:
        """Forget the schema of a scalable topic that is deleted."""

    async def forget_partitions(self, topic: TopicName) -> None:
        """Forget the partitions of the regular topic that one was migrated from, if it had any."""

    async def consumers(self, name: TopicName, subscription: str) -> int:
        """How many are connected to a subscription of a segment."""

    async def unused_seconds(self, name: TopicName, subscription: str) -> float | None:
        """How long nobody has been connected to it; None: it is not loaded, so nobody is."""


MANAGED_PROPERTY: Final = "__pulsar.v5.managed"
"""What clients that follow a layout put into the metadata of producers and consumers."""


class LocalSegments:
    """All segments are topics of this broker."""

    def __init__(self, topics: Topics, layout_watchers: LayoutWatchers) -> None:
        self._topics = topics
        self._layout_watchers = layout_watchers

    async def prepare(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        await self._topics.create(name)
        # After the topic: a repeated call finds it there, and adds what is missing.
        await self.add_cursors(name, cursors)

    async def add_cursors(self, name: TopicName, cursors: Sequence[CursorWanted]) -> None:
        topic = await self._topic(name)
        for wanted in cursors:
            # What it may see ends at maxReadPosition, or with uncommitted
            # isolation at the last entry.
            end = topic.end_for(stored_isolation(wanted.properties))
            start = EARLIEST if wanted.position == "earliest" else end
            # One that is there keeps its place: this is a repeated call.
            if wanted.name not in topic.subscriptions:
                await topic.create_subscription(wanted.name, start, wanted.properties)

    async def drop_cursor(self, name: TopicName, subscription: str) -> None:
        try:
            topic = await self._topic(name)
            await topic.delete_subscription(subscription, force=True)
        except (TopicNotFound, SubscriptionNotFound):
            return  # as it was wanted

    async def seal(self, name: TopicName) -> Lineage:
        topic = await self._topic(name)
        # Sealed by an earlier attempt: only what it knew is asked for again.
        if not topic.terminated:
            await topic.terminate()
        return await topic.lineage()

    async def inherit(self, name: TopicName, lineage: Lineage) -> None:
        await (await self._topic(name)).inherit(lineage)

    async def delete(self, name: TopicName) -> None:
        try:
            await self._topics.delete(name, force=True)
        except TopicNotFound:
            return  # as it was wanted

    async def use(self, name: TopicName) -> SegmentUse:
        # Without loading it: a segment that is not loaded has no clients.
        topic = self._topics.loaded.get(name)
        if not isinstance(topic, Topic):
            return SegmentUse(0, 0, 0, 0)
        subscriptions = topic.subscriptions.values()
        producers = [each.options for each in topic.producers.connected.values()]
        consumers = [each.options for found in subscriptions for each in found.consumers]
        # Those with nothing left do not keep a drained segment from being pruned.
        reading = [each for each in subscriptions if not each.durable and each.backlog()]
        readers = sum(len(each.consumers) for each in reading)
        clients: list[ProducerRequest | SubscribeRequest] = [*producers, *consumers]
        unmanaged = sum(not self._is_managed(name, each) for each in clients)
        return SegmentUse(len(producers), len(consumers), readers, unmanaged)

    def _is_managed(self, name: TopicName, options: ProducerRequest | SubscribeRequest) -> bool:
        if options.metadata.get(MANAGED_PROPERTY) == "true":
            return True
        # Clients do not mark their readers, but watch the layout on the same connection.
        return self._layout_watchers.follows(name.scalable_topic(), options.connection)

    async def cursors(self, name: TopicName) -> list[CursorFound]:
        topic = await self._topic(name)
        return [
            CursorFound(each.name, _kind(each), dict(each.cursor.properties))
            for each in topic.subscriptions.values()
            if each.durable and each.name != COMPACTION
        ]

    async def backlog(self, name: TopicName, subscription: str) -> int | None:
        found = (await self._topic(name)).subscriptions.get(subscription)
        return None if found is None else found.backlog()

    async def kept(self, name: TopicName) -> Kept:
        topic = self._topics.loaded.get(name)
        loaded = isinstance(topic, Topic) and not topic.closing
        # What is open tells itself: its record lags behind.
        if isinstance(topic, Topic) and loaded:
            spans, sealed = topic.ledger.ledger_spans, topic.terminated
        else:
            spans, sealed = await self._topics.stored(name)
        oldest_ms = 0
        if spans:
            first = spans[0]
            oldest_ms = first.created_ms if first.closed_ms is None else first.closed_ms
        return Kept(sum(each.size_bytes for each in spans), oldest_ms, loaded, sealed)

    async def trim(self, name: TopicName, retention: Retention) -> None:
        try:
            topic = await self._topic(name)
        except TopicNotFound:
            return  # nothing of it is left
        # Sealed meanwhile: it is kept, and goes, as a whole.
        if not topic.terminated:
            await topic.trim(retention)

    async def slowest_backlog(self, name: TopicName, *, with_age: bool) -> Backlog:
        return await (await self._topic(name)).quotas.backlog(with_age=with_age)

    async def evict(self, name: TopicName, room: int) -> None:
        try:
            (await self._topic(name)).quotas.evict(room)
        except TopicNotFound:
            return  # nothing of it is left

    async def evict_older(self, name: TopicName, seconds: float) -> None:
        try:
            await (await self._topic(name)).quotas.evict_older(seconds)
        except TopicNotFound:
            return

    async def stop_producers(self, name: TopicName, error: MagnetarError) -> None:
        topic = self._topics.loaded.get(name)
        if isinstance(topic, Topic):  # else it has none
            topic.stop_producers(error)

    async def undecided(self, name: TopicName) -> bool:
        try:
            transactions = (await self._topic(name)).transactions
        except TopicNotFound:
            return False
        return transactions is not None and transactions.undecided > 0

    async def seek(self, name: TopicName, subscription: str, ms: int) -> None:
        await (await self._subscription(name, subscription)).seek_time(ms)

    async def seek_earliest(self, name: TopicName, subscription: str) -> None:
        await (await self._subscription(name, subscription)).seek(EARLIEST)

    async def skip_all(self, name: TopicName, subscription: str) -> None:
        found = await self._subscription(name, subscription)
        # Durable before the answer, as a seek is: a crash must not bring the backlog back.
        found.skip_all()
        await found.ack_durable()

    async def expire(self, name: TopicName, subscription: str, seconds: int) -> None:
        found = await self._subscription(name, subscription)
        await found.expire(seconds)
        await found.ack_durable()

    async def key_samples(self, name: TopicName, entries_max: int) -> list[Sample]:
        return await sample_positions(await self._topic(name), entries_max)

    async def forget_schema(self, topic: TopicName) -> None:
        await self._topics.forget_schema(topic)

    async def forget_partitions(self, topic: TopicName) -> None:
        if "/" not in topic.local_name:  # else no regular topic can have the name
            regular = TopicName(Domain.PERSISTENT, topic.namespace, topic.local_name)
            await self._topics.forget_partitions(regular)

    async def consumers(self, name: TopicName, subscription: str) -> int:
        topic = self._topics.loaded.get(name)
        found = None if topic is None else topic.subscriptions.get(subscription)
        return 0 if found is None else len(found.consumers)

    async def unused_seconds(self, name: TopicName, subscription: str) -> float | None:
        topic = self._topics.loaded.get(name)
        found = topic.subscriptions.get(subscription) if isinstance(topic, Topic) else None
        return None if found is None else found.unused_seconds()

    # --- parts

    async def _topic(self, name: TopicName) -> Topic:
        topic = await self._topics.get(name, create=False)
        if not isinstance(topic, Topic) or name.domain is Domain.NON_PERSISTENT:
            raise TopicNotFound(f"{name} keeps no messages")
        return topic

    async def _subscription(self, name: TopicName, subscription: str) -> Subscription:
        found = (await self._topic(name)).subscriptions.get(subscription)
        if found is None:
            raise SubscriptionNotFound(f"{name} has no subscription {subscription!r}")
        return found


def _kind(subscription: Subscription) -> SubscriptionKind:
    ordered = (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)
    # By its present or last consumers; one that had none yet is a queue, which promises no order.
    return "STREAM" if subscription.type in ordered else "QUEUE"
