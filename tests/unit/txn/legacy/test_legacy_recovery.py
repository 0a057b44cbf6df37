"""Legacy transactions of one topic over restarts, and on topics that take no more messages."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.errors import (
    MagnetarError,
    ManagedLedgerFenced,
    ServiceNotReady,
)
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.model.ids import Position
from magnetar.txn.legacy.legacy_buffer import RECORD_SECONDS, LegacyTransactionBuffer
from tests.unit.broker.legacy_world import L1, L2, L3, abort, commit, legacy_of, moved, record_of
from tests.unit.broker.txn_world import (
    TxnWorld,
    attach,
    errors,
    in_txn_world,
    joined,
    log_of,
    publish,
    quiet,
    read_all,
    taken,
)

# --- recovery


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("pause", [0.0, RECORD_SECONDS * 3])
def test_a_restart_changes_nothing(clean: bool, pause: float) -> None:
    """Committed, aborted and open ones, with the record old or new."""

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await topic.create_subscription("s", Position(-1, -1))
        producer = await joined(topic)
        await publish(producer, L1, "1a")
        await publish(producer, L2, "2a", first=1)
        await publish(producer, None, "p", first=2)
        await commit(topic, L1)
        await abort(topic, L2)
        await publish(producer, L3, "3a", first=3)
        await publish(producer, None, "q", first=4)
        await asyncio.sleep(pause)
        broker, topic = await moved(broker, topic, clean=clean)
        assert await taken(await attach(topic)) == ["1a", "p"]
        assert legacy_of(topic).undecided == 1
        producer = await joined(topic)
        await publish(producer, L3, "3b", first=5)
        assert errors(await publish(producer, L1, "late", first=6)) == ["not-allowed"]
        broker, topic = await moved(broker, topic, clean=clean)
        await commit(topic, L3)
        expected = ["1a", "p", "3a", "q", "3b"]
        assert await read_all(topic, "new") == expected
        broker, topic = await moved(broker, topic, clean=clean)
        assert await read_all(topic, "newer") == expected
        assert topic.max_read_position() == topic.ledger.last_position()

    in_txn_world(scenario)


def test_a_clean_unload_leaves_nothing_to_scan() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await commit(topic, L1)
        last = topic.ledger.last_position()
        await topic.close()
        record = await record_of(broker)
        assert record is not None
        assert record.scanned_to == (last.ledger_id, last.entry_id + 1)
        assert record.open == ()

    in_txn_world(scenario)


def test_the_record_follows_plain_messages_too() -> None:
    """Else one legacy transaction would make every later load read the whole topic."""

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await commit(topic, L1)
        await asyncio.sleep(RECORD_SECONDS * 2)
        texts = [str(number) for number in range(1000)]
        await publish(producer, None, *texts, first=1)
        await asyncio.sleep(RECORD_SECONDS * 2)
        record = await record_of(broker)
        assert record is not None
        assert record.scanned_to > (topic.ledger.last_position().ledger_id, 1000)

    in_txn_world(scenario)


def test_an_owner_that_died_between_aborted_record_and_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "t")
        await publish(producer, None, "p", first=1)

        async def no_marker(*_: object) -> None:
            raise ServiceNotReady("dead")

        with monkeypatch.context() as patch:
            patch.setattr(LegacyTransactionBuffer, "_mark", no_marker)
            with pytest.raises(ServiceNotReady):
                await abort(topic, L1)
        broker, topic = await moved(broker, topic, clean=False)
        await quiet()
        assert await read_all(topic, "new") == ["p"]
        assert legacy_of(topic).undecided == 0
        await abort(topic, L1)
        assert len(await log_of(topic)) == 3

    in_txn_world(scenario)


def test_a_former_owner_ends_nothing_any_more() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        later = await world.broker().topic()
        with pytest.raises(MagnetarError):
            await commit(topic, L1)
        assert legacy_of(later).undecided == 1
        await commit(later, L1)
        assert await read_all(later, "new") == ["a"]

    in_txn_world(scenario)


def test_a_former_owners_record_does_not_replace_the_present_one() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        later = await world.broker().topic()
        await commit(later, L1)
        with pytest.raises(ManagedLedgerFenced):
            await legacy_of(topic).write_record()
        assert legacy_of(topic).failure is not None

    in_txn_world(scenario)


def test_a_record_has_one_keeper_however_many_began_it() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        world.slow = 0.1
        legacy = legacy_of(topic)
        await asyncio.gather(legacy.note_ack_log("one"), legacy.note_ack_log("two"))
        keepers = [task for task in asyncio.all_tasks() if "keep the record" in task.get_name()]
        assert len(keepers) == 1

    in_txn_world(scenario)


# --- topics that take no more messages


@pytest.mark.parametrize("clean", [True, False])
def test_transactions_of_a_terminated_topic_end_in_the_record(clean: bool) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await publish(producer, L2, "t", first=1)
        await publish(producer, L3, "c", first=2)
        await publish(producer, None, "p", first=3)
        await topic.terminate()
        await commit(topic, L1)
        assert await taken(reading) == ["a"]
        broker, topic = await moved(broker, topic, clean=clean)
        await abort(topic, L2)
        assert await taken(await attach(topic)) == ["a"]
        broker, topic = await moved(broker, topic, clean=clean)
        assert legacy_of(topic).undecided == 1
        await commit(topic, L3)
        broker, topic = await moved(broker, topic, clean=clean)
        assert await read_all(topic, "new") == ["a", "c", "p"]
        assert len(await log_of(topic)) == 4

    in_txn_world(scenario)


def test_an_end_during_the_termination_is_told_again_and_then_counts() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        world.slow = 1.0
        sealing = asyncio.create_task(topic.terminate())
        await asyncio.sleep(0.1)
        with pytest.raises(ServiceNotReady):
            await commit(topic, L1)
        await sealing
        world.slow = 0.0
        await commit(topic, L1)
        assert await read_all(topic, "new") == ["a"]

    in_txn_world(scenario)


@pytest.mark.parametrize("clean", [True, False])
def test_a_transaction_whose_marker_was_trimmed_has_ended(clean: bool) -> None:
    """The record is from when it was open, and what would say otherwise is gone."""

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "1a")
        await publish(producer, L2, "2a", first=1)
        await commit(topic, L1)
        broker, topic = await moved(broker, topic, clean=True)  # the record says: one is open
        await commit(topic, L2)
        broker, topic = await moved(broker, topic, clean=False)
        topic.policies = topic.policies.__class__(retention=Retention(0, 0))
        await topic.trim()
        assert topic.ledger.entries == 0
        broker, topic = await moved(broker, topic, clean=clean)
        await publish(await joined(topic), None, "p", first=2)
        assert legacy_of(topic).undecided == 0
        assert await read_all(topic, "new") == ["p"]

    in_txn_world(scenario)
