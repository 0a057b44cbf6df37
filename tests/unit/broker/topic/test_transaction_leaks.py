"""After many transactions, however they ended, the store is as it was: on virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.topic.legacy_txn_ends import LegacyTxnEnds
from magnetar.broker.topic.maintenance import CARE_SECONDS
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.server.repairs import Repairs
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.api import Transactions
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator.gc import TransactionGc
from magnetar.txn.coordinator_partitions import PARTITIONS, CoordinatorPartitions
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.txn.open_transactions import OpenTransactions
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import GROUPS
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_world import TxnWorld, joined, sent
from tests.unit.broker.world import consumer, message, receipts

LIMITS = Limits(managed_ledger_ledger_entries=20)
KEPT = [TopicName.parse(f"persistent://public/default/kept-{number}") for number in range(2)]
PASSING_EVERY = 25
SHORT_MS, LONG_MS = 2000, 3_600_000


class Process:
    """One broker with its coordinators."""

    def __init__(self, world: TxnWorld) -> None:
        parts = world.parts()
        store = TxnStore(parts.metadata)
        partitions = CoordinatorPartitions(
            parts.metadata, broker="b", url="pulsar://b:6650", limits=world.limits
        )
        self.world = world
        self.outcomes = Outcomes(store, world.clock, coordinates=partitions.coordinates)
        self._parts = replace(parts, transactions=Transactions(store, self.outcomes))
        self._store = store
        self._partitions = partitions
        self._sequence = 0
        self.topics: Topics
        self.coordinators: Coordinators

    async def start(self) -> None:
        self.topics = await self.world.topics(self._parts)
        open_transactions = OpenTransactions(
            self.outcomes, per_owner_max=self.world.limits.txn_open_per_owner_max
        )
        legacy = LegacyCoordinators(
            self._partitions,
            open_transactions,
            LegacyTxnEnds(self.topics),
            self._store,
            self._parts.ledgers,
            clock=self.world.clock,
            limits=self.world.limits,
        )
        self.coordinators = Coordinators(
            self._store,
            self._partitions,
            open_transactions,
            legacy,
            clock=self.world.clock,
            limits=self.world.limits,
            repair=Repairs(self.topics),
        )
        await self.outcomes.start()
        await self.coordinators.start()

    async def stop(self) -> None:
        for service in (self.coordinators, self.topics, self.outcomes):
            await service.stop()

    async def topic(self, name: TopicName) -> Topic:
        topic = await self.topics.get(name)
        assert isinstance(topic, Topic)
        if "s" not in topic.subscriptions:
            await topic.create_subscription("s", topic.ledger.first_position())
        return topic

    async def write(self, name: TopicName, txn: TxnId) -> None:
        """A plain message that the transaction acknowledges, and one of its own."""
        topic = await self.topic(name)
        producer = await joined(topic)
        self._sequence += 2
        producer.send(message(self._sequence))
        producer.send(sent(self._sequence + 1, txn))
        plain, _ = await receipts(producer, 2)
        subscription = topic.subscriptions["s"]
        reading = subscription.add_consumer(consumer())
        await subscription.ack_in_txn(reading, txn, [Ack(plain.position)], cumulative=False)
        subscription.remove_consumer(reading)
        await topic.remove_producer(producer)

    async def consume_all(self, name: TopicName) -> None:
        """Everything may be trimmed; what is loaded next begins a new ledger."""
        (await self.topic(name)).subscriptions["s"].skip_all()
        await self.topics.unload(name)
        await self.topic(name)


def records(world: TxnWorld) -> Counter[str]:
    """How many records each directory of the store has, those of groups apart."""
    tree = world.metadata._server.tree
    counts = {parent: len(each.records) for parent, each in tree._directories.items()}
    return Counter({parent: n for parent, n in counts.items() if n and parent != GROUPS})


async def transact(process: Process, random: Random, number: int, passing: TopicName) -> None:
    ends = random.choice(["commit", "commit", "abort", "nobody"])
    timeout_ms = SHORT_MS if ends == "nobody" else LONG_MS
    header = await process.coordinators.begin(number % PARTITIONS, timeout_ms)
    is_last = (number + 1) % PASSING_EVERY == 0
    for name in (KEPT[0], passing) if is_last else random.sample([*KEPT, passing], 2):
        await process.write(name, header.id)
    if is_last:
        # With the transaction open: what it wrote and acknowledged there goes along.
        if number % 2:
            await (await process.topic(passing)).delete_subscription("s", force=True)
        await process.topics.delete(passing, force=True)
    if ends != "nobody":
        await process.coordinators.end(header.id, commit=ends == "commit")


def left_behind(seed: int, count: int) -> Counter[str]:
    """What the store has more after so many transactions."""
    found: Counter[str] = Counter()

    async def main() -> None:
        world, random = TxnWorld(LIMITS), Random(seed)
        process = Process(world)
        await process.start()
        before: Counter[str] = Counter()
        for first, last in ((0, PARTITIONS), (PARTITIONS, PARTITIONS + count)):
            for number in range(first, last):
                passing = f"persistent://public/default/passing-{number // PASSING_EVERY}"
                await transact(process, random, number, TopicName.parse(passing))
            await asyncio.sleep(2 * SHORT_MS / 1000)  # nothing is open any more
            for topic in list(process.topics.loaded):
                if topic not in KEPT:
                    await process.topics.delete(topic, force=True)
            for topic in KEPT:
                await process.consume_all(topic)
            await asyncio.sleep(LIMITS.txn_retention_seconds + 3 * CARE_SECONDS)
            before, after = records(world), before
        found.update(before - after)
        await process.stop()

    run(main())
    return found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))]
)
def test_the_store_returns_to_its_baseline(seed: int) -> None:
    assert left_behind(seed, 200) == Counter()


async def _kept(self: MetadataTransactionBuffer, *_: object) -> None:
    return


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "rule", "directory"),
    [
        (TransactionGc, "_forget", "/txn/id"),
        (MetadataTransactionBuffer, "trimmed", "/txn/aborted"),
        (MetadataTransactionBuffer, "delete", "/txn/aborted"),
    ],
)
def test_what_nobody_removes_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, owner: type, rule: str, directory: str
) -> None:
    monkeypatch.setattr(owner, rule, _kept)
    assert left_behind(0, 60)[directory] > 0
