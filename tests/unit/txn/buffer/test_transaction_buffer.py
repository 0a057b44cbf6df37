"""Transactions of one topic: what consumers see, decisions, recovery, trim, failures."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.api import DROPPED, LastMessage
from magnetar.broker.topic.topic import Topic
from magnetar.errors import ManagedLedgerFenced, ServiceNotReady, Unavailable
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.txn import outcomes
from magnetar.txn.buffer import transaction_buffer as buffers
from magnetar.txn.buffer.pins import place_pin
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.ids import from_text
from magnetar.txn.records import Pin, State, encode, pin_key
from magnetar.txn.store import FoundPin, StoredOp, TxnStore
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_world import (
    T1,
    T2,
    T3,
    Broker,
    TxnWorld,
    attach,
    cut,
    errors,
    heal,
    in_txn_world,
    joined,
    log_of,
    publish,
    quiet,
    read_all,
    sent,
    taken,
)
from tests.unit.broker.world import NAME

OTHER = TopicName.parse("persistent://public/default/payments")


def buffer_of(topic: Topic) -> MetadataTransactionBuffer:
    assert topic.transactions is not None
    return topic.transactions


def test_open_txn_append_pins_the_ceiling() -> None:  # 39
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, None, "a")
        await publish(producer, T1, "t", first=1)
        await publish(producer, None, "b", first=2)
        assert await taken(reading) == ["a"]
        assert topic.max_read_position() < topic.ledger.last_position()
        assert buffer_of(topic).blocker() == T1
        last = await topic.last_message()
        assert last.position == topic.max_read_position()

    in_txn_world(scenario)


def test_concurrent_open_txns_the_lowest_bound_pins() -> None:  # 40
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        one, two = await joined(topic), await joined(topic, "q")
        await broker.begin(T1)
        await broker.begin(T2)
        await publish(one, T1, "1a")
        await publish(two, T2, "2a")
        await publish(one, T1, "1b", first=1)
        await broker.commit(T2)
        assert await taken(reading) == []
        await broker.commit(T1)
        assert await taken(reading) == ["1a", "2a", "1b"]

    in_txn_world(scenario)


def test_commit_unpins_at_once_and_leaves_no_record() -> None:  # 41, 43
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "a", "b")
        assert len(await broker.keys()) == 1
        broker.outcomes.learn(T1, "COMMITTED")
        assert topic.max_read_position() == topic.ledger.last_position()
        assert buffer_of(topic).undecided == 0
        await quiet()
        assert await broker.keys() == []
        assert await read_all(topic, "new") == ["a", "b"]

    in_txn_world(scenario)


def test_abort_marks_the_entries_and_leaves_one_record() -> None:  # 42
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, None, "a")
        await publish(producer, T1, "t", "t", first=1)
        await publish(producer, None, "b", first=3)
        await broker.abort(T1)
        assert await taken(reading) == ["a", "b"]
        assert topic.subscriptions["s"].backlog() == 2  # the aborted ones are acknowledged
        assert [key for key in await broker.keys() if "/op/" in key] == []
        assert len(await broker.keys()) == 1

    in_txn_world(scenario)


def test_the_last_message_is_one_that_a_consumer_could_get() -> None:  # 30
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        await broker.begin(T1)
        many = [f"t{number}" for number in range(1200)]
        await publish(producer, T1, *many)
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        await broker.abort(T1)
        await quiet()
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        await broker.begin(T2)
        receipt = (await publish(producer, None, "a", first=2000))[0]
        await publish(producer, T2, *many, first=3000)
        await broker.abort(T2)
        await quiet()
        assert (await topic.last_message()).position == receipt.position

    in_txn_world(scenario)


def test_peek_and_reader_stop_at_the_ceiling() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await attach(topic, permits=1)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, None, "a")
        await publish(producer, T1, "t", first=1)
        await quiet()
        assert await topic.subscriptions["s"].peek(2) is None
        assert await topic.subscriptions["s"].peek(1) is not None

    in_txn_world(scenario)


def test_append_to_an_ended_txn_is_refused_and_nothing_is_stored() -> None:  # 44
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "a")
        await broker.commit(T1)
        await broker.begin(T2)
        await broker.abort(T2)
        found = await publish(producer, T1, "late", first=1)
        found += await publish(producer, T2, "late", first=2)
        found += await publish(producer, T3, "unknown", first=3)
        assert errors(found) == ["not-allowed"] * 3
        assert errors(await publish(producer, None, "b", first=5)) == [None]
        assert await log_of(topic) == ["a", "b"]
        await quiet()
        assert await broker.keys() == []

    in_txn_world(scenario)


@pytest.mark.parametrize("before", [True, False])
def test_restart_after_the_decision(before: bool) -> None:  # 45, 48
    """The broker dies with the decision durable, before or after the topic has heard of it."""

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        for txn, text in ((T1, "1"), (T2, "2"), (T3, "3")):
            await broker.begin(txn)
            await publish(producer, txn, text, first=int(text))
        for txn in (T1, T2):
            state: State = "COMMITTED" if txn == T1 else "ABORTED"
            if before:
                await broker.store.end(txn, state, 1)
            else:
                await broker.end(txn, state)
                await quiet()
        broker.kill()
        second = world.broker()
        topic = await second.topic()
        assert await read_all(topic, "s") == ["1"]
        await quiet()
        assert len([key for key in await second.keys() if "/op/" in key]) == 1
        await second.commit(T3)
        assert await read_all(topic, "s2") == ["1", "3"]

    in_txn_world(scenario)


def test_recovery_holds_the_ceiling_at_an_open_txn_and_it_can_go_on() -> None:  # 47
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, None, "a")
        await publish(producer, T1, "t1", first=1)
        await publish(producer, None, "b", first=2)
        broker.kill()
        second = world.broker()
        topic = await second.topic()
        assert await read_all(topic, "s") == ["a"]
        producer = await joined(topic)
        # What got no receipt is sent again: the new owner knows what is stored.
        found = await publish(producer, T1, "t1", "t2", first=1)
        assert found[0].position == DROPPED
        assert errors(found) == [None, None]
        await second.commit(T1)
        assert await read_all(topic, "s2") == ["a", "t1", "b", "t2"]
        assert await second.keys() == []

    in_txn_world(scenario)


def test_aborted_records_go_with_the_data() -> None:  # 46
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "t")
        await broker.abort(T1)
        await quiet()
        await topic.close()
        topic = await world.broker().topic()
        assert len(await broker.keys()) == 1
        topic.policies = topic.policies.__class__(retention=Retention(0, 0))
        (entry,) = await topic.ledger.read(topic.ledger.first_position(), 1)
        assert not topic.is_visible(entry)
        await asyncio.sleep(1)
        await topic.trim()
        assert await broker.keys() == []
        assert not topic.is_visible(entry), "a consumer may have read it before"

    in_txn_world(scenario)


def test_nothing_at_or_above_the_lowest_pin_is_trimmed() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "t")
        await topic.close()
        second = world.broker()
        topic = await second.topic()
        topic.policies = topic.policies.__class__(retention=Retention(0, 0))
        await asyncio.sleep(1)
        assert await topic.trim() == []
        await second.commit(T1)
        await topic.trim()
        assert await log_of(topic) == []

    in_txn_world(scenario)


def test_leftovers_are_swept_at_load() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        # An aborted record of trimmed data, and a pin whose header is gone: a late write.
        await broker.store.write_aborted(T1, str(NAME), Position(0, 5))
        await place_pin(broker.store, T2, str(NAME), Position(1, 0), 1)
        await topic.close()
        await publish(await joined(await world.broker().topic()), None, "a")
        topic = await world.broker().topic()
        assert await read_all(topic, "s") == ["a"]
        await quiet()
        assert await broker.keys() == []

    in_txn_world(scenario)


def test_delete_takes_the_records_along() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await broker.begin(T2)
        await publish(producer, T1, "t")
        await publish(producer, T2, "u", first=1)
        await broker.abort(T1)
        await quiet()
        await topic.delete(force=True)
        assert await broker.keys() == []

    in_txn_world(scenario)


def test_one_turn_of_the_loop_shows_a_commit_in_all_topics() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topics = [await broker.topic(), await broker.topic(OTHER)]
        await broker.begin(T1)
        for topic in topics:
            await publish(await joined(topic), T1, "a")
        before = [topic.max_read_position() for topic in topics]
        broker.outcomes.learn(T1, "COMMITTED")  # no await up to the end of this
        after = [topic.max_read_position() for topic in topics]
        assert all(low < high for low, high in zip(before, after, strict=True))

    in_txn_world(scenario)


def test_a_consumer_at_the_ceiling_uses_no_cpu_and_wakes_when_it_moves() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "t")
        await taken(reading)
        wakes = topic.subscriptions["s"].wake.version
        for number in range(1, 50):
            await publish(producer, None, "x", first=number)
            await quiet()
        assert topic.subscriptions["s"].wake.version == wakes
        await broker.commit(T1)
        assert len(await taken(reading)) == 50

    in_txn_world(scenario)


def test_a_decision_elsewhere_is_learnt_by_the_watch() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker, coordinator = world.broker(coordinates=False), world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await coordinator.begin(T1)
        await publish(producer, T1, "t")
        assert await taken(reading) == []
        await coordinator.commit(T1)
        assert await taken(reading) == ["t"]

    in_txn_world(scenario)


def test_a_decision_before_the_pin_is_seen_after_it() -> None:  # 29: F9, F10
    async def scenario(world: TxnWorld) -> None:
        broker, coordinator = world.broker(coordinates=False), world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await coordinator.begin(T1)
        world.slow = 0.1
        sending = asyncio.create_task(publish(producer, T1, "t"))
        await asyncio.sleep(0.35)  # the header is read, the pin is on its way
        world.slow = 0.0
        await coordinator.commit(T1)
        assert errors(await sending) == ["not-allowed"]
        await asyncio.sleep(1)
        assert await log_of(topic) == []
        assert await broker.keys() == []
        assert buffer_of(topic).undecided == 0

    in_txn_world(scenario)


def test_a_store_that_fails_refuses_and_does_not_pin() -> None:  # 28
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        cut(broker)
        found = await publish(producer, T1, "t")
        assert errors(found) == ["not-allowed"]
        heal(broker)
        await publish(producer, None, "a", first=1)
        assert await taken(reading) == ["a"]
        await asyncio.sleep(5)
        assert await broker.keys() == []
        assert errors(await publish(producer, T1, "t", first=2)) == [None]

    in_txn_world(scenario)


def test_an_aborted_record_that_cannot_be_stored_shows_nothing_and_loses_the_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise Unavailable("the store is down")

    monkeypatch.setattr(TxnStore, "write_aborted", fails)

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "t")
        await broker.abort(T1)
        assert await taken(reading) == []
        await asyncio.sleep(buffers.MATERIALISE_SECONDS + 1)
        assert topic.lost is not None
        assert reading.take() == []
        assert isinstance(reading.error, ServiceNotReady)
        monkeypatch.undo()
        topic = await world.broker().topic()
        assert await read_all(topic, "s2") == []

    in_txn_world(scenario)


async def stale_pin(broker: Broker, txn: TxnId, epoch: int) -> None:
    """A pin as an owner of that epoch would write it, whatever stands there."""
    key, indexes = pin_key(txn, str(NAME))
    pin = Pin(f"{txn.most}_{txn.least}", str(NAME), 99, 0, epoch)
    await broker.store.metadata.put(key, encode(pin), indexes=indexes)


def test_an_owner_that_meets_a_later_owners_pin_stops() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await stale_pin(broker, T1, topic.ledger.epoch + 1)
        assert errors(await publish(producer, T1, "t")) in (["not-allowed"], [])
        await quiet()
        assert isinstance(topic.lost, ManagedLedgerFenced)
        assert len(await broker.keys()) == 1

    in_txn_world(scenario)


def test_a_former_owner_does_not_delete_the_present_owners_pin() -> None:
    in_txn_world(former_owner_unpins)


def test_without_adoption_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(_: TxnStore, found: FoundPin, *__: object) -> StoredOp:
        return found.op

    monkeypatch.setattr(buffers, "adopt_pin", kept)
    with pytest.raises(AssertionError):
        in_txn_world(former_owner_unpins)


async def former_owner_unpins(world: TxnWorld) -> None:
    first, second = world.broker(), world.broker()
    former = await first.topic()
    producer = await joined(former)
    await first.begin(T1)
    await publish(producer, T1, "t")
    present = await second.topic()  # it takes the topic over; the former owner lives on
    first.outcomes.learn(T1, "COMMITTED")
    await quiet()
    assert len(await second.keys()) == 1
    assert await read_all(present, "s") == []
    await second.commit(T1)
    assert await read_all(present, "s2") == ["t"]
    assert await second.keys() == []


def test_a_pin_that_is_there_is_taken_over_with_its_bound() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, None, "a")
        await broker.begin(T1)
        await place_pin(broker.store, T1, str(NAME), Position(0, 0), 0)  # a late write
        assert errors(await publish(producer, T1, "t", first=1)) == [None]
        found = await broker.store.pin(T1, str(NAME))
        assert found is not None
        assert (found.pin.bound, found.pin.epoch) == (Position(0, 0), topic.ledger.epoch)
        assert await read_all(topic, "s") == ["a"]
        await broker.commit(T1)
        await quiet()
        assert await broker.keys() == []

    in_txn_world(scenario)


def test_a_topic_with_an_open_transaction_is_not_disused() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topics = await world.topics(broker.parts)
        topic = await topics.get(NAME)
        assert isinstance(topic, Topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "t")
        await topic.remove_producer(producer)
        await asyncio.sleep(3 * topic.policies.inactive.max_inactive_duration_seconds)
        assert topics.loaded[NAME] is topic
        await broker.commit(T1)
        await topics.rescan(NAME)
        await topics.stop()

    in_txn_world(scenario)


def test_a_rescan_removes_what_nobody_knows_of() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        await broker.begin(T1)
        await broker.begin(T2)
        for txn in (T1, T2):
            await stale_pin(broker, txn, topic.ledger.epoch)
        await broker.commit(T1)
        await topic.rescan()
        left = await broker.store.pins(str(NAME))
        assert [from_text(each.pin.txn) for each in left] == [T2]

    in_txn_world(scenario)


def test_a_sealed_topic_still_shows_what_is_committed_later() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await broker.begin(T1)
        await broker.begin(T2)
        await publish(producer, T1, "1")
        await publish(producer, T2, "2", first=1)
        await topic.terminate()
        await topic.close()
        second = world.broker()
        topic = await second.topic()
        reading = await attach(topic)
        assert await taken(reading) == []
        ends = topic.ends.version
        await second.commit(T1)
        assert await taken(reading) == ["1"]
        await second.abort(T2)
        assert await taken(reading) == []
        topic.subscriptions["s"].cursor.ack_cumulative(topic.max_read_position())
        assert topic.subscriptions["s"].backlog() == 0
        assert topic.ends.version > ends

    in_txn_world(scenario)


def test_many_transactions_leave_nothing_behind() -> None:  # 32
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        baseline = await broker.keys()
        for number in range(100):
            txn = TxnId(0, T3.least + 1 + number)
            await broker.begin(txn)
            await publish(producer, txn, "t", first=number)
            await broker.commit(txn)
        await quiet()
        assert await broker.keys() == baseline
        assert buffer_of(topic).undecided == 0
        assert not buffer_of(topic)._tasks._tasks

    in_txn_world(scenario, Limits())


def test_a_decision_that_only_the_segment_remembers_still_fences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An aborted record that waits for the store, and many decisions since: memory is bounded."""
    monkeypatch.setattr(outcomes, "FINAL_MAX", 1)

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading, producer = await attach(topic), await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "aborted")
        await broker.store.end(T1, "ABORTED", world.clock.now_ms())
        cut(broker)  # the aborted record cannot be written
        broker.outcomes.learn(T1, "ABORTED")
        broker.outcomes.learn(T2, "COMMITTED")  # pushes the first decision out
        assert broker.outcomes.known(T1) is None
        producer.send(sent(1, T1, "late", producer="p"))
        await quiet()
        assert topic.transactions is not None
        assert topic.transactions.undecided == 1, "it holds what it stored until that is hidden"
        assert await taken(reading) == []

    in_txn_world(scenario)
