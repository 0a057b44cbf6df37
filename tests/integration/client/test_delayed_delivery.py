"""Delayed delivery with real brokers and our own client, on virtual time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from magnetar.broker.policy.stats import SubscriptionStats
from magnetar.broker.policy.values import DelayedDeliveryPolicies, RetentionPolicies
from magnetar.broker.topic.topic import Topic
from magnetar.client.consume.queue import QueueConsumer
from magnetar.errors import NotAllowed
from magnetar.model.names import NamespaceName, TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.server.app import Server
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import REGULAR, silence
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST


async def on_server(stage: Stage) -> SubscriptionStats:
    """The statistics of all loaded topics' subscriptions `s`, added up."""

    async def look(server: Server) -> list[SubscriptionStats]:
        loaded = [each for each in server.topics.loaded.values() if isinstance(each, Topic)]
        return [each.subscriptions["s"].stats() for each in loaded if "s" in each.subscriptions]

    found = await stage.host.ask(look)
    return SubscriptionStats(
        msg_backlog=sum(each.msg_backlog for each in found),
        msg_delayed=sum(each.msg_delayed for each in found),
    )


async def set_policy(stage: Stage, policy: DelayedDeliveryPolicies) -> None:
    namespace = NamespaceName("public", "default")
    await stage.host.ask(
        lambda server: server.topics.change_namespace(
            namespace,
            lambda found: msgspec.structs.replace(found, delayed_delivery_policies=policy),
        )
    )


async def received(consumer: QueueConsumer[bytes], seconds: float) -> bytes:
    message = await consumer.receive(timeout=seconds)
    consumer.ack(message)
    assert message.value is not None
    return message.value


def test_a_sealed_segment_is_served_until_its_last_message_is_due() -> None:
    """Consumers stay attached, later ones are attached, and it is pruned only afterwards."""

    async def story(stage: Stage) -> None:
        await stage.create(1)
        namespace, nothing = NamespaceName("public", "default"), RetentionPolicies(0, 0)
        await stage.host.ask(
            lambda server: server.topics.change_namespace(
                namespace, lambda found: msgspec.structs.replace(found, retention_policies=nothing)
            )
        )
        now = asyncio.get_running_loop().time
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            begun = now()
            await producer.send(b"600", key="a", deliver_after=600)
            await producer.send(b"1200", key="b", deliver_after=1200)
            await stage.split(0)
            await producer.send(b"now", key="a")
            assert await received(consumer, 5.0) == b"now"
            assert (await on_server(stage)).msg_delayed == 2
            await silence(consumer, 590.0 - (now() - begun))
            assert await received(consumer, 30.0) == b"600"
            assert 599 <= now() - begun < 602
            await consumer.close()
            other = await client.queue_consumer(NAME, "s")
            await silence(other, 590.0)
            assert set((await stage.layout()).segments) == {0, 1, 2}
            assert await received(other, 30.0) == b"1200"
            assert 1199 <= now() - begun < 1202
            await asyncio.sleep(400)
            assert set((await stage.layout()).segments) == {1, 2}
            await other.close()

    play(story, scalable_sealed_seconds=60.0)


def test_who_reads_in_order_has_a_delayed_message_at_once() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            stream = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await producer.send(b"late", key="a", deliver_after=600)
            assert (await stream.receive(timeout=5.0)).value == b"late"
            await stream.close()

    play(story)


def test_messages_wait_over_a_restart() -> None:
    async def story(stage: Stage) -> None:
        now = asyncio.get_running_loop().time
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            consumer = await client.consumer(
                REGULAR, "s", subscription_type=SubscriptionType.KEY_SHARED, initial_position=FIRST
            )
            begun = now()
            await producer.send(b"late", key="a", deliver_after=300)
            await producer.send(b"now", key="a")
            message = await consumer.receive(timeout=5.0)
            assert message.value == b"now"
            consumer.ack(message)
            await asyncio.sleep(2)
            await stage.host.kill()
            assert await stage.host.start()
            await silence(consumer, 280)
            assert (await on_server(stage)).msg_delayed == 1
            assert (await consumer.receive(timeout=30.0)).value == b"late"
            assert 299 <= now() - begun < 310
            await consumer.close()

    play(story, disk=True)


def test_a_delay_starts_to_matter_when_its_transaction_is_committed() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            txn, aborted = await client.transaction(), await client.transaction()
            await producer.send(b"soon", key="a", deliver_after=10, txn=txn)
            await producer.send(b"late", key="a", deliver_after=40, txn=txn)
            await producer.send(b"never", key="a", deliver_after=10, txn=aborted)
            await asyncio.sleep(20)
            assert (await on_server(stage)).msg_delayed == 0
            await aborted.abort()
            await txn.commit()
            assert await received(consumer, 2.0) == b"soon"
            assert (await on_server(stage)).msg_delayed == 1
            assert await received(consumer, 30.0) == b"late"
            await silence(consumer, 30.0)
            await consumer.close()

    play(story)


@pytest.mark.parametrize("in_txn", [False, True])
def test_a_message_that_is_too_late_is_refused_and_its_producer_goes_on(in_txn: bool) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            await producer.send(b"first")
            await set_policy(stage, DelayedDeliveryPolicies(True, 1000, 60_000))
            txn = await client.transaction() if in_txn else None
            with pytest.raises(NotAllowed) as refused:
                await producer.send(b"too late", deliver_after=61, txn=txn)
            assert "ms after it was published" in str(refused.value)
            if txn is not None:
                await txn.abort()
            await producer.send(b"late", deliver_after=60)
            await set_policy(stage, DelayedDeliveryPolicies(True))
            await producer.send(b"very late", deliver_after=10**6)
            await stage.host.ask(_backlog_free)

    play(story)


async def _backlog_free(server: Server) -> None:
    topic = await server.topics.get(TopicName.parse(REGULAR))
    assert isinstance(topic, Topic)
    assert topic.ledger.entries == 3


def test_a_policy_that_is_switched_off_lets_waiting_messages_go() -> None:
    """To our own client too, which keeps them until their time."""

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            shared = SubscriptionType.SHARED
            consumer = await client.consumer(
                REGULAR, "s", subscription_type=shared, initial_position=FIRST
            )
            await producer.send(b"late", deliver_after=60)
            await asyncio.sleep(1)
            assert (await on_server(stage)).msg_delayed == 1
            await set_policy(stage, DelayedDeliveryPolicies(False))
            await asyncio.sleep(1)
            assert (await on_server(stage)).msg_delayed == 0
            await silence(consumer, 50)
            assert (await consumer.receive(timeout=20.0)).value == b"late"
            await consumer.close()

    play(story)
