"""Kinds of topics: partitioned, by pattern, non-persistent, with odd names, missing, terminated."""

from __future__ import annotations

import re
from typing import Any

import _pulsar  # type: ignore[import-not-found]
import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    assert_nothing_more,
    numbered,
    payloads_of,
    publish,
    read_data,
    receive,
    receive_data,
    send_all,
)
from tests.interop.serving import ServerProcess

SHARED = pulsar.ConsumerType.Shared
ALL_TYPES = (
    pulsar.ConsumerType.Exclusive,
    pulsar.ConsumerType.Failover,
    SHARED,
    pulsar.ConsumerType.KeyShared,
)


@pytest.fixture
def partitioned(server: ServerProcess, topic: str) -> str:
    """A topic with four partitions."""
    server.admin("PUT", f"{_path(topic)}/partitions", 4)
    return topic


# --- partitioned


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_a_partitioned_topic_is_used_like_one(client: Any, partitioned: str, kind: Any) -> None:
    assert client.get_topic_partitions(partitioned) == [
        f"{partitioned}-partition-{number}" for number in range(4)
    ]
    consumer = client.subscribe(partitioned, "sub", kind)
    publish(client, partitioned, numbered(40))
    messages = receive(consumer, 40, ack=True)
    assert sorted(payloads_of(messages)) == sorted(numbered(40))
    assert {message.message_id().partition() for message in messages} == {0, 1, 2, 3}
    consumer.close()
    assert_nothing_more(client.subscribe(partitioned, "sub", kind))


def test_a_key_stays_on_its_partition(client: Any, partitioned: str) -> None:
    consumer = client.subscribe(partitioned, "sub")
    producer = client.create_producer(partitioned)
    for number in range(60):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"key {number % 20}")
    producer.flush()
    partition_of: dict[str, int] = {}
    numbers_of: dict[str, list[int]] = {}
    for message in receive(consumer, 60, ack=True):
        key, partition = message.partition_key(), message.message_id().partition()
        assert partition_of.setdefault(key, partition) == partition
        numbers_of.setdefault(key, []).append(int(message.data()))
    assert len(set(partition_of.values())) > 1
    assert all(numbers == sorted(numbers) for numbers in numbers_of.values())


def test_one_partition_is_a_topic(client: Any, partitioned: str) -> None:
    consumer = client.subscribe(partitioned, "sub")
    publish(client, f"{partitioned}-partition-2", numbered(3))
    messages = receive(consumer, 3, ack=True)
    assert {message.message_id().partition() for message in messages} == {2}
    reader = client.create_reader(f"{partitioned}-partition-2", pulsar.MessageId.earliest)
    assert read_data(reader, 3) == numbered(3)
    with pytest.raises(pulsar.PulsarException):
        client.create_producer(f"{partitioned}-partition-9")


def test_failover_spreads_partitions_over_consumers(client: Any, partitioned: str) -> None:
    consumers = [
        client.subscribe(partitioned, "sub", pulsar.ConsumerType.Failover, consumer_name=name)
        for name in "ab"
    ]
    publish(client, partitioned, numbered(40))
    partitions = [
        {message.message_id().partition() for message in receive(consumer, 20)}
        for consumer in consumers
    ]
    assert list(map(len, partitions)) == [2, 2]
    assert partitions[0] | partitions[1] == {0, 1, 2, 3}


def test_partitions_are_added(client: Any, server: ServerProcess, partitioned: str) -> None:
    publish(client, partitioned, numbered(8))
    server.admin("POST", f"{_path(partitioned)}/partitions", 6)
    assert len(client.get_topic_partitions(partitioned)) == 6
    consumer = client.subscribe(partitioned, "sub", initial_position=EARLIEST)
    publish(client, partitioned, numbered(12, start=8))
    messages = receive(consumer, 20, ack=True)
    assert sorted(payloads_of(messages)) == sorted(numbered(20))
    assert {message.message_id().partition() for message in messages} == set(range(6))


def test_readers_and_seeks_on_partitions(client: Any, partitioned: str) -> None:
    publish(client, partitioned, numbered(20))
    reader = client.create_reader(partitioned, pulsar.MessageId.earliest)
    assert sorted(read_data(reader, 20)) == sorted(numbered(20))
    assert not reader.has_message_available()
    consumer = client.subscribe(partitioned, "sub", initial_position=EARLIEST)
    first = receive(consumer, 20, ack=True)
    consumer.seek(min(message.publish_timestamp() for message in first))
    assert sorted(receive_data(consumer, 20)) == sorted(numbered(20))
    consumer.seek(pulsar.MessageId.earliest)
    assert sorted(receive_data(consumer, 20)) == sorted(numbered(20))


def test_a_table_view_of_partitions(client: Any, partitioned: str) -> None:
    producer = client.create_producer(partitioned)
    for number in range(40):
        producer.send(b"%d" % number, partition_key=f"key {number % 10}")
    view = client.create_table_view(partitioned)
    assert [view.get(f"key {key}") for key in range(10)] == [b"%d" % n for n in range(30, 40)]
    view.close()


def test_topics_of_a_namespace_get_partitions_by_themselves(
    client: Any, server: ServerProcess
) -> None:
    _new_namespace(server, "public/parts")
    policy = {
        "allowAutoTopicCreation": True,
        "topicType": "partitioned",
        "defaultNumPartitions": 3,
    }
    server.admin("POST", "namespaces/public/parts/autoTopicCreation", policy)
    topic = "persistent://public/parts/auto"
    consumer = client.subscribe(topic, "sub")
    publish(client, topic, numbered(9))
    messages = receive(consumer, 9, ack=True)
    assert {message.message_id().partition() for message in messages} == {0, 1, 2}


# --- several topics


def test_a_list_of_topics(client: Any, topic: str) -> None:
    topics = [f"{topic}-{number}" for number in range(3)]
    consumer = client.subscribe(topics, "sub")
    for each in topics:
        publish(client, each, numbered(5))
    messages = receive(consumer, 15, ack=True)
    assert {message.topic_name() for message in messages} == set(topics)


def test_topics_by_pattern_also_later_ones(client: Any, server: ServerProcess) -> None:
    _new_namespace(server, "public/pattern")
    prefix = "persistent://public/pattern"
    for name in ("match-a", "match-b", "other"):
        client.create_producer(f"{prefix}/{name}").close()
    server.admin("PUT", f"{_path(prefix)}/match-parts/partitions", 2)
    # The Python API has the period as an argument, but does not pass it on.
    options = _pulsar.ConsumerConfiguration()
    options.pattern_auto_discovery_period(1)
    consumer = pulsar.Consumer()
    consumer._consumer = client._client.subscribe_pattern(f"{prefix}/match-.*", "sub", options)
    consumer._schema = pulsar.schema.BytesSchema()
    consumer._client = client
    client._consumers.append(consumer)
    for name in ("match-a", "match-b", "match-parts", "other"):
        publish(client, f"{prefix}/{name}", [name.encode()] * 2)
    assert sorted(receive_data(consumer, 6)) == sorted([b"match-a", b"match-b", b"match-parts"] * 2)
    later = client.subscribe(f"{prefix}/match-later", "sub", SHARED, initial_position=EARLIEST)
    later.close()
    publish(client, f"{prefix}/match-later", [b"match-later"])
    assert receive_data(consumer, 1) == [b"match-later"]
    assert_nothing_more(consumer)


def test_a_pattern_without_a_topic(client: Any) -> None:
    assert_nothing_more(client.subscribe(re.compile("public/default/nothing-like-this.*"), "sub"))


# --- not persistent


@pytest.mark.parametrize("kind", ALL_TYPES, ids=lambda kind: kind.name)
def test_a_non_persistent_topic_delivers_to_who_is_there(
    client: Any, topic: str, kind: Any
) -> None:
    topic = f"non-{topic}"
    consumers = [client.subscribe(topic, name, kind) for name in ("one", "two")]
    producer = client.create_producer(topic)
    send_all(producer, numbered(50))
    for consumer in consumers:
        assert receive_data(consumer, 50) == numbered(50)
        consumer.close()
    send_all(producer, numbered(5))
    late = client.subscribe(topic, "one", kind, initial_position=EARLIEST)
    assert_nothing_more(late)
    producer.send(b"last")
    assert receive_data(late, 1) == [b"last"]


def test_a_non_persistent_topic_with_partitions(
    client: Any, server: ServerProcess, topic: str
) -> None:
    topic = f"non-{topic}"
    server.admin("PUT", f"{_path(topic)}/partitions", 3)
    consumer = client.subscribe(topic, "sub")
    publish(client, topic, numbered(30))
    assert sorted(receive_data(consumer, 30)) == sorted(numbered(30))


# --- names


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "Zürich-東京-🚀",
        "a:b;c,d=e+f*g~h(i)[j]{k}|l<m>n$o!p@q^r'\"",
        "percent%20%2Fäöü",
        "dots..and...dots",
        "question?mark=1&hash#x",
        "back\\slash",
        "n" * 200,
        "-partition-x",
    ],
)
def test_odd_names_of_topics_and_subscriptions(client: Any, name: str) -> None:
    topic = f"persistent://public/default/{name}"
    subscription = f"sub {name}"
    consumer = client.subscribe(topic, subscription)
    producer = client.create_producer(topic, producer_name=name)
    send_all(producer, numbered(3))
    assert receive_data(consumer, 3) == numbered(3)
    consumer.close()
    send_all(producer, numbered(1, start=3))
    consumer = client.subscribe(topic, subscription)
    assert receive_data(consumer, 1) == numbered(1, start=3)
    assert consumer.subscription_name() == subscription


@pytest.mark.parametrize("name", ["no/such/topic", "public/nosuch/topic"])
def test_a_namespace_that_is_not_there(client: Any, name: str) -> None:
    with pytest.raises(pulsar.TopicNotFound):
        client.create_producer(f"persistent://{name}")
    with pytest.raises(pulsar.TopicNotFound):
        client.subscribe(f"persistent://{name}", "sub")


def test_a_topic_that_may_not_be_created(client: Any, server: ServerProcess) -> None:
    _new_namespace(server, "public/closed")
    policy = {"allowAutoTopicCreation": False}
    server.admin("POST", "namespaces/public/closed/autoTopicCreation", policy)
    topic = "persistent://public/closed/topic"
    with pytest.raises(pulsar.TopicNotFound):
        client.create_producer(topic)
    with pytest.raises(pulsar.TopicNotFound):
        client.subscribe(topic, "sub")
    server.admin("PUT", _path(topic))
    consumer = client.subscribe(topic, "sub")
    publish(client, topic, numbered(1))
    assert receive_data(consumer, 1) == numbered(1)


def test_a_terminated_topic_takes_no_more(client: Any, server: ServerProcess, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic)
    send_all(producer, numbered(5))
    server.admin("POST", f"{_path(topic)}/terminate")
    with pytest.raises(pulsar.PulsarException):
        producer.send(b"too late")
    with pytest.raises(pulsar.TopicTerminated):
        client.create_producer(topic)
    assert receive_data(consumer, 5) == numbered(5)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert read_data(reader, 5) == numbered(5)
    assert not reader.has_message_available()


def test_an_unloaded_topic_goes_on(client: Any, server: ServerProcess, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic)
    send_all(producer, numbered(5))
    assert receive_data(consumer, 3) == numbered(3)
    server.admin("PUT", f"{_path(topic)}/unload")
    send_all(producer, numbered(5, start=5))
    found = [consumer.receive(RECEIVE_MS).data()]
    while found[-1] != b"message 9":
        found.append(consumer.receive(RECEIVE_MS).data())
    assert set(found) >= set(numbered(7, start=3))


def _path(topic: str) -> str:
    return topic.replace("://", "/")


def _new_namespace(server: ServerProcess, name: str) -> None:
    server.admin("PUT", f"namespaces/{name}")
