"""Backlog quotas as the official client meets them: who waits, who fails, what is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import EARLIEST, numbered, publish, receive, until
from tests.interop.serving import ServerProcess

CHECK = "brokers/backlog-quota-check"
SENT = 20


def set_quota(server: ServerProcess, topic: str, **quota: object) -> None:
    server.admin("POST", f"{topic.replace('://', '/')}/backlogQuota", quota)


def size_of(server: ServerProcess, topic: str) -> int:
    found: int = server.admin("GET", f"{topic.replace('://', '/')}/stats")["storageSize"]
    return found


def test_a_producer_waits_until_the_backlog_is_smaller(
    client: Any, server: ServerProcess, topic: str
) -> None:
    consumer = client.subscribe(topic, "sub")
    producer = client.create_producer(topic, batching_enabled=False)
    for payload in numbered(SENT):
        producer.send(payload)
    set_quota(server, topic, limitSize=size_of(server, topic), policy="producer_request_hold")
    server.admin("GET", CHECK)
    results: list[Any] = []
    producer.send_async(b"later", lambda *result: results.append(result[0]))
    receive(consumer, SENT, ack=True)
    # The client came back by itself, and what waited was stored.
    until(lambda: results == [pulsar.Result.Ok])
    assert receive(consumer, 1, ack=True)[0].data() == b"later"


def test_creating_a_producer_fails(
    new_client: Callable[[ServerProcess], Any], server: ServerProcess, topic: str
) -> None:
    client = new_client(server)
    client.subscribe(topic, "sub")
    publish(client, topic, numbered(SENT), batching_enabled=False)
    set_quota(server, topic, limitSize=1, policy="producer_exception")
    with pytest.raises(pulsar.ProducerBlockedQuotaExceededException):
        client.create_producer(topic)


def test_a_consumer_loses_the_oldest_messages(
    client: Any, server: ServerProcess, topic: str
) -> None:
    client.subscribe(topic, "sub").close()
    producer = client.create_producer(topic, batching_enabled=False)
    for payload in numbered(SENT):
        producer.send(payload)
    # Nine tenths of that are half of it.
    limit = size_of(server, topic) * 10 // 18
    set_quota(server, topic, limitSize=limit, policy="consumer_backlog_eviction")
    server.admin("GET", CHECK)
    producer.send(b"goes on")
    consumer = client.subscribe(topic, "sub", initial_position=EARLIEST)
    found = [each.data() for each in receive(consumer, SENT // 2)]
    assert found[-1] == b"goes on"
    assert found[:-1] == numbered(SENT)[-(SENT // 2 - 1) :]
