"""This client and the official one read what the other sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from magnetar.client.client import Client
from magnetar.client.message.message import MessageId
from magnetar.client.schema import AvroSchema, JsonSchema
from magnetar.model.ids import EARLIEST
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.compression import Compression
from tests.interop.serving import ServerProcess
from tests.unit.client.schema_records import First

pytestmark = pytest.mark.slow  # a server of its own, and the native client

FIRST = InitialPosition.EARLIEST
OFFICIAL = {
    Compression.NONE: pulsar.CompressionType.NONE,
    Compression.LZ4: pulsar.CompressionType.LZ4,
    Compression.ZLIB: pulsar.CompressionType.ZLib,
    Compression.ZSTD: pulsar.CompressionType.ZSTD,
    Compression.SNAPPY: pulsar.CompressionType.SNAPPY,
}


class OfficialFirst(pulsar.schema.Record):  # type: ignore[misc]
    id = pulsar.schema.Long(required=True)
    gone = pulsar.schema.String(default="x", required=True)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The official client keeps its native loops: see tests/interop/conftest.py."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(Path(tmp_path_factory.mktemp("interop")))
    process.start()
    yield process
    process.stop()


@pytest.fixture
def official(server: ServerProcess) -> Iterator[Any]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn)
    client = pulsar.Client(server.service_url, logger=logger)
    yield client
    client.close()


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("batching", [False, True])
def test_payloads_go_both_ways(
    server: ServerProcess, official: Any, compression: Compression, batching: bool
) -> None:
    topic = f"persistent://public/default/both-{compression.name}-{batching}"
    payloads = [b"%d " % number * 200 for number in range(50)]
    large = bytes(range(256)) * 30_000

    async def ours() -> list[Any]:
        async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
            consumer = await client.consumer(topic, "ours", initial_position=FIRST)
            async with await client.producer(
                topic, compression=compression, batching=batching, chunking=not batching
            ) as producer:
                for payload in payloads:
                    await producer.submit(payload, key="k", properties={"a": "b"})
                await producer.flush()
                if not batching:
                    await producer.send(large)
            await asyncio.to_thread(send_official)
            count = 2 * len(payloads) + (0 if batching else 1)
            found = [await consumer.receive(timeout=PATIENCE_S) for _ in range(count)]
            await consumer.ack_cumulative(found[-1])
            return found

    def send_official() -> None:
        producer = official.create_producer(
            topic, compression_type=OFFICIAL[compression], batching_enabled=batching
        )
        for payload in payloads:
            producer.send_async(payload, None, partition_key="k", properties={"a": "b"})
        producer.flush()
        producer.close()

    found = asyncio.run(ours())
    middle = [] if batching else [large]
    assert [message.value for message in found] == [*payloads, *middle, *payloads]
    small = [message for message in found if message.value != large]
    assert {message.key for message in small} == {"k"}
    assert all(message.properties == {"a": "b"} for message in small)
    theirs = official.subscribe(topic, "theirs", initial_position=pulsar.InitialPosition.Earliest)
    for message in found:
        got = theirs.receive(20_000)
        assert got.data() == message.value
        mine = message.id
        assert isinstance(mine, MessageId)
        restored = MessageId.from_bytes(got.message_id().serialize())
        assert restored.position == mine.position
        assert restored.batch_index == mine.batch_index
        assert pulsar.MessageId.deserialize(mine.to_bytes()).entry_id() == mine.entry_id


@pytest.mark.parametrize("kind", ["json", "avro"])
def test_records_go_both_ways(server: ServerProcess, official: Any, kind: str) -> None:
    topic = f"persistent://public/default/records-{kind}"
    made: Any = JsonSchema(First) if kind == "json" else AvroSchema(First)
    theirs = pulsar.schema.JsonSchema if kind == "json" else pulsar.schema.AvroSchema
    producer = official.create_producer(topic, schema=theirs(OfficialFirst))
    producer.send(OfficialFirst(id=7, gone="there"))

    async def ours() -> First:
        async with Client(server.service_url, operation_timeout=PATIENCE_S) as client:
            reader = await client.reader(topic, schema=made, start=EARLIEST)
            found: First = (await reader.receive(timeout=PATIENCE_S)).value
            async with await client.producer(topic, schema=made) as sending:
                await sending.send(First(8, "here"))
            return found

    assert asyncio.run(ours()) == First(7, "there")
    reader = official.create_reader(topic, pulsar.MessageId.earliest, schema=theirs(OfficialFirst))
    read = [reader.read_next(20_000).value() for _ in range(2)]
    assert [(each.id, each.gone) for each in read] == [(7, "there"), (8, "here")]
