"""Acknowledgements inside transactions: with a commit they count, with an abort all comes again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from magnetar.client.client import Client
from magnetar.client.message.message import Message
from magnetar.client.transaction.transaction import Transaction
from magnetar.errors import TransactionConflict
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import drain, numbers, send, silence
from tests.integration.client.test_producing_in_trouble import cut_links
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST


class Txn(Transaction):
    """A transaction of which there is as little as a consumer needs: it is its own core."""

    def __init__(self, client: Client, txn_id: TxnId) -> None:
        self._core = self  # type: ignore[assignment]
        self._txn_id = txn_id
        self._client = client
        self._acks: list[asyncio.Future[None]] = []
        self._on_end: list[Callable[[bool], None]] = []

    @property
    def txn_id(self) -> TxnId:
        return self._txn_id

    @classmethod
    async def begin(cls, client: Client) -> Txn:
        connection = await client._connections.service()
        answer = await connection.request("NEW_TXN", tc_id=0, txn_ttl_millis=300_000, scalable=True)
        return cls(client, TxnId(answer.txnid_most_bits, answer.txnid_least_bits))

    async def enlist_subscription(self, topic: str, subscription: str) -> None:
        """Coordinators of scalable topics need not know."""

    def acking(self, done: asyncio.Future[None], on_end: Callable[[bool], None]) -> None:
        self._acks.append(done)
        self._on_end.append(on_end)

    async def end(self, action: pb.TxnAction) -> None:
        if action == pb.COMMIT:
            await asyncio.gather(*self._acks)
        else:
            await asyncio.gather(*self._acks, return_exceptions=True)
        connection = await self._client._connections.service()
        await connection.request(
            "END_TXN",
            txnid_most_bits=self.txn_id.most,
            txnid_least_bits=self.txn_id.least,
            txn_action=action,
            scalable=True,
        )
        for on_end in self._on_end:
            on_end(action == pb.COMMIT)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_queue_consumer_settles_with_its_transaction(breaks: bool) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 40)
            found = await drain(consumer, 40)
            committed, aborted = await Txn.begin(client), await Txn.begin(client)
            await consumer.ack_many(found[:25], txn=committed)
            consumer.ack_many(found[25:], txn=aborted)
            if breaks:
                await cut_links(stage, Random(1))
            await committed.end(pb.COMMIT)
            await silence(consumer)
            await aborted.end(pb.ABORT)
            again = await drain(consumer, 15, consumer.ack)
            assert numbers(again) == numbers(found[25:])
            await silence(consumer, 40.0)

    play(story)


def test_two_transactions_cannot_have_the_same_message() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 1)
            message = await consumer.receive(timeout=5.0)
            first, second = await Txn.begin(client), await Txn.begin(client)
            await consumer.ack(message, txn=first)
            with pytest.raises(TransactionConflict):
                await consumer.ack(message, txn=second)
            with pytest.raises(TransactionConflict):
                await second.end(pb.COMMIT)
            await first.end(pb.COMMIT)
            await silence(consumer)

    play(story)


def test_a_whole_batch_is_acknowledged_message_by_message() -> None:
    """One of it that another transaction has acknowledged is a conflict, not a second result."""

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            async with await client.producer(NAME) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n, key="k") for n in range(4)))
            found = await drain(consumer, 4)
            assert {message._raw_id.batch_size for message in found} == {4}
            first, second = await Txn.begin(client), await Txn.begin(client)
            await consumer.ack(found[1], txn=first)
            await first.end(pb.COMMIT)
            with pytest.raises(TransactionConflict):
                await consumer.ack_many(found, txn=second)
            await second.end(pb.ABORT)
            again = await drain(consumer, 3)
            third = await Txn.begin(client)
            await consumer.ack_many(again, txn=third)
            await third.end(pb.COMMIT)
            await consumer.close()
            async with await client.queue_consumer(NAME, "s") as last:
                await silence(last)

    play(story)


def test_a_stream_goes_back_when_its_transaction_is_aborted() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 40)
            found = await drain(consumer, 30)
            kept = await Txn.begin(client)
            await consumer.ack_cumulative(found[9], txn=kept)
            await kept.end(pb.COMMIT)
            dropped = await Txn.begin(client)
            await consumer.ack_cumulative(found[29], txn=dropped)
            await dropped.end(pb.ABORT)
            later = await Txn.begin(client)
            with pytest.raises(TransactionConflict, match="delivered again"):
                consumer.ack_cumulative(found[29], txn=later)
            again = await drain(consumer, 30)
            assert numbers(again) == sorted({*range(40)} - set(numbers(found[:10])))
            await consumer.ack_cumulative(again[-1], txn=later)
            await later.end(pb.COMMIT)
            await consumer.close()
            async with await client.stream_consumer(NAME, "s") as other:
                await silence(other)

    play(story)


def test_many_transactions_of_one_stream_touch_only_segments_that_advanced() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(3)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 60)
            got: list[Message[bytes]] = []
            while len(got) < 60:
                txn = await Txn.begin(client)
                got += await consumer.receive_many(4, timeout=5.0)
                await consumer.ack_cumulative(got[-1], txn=txn)
                await txn.end(pb.COMMIT)
            assert numbers(got) == list(range(60))
            await consumer.close()
            async with await client.stream_consumer(NAME, "s") as other:
                await silence(other)

    play(story)


def test_a_sealed_parent_is_drained_by_a_transaction() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 20)
            await stage.split(0)
            await send(client, 20)
            parents = await drain(consumer, 20)
            txn = await Txn.begin(client)
            await consumer.ack_cumulative(parents[-1], txn=txn)
            await silence(consumer)
            await txn.end(pb.COMMIT)
            assert numbers(await drain(consumer, 20)) == list(range(20))

    play(story)
