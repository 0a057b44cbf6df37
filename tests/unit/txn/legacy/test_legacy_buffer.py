"""Legacy transactions of one topic: markers, what consumers see, who may write, what is kept."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.api import DROPPED, LastMessage
from magnetar.errors import (
    InvalidTxnStatus,
    NotAllowed,
    ServiceNotReady,
)
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.txn.legacy import legacy_buffer
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer
from magnetar.txn.legacy.stream_state import STREAM_RECORDS
from magnetar.wire.messages import TxnId
from tests.unit.broker.legacy_world import L1, L2, L3, abort, commit, legacy_of, moved, record_of
from tests.unit.broker.txn_world import (
    T1,
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
    text_of,
)
from tests.unit.broker.world import consumer, receipts

# --- what consumers see


def test_messages_show_with_the_commit_marker_which_nobody_gets() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await publish(producer, None, "a")
        await publish(producer, L1, "t", "u", first=1)
        await publish(producer, None, "b", first=3)
        assert await taken(reading) == ["a"]
        assert legacy_of(topic).blocker() == L1
        assert legacy_of(topic).undecided == 1
        await commit(topic, L1)
        assert await taken(reading) == ["t", "u", "b"]
        assert len(await log_of(topic)) == 5
        assert await read_all(topic, "new") == ["a", "t", "u", "b"]
        assert legacy_of(topic).ends == {"COMMITTED": 1}

    in_txn_world(scenario)


def test_aborted_messages_are_never_seen() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await publish(producer, L1, "t", "t")
        await publish(producer, None, "b", first=2)
        assert await taken(reading) == []
        await abort(topic, L1)
        assert await taken(reading) == ["b"]
        assert await read_all(topic, "new") == ["b"]

    in_txn_world(scenario)


def test_neither_markers_nor_aborted_messages_are_backlog() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        await topic.create_subscription("s", Position(-1, -1))
        producer = await joined(topic)
        subscription = topic.subscriptions["s"]
        await publish(producer, L1, "a", "b")
        assert subscription.stats().msg_backlog == 0
        await commit(topic, L1)
        assert subscription.stats().msg_backlog == 2
        await publish(producer, None, "c", first=2)
        await publish(producer, L2, "t", first=3)
        await publish(producer, L3, "d", first=4)
        await commit(topic, L3)
        await abort(topic, L2)
        assert subscription.backlog() == 4  # at once, although nobody reads
        assert await taken(await attach(topic)) == ["a", "b", "c", "d"]
        assert subscription.backlog() == 4

    in_txn_world(scenario)


def test_the_last_message_is_no_marker() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "t")
        await abort(topic, L1)
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        receipt = (await publish(producer, L2, "a", first=1))[0]
        assert await topic.last_message() == LastMessage(DROPPED, -1)
        await commit(topic, L2)
        await publish(producer, L3, "t", first=2)
        assert await topic.last_message() == LastMessage(receipt.position, -1)

    in_txn_world(scenario)


def test_readers_get_no_markers_and_nothing_aborted() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await commit(topic, L1)
        wanted = consumer("reader", durable=False)
        reading = (await topic.subscription(wanted)).add_consumer(wanted)
        reading.flow(100)
        await publish(producer, L2, "t", first=1)
        await publish(producer, L3, "b", first=2)
        await commit(topic, L3)
        await abort(topic, L2)
        assert await taken(reading) == ["b"]
        assert topic.subscriptions["reader"].backlog() == 1
        await topic.create_subscription("earliest", Position(-1, -1))
        peeked = await topic.subscriptions["earliest"].peek(2)
        assert peeked is not None
        assert text_of(peeked.payload) == "b"

    in_txn_world(scenario)


def test_both_kinds_write_to_one_topic_and_the_lower_holds() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        reading = await attach(topic)
        one, two = await joined(topic), await joined(topic, "q")
        await broker.begin(T1)
        await publish(one, T1, "m")
        await publish(two, L1, "l")
        await publish(one, None, "p", first=1)
        await commit(topic, L1)
        assert await taken(reading) == []
        assert topic.undecided == 1
        await broker.commit(T1)
        assert await taken(reading) == ["m", "l", "p"]
        await publish(two, L2, "l", first=1)
        await publish(one, None, "p", first=2)
        assert await taken(reading) == []
        await commit(topic, L2)
        assert await taken(reading) == ["l", "p"]

    in_txn_world(scenario)


# --- who may write


def test_what_has_ended_writes_no_more() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await commit(topic, L1)
        await commit(topic, L2)  # it has nothing here
        found = await publish(producer, L1, "late", first=1)
        found += await publish(producer, L2, "late", first=2)
        assert errors(found) == ["not-allowed"] * 2
        assert await read_all(topic, "new") == ["a"]
        await commit(topic, L1)
        await commit(topic, L2)
        assert len(await log_of(topic)) == 2  # and one marker

    in_txn_world(scenario)


def test_a_topic_without_legacy_messages_has_no_record() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, None, "a")
        await commit(topic, L1)
        await topic.close()
        assert await broker.parts.metadata.scan_keys(STREAM_RECORDS) == []

    in_txn_world(scenario)


def test_the_first_message_waits_for_the_record() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        cut(broker)
        found = asyncio.create_task(publish(producer, L1, "a"))
        await quiet()
        assert await log_of(topic) == []
        heal(broker)
        await found
        # Refused, or taken once the store is back: what counts is that no entry came before.
        if errors(found.result()) != [None]:
            assert errors(await publish(producer, L1, "a")) == [None]
        assert await record_of(broker) is not None
        assert await log_of(topic) == ["a"]

    in_txn_world(scenario)


def test_a_low_watermark_refuses_older_ones_and_aborts_what_they_left() -> None:  # 59
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        reading = await attach(topic)
        producer, other = await joined(topic), TxnId(1, 1)
        await publish(producer, L1, "left")
        await publish(producer, L3, "t", first=1)
        await publish(producer, other, "o", first=2)
        await commit(topic, L3, low=2)
        assert errors(await publish(producer, L2, "late", first=3)) == ["not-allowed"]
        assert errors(await publish(producer, L1, "late", first=3)) == ["not-allowed"]
        assert errors(await publish(producer, other, "o", first=4)) == [None]
        assert legacy_of(topic).undecided == 1  # that of the other coordinator
        assert await taken(reading) == ["t"]
        await commit(topic, other)
        assert await taken(reading) == ["o", "o"]

    in_txn_world(scenario)


def test_too_many_open_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        assert errors(await publish(producer, L1, "a")) == [None]
        assert errors(await publish(producer, L2, "a", first=1)) == [None]
        assert errors(await publish(producer, L3, "a", first=2)) == ["not-allowed"]
        await commit(topic, L1)
        assert errors(await publish(producer, L3, "a", first=2)) == [None]

    monkeypatch.setattr(legacy_buffer, "OPEN_MAX", 2)
    in_txn_world(scenario)


def test_an_end_that_contradicts_the_first_is_refused() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        cut(broker)
        ending = asyncio.create_task(abort(topic, L1))
        await quiet()
        with pytest.raises(InvalidTxnStatus):
            await commit(topic, L1)
        heal(broker)
        await asyncio.wait({ending})
        await abort(topic, L1)
        assert await read_all(topic, "new") == []
        ending.exception()

    in_txn_world(scenario)


def test_segments_take_no_legacy_transactions() -> None:
    async def scenario(world: TxnWorld) -> None:
        name = TopicName.parse("segment://public/default/t/0000-ffff-0")
        topic = await world.broker().topic(name)
        assert topic.legacy_transactions is None
        producer = await joined(topic)
        found = await publish(producer, L1, "a")
        assert errors(found) == ["not-allowed"]
        assert isinstance(found[0].error, NotAllowed)
        assert found[0].error.hint
        assert errors(await publish(producer, None, "b", first=1)) == [None]

    in_txn_world(scenario)


# --- dedup


def test_a_message_sent_twice_in_a_transaction_is_stored_once() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a", "b")
        assert (await publish(producer, L1, "a"))[0].position == DROPPED
        broker, topic = await moved(broker, topic, clean=False)
        producer = await joined(topic)
        found = await publish(producer, L1, "a", "b", "c")
        assert [each.position == DROPPED for each in found] == [True, True, False]
        await commit(topic, L1)
        assert await read_all(topic, "new") == ["a", "b", "c"]

    in_txn_world(scenario)


@pytest.mark.parametrize("clean", [True, False])
def test_sequences_count_for_dedup_after_the_commit_and_not_after_an_abort(clean: bool) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic(dedup=True)
        producer = await joined(topic)
        await publish(producer, L1, "a", "b")
        await publish(producer, L2, "t", first=2)
        if clean:
            await topic.close()
        else:
            broker.kill()
        broker = world.broker()
        topic = await broker.topic(dedup=True)
        await commit(topic, L1)
        await abort(topic, L2)
        producer = await joined(topic)
        found = await publish(producer, None, "a", "b", "c")
        assert [each.position == DROPPED for each in found] == [True, True, False]
        assert await read_all(topic, "new") == ["a", "b", "c"]

    in_txn_world(scenario)


# --- what is kept


def test_nothing_of_an_open_transaction_is_trimmed() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        reading = await attach(topic)
        producer = await joined(topic)
        await publish(producer, L1, "a")
        for number in range(8):
            await publish(producer, None, "p", first=number + 1)
        topic.subscriptions["s"].cursor.ack_cumulative(topic.ledger.last_position())
        assert await topic.trim() == []
        await commit(topic, L1)
        assert await taken(reading) == []
        assert await topic.trim() != []

    in_txn_world(scenario, Limits(managed_ledger_ledger_entries=2))


def test_a_deleted_topic_leaves_no_records() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await publish(producer, L2, "t", first=1)
        await abort(topic, L2)
        await topic.delete(force=True)
        assert await broker.keys() == []
        assert await broker.parts.metadata.scan_keys(STREAM_RECORDS) == []

    in_txn_world(scenario)


def test_markers_that_are_trimmed_are_looked_for_no_more() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        await commit(topic, L1)
        assert legacy_of(topic).last_marker is not None
        for number in range(8):
            await publish(producer, None, "p", first=number + 1)
        await topic.trim()
        assert legacy_of(topic).last_marker is None

    in_txn_world(scenario, Limits(managed_ledger_ledger_entries=2))


# --- the pieces that go wrong


def test_in_flight_messages_are_covered_by_the_marker() -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "a")
        producer.send(sent(1, L1, "b"))
        await commit(topic, L1)
        assert errors(await receipts(producer, 1)) == [None]
        assert await read_all(topic, "new") == ["a", "b"]

    in_txn_world(scenario)


def test_a_leftover_that_is_ended_after_all_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: TxnWorld) -> None:
        topic = await world.broker().topic()
        producer = await joined(topic)
        await publish(producer, L1, "left")
        await publish(producer, L3, "t", first=1)

        async def no_marker(*_: object) -> None:
            raise ServiceNotReady("not now")

        with monkeypatch.context() as patch:
            patch.setattr(LegacyTransactionBuffer, "_mark", no_marker)
            with pytest.raises(ServiceNotReady):
                await commit(topic, L3, low=2)
        await abort(topic, L1)  # before it is tried again
        await asyncio.sleep(5)
        await commit(topic, L3)
        assert len(await log_of(topic)) == 4
        assert await read_all(topic, "new") == ["t"]
        await topic.close()

    in_txn_world(scenario)
