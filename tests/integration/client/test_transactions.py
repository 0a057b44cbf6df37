"""Transactions of the client with real brokers on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.message.message import Message
from magnetar.client.transaction.state import TransactionState
from magnetar.client.transaction.transaction import Transaction
from magnetar.errors import (
    DeadlineExceeded,
    GroupFenced,
    InvalidSetting,
    InvalidTxnStatus,
    NotAllowed,
    TransactionAborted,
    TransactionConflict,
    TransactionEnded,
)
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.wire.messages import TxnId
from tests.integration.client.stage import new_client, play, stored
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
REGULAR = "persistent://public/default/plain"
OUTPUT = "persistent://public/default/results"


async def payloads(stage: Stage, topic: str = NAME) -> list[bytes]:
    return sorted(each.payload for each in await stored(stage, topic))


async def nothing_more(consumer: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(timeout=5.0)


async def received(consumer: Any, count: int) -> list[Message[bytes]]:
    return [await consumer.receive(timeout=20.0) for _ in range(count)]


async def turns(count: int) -> None:
    """Let others run for so many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("topic", "scalable", "kind"),
    [
        (NAME, None, "auto"),
        (REGULAR, None, "auto"),
        (REGULAR, False, "auto"),
        (REGULAR, False, "metadata"),
        (NAME, False, "metadata"),
    ],
)
def test_commits_and_aborts(topic: str, scalable: bool | None, kind: str) -> None:
    async def story(stage: Stage) -> None:
        if topic == NAME:
            await stage.create(2)
        async with new_client(stage) as client, await client.producer(topic) as producer:
            async with client.transaction(scalable=scalable) as txn:
                for number in range(10):
                    await producer.send(b"good %d" % number, key=f"k{number}", txn=txn)
            assert txn.state is TransactionState.COMMITTED
            begun: list[Transaction] = []

            async def fail() -> None:
                async with client.transaction(scalable=scalable) as bad:
                    begun.append(bad)
                    await producer.send(b"bad", key="k", txn=bad)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail()
            assert begun[0].state is TransactionState.ABORTED
            other = await client.transaction(scalable=scalable)
            await producer.send(b"other", key="k", txn=other)
            await other.abort()
            await other.abort()
            with pytest.raises(TransactionAborted):
                await other.commit()
            await txn.commit()
            with pytest.raises(InvalidTxnStatus):
                await txn.abort()
            with pytest.raises(TransactionEnded):
                await producer.send(b"late", key="k", txn=txn)
            await producer.send(b"plain", key="k")
        found = await payloads(stage, topic)
        assert found == sorted([b"good %d" % number for number in range(10)] + [b"plain"])

    play(story, transaction_kind=kind)


def test_segments_refuse_a_transaction_that_ends_by_markers() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            txn = await client.transaction(scalable=False)
            with pytest.raises(NotAllowed, match="v5 client"):
                await producer.send(b"x", key="k", txn=txn)
            with pytest.raises(TransactionAborted, match="legacy transaction"):
                await txn.commit()
            assert txn.state is TransactionState.ABORTED
            await producer.send(b"plain", key="k")
        assert await payloads(stage) == [b"plain"]

    play(story)


def test_a_commit_waits_for_what_was_only_handed_in() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with (
            new_client(stage) as client,
            await client.producer(NAME, batch_delay=10.0) as producer,
        ):
            await producer.send(b"first", key="k0")
            begun = asyncio.get_running_loop().time()
            async with client.transaction() as txn:
                for number in range(100):
                    await producer.submit(b"%d" % number, key=f"k{number}", txn=txn)
            assert asyncio.get_running_loop().time() - begun < 1, "batches are sent at once"
        assert len(await payloads(stage)) == 101

    play(story)


def test_an_abort_drops_what_was_not_sent() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with (
            new_client(stage) as client,
            await client.producer(NAME, batch_delay=10.0) as producer,
        ):
            txn = await client.transaction()
            await producer.send(b"stored", key="k", txn=txn)
            first = await producer.submit(b"under way", key="k", txn=txn)
            await turns(5)
            receipts = [await producer.submit(b"x", key="k", txn=txn) for _ in range(10)]
            await txn.abort()
            assert first.done()
            assert first.exception() is None, "it was waited for"
            for receipt in receipts:
                assert isinstance(receipt.exception(), TransactionAborted)
            assert producer.pending == 0
            await producer.send(b"plain", key="k")
        assert await payloads(stage) == [b"plain"]

    play(story)


def test_a_cancelled_block_aborts() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            states = []

            async def work() -> None:
                async with client.transaction() as txn:
                    states.append(txn)
                    await producer.send(b"x", key="k", txn=txn)
                    await asyncio.sleep(100)

            task = asyncio.create_task(work())
            await asyncio.sleep(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert states[0].state is TransactionState.ABORTED
        assert await payloads(stage) == []

    play(story)


def test_a_cancelled_send_is_known_to_its_transaction() -> None:
    """What nobody waits for is committed, or fails the commit; it is never left out silently."""

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            async with client.transaction() as txn:
                await producer.send(b"1", key="k", txn=txn)
                task = asyncio.create_task(producer.send(b"2", key="k", txn=txn))
                await turns(10)
                task.cancel()
            assert txn.state is TransactionState.COMMITTED
            with pytest.raises(TransactionAborted):
                async with client.transaction() as other:
                    (await producer.submit(b"3", key="k", txn=other)).cancel()
        assert await payloads(stage) == [b"1", b"2"]

    play(story)


def test_cancelling_a_commit_takes_nothing_back() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            txn = await client.transaction()
            await producer.send(b"x", key="k", txn=txn)
            task = asyncio.create_task(txn.commit())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await txn.commit()
            assert txn.state is TransactionState.COMMITTED
        assert await payloads(stage) == [b"x"]

    play(story)


def test_a_timeout_aborts() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            txn = await client.transaction(timeout=5)
            await producer.send(b"x", key="k", txn=txn)
            await asyncio.sleep(6)
            with pytest.raises(TransactionAborted, match="timed out"):
                await txn._leave(None)
            assert txn.state is TransactionState.TIMED_OUT
            await txn.abort()
            with pytest.raises(TransactionAborted):
                await producer.send(b"y", key="k", txn=txn)
            await producer.send(b"plain", key="k")
            with pytest.raises(InvalidSetting):
                client.transaction(timeout=0)
        assert await payloads(stage) == [b"plain"]

    play(story)


@pytest.mark.parametrize("topic", [NAME, REGULAR])
def test_acknowledgements_take_part(topic: str) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            make: Callable[..., Any] = client.queue_consumer if topic == NAME else client.consumer
            async with await client.producer(topic) as producer:
                consumer = await make(topic, "s", initial_position=FIRST)
                for number in range(6):
                    await producer.send(b"%d" % number, key=f"k{number}")
                messages = await received(consumer, 6)
                async with client.transaction() as txn:
                    for each in messages[:3]:
                        consumer.ack(each, txn=txn)
                bad = await client.transaction()
                for each in messages[3:]:
                    consumer.ack(each, txn=bad)
                await bad.abort()
                again = await received(consumer, 3)
                assert {m.value for m in again} == {m.value for m in messages[3:]}
                await consumer.ack_many(again)
                await nothing_more(consumer)
                await consumer.close()

    play(story)


def test_cumulative_acknowledgements_on_a_regular_topic() -> None:
    async def story(stage: Stage) -> None:
        async with (
            new_client(stage) as client,
            await client.producer(REGULAR) as producer,
            await client.consumer(
                REGULAR, "s", initial_position=FIRST, subscription_type=SubscriptionType.EXCLUSIVE
            ) as consumer,
        ):
            for number in range(6):
                await producer.send(b"%d" % number)
            messages = await received(consumer, 4)
            bad = await client.transaction()
            consumer.ack_cumulative(messages[3], txn=bad)
            await bad.abort()
            again = await received(consumer, 4)
            assert [each.value for each in again] == [each.value for each in messages]
            with pytest.raises(TransactionConflict):
                consumer.ack_cumulative(messages[3], txn=await client.transaction())
            async with client.transaction() as txn:
                consumer.ack_cumulative(again[3], txn=txn)
            await consumer.ack_cumulative((await received(consumer, 2))[1])
            await nothing_more(consumer)

    play(story)


def test_conflicts_abort_cleanly() -> None:
    async def story(stage: Stage) -> None:
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.producer(OUTPUT) as output,
            await client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer,
        ):
            await producer.send(b"x", key="k")
            message = await consumer.receive(timeout=20.0)
            first, second = await client.transaction(), await client.transaction()
            await output.send(b"first", txn=first)
            await consumer.ack(message, txn=first)
            await output.send(b"second", txn=second)
            with pytest.raises(TransactionConflict):
                await consumer.ack(message, txn=second)
            with pytest.raises(TransactionAborted):
                await output.send(b"more", txn=second)
            with pytest.raises(TransactionConflict):
                await second.commit()
            assert second.state is TransactionState.ABORTED
            await second.abort()
            await first.commit()
            await nothing_more(consumer)
            await client.close()
            assert await payloads(stage, OUTPUT) == [b"first"]

    play(story)


def test_streams_acknowledge_only_what_advanced() -> None:
    """Many transactions over three segments, one after the other: none conflicts."""

    async def story(stage: Stage) -> None:
        await stage.create(3)
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.stream_consumer(NAME, "s", initial_position=FIRST) as consumer,
        ):
            seen = []
            for number in range(20):
                await producer.send(b"%d" % number, key=f"k{number}")
                message = await consumer.receive(timeout=20.0)
                async with client.transaction() as txn:
                    consumer.ack_cumulative(message, txn=txn)
                seen.append(message.value)
            assert seen == [b"%d" % number for number in range(20)]
            await producer.send(b"again", key="k1")
            message = await consumer.receive(timeout=20.0)
            txn = await client.transaction()
            await consumer.ack_cumulative(message, txn=txn)
            await txn.abort()
            assert (await consumer.receive(timeout=20.0)).value == b"again"

    play(story)


def test_closing_the_client_aborts_what_is_open() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        client = new_client(stage)
        producer = await client.producer(NAME)
        txn = await client.transaction()
        await producer.send(b"x", key="k", txn=txn)
        await client.close()
        assert txn.state is TransactionState.ABORTED
        assert await payloads(stage) == []
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if "transaction coordinators" in name]

    play(story)


def test_groups_commit_their_members_together() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            group = await client.open_group("app", generation="g", run="r1")
            assert group.committed_sequence == -1

            async def task(payload: bytes) -> Any:
                async with group.transaction(0) as txn:
                    await producer.submit(payload, key="k", txn=txn)
                return txn

            first, second, loser = [await task(b"%d" % number) for number in range(3)]
            with pytest.raises(NotAllowed):
                await first.commit()
            assert first.state is TransactionState.COMMITTING
            assert await group.commit(0, [first, second.txn_id], note="20 rows")
            states = [each.state for each in (first, second, loser)]
            assert states == [TransactionState.COMMITTED] * 2 + [TransactionState.ABORTED]
            assert not await group.commit(0, [first.txn_id, second.txn_id]), "it was before"
            status = await group.status()
            assert set(status.committed) == {first.txn_id, second.txn_id}
            assert (status.epoch, status.run, status.committed_sequence) == (1, "r1", 0)
            assert status.note == "20 rows"
            await _fencing(client, group)
        assert await payloads(stage) == [b"0", b"1", b"9"]

    play(story)


def test_another_process_may_abort_a_member_by_its_id() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client, new_client(stage) as other:
            producer = await client.producer(NAME)
            group = await client.open_group("app", generation="g", run="r1")
            members = []
            for sequence in (0, 1):
                async with group.transaction(sequence) as txn:
                    await producer.send(b"%d" % sequence, key="k", txn=txn)
                members.append(txn.txn_id)
            await group.commit(0, members[:1])
            elsewhere = await other.group(group.ticket)
            await elsewhere.abort([*members, TxnId(members[0].most, members[0].least + 9999)])
            with pytest.raises(InvalidTxnStatus):
                await group.commit(1, members[1:])
        assert await payloads(stage) == [b"0"], "what was decided stays"

    play(story)


def test_a_transaction_is_joined_by_other_processes_and_ended_by_one() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as begins, new_client(stage) as client:
            producer = await client.producer(NAME)
            txn_id = (await begins.transaction(timeout=60)).txn_id
            joined = await client.join_transaction(txn_id, time_left=50)
            await producer.submit(b"a part", key="k", txn=joined)
            with pytest.raises(NotAllowed):
                await joined.commit()
            await joined.prepare()
            await joined.close()
            assert await payloads(stage) == []
            last = await client.join_transaction(txn_id, time_left=40, ends_here=True)
            await producer.send(b"the token", key="k", txn=last)
            await last.commit()
        assert await payloads(stage) == [b"a part", b"the token"]

    play(story)


def test_who_joins_a_transaction_that_ends_by_markers_asks_its_kind_of_coordinator() -> None:
    """The first thing that a client asks: it does not know the coordinators yet."""

    async def story(stage: Stage) -> None:
        async with new_client(stage) as begins, new_client(stage) as client:
            producer = await client.producer(REGULAR)
            txn_id = (await begins.transaction(scalable=False, timeout=60)).txn_id
            last = await client.join_transaction(txn_id, scalable=False, ends_here=True)
            await producer.send(b"the token", txn=last)
            await last.commit()
            assert await payloads(stage, REGULAR) == [b"the token"]

    play(story)


def test_a_member_of_a_group_may_fail_or_be_aborted() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            group = await client.open_group("app", generation="g", run="r1")
            unready = await group.transaction(0)
            await producer.submit(b"1", key="k", txn=unready)
            async with group.transaction(0) as aborted:
                await producer.submit(b"2", key="k", txn=aborted)
            await aborted.abort()
            failed = await group.transaction(0)
            (await producer.submit(b"3", key="k", txn=failed)).cancel()
            with pytest.raises(TransactionAborted):
                await group.commit(0, [unready, failed])
            assert failed.state is TransactionState.ABORTED
            assert await group.commit(0, [unready.txn_id]), "what is not ready is waited for"
            assert unready.state is TransactionState.COMMITTED
            late = await group.transaction(1, timeout=5)
            await late.prepare()
            await asyncio.sleep(10)
            assert late.state is TransactionState.ERROR, "nobody here knows"
        assert await payloads(stage) == [b"1"]

    play(story)


async def _fencing(client: Client, former: Any) -> None:
    """A later run ends the former one; another process takes part by the ticket."""
    late = await former.transaction(1)
    present = await client.open_group("app", generation="g", run="r2")
    assert present.committed_sequence == 0
    with pytest.raises(GroupFenced):
        await former.commit(1, [late])
    with pytest.raises(GroupFenced):
        await former.transaction(2)
    elsewhere = await client.group(present.ticket)
    async with (
        await client.producer(NAME) as producer,
        elsewhere.transaction(1) as txn,
    ):
        await producer.send(b"9", key="k", txn=txn)
    assert await present.commit(1, [txn.txn_id])
    assert (await client.group_status("app")).committed == (txn.txn_id,)
