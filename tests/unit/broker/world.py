"""What the tests of topics share: brokers on servers in memory, messages, small waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from magnetar.broker.api import AccessMode, ProducerRequest, Receipt, SubscribeRequest
from magnetar.broker.entries import EntryView
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.namespaces import Namespaces
from magnetar.broker.policy.records import TopicRecord
from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.publish.producer import Producer
from magnetar.broker.publish.producers import ProducerNames
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.broker.topic.topics import Topics
from magnetar.ledger.memory import MemoryLedgers, MemoryLedgerStore
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.clock import Clock, LoopClock
from magnetar.runtime.limits import Limits
from magnetar.wire.messages import RareSend, Send, SendRun, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb

EPOCH_MS = 1_700_000_000_000
NAME = TopicName.parse("persistent://public/default/orders")


class World:
    """Servers that outlive brokers. Made inside the event loop of a test."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.clock: Clock = LoopClock(EPOCH_MS)
        self.metadata = MemoryMetadata(self.clock)
        self.ledgers = MemoryLedgers()
        self.limits = limits or Limits()

    def parts(self) -> TopicParts:
        """One broker: its stores and what its topics share."""
        metadata = self.metadata.connect()
        return TopicParts(
            metadata,
            self.ledgers.connect(),
            Schemas(metadata, self.clock),
            self.clock,
            self.limits,
            ProducerNames(metadata, "standalone"),
            "broker",
        )

    def kill(self, parts: TopicParts) -> None:
        """Without a word: what was queued is lost."""
        assert isinstance(parts.metadata, MemoryStore)
        assert isinstance(parts.ledgers, MemoryLedgerStore)
        self.metadata.drop(parts.metadata)
        self.ledgers.drop(parts.ledgers)

    async def topics(self, parts: TopicParts | None = None) -> Topics:
        parts = parts or self.parts()
        namespaces = Namespaces(parts.metadata, "standalone")
        await namespaces.open()
        topics = Topics(parts, namespaces)
        await topics.start()
        return topics

    async def topic(self, parts: TopicParts | None = None, *, dedup: bool = False) -> Topic:
        """One topic, without those who keep records of it."""
        policies = TopicPolicies(deduplication=dedup)
        return await Topic.open(NAME, parts or self.parts(), TopicRecord(EPOCH_MS), policies)


# --- what clients send ---


def options(
    producer_id: int = 1,
    name: str | None = "p",
    *,
    connection: object = None,
    epoch: int = 0,
    mode: AccessMode = AccessMode.SHARED,
    topic_epoch: int | None = None,
) -> ProducerRequest:
    return ProducerRequest(
        producer_id,
        connection,
        name,
        epoch=epoch,
        access_mode=mode,
        topic_epoch=topic_epoch,
    )


def consumer(
    subscription: str = "s",
    type: SubscriptionType = SubscriptionType.EXCLUSIVE,
    *,
    durable: bool = True,
    consumer_id: int = 1,
) -> SubscribeRequest:
    return SubscribeRequest(subscription, type, consumer_id, None, name="c", durable=durable)


def entry(
    sequence_id: int,
    text: str = "x",
    *,
    producer: str = "p",
    publish_time: int = EPOCH_MS,
    batch: int | None = None,
    chunk: tuple[int, int] | None = None,
) -> bytes:
    """headers_and_payload of a message; `chunk` is its number and how many there are."""
    metadata = pb.MessageMetadata(
        producer_name=producer, sequence_id=sequence_id, publish_time=publish_time
    )
    if batch is not None:
        metadata.num_messages_in_batch = batch
    if chunk is not None:
        metadata.chunk_id, metadata.num_chunks_from_msg = chunk
    return encode_entry(metadata, text.encode())


def message(sequence_id: int, text: str = "x", *, batch: int | None = None) -> Send:
    # So many messages need some bytes each.
    text = text.ljust(5 * batch) if batch else text
    return Send(1, sequence_id, batch or 1, entry(sequence_id, text, batch=batch))


def rare(
    sequence_id: int,
    *,
    highest: int | None = None,
    chunk: tuple[int, int] | None = None,
    txn: bool = False,
    checksum_ok: bool = True,
) -> RareSend:
    command = pb.CommandSend(producer_id=1, sequence_id=sequence_id)
    if highest is not None:
        command.highest_sequence_id = highest
    if txn:
        command.txnid_most_bits = command.txnid_least_bits = 1
    command.is_chunk = chunk is not None
    return RareSend(command, entry(sequence_id, chunk=chunk), checksum_ok)


def run_of(sends: Sequence[Send]) -> SendRun:
    """Sends as a connection hands them out when they came together."""
    run = SendRun(sends[0])
    for each in sends[1:]:
        run.sequence_ids.append(each.sequence_id)
        run.counts.append(each.num_messages)
        run.payloads.append(each.headers_and_payload)
        run.size += len(each.headers_and_payload)
    return run


# --- small waits ---


async def due(producer: Producer) -> list[Receipt]:
    """The next receipts, one for each send; none: it has ended."""
    found: list[Receipt] = []
    while not (taken := producer.take_receipts()) and not producer.has_ended:
        first = producer.first_in_flight
        await (asyncio.sleep(0.001) if first is None else asyncio.wait({first}))
    for each in taken:
        if isinstance(each, Receipt):
            found.append(each)
            continue
        for number, sequence_id in enumerate(each.sequence_ids):
            position = Position(each.first.ledger_id, each.first.entry_id + number)
            found.append(Receipt(sequence_id, None, position))
    return found


async def receipts(producer: Producer, count: int) -> list[Receipt]:
    """The next receipts, or fewer if the producer ends before."""
    found: list[Receipt] = []
    while len(found) < count:
        some = await due(producer)
        if not some:
            break
        found += some
    return found


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; bounded."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came to hold")


async def stored(topic: Topic) -> list[int]:
    """The sequence ids in the log of a topic."""

    found = await topic.ledger.read(topic.ledger.first_position(), 10_000)
    return [EntryView.of(each).sequence_id for each in found]
