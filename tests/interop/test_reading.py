"""Positions: readers, seeking by id and by time, the last message id, table views."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
    read_data,
    receive,
    receive_data,
    send_all,
    until,
)

EVERYTHING = pulsar.MessageId.earliest
NEW = pulsar.MessageId.latest


def test_a_reader_from_the_first_message(client: Any, topic: str) -> None:
    publish(client, topic, numbered(20))
    reader = client.create_reader(topic, EVERYTHING)
    assert read_data(reader, 20) == numbered(20)
    assert not reader.has_message_available()
    publish(client, topic, numbered(1, start=20))
    assert reader.has_message_available()
    assert read_data(reader, 1) == numbered(1, start=20)


def test_a_reader_of_new_messages(client: Any, topic: str) -> None:
    publish(client, topic, numbered(20))
    reader = client.create_reader(topic, NEW)
    assert not reader.has_message_available()
    publish(client, topic, numbered(2, start=20))
    assert read_data(reader, 2) == numbered(2, start=20)


def test_the_newest_message_can_be_read_again(client: Any, topic: str) -> None:
    publish(client, topic, numbered(20))
    reader = client.create_reader(topic, NEW, start_message_id_inclusive=True)
    assert reader.has_message_available()
    assert read_data(reader, 1) == numbered(1, start=19)


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("inclusive", [False, True], ids=["after", "from"])
def test_a_reader_from_a_message(client: Any, topic: str, batched: bool, inclusive: bool) -> None:
    ids = publish(client, topic, numbered(20), batching_enabled=batched)
    reader = client.create_reader(topic, ids[7], start_message_id_inclusive=inclusive)
    start = 7 if inclusive else 8
    assert read_data(reader, 20 - start) == numbered(20 - start, start=start)
    assert not reader.has_message_available()


def test_a_reader_of_an_empty_topic(client: Any, topic: str) -> None:
    reader = client.create_reader(topic, EVERYTHING)
    assert not reader.has_message_available()
    with pytest.raises(pulsar.Timeout):
        reader.read_next(100)


def test_a_stored_message_id_finds_its_message_again(client: Any, topic: str) -> None:
    ids = publish(client, topic, numbered(5), batching_enabled=True)
    stored = ids[2].serialize()
    reader = client.create_reader(topic, pulsar.MessageId.deserialize(stored))
    assert read_data(reader, 2) == numbered(2, start=3)


def test_readers_do_not_hold_a_subscription(client: Any, topic: str, server: Any) -> None:
    reader = client.create_reader(topic, EVERYTHING)
    publish(client, topic, numbered(1))
    read_data(reader, 1)
    reader.close()
    assert server.admin("GET", f"persistent/{topic.partition('://')[2]}/subscriptions") == []


# --- seeking


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_seek_by_id_back_and_forth(client: Any, topic: str, batched: bool) -> None:
    consumer = client.subscribe(topic, "sub")
    ids = publish(client, topic, numbered(20), batching_enabled=batched)
    assert receive_data(consumer, 20) == numbered(20)
    consumer.seek(ids[4])
    assert receive_data(consumer, 15) == numbered(15, start=5)
    consumer.seek(EVERYTHING)
    assert receive_data(consumer, 3) == numbered(3)
    consumer.seek(ids[14])
    assert receive_data(consumer, 5) == numbered(5, start=15)
    consumer.seek(EVERYTHING)
    consumer.seek(NEW)
    publish(client, topic, numbered(1, start=20))
    assert receive_data(consumer, 1) == numbered(1, start=20)
    assert_nothing_more(consumer)


def test_seek_by_id_to_the_message_itself(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", start_message_id_inclusive=True)
    ids = publish(client, topic, numbered(20))
    assert receive_data(consumer, 20) == numbered(20)
    consumer.seek(ids[4])
    assert receive_data(consumer, 16) == numbered(16, start=4)


def test_seek_by_time_back_and_forth(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    times = _publish_at_distinct_times(client, topic, 10)
    assert receive_data(consumer, 10) == numbered(10)
    consumer.seek(times[3])
    assert receive_data(consumer, 7) == numbered(7, start=3)
    consumer.seek(times[0])
    assert receive_data(consumer, 2) == numbered(2)
    consumer.seek(times[8])
    assert receive_data(consumer, 2) == numbered(2, start=8)
    consumer.seek(times[9] + 60_000)
    assert_nothing_more(consumer)
    consumer.seek(0)
    assert receive_data(consumer, 10) == numbered(10)


def test_a_reader_seeks(client: Any, topic: str) -> None:
    times = _publish_at_distinct_times(client, topic, 10)
    reader = client.create_reader(topic, EVERYTHING)
    messages = [reader.read_next(RECEIVE_MS) for _ in range(10)]
    reader.seek(messages[4].message_id())
    assert read_data(reader, 5) == numbered(5, start=5)
    reader.seek(times[2])
    assert read_data(reader, 8) == numbered(8, start=2)
    reader.seek(EVERYTHING)
    assert read_data(reader, 10) == numbered(10)


def test_seeking_survives_the_consumer(client: Any, topic: str) -> None:
    ids = publish(client, topic, numbered(10))
    consumer = client.subscribe(topic, "sub", initial_position=EARLIEST)
    receive(consumer, 10, ack=True)
    consumer.seek(ids[5])
    consumer.close()
    consumer = client.subscribe(topic, "sub")
    # Only the consumer that sought knows that it wants what comes after the message.
    assert receive_data(consumer, 5) == numbered(5, start=5)


def test_seeking_moves_all_consumers_of_a_shared_subscription(client: Any, topic: str) -> None:
    shared = pulsar.ConsumerType.Shared
    consumers = [client.subscribe(topic, "sub", shared) for _ in range(2)]
    publish(client, topic, numbered(20))
    gather(consumers, 20)
    consumers[0].seek(EVERYTHING)
    found = [payload for share in gather(consumers, 20) for payload in payloads_of(share)]
    assert sorted(found) == sorted(numbered(20))


# --- the last message


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_the_last_message_id(client: Any, topic: str, batched: bool) -> None:
    consumer = client.subscribe(topic, "sub")
    ids = publish(client, topic, numbered(10), batching_enabled=batched)
    last = consumer.get_last_message_id()
    assert (last.ledger_id(), last.entry_id()) == (ids[-1].ledger_id(), ids[-1].entry_id())
    assert last.batch_index() == (9 if batched else -1)


def test_the_last_message_id_of_an_empty_topic(client: Any, topic: str) -> None:
    last = client.subscribe(topic, "sub").get_last_message_id()
    assert last.entry_id() == -1


# --- table views


def test_a_table_view_has_the_newest_value_of_each_key(client: Any, topic: str) -> None:
    producer = client.create_producer(topic)
    for number in range(30):
        producer.send(b"%d" % number, partition_key=f"key {number % 3}")
    view = client.create_table_view(topic)
    assert len(view) == 3
    assert [view.get(f"key {key}") for key in range(3)] == [b"27", b"28", b"29"]
    producer.send(b"new", partition_key="key 0")
    producer.send(b"", partition_key="key 2")
    until(lambda: len(view) == 2)
    assert dict(_items(view)) == {"key 0": b"new", "key 1": b"28"}
    view.close()


def _items(view: Any) -> Iterator[tuple[str, bytes]]:
    items: list[tuple[str, bytes]] = []
    view.for_each(lambda key, value: items.append((key, value)))
    return iter(items)


def _publish_at_distinct_times(client: Any, topic: str, count: int) -> list[int]:
    """Messages with rising publish times; those times."""
    producer = client.create_producer(topic)
    for payload in numbered(count):
        send_all(producer, [payload])
        time.sleep(0.003)  # the clock that the client stamps messages with must move on
    reader = client.create_reader(topic, EVERYTHING)
    times = [reader.read_next(RECEIVE_MS).publish_timestamp() for _ in range(count)]
    assert times == sorted(set(times))
    return times
