"""A non-persistent topic: messages go to who is there now, and nowhere else.

Owns: `NonPersistentTopic`, with the surface of `Topic` where it means something, and `LoadedTopic`,
a topic of either kind.

Invariants:
1. Nothing is stored: not messages, not subscriptions, not the topic. It ends with its process.
2. A send is answered at once. A message is handed to each subscription, or dropped there.
3. A subscription lives as long as it has consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from magnetar.broker.api import LastMessage, ProducerRequest, SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.schemas import takes_any_schema, version_bytes
from magnetar.broker.policy.stats import Rate, TopicStats, with_sums
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.producers import TopicProducers
from magnetar.broker.publish.send_limits import SendLimits
from magnetar.broker.subscribe.nonpersistent_subscription import (
    SENT_POSITION,
    NonPersistentSubscription,
)
from magnetar.broker.topic.rates import TopicRates
from magnetar.broker.topic.subscriptions import check_consumer_options
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.errors import (
    ConsumerBusy,
    MagnetarError,
    NotAllowed,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.model.ids import Position
from magnetar.model.isolation import ReadIsolation
from magnetar.model.names import TopicName
from magnetar.runtime.signal import Signal


class NonPersistentTopic:
    """A topic without storage. End it with `close` or `delete`."""

    # There is no storage that could be lost.
    lost: Final[MagnetarError | None] = None

    def __init__(self, name: TopicName, parts: TopicParts, policies: TopicPolicies) -> None:
        self.name = name
        self.policies = policies
        self.load_number = 0
        """How many topics its broker had loaded when this was: they come in that order."""
        self.used_at = parts.clock.monotonic()
        self._parts = parts
        self._clock = parts.clock
        self._subscriptions: dict[str, NonPersistentSubscription] = {}
        # Flags of this object alone: a topic of this name that is loaded later begins anew.
        self._terminated = False
        self._gone: MagnetarError | None = None
        self._trouble = Signal()
        self.producers = TopicProducers(
            None, _no_epoch_record, close_seconds=parts.limits.close_seconds
        )
        self._limit_sends()
        self._rates = TopicRates(name, self.producers, policies, parts.clock)
        self._created_ms, self._last_publish_ms = parts.clock.now_ms(), 0
        self._gone_messages = self._gone_bytes = 0
        self._message_rate = Rate(parts.clock)
        self._byte_rate = Rate(parts.clock)

    # --- what it knows

    @property
    def subscriptions(self) -> Mapping[str, NonPersistentSubscription]:
        return MappingProxyType(self._subscriptions)

    @property
    def terminated(self) -> bool:
        return self._terminated

    @property
    def closing(self) -> bool:
        return self._gone is not None

    @property
    def in_use(self) -> bool:
        """Whether anybody is connected."""
        producers = self.producers
        return bool(producers.connected or producers.waiting or self.consumers)

    async def last_message(
        self, isolation: ReadIsolation | None = None, *, compacted: bool = False
    ) -> LastMessage:
        raise NotAllowed(f"{self.name} keeps no messages")

    # --- producers

    async def add_producer(self, options: ProducerRequest) -> Producer:
        """Admit a producer; topic epochs last as long as the topic object."""
        self._check_writable()
        # The same order of refusals as for a persistent topic: clients get the same errors.
        self.producers.check_room(self.policies.max_producers, options.name)
        self.producers.check_encrypted(options)
        schemas = self._parts.schemas
        version = await schemas.for_producer(self.name.schema_id, options.schema, self.policies)
        name = options.name or await self._parts.producer_names.next_name()
        # After the awaits: it may have been terminated or unloaded meanwhile.
        self._check_writable()
        producer = Producer(
            name,
            options,
            self._publish,
            clock=self._clock,
            trouble=self._trouble,
            schema_version=version_bytes(version),
        )
        await self.producers.add(producer, self.policies.max_producers)
        return producer

    def _publish(self, payload: bytes) -> asyncio.Future[Position]:
        if self._terminated:
            raise TopicTerminated(f"{self.name} was terminated")
        self._last_publish_ms = self._clock.now_ms()
        for subscription in self._subscriptions.values():
            subscription.publish(payload)
        # Answered at once (invariant 2); a future, because the producer knows no other kind of
        # append.
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        future.set_result(SENT_POSITION)
        return future

    async def remove_producer(self, producer: Producer) -> None:
        await self.producers.remove(producer)
        self._gone_messages += producer.messages_in
        self._gone_bytes += producer.bytes_in
        producer.messages_in = producer.bytes_in = 0
        self.used_at = self._clock.monotonic()

    # --- subscriptions

    async def subscription(self, options: SubscribeRequest) -> NonPersistentSubscription:
        """The subscription that a consumer asks for; it joins with `add_consumer`."""
        self._check_open()
        check_consumer_options(options, self.policies)
        if options.read_compacted:
            raise NotAllowed(f"{self.name} keeps no messages: there is nothing to compact")
        limit = self.policies.max_consumers
        if limit and self.consumers >= limit:
            raise ConsumerBusy(f"{self.name} has {limit} consumers, its limit")
        schemas, idle = self._parts.schemas, self._takes_first_schema()
        await schemas.for_consumer(self.name.schema_id, options.schema, self.policies, idle=idle)
        # Checked again after the schema registry was asked.
        self._check_open()
        found = self._subscriptions.get(options.subscription)
        if found is None:
            limit = self.policies.max_subscriptions
            if limit and len(self._subscriptions) >= limit:
                raise NotAllowed(f"{self.name} has {limit} subscriptions, its limit")
            found = NonPersistentSubscription(
                self,
                options.subscription,
                clock=self._clock,
                limits=self._parts.limits,
                consistent_hashing=self._parts.consistent_hashing,
            )
            self._subscriptions[found.name] = found
        return found

    async def create_subscription(
        self, name: str, mark_delete: Position, properties: Mapping[str, str] | None = None
    ) -> bool:
        raise NotAllowed(f"{self.name} has subscriptions only while they have consumers")

    async def delete_subscription(
        self, name: str, *, by: Consumer | None = None, force: bool = False
    ) -> None:
        """Remove a subscription; refused while consumers other than `by` are connected."""
        found = self._subscriptions.get(name)
        if found is None:
            raise SubscriptionNotFound(f"there is no subscription {name!r}")
        await found.unsubscribe(by=by, force=force)
        self._subscriptions.pop(name, None)

    async def release(self, subscription: NonPersistentSubscription) -> None:
        """Call it when a consumer has left: the subscription may go with it."""
        self.used_at = self._clock.monotonic()
        present = self._subscriptions.get(subscription.name)
        # A new subscription may have this name by now, or another consumer has joined.
        if present is subscription and not subscription.consumers:
            del self._subscriptions[subscription.name]
            await subscription.close()

    def _takes_first_schema(self) -> bool:
        # As a persistent topic; a message that was sent may be with somebody.
        if self.producers.connected or self.producers.waiting or self._last_publish_ms:
            return False
        return all(
            takes_any_schema(consumer.options.schema)
            for subscription in self._subscriptions.values()
            for consumer in subscription.consumers
        )

    @property
    def consumers(self) -> int:
        return sum(len(each.consumers) for each in self._subscriptions.values())

    # --- policies

    async def apply(self, policies: TopicPolicies) -> None:
        self.policies = policies
        self._limit_sends()
        await self._rates.follow(policies, ())

    def _limit_sends(self) -> None:
        self.producers.limit_sends(SendLimits.of(self.policies, self.name))

    async def trim(self) -> list[int]:
        """There is nothing to trim."""
        return []

    # --- the end

    async def terminate(self) -> Position:
        """Take no more messages, as long as this process lives."""
        self._check_open()
        self._terminated = True
        self.producers.stop(TopicTerminated(f"{self.name} was terminated"))
        return SENT_POSITION

    async def delete(self, *, force: bool = False) -> None:
        """End it; refused while anybody is connected unless `force`."""
        self._check_open()
        if self.in_use and not force:
            raise NotAllowed(f"{self.name} has producers or consumers", hint="close them first")
        await self.close(TopicNotFound(f"{self.name} was deleted"))

    async def close(self, error: MagnetarError | None = None) -> None:
        """Close producers and consumers; they may come back to a new topic of this name."""
        self._gone = self._gone or error or ServiceNotReady(f"{self.name} was unloaded")
        await self.producers.close(self._gone)
        self._rates.close()
        for name in list(self._subscriptions):
            await self._subscriptions.pop(name).close(self._gone)

    def _check_open(self) -> None:
        if self._gone is not None:
            raise ServiceNotReady(f"{self.name} is being unloaded")

    def _check_writable(self) -> None:
        self._check_open()
        if self._terminated:
            raise TopicTerminated(f"{self.name} was terminated")

    # --- statistics

    @property
    def messages_in(self) -> int:
        producers = self.producers.connected.values()
        return self._gone_messages + sum(producer.messages_in for producer in producers)

    @property
    def bytes_in(self) -> int:
        producers = self.producers.connected.values()
        return self._gone_bytes + sum(producer.bytes_in for producer in producers)

    async def last_publish_ms(self) -> int:
        """When the last message came; 0: none did."""
        return self._last_publish_ms

    def stats(self, *, publishers: bool = True, consumers: bool = True) -> TopicStats:
        """What the admin interface shows, with or without each producer and consumer."""
        producers = self.producers.connected.values() if publishers else ()
        stats = TopicStats(
            msg_rate_in=self._message_rate.of(self.messages_in),
            msg_throughput_in=self._byte_rate.of(self.bytes_in),
            msg_in_counter=self.messages_in,
            bytes_in_counter=self.bytes_in,
            topic_creation_time_stamp=self._created_ms,
            last_publish_time_stamp=self._last_publish_ms,
            publishers=[producer.stats() for producer in producers],
            waiting_publishers=len(self.producers.waiting),
            subscriptions={
                name: each.stats(consumers=consumers) for name, each in self._subscriptions.items()
            },
            topic_epoch=self.producers.epoch,
            owner_broker=self._parts.owner,
            publish_rate_limited_times=self._rates.publish_limited_times,
        )
        return with_sums(stats)


async def _no_epoch_record(epoch: int) -> None:
    """Nothing of a non-persistent topic is stored."""


LoadedTopic: TypeAlias = Topic | NonPersistentTopic
