"""Brokers with transactions on servers in memory: begin, publish, end, read, kill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from magnetar.broker.api import Receipt
from magnetar.broker.dispatch.consumer import Consumer
from magnetar.broker.entries import EntryView
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.records import TopicRecord
from magnetar.broker.publish.producer import Producer
from magnetar.broker.topic.topic import Topic, TopicParts
from magnetar.errors import TransactionNotFound
from magnetar.metadata.memory import MemoryMetadata, MemoryStore
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn import transitions
from magnetar.txn.api import Transactions
from magnetar.txn.ids import metadata_id, to_text
from magnetar.txn.outcomes import GATHER_SECONDS, Outcomes
from magnetar.txn.records import ABORTED_RECORDS, OPS, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import Send, TxnId, TxnSend, encode_entry, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.broker.world import EPOCH_MS, NAME, World, consumer, message, options, receipts

T1, T2, T3 = (metadata_id(0, number) for number in (1, 2, 3))
TIMEOUT_MS = 600_000


class LegacyCoordinator:
    """The coordinators of legacy transactions: what they say of one that wants to take part."""

    def __init__(self) -> None:
        self.over: set[TxnId] = set()
        """Of which they know that they are not open."""
        self.places: dict[TxnId, list[tuple[str, str | None]]] = {}
        """Where others take part."""

    def takes_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> bool | None:
        if txn in self.over:
            return False
        return True if (topic, subscription) in self.places.get(txn, []) else None

    async def take_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> None:
        if txn in self.over:
            raise TransactionNotFound(f"there is no transaction {to_text(txn)}")
        self.places.setdefault(txn, []).append((topic, subscription))


class Broker:
    """One process: its stores, what it knows of transactions, its topics."""

    def __init__(
        self, world: TxnWorld, *, coordinates: bool = True, shares_journal: bool = False
    ) -> None:
        self.world = world
        parts = world.parts()
        self.store = TxnStore(parts.metadata)
        self.legacy = LegacyCoordinator()
        self.outcomes = Outcomes(
            self.store,
            world.clock,
            coordinates=lambda _: coordinates,
            legacy=lambda: self.legacy,
        )
        transactions = Transactions(self.store, self.outcomes, shares_journal, parts.limits)
        self.parts: TopicParts = replace(parts, transactions=transactions)

    async def topic(self, name: TopicName = NAME, *, dedup: bool = False) -> Topic:
        limits = self.parts.limits
        policies = TopicPolicies(
            deduplication=dedup,
            max_unacked_per_consumer=limits.consumer_unacked_messages,
            max_unacked_per_subscription=limits.subscription_unacked_messages,
        )
        return await Topic.open(name, self.parts, TopicRecord(EPOCH_MS), policies)

    def kill(self) -> None:
        self.world.kill(self.parts)

    async def begin(self, txn: TxnId) -> TxnId:
        header = transitions.begun(txn, now_ms=self.world.clock.now_ms(), timeout_ms=TIMEOUT_MS)
        await self.store.create(header)
        self.outcomes.opened(header.id)
        return txn

    async def end(self, txn: TxnId, state: State) -> None:
        await self.store.end(txn, state, self.world.clock.now_ms())
        self.outcomes.learn(txn, state)
        await asyncio.sleep(0)  # an answer comes a turn of the loop later, too

    async def commit(self, txn: TxnId) -> None:
        await self.end(txn, "COMMITTED")

    async def abort(self, txn: TxnId) -> None:
        await self.end(txn, "ABORTED")

    async def keys(self) -> list[str]:
        """All records of transactions but headers."""
        metadata = self.world.metadata.connect()
        found = [
            key for parent in (OPS, ABORTED_RECORDS) for key in await metadata.scan_keys(parent)
        ]
        await metadata.close()
        return found


class TxnWorld(World):
    """Made inside the event loop of a test. `slow`: how long the store takes for a request."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.slow = 0.0
        self.metadata = MemoryMetadata(self.clock, delay=self._pass)

    async def _pass(self) -> None:
        if self.slow:
            await asyncio.sleep(self.slow)

    def broker(self, *, coordinates: bool = True, shares_journal: bool = False) -> Broker:
        return Broker(self, coordinates=coordinates, shares_journal=shares_journal)


def in_txn_world(
    scenario: Callable[[TxnWorld], Awaitable[None]], limits: Limits | None = None
) -> None:
    async def main() -> None:
        await scenario(TxnWorld(limits))

    run(main())


# --- publishing


def sent(
    sequence_id: int,
    txn: TxnId | None,
    text: str = "x",
    *,
    carried: TxnId | None = None,
    is_carried: bool = True,
    producer: str = "p",
) -> Send:
    """A SEND as a connection hands it out; `carried` is what its metadata says instead, if any."""
    metadata = pb.MessageMetadata(
        producer_name=producer, sequence_id=sequence_id, publish_time=EPOCH_MS
    )
    if txn is None:
        return Send(1, sequence_id, 1, encode_entry(metadata, text.encode()))
    if is_carried:
        metadata.txnid_most_bits, metadata.txnid_least_bits = carried or txn
    return TxnSend(1, sequence_id, 1, encode_entry(metadata, text.encode()), txn)


async def joined(topic: Topic, name: str = "p") -> Producer:
    return await topic.add_producer(options(name=name))


async def publish(
    producer: Producer, txn: TxnId | None, *texts: str, first: int = 0
) -> list[Receipt]:
    """Messages with these texts, numbered from `first`."""
    for number, text in enumerate(texts, first):
        producer.send(
            message(number, text) if txn is None else sent(number, txn, text, producer="p")
        )
    return await receipts(producer, len(texts))


def errors(found: Sequence[Receipt]) -> list[str | None]:
    return [None if each.error is None else each.error.name for each in found]


# --- reading


def text_of(payload: bytes) -> str:
    return payload[payload_offset(payload) :].decode()


async def attach(topic: Topic, subscription: str = "s", *, permits: int = 10_000) -> Consumer:
    wanted = consumer(subscription)
    if subscription not in topic.subscriptions:
        await topic.create_subscription(subscription, Position(-1, -1))
    found = await topic.subscription(wanted)
    reading = found.add_consumer(wanted)
    reading.flow(permits)
    return reading


async def quiet(seconds: float = 3 * GATHER_SECONDS) -> None:
    """Until nothing happens any more: what decisions leave to be written is written."""
    await asyncio.sleep(seconds)


async def taken(reading: Consumer) -> list[str]:
    """What a consumer has got by now."""
    await quiet()
    return [text_of(each.payload) for each in reading.take()]


async def read_all(topic: Topic, subscription: str) -> list[str]:
    """What a new subscription from the earliest message sees."""
    return await taken(await attach(topic, subscription))


def cut(broker: Broker, *, in_flight_arrives: bool = False) -> None:
    assert isinstance(broker.parts.metadata, MemoryStore)
    broker.world.metadata.cut(broker.parts.metadata, in_flight_arrives=in_flight_arrives)


def heal(broker: Broker) -> None:
    assert isinstance(broker.parts.metadata, MemoryStore)
    broker.world.metadata.heal(broker.parts.metadata)


async def log_of(topic: Topic) -> list[str]:
    """Everything in the log, visible or not."""
    entries = await topic.ledger.read(topic.ledger.first_position(), 10_000)
    return [text_of(EntryView.of(each).payload) for each in entries]
