"""The four subscription types, as the official client sees them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    assert_nothing_more,
    gather,
    numbered,
    payloads_of,
    publish,
    receive,
    receive_data,
    send_all,
    until,
)
from tests.interop.serving import ServerProcess

FAILOVER = pulsar.ConsumerType.Failover
SHARED = pulsar.ConsumerType.Shared
KEY_SHARED = pulsar.ConsumerType.KeyShared
TYPES = (pulsar.ConsumerType.Exclusive, FAILOVER, SHARED, KEY_SHARED)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_what_is_sent_is_received_once(client: Any, topic: str, kind: Any) -> None:
    consumer = client.subscribe(topic, "sub", kind)
    producer = client.create_producer(topic)
    send_all(producer, numbered(100))
    assert receive_data(consumer, 100) == numbered(100)
    consumer.close()
    consumer = client.subscribe(topic, "sub", kind)
    send_all(producer, numbered(1, start=100))
    assert receive_data(consumer, 1) == numbered(1, start=100)
    assert_nothing_more(consumer)


def test_unacknowledged_messages_come_again_to_the_next_consumer(client: Any, topic: str) -> None:
    publish(client, topic, numbered(10))
    consumer = client.subscribe(topic, "sub", SHARED, initial_position=EARLIEST)
    for number, message in enumerate(receive(consumer, 10)):
        if number % 3:
            consumer.acknowledge(message)
    consumer.close()
    consumer = client.subscribe(topic, "sub", SHARED)
    assert receive_data(consumer, 4) == [b"message %d" % number for number in (0, 3, 6, 9)]
    assert_nothing_more(consumer)


def test_an_exclusive_subscription_has_one_consumer(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "sub")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "sub", SHARED)
    consumer.close()
    client.subscribe(topic, "sub", SHARED)


def test_each_subscription_has_all_messages(client: Any, topic: str) -> None:
    consumers = [client.subscribe(topic, f"sub-{number}") for number in range(5)]
    publish(client, topic, numbered(20))
    for consumer in consumers:
        assert receive_data(consumer, 20) == numbered(20)


def test_shared_consumers_share(client: Any, topic: str) -> None:
    consumers = [client.subscribe(topic, "sub", SHARED, receiver_queue_size=10) for _ in range(3)]
    publish(client, topic, numbered(90))
    shares = [payloads_of(share) for share in gather(consumers, 90)]
    assert sorted(payload for share in shares for payload in share) == sorted(numbered(90))
    assert all(share == sorted(share, key=_number) for share in shares)
    assert min(map(len, shares)) >= 10


def test_failover_goes_to_the_next_consumer_in_order(
    client: Any, topic: str, new_client: Any, server: ServerProcess
) -> None:
    clients = {name: new_client(server) for name in ("a", "b", "c")}
    consumers = {
        name: each.subscribe(topic, "sub", FAILOVER, consumer_name=name)
        for name, each in clients.items()
    }
    publish(client, topic, numbered(30))
    active = _active(server, topic)
    first = receive(consumers[active], 10)
    assert payloads_of(first) == numbered(10)
    for name in consumers.keys() - {active}:
        assert_nothing_more(consumers[name])
    consumers[active].acknowledge_cumulative(first[4])
    consumers.pop(active).close()

    active = _active(server, topic)
    assert receive_data(consumers[active], 25) == numbered(25, start=5)
    consumers.pop(active).close()
    (last,) = consumers.values()
    publish(client, topic, numbered(1, start=30))
    assert receive_data(last, 1) == numbered(1, start=30)


def _active(server: ServerProcess, topic: str) -> str:
    stats = server.admin("GET", f"persistent/{topic.partition('://')[2]}/stats")
    return str(stats["subscriptions"]["sub"]["activeConsumerName"])


def test_key_shared_keeps_the_order_of_each_key(client: Any, topic: str) -> None:
    consumers = [client.subscribe(topic, "sub", KEY_SHARED) for _ in range(3)]
    _publish_keyed(client, topic, keys=30, rounds=10)
    owner_of: dict[str, int] = {}
    seen: dict[str, list[int]] = defaultdict(list)
    for index, share in enumerate(gather(consumers, 300)):
        for message in share:
            assert owner_of.setdefault(message.partition_key(), index) == index
            seen[message.partition_key()].append(_number(message.data()))
    assert seen == {f"key {key}": list(range(10)) for key in range(30)}
    assert set(owner_of.values()) == {0, 1, 2}


def test_key_shared_keeps_the_order_when_a_consumer_leaves(client: Any, topic: str) -> None:
    consumers = [client.subscribe(topic, "sub", KEY_SHARED) for _ in range(3)]
    _publish_keyed(client, topic, keys=30, rounds=10)
    consumers[1].receive(RECEIVE_MS)
    consumers.pop(1).close()
    seen: dict[str, list[int]] = defaultdict(list)
    # A key has one consumer from here on, so that its messages are in one share.
    for share in gather(consumers, 300):
        for message in share:
            seen[message.partition_key()].append(_number(message.data()))
    assert seen == {f"key {key}": list(range(10)) for key in range(30)}


def test_a_newcomer_on_key_shared_waits_for_what_is_not_acknowledged(
    client: Any, topic: str
) -> None:
    first = client.subscribe(topic, "sub", KEY_SHARED)
    _publish_keyed(client, topic, keys=30, rounds=1)
    held = receive(first, 30)
    second = client.subscribe(topic, "sub", KEY_SHARED)
    producer = client.create_producer(topic)
    for key in range(30):
        producer.send(b"round 1", partition_key=f"key {key}")
    assert_nothing_more(second)
    for message in held:
        first.acknowledge(message)
    stayed, moved = gather([first, second], 30)
    assert moved
    keys = [message.partition_key() for message in stayed + moved]
    assert sorted(keys) == sorted(f"key {key}" for key in range(30))


def test_sticky_ranges_choose_the_consumer(client: Any, topic: str) -> None:
    halves = [(0, 32_767)], [(32_768, 65_535)]
    sticky = pulsar.KeySharedMode.Sticky
    consumers = [
        client.subscribe(
            topic,
            "sub",
            KEY_SHARED,
            key_shared_policy=pulsar.ConsumerKeySharedPolicy(sticky, sticky_ranges=half),
        )
        for half in halves
    ]
    with pytest.raises(pulsar.PulsarException):
        client.subscribe(
            topic,
            "sub",
            KEY_SHARED,
            key_shared_policy=pulsar.ConsumerKeySharedPolicy(sticky, sticky_ranges=halves[0]),
        )
    _publish_keyed(client, topic, keys=30, rounds=2)
    keys = [{message.partition_key() for message in share} for share in gather(consumers, 60)]
    assert keys[0]
    assert keys[1]
    assert not keys[0] & keys[1]
    assert len(keys[0] | keys[1]) == 30


def test_a_listener_is_called_for_each_message(client: Any, topic: str) -> None:
    heard: list[bytes] = []

    def listen(consumer: Any, message: Any) -> None:
        heard.append(message.data())
        consumer.acknowledge(message)

    consumer = client.subscribe(topic, "sub", message_listener=listen)
    publish(client, topic, numbered(50))
    until(lambda: len(heard) == 50)
    consumer.pause_message_listener()
    assert heard == numbered(50)


def test_unsubscribing_forgets_the_position(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", initial_position=EARLIEST)
    publish(client, topic, numbered(5))
    assert receive_data(consumer, 5) == numbered(5)
    consumer.unsubscribe()
    consumer = client.subscribe(topic, "sub", initial_position=EARLIEST)
    assert receive_data(consumer, 5) == numbered(5)
    other = client.subscribe(topic, "shared", SHARED)
    client.subscribe(topic, "shared", SHARED)
    with pytest.raises(pulsar.PulsarException):
        other.unsubscribe()


def _publish_keyed(client: Any, topic: str, *, keys: int, rounds: int) -> None:
    producer = client.create_producer(topic)
    for number in range(rounds):
        for key in range(keys):
            producer.send_async(b"message %d" % number, lambda *_: None, partition_key=f"key {key}")
    producer.flush()
    producer.close()


def _number(payload: bytes) -> int:
    return int(payload.split()[1])
