"""Rates as the official client meets them: back-pressure, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from tests.interop.serving import ServerProcess

_PATIENCE_MS = round(PATIENCE_S * 1000)


def limit(server: ServerProcess, topic: str, name: str, value: object) -> None:
    server.admin("POST", f"{topic.replace('://', '/')}/{name}", value)


def send_all(client: Any, topic: str, count: int) -> float:
    """Send so many messages one by one, in a pipeline; how long it took until all were stored."""
    producer = client.create_producer(topic, batching_enabled=False, send_timeout_millis=0)
    results: list[Any] = []
    done = threading.Event()

    def stored(result: Any, _: Any) -> None:
        results.append(result)
        if len(results) == count:
            done.set()

    began = time.monotonic()
    for number in range(count):
        producer.send_async(b"%d" % number, stored)
    assert done.wait(PATIENCE_S)
    assert set(results) == {pulsar.Result.Ok}
    producer.close()
    return time.monotonic() - began


def test_publishes_beyond_a_rate_come_late_and_whole(
    client: Any, server: ServerProcess, topic: str
) -> None:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    limit(server, topic, "publishRate", {"publishThrottlingRateInMsg": 100})
    assert send_all(client, topic, 180) > 0.75
    found = [reader.read_next(_PATIENCE_MS).data() for _ in range(180)]
    assert found == [b"%d" % number for number in range(180)]
    stats = server.admin("GET", f"{topic.replace('://', '/')}/stats")
    assert stats["publishRateLimitedTimes"] > 0


def test_other_connections_go_on_and_the_end_of_a_rate_frees_those_that_wait(
    client: Any, new_client: Callable[[ServerProcess], Any], server: ServerProcess, topic: str
) -> None:
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    # At this rate it would take days.
    limit(server, topic, "publishRate", {"publishThrottlingRateInByte": 1})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(send_all, client, topic, 180)
        send_all(new_client(server), f"{topic}-other", 200)
        assert not held.done()
        server.admin("DELETE", f"{topic.replace('://', '/')}/publishRate")
        held.result(PATIENCE_S)
    found = [reader.read_next(_PATIENCE_MS).data() for _ in range(180)]
    assert found == [b"%d" % number for number in range(180)]


@pytest.mark.parametrize("path", ["dispatchRate", "subscriptionDispatchRate", "sub/dispatchRate"])
def test_deliveries_beyond_a_rate_come_late_and_whole(
    client: Any, server: ServerProcess, topic: str, path: str
) -> None:
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.Shared)
    consumer.close()
    send_all(client, topic, 150)
    limit(server, topic, path, {"dispatchThrottlingRateInMsg": 100})
    began = time.monotonic()
    consumer = client.subscribe(topic, "sub", pulsar.ConsumerType.Shared)
    found = [consumer.receive(_PATIENCE_MS).data() for _ in range(150)]
    assert time.monotonic() - began > 0.45
    assert found == [b"%d" % number for number in range(150)]
