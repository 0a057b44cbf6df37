"""Non-persistent topics: messages go to who is there, nothing is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from magnetar.broker.api import AccessMode, ProducerRequest, SchemaData
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.nonpersistent_subscription import SENT_POSITION
from magnetar.broker.topic.nonpersistent import NonPersistentTopic
from magnetar.errors import (
    ConsumerBusy,
    NotAllowed,
    ProducerBusy,
    ProducerFenced,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import World, consumer, message, options, receipts

NAME = TopicName.parse("non-persistent://public/default/ticks")


def with_topic(scenario: Callable[[NonPersistentTopic], Awaitable[None]]) -> None:
    async def main() -> None:
        topic = NonPersistentTopic(NAME, World().parts(), TopicPolicies())
        await scenario(topic)
        await topic.close()

    run(main())


def test_a_message_goes_to_who_has_permits_and_is_answered_at_once() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        producer = await topic.add_producer(options())
        producer.send(message(1, "nobody is there"))
        subscription = await topic.subscription(consumer())
        reading = subscription.add_consumer(consumer())
        producer.send(message(2, "no permits"))
        reading.flow(1)
        for number in (3, 4):
            producer.send(message(number, "one permit"))
        found = await receipts(producer, 4)
        assert [each.sequence_id for each in found] == [1, 2, 3, 4]
        assert {each.position for each in found} == {SENT_POSITION}
        assert len(reading.take()) == 1
        stats = topic.stats()
        assert (stats.msg_in_counter, stats.msg_out_counter) == (4, 1)
        assert subscription.dropped == 2

    with_topic(scenario)


def test_each_subscription_gets_every_message() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        reading = []
        for name in ("a", "b"):
            subscription = await topic.subscription(consumer(name))
            reading.append(subscription.add_consumer(consumer(name)))
            reading[-1].flow(10)
        shared = await topic.subscription(consumer("c", SubscriptionType.SHARED))
        both = [
            shared.add_consumer(consumer("c", SubscriptionType.SHARED, consumer_id=n))
            for n in (1, 2)
        ]
        for each in both:
            each.flow(10)
        producer = await topic.add_producer(options())
        for number in range(10):
            producer.send(message(number))
        assert [len(each.take()) for each in reading] == [10, 10]
        assert sum(len(each.take()) for each in both) == 10

    with_topic(scenario)


def test_access_modes_hold_here_too() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        alone = await topic.add_producer(options(1, "a", mode=AccessMode.EXCLUSIVE))
        assert alone.topic_epoch == 0
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "b"))
        with pytest.raises(ProducerFenced):
            await topic.add_producer(options(2, "b", mode=AccessMode.EXCLUSIVE))
        await topic.remove_producer(alone)
        assert not topic.in_use

    with_topic(scenario)


def test_subscriptions_live_while_they_have_consumers() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        subscription = await topic.subscription(consumer())
        reading = subscription.add_consumer(consumer())
        with pytest.raises(ConsumerBusy):
            await topic.delete_subscription("s")
        await topic.release(subscription)
        assert "s" in topic.subscriptions
        subscription.remove_consumer(reading)
        await topic.release(subscription)
        assert not topic.subscriptions
        with pytest.raises(SubscriptionNotFound):
            await topic.delete_subscription("s")
        with pytest.raises(NotAllowed):
            await topic.create_subscription("s", EARLIEST)
        again = await topic.subscription(consumer())
        await topic.delete_subscription("s", by=again.add_consumer(consumer()))
        assert not topic.subscriptions

    with_topic(scenario)


def test_policies_and_schemas() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        made = await topic.add_producer(ProducerRequest(1, None, schema=SchemaData(4, b'"int"')))
        assert made.schema_version == bytes(8)
        await topic.apply(TopicPolicies(max_producers=1, max_consumers=1))
        with pytest.raises(ProducerBusy):
            await topic.add_producer(options(2, "b"))
        (await topic.subscription(consumer())).add_consumer(consumer())
        with pytest.raises(ConsumerBusy):
            await topic.subscription(consumer("t"))
        await topic.apply(TopicPolicies(max_subscriptions=1))
        with pytest.raises(NotAllowed):
            await topic.subscription(consumer("t"))
        await topic.apply(TopicPolicies(max_consumers_per_subscription=1, max_message_bytes=10))
        shared = consumer("t", SubscriptionType.SHARED)
        (await topic.subscription(shared)).add_consumer(shared)
        with pytest.raises(ConsumerBusy):
            (await topic.subscription(shared)).add_consumer(shared)
        made.send(message(1))
        (refused,) = await receipts(made, 1)
        assert isinstance(refused.error, NotAllowed)
        assert await topic.trim() == []

    with_topic(scenario)


def test_the_end() -> None:
    async def scenario(topic: NonPersistentTopic) -> None:
        with pytest.raises(NotAllowed):
            await topic.last_message()
        producer = await topic.add_producer(options())
        reading = (await topic.subscription(consumer())).add_consumer(consumer())
        with pytest.raises(NotAllowed):
            await topic.delete()
        await topic.terminate()
        assert topic.terminated
        assert isinstance(producer.failure, TopicTerminated)
        with pytest.raises(TopicTerminated):
            await topic.add_producer(options(2, "b"))
        await topic.delete(force=True)
        assert isinstance(reading.error, TopicNotFound)
        with pytest.raises(ServiceNotReady):
            await topic.add_producer(options())
        with pytest.raises(ServiceNotReady):
            await topic.subscription(consumer())

    with_topic(scenario)
