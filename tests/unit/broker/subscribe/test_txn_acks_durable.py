"""Acknowledgements in transactions: what is durable when, other owners, seeks, ends."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import (
    MagnetarError,
    ManagedLedgerFenced,
    ServiceNotReady,
    TransactionConflict,
)
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.txn.ids import metadata_id
from magnetar.txn.records import header_key
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    KEY_SHARED,
    SHARED,
    Client,
    numbered,
)
from tests.unit.broker.txn_ack_world import Stage, ack, play
from tests.unit.broker.txn_world import (
    T1,
    T2,
    cut,
    heal,
    quiet,
    taken,
)

# --- what is durable


def test_an_intent_is_durable_before_the_answer_and_goes_after_the_cursor_write() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.05)
        assert not answer.done()
        await answer
        assert await stage.ops() == 1
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 4
        assert await stage.ops() == 1, "the cursor is not written yet"
        await quiet(1)
        stage.world.slow = 0.0
        assert await stage.ops() == 0
        assert await stage.stored_mark() == client.position_of("0")

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, SHARED])
def test_committed_acks_survive_a_crash_at_any_moment(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(type_)
        await quiet()
        await ack(client, T1, "0", "1")
        await ack(client, T2, "2")
        stage.world.slow = 0.1
        await stage.broker.store.end(T1, "COMMITTED", 0)
        stage.broker.outcomes.learn(T1, "COMMITTED")
        stage.broker.kill()
        stage.world.slow = 0.0
        later = await stage.world_stage()
        again = later.client(type_)
        await quiet()
        assert again.bodies() == ["3", "4"], "one is committed, the other still open"
        await later.broker.abort(T2)
        await quiet()
        assert sorted(set(again.bodies())) == ["2", "3", "4"]
        await quiet(1)
        assert await later.ops() == 0

    play(scenario)


def test_a_commit_at_another_owner_applies_what_the_former_one_took() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await ack(client, T1, "1", cumulative=True)
        await ack(client, T1, "2", cumulative=True)
        later = await stage.moved()
        again = later.client(EXCLUSIVE)
        await quiet()
        assert again.bodies() == ["3", "4"]
        with pytest.raises(TransactionConflict):
            await ack(again, T2, "3", cumulative=True)
        await later.broker.commit(T1)
        assert later.subscription.backlog() == 2
        await quiet(1)
        assert await later.ops() == 0

    play(scenario)


def test_a_former_owner_does_not_answer() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        later = await stage.world_stage()
        with pytest.raises(ManagedLedgerFenced):
            await ack(client, T1, "0")
        await later.broker.commit(T1)
        await later.subscription.rescan_transactions()
        await quiet()
        assert later.subscription.backlog() == 4, "it came too late, and is part of the commit"
        assert await later.ops() == 0

    play(scenario)


def test_an_intent_that_cannot_be_written_holds_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client()
        await quiet()
        cut(stage.broker)
        with pytest.raises(MagnetarError):
            await ack(client, T1, "0")
        heal(stage.broker)
        await quiet()
        await ack(client, T2, "0")
        await stage.broker.commit(T2)
        assert stage.subscription.backlog() == 4

    play(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, SHARED, KEY_SHARED])
def test_what_dispatch_went_by_comes_back_if_the_intent_fails(type_: SubscriptionType) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(type_)
        await quiet()
        client.take()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.02)
        client.leave()
        after = stage.client(type_, "d")
        await quiet(0.02)
        assert after.bodies() == numbered(4, 1)
        cut(stage.broker)
        with pytest.raises(MagnetarError):
            await answer
        heal(stage.broker)
        stage.world.slow = 0
        await quiet()
        assert set(after.bodies()) == set(numbered(5))
        # Memory only: who asked for it is forgotten with it.
        txn_acks = stage.subscription._txn_acks
        assert txn_acks is not None
        assert not txn_acks._held._consumers

    play(scenario)


def test_a_commit_covers_what_is_in_flight() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "1"))
        await quiet(0.05)
        stage.broker.outcomes.learn(T1, "COMMITTED")
        assert stage.subscription.backlog() == 5
        with pytest.raises(TransactionConflict):
            await ack(client, T1, "2")
        await answer
        assert stage.subscription.backlog() == 3

    play(scenario)


def test_a_command_goes_on_when_its_sender_is_gone() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "1"))
        await quiet(0.05)
        answer.cancel()
        await quiet(2)
        stage.world.slow = 0
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 4

    play(scenario)


def test_a_missing_header_means_aborted() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        await stage.world.metadata.connect().delete(header_key(T1))
        later = await stage.moved()
        again = later.client()
        await quiet()
        assert again.bodies() == numbered(5)
        assert await later.ops() == 0

    play(scenario)


# --- the ends of subscriptions


def test_a_seek_ends_what_is_held() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1, T2)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0", "1")
        await ack(client, T2, "2")
        first = client.position_of("0")
        stage.world.slow = 0.1
        seek = asyncio.create_task(stage.subscription.seek(first))
        await quiet(0.05)
        stage.broker.outcomes.learn(T1, "COMMITTED")
        await seek
        stage.world.slow = 0
        await stage.broker.store.end(T1, "COMMITTED", 0)
        again = stage.client()
        await quiet(1)
        assert again.bodies() == numbered(5)
        assert await stage.ops() == 0
        await stage.broker.commit(T2)
        assert stage.subscription.backlog() == 5

    play(scenario)


def test_a_seek_removes_the_ops_of_open_transactions() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        await stage.subscription.seek(client.position_of("0"))
        await quiet(1)
        assert await stage.ops() == 0

    play(scenario)


def test_an_ack_from_before_a_seek_does_not_count_after_it() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        first = client.position_of("0")
        stage.world.slow = 0.1
        answer = asyncio.create_task(ack(client, T1, "0"))
        await quiet(0.05)
        await stage.subscription.seek(first)
        with pytest.raises(ServiceNotReady):
            await answer
        stage.world.slow = 0
        await quiet(1)
        assert await stage.ops() == 0
        await stage.broker.commit(T1)
        assert stage.subscription.backlog() == 5

    play(scenario)


def test_acks_of_another_incarnation_are_dropped_at_recovery() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        stage.broker.kill()
        later = await stage.world_stage()
        await later.topic.ledger.delete_cursor("s")
        await later.topic.ledger.create_cursor("s", Position(-1, -1))
        last = await later.moved()
        await last.broker.commit(T1)
        await quiet(1)
        assert (last.subscription.backlog(), await last.ops()) == (5, 0)

    play(scenario)


def test_ops_go_with_their_subscription() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        await stage.topic.delete_subscription("s", force=True)
        assert await stage.ops() == 0
        await stage.broker.commit(T1)

    play(scenario)


def test_subscriptions_with_related_names_do_not_meet() -> None:
    async def scenario(stage: Stage) -> None:
        txns = [metadata_id(0, number) for number in (1, 10, 100)]
        await stage.begin(*txns)
        await stage.topic.create_subscription("s-retry", Position(-1, -1))
        retry = Client(stage.topic.subscriptions["s-retry"], SHARED)
        client = stage.client()
        await quiet()
        for number, txn in enumerate(txns):
            await ack(client, txn, str(number))
            await ack(retry, txn, str(number))
        await stage.broker.commit(txns[0])
        await quiet(1)
        assert await stage.ops() == 4
        later = await stage.moved()
        await later.broker.commit(txns[1])
        await later.broker.abort(txns[2])
        await quiet(1)
        assert [each.backlog() for each in later.topic.subscriptions.values()] == [3, 3]
        assert await later.ops() == 0

    play(scenario)


def test_a_sealed_topic_is_drained_when_the_commit_is_durable() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client(EXCLUSIVE)
        await quiet()
        await stage.topic.terminate()
        await quiet()
        await ack(client, T1, "4", cumulative=True)
        seen = stage.topic.ends.version
        assert stage.subscription.backlog() == 5
        await stage.broker.commit(T1)
        assert await stage.topic.ends.past(seen) > seen
        assert stage.subscription.backlog() == 0
        await stage.subscription.ack_durable()
        assert await stage.stored_mark() == client.position_of("4")

    play(scenario)


def test_dispatch_waits_for_recovery() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.begin(T1)
        client = stage.client()
        await quiet()
        await ack(client, T1, "0")
        later = await stage.moved()
        cut(later.broker)
        again = later.client()
        await quiet()
        assert again.bodies() == []
        heal(later.broker)
        await quiet(5)
        assert again.bodies() == numbered(4, 1)
        assert await taken(again.consumer) == []

    play(scenario)
