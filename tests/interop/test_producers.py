"""Producers: names, access modes, deduplication, limits of what is pending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from tests.integration.server.process import served
from tests.interop.flows import (
    EARLIEST,
    assert_nothing_more,
    numbered,
    publish,
    receive_data,
    send_all,
    until,
)
from tests.interop.serving import ServerProcess

EXCLUSIVE = pulsar.ProducerAccessMode.Exclusive
WAIT = pulsar.ProducerAccessMode.WaitForExclusive
FENCING = pulsar.ProducerAccessMode.ExclusiveWithFencing


def test_a_name_is_given_once(
    client: Any, new_client: Callable[[ServerProcess], Any], server: ServerProcess, topic: str
) -> None:
    producer = client.create_producer(topic, producer_name="mine")
    assert producer.producer_name() == "mine"
    for other in (client, new_client(server)):
        with pytest.raises(pulsar.ProducerBusy):
            other.create_producer(topic, producer_name="mine")
    producer.send(b"still here")
    producer.close()
    client.create_producer(topic, producer_name="mine").send(b"again")


def test_names_are_made_up_for_those_without(client: Any, topic: str) -> None:
    names = {client.create_producer(topic).producer_name() for _ in range(5)}
    assert len(names) == 5
    assert all(names)


# --- access modes


def test_an_exclusive_producer_is_alone(client: Any, topic: str) -> None:
    producer = client.create_producer(topic, access_mode=EXCLUSIVE)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=EXCLUSIVE)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)
    producer.send(b"mine")
    producer.close()
    shared = client.create_producer(topic)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=EXCLUSIVE)
    shared.close()
    client.create_producer(topic, access_mode=EXCLUSIVE).send(b"mine again")


def test_producers_wait_for_the_topic_in_turn(
    client: Any, new_client: Callable[[ServerProcess], Any], server: ServerProcess, topic: str
) -> None:
    consumer = client.subscribe(topic, "sub")
    first = client.create_producer(topic, access_mode=WAIT)
    clients = [new_client(server) for _ in range(2)]
    with ThreadPoolExecutor(max_workers=2) as threads:
        waiting = []
        for number, each in enumerate(clients):
            options = {"access_mode": WAIT, "producer_name": f"waiting {number}"}
            waiting.append(threads.submit(each.create_producer, topic, **options))
            _until_waiting(client, topic, f"waiting {number}")
        first.send(b"first")
        assert not any(each.done() for each in waiting)
        first.close()
        second = waiting[0].result(timeout=PATIENCE_S)
        second.send(b"second")
        assert not waiting[1].done()
        second.close()
        waiting[1].result(timeout=PATIENCE_S).send(b"third")
    assert receive_data(consumer, 3) == [b"first", b"second", b"third"]


def _until_waiting(client: Any, topic: str, name: str) -> None:
    """The name of a producer that waits is taken, which shows that its request has arrived."""
    for _ in range(1000):
        try:
            client.create_producer(topic, producer_name=name, access_mode=EXCLUSIVE).close()
        except pulsar.ProducerBusy:
            return
        except pulsar.ProducerFenced:
            continue
    raise AssertionError(f"{name} is not there")


def test_a_fencing_producer_puts_out_the_others(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    before = client.create_producer(topic, access_mode=EXCLUSIVE)
    before.send(b"before")
    after = client.create_producer(topic, access_mode=FENCING)
    after.send(b"after")
    with pytest.raises((pulsar.ProducerFenced, pulsar.AlreadyClosed)):
        before.send(b"too late")
    after.send(b"more")
    assert receive_data(consumer, 3) == [b"before", b"after", b"more"]
    assert_nothing_more(consumer)


# --- deduplication


@pytest.fixture
def dedup_topic(server: ServerProcess, topic: str) -> str:
    """A topic in a namespace that stores nothing twice."""
    local_name = topic.rpartition("/")[2]
    namespace = f"public/once-{local_name}"
    server.admin("PUT", f"namespaces/{namespace}")
    server.admin("POST", f"namespaces/{namespace}/deduplication", True)
    return f"persistent://{namespace}/topic"


def test_what_is_sent_again_is_stored_once(client: Any, dedup_topic: str) -> None:
    consumer = client.subscribe(dedup_topic, "sub")
    producer = client.create_producer(dedup_topic, producer_name="name")
    assert producer.last_sequence_id() == -1
    _send(producer, range(10))
    producer.close()
    producer = client.create_producer(dedup_topic, producer_name="name")
    assert producer.last_sequence_id() == 10
    again = _send(producer, range(5, 10))
    assert {(each.ledger_id(), each.entry_id()) for each in again} == {(-1, -1)}
    _send(producer, range(10, 13))
    assert receive_data(consumer, 13) == numbered(13)
    assert_nothing_more(consumer)


def test_a_batch_that_is_sent_again_is_stored_once(client: Any, dedup_topic: str) -> None:
    """The client names the first sequence id of a batch only: the same batch is recognised."""
    consumer = client.subscribe(dedup_topic, "sub")
    for first in (0, 0, 10):
        producer = client.create_producer(
            dedup_topic,
            producer_name="name",
            batching_enabled=True,
            batching_max_publish_delay_ms=5000,
        )
        _send(producer, range(first, first + 10))
        producer.close()
    assert receive_data(consumer, 20) == numbered(20)
    assert_nothing_more(consumer)


def test_names_are_counted_apart(client: Any, dedup_topic: str) -> None:
    consumer = client.subscribe(dedup_topic, "sub")
    for name in ("one", "two"):
        _send(client.create_producer(dedup_topic, producer_name=name), range(3))
    assert receive_data(consumer, 6) == numbered(3) * 2


def test_deduplication_survives_unloading(
    client: Any, server: ServerProcess, dedup_topic: str
) -> None:
    producer = client.create_producer(dedup_topic, producer_name="name")
    _send(producer, range(5))
    producer.close()
    server.admin("PUT", f"{dedup_topic.replace('://', '/')}/unload")
    producer = client.create_producer(dedup_topic, producer_name="name")
    assert producer.last_sequence_id() == 5
    _send(producer, range(6))
    consumer = client.subscribe(dedup_topic, "sub", initial_position=EARLIEST)
    assert receive_data(consumer, 6) == numbered(6)
    assert_nothing_more(consumer)


def test_chunks_with_deduplication(client: Any, dedup_topic: str) -> None:
    payload = b"x" * (11 * 1024 * 1024)
    consumer = client.subscribe(dedup_topic, "sub")
    producer = client.create_producer(dedup_topic, producer_name="name", chunking_enabled=True)
    for sequence_id in (1, 2, 2, 1, 3):
        producer.send(payload, sequence_id=sequence_id)
    assert receive_data(consumer, 3) == [payload] * 3
    assert_nothing_more(consumer)


def test_without_deduplication_all_is_stored(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, producer_name="name")
    for _ in range(2):
        _send(producer, range(3))
    assert receive_data(consumer, 6) == numbered(3) * 2


def _send(producer: Any, numbers: range) -> list[Any]:
    """Messages with a sequence id each, from 1 on: the client takes 0 for none."""
    ids = []
    results: list[Any] = []

    def sent(result: Any, message_id: Any) -> None:
        results.append(result)
        ids.append(message_id)

    for number in numbers:
        producer.send_async(b"message %d" % number, sent, sequence_id=number + 1)
    producer.flush()
    until(lambda: len(results) == len(numbers))
    assert results == [pulsar.Result.Ok] * len(numbers)
    return ids


# --- many at once


def test_many_producers_on_one_topic(client: Any, topic: str) -> None:
    consumer = client.subscribe(topic, "sub")
    producers = [client.create_producer(topic) for _ in range(20)]
    for producer in producers:
        send_all(producer, numbered(10))
    assert sorted(receive_data(consumer, 200)) == sorted(numbered(10) * 20)


def test_a_first_subscription_gets_only_what_comes_after_it(client: Any, topic: str) -> None:
    publish(client, topic, numbered(5))
    consumer = client.subscribe(topic, "sub")
    publish(client, topic, numbered(1, start=5))
    assert receive_data(consumer, 1) == numbered(1, start=5)


def test_a_full_disk_is_an_error_at_once(tmp_path: Path) -> None:
    # A floor that no disk has.
    with served(tmp_path, disk_floor_bytes=1 << 62, disk_floor_percent=100) as full:
        client = pulsar.Client(f"pulsar://{full.host}:{full.port}")
        try:
            with pytest.raises(pulsar.ProducerBlockedQuotaExceededException):
                client.create_producer("persistent://public/default/full")
            with pytest.raises(pulsar.ProducerBlockedQuotaExceededException):
                client.subscribe("persistent://public/default/full", "s")
        finally:
            client.close()
