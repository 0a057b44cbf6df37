"""Rates as the client meets them, on virtual time: what it shows and says, and what comes when."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from magnetar import InitialPosition
from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import DispatchRate, PublishRate
from magnetar.client.client import Client
from magnetar.errors import ProducerQueueFull, SendTimedOut
from tests.integration.client.stage import new_client, play, stored
from tests.integration.server.scalable_stage import NAME, Stage

REGULAR = "persistent://public/default/regular"
OTHER = "persistent://public/default/other"


async def hold(stage: Stage, **policies: Any) -> None:
    """Of the namespace, so of segments too."""

    def change(old: Policies) -> Policies:
        return msgspec.structs.replace(old, **policies)

    await stage.host.ask(lambda server: server.context.topics.change_namespace(DEFAULT, change))


def now() -> float:
    return asyncio.get_running_loop().time()


def throttled_connections(client: Client) -> float:
    found = {each.name: each.samples for each in client.metrics.collect()}
    return found["magnetar_client_throttled_connections"][0].value


@pytest.mark.parametrize("topic", [REGULAR, NAME])
def test_a_burst_takes_its_time_and_the_producer_says_why(topic: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await hold(stage, publish_rate=PublishRate(10))
        async with new_client(stage) as client:
            producer = await client.producer(topic, batching=False)
            assert producer.throttled is None
            assert throttled_connections(client) == 0
            began = now()
            receipts = [await producer.submit(b"%d" % number) for number in range(100)]
            await asyncio.sleep(2)
            named = topic if topic == REGULAR else topic.replace("topic:", "segment:")
            assert producer.throttled is not None
            assert producer.throttled.startswith(f"publishRate of 10 messages/s on {named}")
            assert throttled_connections(client) == 1
            await asyncio.gather(*receipts)
            assert 8.9 < now() - began < 9.5
            await asyncio.sleep(1)
            assert producer.throttled is None
            assert throttled_connections(client) == 0
            payloads = [each.payload for each in await stored(stage, topic)]
            assert payloads == [b"%d" % number for number in range(100)]

    play(story)


def test_producers_of_the_same_connection_wait_too_and_say_so() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client, new_client(stage) as free:
            limited = await client.producer(REGULAR, batching=False)
            beside = await client.producer(OTHER)
            alone = await free.producer(OTHER)
            change = PublishRate(1)
            await hold(stage, publish_rate=change)
            receipts = [await limited.submit(b"x") for _ in range(10)]
            await asyncio.sleep(0.5)
            began = now()
            await alone.send(b"x")
            assert now() - began < 0.1
            await beside.submit(b"x")
            await asyncio.sleep(0.1)
            assert beside.throttled == limited.throttled
            assert alone.throttled is None
            await hold(stage, publish_rate=None)
            await asyncio.gather(*receipts)
            await beside.flush()
            assert now() - began < 1
            await asyncio.sleep(0.1)
            assert limited.throttled is None

    play(story)


def test_a_send_that_is_too_late_names_the_rate() -> None:
    async def story(stage: Stage) -> None:
        await hold(stage, publish_rate=PublishRate(-1, 100))
        async with new_client(stage) as client:
            producer = await client.producer(REGULAR, send_timeout=5, max_pending=2, batching=False)
            await producer.send(bytes(10_000))
            receipts = [await producer.submit(b"late") for _ in range(2)]
            said = f"throttled by publishRate of 100 bytes/s on {REGULAR}"
            with pytest.raises(ProducerQueueFull, match=f"no room .* within 5 s: {said}"):
                await producer.send(b"more")
            for each in receipts:
                with pytest.raises(SendTimedOut, match=f"no receipt within 5 s: {said}"):
                    await each
            await hold(stage, publish_rate=None)
            # Once it is over, errors are about something else.
            await producer.send(b"again")
            await asyncio.sleep(60)
            await stage.host.kill()
            with pytest.raises(SendTimedOut) as caught:
                await producer.send(b"lost")
            assert "throttled" not in str(caught.value)
            assert await stage.host.start()

    play(story, disk=True)


def test_a_connection_that_waits_for_minutes_is_kept() -> None:
    async def story(stage: Stage) -> None:
        await hold(stage, publish_rate=PublishRate(-1, 100))
        async with new_client(stage) as client:
            producer = await client.producer(REGULAR, send_timeout=0, batching=False)
            began = now()
            await producer.send(bytes(100_000))
            await producer.send(b"later")
            assert 990 < now() - began < 1010
            assert client.metrics.reconnects == 0

    play(story)


@pytest.mark.parametrize("topic", [REGULAR, NAME])
def test_consumers_get_a_backlog_at_its_rate(topic: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with await client.producer(topic, batching=False) as producer:
                for number in range(50):
                    await producer.submit(b"%d" % number)
            await hold(stage, subscription_dispatch_rate=DispatchRate(10))
            earliest = InitialPosition.EARLIEST
            consumer = await client.queue_consumer(topic, "s", initial_position=earliest)
            began, got = now(), []
            for _ in range(50):
                message = await consumer.receive()
                got.append(message.value)
                await consumer.ack(message)
            assert 3.9 < now() - began < 4.5
            assert got == [b"%d" % number for number in range(50)]

    play(story)
