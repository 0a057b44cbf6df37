"""Coordinators of one or two brokers: begin, end, deadlines, collection, leadership."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from magnetar.errors import (
    InvalidTxnStatus,
    NotAllowed,
    TooManyRequests,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.buffer.pins import place_pin
from magnetar.txn.coordinator.gc import Leftover
from magnetar.txn.coordinator_partitions import PARTITIONS, CoordinatorAssignment
from magnetar.txn.ids import METADATA_BIT, is_metadata, to_text
from magnetar.txn.records import AckedEntry, AckOp
from magnetar.wire.messages import TxnId
from tests.unit.txn.coordinator_world import (
    MINUTE_MS,
    Broker,
    World,
    keys,
    on_a_broker,
)


def test_new_transaction_sequential_least_bits_scoped_by_coordinator() -> None:
    async def scene(world: World, broker: Broker) -> None:
        ids = [(await broker.begin(coordinator)).id for coordinator in (0, 0, 3, 3, 0)]
        assert ids == [
            *((0, METADATA_BIT | 1), (0, METADATA_BIT | 2)),
            *((3, METADATA_BIT | 1), (3, METADATA_BIT | 2)),
            (0, METADATA_BIT | 3),
        ]
        assert all(is_metadata(txn) for txn in ids)
        header = await broker.store.header(ids[0])
        assert header is not None
        assert (header.state, header.deadline_ms - header.created_ms) == ("OPEN", MINUTE_MS)

    on_a_broker(scene)


def test_ids_are_never_given_again_after_a_crash() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        before = {(await first.begin(2)).id for _ in range(3)}
        await world.kill(first)
        second = await world.broker()
        await asyncio.sleep(30)  # the session of the first one runs out
        after = {(await second.begin(2)).id for _ in range(3)}
        assert not before & after
        assert min(after).least > max(before).least
        await second.stop()

    run(main())


def test_to_begin_is_one_put_and_to_end_is_one_more() -> None:
    async def scene(world: World, broker: Broker) -> None:
        await broker.begin()  # takes a block of ids
        writes: list[str] = []
        put = broker.metadata._put

        def counted(key: str, *given: Any) -> Any:
            writes.append(key)
            return put(key, *given)

        broker.metadata._put = counted  # type: ignore[method-assign, assignment]
        header = await broker.begin()
        assert writes == [f"/txn/id/{header.txn}"]
        await broker.coordinators.end(header.id, commit=True)
        assert writes == [f"/txn/id/{header.txn}"] * 2

    on_a_broker(scene)


@pytest.mark.parametrize("commit", [True, False])
def test_end_transaction_idempotent_and_mismatched(commit: bool) -> None:
    async def scene(world: World, broker: Broker) -> None:
        header = await broker.begin()
        seen = broker.follow(header.id)
        state = await broker.coordinators.end(header.id, commit=commit)
        assert state == ("COMMITTED" if commit else "ABORTED")
        assert seen.told == [(header.txn, state)]
        for _ in range(2):
            assert await broker.coordinators.end(header.id, commit=commit) == state
            with pytest.raises(InvalidTxnStatus):
                await broker.coordinators.end(header.id, commit=not commit)
        with pytest.raises(InvalidTxnStatus):
            await broker.coordinators.check_open(header.id)
        assert seen.told == [(header.txn, state)]
        assert broker.coordinators.open_count == 0

    on_a_broker(scene)


def test_end_transaction_unknown_or_of_another_kind() -> None:
    async def scene(world: World, broker: Broker) -> None:
        for txn in (TxnId(0, METADATA_BIT | 77), TxnId(0, 77)):
            with pytest.raises(TransactionNotFound):
                await broker.coordinators.end(txn, commit=True)
            with pytest.raises(TransactionNotFound):
                await broker.coordinators.check_open(txn)
        for txn in (TxnId(PARTITIONS, METADATA_BIT | 1), TxnId(2**63, METADATA_BIT | 1)):
            with pytest.raises(TransactionCoordinatorNotFound):
                await broker.coordinators.end(txn, commit=True)

    on_a_broker(scene)


def test_verify_transaction_ownership() -> None:
    async def scene(world: World, broker: Broker) -> None:
        coordinators = broker.coordinators
        header = await coordinators.begin(1, MINUTE_MS, "alice")
        await coordinators.check_open(header.id, "alice")
        for other in ("bob", ""):
            with pytest.raises(TransactionNotFound):
                await coordinators.end(header.id, commit=True, owner=other)
            with pytest.raises(TransactionNotFound):
                await coordinators.check_open(header.id, other)
        assert await broker.store.state(header.id) == "OPEN"
        assert await coordinators.end(header.id, commit=True, owner="alice") == "COMMITTED"
        with pytest.raises(TransactionNotFound):
            await coordinators.end(header.id, commit=True, owner="bob")

    on_a_broker(scene)


def test_commit_and_abort_at_once_have_one_outcome() -> None:
    async def scene(world: World, broker: Broker) -> None:
        header = await broker.begin()
        ends = [broker.coordinators.end(header.id, commit=each) for each in (True, False) * 3]
        results = await asyncio.gather(*ends, return_exceptions=True)
        state = await broker.store.state(header.id)
        wanted = "COMMITTED" if state == "COMMITTED" else "ABORTED"
        for index, result in enumerate(results):
            if (index % 2 == 0) == (wanted == "COMMITTED"):
                assert result == wanted
            else:
                assert isinstance(result, InvalidTxnStatus)

    on_a_broker(scene)


def test_a_decision_goes_on_when_nobody_waits_for_it() -> None:
    async def scene(world: World, broker: Broker) -> None:
        header = await broker.begin()
        seen = broker.follow(header.id)
        asked = asyncio.create_task(broker.coordinators.end(header.id, commit=True))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.sleep(1)
        assert asked.cancelled()
        assert seen.told == [(header.txn, "COMMITTED")]

    on_a_broker(scene)


@pytest.mark.parametrize("timeout_ms", [0, -1, 86_400_001])
def test_timeouts_have_bounds(timeout_ms: int) -> None:
    async def scene(world: World, broker: Broker) -> None:
        with pytest.raises(NotAllowed):
            await broker.begin(0, timeout_ms)
        assert await keys(broker.store) == []

    on_a_broker(scene)


def test_open_transactions_of_an_owner_are_limited() -> None:
    async def scene(world: World, broker: Broker) -> None:
        coordinators = broker.coordinators
        begins = [coordinators.begin(0, MINUTE_MS, "alice") for _ in range(8)]
        results = await asyncio.gather(*begins, return_exceptions=True)
        begun = [each for each in results if not isinstance(each, BaseException)]
        assert len(begun) == 3
        assert [type(each) for each in results[3:]] == [TooManyRequests] * 5
        await coordinators.begin(0, MINUTE_MS, "bob")
        await coordinators.end(begun[0].id, commit=True, owner="alice")
        await coordinators.begin(0, MINUTE_MS, "alice")
        with pytest.raises(TooManyRequests, match="3 transactions of 'alice'"):
            await coordinators.begin(0, MINUTE_MS, "alice")

    on_a_broker(scene, Limits(close_seconds=5, txn_open_per_owner_max=3))


# --- deadlines


def test_sweep_timeouts_aborts_in_time_and_leaves_unexpired() -> None:
    async def scene(world: World, broker: Broker) -> None:
        short, long = await broker.begin(0, 2500), await broker.begin(1, 30_000)
        seen = broker.follow(short.id, long.id)
        await asyncio.sleep(2.4)
        assert seen.told == []
        await asyncio.sleep(0.2)
        assert seen.told == [(short.txn, "ABORTED")]
        assert await broker.store.state(short.id) == "ABORTED"
        assert await broker.store.state(long.id) == "OPEN"
        assert await broker.coordinators.end(short.id, commit=False) == "ABORTED"
        with pytest.raises(InvalidTxnStatus):
            await broker.coordinators.end(short.id, commit=True)
        await asyncio.sleep(30)
        assert seen.told == [(short.txn, "ABORTED"), (long.txn, "ABORTED")]

    on_a_broker(scene)


def test_many_deadlines_at_one_moment() -> None:
    async def scene(world: World, broker: Broker) -> None:
        headers = [await broker.begin(number % 4, 5000) for number in range(600)]
        seen = broker.follow(*(header.id for header in headers))
        await asyncio.sleep(7)
        assert {txn for txn, _ in seen.told} == {header.txn for header in headers}
        assert broker.coordinators.open_count == 0

    on_a_broker(scene)


def test_another_broker_aborts_what_a_dead_one_began() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        header = await first.begin(5, 40_000)
        second = await world.broker()
        assert not second.partitions.leads(5)
        with pytest.raises(TransactionCoordinatorNotFound):
            await second.coordinators.end(header.id, commit=True)
        await world.kill(first)
        await asyncio.sleep(25)
        assert second.partitions.led.keys() == set(range(PARTITIONS))
        assert second.coordinators.open_count == 1
        await asyncio.sleep(17)
        assert await second.store.state(header.id) == "ABORTED"
        await second.stop()

    run(main())


def test_a_broker_that_starts_aborts_what_is_due_at_once_and_reads_the_rest_later() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        due, later = await first.begin(5, 3000), await first.begin(5, 60_000)
        await first.stop()
        await asyncio.sleep(5)
        second = await world.broker()
        seen = second.follow(due.id, later.id)
        await asyncio.sleep(0.1)
        assert seen.told == [(due.txn, "ABORTED")]
        assert second.coordinators.open_count == 0
        await asyncio.sleep(1)
        assert second.coordinators.open_count == 1
        await second.stop()

    run(main())


def test_what_a_former_leader_began_late_is_found_by_its_deadline() -> None:
    async def scene(world: World, broker: Broker) -> None:
        header = await broker.begin(0, 5000)
        late = TxnId(0, METADATA_BIT | 12345)
        from msgspec.structs import replace

        await asyncio.sleep(2)  # the book was seeded long ago
        await broker.store.create(replace(header, txn=to_text(late)))
        await asyncio.sleep(4.5)
        assert await broker.store.state(late) == "ABORTED"

    on_a_broker(scene)


def test_a_store_that_does_not_answer_delays_aborts_and_stops_nothing() -> None:
    async def scene(world: World, broker: Broker) -> None:
        header = await broker.begin(0, 2000)
        world.metadata.cut(broker.metadata)
        await asyncio.sleep(5)
        world.metadata.heal(broker.metadata)
        await asyncio.sleep(20)
        assert await broker.store.state(header.id) == "ABORTED"
        assert broker.coordinators.error is None

    on_a_broker(scene)


# --- collection


async def finished(broker: Broker, ops: Awaitable[object] | None = None) -> TxnId:
    header = await broker.begin()
    if ops is not None:
        await ops
    await broker.coordinators.end(header.id, commit=True)
    return header.id


def test_sweep_gc_deletes_headers_after_retention() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txns = [await finished(broker) for _ in range(30)]
        late = await broker.begin(3, 1000)
        open_one = await broker.begin(3, 3_600_000)
        await asyncio.sleep(800)
        assert len(await keys(broker.store)) == 32
        assert await broker.coordinators.end(txns[0], commit=True) == "COMMITTED"
        await asyncio.sleep(200)
        assert await keys(broker.store) == [f"/txn/id/{open_one.txn}"]
        for txn in (txns[0], late.id):
            with pytest.raises(TransactionNotFound):
                await broker.coordinators.end(txn, commit=True)
        assert broker.repairs == []

    on_a_broker(scene)


def test_sweep_gc_repairs_and_retains() -> None:
    async def scene(world: World, broker: Broker) -> None:
        store = broker.store
        header = await broker.begin()
        pin = await place_pin(store, header.id, "persistent://a/b/c", Position(1, 0), 1)
        entries = (AckedEntry(1, 2),)
        acks = [
            await store.write_ack(
                header.id, 1, number, AckOp(header.txn, "persistent://a/b/d-w-x", "s", 0, entries)
            )
            for number in range(2)
        ]
        await broker.coordinators.end(header.id, commit=True)
        await asyncio.sleep(1000)
        wanted = {
            Leftover("persistent://a/b/c", None),
            Leftover("persistent://a/b/d-w-x", "s"),
        }
        assert set(broker.repairs) == wanted
        assert len(await keys(store)) == 4
        await store.delete_ops([pin, *acks])
        await asyncio.sleep(60)
        assert await keys(store) == []

    on_a_broker(scene)


def test_a_broker_looks_again_at_what_is_left_of_others_transactions() -> None:
    """The coordinator's broker may not have the topic; whoever has it looks by itself."""

    async def scene(world: World, broker: Broker) -> None:
        other = await world.broker()
        header = await broker.begin()
        await place_pin(broker.store, header.id, "persistent://a/b/c", Position(1, 0), 1)
        await broker.coordinators.end(header.id, commit=True)
        await asyncio.sleep(1000)
        assert not other.partitions.leads(header.id.most)
        assert set(other.repairs) == {Leftover("persistent://a/b/c", None)}
        other.missing.add("persistent://a/b/c")
        await asyncio.sleep(100)
        assert len(await keys(broker.store)) == 2, "only its coordinator says that there is none"
        await other.stop()

    on_a_broker(scene)


def test_ops_of_topics_that_are_gone_are_deleted() -> None:
    async def scene(world: World, broker: Broker) -> None:
        broker.missing.add("persistent://a/b/gone")
        header = await broker.begin()
        await place_pin(broker.store, header.id, "persistent://a/b/gone", Position(1, 0), 1)
        await broker.coordinators.end(header.id, commit=False)
        await asyncio.sleep(1100)
        assert await keys(broker.store) == []

    on_a_broker(scene)


def test_ops_of_open_transactions_and_of_like_names_do_not_count() -> None:
    async def scene(world: World, broker: Broker) -> None:
        headers = [await broker.begin(0, 3_600_000) for _ in range(12)]
        await place_pin(broker.store, headers[10].id, "persistent://a/b/c", Position(1, 0), 1)
        await broker.coordinators.end(headers[0].id, commit=True)  # 1, beside 11
        await asyncio.sleep(1000)
        assert await broker.store.header(headers[0].id) is None
        assert broker.repairs == []

    on_a_broker(scene)


# --- leadership


def test_assignments_follow_the_leaders() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        second = await world.broker()
        url = "pulsar://broker-1:6650"
        wanted = [CoordinatorAssignment(number, url) for number in range(PARTITIONS)]
        assert first.partitions.assignments() == second.partitions.assignments() == wanted
        seen = second.partitions.changes.version
        await first.stop()
        await asyncio.sleep(3)
        assert second.partitions.changes.version > seen
        other = [
            CoordinatorAssignment(number, "pulsar://broker-2:6650") for number in range(PARTITIONS)
        ]
        assert second.partitions.assignments() == other
        await second.stop()

    run(main())


def test_the_outcome_stays_after_the_coordinator_moved() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        second = await world.broker()
        committed, aborted, left = [await first.begin(1) for _ in range(3)]
        await first.coordinators.end(committed.id, commit=True)
        await first.coordinators.end(aborted.id, commit=False)
        seen = second.follow(left.id)
        await first.stop()
        await asyncio.sleep(3)
        end = second.coordinators.end
        assert await end(committed.id, commit=True) == "COMMITTED"
        assert await end(aborted.id, commit=False) == "ABORTED"
        with pytest.raises(InvalidTxnStatus):
            await end(committed.id, commit=False)
        assert await end(left.id, commit=True) == "COMMITTED"
        assert seen.told == [(left.txn, "COMMITTED")]
        await second.stop()

    run(main())


def test_a_broker_that_lost_its_session_leads_nothing() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        header = await first.begin(1)
        second = await world.broker()
        world.metadata.cut(first.metadata)
        await asyncio.sleep(60)
        assert first.partitions.led == {}
        with pytest.raises(TransactionCoordinatorNotFound):
            await first.begin(1)
        assert await second.coordinators.end(header.id, commit=False) == "ABORTED"
        world.metadata.heal(first.metadata)
        await asyncio.sleep(5)
        assert first.coordinators.open_count == 0
        for broker in (first, second):
            await broker.stop()

    run(main())
