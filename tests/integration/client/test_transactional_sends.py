"""Sends inside transactions, over splits, merges and broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import repeat
from random import Random

import pytest

from magnetar.client.client import Client
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.outbox import Outbox
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction
from magnetar.errors import ConnectionLost, NotAllowed, NotConnected
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import Kept, new_client, play, stored
from tests.integration.client.test_producing_in_trouble import cut_links, merge, split
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
TXNS = 12
MESSAGES = 20
IMPATIENT = 0.01
"""Seconds for which changes wait for transactions: so few that they come amid them."""
HARM_SEEDS = 40
"""About one in eight shows it."""


class Txn(Transaction):
    """A transaction of which there is as little as a producer needs: it is its own core."""

    def __init__(self, client: Client, txn_id: TxnId) -> None:
        self._core = self  # type: ignore[assignment]
        self._txn_id = txn_id
        self.topics: set[str] = set()
        self.receipts: list[asyncio.Future[AnyMessageId]] = []
        self._client = client

    @property
    def txn_id(self) -> TxnId:
        return self._txn_id

    @classmethod
    async def begin(cls, client: Client) -> Txn:
        connection = await client._connections.service()
        answer = await connection.request("NEW_TXN", tc_id=0, txn_ttl_millis=300_000, scalable=True)
        return cls(client, TxnId(answer.txnid_most_bits, answer.txnid_least_bits))

    async def enlist(self, topic: str) -> None:
        self.topics.add(topic)

    def sending(self, receipt: asyncio.Future[AnyMessageId], _: object) -> None:
        self.receipts.append(receipt)

    async def end(self, action: pb.TxnAction) -> None:
        if action == pb.COMMIT:
            await asyncio.gather(*self.receipts)
        connection = await self._client._connections.service()
        await connection.request(
            "END_TXN",
            txnid_most_bits=self.txn_id.most,
            txnid_least_bits=self.txn_id.least,
            txn_action=action,
            scalable=True,
        )


def test_what_is_committed_is_there_and_what_is_aborted_is_not() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            good, bad = await Txn.begin(client), await Txn.begin(client)
            for number in range(20):
                for txn, word in ((good, b"good"), (bad, b"bad"), (None, b"plain")):
                    await producer.submit(b"%s %d" % (word, number), key=f"k{number}", txn=txn)
            await good.end(pb.COMMIT)
            await bad.end(pb.ABORT)
            assert good.topics
            with pytest.raises(NotAllowed):
                await producer.send(b"late", key="k", txn=good)
            await producer.send(b"after", key="k")
        words = [each.payload.split()[0] for each in await stored(stage)]
        assert (words.count(b"good"), words.count(b"plain"), words.count(b"bad")) == (20, 20, 0)
        assert words.count(b"after") == 1

    play(story)


@pytest.mark.parametrize("seed", range(6))
def test_splits_do_not_fail_a_transaction(seed: int) -> None:
    chance = Random(f"{seed} transactions")

    async def story(stage: Stage) -> None:
        await stage.create()
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def one(number: int) -> None:
                key = f"k{number}"
                for _ in range(3):
                    txn = await Txn.begin(client)
                    for _ in range(MESSAGES):
                        payload = b"%d" % len(kept.sent[key])
                        await kept.send(producer, key, payload, txn=txn)
                        await asyncio.sleep(0.01 * chance.random())
                    await txn.end(pb.COMMIT)

            running = asyncio.gather(*(one(number) for number in range(TXNS)))
            for trouble in (split, merge, split, split, merge):
                await asyncio.sleep(0.1 * chance.random())
                await trouble(stage, chance)
            await running
        await kept.check(stage)

    play(story)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_split_waits_for_no_transaction_of_our_client(seed: int, commits: bool) -> None:
    """Splits amid sends and acknowledgements of a transaction: nothing is lost or doubled."""
    chance = Random(f"{seed} {commits} go on")

    async def story(stage: Stage) -> None:
        await stage.create(1)
        loop = asyncio.get_running_loop()
        given = {b"in %d" % number for number in range(40)}
        made = {b"out %d" % number for number in range(120)}
        async with new_client(stage) as client, client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            for each in sorted(given):
                await producer.submit(each, key=each.decode())
            await producer.flush()
            messages = [await consumer.receive(timeout=10) for _ in given]
            txn = await client.transaction(timeout=300)
            outputs = sorted(made)

            async def work() -> None:
                for number, each in enumerate(outputs):
                    await producer.submit(each, key=each.decode(), txn=txn)
                    if number % 3 == 0:
                        consumer.ack(messages[number // 3], txn=txn)
                    await asyncio.sleep(0.02 * chance.random())

            working = asyncio.create_task(work())
            for segment in (0, 1, 2):
                await asyncio.sleep(0.3 * chance.random())
                began = loop.time()
                await stage.split(segment)
                assert loop.time() - began < 3, "it waits for the transaction"
                assert txn.state is TransactionState.OPEN
            await working
            await (txn.commit() if commits else txn.abort())
            await consumer.close()
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            expected = made if commits else given
            found = [(await consumer.receive(timeout=20)).value for _ in expected]
            assert sorted(found) == sorted(expected)
            assert await consumer.receive_many(timeout=20) == []
        payloads = sorted(each.payload for each in await stored(stage))
        assert payloads == sorted(given | made if commits else given)

    play(story)


@pytest.mark.parametrize("wait_seconds", [5.0, IMPATIENT])
@pytest.mark.parametrize("seed", range(6))
def test_with_broken_connections_a_transaction_is_stored_once_or_fails(
    seed: int, wait_seconds: float
) -> None:
    with_broken_connections(seed, wait_seconds)


def test_harm_of_sending_again_what_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored in the former segment and in the next one."""
    requeue = Outbox.requeue
    monkeypatch.setattr(Outbox, "requeue", lambda self, *, in_doubt: requeue(self, in_doubt=False))
    with pytest.raises(AssertionError, match="stored and committed"):
        list(map(with_broken_connections, range(HARM_SEEDS), repeat(IMPATIENT)))


def with_broken_connections(seed: int, wait_seconds: float) -> None:
    chance = Random(f"{seed} cut transactions")

    async def story(stage: Stage) -> None:
        await stage.create()
        committed: dict[str, list[bytes]] = {f"k{number}": [] for number in range(6)}
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def attempt(key: str) -> None:
                txn = await Txn.begin(client)
                sent = [b"%d" % (len(committed[key]) + number) for number in range(MESSAGES)]
                for payload in sent:
                    await producer.submit(payload, key=key, txn=txn)
                    await asyncio.sleep(0.01 * chance.random())
                try:
                    await txn.end(pb.COMMIT)
                except ConnectionLost:
                    if not all(each.done() and not each.exception() for each in txn.receipts):
                        await retried(lambda: txn.end(pb.ABORT))
                        return
                    await retried(lambda: txn.end(pb.COMMIT))
                committed[key] += sent

            async def one(key: str) -> None:
                while len(committed[key]) < 3 * MESSAGES:
                    await retried(lambda: attempt(key))

            running = asyncio.gather(*map(one, committed))
            for trouble in (cut_links, split, cut_links, merge, cut_links, split):
                await asyncio.sleep(0.1 * chance.random())
                await trouble(stage, chance)
            await running
        found: dict[str, list[bytes]] = {key: [] for key in committed}
        for message in await stored(stage):
            found[message.key].append(message.payload)
        assert found == committed, "stored and committed"

    play(story, scalable_change_txn_wait_seconds=wait_seconds)


async def retried(work: Callable[[], Awaitable[None]]) -> None:
    """Until it works: these requests may be repeated."""
    for _ in range(20):
        try:
            await work()
        except (ConnectionLost, NotConnected):
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("it never worked")
