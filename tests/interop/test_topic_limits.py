"""Limits of a topic as the official client meets them: which error it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.serving import ServerProcess


def limit(server: ServerProcess, topic: str, name: str, value: object) -> None:
    server.admin("POST", f"{topic.replace('://', '/')}/{name}", value)


def test_consumers_beyond_a_limit_are_refused(
    client: Any, server: ServerProcess, topic: str
) -> None:
    shared = pulsar.ConsumerType.Shared
    first = client.subscribe(topic, "sub", shared)
    limit(server, topic, "maxConsumersPerSubscription", 1)
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "sub", shared)
    first.close()
    client.subscribe(topic, "sub", shared)
    limit(server, topic, "maxConsumers", 1)
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "other", shared)


def test_producers_beyond_a_limit_are_refused(
    client: Any, server: ServerProcess, topic: str
) -> None:
    client.create_producer(topic)
    limit(server, topic, "maxProducers", 1)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)


def test_types_and_numbers_of_subscriptions(client: Any, server: ServerProcess, topic: str) -> None:
    shared = pulsar.ConsumerType.Shared
    client.subscribe(topic, "sub", shared)
    limit(server, topic, "subscriptionTypesEnabled", ["Shared"])
    with pytest.raises(pulsar.NotAllowedError):
        client.subscribe(topic, "another", pulsar.ConsumerType.Exclusive)
    limit(server, topic, "maxSubscriptionsPerTopic", 1)
    with pytest.raises(pulsar.NotAllowedError):
        client.subscribe(topic, "another", shared)


def test_a_consumer_that_comes_too_often_is_refused(
    new_client: Callable[[ServerProcess], Any], server: ServerProcess, topic: str
) -> None:
    def come(name: str) -> None:
        # Of each client it is the first consumer, and so the same one to the server.
        new_client(server).subscribe(topic, "sub", consumer_name=name).close()

    come("often")
    rate = {"subscribeThrottlingRatePerConsumer": 1, "ratePeriodInSecond": 60}
    limit(server, topic, "subscribeRate", rate)
    come("often")
    with pytest.raises(pulsar.NotAllowedError):
        come("often")
    come("once")
