"""Compacted reading as the official client sees it: readers, consumers and table views."""

from __future__ import annotations

from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from tests.interop.flows import EARLIEST, RECEIVE_MS, receive, until
from tests.interop.serving import ServerProcess

EVERYTHING = pulsar.MessageId.earliest
ROWS = [("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1"), ("b", b""), ("d", b"1"), ("a", b"3")]
LEFT = [("c", b"1"), ("d", b"1"), ("a", b"3")]


def put(client: Any, topic: str, rows: list[tuple[str, bytes]], *, batched: bool) -> None:
    """Send them, and wait for all receipts; in one batch if they are batched."""
    producer = client.create_producer(
        topic, batching_enabled=batched, batching_max_publish_delay_ms=200
    )
    receipts: list[Any] = []
    for key, value in rows:
        producer.send_async(value, lambda *result: receipts.append(result), partition_key=key)
    producer.flush()
    until(lambda: len(receipts) == len(rows))
    producer.close()


def compact(server: ServerProcess, topic: str) -> None:
    path = f"{topic.replace('://', '/')}/compaction"
    server.admin("PUT", path)
    until(lambda: server.admin("GET", path)["status"] == "SUCCESS")


def read_all(reader: Any) -> list[tuple[str, bytes]]:
    """As applications do: as long as there is something."""
    found = []
    while reader.has_message_available():
        message = reader.read_next(RECEIVE_MS)
        found.append((message.partition_key(), message.data()))
    return found


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_reader_of_a_compacted_topic(
    client: Any, server: ServerProcess, topic: str, batched: bool
) -> None:
    put(client, topic, ROWS, batched=batched)
    reader = client.create_reader(topic, EVERYTHING, is_read_compacted=True)
    assert read_all(reader) == ROWS, "it was not compacted yet"
    compact(server, topic)
    compacted = client.create_reader(topic, EVERYTHING, is_read_compacted=True)
    assert read_all(compacted) == LEFT
    assert read_all(client.create_reader(topic, EVERYTHING)) == ROWS
    put(client, topic, [("c", b""), ("e", b"1")], batched=batched)
    assert read_all(compacted) == [("c", b""), ("e", b"1")]
    compact(server, topic)
    again = client.create_reader(topic, EVERYTHING, is_read_compacted=True)
    assert read_all(again) == [*LEFT[1:], ("e", b"1")]


def test_a_topic_of_which_nothing_is_left(client: Any, server: ServerProcess, topic: str) -> None:
    put(client, topic, [("a", b"1"), ("a", b"")], batched=False)
    compact(server, topic)
    reader = client.create_reader(topic, EVERYTHING, is_read_compacted=True)
    assert not reader.has_message_available()


@pytest.mark.parametrize(
    "kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover], ids=["one", "failover"]
)
def test_a_consumer_of_a_compacted_topic(
    client: Any, server: ServerProcess, topic: str, kind: Any
) -> None:
    put(client, topic, ROWS, batched=True)
    compact(server, topic)
    consumer = client.subscribe(
        topic, "sub", kind, is_read_compacted=True, initial_position=EARLIEST
    )
    found = receive(consumer, 3, ack=True)
    assert [(each.partition_key(), each.data()) for each in found] == LEFT


def test_a_table_view_of_a_trimmed_topic(client: Any, server: ServerProcess, topic: str) -> None:
    path = topic.replace("://", "/")
    put(client, topic, ROWS, batched=True)
    compact(server, topic)
    # The load begins a ledger, and nothing holds the former one any more.
    server.admin("PUT", f"{path}/unload")
    server.admin("POST", f"{path}/trim")
    assert server.admin("GET", f"{path}/internalStats")["numberOfEntries"] == 0
    view = client.create_table_view(topic)
    table: dict[str, bytes] = {}
    view.for_each(table.__setitem__)
    assert table == dict(LEFT)
    put(client, topic, [("a", b"4")], batched=False)
    until(lambda: view.get("a") == b"4")
