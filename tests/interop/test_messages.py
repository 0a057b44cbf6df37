"""What a message can be: batched, chunked, compressed, large, with keys and properties."""

from __future__ import annotations

import random
import time
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    numbered,
    payloads_of,
    publish,
    receive,
    receive_data,
    send_all,
)

MEGABYTE = 1024 * 1024
COMPRESSIONS = tuple(
    getattr(pulsar.CompressionType, name) for name in ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
)


def test_a_batch_is_one_entry_with_many_messages(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    ids = publish(
        client,
        topic,
        numbered(100),
        batching_enabled=True,
        batching_max_messages=25,
        batching_max_publish_delay_ms=1000,
    )
    assert len({(each.ledger_id(), each.entry_id()) for each in ids}) == 4
    assert [each.batch_index() for each in ids] == [*range(25)] * 4
    messages = receive(consumer, 100, ack=True)
    assert payloads_of(messages) == numbered(100)
    assert [message.message_id() for message in messages] == ids


def test_batches_by_key_keep_each_key_together(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.KeyShared)
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_type=pulsar.BatchingType.KeyBased,
        batching_max_publish_delay_ms=1000,
    )
    for number in range(40):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"key {number % 4}")
    producer.flush()
    by_key: dict[str, list[int]] = {}
    for message in receive(consumer, 40, ack=True):
        by_key.setdefault(message.partition_key(), []).append(int(message.data()))
    assert by_key == {f"key {key}": [*range(key, 40, 4)] for key in range(4)}


def test_what_goes_with_a_message_arrives(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, producer_name="a producer")
    before_ms = int(time.time() * 1000)
    message_id = producer.send(
        b"payload",
        properties={"colour": "grün", "": "empty"},
        partition_key="key",
        ordering_key="order",
        event_timestamp=1234,
    )
    message = consumer.receive(RECEIVE_MS)
    assert message.data() == b"payload"
    assert message.properties() == {"colour": "grün", "": "empty"}
    assert message.partition_key() == "key"
    assert message.ordering_key() == "order"
    assert message.event_timestamp() == 1234
    assert before_ms <= message.publish_timestamp() <= int(time.time() * 1000)
    assert message.producer_name() == "a producer"
    assert message.topic_name() == topic
    assert message.redelivery_count() == 0
    assert message.message_id() == message_id


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_every_compression(client: Any, topic: str, compression: Any, batched: bool) -> None:
    consumer = client.subscribe(topic, "sub")
    payloads = [bytes([number]) * 10_000 for number in range(20)]
    publish(client, topic, payloads, compression_type=compression, batching_enabled=batched)
    assert receive_data(consumer, 20) == payloads


def test_an_empty_message(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    publish(client, topic, [b""])
    assert receive_data(consumer, 1) == [b""]


@pytest.mark.slow
def test_a_message_of_20_megabytes_goes_in_chunks(client: Any, topic: str) -> None:
    payload = random.Random(4).randbytes(20 * MEGABYTE)
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, chunking_enabled=True)
    producer.send(payload)
    producer.send(b"small")
    messages = receive(consumer, 2, ack=True)
    assert payloads_of(messages) == [payload, b"small"]
    consumer.close()
    consumer = client.subscribe(topic, "again", initial_position=EARLIEST)
    consumer.seek(messages[0].message_id())
    consumer.close()
    reader = client.create_reader(topic, messages[0].message_id(), start_message_id_inclusive=True)
    assert reader.read_next(RECEIVE_MS).data() == payload
    assert reader.read_next(RECEIVE_MS).data() == b"small"


def test_chunks_of_two_producers_may_mix(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.Shared)
    payloads = [bytes([number]) * (6 * MEGABYTE) for number in range(2)]
    producers = [client.create_producer(topic, chunking_enabled=True) for _ in payloads]
    for producer, payload in zip(producers, payloads, strict=True):
        producer.send_async(payload, lambda *_: None)
    for producer in producers:
        producer.flush()
    assert sorted(receive_data(consumer, 2)) == payloads


def test_a_message_that_is_too_large_is_refused(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic)
    largest = b"x" * (5 * MEGABYTE - 1024)
    with pytest.raises(pulsar.MessageTooBig):
        producer.send(b"x" * (5 * MEGABYTE + 1))
    send_all(producer, [largest, b"next"])
    assert receive_data(consumer, 2) == [largest, b"next"]
