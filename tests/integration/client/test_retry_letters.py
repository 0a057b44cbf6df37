"""Messages that are put off, and come again from a topic of their own."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.segment.settings import DeadLetterPolicy
from magnetar.errors import InvalidSetting, InvalidValue, NotAllowed
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import REGULAR, send, silence
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
TWICE = DeadLetterPolicy(max_redeliveries=2)


async def consumer_of(client: Client, topic: str) -> QueueConsumer[bytes]:
    if topic == NAME:
        return await client.queue_consumer(
            NAME, "s", initial_position=FIRST, retries=True, dead_letter=TWICE
        )
    return await client.consumer(
        topic,
        "s",
        subscription_type=SubscriptionType.SHARED,
        initial_position=FIRST,
        retries=True,
        dead_letter=TWICE,
    )


@pytest.mark.parametrize("topic", [NAME, REGULAR])
def test_a_message_is_put_off_again_and_again_and_then_a_dead_letter(topic: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        now = asyncio.get_running_loop().time
        async with new_client(stage) as client:
            middle = "" if topic == NAME else "-s"
            consumer = await consumer_of(client, topic)
            assert consumer.topics == (topic, f"{topic}{middle}-RETRY")
            dead = await client.queue_consumer(f"{topic}{middle}-DLQ", "d", initial_position=FIRST)
            await send(client, 1, topic)
            message = await consumer.receive(timeout=5.0)
            origin = message._raw_id
            for times, delay in ((1, 10.0), (2, timedelta(seconds=10))):
                begun = now()
                await consumer.reconsume_later(message, delay=delay, properties={"why": "busy"})
                await consumer.reconsume_later(message, delay=delay)
                message = await consumer.receive(timeout=30.0)
                assert 9.0 <= now() - begun < 15.0
                assert (message.value, message.key) == (b"0", "k0")
                assert message.properties["RECONSUMETIMES"] == str(times)
                assert message.properties["DELAY_TIME"] == "10000"
                assert message.properties["why"] == "busy"
            await consumer.reconsume_later(message, delay=10)
            letter = await dead.receive(timeout=30.0)
            assert letter.value == b"0"
            assert letter.properties["REAL_TOPIC"] == topic
            assert (
                f"{origin.ledger_id}:{origin.entry_id}:" in letter.properties["ORIGIN_MESSAGE_ID"]
            )
            await silence(consumer, 30.0)
            await consumer.close()
            async with await consumer_of(client, topic) as again:
                await silence(again)

    play(story)


def test_what_is_put_off_waits_though_nobody_consumes() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await consumer_of(client, NAME)
            await send(client, 1)
            await consumer.reconsume_later(await consumer.receive(timeout=5.0), delay=60)
            await consumer.close()
            async with await consumer_of(client, NAME) as again:
                assert (await again.receive(timeout=100.0)).value == b"0"

    play(story)


def test_who_cannot_put_off_is_told_so() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            with pytest.raises(InvalidSetting, match="dead_letter policy"):
                await client.queue_consumer(NAME, "s", retries=True)
            with pytest.raises(InvalidSetting, match="retry_topic"):
                await client.queue_consumer(
                    [NAME, f"{NAME}2"], "s", retries=True, dead_letter=TWICE
                )
            with pytest.raises(InvalidSetting, match="no retries"):
                await client.consumer(REGULAR, "s", retries=True, dead_letter=TWICE)
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 1)
            message = await consumer.receive(timeout=5.0)
            with pytest.raises(NotAllowed, match="nowhere"):
                await consumer.reconsume_later(message, delay=1)
            other = await consumer_of(client, NAME)
            with pytest.raises(InvalidValue, match="not received"):
                await other.reconsume_later(message, delay=1)

    play(story)
