"""Limits of a topic as the official client meets them: which error it raises."""

from __future__ import annotations

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
