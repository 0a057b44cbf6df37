"""Sends inside transactions: order, refusals, closing, dedup."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.api import DROPPED
from magnetar.broker.publish.dedup import Dedup, SendVerdict
from magnetar.broker.publish.lineage import SequenceSpan
from magnetar.errors import ServiceNotReady
from magnetar.model.hashing import FULL_RING
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import SequenceNews, TxnRuns
from magnetar.txn.ids import to_text
from magnetar.txn.records import State
from magnetar.wire.messages import TxnSend, checksum_holds, metadata_of
from tests.unit.broker.txn_world import (
    T1,
    T2,
    T3,
    TxnWorld,
    errors,
    in_txn_world,
    joined,
    log_of,
    publish,
    quiet,
    read_all,
    sent,
)
from tests.unit.broker.world import message, receipts, run_of

UNREADABLE = bytes.fromhex("0e0100000000") + b"\0\0\0\x02\xff\xff"


def test_a_held_send_holds_back_its_own_producer_and_nobody_else() -> None:  # 27
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        one, two = await joined(topic), await joined(topic, "q")
        await broker.begin(T1)
        world.slow = 0.1
        one.send(message(0, "a"))
        one.send(sent(1, T1, "t"))
        one.send(message(2, "b"))
        assert one.pending == 3
        two.send(message(0, "q"))
        found = await receipts(one, 3)
        assert [each.sequence_id for each in found] == [0, 1, 2]
        assert errors(found) == [None] * 3
        world.slow = 0.0
        assert await log_of(topic) == ["a", "q", "t", "b"]
        one.send(sent(3, T1, "t2"))  # admitted: at once
        assert topic.ledger.pending == 1

    in_txn_world(scenario)


def test_refusals_come_in_order_and_do_not_stop_the_producer() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        sends = [sent(0, T3), sent(1, T3), message(2), sent(3, T1), sent(4, T3), message(5)]
        for each in sends:
            producer.send(each)
        found = await receipts(producer, len(sends))
        assert [each.sequence_id for each in found] == list(range(6))
        refused = "not-allowed"
        assert errors(found) == [refused, refused, None, None, refused, None]
        assert not producer.stopped

    in_txn_world(scenario)


def test_a_message_with_two_different_transactions_is_refused() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        producer.send(sent(0, T1, carried=T2))
        producer.send(TxnSend(1, 1, 1, UNREADABLE, T1))
        found = await receipts(producer, 2)
        assert errors(found) == ["not-allowed"] * 2
        assert f"{to_text(T2)} in its metadata" in str(found[0].error)
        assert "unreadable metadata" in str(found[1].error)
        assert await log_of(topic) == []

    in_txn_world(scenario)


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_only_the_command_names_is_written_into_the_metadata(
    commit: bool,
) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        # The first is held until the transaction is admitted, the second is not.
        for number, text in enumerate(("a", "b")):
            producer.send(sent(number, T1, text, is_carried=False))
            assert errors(await receipts(producer, 1)) == [None]
        assert await read_all(topic, "before") == []
        stored = await topic.ledger.read(topic.ledger.first_position(), 10)
        assert [metadata_of(entry.payload).txnid_least_bits for entry in stored] == [T1.least] * 2
        assert all(checksum_holds(entry.payload) for entry in stored)
        await (broker.commit(T1) if commit else broker.abort(T1))
        await quiet()
        assert await read_all(topic, "after") == (["a", "b"] if commit else [])

    in_txn_world(scenario)


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_that_has_ended_and_that_only_the_command_names_is_refused(
    commit: bool,
) -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "in time")
        await (broker.commit(T1) if commit else broker.abort(T1))
        producer.send(sent(1, T1, "late"))
        producer.send(sent(2, T1, "plain?", is_carried=False))
        producer.send(message(3, "plain"))
        late, left_over, plain = await receipts(producer, 3)
        assert errors([late, left_over, plain]) == ["not-allowed", "not-allowed", None]
        # Both say what has ended; only the one that may be plain is told how to be that.
        assert "without batching" in str(left_over.error)
        assert "without batching" not in str(late.error)
        await quiet()
        assert await read_all(topic, "after") == (["in time", "plain"] if commit else ["plain"])

    in_txn_world(scenario)


def test_what_is_held_when_its_client_closes_still_gets_its_receipt() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        world.slow = 0.1
        producer.send(sent(0, T1, "t"))
        producer.send(message(1, "a"))
        closing = asyncio.create_task(topic.remove_producer(producer))
        assert errors(await receipts(producer, 3)) == [None, None]
        await closing
        world.slow = 0.0
        assert await log_of(topic) == ["t", "a"]

    in_txn_world(scenario)


def test_what_is_held_when_the_broker_stops_the_producer_is_dropped() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        world.slow = 0.1
        producer.send(message(0, "a"))
        producer.send(sent(1, T1, "t"))
        producer.send(message(2, "b"))
        producer.stop(ServiceNotReady("moved"))
        assert [each.sequence_id for each in await receipts(producer, 9)] == [0]
        await topic.remove_producer(producer)
        world.slow = 0.0
        await asyncio.sleep(2)
        assert await log_of(topic) == ["a"]
        await topic.close()

    in_txn_world(scenario)


def test_a_topic_that_closes_settles_what_is_held() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        world.slow = 0.1
        producer.send(sent(0, T1, "t"))
        await topic.close()
        assert await receipts(producer, 1) == []
        world.slow = 0.0
        topic = await world.broker().topic()
        assert await log_of(topic) == []

    in_txn_world(scenario)


def test_sends_inside_a_transaction_are_deduplicated_whatever_the_policy() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await broker.begin(T2)
        await publish(producer, T1, "a", "b")
        again = await publish(producer, T1, "a", "b")
        assert [each.position for each in again] == [DROPPED, DROPPED]
        other = await publish(producer, T2, "c")  # the same number, in another transaction
        assert other[0].position != DROPPED
        producer.send(sent(7, T1))
        producer.send(sent(7, T1))  # the first one is in flight
        assert errors(await receipts(producer, 2)) == [None, "storage-error"]
        assert await log_of(topic) == ["a", "b", "c", "x"]

    in_txn_world(scenario)


def test_sequences_count_for_the_topic_from_the_commit_on() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic(dedup=True)
        producer = await joined(topic)
        await broker.begin(T1)
        await broker.begin(T2)
        await publish(producer, T1, "c", first=0)
        await publish(producer, T2, "x", first=1)
        await publish(producer, None, "p", first=2)
        unknown = await publish(producer, None, "c", "x")
        assert errors(unknown) == ["storage-error"] * 2
        await broker.commit(T1)
        await broker.abort(T2)
        await quiet()
        found = await publish(producer, None, "c", "x", "p")
        assert errors(found) == [None] * 3
        assert [each.position == DROPPED for each in found] == [True, False, True]
        assert await read_all(topic, "s") == ["c", "p", "x"]

    in_txn_world(scenario)


def test_sequences_of_transactions_over_a_restart() -> None:
    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic(dedup=True)
        producer = await joined(topic)
        for txn in (T1, T2, T3):
            await broker.begin(txn)
        await publish(producer, T1, "c", first=0)
        await publish(producer, T2, "x", first=1)
        await publish(producer, T3, "o", first=2)
        await publish(producer, None, "p", first=3)
        await broker.commit(T1)
        await broker.abort(T2)
        await quiet()
        await topic.close()  # with a snapshot, which must not cover what is undecided
        second = world.broker()
        topic = await second.topic(dedup=True)
        producer = await joined(topic)
        found = await publish(producer, None, "c", "x", "o", "p")
        assert errors(found) == [None, None, "storage-error", None]
        assert [each.position == DROPPED for each in found] == [True, False, True, True]
        await second.commit(T3)
        assert (await publish(producer, None, "o", first=2))[0].error is None
        assert await log_of(topic) == ["c", "x", "o", "p", "x"]

    in_txn_world(scenario)


def test_children_inherit_nothing_that_is_undecided() -> None:
    dedup = Dedup(10)
    for number in (0, 2):
        assert dedup.decide("p", number) is SendVerdict.STORE
        dedup.persisted("p", number)
    dedup.stored_in_txn("p", SequenceSpan(1, 1))
    lineage = dedup.lineage(FULL_RING, FULL_RING)
    assert [lineage["p"][0].stored(number) for number in range(3)] == [True, False, True]
    dedup.txn_committed("p", SequenceSpan(1, 1))
    lineage = dedup.lineage(FULL_RING, FULL_RING)
    assert lineage["p"][0].stored(1)
    dedup.check_invariants()


def test_an_aborted_sequence_becomes_a_hole_even_if_nothing_has_passed_it() -> None:
    dedup = Dedup(10)
    dedup.stored_in_txn("p", SequenceSpan(4, 5))
    dedup.txn_aborted("p", SequenceSpan(4, 5))
    assert dedup.decide("p", 6) is SendVerdict.STORE
    dedup.persisted("p", 6)
    assert dedup.decide("p", 4) is SendVerdict.STORE
    dedup.persisted("p", 4)
    assert dedup.decide("p", 4) is SendVerdict.DUPLICATE
    assert dedup.last_sequence_id("p") == 6  # nobody need send the other one again


def test_a_producer_that_comes_back_goes_on_behind_what_was_aborted() -> None:
    """Told to go on before it, its next messages would be taken for those stored behind it."""
    dedup = Dedup(10)
    for first, committed in ((0, True), (3, False), (6, True)):
        runs = TxnRuns()
        dedup.began_in_txn("p", runs)
        runs.add(first, first + 2)
        assert dedup.last_sequence_id("p") == (-1 if first == 0 else first - 1)
        dedup.ended_in_txn("p", runs, committed=committed)
    again, _ = Dedup.restore(dedup.snapshot(Position(1, 9)), 10, now=0)
    child = Dedup(10)
    child.inherit(dedup.lineage(FULL_RING, FULL_RING), FULL_RING, 0)
    for each in (dedup, again, child):
        assert each.last_sequence_id("p") == 8
        assert each.decide("p", 4, key_hash=0) is SendVerdict.STORE
        assert each.decide("p", 7, key_hash=0) is SendVerdict.DUPLICATE
    dedup.check_invariants()


def test_a_commit_does_not_count_past_what_is_in_flight() -> None:
    dedup = Dedup(10)
    assert dedup.decide("p", 1) is SendVerdict.STORE
    dedup.stored_in_txn("p", SequenceSpan(2, 2))
    dedup.txn_committed("p", SequenceSpan(2, 2))
    assert dedup.decide("p", 1) is SendVerdict.UNKNOWN
    dedup.persisted("p", 1)
    assert dedup.decide("p", 3) is SendVerdict.STORE
    dedup.persisted("p", 3)
    assert dedup.decide("p", 2) is SendVerdict.UNKNOWN
    dedup.check_invariants()


def _with_news() -> tuple[Dedup, SequenceNews, TxnRuns]:
    dedup, news, runs = Dedup(names_max=10), SequenceNews(), TxnRuns()
    news.is_followed = True
    dedup.follow(news)
    for sequence_id in range(5):
        assert dedup.decide("p", sequence_id) is SendVerdict.STORE
        dedup.persisted("p", sequence_id)
    runs.add(5, 8)
    news.began("p", runs)
    return dedup, news, runs


@pytest.mark.parametrize("state", ["COMMITTED", "ABORTED"])
def test_whatever_judges_or_tells_has_taken_the_news_of_transactions(state: State) -> None:
    """None of these is told by anybody: each takes what it has not seen."""
    dedup, news, runs = _with_news()
    news.ended(state, "p", runs)
    assert dedup.last_sequence_id("p") == 8
    dedup, news, runs = _with_news()
    news.ended(state, "p", runs)
    is_stored = state == "COMMITTED"
    assert dedup.decide("p", 7) is (SendVerdict.DUPLICATE if is_stored else SendVerdict.STORE)
    dedup, news, runs = _with_news()
    news.ended(state, "p", runs)
    assert dedup.has_holes is not is_stored
    dedup, news, runs = _with_news()
    news.ended(state, "p", runs)
    restored, _ = Dedup.restore(dedup.snapshot(Position(1, 1)), 10, 0)
    assert restored.decide("p", 6) is (SendVerdict.DUPLICATE if is_stored else SendVerdict.STORE)


def test_without_taking_the_news_a_committed_message_is_stored_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dedup, news, runs = _with_news()
    news.ended("COMMITTED", "p", runs)
    monkeypatch.setattr(Dedup, "catch_up", lambda _: None)
    assert dedup.decide("p", 7) is SendVerdict.STORE


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("carried", [True, False])
def test_a_run_in_a_transaction_has_the_outcome_of_its_sends(commit: bool, carried: bool) -> None:
    """Also where it was pushed before, or the transaction is decided while it is in flight."""
    stories: list[list[object]] = []

    async def scenario(world: TxnWorld) -> None:
        broker = world.broker()
        topic = await broker.topic()
        producer = await joined(topic)
        await broker.begin(T1)
        await publish(producer, T1, "first")
        appends, append_run = 0, topic.ledger.append_run

        def counted(payloads: list[bytes], size: int) -> asyncio.Future[Position] | None:
            nonlocal appends
            appends += 1
            return append_run(payloads, size)

        producer._append_run = None if stories else counted
        ranges = [range(1, 5), range(3, 7), range(9, 12)]
        runs = [[sent(n, T1, str(n), is_carried=carried) for n in each] for each in ranges]
        found = []
        for each in runs[:2]:
            producer.send_run(run_of(each))
            found += await receipts(producer, len(each))
        producer.send_run(run_of(runs[2]))
        await (broker.commit(T1) if commit else broker.abort(T1))
        found += await receipts(producer, len(runs[2]))
        producer.send_run(run_of([message(number, f"plain {number}") for number in range(20, 23)]))
        found += await receipts(producer, 3)
        await quiet()
        told = [(each.sequence_id, each.position[1], str(each.error)) for each in found]
        stories.append([told, await log_of(topic), await read_all(topic, "after")])
        # The second run was pushed in part; without the id in its metadata none goes as a whole.
        assert appends == (0 if len(stories) == 2 else 1 + 2 * carried)

    in_txn_world(scenario)
    in_txn_world(scenario)
    assert stories[0] == stories[1]
