"""Delayed delivery as the official client sees it: who waits, and how long.

Not here: what is refused as too late. The client answers every such error by a new connection, and
sends it again until its time for sending is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import EARLIEST, NOTHING_MS, RECEIVE_MS, numbered, receive, until
from tests.interop.serving import ServerProcess

SHARING = (pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared)
TICK_MS = 50
DELAY_S = 1.0


def exactly(server: ServerProcess, topic: str, **policy: object) -> None:
    """Have messages come at most 50 ms early."""
    path = topic.replace("://", "/")
    given = {"active": True, "tickTime": TICK_MS, "maxDeliveryDelayInMillis": 0} | policy
    server.admin("POST", f"{path}/delayedDelivery", given)


def stats_of(server: ServerProcess, topic: str) -> Any:
    return server.admin("GET", f"{topic.replace('://', '/')}/stats")["subscriptions"]["sub"]


@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.parametrize("how", ["at", "after"])
def test_a_message_comes_at_its_time(
    client: Any, server: ServerProcess, topic: str, kind: Any, how: str
) -> None:
    consumer = client.subscribe(topic, "sub", kind)
    exactly(server, topic)
    producer = client.create_producer(topic, batching_enabled=True)
    sent = time.time()
    if how == "at":
        producer.send(b"late", partition_key="k", deliver_at=round(1000 * (sent + DELAY_S)))
    else:
        producer.send(b"late", partition_key="k", deliver_after=timedelta(seconds=DELAY_S))
    producer.send(b"now", partition_key="k")
    (message,) = receive(consumer, 1, ack=True)
    assert message.data() == b"now"
    until(lambda: stats_of(server, topic)["msgBacklog"] == 1)
    shown = stats_of(server, topic)
    assert (shown["msgDelayed"], shown["msgBacklogNoDelayed"]) == (1, 0)
    assert shown["unackedMessages"] == 0
    message = consumer.receive(RECEIVE_MS)
    assert message.data() == b"late"
    assert time.time() - sent >= DELAY_S - TICK_MS / 1000
    assert message.redelivery_count() == 0
    consumer.negative_acknowledge(message)
    consumer.close()
    # It was delivered once: to whoever comes it is a message like others.
    consumer = client.subscribe(topic, "sub", kind)
    assert consumer.receive(RECEIVE_MS).data() == b"late"


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover])
def test_where_there_is_an_order_it_comes_at_once(client: Any, topic: str, kind: Any) -> None:
    consumer = client.subscribe(topic, "sub", kind)
    producer = client.create_producer(topic)
    producer.send(b"late", deliver_after=timedelta(hours=1))
    assert consumer.receive(RECEIVE_MS).data() == b"late"


def test_a_policy_switches_it_off(client: Any, server: ServerProcess, topic: str) -> None:
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.Shared)
    producer = client.create_producer(topic)
    producer.send(b"late", deliver_after=timedelta(hours=1))
    with pytest.raises(pulsar.Timeout):
        consumer.receive(NOTHING_MS)
    exactly(server, topic, active=False)
    assert consumer.receive(RECEIVE_MS).data() == b"late"


def test_messages_wait_over_a_restart(
    own_server: ServerProcess, new_client: Callable[[ServerProcess], Any], topic: str
) -> None:
    client = new_client(own_server)
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.Shared, initial_position=EARLIEST)
    exactly(own_server, topic)
    producer = client.create_producer(topic)
    delay = timedelta(seconds=DELAY_S)
    for payload in numbered(20):
        producer.send(payload, deliver_after=delay)
    producer.send(b"long", deliver_after=timedelta(hours=1))
    sent = time.time()
    own_server.kill()
    own_server.start()
    messages = receive(consumer, 20, ack=True)
    assert time.time() - sent >= DELAY_S - TICK_MS / 1000 - 1
    assert sorted(each.data() for each in messages) == sorted(numbered(20))
    until(lambda: stats_of(own_server, topic)["msgDelayed"] == 1)
    with pytest.raises(pulsar.Timeout):
        consumer.receive(NOTHING_MS)
