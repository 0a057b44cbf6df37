"""Scenarios 54, 55 and 59 to 62: what v4 clients do in transactions on regular topics.

None of their commands carries `scalable`. Every test runs for each way in which a broker can keep
their transactions (`KINDS`): the answers on the wire are the same.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.simulation.scalable.clients import QueueConsumer
from magnetar.errors import WireCode
from magnetar.model.names import TopicName
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Received
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.scalable_stage import nothing_comes, read, until
from tests.integration.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    SHARED,
    Place,
    Reader,
    T,
    TxnStage,
    act_v4,
    begun,
    of_every_kind,
    pair,
    refusal,
    txn_fields,
    txn_of,
)

REGULAR = "persistent://public/default/orders"
ASSIGN = "persistent://pulsar/system/transaction_coordinator_assign"


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
            work = client.acknowledges_on(txn, T, "sub")
            assert await refusal(work) == WireCode.INVALID_TXN_STATUS
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
        await client.acknowledges_on(txn, T, "sub")
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
            won = answers[0] is None
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


# --- migration


@of_every_kind
@pytest.mark.parametrize("is_killed", [False, True])
def test_migration_with_open_committed_and_aborted_transactions(kind: str, is_killed: bool) -> None:
    """A regular topic becomes a scalable one amid it all: nothing lost, nothing aborted shown."""
    topic = TopicName.parse(REGULAR)

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        sender, reader = await client.sender(REGULAR), await client.reader(REGULAR, "s")
        txns = {name: await begun(client, REGULAR) for name in ("committed", "aborted", "acks")}
        later = {name: await begun(client, REGULAR) for name in ("commits", "aborts")}
        await sender.send("input 0")
        await sender.send("input 1")
        for name in ("committed", "aborted"):
            await sender.send(name, txns[name])
        inputs = await reader.take(2)
        await client.commit(txns["committed"])
        await client.abort(txns["aborted"])
        for name, txn in later.items():
            await sender.send(name, txn)
        await sender.send("behind")
        await reader.ack(inputs[0], txn=txns["acks"])
        await reader.close()
        await stage.stage.ask(lambda scalable: scalable.migrate(topic, force=True))
        if is_killed:
            await stage.killed()
            client = await stage.client(v4=True)
        await client.commit(txns["acks"])
        await client.commit(later["commits"])
        await client.abort(later["aborts"])
        async with stage.stage.process() as links:
            for name, first in (("s", "input 1"), ("new", "input 0")):
                async with QueueConsumer(links, REGULAR, name, "q") as queue:
                    wanted = ["input 0", "input 1", "committed", "commits", "behind"]
                    wanted = wanted[wanted.index(first) :]
                    got = [each.payload.decode() for each in await read(queue, len(wanted))]
                    assert got == wanted
                    await nothing_comes(queue)

    act_v4(story, kind)
