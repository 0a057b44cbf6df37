"""What messages can be, and where they can come from, as consumers get them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.message.message import Message
from magnetar.client.schema import STRING, AutoSchema, AvroSchema, JsonSchema
from magnetar.errors import TopicTerminated, UnreadableMessage
from magnetar.model.ids import EARLIEST
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.compression import Compression
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import REGULAR, drain, in_order, numbers, send, silence
from tests.integration.server.scalable_stage import NAME, Stage
from tests.unit.client.schema_records import First, Second

FIRST = InitialPosition.EARLIEST


@pytest.mark.parametrize("compression", list(Compression))
def test_compressed_batches_and_chunks(compression: Compression) -> None:
    large = b"".join(b"%d," % number for number in range(1_500_000))

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            stream = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            queue = await client.queue_consumer(NAME, "q", initial_position=FIRST)
            producer = await client.producer(NAME, compression=compression, chunking=True)
            for number in range(20):
                await producer.submit(b"%d" % number * 50, key="k")
            await producer.send(large, key="k", properties={"large": "yes"})
            await producer.send(b"after", key="k")
            for consumer in (stream, queue):
                found = await drain(consumer, 22)
                assert [message.value for message in found] == [
                    *(b"%d" % number * 50 for number in range(20)),
                    large,
                    b"after",
                ]
                assert found[20].properties == {"large": "yes"}
            await queue.ack_many(found)
            await queue.close()
            async with await client.queue_consumer(NAME, "q") as again:
                await silence(again)

    play(story)


def test_records_are_read_by_what_they_became() -> None:
    async def story(stage: Stage) -> None:
        for topic, made in (("json", JsonSchema), ("avro", AvroSchema)):
            async with new_client(stage) as client:
                name = f"topic://public/default/{topic}"
                old: Any = made(First)
                new: Any = made(Second)
                async with await client.producer(name, schema=old) as producer:
                    await producer.send(First(1, "x"), key="a")
                async with await client.producer(name, schema=new) as producer:
                    await producer.send(Second(2, "added"), key="b")
                consumer = await client.queue_consumer(
                    name, "s", schema=new, initial_position=FIRST
                )
                found = [await consumer.receive(timeout=5.0) for _ in range(2)]
                values = sorted((message.value for message in found), key=lambda each: each.id)
                assert values == [Second(1), Second(2, "added")]
                auto = await client.queue_consumer(
                    name, "t", schema=AutoSchema(), initial_position=FIRST
                )
                plain = [(await auto.receive(timeout=5.0)).value for _ in range(2)]
                assert sorted(plain, key=lambda each: each["id"]) == [
                    {"id": 1, "gone": "x"},
                    {"id": 2, "added": "added", "more": "default"},
                ]

    play(story)


def test_what_cannot_be_read_is_handed_out_and_can_be_acknowledged() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(
                REGULAR,
                "s",
                schema=STRING,
                initial_position=FIRST,
                subscription_type=SubscriptionType.SHARED,
            )
            driver = await stage.driver()
            await driver.request("PRODUCER", topic=REGULAR, producer_id=1, producer_name="raw")
            await driver.publish(1, 0, build_message(b"\xff\xff"))
            await driver.publish(
                1, 1, build_message(b"junk", sequence_id=1, num_messages_in_batch=3)
            )
            await driver.publish(1, 2, build_message(b"fine", sequence_id=2))
            found = [await consumer.receive(timeout=5.0) for _ in range(3)]
            for broken in found[:2]:
                with pytest.raises(UnreadableMessage):
                    _ = broken.value
            assert found[0].data == b"\xff\xff"
            assert found[2].value == "fine"
            await consumer.ack_many(found)
            await driver.close()
            await silence(consumer)  # type: ignore[arg-type]

    play(story)


def test_members_share_one_segment_by_entry_buckets() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumers = [
                await client.stream_consumer(NAME, "s", name=name, initial_position=FIRST)
                for name in ("a", "b")
            ]
            assert [consumer.segments for consumer in consumers] == [(0,), (0,)]
            async with await client.producer(NAME) as producer:
                for number in range(200):
                    await producer.submit(b"%d" % number, key=f"key-{number % 23}")
                await producer.flush()
            found: list[list[Message[bytes]]] = []
            for consumer in consumers:
                mine: list[Message[bytes]] = []
                while got := await consumer.receive_many(50, timeout=3.0):
                    mine += got
                    await consumer.ack_cumulative(got[-1])
                found.append(mine)
            assert all(found)
            assert numbers(found[0] + found[1]) == list(range(200))
            assert in_order(found[0])
            assert in_order(found[1])
            assert {each.key for each in found[0]}.isdisjoint(each.key for each in found[1])
            for consumer in consumers:
                await consumer.close()
            async with await client.stream_consumer(NAME, "s", name="a") as alone:
                await silence(alone)

    play(story)


def test_a_regular_topic_becomes_a_scalable_one_while_it_is_read() -> None:
    async def story(stage: Stage) -> None:
        regular = "persistent://public/default/orders"
        async with new_client(stage) as client:
            consumer = await client.consumer(
                regular, "s", subscription_type=SubscriptionType.SHARED, initial_position=FIRST
            )
            await send(client, 30, regular)
            await migrate(stage, regular)
            await send(client, 30, regular)
            found = await drain(consumer, 60, consumer.ack)
            assert numbers(found) == sorted([*range(30), *range(30)])
            await silence(consumer)

    play(story)


async def migrate(stage: Stage, topic: str) -> None:
    name = TopicName.parse(topic)
    await stage.ask(lambda scalable: scalable.migrate(name, force=False))


@pytest.mark.parametrize("partitions", [0, 3])
def test_streams_and_checkpoints_of_regular_topics(partitions: int) -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)
        if partitions:
            await stage.host.ask(lambda server: server.topics.create_partitioned(name, partitions))
        async with new_client(stage) as client:
            stream = await client.stream_consumer(REGULAR, "s", initial_position=FIRST)
            await send(client, 60, REGULAR)
            found = await drain(stream, 60, stream.ack_cumulative)
            assert numbers(found) == list(range(60))
            assert in_order(found)
            async with await client.checkpoint_consumer(REGULAR, start=FROM_EARLIEST) as reader:
                assert numbers(await drain(reader, 60)) == list(range(60))
            consumer = await client.consumer(REGULAR, "c", initial_position=FIRST)
            regular = await drain(consumer, 60, consumer.ack)
            assert len({message.topic for message in regular}) == max(1, partitions)
            assert in_order(regular)

    play(story)


@pytest.mark.parametrize("partitions", [0, 2])
def test_topics_that_are_not_persistent(partitions: int) -> None:
    async def story(stage: Stage) -> None:
        topic = "non-persistent://public/default/passing"
        name = TopicName.parse(topic)
        if partitions:
            await stage.host.ask(lambda server: server.topics.create_partitioned(name, partitions))
        async with new_client(stage) as client:
            consumer = await client.consumer(topic, "s")
            await send(client, 20, topic)
            found = await drain(consumer, 20, consumer.ack)
            assert numbers(found) == list(range(20))

    play(story)


def test_the_end_of_a_terminated_topic() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            reader = await client.reader(REGULAR, start=EARLIEST)
            await send(client, 5, REGULAR)
            found = await drain(consumer, 5)
            await drain(reader, 5)
            await terminate(stage, REGULAR)
            waiting = asyncio.ensure_future(consumer.receive(timeout=30.0))
            await asyncio.sleep(1)
            assert not waiting.done()
            await consumer.ack_cumulative(found[-1])
            with pytest.raises(TopicTerminated):
                await waiting
            assert [message async for message in consumer] == []

    play(story)


async def terminate(stage: Stage, topic: str) -> None:
    async def end(server: Server) -> None:
        await (await server.topics.get(TopicName.parse(topic))).terminate()

    await stage.host.ask(end)


def test_an_application_that_never_acknowledges_is_not_given_more_than_the_limit() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME, "s", initial_position=FIRST, queue_size=10, unacked_max=20
            )
            await send(client, 100, batching=False)
            found: list[Message[bytes]] = []
            while got := await consumer.receive_many(7, timeout=2.0):
                found += got
            assert 20 <= len(found) <= 40
            while len(found) < 100:
                await consumer.ack_many(found)
                found += await consumer.receive_many(50, timeout=2.0)
            assert numbers(found) == list(range(100))

    play(story)


def test_a_stream_that_is_never_acknowledged_keeps_no_memory_of_everything() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 2000)
            by_key: dict[str | None, int] = defaultdict(int)
            for _ in range(2000):
                message = await consumer.receive(timeout=5.0)
                by_key[message.key] += 1
            assert sum(by_key.values()) == 2000
            await consumer.ack_cumulative(message)
            await asyncio.sleep(1)
            assert len(message.id.to_bytes()) < 400

    play(story)
