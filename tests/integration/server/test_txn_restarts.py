"""Scenarios 17 to 26, 36 and 37: transactions over restarts, kills, unloads and other owners.

Brokers with a disk lose what is not synced when they are killed; those that share their storage
take topics and coordinators over from one another.
"""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import WireCode
from magnetar.wire.messages import TxnId
from tests.integration.server.scalable_stage import until
from tests.integration.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    SHARED,
    KeyedSender,
    Queue,
    Reader,
    T,
    TxnClient,
    TxnStage,
    act,
    refusal,
)

of_every_end = pytest.mark.parametrize("end", ["killed", "restarted", "unloaded"])


async def interrupted(stage: TxnStage, end: str, *topics: str) -> TxnClient:
    """What a server's client has afterwards."""
    if end == "unloaded":
        for topic in topics or (T,):
            await stage.unloaded(topic)
    else:
        await (stage.killed() if end == "killed" else stage.restarted())
    return await stage.client()


@of_every_end
def test_committed_messages_visible_after_broker_restart(end: str) -> None:
    """17: testCommittedMessagesVisibleAfterBrokerRestart."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, txn = await client.sender(), await client.begin()
        for number in range(5):
            await sender.send(f"{number}", txn)
        await client.commit(txn)
        client = await interrupted(stage, end)
        reader = await client.reader()
        assert await reader.texts(5) == ["0", "1", "2", "3", "4"]
        await reader.nothing()

    act(story)


@of_every_end
def test_aborted_messages_filtered_after_broker_restart(end: str) -> None:
    """18: testAbortedMessagesFilteredAfterBrokerRestart."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, txn = await client.sender(), await client.begin()
        for number in range(5):
            await sender.send(f"{number}", txn)
        await client.abort(txn)
        await sender.send("sentinel")
        client = await interrupted(stage, end)
        reader = await client.reader()
        assert await reader.texts(1) == ["sentinel"]
        await reader.nothing()

    act(story)


@of_every_end
@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
def test_transactional_acks_survive_broker_restart(end: str, kind: int) -> None:
    """19 and 24: testTransactionalAcksSurviveBrokerRestart; F2: killed right after the commit."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender = await client.sender()
        reader = await client.reader(kind=kind)
        for number in range(5):
            await sender.send(f"{number}")
        for each in await reader.take(5):
            txn = await client.begin()
            await reader.ack(each, txn=txn)
            await client.commit(txn)
        client = await interrupted(stage, end)
        await (await client.reader(kind=kind)).nothing()

    act(story)


@of_every_end
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_commit_after_unload_applies_recovered_acks(
    end: str, cumulative: bool, commit: bool
) -> None:
    """23: F1: acknowledged, then another owner, then the decision."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, reader = await client.sender(), await client.reader()
        for number in range(4):
            await sender.send(f"{number}")
        got = await reader.take(4)
        txn = await client.begin()
        await reader.ack(*(got[2:3] if cumulative else got[:3]), txn=txn, cumulative=cumulative)
        client = await interrupted(stage, end)
        reader = await client.reader()
        assert await reader.texts(1) == ["3"], "the others are held"
        other = await client.begin()
        held = reader.ack(got[1], txn=other)
        assert await refusal(held) == WireCode.TRANSACTION_CONFLICT
        await client.end(txn, COMMIT if commit else ABORT)
        if not commit:
            assert await reader.texts(4) == ["0", "1", "2", "3"]
        await stage.settled()
        await stage.killed()
        reader = await (await stage.client()).reader()
        assert await reader.texts(1) == (["3"] if commit else ["0"])

    act(story)


@of_every_end
@pytest.mark.parametrize("is_child", [False, True])
def test_failover_of_a_fresh_segment_with_an_open_transaction(end: str, is_child: bool) -> None:
    """25: F3: the first messages of a segment are those of an open transaction."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        if is_child:
            await stage.stage.split(0)
        sender, txn = KeyedSender(stage, client), await client.begin()
        await sender.send("k", "open", txn)
        client = await interrupted(stage, end, *await stage.segments())
        queue = await Queue(stage, client).follow()
        await queue.nothing()
        await KeyedSender(stage, client, "q").send("k", "behind")
        await queue.nothing()
        await client.commit(txn)
        assert await queue.texts(2) == ["behind", "open"]

    act(story)


@pytest.mark.parametrize("plain_publish", [False, True])
def test_a_consumer_that_comes_during_recovery_sees_what_is_committed(plain_publish: bool) -> None:
    """26: F4 to F6: it subscribes, and others publish, while the new owner still recovers."""

    async def story(stage: TxnStage) -> None:
        owner = await stage.owner(T)
        client = await stage.client(host=owner)
        leading = await stage.client(host=await stage.leader())
        sender = await client.sender()
        await sender.send("first")
        for number in range(20):
            txn = await leading.begin()
            await sender.send(f"aborted {number}", txn)
            await leading.abort(txn)
        opened = await leading.begin()
        await sender.send("open", opened)
        await stage.stage.world.hosts[owner].kill()
        await until_taken_over(stage, T)
        client = await stage.client(host=await stage.owner(T))
        readers = await asyncio.gather(
            *(client.reader(subscription=f"s{number}") for number in range(3))
        )
        if plain_publish:
            await (await client.sender(name="late")).send("behind")
        for reader in readers:
            assert await reader.texts(1) == ["first"]
            await reader.nothing()
        leading = await stage.client(host=await stage.leader())
        await leading.commit(opened)
        expected = ["open", "behind"] if plain_publish else ["open"]
        for reader in readers:
            assert await reader.texts(len(expected)) == expected

    act(story, brokers="ab")


def test_batch_index_acks_over_a_restart() -> None:
    """36: F20: messages of a batch, acknowledged in transactions and beside them."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, reader = await client.sender(), await client.reader(kind=SHARED)
        await sender.send("batch", num_messages_in_batch=4)
        entry = await reader.get()
        kept, lost = await client.begin(), await client.begin()
        await reader.ack(entry, txn=kept, ack_set=0b1110)
        await reader.ack(entry, txn=lost, ack_set=0b1101)
        await reader.ack(entry, ack_set=0b1011)
        await stage.killed()
        client = await stage.client()
        await client.commit(kept)
        await client.abort(lost)
        for _ in range(2):  # from the ops, then from the cursor
            reader = await (await stage.client()).reader(kind=SHARED)
            assert (await reader.get()).ack_set == (0b1010,)
            await stage.settled()
            await stage.killed()

    act(story)


# --- several brokers


async def apart(stage: TxnStage) -> str:
    """A topic whose broker does not lead coordinator 0."""
    leader = await stage.leader()
    for number in range(50):
        topic = f"persistent://public/default/apart{number}"
        if await stage.owner(topic) != leader:
            return topic
    raise AssertionError("the leader has all topics")


async def written(stage: TxnStage, topic: str, txn: TxnId | None, *texts: str) -> None:
    """Messages, sent to whoever has the topic now."""
    client = await stage.client(host=await stage.owner(topic))
    sender = await client.sender(topic)
    for text in texts:
        await sender.send(text, txn)


async def reading(stage: TxnStage, topic: str) -> Reader:
    client = await stage.client(host=await stage.owner(topic))
    return await client.reader(topic)


@pytest.mark.parametrize("victim", ["leader", "owner"])
@pytest.mark.parametrize("commit", [True, False])
def test_transaction_survives_broker_failover(victim: str, commit: bool) -> None:
    """20: testTransactionSurvivesBrokerFailover: a broker is killed; nothing shows before."""

    async def story(stage: TxnStage) -> None:
        topic, leader = await apart(stage), await stage.leader()
        txn = await (await stage.client(host=leader)).begin()
        await written(stage, topic, txn, "before")
        killed = leader if victim == "leader" else await stage.owner(topic)
        await stage.stage.world.hosts[killed].kill()
        await until_taken_over(stage, topic)
        reader = await reading(stage, topic)
        await reader.nothing()
        await written(stage, topic, txn, "after")
        await reader.nothing()
        leading = await stage.client(host=await stage.leader())
        await leading.end(txn, COMMIT if commit else ABORT)
        await written(stage, topic, None, "sentinel")
        expected = ["before", "after", "sentinel"] if commit else ["sentinel"]
        assert await reader.texts(len(expected)) == expected

    act(story, brokers="abc")


async def until_taken_over(stage: TxnStage, *topics: str) -> None:
    """Until the brokers that are left have the topics, and lead coordinator 0."""

    async def is_taken_over() -> bool:
        ready = {host.name for host in stage.stage.world.ready}
        places = [await stage.leader(), *[await stage.owner(topic) for topic in topics]]
        return set(places) <= ready

    await until(is_taken_over, 60, "everything is taken over")


def test_produce_consume_commit_and_abort_on_several_brokers() -> None:
    """21: testProduceConsumeCommitAndAbort, testMultiTopicAtomicCommit, and the next."""

    async def story(stage: TxnStage) -> None:
        topics = [f"persistent://public/default/t{number}" for number in range(6)]
        assert len({await stage.owner(topic) for topic in topics}) > 1
        leading = await stage.client(host=await stage.leader())
        readers = [await reading(stage, topic) for topic in topics]
        for commit in (False, True):
            txn = await leading.begin()
            for topic in topics:
                await written(stage, topic, txn, f"{commit}")
            for reader in readers:
                await reader.nothing(0.5)
            await leading.end(txn, COMMIT if commit else ABORT)
        for reader in readers:
            assert await reader.texts(1) == ["True"]
            await reader.nothing(0.5)

    act(story, brokers="abc")


def test_consume_transform_produce_on_several_brokers() -> None:
    """21: testConsumeTransformProduce: aborted once, then committed, between two brokers."""

    async def story(stage: TxnStage) -> None:
        source, sink = await apart(stage), T
        await written(stage, source, None, *(f"{number}" for number in range(10)))
        inputs, outputs = await reading(stage, source), await reading(stage, sink)
        for commit in (False, True):
            leading = await stage.client(host=await stage.leader())
            txn = await leading.begin()
            got = await inputs.take(10)
            await written(stage, sink, txn, *(f"out {each.text}" for each in got))
            await inputs.ack(*got, txn=txn)
            await leading.end(txn, COMMIT if commit else ABORT)
        assert await outputs.texts(10) == [f"out {number}" for number in range(10)]
        await outputs.nothing()
        await inputs.nothing()
        assert await inputs.backlog() == 0

    act(story, brokers="ab")


def test_tc_metadata_discovery() -> None:
    """22: TcMetadataDiscoveryTest: clients follow the watch; a new leader takes over."""

    async def story(stage: TxnStage) -> None:
        former = await stage.leader()
        client = await stage.client(host=former)
        decided, left = await client.begin(), await client.begin()
        await client.commit(decided)
        await stage.stage.world.hosts[former].kill()

        async def has_moved() -> bool:
            return await stage.leader() != former

        await until(has_moved, 60, "another one leads")
        client = await stage.client(host=await stage.leader())
        assert await client.ended(decided, ABORT) == WireCode.INVALID_TXN_STATUS
        await client.commit(decided)
        await client.commit(left)
        assert (await client.begin()).least > left.least
        leader = await stage.leader()
        other = next(host for host in stage.stage.world.ready if host.name != leader)
        elsewhere = await stage.client(host=other.name)
        for work in (elsewhere.begin(), elsewhere.commit(left), elsewhere.abort(left)):
            assert await refusal(work) == WireCode.TRANSACTION_COORDINATOR_NOT_FOUND

    act(story, brokers="abc")


@pytest.mark.parametrize("commit", [True, False])
def test_coordinator_killed_between_decision_and_notification(commit: bool) -> None:
    """37: F21: decided, but its broker dies before it can tell anybody."""

    async def story(stage: TxnStage) -> None:
        topic, leader = await apart(stage), await stage.leader()
        client = await stage.client(host=leader)
        txn = await client.begin()
        reader = await reading(stage, topic)
        await written(stage, topic, txn, "x")
        await written(stage, topic, None, "behind")
        await reader.nothing()
        action = COMMIT if commit else ABORT
        fields = {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}
        client.driver.send("END_TXN", request_id=99, txn_action=action, **fields)
        owner = stage.stage.world.hosts[await stage.owner(topic)]
        wanted = "COMMITTED" if commit else "ABORTED"

        async def is_decided() -> bool:
            outcomes = owner.server.outcomes
            return await owner.ask(lambda _: outcomes.read(txn)) == wanted

        await until(is_decided, 10, "it is decided")
        await stage.stage.world.hosts[leader].kill()
        begun = asyncio.get_running_loop().time()
        expected = ["x", "behind"] if commit else ["behind"]
        assert await reader.texts(len(expected)) == expected
        assert asyncio.get_running_loop().time() - begun < 10

    act(story, brokers="ab")
