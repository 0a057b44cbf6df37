"""What is given back, what takes too long, and what limits it: nothing stops, nothing is lost."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.message import Message
from magnetar.client.nacks import RedeliveryDelay
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition
from magnetar.server.app import Server
from tests.client.stage import new_client, play
from tests.client.test_consuming import REGULAR, numbers, send, silence
from tests.client.test_producing_in_trouble import cut_links
from tests.server.scalable_stage import NAME, Stage

LARGE = bytes(range(256)) * (12 * 4096)
FIRST = InitialPosition.EARLIEST
LIMITED: dict[str, Any] = {"initial_position": FIRST, "queue_size": 10, "unacked_max": 20}


async def send_large(client: Client, topic: str) -> None:
    async with await client.producer(topic, chunking=True) as producer:
        await producer.send(LARGE, key="k")


async def backlog(stage: Stage, topic: str, subscription: str) -> int:
    """Entries that a subscription has not acknowledged."""

    async def count(server: Server) -> int:
        found = await server.topics.get(TopicName.parse(topic))
        return found.subscriptions[subscription].backlog()

    return await stage.host.ask(count)


@pytest.mark.parametrize("how", ["given back", "too slow"])
def test_what_is_not_kept_any_more_makes_room_below_the_limit(how: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME,
                "s",
                nack_delay=RedeliveryDelay(1.0),
                processing_timeout=0.0 if how == "given back" else 5.0,
                **LIMITED,
            )
            await send(client, 60, batching=False)
            found: list[Message[bytes]] = []
            while got := await consumer.receive_many(60, timeout=2.0):
                found += got
            assert 20 <= len(found) < 60, "the limit is reached"
            if how == "given back":
                for message in found:
                    consumer.nack(message)
            acked: list[Message[bytes]] = []
            while got := await consumer.receive_many(60, timeout=10.0):
                acked += got
                await consumer.ack_many(got)
            assert numbers(acked) == list(range(60))

    play(story)


def test_a_new_connection_is_not_asked_for_more_than_the_limit() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", **LIMITED)
            await send(client, 60, batching=False)
            found: list[Message[bytes]] = []
            for _ in range(5):
                while got := await consumer.receive_many(60, timeout=2.0):
                    found += got
                await cut_links(stage, Random(0))
            assert 20 <= len(found) < 40
            while len(found) < 60:
                await consumer.ack_many(found)
                found += await consumer.receive_many(50, timeout=5.0)
            assert numbers(found) == list(range(60))

    play(story)


@pytest.mark.parametrize("how", ["given back", "too slow"])
def test_a_large_message_comes_again_with_all_its_chunks(how: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                nack_delay=RedeliveryDelay(1.0),
                processing_timeout=0.0 if how == "given back" else 5.0,
            )
            await send_large(client, NAME)
            message = await consumer.receive(timeout=2.0)
            assert len(message.chunk_ids) > 2
            if how == "given back":
                consumer.nack(message)
            again = await consumer.receive(timeout=10.0)
            assert again.value == LARGE
            await consumer.ack(again)
            await silence(consumer, 20.0)

    play(story)


def test_a_cumulative_acknowledgement_covers_every_chunk() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            await send_large(client, REGULAR)
            await consumer.ack_cumulative(await consumer.receive(timeout=2.0))
            assert await backlog(stage, REGULAR, "s") == 0

    play(story)
