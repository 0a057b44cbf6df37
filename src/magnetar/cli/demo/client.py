"""The official Pulsar client at work for `magnetar demo`, in a process of its own.

    python -m magnetar.cli.demo.client round-trip URL TOPIC COUNT
    python -m magnetar.cli.demo.client read URL TOPIC

Owns: what the demonstration asks of the official client. `round-trip` sends so many messages, gets
and acknowledges them; `read` reads the topic from its first message to its last. Both print each
message that they got on a line. The client is no dependency of Magnetar: whoever calls this has
looked whether it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

_RECEIVE_MS = 10_000


def round_trip(client: Any, topic: str, count: int) -> Iterator[str]:
    # Before anything is sent: a new subscription starts at the end of the topic.
    consumer = client.subscribe(topic, "demo")
    producer = client.create_producer(topic)
    for number in range(count):
        producer.send(f"hello {number}".encode())
    for _ in range(count):
        message = consumer.receive(_RECEIVE_MS)
        consumer.acknowledge(message)
        yield message.data().decode()


def read(client: Any, topic: str) -> Iterator[str]:
    reader = client.create_reader(topic, import_module("pulsar").MessageId.earliest)
    while reader.has_message_available():
        yield reader.read_next(_RECEIVE_MS).data().decode()


def main(arguments: Sequence[str]) -> None:
    kind, url, topic, *count = arguments
    pulsar = import_module("pulsar")
    # Lines of its log would come between those of the messages.
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(url, logger=quiet)
    try:
        is_read = kind == "read"
        got = read(client, topic) if is_read else round_trip(client, topic, int(count[0]))
        sys.stdout.writelines(f"{text}\n" for text in got)
    finally:
        client.close()


if __name__ == "__main__":
    main(sys.argv[1:])
