"""Scenarios 1 to 16 of metadata-driven transactions: v5 clients on scalable topics.

The names are those of Pulsar's own suite; `docs/reference/transaction-scenarios.md` lists all.
"""

from __future__ import annotations

import pytest

from magnetar.errors import WireCode
from tests.integration.server.scalable_stage import until
from tests.integration.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    SHARED,
    KeyedSender,
    Queue,
    T,
    TxnStage,
    U,
    act,
    refusal,
)

KEYS = [f"k{number}" for number in range(12)]


async def topic_of(stage: TxnStage, segments: int = 1) -> tuple[KeyedSender, Queue]:
    """A scalable topic with a producer and a subscription."""
    await stage.stage.create(segments)
    client = await stage.client()
    return KeyedSender(stage, client), await Queue(stage, client).follow()


def test_commit_makes_produced_messages_visible() -> None:
    """1: testCommitMakesProducedMessagesVisible."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage)
        client = await stage.client()
        txn = await client.begin()
        for key in KEYS:
            await sender.send(key, key, txn)
        await queue.nothing()
        await client.commit(txn)
        assert await queue.texts(len(KEYS)) == sorted(KEYS)
        await queue.nothing()

    act(story)


def test_aborted_messages_are_never_delivered() -> None:
    """2: testAbortedMessagesAreNeverDelivered."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage)
        client = await stage.client()
        txn = await client.begin()
        for key in KEYS:
            await sender.send(key, key, txn)
        await client.abort(txn)
        await sender.send("k", "sentinel")
        assert await queue.texts(1) == ["sentinel"]
        await queue.nothing()
        late = await Queue(stage, client, "late").follow()
        assert await late.texts(1) == ["sentinel"]
        await late.nothing()

    act(story)


def test_abort_moves_transaction_to_aborted_state() -> None:
    """3: testAbortMovesTransactionToAbortedState."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        txn = await client.begin()
        assert await stage.state(txn) == "OPEN"
        await client.abort(txn)
        assert await stage.state(txn) == "ABORTED"
        assert await client.ended(txn, COMMIT) == WireCode.INVALID_TXN_STATUS
        assert await stage.state(txn) == "ABORTED"

    act(story)


def test_commit_across_multiple_topics() -> None:
    """4: testCommitAcrossMultipleTopics: atomic over a scalable and two regular topics."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage)
        client = await stage.client()
        others = [await client.reader(topic) for topic in (T, U)]
        for commit in (False, True):
            txn = await client.begin()
            await sender.send("k", f"x {commit}", txn)
            for topic in (T, U):
                await (await client.sender(topic)).send(f"{topic} {commit}", txn)
            await queue.nothing()
            for reader in others:
                await reader.nothing()
            await client.end(txn, COMMIT if commit else ABORT)
        assert await queue.texts(1) == ["x True"]
        assert [await reader.texts(1) for reader in others] == [[f"{T} True"], [f"{U} True"]]

    act(story)


def test_multi_segment_transaction_commit() -> None:
    """5: testMultiSegmentTransactionCommit: keyed writes over three segments."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage, 3)
        client = await stage.client()
        txn = await client.begin()
        for key in KEYS:
            await sender.send(key, key, txn)
        assert len({await stage.segment(key) for key in KEYS}) == 3
        await queue.nothing()
        await client.commit(txn)
        assert await queue.texts(len(KEYS)) == sorted(KEYS)

    act(story)


def test_concurrent_transactions_mixed_commit_abort() -> None:
    """6: testConcurrentTransactionsMixedCommitAbort: six interleaved, half of them aborted."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage, 2)
        client = await stage.client()
        txns = [await client.begin(coordinator=number) for number in range(6)]
        for step in range(4):
            for number, txn in enumerate(txns):
                await sender.send(f"k{step}{number}", f"{number}.{step}", txn)
        for number, txn in enumerate(txns):
            await client.end(txn, ABORT if number % 2 else COMMIT)
        expected = sorted(f"{number}.{step}" for number in (0, 2, 4) for step in range(4))
        assert await queue.texts(len(expected)) == expected
        await queue.nothing()

    act(story)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("change", ["split", "merge"])
def test_commit_and_abort_span_split_and_merge(change: str, commit: bool) -> None:
    """7 to 10: testCommitSpansSplit, testCommitSpansMerge, testAbortSpansSplit and -Merge."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage, 1 if change == "split" else 2)
        client = await stage.client()
        txn = await client.begin()
        for key in KEYS:
            await sender.send(key, f"before {key}", txn)
        await (stage.stage.split(0) if change == "split" else stage.stage.merge(0, 1))
        await queue.follow()
        for key in KEYS:
            await sender.send(key, f"after {key}", txn)
        await queue.nothing()
        await client.end(txn, COMMIT if commit else ABORT)
        for key in KEYS:
            await sender.send(key, f"plain {key}")
        written = ["before", "after", "plain"] if commit else ["plain"]
        expected = sorted(f"{when} {key}" for when in written for key in KEYS)
        assert await queue.texts(len(expected)) == expected
        await queue.nothing()
        late = await Queue(stage, client, "late").follow()
        assert await late.texts(len(expected)) == expected

    act(story)


def test_large_transaction() -> None:
    """11: testLargeTransaction: 500 messages, exactly once."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage, 2)
        client = await stage.client()
        txn = await client.begin()
        texts = [f"{number:03}" for number in range(500)]
        for text in texts:
            await sender.send(text, text, txn)
        await queue.nothing()
        pins = await stage.keys("/txn/op")
        assert len(pins) == 2, "one record for each segment, not for each message"
        await client.commit(txn)
        assert await queue.texts(500) == texts
        await queue.nothing()

    act(story)


def test_transactional_consume_and_produce() -> None:
    """12: testTransactionalConsumeAndProduce: acknowledge and produce in one transaction."""

    async def story(stage: TxnStage) -> None:
        sender, queue = await topic_of(stage, 2)
        client = await stage.client()
        output, outputs = await client.sender(T), await client.reader(T)
        for key in KEYS:
            await sender.send(key, key)
        got = await queue.take(len(KEYS))
        txn = await client.begin()
        for each in got:
            await output.send(f"out {each.text}", txn)
        await queue.ack(*got, txn=txn)
        await outputs.nothing()
        await client.commit(txn)
        assert sorted(await outputs.texts(len(KEYS))) == sorted(f"out {key}" for key in KEYS)
        await stage.settled()
        again = await Queue(stage, await stage.client()).follow()
        await again.nothing()

    act(story)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
def test_transactional_ack_abort_redelivers_then_commit_sticks(kind: int) -> None:
    """13: testTransactionalAckAbortRedeliversThenCommitSticks."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        (segment,) = await stage.segments()
        sender = await client.sender(segment)
        reader = await client.reader(segment, kind=kind)
        for number in range(3):
            await sender.send(f"{number}")
        got = await reader.take(3)
        first = await client.begin()
        await reader.ack(*got, txn=first)
        await client.abort(first)
        again = await reader.take(3)
        assert [each.text for each in again] == ["0", "1", "2"]
        second = await client.begin()
        await reader.ack(*again, txn=second)
        await client.commit(second)
        await stage.settled()
        await reader.close()
        reader = await client.reader(segment, kind=kind)
        await reader.nothing()

    act(story)


def test_multiple_subscriptions_independent_transactional_acks() -> None:
    """14: testMultipleSubscriptionsIndependentTransactionalAcks."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        (segment,) = await stage.segments()
        sender = await client.sender(segment)
        names = ("one", "two")
        readers = {name: await client.reader(segment, name) for name in names}
        await sender.send("x")
        txns = {name: await client.begin() for name in names}
        for name, reader in readers.items():
            await reader.ack(await reader.get(), txn=txns[name])
        await client.commit(txns["one"])
        await client.abort(txns["two"])
        assert await readers["two"].texts(1) == ["x"]
        await readers["one"].nothing()
        assert await readers["one"].backlog() == 0
        assert await readers["two"].backlog() == 1

    act(story)


def test_open_transaction_pins_later_non_transactional_writes() -> None:
    """15: testOpenTransactionPinsLaterNonTransactionalWrites."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        (segment,) = await stage.segments()
        sender, reader = await client.sender(segment), await client.reader(segment)
        await sender.send("before")
        txn = await client.begin()
        await sender.send("held", txn)
        await sender.send("behind")
        assert await reader.texts(1) == ["before"]
        await reader.nothing()
        await client.commit(txn)
        assert await reader.texts(2) == ["held", "behind"]

    act(story)


def test_timeout_sweep_aborts_dangling_transaction() -> None:
    """16: testTimeoutSweepAbortsDanglingTransaction, within two seconds of its deadline."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        (segment,) = await stage.segments()
        sender, reader = await client.sender(segment), await client.reader(segment)
        txn = await client.begin(ttl=5_000)
        await sender.send("dangling", txn)
        await sender.send("behind")
        await reader.nothing(4.9)

        async def aborted() -> bool:
            return await stage.state(txn) == "ABORTED"

        assert await until(aborted, 60) < 2.1
        assert await reader.texts(1) == ["behind"]
        late = sender.send("late", txn)
        assert await refusal(late) == WireCode.NOT_ALLOWED
        assert await client.ended(txn, COMMIT) == WireCode.INVALID_TXN_STATUS
        assert await client.ended(txn, ABORT) is None

    act(story)
