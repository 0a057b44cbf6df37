"""What the tests of scalable topics share: brokers on servers in memory."""

from __future__ import annotations

import itertools

from magnetar.broker.api import SubscribeRequest
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.broker.topic.topics import Topics
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import segment_topic
from magnetar.scalable.service import ScalableTopics
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.store import TxnStore
from tests.unit.broker.world import World, message, options, receipts

TOPIC = TopicName.parse("topic://public/default/orders")


class Broker:
    """One broker process, with its scalable topics."""

    def __init__(self, world: ScalableWorld, parts: TopicParts, topics: Topics, name: str) -> None:
        self.parts = parts
        self.topics = topics
        store = TxnStore(parts.metadata)
        self.outcomes = Outcomes(store, world.clock, coordinates=lambda _: True)
        self.scalable = ScalableTopics(
            topics,
            parts.metadata,
            self.outcomes,
            clock=world.clock,
            limits=world.limits,
            broker=name,
            url=f"pulsar://{name}:6650",
            auto_scale=world.auto_scale,
        )

    async def segment(self, number: int, topic: TopicName = TOPIC) -> Topic:
        """The topic of a segment."""
        record = await self.scalable.get(topic)
        assert record.layout is not None
        layout = record.layout.layout()
        found = await self.topics.get(segment_topic(topic, layout.segment(number)), create=False)
        assert isinstance(found, Topic)
        return found

    async def publish(self, number: int, count: int = 1, *, first: int = 0) -> None:
        producer = await self.producer(number)
        segment = await self.segment(number)
        for sequence in range(first, first + count):
            producer.send(message(sequence, f"m{sequence}"))
        await receipts(producer, count)
        await segment.remove_producer(producer)

    async def producer(self, number: int, name: str = "p") -> Producer:
        return await (await self.segment(number)).add_producer(options(name=name))

    async def subscribe(
        self,
        number: int,
        name: str = "s",
        *,
        type: SubscriptionType = SubscriptionType.EXCLUSIVE,
        earliest: bool = True,
        consumer: str = "c",
        durable: bool = True,
    ) -> tuple[Subscription, Consumer]:
        """A consumer, as a session would let it in."""
        segment = await self.segment(number)
        wanted = SubscribeRequest(
            name,
            type,
            1,
            None,
            name=consumer,
            durable=durable,
            initial_position=InitialPosition.EARLIEST if earliest else InitialPosition.LATEST,
        )
        await self.scalable.admit(segment.name)
        wanted = await self.scalable.subscribing(segment.name, wanted)
        subscription = await segment.subscription(wanted)
        return subscription, subscription.add_consumer(wanted)


class ScalableWorld(World):
    """Servers that outlive brokers."""

    def __init__(self, limits: Limits | None = None, *, auto_scale: bool = False) -> None:
        super().__init__(limits)
        self.auto_scale = auto_scale
        self._names = itertools.count(1)

    async def broker(self) -> Broker:
        parts = self.parts()
        topics = await self.topics(parts)
        broker = Broker(self, parts, topics, f"broker-{next(self._names)}")
        await broker.scalable.start()
        return broker

    async def stop(self, broker: Broker) -> None:
        await broker.scalable.stop()
        await broker.topics.stop()
        await broker.parts.metadata.close()
