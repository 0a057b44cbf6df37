"""The server goes and comes back on the same port; clients go on by themselves."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from tests.interop.flows import (
    EARLIEST,
    RECEIVE_MS,
    assert_nothing_more,
    numbered,
    publish,
    read_data,
    receive,
    receive_data,
    send_all,
    until,
)
from tests.interop.serving import ServerProcess

pytestmark = pytest.mark.slow

COUNT = 4000
TOPIC = "persistent://public/default/topic"


@pytest.fixture
def client(new_client: Callable[[ServerProcess], Any], own_server: ServerProcess) -> Any:
    return new_client(own_server)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_producers_and_consumers_go_on(client: Any, own_server: ServerProcess, how: Any) -> None:
    """Two restarts under load: every send succeeds, nothing is lost, the order holds."""
    own_server.admin("POST", "namespaces/public/default/deduplication", True)
    consumer = client.subscribe(TOPIC, "sub")
    producer = client.create_producer(TOPIC, producer_name="name", block_if_queue_full=True)
    results: list[Any] = []

    def produce() -> None:
        for payload in numbered(COUNT):
            producer.send_async(payload, lambda result, _: results.append(result))

    with ThreadPoolExecutor(max_workers=1) as thread:
        producing = thread.submit(produce)
        for share in (COUNT // 5, COUNT // 2):
            until(partial(_has, results, share))
            _restart(own_server, how)
        producing.result(timeout=PATIENCE_S)
    producer.flush()
    until(lambda: len(results) == COUNT)
    assert set(results) == {pulsar.Result.Ok}

    found: dict[bytes, None] = {}
    while len(found) < COUNT:
        message = consumer.receive(RECEIVE_MS)
        consumer.acknowledge(message)
        found.setdefault(message.data())
    assert list(found) == numbered(COUNT)
    reader = client.create_reader(TOPIC, pulsar.MessageId.earliest)
    assert read_data(reader, COUNT) == numbered(COUNT)
    assert not reader.has_message_available()


def test_what_was_acknowledged_stays_so(client: Any, own_server: ServerProcess) -> None:
    shared = {"consumer_type": pulsar.ConsumerType.Shared, "batch_index_ack_enabled": True}
    holes = client.subscribe(TOPIC, "holes", **shared)
    bits = client.subscribe(f"{TOPIC}-batched", "bits", **shared)
    cumulative = client.subscribe(TOPIC, "cumulative")
    publish(client, TOPIC, numbered(20))
    publish(client, f"{TOPIC}-batched", numbered(20), batching_enabled=True)
    for consumer in (holes, bits):
        for message in receive(consumer, 20)[::3]:
            consumer.acknowledge(message)
        consumer.close()
    cumulative.acknowledge_cumulative(receive(cumulative, 20)[11])
    cumulative.close()
    _restart(own_server, signal.SIGTERM)
    left = [payload for number, payload in enumerate(numbered(20)) if number % 3]
    holes = client.subscribe(TOPIC, "holes", **shared)
    assert receive_data(holes, len(left)) == left
    assert_nothing_more(holes)
    bits = client.subscribe(f"{TOPIC}-batched", "bits", **shared)
    assert receive_data(bits, len(left)) == left
    assert_nothing_more(bits)
    cumulative = client.subscribe(TOPIC, "cumulative")
    assert receive_data(cumulative, 8) == numbered(8, start=12)
    assert_nothing_more(cumulative)


def test_every_kind_of_client_comes_back(client: Any, own_server: ServerProcess) -> None:
    own_server.admin("PUT", "persistent/public/default/parts/partitions", 3)
    own_server.admin("PUT", "namespaces/public/ns")
    topics = (TOPIC, "persistent://public/default/parts", "non-persistent://public/default/gone")
    kinds = pulsar.ConsumerType
    consumers = [
        client.subscribe(topic, kind.name, kind)
        for topic in topics
        for kind in (kinds.Exclusive, kinds.Failover, kinds.Shared, kinds.KeyShared)
    ]
    producers = [client.create_producer(topic) for topic in topics]
    alone = client.create_producer(
        "persistent://public/ns/alone", access_mode=pulsar.ProducerAccessMode.Exclusive
    )
    alone.send(b"before")
    reader = client.create_reader(TOPIC, pulsar.MessageId.earliest)
    for producer in producers:
        send_all(producer, numbered(6))
    for consumer in consumers:
        assert sorted(receive_data(consumer, 6)) == numbered(6)
    assert read_data(reader, 6) == numbered(6)
    _restart(own_server, signal.SIGTERM)
    until(lambda: all(each.is_connected() for each in [*consumers, *producers]))
    for producer in producers:
        send_all(producer, numbered(6, start=6))
    for consumer in consumers:
        found: set[bytes] = set()
        while len(found & set(numbered(6, start=6))) < 6:
            found.add(consumer.receive(RECEIVE_MS).data())
    assert read_data(reader, 6) == numbered(6, start=6)
    alone.send(b"after")
    consumer = client.subscribe("persistent://public/ns/alone", "sub", initial_position=EARLIEST)
    assert receive_data(consumer, 2) == [b"before", b"after"]


def _has(results: list[Any], count: int) -> bool:
    return len(results) >= count


def _restart(server: ServerProcess, how: signal.Signals) -> None:
    server.signal(how)
    server.ended(-how if how is signal.SIGKILL else 0)
    server.start()
