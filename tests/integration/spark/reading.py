"""What topics hold, read back with the client: the exact messages, in the order of delivery."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from harness.limits import PATIENCE_S
from magnetar import InitialPosition
from magnetar.blocking import Client
from magnetar.client.blocking.loop_thread import LoopThread
from magnetar.client.message.message import Message
from magnetar.errors import DeadlineExceeded

LoopThread().stop()  # the first loop of a process opens a pipe for signals that stays

_SILENCE_S = 0.3


def messages(client: Client, topic: str, count: int) -> list[Message[bytes]]:
    """All committed messages of a topic: `count` are waited for, and there may be no more."""
    name = f"check-{uuid.uuid4().hex}"
    position = InitialPosition.EARLIEST
    consumer: Any
    if topic.startswith("topic://"):
        consumer = client.stream_consumer(topic, name, initial_position=position)
    else:
        consumer = client.consumer(topic, name, initial_position=position)
    found: list[Message[bytes]] = []
    with consumer:
        while True:
            wait_s = PATIENCE_S if len(found) < count else _SILENCE_S
            try:
                found.append(consumer.receive(timeout=wait_s))
            except DeadlineExceeded:
                return found
            # The children of a segment come when everything of it is acknowledged.
            consumer.ack_cumulative(found[-1])


def check_numbers(found: Iterable[Message[bytes]], expected: Iterable[int]) -> None:
    """Payloads are numbers: exactly these, each once, ascending for each key."""
    by_key = defaultdict(list)
    for message in found:
        by_key[message.key].append(int(message.value))
    for key, numbers in by_key.items():
        assert numbers == sorted(numbers), f"key {key} is out of order"
    seen = sorted(number for numbers in by_key.values() for number in numbers)
    wanted = sorted(expected)
    twice = sorted({number for number in seen if seen.count(number) > 1})
    missing = sorted(set(wanted) - set(seen))
    strange = sorted(set(seen) - set(wanted))
    assert seen == wanted, f"twice: {twice}, missing: {missing}, strange: {strange}"
