"""Transactions while segments split and merge, connections break and brokers die.

Whatever happens: what was committed is stored once, in the order of its keys, and nothing else is.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.produce.producer import Producer
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction
from magnetar.client.transaction.transaction_core import TransactionCore
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play, stored
from tests.integration.client.test_producing_in_trouble import (
    Trouble,
    cut_links,
    merge,
    replace,
    restart,
    split,
)
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
OUTPUT = "persistent://public/default/results"
MESSAGES = 8
SEEDS = range(4)


class Written:
    """What was committed, by key."""

    def __init__(self) -> None:
        self.committed: dict[str, list[bytes]] = defaultdict(list)
        self.failed: list[MagnetarError] = []

    async def attempt(self, client: Client, producer: Producer[bytes], key: str) -> None:
        """One transaction: it becomes a part of this, or nothing of it is stored."""
        begun = len(self.committed[key])
        sent = [b"%d" % (begun + number) for number in range(MESSAGES)]
        txn: Transaction | None = None
        try:
            txn = await client.transaction(timeout=300)
            for payload in sent:
                await producer.submit(payload, key=key, txn=txn)
                await asyncio.sleep(0.005)
            await txn.commit()
        except MagnetarError as error:
            self.failed.append(error)
            if txn is None or not await was_committed(txn):
                return
        self.committed[key] += sent

    async def check(self, stage: Stage, topic: str = NAME) -> None:
        found: dict[str, list[bytes]] = defaultdict(list)
        for message in await stored(stage, topic):
            found[message.key].append(message.payload)
        assert dict(found) == {key: sent for key, sent in self.committed.items() if sent}


async def was_committed(txn: Transaction) -> bool:
    """Abort it, or learn that it was committed; until one of these is known."""
    for _ in range(20):
        if txn.state.is_final:
            return txn.state is TransactionState.COMMITTED
        try:
            await txn.abort()
        except MagnetarError:
            await asyncio.sleep(1)
    raise AssertionError(f"no outcome: {txn}")


def write(
    seed: int,
    troubles: Sequence[Trouble],
    *,
    writers: int,
    rounds: int = 3,
    brokers: str = "a",
    may_fail: bool = False,
) -> None:
    chance = Random(f"{seed} transactions in trouble")

    async def story(stage: Stage) -> None:
        await stage.create()
        written = Written()
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def one(key: str) -> None:
                for _ in range(rounds):
                    await written.attempt(client, producer, key)

            running = asyncio.gather(*(one(f"k{number}") for number in range(writers)))
            for trouble in troubles:
                await asyncio.sleep(0.1 * chance.random())
                await trouble(stage, chance)
            await running
            await asyncio.sleep(1)
        await written.check(stage)
        if not may_fail:
            assert not written.failed
            assert all(len(sent) == rounds * MESSAGES for sent in written.committed.values())

    play(story, brokers=brokers)


@pytest.mark.parametrize("seed", SEEDS)
def test_splits_and_merges(seed: int) -> None:
    write(seed, [split, merge, split, split, merge], writers=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_sixty_four_at_once_over_splits_and_merges(seed: int) -> None:
    write(seed, [split, split, merge, split, merge, merge], writers=64, rounds=8)


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_connections(seed: int) -> None:
    troubles = [cut_links, split, cut_links, merge, cut_links]
    write(seed, troubles, writers=6, may_fail=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_brokers_that_die(seed: int) -> None:
    write(seed, [restart, split, restart], writers=6, may_fail=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_coordinators_move_between_brokers(seed: int) -> None:
    write(seed, [replace, split, replace], writers=6, brokers="abc", may_fail=True)


def test_harm_of_committing_what_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a transaction that was committed is missing."""

    async def nothing(self: TransactionCore) -> None:
        """Do not wait."""

    monkeypatch.setattr(TransactionCore, "_flush", nothing)
    troubles = [cut_links, split, cut_links, merge]
    with pytest.raises(AssertionError):
        list(map(partial(write, troubles=troubles, writers=6, may_fail=True), SEEDS))


def test_a_lost_server_is_waited_for() -> None:
    """Requests are repeated while their time lasts; then the outcome is unknown, and says so."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            txn = await client.transaction(timeout=3600)
            await producer.send(b"1", key="k", txn=txn)
            await stage.host.kill()
            committing = asyncio.create_task(txn.commit())
            await asyncio.sleep(10)
            assert await stage.host.start()
            await committing
            other = await client.transaction(timeout=3600)
            await producer.send(b"2", key="k", txn=other)
            await stage.host.kill()
            with pytest.raises(MagnetarError):
                await other.commit()
            assert other.state is TransactionState.ERROR
            assert await stage.host.start()
            await other.commit()
        assert [each.payload for each in await stored(stage)] == [b"1", b"2"]

    play(story)


def test_an_abort_without_a_server_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream had acknowledged is fetched again: with pauses, until there is a server."""
    tries = 0
    connect = BrokerConnection.open

    async def counted(*what: Any, **how: Any) -> BrokerConnection:
        nonlocal tries
        tries += 1
        assert tries < 1000, "it tries without a pause"
        return await connect(*what, **how)

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.stream_consumer(NAME, "s", initial_position=FIRST) as consumer,
        ):
            await producer.send(b"1", key="k")
            txn = await client.transaction(timeout=5)
            await consumer.ack_cumulative(await consumer.receive(timeout=20.0), txn=txn)
            monkeypatch.setattr(BrokerConnection, "open", counted)
            await stage.host.kill()
            await asyncio.sleep(60)
            assert txn.state is TransactionState.TIMED_OUT
            assert await stage.host.start()
            assert (await consumer.receive(timeout=60.0)).value == b"1"

    play(story)


# --- consume, transform, produce


async def transform(client: Client, consumer: Any, output: Producer[bytes], crash: Random) -> bool:
    """A few messages, whose results are stored with their acknowledgements; False: none came."""
    try:
        messages = [await consumer.receive(timeout=30.0)]
    except DeadlineExceeded:
        return False
    messages += await consumer.receive_many(4, timeout=0.01)
    txn = await client.transaction(timeout=300)
    try:
        for message in messages:
            await output.submit(b"<%s>" % message.value, key=message.key, txn=txn)
            if not hasattr(consumer, "ack_cumulative"):
                consumer.ack(message, txn=txn)
        if hasattr(consumer, "ack_cumulative"):
            consumer.ack_cumulative(messages[-1], txn=txn)
        if crash.random() < 0.2:
            await txn.abort()
        else:
            await txn.commit()
    except MagnetarError:
        await was_committed(txn)
    return True


@pytest.mark.parametrize("kind", ["queue", "stream"])
@pytest.mark.parametrize(
    "troubles", [[split, merge, split], [cut_links, split, cut_links, merge, cut_links]]
)
def test_each_input_has_one_result(kind: str, troubles: Sequence[Trouble]) -> None:
    transform_all(0, kind, troubles)


def transform_all(seed: int, kind: str, troubles: Sequence[Trouble]) -> None:
    chance = Random(f"{seed} {kind} {len(troubles)}")
    count = 60

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as source,
            await client.producer(OUTPUT) as output,
        ):
            make: Any = client.queue_consumer if kind == "queue" else client.stream_consumer

            async def fill() -> None:
                for number in range(count):
                    await source.submit(b"%d" % number, key=f"k{number % 6}")
                    await asyncio.sleep(0.01)
                await source.flush()

            async with await make(NAME, "s", initial_position=FIRST) as consumer:

                async def work() -> None:
                    while await transform(client, consumer, output, chance):
                        pass

                running = asyncio.gather(fill(), work())
                for trouble in troubles:
                    await asyncio.sleep(0.1 + 0.1 * chance.random())
                    await trouble(stage, chance)
                await running
        found: dict[str, list[bytes]] = defaultdict(list)
        for message in await stored(stage, OUTPUT):
            found[message.key].append(message.payload)
        wanted: dict[str, list[bytes]] = defaultdict(list)
        for number in range(count):
            wanted[f"k{number % 6}"].append(b"<%d>" % number)
        if kind == "queue":
            found = {key: sorted(each) for key, each in found.items()}
            wanted = {key: sorted(each) for key, each in wanted.items()}
        assert found == wanted

    play(story)
