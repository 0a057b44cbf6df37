"""Scenarios 56 to 58 and 63: what v4 clients acknowledge in transactions on regular topics."""

from __future__ import annotations

import pytest

from magnetar.errors import WireCode
from tests.integration.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    FAILOVER,
    SHARED,
    T,
    TxnStage,
    U,
    act_v4,
    begun,
    of_every_kind,
    pair,
    refusal,
)

# --- 56 and 57: acknowledge


@of_every_kind
@pytest.mark.parametrize("reading", [SHARED, FAILOVER])
@pytest.mark.parametrize("batch", [1, 4])
def test_txn_individual_ack(kind: str, reading: int, batch: int) -> None:
    """56: txnIndividualAckTest...: aborted, then committed; nothing is left, over a restart."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=reading)
        for number in range(4):
            await sender.send(f"{number}", num_messages_in_batch=batch)
        for commit in (False, True):
            txn = await client.begin()
            await client.acknowledges_on(txn, T, "sub")
            await reader.ack(*await reader.take(4), txn=txn)
            await client.end(txn, COMMIT if commit else ABORT)
        await reader.nothing()
        await stage.settled()
        await stage.killed()
        client = await stage.client(v4=True)
        await (await client.reader(kind=reading)).nothing()

    act_v4(story, kind)


@of_every_kind
@pytest.mark.parametrize("reading", [EXCLUSIVE, FAILOVER])
@pytest.mark.parametrize("batch", [1, 4])
def test_txn_cumulative_ack(kind: str, reading: int, batch: int) -> None:
    """56: txnAckTest...Cumulative."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=reading)
        for number in range(4):
            await sender.send(f"{number}", num_messages_in_batch=batch)
        for commit in (False, True):
            txn = await client.begin()
            await client.acknowledges_on(txn, T, "sub")
            got = await reader.take(4)
            for each in got[1:]:
                await reader.ack(each, txn=txn, cumulative=True)
            await client.end(txn, COMMIT if commit else ABORT)
            if not commit:
                await reader.again()  # official clients ask for it
        await stage.settled()
        await reader.close()
        reader = await client.reader(kind=reading)
        await reader.nothing()
        assert await reader.backlog() == 0

    act_v4(story, kind)


@of_every_kind
def test_a_shared_subscription_takes_no_cumulative_acks_in_transactions(kind: str) -> None:
    """56: the server's side of it: clients refuse by themselves."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=SHARED)
        await sender.send("x")
        txn = await client.begin()
        work = reader.ack(await reader.get(), txn=txn, cumulative=True)
        assert await refusal(work) == WireCode.NOT_ALLOWED

    act_v4(story, kind)


@of_every_kind
def test_transaction_conflict_exception_when_ack_batch_message(kind: str) -> None:
    """57: testTransactionConflictExceptionWhenAckBatchMessage: bit by bit."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=SHARED)
        await sender.send("batch", num_messages_in_batch=3)
        entry = await reader.get()
        one, two, three = [await client.begin() for _ in range(3)]
        for txn in (one, two, three):
            await client.acknowledges_on(txn, T, "sub")
        await reader.ack(entry, txn=one, ack_set=0b110)
        for taken in (0b110, 0b100, 0):
            work = reader.ack(entry, txn=two, ack_set=taken)
            assert await refusal(work) == WireCode.TRANSACTION_CONFLICT
        await reader.ack(entry, txn=two, ack_set=0b101)
        await client.commit(one)
        await client.abort(two)
        again = await reader.get()
        assert again.ack_set == (0b110,)
        held = reader.ack(entry, txn=three, ack_set=0b110)
        assert await refusal(held) == WireCode.TRANSACTION_CONFLICT
        await reader.ack(entry, txn=three, ack_set=0b001)
        await client.commit(three)
        await stage.settled()
        assert await reader.backlog() == 0

    act_v4(story, kind)


@of_every_kind
def test_one_transaction_one_topic_with_multi_sub(kind: str) -> None:
    """57: oneTransactionOneTopicWithMultiSubTest."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender = await client.sender()
        names = [f"sub{number}" for number in range(3)]
        readers = {name: await client.reader(subscription=name) for name in names}
        await sender.send("x")
        for commit in (False, True):
            txn = await client.begin()
            for name, reader in readers.items():
                await client.acknowledges_on(txn, T, name)
                await reader.ack(await reader.get(), txn=txn)
            await client.end(txn, COMMIT if commit else ABORT)
        await stage.settled()
        for reader in readers.values():
            assert await reader.backlog() == 0

    act_v4(story, kind)


# --- 58: pending acknowledgements after a restart


@of_every_kind
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_pending_ack_replay(kind: str, cumulative: bool, commit: bool) -> None:
    """58: individualPendingAckReplayTest, cumulativePendingAckReplayTest."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        for number in range(6):
            await sender.send(f"{number}")
        got = await reader.take(6)
        txn = await client.begin()
        await client.acknowledges_on(txn, T, "sub")
        await reader.ack(*(got[3:4] if cumulative else got[0:4:2]), txn=txn, cumulative=cumulative)
        for _ in range(2):
            await stage.killed()
        client = await stage.client(v4=True)
        reader = await client.reader()
        free = ["4", "5"] if cumulative else ["1", "3", "4", "5"]
        assert await reader.texts(len(free)) == free
        other = await client.begin()
        work = reader.ack(got[2], txn=other)
        assert await refusal(work) == WireCode.TRANSACTION_CONFLICT
        await client.end(txn, COMMIT if commit else ABORT)
        await stage.settled()
        await reader.close()
        left = free if commit else ["0", "1", "2", "3", "4", "5"]
        assert await (await client.reader()).texts(len(left)) == left

    act_v4(story, kind)


@of_every_kind
def test_what_is_kept_for_acks_goes_when_the_cursor_has_moved(kind: str) -> None:
    """58: testDeleteUselessLogDataWhenSubCursorMoved: nothing of finished ones stays."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        before = await stage.kept()
        for number in range(20):
            await sender.send(f"{number}")
            txn = await client.begin()
            await reader.ack(await reader.get(), txn=txn)
            await client.commit(txn)
        await stage.until_kept(before)

    act_v4(story, kind)


# --- 63: chunks


@of_every_kind
@pytest.mark.parametrize("commit", [True, False])
def test_ack_chunk_message(kind: str, commit: bool) -> None:
    """63: testAckChunkMessage: all chunks of a message are acknowledged in one command."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=SHARED)
        txn = await begun(client)
        for number in range(3):
            await sender.send(
                f"chunk {number}", txn, sequence=0, uuid="u", chunk_id=number,
                num_chunks_from_msg=3, total_chunk_msg_size=21,
            )  # fmt: skip
        await reader.nothing()
        await client.commit(txn)
        chunks = await reader.take(3)
        acking = await client.begin()
        await client.acknowledges_on(acking, T, "sub")
        await reader.ack(*chunks, txn=acking)
        await client.end(acking, COMMIT if commit else ABORT)
        if not commit:
            assert await reader.texts(3) == ["chunk 0", "chunk 1", "chunk 2"]
        await stage.settled()
        assert await reader.backlog() == (0 if commit else 3)

    act_v4(story, kind)


# --- two topics of one transaction


@of_every_kind
def test_consume_transform_produce(kind: str) -> None:
    """12 for v4 clients: from one topic to another, aborted, then committed, over a kill."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        source = await client.sender()
        for number in range(3):
            await source.send(f"{number}")
        for commit in (False, True):
            reader, output = await client.reader(kind=SHARED), await client.sender(U)
            txn = await begun(client, U)
            await client.acknowledges_on(txn, T, "sub")
            for each in await reader.take(3):
                await output.send(f"out {each.text}", txn)
                await reader.ack(each, txn=txn)
            await client.end(txn, COMMIT if commit else ABORT)
            await stage.killed()
            client = await stage.client(v4=True)
        await (await client.reader(kind=SHARED)).nothing()
        assert await (await client.reader(U)).texts(3) == ["out 0", "out 1", "out 2"]

    act_v4(story, kind)
