"""Messages that expire, as the official client meets it: they are gone, waiting ones too."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pulsar  # type: ignore[import-untyped]

from tests.interop.flows import EARLIEST, RECEIVE_MS, numbered
from tests.interop.serving import ServerProcess

OLD_S = 1.1


def test_what_is_too_old_does_not_come(client: Any, server: ServerProcess, topic: str) -> None:
    shared = pulsar.ConsumerType.Shared
    consumer = client.subscribe(topic, "sub", shared, initial_position=EARLIEST)
    producer = client.create_producer(topic, batching_enabled=False)
    for payload in numbered(5):
        producer.send(payload)
    producer.send(b"waits", deliver_after=timedelta(hours=1))
    held = consumer.receive(RECEIVE_MS)
    time.sleep(OLD_S)
    producer.send(b"young")
    path = topic.replace("://", "/")
    server.admin("POST", f"{path}/subscription/sub/expireMessages/1")
    consumer.acknowledge(held)  # too late, and no error
    consumer.close()
    assert server.admin("GET", f"{path}/stats")["subscriptions"]["sub"]["msgBacklog"] == 1
    consumer = client.subscribe(topic, "sub", shared)
    assert consumer.receive(RECEIVE_MS).data() == b"young"
