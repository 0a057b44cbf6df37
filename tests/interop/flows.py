"""What most tests with the official client do: send numbered messages, receive some, none more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S

RECEIVE_MS = round(1000 * PATIENCE_S)
NOTHING_MS = 200
"""How long nothing must come for a test to say that nothing comes."""

_AT_HAND_MS = 20

EARLIEST = pulsar.InitialPosition.Earliest


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(start, start + count)]


def send_all(producer: Any, payloads: list[bytes], **options: Any) -> list[Any]:
    """Send in order and wait for all; the message ids."""
    results: list[tuple[Any, Any]] = []
    for payload in payloads:
        producer.send_async(payload, lambda *result: results.append(result), **options)
    producer.flush()
    until(lambda: len(results) == len(payloads))  # a flush may return before the last callbacks
    assert [result for result, _ in results] == [pulsar.Result.Ok] * len(payloads)
    return [message_id for _, message_id in results]


def until(condition: Callable[[], bool]) -> None:
    """For what only the threads of the client bring about."""
    deadline = time.monotonic() + RECEIVE_MS / 1000
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert condition()


def publish(client: Any, topic: str, payloads: list[bytes], **options: Any) -> list[Any]:
    producer = client.create_producer(topic, **options)
    ids = send_all(producer, payloads)
    producer.close()
    return ids


def receive(consumer: Any, count: int, *, ack: bool = False) -> list[Any]:
    messages = []
    for _ in range(count):
        messages.append(consumer.receive(RECEIVE_MS))
        if ack:
            consumer.acknowledge(messages[-1])
    return messages


def payloads_of(messages: list[Any]) -> list[bytes]:
    return [message.data() for message in messages]


def receive_data(consumer: Any, count: int, *, ack: bool = True) -> list[bytes]:
    return payloads_of(receive(consumer, count, ack=ack))


def read_data(reader: Any, count: int) -> list[bytes]:
    return [reader.read_next(RECEIVE_MS).data() for _ in range(count)]


def assert_nothing_more(consumer: Any) -> None:
    with pytest.raises(pulsar.Timeout):
        consumer.receive(NOTHING_MS)


def gather(consumers: list[Any], count: int) -> list[list[Any]]:
    """What each of several consumers gets of `count` messages; acknowledged."""
    shares: list[list[Any]] = [[] for _ in consumers]
    deadline = time.monotonic() + RECEIVE_MS / 1000
    while sum(map(len, shares)) < count and time.monotonic() < deadline:
        for consumer, share in zip(consumers, shares, strict=True):
            share += _at_hand(consumer)
    assert sum(map(len, shares)) == count
    return shares


def _at_hand(consumer: Any) -> list[Any]:
    messages = []
    while True:
        try:
            messages.append(consumer.receive(_AT_HAND_MS))
        except pulsar.Timeout:
            return messages
        consumer.acknowledge(messages[-1])
