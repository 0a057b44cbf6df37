"""What the tests of compaction share: tables in topics, written and read as clients do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from magnetar.broker.api import Delivery, SubscribeRequest
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.topic.topic import Topic
from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    open_entry,
    single_entry,
)
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING
from magnetar.model.ids import EARLIEST, MessageId, Position
from magnetar.model.subscriptions import COMPACTION, InitialPosition, SubscriptionType
from magnetar.wire.compression import Compression
from magnetar.wire.messages import Send
from tests.unit.broker.world import EPOCH_MS, options, receipts


class Row(NamedTuple):
    """A message as a reader gets it."""

    key: str
    value: bytes
    position: Position
    place: int
    """Its index in its batch; -1: it is none."""


class Table:
    """A topic that is written."""

    def __init__(self, topic: Topic, producer: Producer) -> None:
        self.topic = topic
        self.producer = producer
        self.values: dict[str, bytes] = {}
        """What a reader of everything knows in the end."""
        self._sequence = 0

    @classmethod
    async def of(cls, topic: Topic, name: str = "p") -> Table:
        return cls(topic, await topic.add_producer(options(name=name)))

    async def put(
        self, *rows: tuple[str | None, bytes], kind: Compression = Compression.NONE
    ) -> Position:
        """One entry: of one row a message, of several a batch."""
        messages = []
        for key, value in rows:
            message = Outgoing(payload=value, sequence_id=self._sequence, key=key)
            messages.append(message)
            self._sequence += 1
            if key is not None:
                self.values.pop(key, None)
                if value:
                    self.values[key] = value
        stamp = Stamp("p", EPOCH_MS + messages[0].sequence_id, kind)
        made = single_entry(messages[0], stamp) if len(rows) == 1 else batch_entry(messages, stamp)
        self.producer.send(Send(1, messages[0].sequence_id, len(rows), made.headers_and_payload))
        (receipt,) = await receipts(self.producer, 1)
        assert receipt.error is None
        return receipt.position

    async def put_all(self, rows: Iterable[tuple[str, bytes]]) -> None:
        for row in rows:
            await self.put(row)


async def compact(topic: Topic) -> None:
    topic.compaction.begin()
    await topic.compaction.ended()
    assert topic.compaction.report.status == "SUCCESS", topic.compaction.report


async def trim(topic: Topic) -> list[int]:
    """Drop what is compacted, as far as its ledgers are closed."""
    gone = await topic.trim(KEEP_NOTHING)
    for ledger_id in gone:
        assert ledger_id <= topic.ledger.cursor(COMPACTION).mark_delete.ledger_id
    return gone


def compacted(
    subscription: str = "reader",
    type: SubscriptionType = SubscriptionType.EXCLUSIVE,
    *,
    durable: bool = False,
    start: MessageId | None = EARLIEST,
) -> SubscribeRequest:
    return SubscribeRequest(
        subscription,
        type,
        1,
        None,
        name="c",
        durable=durable,
        start=None if durable else start,
        initial_position=InitialPosition.EARLIEST,
        read_compacted=True,
    )


def rows_in(delivery: Delivery) -> list[Row]:
    opened = open_entry(delivery.payload)
    if not opened.is_batch:
        key = opened.metadata.partition_key
        return [Row(key, opened.payload, delivery.position, -1)]
    return [
        Row(said.partition_key, payload, delivery.position, index)
        for index, (said, payload) in enumerate(messages_in(opened))
        if not said.compacted_out
    ]


async def read(topic: Topic, request: SubscribeRequest | None = None) -> list[Row]:
    """All that a compacted reader gets until it has the last message, and then nothing more."""
    request = request or compacted()
    subscription = await topic.subscription(request)
    consumer = subscription.add_consumer(request)
    consumer.flow(1_000_000)
    last = await topic.last_message(compacted=True)
    found: list[Row] = []

    def has_all() -> bool:
        for delivery in consumer.take():
            found.extend(rows_in(delivery))
            subscription.ack(consumer, [Ack(delivery.position, 0)], cumulative=True)
        return last.position.entry_id < 0 or (
            bool(found) and (found[-1].position, found[-1].place) == last
        )

    # Disks of tests take time, too.
    for _ in range(1000):
        if has_all():
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert has_all()
    assert not consumer.take()
    assert not consumer.unacked, "nothing of it is remembered once it is acknowledged"
    subscription.remove_consumer(consumer)
    await topic.release(subscription)
    return found


def folded(rows: Iterable[Row]) -> dict[str, bytes]:
    """What a table has that takes these rows one after the other."""
    found: dict[str, bytes] = {}
    for row in rows:
        found.pop(row.key, None)
        if row.value:
            found[row.key] = row.value
    found.pop("", None)
    return found
