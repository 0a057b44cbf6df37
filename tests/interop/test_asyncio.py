"""The asyncio API of the official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pulsar.asyncio as pulsar_asyncio  # type: ignore[import-untyped]
import pytest
from pulsar.schema import JsonSchema, Record, String  # type: ignore[import-untyped]

from harness.limits import PATIENCE_S
from tests.interop.flows import EARLIEST, numbered
from tests.interop.serving import ServerProcess

SECONDS = round(PATIENCE_S)
MANY = 50_000
TYPES = (
    pulsar.ConsumerType.Exclusive,
    pulsar.ConsumerType.Failover,
    pulsar.ConsumerType.Shared,
    pulsar.ConsumerType.KeyShared,
)


@asynccontextmanager
async def _connected(server: ServerProcess) -> AsyncIterator[Any]:
    client = pulsar_asyncio.Client(
        server.service_url,
        operation_timeout_seconds=SECONDS,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn),
    )
    try:
        yield client
    finally:
        await client.close()


def _run(server: ServerProcess, scenario: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        async with _connected(server) as client:
            await scenario(client)

    asyncio.run(main())


async def _receive(consumer: Any, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        async with asyncio.timeout(SECONDS):
            message = await consumer.receive()
        await consumer.acknowledge(message)
        found.append(message.data())
    return found


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_what_is_sent_is_received(server: ServerProcess, topic: str, kind: Any) -> None:
    async def scenario(client: Any) -> None:
        consumer = await client.subscribe(topic, "sub", kind)
        producer = await client.create_producer(topic)
        await asyncio.gather(*(producer.send(payload) for payload in numbered(100)))
        assert await _receive(consumer, 100) == numbered(100)
        await consumer.unsubscribe()
        await producer.close()

    _run(server, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_many_messages(server: ServerProcess, topic: str, batched: bool) -> None:
    """While they are sent they are received, in order."""
    count = MANY if batched else MANY // 5

    async def scenario(client: Any) -> None:
        consumer = await client.subscribe(topic, "sub", batch_index_ack_enabled=batched)
        producer = await client.create_producer(topic, batching_enabled=batched)

        async def send() -> None:
            for start in range(0, count, 1000):
                payloads = numbered(1000, start=start)
                await asyncio.gather(*(producer.send(payload) for payload in payloads))

        sending = asyncio.create_task(send())
        for start in range(0, count, 1000):
            messages = [await consumer.receive() for _ in range(1000)]
            assert [message.data() for message in messages] == numbered(1000, start=start)
            await consumer.acknowledge_cumulative(messages[-1])
        await sending
        await consumer.close()
        consumer = await client.subscribe(topic, "sub")
        await producer.send(b"last")
        assert await _receive(consumer, 1) == [b"last"]

    _run(server, scenario)


def test_seek_and_last_message_id(server: ServerProcess, topic: str) -> None:
    async def scenario(client: Any) -> None:
        producer = await client.create_producer(topic, batching_enabled=False)
        ids = [await producer.send(payload) for payload in numbered(10)]
        consumer = await client.subscribe(topic, "sub", initial_position=EARLIEST)
        assert await _receive(consumer, 10) == numbered(10)
        await consumer.seek(ids[3])
        assert await _receive(consumer, 6) == numbered(6, start=4)
        await consumer.seek(0)
        assert await _receive(consumer, 10) == numbered(10)
        last = await consumer.get_last_message_id()
        assert (last.ledger_id(), last.entry_id()) == (ids[9].ledger_id(), ids[9].entry_id())

    _run(server, scenario)


def test_readers(server: ServerProcess, topic: str) -> None:
    async def scenario(client: Any) -> None:
        producer = await client.create_producer(topic)
        for payload in numbered(5):
            await producer.send(payload)
        reader = await client.create_reader(topic, pulsar.MessageId.earliest)
        found = []
        while await reader.has_message_available():
            found.append((await reader.read_next()).data())
        assert found == numbered(5)
        await reader.seek(pulsar.MessageId.wrap(pulsar.MessageId.earliest))
        assert (await reader.read_next()).data() == b"message 0"
        await reader.close()

    _run(server, scenario)


def test_a_refused_message_comes_again(server: ServerProcess, topic: str) -> None:
    async def scenario(client: Any) -> None:
        consumer = await client.subscribe(
            topic, "sub", pulsar.ConsumerType.Shared, negative_ack_redelivery_delay_ms=100
        )
        producer = await client.create_producer(topic)
        await producer.send(b"again")
        counts = []
        for _ in range(3):
            message = await consumer.receive()
            counts.append(message.redelivery_count())
            await consumer.negative_acknowledge(message)
        assert counts == [0, 1, 2]

    _run(server, scenario)


class City(Record):  # type: ignore[misc]
    """Of a JSON schema."""

    name = String()


def test_partitions_patterns_and_schemas(server: ServerProcess, topic: str) -> None:
    server.admin("PUT", f"{topic.replace('://', '/')}/partitions", 3)

    async def scenario(client: Any) -> None:
        assert len(await client.get_topic_partitions(topic)) == 3
        schema = JsonSchema(City)
        consumer = await client.subscribe(
            topic.replace("patterns", "p[a]tterns"), "sub", schema=schema, is_pattern_topic=True
        )
        producer = await client.create_producer(topic, schema=schema)
        await asyncio.gather(*(producer.send(City(name=f"city {n}")) for n in range(9)))
        names = {(await consumer.receive()).value().name for _ in range(9)}
        assert names == {f"city {n}" for n in range(9)}

    _run(server, scenario)


def test_errors_come_as_exceptions(server: ServerProcess, topic: str) -> None:
    async def scenario(client: Any) -> None:
        consumer = await client.subscribe(topic, "sub")
        with pytest.raises(pulsar_asyncio.PulsarException) as refused:
            await client.subscribe(topic, "sub")
        assert refused.value.error() == pulsar.Result.ConsumerBusy
        exclusive = pulsar.ProducerAccessMode.Exclusive
        producer = await client.create_producer(topic, access_mode=exclusive)
        with pytest.raises(pulsar_asyncio.PulsarException) as fenced:
            await client.create_producer(topic, access_mode=exclusive)
        assert fenced.value.error() == pulsar.Result.ProducerFenced
        await producer.close()
        await consumer.close()

    _run(server, scenario)


def test_waiting_for_an_exclusive_producer(server: ServerProcess, topic: str) -> None:
    async def scenario(client: Any) -> None:
        wait = pulsar.ProducerAccessMode.WaitForExclusive
        first = await client.create_producer(topic, access_mode=wait)
        async with _connected(server) as other:
            waiting = asyncio.create_task(other.create_producer(topic, access_mode=wait))
            await first.send(b"first")
            assert not waiting.done()
            await first.close()
            async with asyncio.timeout(SECONDS):
                second = await waiting
            await second.send(b"second")

    _run(server, scenario)
