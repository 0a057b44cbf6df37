"""Acknowledgements of all kinds, negative ones, redelivery and dead letters."""

from __future__ import annotations

from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    assert_nothing_more,
    numbered,
    payloads_of,
    publish,
    receive,
    receive_data,
)
from tests.interop.serving import ServerProcess

EXCLUSIVE = pulsar.ConsumerType.Exclusive
SHARED = pulsar.ConsumerType.Shared
KEY_SHARED = pulsar.ConsumerType.KeyShared
DELAY_MS = 100


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED], ids=lambda kind: kind.name)
def test_a_refused_message_comes_again_with_its_count(
    client: Any, topic: str, kind: Any, batched: bool
) -> None:
    consumer = client.subscribe(topic, "sub", kind, negative_ack_redelivery_delay_ms=DELAY_MS)
    publish(client, topic, numbered(5), batching_enabled=batched)
    for expected in range(3):
        messages = receive(consumer, 5)
        assert payloads_of(messages) == numbered(5)
        assert [each.redelivery_count() for each in messages] == [expected] * 5
        for message in messages:
            consumer.negative_acknowledge(message)
    receive(consumer, 5, ack=True)
    assert_nothing_more(consumer)


def test_one_refused_message_does_not_bring_back_the_others(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", SHARED, negative_ack_redelivery_delay_ms=DELAY_MS)
    publish(client, topic, numbered(5))
    messages = receive(consumer, 5)
    consumer.negative_acknowledge(messages[2])
    (again,) = receive(consumer, 1)
    assert again.data() == messages[2].data()
    assert again.redelivery_count() == 1
    assert_nothing_more(consumer)


def test_an_exclusive_consumer_refuses_a_message(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", negative_ack_redelivery_delay_ms=DELAY_MS)
    publish(client, topic, numbered(5))
    messages = receive(consumer, 5)
    for message in messages[:3]:
        consumer.acknowledge(message)
    consumer.negative_acknowledge(messages[3])
    assert receive_data(consumer, 2) == numbered(2, start=3)
    assert_nothing_more(consumer)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED], ids=lambda kind: kind.name)
def test_all_that_is_not_acknowledged_is_asked_for_again(
    client: Any, topic: str, kind: Any
) -> None:
    consumer = client.subscribe(topic, "sub", kind)
    publish(client, topic, numbered(10))
    for message in receive(consumer, 10)[::2]:
        consumer.acknowledge(message)
    consumer.redeliver_unacknowledged_messages()
    assert receive_data(consumer, 5) == numbered(10)[1::2]
    assert_nothing_more(consumer)


@pytest.mark.slow
def test_a_message_not_acknowledged_in_time_comes_again(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", SHARED, unacked_messages_timeout_ms=10_000)
    publish(client, topic, numbered(2))
    receive(consumer, 2)[0]
    (first, second) = (consumer.receive(25_000) for _ in range(2))
    assert [first.data(), second.data()] == numbered(2)
    assert first.redelivery_count() >= 1
    consumer.acknowledge(first)
    consumer.acknowledge(second)


@pytest.mark.parametrize("kind", [EXCLUSIVE, pulsar.ConsumerType.Failover], ids=lambda k: k.name)
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_cumulative_ack_covers_all_before(
    client: Any, topic: str, kind: Any, batched: bool
) -> None:
    options = {"batch_index_ack_enabled": True, "initial_position": EARLIEST}
    publish(client, topic, numbered(20), batching_enabled=batched, batching_max_messages=8)
    consumer = client.subscribe(topic, "sub", kind, **options)
    consumer.acknowledge_cumulative(receive(consumer, 20)[12])
    consumer.close()
    consumer = client.subscribe(topic, "sub", kind, **options)
    assert receive_data(consumer, 7) == numbered(7, start=13)
    assert_nothing_more(consumer)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, KEY_SHARED], ids=lambda kind: kind.name)
def test_single_messages_of_a_batch_are_acknowledged(client: Any, topic: str, kind: Any) -> None:
    options = {"batch_index_ack_enabled": True, "initial_position": EARLIEST}
    publish(client, topic, numbered(10), batching_enabled=True)
    consumer = client.subscribe(topic, "sub", kind, **options)
    for message in receive(consumer, 10)[::2]:
        consumer.acknowledge(message)
    consumer.close()
    consumer = client.subscribe(topic, "sub", kind, **options)
    assert receive_data(consumer, 5) == numbered(10)[1::2]
    consumer.close()
    consumer = client.subscribe(topic, "sub", kind, **options)
    assert_nothing_more(consumer)


def test_without_batch_index_acks_a_batch_comes_whole(client: Any, topic: str) -> None:
    publish(client, topic, numbered(10), batching_enabled=True)
    consumer = client.subscribe(topic, "sub", SHARED, initial_position=EARLIEST)
    for message in receive(consumer, 10)[1:]:
        consumer.acknowledge(message)
    consumer.close()
    consumer = client.subscribe(topic, "sub", SHARED)
    assert receive_data(consumer, 10) == numbered(10)


def test_messages_are_received_in_groups(client: Any, topic: str) -> None:
    policy = pulsar.ConsumerBatchReceivePolicy(10, -1, 5000)
    consumer = client.subscribe(topic, "sub", batch_receive_policy=policy)
    publish(client, topic, numbered(20))
    assert payloads_of(consumer.batch_receive()) == numbered(10)
    assert payloads_of(consumer.batch_receive()) == numbered(10, start=10)


def test_a_consumer_with_a_queue_of_one(client: Any, topic: str) -> None:
    publish(client, topic, numbered(30))
    consumer = client.subscribe(
        topic, "sub", SHARED, receiver_queue_size=1, initial_position=EARLIEST
    )
    assert receive_data(consumer, 30) == numbered(30)


def test_a_consumer_without_a_queue(client: Any, topic: str) -> None:
    publish(client, topic, numbered(10))
    consumer = client.subscribe(
        topic, "sub", SHARED, receiver_queue_size=0, initial_position=EARLIEST
    )
    found = []
    for _ in range(10):
        message = consumer.receive()
        consumer.acknowledge(message)
        found.append(message.data())
    assert found == numbered(10)


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_what_is_refused_too_often_goes_to_the_dead_letter_topic(
    client: Any, server: ServerProcess, topic: str, batched: bool
) -> None:
    policy = pulsar.ConsumerDeadLetterPolicy(2, f"{topic}-dead", "undertaker")
    consumer = client.subscribe(
        topic,
        "sub",
        SHARED,
        negative_ack_redelivery_delay_ms=DELAY_MS,
        dead_letter_policy=policy,
    )
    publish(client, topic, numbered(4), batching_enabled=batched)
    for _ in range(3):
        for message in receive(consumer, 4):
            consumer.negative_acknowledge(message)
    # The subscription was made with the topic, by the name that the policy gives it.
    dead = client.subscribe(f"{topic}-dead", "reader", initial_position=EARLIEST)
    letters = receive(dead, 4)
    assert sorted(payloads_of(letters)) == numbered(4)
    assert "ORIGIN_MESSAGE_ID" in "".join(letters[0].properties()).upper()
    undertaker = client.subscribe(f"{topic}-dead", "undertaker", SHARED)
    assert sorted(payloads_of(receive(undertaker, 4))) == numbered(4)
    assert_nothing_more(consumer)
    consumer.close()
    assert_nothing_more(client.subscribe(topic, "sub", SHARED))


def test_the_dead_letter_topic_has_a_name_by_default(client: Any, topic: str) -> None:
    dead = client.subscribe(f"{topic}-sub-DLQ", "reader")
    consumer = client.subscribe(
        topic,
        "sub",
        SHARED,
        negative_ack_redelivery_delay_ms=DELAY_MS,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(1),
    )
    publish(client, topic, numbered(1))
    for _ in range(2):
        consumer.negative_acknowledge(consumer.receive(RECEIVE_MS))
    assert receive_data(dead, 1) == numbered(1)
