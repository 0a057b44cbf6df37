"""Scenarios 54 to 64: what v4 clients do in transactions on regular topics.

None of their commands carries `scalable`. Every test runs for each way in which a broker can keep
their transactions (`KINDS`): the answers on the wire are the same.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.errors import WireCode
from magnetar.testing.driver import Driver
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Received, TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.server.scalable_stage import until
from tests.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    FAILOVER,
    SHARED,
    Place,
    Reader,
    Sender,
    T,
    TxnClient,
    TxnStage,
    U,
    act_v4,
    of_every_kind,
    refusal,
    txn_fields,
    txn_of,
)

ASSIGN = "persistent://pulsar/system/transaction_coordinator_assign"


async def begun(client: TxnClient, *topics: str) -> TxnId:
    """A transaction, announced to its topics as official clients do."""
    txn = await client.begin()
    await client.writes_to(txn, *(topics or (T,)))
    return txn


async def pair(client: TxnClient, *, reading: int = EXCLUSIVE) -> tuple[Sender, Reader]:
    return await client.sender(), await client.reader(kind=reading)


# --- 54: produce


@of_every_kind
@pytest.mark.parametrize("commit", [True, False])
def test_produce_and_commit_or_abort(kind: str, commit: bool) -> None:
    """54: produceAndCommit, produceAndAbort: over two partitions."""
    parts = [f"{T}-partition-{number}" for number in range(2)]

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        txn = await begun(client, *parts)
        readers = []
        for part in parts:
            sender = await client.sender(part)
            readers.append(await client.reader(part))
            for number in range(5):
                await sender.send(f"{number}", txn)
        for reader in readers:
            await reader.nothing()
        await client.end(txn, COMMIT if commit else ABORT)
        for reader in readers:
            if commit:
                assert await reader.texts(5) == ["0", "1", "2", "3", "4"]
            await reader.nothing()

    act_v4(story, kind)


@of_every_kind
@pytest.mark.parametrize("reading", [EXCLUSIVE, SHARED])
@pytest.mark.parametrize("commit", [True, False])
def test_messages_before_in_and_behind_a_transaction(kind: str, reading: int, commit: bool) -> None:
    """54: noSortedTest: what is behind waits; what is before does not."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client, reading=reading)
        txn = await begun(client)
        await sender.send("before")
        await sender.send("in", txn)
        await sender.send("behind")
        assert await reader.texts(1) == ["before"]
        await reader.nothing()
        await client.end(txn, COMMIT if commit else ABORT)
        expected = ["in", "behind"] if commit else ["behind"]
        assert await reader.texts(len(expected)) == expected
        await reader.nothing()

    act_v4(story, kind)


@of_every_kind
def test_transactions_show_in_the_order_of_the_log(kind: str) -> None:
    """54: sortedTest: in the order in which they were sent, not in that of the commits."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        txns = [await begun(client) for _ in range(3)]
        for step in range(2):
            for number, txn in enumerate(txns):
                await sender.send(f"{number}.{step}", txn)
        for txn in reversed(txns):
            await reader.nothing(0.5)
            await client.commit(txn)
        assert await reader.texts(6) == ["0.0", "1.0", "2.0", "0.1", "1.1", "2.1"]

    act_v4(story, kind)


# --- 55: order


@of_every_kind
@pytest.mark.parametrize("is_mixed", [False, True])
def test_messages_are_published_in_order(kind: str, is_mixed: bool) -> None:
    """55: produceTxnMessageOrderTest, testMessagePublishInOrder: nothing waits for a receipt."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        txn = await begun(client)
        for number in range(100):
            sender.post(f"{number}", None if is_mixed and number % 3 else txn, number)
        for number in range(100):
            push: Any = await client.driver.pushes.get()
            assert isinstance(push, Received)
            assert push.type == TYPES["SEND_RECEIPT"]
            assert getattr(push.body, "sequence_id") == number  # noqa: B009  any message
        await client.commit(txn)
        assert await reader.texts(100) == [f"{number}" for number in range(100)]

    act_v4(story, kind)


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
        one, two = await client.begin(), await client.begin()
        await reader.ack(entry, txn=one, ack_set=0b110)
        for taken in (0b110, 0b100, 0):
            work = reader.ack(entry, txn=two, ack_set=taken)
            assert await refusal(work) == WireCode.TRANSACTION_CONFLICT
        await reader.ack(entry, txn=two, ack_set=0b101)
        await client.commit(one)
        await client.abort(two)
        again = await reader.get()
        assert again.ack_set == (0b110,)
        three = await client.begin()
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


# --- 59: low watermarks


@of_every_kind
def test_what_comes_after_the_end_is_refused(kind: str) -> None:
    """59: testTransactionBufferLowWaterMark, testPendingAckLowWaterMark: nothing opens again."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        old = [await begun(client) for _ in range(2)]
        for txn, action in zip(old, (COMMIT, ABORT), strict=True):
            await sender.send("in time", txn)
            await client.end(txn, action)
        got = await reader.get()
        newer = await begun(client)
        await sender.send("newer", newer)
        for txn in old:
            assert await refusal(sender.send("late", txn)) == WireCode.NOT_ALLOWED
            work = reader.ack(got, txn=txn)
            assert await refusal(work) == WireCode.TRANSACTION_CONFLICT
        await client.commit(newer)
        assert await reader.texts(1) == ["newer"]
        await reader.nothing()
        await reader.ack(got)

    act_v4(story, kind)


@of_every_kind
def test_ends_at_one_coordinator_leave_those_of_another_alone(kind: str) -> None:
    """59: testLowWaterMarkForDifferentTC."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        left = await client.begin(coordinator=1)
        await client.writes_to(left, T)
        await sender.send("left", left)
        for _ in range(5):
            txn = await begun(client)
            await sender.send("other", txn)
            await client.commit(txn)
        await reader.nothing()
        await sender.send("more", left)
        await client.commit(left)
        assert await reader.texts(7) == ["left", *["other"] * 5, "more"]

    act_v4(story, kind)


# --- 60: the last message


@of_every_kind
def test_get_last_message_ids_with_ongoing_transactions(kind: str) -> None:
    """60 and 30: testGetLastMessageIdsWithOngoingTransactions, ...LastDispatchablePosition..."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        assert (await reader.last_id()).entry == -1 & (2**64 - 1)
        plain = await sender.send("plain")
        assert await reader.last_id() == plain
        first, second = await begun(client), await begun(client)
        in_first = await sender.send("first", first)
        in_second = await sender.send("second", second)
        behind = await sender.send("behind")
        assert await reader.last_id() == plain
        await client.commit(second)
        assert await reader.last_id() == plain
        await client.abort(first)
        await until_last(reader, behind)
        aborted = await begun(client)
        await sender.send("tail", aborted)
        await client.abort(aborted)
        assert await reader.last_id() == behind
        assert plain < in_first < in_second < behind
        await stage.killed()
        reader = await (await stage.client(v4=True)).reader()
        assert await reader.last_id() == behind

    act_v4(story, kind)


async def until_last(reader: Reader, expected: Place) -> None:
    async def is_last() -> bool:
        return await reader.last_id() == expected

    await until(is_last, 10, f"{expected} is the last")


# --- 61: ends


@of_every_kind
def test_transaction_timeout(kind: str) -> None:
    """61: transactionTimeoutTest, testTxnTimeOutInClient: messages and acknowledgements."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await pair(client)
        await sender.send("x")
        got = await reader.get()
        txn = await client.begin(ttl=3_000)
        await client.writes_to(txn, T)
        await sender.send("in it", txn)
        await reader.ack(got, txn=txn)
        again = await reader.get(6.0)
        assert again.text == "x"
        await reader.nothing()
        assert await client.ended(txn, COMMIT) == WireCode.INVALID_TXN_STATUS
        assert await client.ended(txn, ABORT) is None
        late = client.writes_to(txn, T)
        assert await refusal(late) == WireCode.INVALID_TXN_STATUS

    act_v4(story, kind)


@of_every_kind
@pytest.mark.parametrize("commit", [True, False])
def test_end_transaction_op_retry(kind: str, commit: bool) -> None:
    """61: testEndTransactionOpRetry: the answer is lost, or the server dies, and it is resent."""
    action = COMMIT if commit else ABORT

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender = await client.sender()
        txns = [await begun(client) for _ in range(3)]
        for number, txn in enumerate(txns):
            await sender.send(f"{number}", txn)
        await client.end(txns[0], action)
        client.driver.send("END_TXN", request_id=99, txn_action=action, **txn_fields(txns[1]))
        client.driver.abort()
        client = await stage.client(v4=True)
        await client.end(txns[1], action)
        client.driver.send("END_TXN", request_id=99, txn_action=action, **txn_fields(txns[2]))
        await stage.killed()
        client = await stage.client(v4=True)
        for txn in txns:
            await client.end(txn, action)
            crossed = await client.ended(txn, ABORT if commit else COMMIT)
            assert crossed == WireCode.INVALID_TXN_STATUS
        reader = await client.reader()
        if commit:
            assert await reader.texts(3) == ["0", "1", "2"]
        await reader.nothing()

    act_v4(story, kind)


@of_every_kind
def test_end_txn_when_committing_or_aborting(kind: str) -> None:
    """61: testEndTxnWhenCommittingOrAborting: several ends at once have one outcome."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        for round_number in range(8):
            sender = await client.sender(f"{T}{round_number}")
            txn = await begun(client, f"{T}{round_number}")
            await sender.send("x", txn)
            others = [await stage.client(v4=True) for _ in range(4)]
            actions = [COMMIT, ABORT, COMMIT, ABORT]
            answers = await asyncio.gather(
                *(each.ended(txn, action) for each, action in zip(others, actions, strict=True))
            )
            won = await stage.state(txn) == "COMMITTED"
            lost = WireCode.INVALID_TXN_STATUS
            assert answers == ([None, lost, None, lost] if won else [lost, None, lost, None])
            reader = await client.reader(f"{T}{round_number}")
            if won:
                assert await reader.texts(1) == ["x"]
            await reader.nothing(0.5)

    act_v4(story, kind)


# --- 62: clients that connect again


@of_every_kind
@pytest.mark.parametrize("what", ["new", "partition", "subscription", "commit", "abort"])
def test_transaction_client_connect(kind: str, what: str) -> None:
    """62: TransactionClientConnectTest: each request is resent after the connection was lost."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        driver = client.driver
        found = await driver.request("PARTITIONED_METADATA", topic=ASSIGN)
        place = await driver.request("LOOKUP", topic=f"{ASSIGN}-partition-0")
        assert (found.partitions, place.response) == (16, pb.CommandLookupTopicResponse.Connect)
        await driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=0)
        txn = await client.begin()

        async def ask(driver: Driver) -> Any:
            fields: dict[str, Any] = txn_fields(txn)
            if what == "new":
                return await driver.request("NEW_TXN", txn_ttl_millis=1000, tc_id=0)
            if what == "partition":
                return await driver.request("ADD_PARTITION_TO_TXN", partitions=[T], **fields)
            if what == "subscription":
                wanted = [{"topic": T, "subscription": "sub"}]
                return await driver.request(
                    "ADD_SUBSCRIPTION_TO_TXN", subscription=wanted, **fields
                )
            action = COMMIT if what == "commit" else ABORT
            return await driver.request("END_TXN", txn_action=action, **fields)

        asking = asyncio.create_task(ask(driver))
        await asyncio.sleep(0)
        driver.abort()
        await asyncio.wait({asking})
        assert asking.exception() is not None
        await stage.killed()
        again = await stage.client(v4=True)
        await again.driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=0)
        answer = txn_of(await ask(again.driver))
        assert (answer.least > txn.least) if what == "new" else (answer == txn)

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
