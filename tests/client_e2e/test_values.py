"""What messages hold: schemas and columns; and the blocking client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from magnetar import EARLIEST, INT32, STRING, AutoSchema, AvroSchema, JsonSchema, Schema, blocking
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.errors import IncompatibleSchema
from tests.client_e2e.scene import CHANGES, COMES_S, FIRST, KINDS, Scene, drain, play
from tests.client_e2e.target import Target

LoopThread().stop()  # the first loop of a process opens a pipe for signals that stays


@dataclass
class Order:
    number: int
    note: str = "none"


@dataclass
class LaterOrder:
    number: int
    note: str = "none"
    customer: str = "nobody"


@dataclass
class OtherOrder:
    number: str


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("schema", "later_schema"),
    [
        pytest.param(JsonSchema(Order), JsonSchema(LaterOrder), id="json"),
        pytest.param(AvroSchema(Order), AvroSchema(LaterOrder), id="avro"),
    ],
)
def test_records(
    target: Target, kind: str, schema: Schema[Order], later_schema: Schema[LaterOrder]
) -> None:
    """V5SchemaEvolutionTest: one schema for all segments, and a later version of it."""

    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(
            topic, "s", schema=later_schema, initial_position=FIRST
        )
        async with await scene.client.producer(topic, schema=schema) as producer:
            await producer.send(Order(1, "first"))
        async with await scene.client.producer(topic, schema=later_schema) as producer:
            await producer.send(LaterOrder(2, "second", "somebody"))
        found = await drain(consumer, 2, consumer.ack)
        assert sorted((each.value for each in found), key=lambda order: order.number) == [
            LaterOrder(1, "first", "nobody"),
            LaterOrder(2, "second", "somebody"),
        ]
        assert len({each.schema_version for each in found}) == 2

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_single_values_and_whatever_there_is(target: Target, kind: str) -> None:
    async def story(scene: Scene) -> None:
        numbers, texts = [await scene.topic(kind) for _ in range(2)]
        async with await scene.client.producer(numbers, schema=INT32) as producer:
            await producer.send(-7)
        async with await scene.client.producer(texts, schema=STRING) as producer:
            await producer.send("grüße")
        for topic, value in ((numbers, -7), (texts, "grüße")):
            async with await scene.client.queue_consumer(
                topic, "s", schema=AutoSchema(), initial_position=FIRST
            ) as consumer:
                assert (await consumer.receive(timeout=COMES_S)).value == value

    play(target, story)


@CHANGES
def test_a_schema_that_does_not_go_with_the_topic_is_refused_after_a_split(target: Target) -> None:
    """V5SchemaEvolutionTest.testIncompatibleSchemaAfterSplitFails, testSingleSchemaIdAcross..."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)
        async with await scene.client.producer(topic, schema=AvroSchema(Order)) as producer:
            await producer.send(Order(1))
            await scene.split(topic, 0)
            await asyncio.gather(*(producer.send(Order(n), key=f"k{n}") for n in range(2, 10)))
            with pytest.raises(IncompatibleSchema):
                await scene.client.producer(topic, schema=STRING)
        consumer = await scene.client.queue_consumer(
            topic, "s", schema=AvroSchema(Order), initial_position=FIRST
        )
        found = await drain(consumer, 9, consumer.ack)
        assert sorted(each.value.number for each in found) == list(range(1, 10))
        assert len({each.schema_version for each in found}) == 1

    play(target, story)


@CHANGES
@pytest.mark.parametrize("schema_of", [AvroSchema, JsonSchema])
def test_versions_and_rules_go_on_over_a_split_and_a_merge(
    target: Target, schema_of: Callable[[type], Any]
) -> None:
    """What a segment got counts in its children, and in the one that they become."""

    async def story(scene: Scene) -> None:
        topic = await scene.scalable(1)

        async def publish(number: int, of: type) -> None:
            async with await scene.client.producer(topic, schema=schema_of(of)) as producer:
                await producer.send(of(number), key=f"k{number}")

        async def refused() -> None:
            with pytest.raises(IncompatibleSchema):
                await publish(9, OtherOrder)

        await publish(1, Order)
        await refused()
        await scene.split(topic, 0)
        await refused()
        await publish(2, LaterOrder)
        await publish(3, Order)
        await scene.merge(topic, 1, 2)
        await refused()
        await publish(4, Order)
        await publish(5, LaterOrder)
        consumer = await scene.client.queue_consumer(
            topic, "s", schema=schema_of(LaterOrder), initial_position=FIRST
        )
        found = {each.value.number: each for each in await drain(consumer, 5, consumer.ack)}
        versions = [found[number].schema_version for number in range(1, 6)]
        assert versions == [versions[0], versions[1], versions[0], versions[0], versions[1]]
        assert versions[0] != versions[1]

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_there_and_back(target: Target, kind: str) -> None:
    async def story(scene: Scene) -> None:
        topic = await scene.topic(kind)
        consumer = await scene.client.queue_consumer(topic, "s", initial_position=FIRST)
        batch = pa.RecordBatch.from_pydict(
            {
                "key": [f"k{number % 10}" for number in range(200)],
                "value": [b"%d" % number for number in range(200)],
            }
        )
        async with await scene.client.producer(topic) as producer:
            assert await producer.send_arrow(batch) == 200
        got: list[bytes] = []
        while len(got) < 200:
            rows = await consumer.receive_arrow(max_rows=150, timeout=COMES_S)
            assert rows.num_rows, f"only {len(got)} came"
            got += rows.column("value").to_pylist()
            await consumer.ack_arrow(rows)
        assert sorted(map(int, got)) == list(range(200))
        await consumer.close()
        async with await scene.client.queue_consumer(topic, "s") as again:
            assert (await again.receive_arrow(timeout=1.0)).num_rows == 0

    play(target, story)


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocking_client(target: Target, kind: str) -> None:
    topics: list[str] = []

    async def story(scene: Scene) -> None:
        topics.append(await scene.topic(kind))

    play(target, story)
    (topic,) = topics
    with blocking.Client(target.service_url, auth=target.token) as client:
        with client.producer(topic) as producer:
            for number in range(10):
                producer.send(b"%d" % number, key="k")
        with client.queue_consumer(topic, "s", initial_position=FIRST) as consumer:
            for number in range(10):
                message = consumer.receive(timeout=COMES_S)
                assert message.value == b"%d" % number
                consumer.ack(message).wait()
        if kind == "persistent":
            with client.reader(topic, start=EARLIEST) as reader:
                assert reader.receive(timeout=COMES_S).value == b"0"
