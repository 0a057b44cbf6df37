"""What time does to a scalable topic: messages, subscriptions, and the topic itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import InactiveTopicPolicies
from magnetar.broker.topic.maintenance import CARE_SECONDS
from magnetar.broker.topic.topic import Topic
from magnetar.errors import TopicNotFound
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import SubscriptionRecord
from magnetar.testing.virtual.virtual_time import run
from magnetar.wire.messages import Send
from tests.unit.broker.world import entry, message, options, receipts
from tests.unit.scalable.world import TOPIC, Broker, ScalableWorld

REGULAR = TopicName.parse("persistent://public/default/orders")
MINUTE = 60.0
LIMITS = Limits()
LOOK = LIMITS.expiry_check_seconds + CARE_SECONDS


def on_a_broker(scenario: Callable[[ScalableWorld, Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        world = ScalableWorld()
        broker = await world.broker()
        await scenario(world, broker)
        await world.stop(broker)

    run(main())


async def set_policies(broker: Broker, **given: Any) -> None:
    def changed(held: Policies) -> Policies:
        return msgspec.structs.replace(held, **given)

    await broker.topics.change_namespace(TOPIC.namespace, changed)


async def publish(world: ScalableWorld, broker: Broker, number: int, count: int) -> None:
    producer = await broker.producer(number, f"p{number}")
    for sequence in range(count):
        data = entry(sequence, publish_time=world.clock.now_ms())
        producer.send(Send(1, sequence, 1, data))
    await receipts(producer, count)
    await (await broker.segment(number)).remove_producer(producer)


async def names(broker: Broker) -> list[str]:
    """Of the subscriptions of the topic, once what is under way is done."""
    await asyncio.sleep(1)
    return [each.name for each in await broker.scalable.store.all(TOPIC, "sub", SubscriptionRecord)]


# --- messages


def test_messages_expire_in_sealed_segments_too_which_go_then() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await publish(world, broker, 0, 3)
        await broker.scalable.split(TOPIC, 0)
        await asyncio.sleep(LOOK)
        await publish(world, broker, 1, 3)
        sealed, active = await broker.segment(0), await broker.segment(1)
        await set_policies(broker, message_ttl_in_seconds=round(LOOK))
        await asyncio.sleep(LOOK - 30)
        assert sealed.subscriptions["s"].backlog() == 0
        assert active.subscriptions["s"].backlog() == 3
        await asyncio.sleep(LOOK)
        assert active.subscriptions["s"].backlog() == 0
        await asyncio.sleep(LIMITS.scalable_sealed_seconds + 2 * MINUTE)
        assert 0 not in (await broker.scalable.lookup(TOPIC, create=False)).layout.segments

    on_a_broker(scenario)


# --- subscriptions


def test_a_subscription_expires_as_a_whole_once_nobody_was_at_any_segment_for_so_long() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        for name in ("unused", "used", "__compaction"):
            await broker.scalable.create_subscription(TOPIC, name, "QUEUE")
        await broker.scalable.split(TOPIC, 0)
        # One consumer on one of three segments keeps it on all of them.
        found, consumer = await broker.subscribe(2, "used")
        await set_policies(broker, subscription_expiration_time_minutes=30)
        await asyncio.sleep(25 * MINUTE)
        assert await names(broker) == ["__compaction", "unused", "used"]
        await asyncio.sleep(10 * MINUTE)
        assert await names(broker) == ["__compaction", "used"]
        for number in range(3):
            segment = await broker.segment(number)
            assert sorted(segment.subscriptions) == ["__compaction", "used"]
        # Time counts from when the last one left.
        found.remove_consumer(consumer)
        await asyncio.sleep(25 * MINUTE)
        assert await names(broker) == ["__compaction", "used"]
        await asyncio.sleep(10 * MINUTE)
        assert await names(broker) == ["__compaction"]

    on_a_broker(scenario)


def test_who_comes_and_goes_between_two_looks_counts() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "QUEUE")
        await set_policies(broker, subscription_expiration_time_minutes=10)
        for _ in range(6):
            await asyncio.sleep(7 * MINUTE)
            found, consumer = await broker.subscribe(0)
            found.remove_consumer(consumer)
        assert await names(broker) == ["s"]
        await asyncio.sleep(12 * MINUTE)
        assert await names(broker) == []

    on_a_broker(scenario)


def test_members_of_a_group_keep_their_subscription() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.scalable.create(TOPIC)
        await broker.scalable.create_subscription(TOPIC, "s", "STREAM")
        session = await broker.scalable.sessions.attach(TOPIC, "s", "a", "STREAM", "1", False)
        await set_policies(broker, subscription_expiration_time_minutes=1)
        await asyncio.sleep(20 * MINUTE)
        assert await names(broker) == ["s"]
        await session.leave()
        await asyncio.sleep(5 * MINUTE)
        assert await names(broker) == []

    on_a_broker(scenario)


# --- the topic itself


@pytest.mark.parametrize(
    "mode", ["delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"]
)
def test_a_topic_that_nobody_uses_stays_with_all_its_segments(mode: Any) -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await set_policies(broker, inactive_topic_policies=InactiveTopicPolicies(mode, 1, True))
        await broker.scalable.create(TOPIC, 2)
        await broker.publish(0)
        await broker.segment(1)
        await asyncio.sleep(10 * MINUTE)
        assert len((await broker.scalable.lookup(TOPIC, create=False)).layout.segments) == 2
        assert len(await broker.topics.segment_names(TOPIC)) == 2

    on_a_broker(scenario)


def test_a_migrated_partition_is_a_segment_in_all_of_this() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        await broker.topics.create_partitioned(REGULAR, 2)
        partitions = [REGULAR.with_partition(number) for number in range(2)]
        for name in partitions:
            topic = await broker.topics.get(name)
            assert isinstance(topic, Topic)
            await topic.create_subscription("s", EARLIEST)
            producer = await topic.add_producer(options())
            producer.send(message(0))
            await receipts(producer, 1)
            await topic.remove_producer(producer)
        await broker.scalable.migrate(REGULAR)
        await asyncio.sleep(LOOK)
        caught_up = InactiveTopicPolicies("delete_when_subscriptions_caught_up", 1, True)
        await set_policies(
            broker, inactive_topic_policies=caught_up, subscription_expiration_time_minutes=20
        )
        # A consumer at a new segment keeps the subscription on the old partitions.
        _, consumer = await broker.subscribe(2)
        topics = [await broker.topics.get(name) for name in partitions]
        for topic in topics:
            assert isinstance(topic, Topic)
            topic.subscriptions["s"].skip_all()
        await asyncio.sleep(40 * MINUTE)
        for name in partitions:
            topic = await broker.topics.get(name, create=False)
            assert isinstance(topic, Topic)
            assert sorted(topic.subscriptions) == ["s"]
            assert topic.ledger.entries == 1
        assert consumer.options.subscription == "s"

    on_a_broker(scenario)


def test_a_regular_topic_that_was_terminated_goes_as_ever() -> None:
    async def scenario(world: ScalableWorld, broker: Broker) -> None:
        topic = await broker.topics.get(REGULAR)
        assert isinstance(topic, Topic)
        await topic.terminate()
        await set_policies(
            broker,
            inactive_topic_policies=InactiveTopicPolicies("delete_when_no_subscriptions", 1, True),
        )
        await asyncio.sleep(5 * MINUTE)
        with pytest.raises(TopicNotFound):
            await broker.topics.get(REGULAR, create=False)

    on_a_broker(scenario)
