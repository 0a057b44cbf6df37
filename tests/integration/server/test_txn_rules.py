"""Rules of transactions through the wire: ends, lost receipts, aborted entries, races, no leak."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.maintenance import CARE_SECONDS
from magnetar.broker.topic.topic import Topic
from magnetar.errors import WireCode
from magnetar.model.ids import Position
from magnetar.model.isolation import ISOLATION_PROPERTY
from magnetar.model.names import TopicName
from magnetar.scalable.layout.segments import LocalSegments
from magnetar.txn.ids import METADATA_BIT
from magnetar.txn.records import HEADERS
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId
from tests.integration.server.scalable_stage import told, until
from tests.integration.server.txn_stage import (
    ABORT,
    COMMIT,
    EXCLUSIVE,
    KEY_SHARED,
    SHARED,
    KeyedSender,
    Place,
    Queue,
    Roles,
    T,
    TxnClient,
    TxnStage,
    act,
    refusal,
)

of_both_clients = pytest.mark.parametrize("v4", [True, False])
NOT_FOUND, WRONG = WireCode.TRANSACTION_NOT_FOUND, WireCode.INVALID_TXN_STATUS


def loaded(stage: TxnStage, topic: str = T) -> Topic:
    found = stage.server.topics.loaded[TopicName.parse(topic)]
    assert isinstance(found, Topic)
    return found


# --- END_TXN: the documented code each time, and one outcome


async def owned_by(stage: TxnStage, role: str, *, v4: bool) -> TxnClient:
    stage.server.context.authority = Roles()
    return await stage.client(v4=v4, auth_data=role.encode())


@of_both_clients
@pytest.mark.parametrize("end", ["commit", "abort", "timeout"])
def test_an_outcome_never_changes_whoever_asks_for_an_end(v4: bool, end: str) -> None:
    """50, 52 and 64: repeated, crossed, by others, after a kill; AuthenticatedTransaction..."""

    async def asked_of_all(stage: TxnStage, txn: TxnId) -> None:
        ended, crossed = (COMMIT, ABORT) if end == "commit" else (ABORT, COMMIT)
        for role, codes in (("alice", (None, WRONG)), ("bob", (NOT_FOUND, NOT_FOUND))):
            client = await owned_by(stage, role, v4=v4)
            for _ in range(2):
                asked = [await client.ended(txn, ended), await client.ended(txn, crossed)]
                assert tuple(asked) == codes, role
            writes, acks = client.writes_to(txn, T), client.acknowledges_on(txn, T, "s")
            for work in (writes, acks):
                assert await refusal(work) == (WRONG if role == "alice" else NOT_FOUND)

    async def story(stage: TxnStage) -> None:
        alice = await owned_by(stage, "alice", v4=v4)
        bob = await owned_by(stage, "bob", v4=v4)
        txn = await alice.begin(ttl=5_000 if end == "timeout" else 600_000)
        await (await alice.sender()).send("x", txn)
        for action in (COMMIT, ABORT):
            assert await bob.ended(txn, action) == NOT_FOUND
        assert await stage.state(txn) == "OPEN"
        if end == "timeout":
            await asyncio.sleep(8)
        else:
            await alice.end(txn, COMMIT if end == "commit" else ABORT)
        outcome = await stage.state(txn)
        assert outcome == ("COMMITTED" if end == "commit" else "ABORTED")
        for _ in range(2):
            await asked_of_all(stage, txn)
            assert await stage.state(txn) == outcome
            await stage.killed()
        reader = await (await stage.client()).reader()
        if end == "commit":
            assert await reader.texts(1) == ["x"]
        await reader.nothing()

    act(story, kind="metadata")


@of_both_clients
def test_ends_of_what_there_is_not(v4: bool) -> None:
    """50: unknown, of another kind, forgotten after its retention, and a coordinator too many."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=v4)
        txn = await client.begin()
        await client.commit(txn)
        for unknown in (TxnId(0, 77), TxnId(0, METADATA_BIT | 10**6), TxnId(3, txn.least)):
            for action in (COMMIT, ABORT):
                assert await client.ended(unknown, action) == NOT_FOUND
        missing = WireCode.TRANSACTION_COORDINATOR_NOT_FOUND
        assert await refusal(client.begin(coordinator=16)) == missing

        async def is_forgotten() -> bool:
            return await stage.keys(HEADERS) == []

        await until(is_forgotten, 120, "the header is gone")
        assert await client.ended(txn, COMMIT) == NOT_FOUND

    act(story, kind="metadata", txn_retention_seconds=10.0, txn_collect_seconds=5.0)


# --- a receipt that is lost


@of_both_clients
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("end", ["cut", "killed", "unloaded"])
def test_a_lost_receipt_and_a_resend_inside_a_transaction(v4: bool, dedup: bool, end: str) -> None:
    """The message is there once, whatever the policy of the namespace."""

    async def story(stage: TxnStage) -> None:
        await stage.host.ask(
            lambda server: server.topics.change_namespace(
                TopicName.parse(T).namespace,
                lambda policies: msgspec.structs.replace(policies, deduplication_enabled=dedup),
            )
        )
        client = await stage.client(v4=v4)
        asked = [{"key": ISOLATION_PROPERTY, "value": "read_uncommitted"}]
        watching = await client.reader(subscription="watching", metadata=asked)
        sender, txn = await client.sender(name="p"), await client.begin()
        await client.writes_to(txn, T)
        await sender.send("first", txn, sequence=0)
        sender.post("second", txn, 1)
        assert await watching.texts(2) == ["first", "second"]
        client.driver.abort()
        if end != "cut":
            await (stage.killed() if end == "killed" else stage.unloaded())
        client = await stage.client(v4=v4)
        sender = await client.sender(name="p")
        places = [await sender.send("second", txn, sequence=1) for _ in range(2)]
        assert places == [Place(2**64 - 1, 2**64 - 1)] * 2, "told that it is stored already"
        await sender.send("third", txn, sequence=2)
        await client.commit(txn)
        reader = await client.reader()
        assert await reader.texts(3) == ["first", "second", "third"]
        await reader.nothing()

    act(story)


def test_what_an_aborted_transaction_sent_may_be_sent_again() -> None:
    """Sequence ids of what was taken back are free again, with deduplication too."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()  # segments have deduplication
        (segment,) = await stage.segments()
        client = await stage.client()
        sender = await client.sender(segment, "p")
        for commit in (False, True):
            txn = await client.begin()
            for number in range(3):
                await sender.send(f"{number} {commit}", txn, sequence=number)
            await client.end(txn, COMMIT if commit else ABORT)
            await stage.settled()
        reader = await client.reader(segment)
        assert await reader.texts(3) == ["0 True", "1 True", "2 True"]
        await reader.nothing()

    act(story)


# --- races and leaks


@pytest.mark.parametrize("commit", [True, False])
def test_a_publish_that_races_the_end_is_refused_or_belongs_to_it(commit: bool) -> None:
    """29: F9 to F11: what has a receipt shares the outcome; the rest is nowhere."""

    async def story(stage: TxnStage) -> None:
        client, other = await stage.client(), await stage.client()
        sender, inputs = await client.sender(), await client.reader("inputs", kind=SHARED)
        source = await client.sender("inputs")
        for number in range(20):
            await source.send(f"{number}")
        got = await inputs.take(20)
        stored, refused, acked = [], 0, 0
        for round_number in range(20):
            txn = await client.begin()
            await sender.send(f"{round_number} early", txn)
            work = [sender.sending(f"{round_number} {late}", txn) for late in range(3)]
            acking = inputs.ack(got[round_number], txn=txn)
            ending = other.end(txn, COMMIT if commit else ABORT)
            sends = [refusal(each) for each in work]
            *codes, ack, _ = await asyncio.gather(*sends[:1], *sends[1:], refusal(acking), ending)
            assert set(codes) <= {None, WireCode.NOT_ALLOWED}
            assert ack in (None, WireCode.TRANSACTION_CONFLICT)
            stored.append(f"{round_number} early")
            stored += [f"{round_number} {n}" for n, code in enumerate(codes) if code is None]
            refused += len([code for code in codes if code is not None])
            acked += ack is None
        await sender.send("sentinel")
        expected = [*(stored if commit else []), "sentinel"]
        reader = await client.reader()
        assert await reader.texts(len(expected)) == expected
        await reader.nothing()
        await stage.settled()
        assert await inputs.backlog() == 20 - (acked if commit else 0)

    act(story)


async def deleted(stage: TxnStage, topic: str) -> None:
    name = TopicName.parse(topic)
    await stage.host.ask(lambda server: server.topics.delete(name, force=True))


def test_the_store_returns_to_its_baseline() -> None:
    """32: F16: committed, aborted, timed out, with deleted topics and subscriptions among them."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        before = await stage.kept()
        for number in range(30):
            topic = f"persistent://public/default/leak{number % 5}"
            sender, reader = await client.sender(topic), await client.reader(topic, kind=SHARED)
            await sender.send("input")
            txn = await client.begin(ttl=2_000 if number % 3 == 2 else 600_000)
            await sender.send("output", txn)
            await reader.ack(await reader.get(), txn=txn)
            if number % 7 == 6:
                await reader.driver.request("UNSUBSCRIBE", consumer_id=0, force=True)
            await reader.driver.close()
            if number % 3 < 2:
                await client.end(txn, ABORT if number % 3 else COMMIT)
        for number in range(5):
            await deleted(stage, f"persistent://public/default/leak{number}")

        async def is_empty() -> bool:
            return await stage.kept() == before and await stage.keys(HEADERS) == []

        await until(is_empty, 600, "nothing is left")

    act(story, txn_retention_seconds=10.0, txn_collect_seconds=5.0)


# --- sealed segments


@pytest.mark.parametrize("isolation", [None, "read_uncommitted"])
def test_a_sealed_segment_is_kept_while_a_transaction_in_it_is_undecided(
    isolation: str | None,
) -> None:
    """Though no subscription needs it; a later one sees all of the transaction, or nothing."""

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        sender, txn = KeyedSender(stage, client), await client.begin()
        await sender.send("k", "in the parent", txn)
        if isolation is not None:
            (parent,) = await stage.segments()
            asked = [{"key": ISOLATION_PROPERTY, "value": isolation}]
            dirty = await client.reader(parent, "dirty", metadata=asked)
            await dirty.ack(await dirty.get())
            await dirty.close()
        await stage.stage.split(0)
        await sender.send("k", "in the child", txn)
        await asyncio.sleep(300)
        assert len(await stage.segments()) == 3
        queue = await Queue(stage, client).follow()
        await client.commit(txn)
        got = await queue.take(2)
        assert sorted(each.text for each in got) == ["in the child", "in the parent"]
        await queue.ack(*got)

        async def is_gone() -> bool:
            return len(await stage.segments()) == 2

        await until(is_gone, 300, "the parent is pruned")

    act(story, scalable_sealed_seconds=10.0)


def test_without_that_rule_half_of_the_transaction_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any) -> bool:
        return False

    monkeypatch.setattr(LocalSegments, "undecided", nobody)

    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        client = await stage.client()
        sender, txn = KeyedSender(stage, client), await client.begin()
        await sender.send("k", "in the parent", txn)
        await stage.stage.split(0)
        await sender.send("k", "in the child", txn)
        await asyncio.sleep(300)
        queue = await Queue(stage, client).follow()
        await client.commit(txn)
        assert await queue.texts(1) == ["in the child"]
        await queue.nothing()

    act(story, scalable_sealed_seconds=10.0)


# --- the end of a topic


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("permits", [1, 1000])
def test_a_terminated_topic_ends_with_its_last_transaction(commit: bool, permits: int) -> None:
    """Consumers are told of the end when nothing can come any more, with permits or without."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(client_version="Pulsar-Java-v5.0.0")  # only they are told
        sender, reader = await client.sender(), await client.reader(permits=permits)
        await sender.send("plain")
        await reader.ack(await reader.get())
        txn = await client.begin()
        await sender.send("open", txn)
        await stage.host.ask(lambda server: loaded(stage).terminate())
        await asyncio.sleep(3)
        assert len(reader.driver.pushes) == 0, "it is not told of the end either"
        await client.end(txn, COMMIT if commit else ABORT)
        if commit:
            reader.driver.send("FLOW", consumer_id=0, messagePermits=1)
            await reader.ack(await reader.get())
        await told(reader.driver, "REACHED_END_OF_TOPIC")

    act(story)


def test_key_shared_consumers_get_again_what_was_acknowledged_in_vain() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender = await client.sender()
        readers = [await client.reader(kind=KEY_SHARED) for _ in range(2)]
        for number in range(20):
            await sender.send(f"{number}", key=f"k{number}")
        await asyncio.sleep(1)
        shares = [await reader.take(len(reader.driver.pushes)) for reader in readers]
        assert sum(map(len, shares)) == 20
        assert all(shares)
        for commit in (False, True):
            txn = await client.begin()
            for reader, share in zip(readers, shares, strict=True):
                await reader.ack(*share, txn=txn)
            await client.end(txn, COMMIT if commit else ABORT)
            if not commit:
                for reader, share in zip(readers, shares, strict=True):
                    again = await reader.take(len(share))
                    assert {each.text for each in again} == {each.text for each in share}
        for reader in readers:
            await reader.nothing()
        await stage.settled()
        assert await readers[0].backlog() == 0

    act(story)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
def test_a_seek_amid_open_transactions(kind: int) -> None:
    """It frees what was held; what is open stays hidden."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, reader = await client.sender(), await client.reader(kind=kind)
        first = await sender.send("0")
        await sender.send("1")
        writing, acking = await client.begin(), await client.begin()
        await sender.send("open", writing)
        await reader.ack(*await reader.take(2), txn=acking)
        await reader.driver.request("SEEK", consumer_id=0, message_id=first.fields())
        reader = await client.reader(kind=kind)
        assert await reader.texts(2) == ["0", "1"]
        await reader.nothing()
        await client.commit(acking)
        await reader.nothing()
        assert await reader.backlog() == 2, "an acknowledgement from before the seek is void"
        await client.commit(writing)
        assert await reader.texts(1) == ["open"]

    act(story)


# --- aborted entries count as acknowledged


async def aborted_behind_all(stage: TxnStage) -> None:
    """Three subscriptions that have acknowledged everything but what is aborted then."""
    client = await stage.client()
    sender = await client.sender()
    readers = {}
    for name, permits in (("idle", 3), ("out of permits", 3), ("waiting", 1000)):
        readers[name] = await client.reader(subscription=name, permits=permits)
    for number in range(3):
        await sender.send(f"{number}")
    for reader in readers.values():
        await reader.ack(*await reader.take(3))
    await readers["idle"].close()
    txn = await client.begin()
    for number in range(9):
        await sender.send(f"aborted {number}", txn)
    await client.abort(txn)
    await stage.settled()
    await sender.send("sentinel")


def test_aborted_entries_count_as_acknowledged_and_trimming_goes_on() -> None:
    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        topic = loaded(stage)

        def trimmed() -> bool:
            return topic.ledger.entries <= 3  # a ledger may get one more when it is full

        await until(trimmed, 3 * CARE_SECONDS, "what is aborted is trimmed")
        for subscription in topic.subscriptions.values():
            assert subscription.backlog() == 1

    act(story, managed_ledger_ledger_entries=2)


def test_aborted_entries_count_as_acknowledged_after_a_kill_too() -> None:
    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        await stage.killed()
        await (await stage.client()).sender()
        topic = loaded(stage)

        def passed() -> bool:
            return {each.backlog() for each in topic.subscriptions.values()} == {1}

        await until(passed, 10, "what is aborted is passed")

    act(story)


def test_aborted_entries_are_in_no_backlog() -> None:
    """Backlogs of all that there are do without them, up to the first undecided one."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, reader = await client.sender(), await client.reader(subscription="idle")
        await sender.send("first")
        got = await reader.get()
        await reader.close()
        opened, aborted = await client.begin(), await client.begin()
        for txn in (opened, aborted, opened, aborted):
            await sender.send("x", txn)
        await sender.send("last")
        idle = loaded(stage).subscriptions["idle"]
        await client.abort(aborted)
        await stage.until_ops(1)
        await asyncio.sleep(1)
        assert (idle.backlog(), idle.visible_backlog()) == (6, 1)
        await client.abort(opened)
        await stage.settled()
        await asyncio.sleep(1)
        assert (idle.backlog(), idle.visible_backlog()) == (2, 2)
        later = await client.reader(subscription="later", permits=0)
        assert await later.backlog() == 6, "dispatch finds them as it comes to them"
        reader = await client.reader(subscription="idle", permits=0)
        await reader.ack(got)
        await later.ack(got)
        await loaded(stage).trim()
        assert await reader.backlog() == await later.backlog() == 1

    act(story)


@pytest.mark.parametrize("is_old", [False, True])
def test_aborted_entries_are_in_no_backlog_after_a_crash(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """Cursors were not written since: what they had passed is found anew, with old records too."""
    if is_old:
        monkeypatch.setattr(TxnStore, "write_aborted", _without_first)

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        sender, reader = await client.sender(), await client.reader(subscription="idle")
        await sender.send("first")
        await reader.get()
        await reader.close()
        aborted = await client.begin()
        for txn in (aborted, None, aborted):
            await sender.send("x", txn)
        await client.abort(aborted)
        await stage.settled()
        idle = loaded(stage).subscriptions["idle"]
        await until(lambda: idle.backlog() == 2, 10, "what is aborted is passed")
        await stage.killed()
        await (await stage.client()).sender()
        idle = loaded(stage).subscriptions["idle"]
        await until(lambda: idle.backlog() == 2, 10, "and after the crash too")

    act(story)


_write_aborted = TxnStore.write_aborted


async def _without_first(
    self: TxnStore, txn: TxnId, segment: str, last: Position, *, first: Position
) -> None:
    """Write the record as it was before it told where the entries begin."""
    await _write_aborted(self, txn, segment, last)


def test_without_that_rule_an_idle_subscription_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(Subscription, "pass_aborted", nothing)
    monkeypatch.setattr(Subscription, "pass_over", lambda *_: None)

    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        await asyncio.sleep(3 * CARE_SECONDS)
        assert loaded(stage).ledger.entries > 9

    act(story, managed_ledger_ledger_entries=2)
