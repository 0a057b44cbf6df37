"""Coordinators of legacy transactions: restarts, leadership, what is remembered, copies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.errors import (
    DiskFailed,
    InvalidTxnStatus,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    Unavailable,
)
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinator_entries import (
    Began,
    PartitionsAdded,
)
from magnetar.txn.legacy.ends import HeaderCopies
from magnetar.txn.records import Header, header_key
from tests.unit.txn.coordinator_world import (
    MINUTE_MS,
    Broker,
    World,
    keys,
    on_a_broker,
)
from tests.unit.txn.legacy.legacy_begun import SUB, T1, T2, begun, refused, state

# --- restarts and leaders


async def restarted(world: World, broker: Broker) -> Broker:
    await broker.stop()
    return await world.broker()


def test_a_restart_goes_on_with_everything() -> None:
    async def main() -> None:
        world = World()
        stage = world.participants
        first = await world.broker()
        done = {commit: await begun(first, T1) for commit in (True, False)}
        for commit, txn in done.items():
            await first.legacy.end(txn, commit=commit)
        stage.away.clear()
        ending = {commit: await begun(first, T1, T2) for commit in (True, False)}
        asked = [
            asyncio.create_task(first.legacy.end(txn, commit=commit))
            for commit, txn in ending.items()
        ]
        left = await begun(first, T2)
        late = await begun(first, T2, timeout_ms=5000)
        await asyncio.sleep(1)
        before = len(stage.ends)
        second = await restarted(world, first)
        for each in asked:
            await refused(each, TransactionCoordinatorNotFound)
        assert len(stage.ends) == before
        stage.away.set()
        await asyncio.sleep(0.1)
        for commit, txn in done.items():
            assert await second.legacy.end(txn, commit=commit) in ("COMMITTED", "ABORTED")
            await refused(second.legacy.end(txn, commit=not commit), InvalidTxnStatus)
        for commit, txn in ending.items():
            assert stage.outcomes(txn) == {T1: commit, T2: commit}
            await second.legacy.end(txn, commit=commit)
        await asyncio.sleep(6)
        assert await state(second, late) == "ABORTED"
        assert await state(second, left) == "OPEN"
        assert await second.legacy.end(left, commit=True) == "COMMITTED"
        assert stage.outcomes(left) == {T2: True}
        assert (await second.legacy.begin(0, MINUTE_MS)).least > left.least
        await second.stop()

    run(main())


def test_after_a_crash_the_next_leader_goes_on() -> None:
    async def main() -> None:
        world = World()
        first, second = await world.broker(), await world.broker()
        world.participants.away.clear()
        decided, left = await begun(first, T1), await begun(first, T1)
        asked = asyncio.create_task(first.legacy.end(decided, commit=True))
        await asyncio.sleep(1)
        await refused(second.legacy.end(left, commit=True), TransactionCoordinatorNotFound)
        await world.kill(first)
        world.participants.away.set()
        world.participants.ends.clear()
        asked.cancel()
        await asyncio.sleep(30)
        assert await second.legacy.end(decided, commit=True) == "COMMITTED"
        assert world.participants.outcomes(decided) == {T1: True}
        assert await second.legacy.end(left, commit=True) == "COMMITTED"
        again = await begun(second, T1)
        assert again.least > left.least
        await second.stop()

    run(main())


def test_numbers_stay_above_the_low_watermark_when_a_leadership_comes_back() -> None:
    async def main() -> None:
        world = World()
        first, second = await world.broker(), await world.broker()
        early = await begun(first, T1)
        await first.partitions._elections[0].close()
        await asyncio.sleep(10)
        other = await begun(second, T1)
        await second.legacy.end(early, commit=False)
        await second.legacy.end(other, commit=True)
        told = world.participants.ends[-1].low_watermark
        assert early.least <= told < other.least
        await second.stop()
        # The first broker leads again, as a new candidate with the rest of a block in its hand.
        first.partitions._elections[0]._closing = False
        first.partitions.spawn(first.partitions._elections[0].run(), "again")
        await asyncio.sleep(10)
        again = await begun(first, T1)
        assert again.least > other.least
        await first.stop()

    run(main())


def test_a_log_that_failed_is_opened_again() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        (own,) = broker.legacy.here()
        own.log._failure = DiskFailed("broken")
        await refused(broker.legacy.end(txn, commit=True), TransactionCoordinatorNotFound)
        await refused(broker.legacy.begin(0, MINUTE_MS), TransactionCoordinatorNotFound)
        await asyncio.sleep(2)
        assert await broker.legacy.end(txn, commit=True) == "COMMITTED"
        assert world.participants.outcomes(txn) == {T1: True}

    on_a_broker(scene)


def test_a_stop_waits_for_coordinators_that_are_being_left() -> None:
    async def scene(world: World, broker: Broker) -> None:
        for partition in (0, 1):
            await broker.legacy.begin(partition, MINUTE_MS)
        coordinators = list(broker.legacy.here())
        gate, close = asyncio.Event(), coordinators[0].close

        async def slow() -> None:
            await gate.wait()
            await close()

        coordinators[0].close = slow  # type: ignore[method-assign]
        for own in coordinators:
            own.log._failure = DiskFailed("broken")
        await asyncio.sleep(2)
        stopping = asyncio.create_task(broker.legacy.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        gate.set()
        await stopping

    on_a_broker(scene)


# --- what is remembered


def test_finished_ones_are_kept_for_a_while_and_then_forgotten() -> None:
    async def scene(world: World, broker: Broker) -> None:
        open_one = await begun(broker, T1, timeout_ms=60 * MINUTE_MS)
        txns = [await begun(broker, T1) for _ in range(20)]
        for index, txn in enumerate(txns):
            await broker.legacy.end(txn, commit=index % 2 == 0)
        (own,) = broker.legacy.here()
        await asyncio.sleep(800)
        assert await broker.legacy.end(txns[0], commit=True) == "COMMITTED"
        await asyncio.sleep(200)
        for txn in txns:
            await refused(broker.legacy.end(txn, commit=True), TransactionNotFound)
        left = [each.entry async for each in own.log.replay()]
        assert [(type(each), each.number) for each in left] == [(Began, 1), (PartitionsAdded, 1)]
        assert await broker.legacy.end(open_one, commit=True) == "COMMITTED"

    on_a_broker(scene)


def test_only_so_many_are_remembered() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txns = [await begun(broker, T1) for _ in range(5)]
        for txn in txns:
            await broker.legacy.end(txn, commit=True)
        for txn in txns[:2]:
            await refused(broker.legacy.end(txn, commit=True), TransactionNotFound)
        for txn in txns[2:]:
            assert await broker.legacy.end(txn, commit=True) == "COMMITTED"

    on_a_broker(scene, Limits(txn_finished_per_coordinator_max=3))


def test_the_log_of_what_is_over_is_trimmed() -> None:
    async def scene(world: World, broker: Broker) -> None:
        for _ in range(40):
            await broker.legacy.end(await begun(broker, T1), commit=True)
        (own,) = broker.legacy.here()
        assert len(own.log.ledger.ledger_spans) > 3
        await asyncio.sleep(1000)
        await broker.legacy.collect()
        assert own.log.ledger.entries <= 10
        # The number of the next one does not depend on what is left in the log.
        assert (await begun(broker)).least == 41

    on_a_broker(scene, Limits(close_seconds=5, managed_ledger_ledger_entries=10))


def test_a_start_without_legacy_transactions_reads_one_record_per_coordinator() -> None:
    async def main() -> None:
        world = World()
        reads: list[str] = []
        connect = world.metadata.connect

        def counted(*given: Any, **named: Any) -> Any:
            store = connect(*given, **named)
            get = store.get

            async def noted(key: str) -> Any:
                reads.append(key)
                return await get(key)

            store.get = noted  # type: ignore[method-assign]
            return store

        world.metadata.connect = counted  # type: ignore[method-assign]
        broker = await world.broker()
        await asyncio.sleep(5)
        logs = [key for key in reads if "__transaction_log_" in key]
        assert len(logs) == len(set(logs)) == PARTITIONS
        await broker.stop()

    run(main())


# --- copies for topics that keep them in records


@pytest.mark.parametrize("commit", [True, False])
def test_a_copy_of_the_header_follows_the_log(commit: bool) -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        assert await broker.store.header(txn) is None
        await broker.legacy.add_partitions(txn, [T1], in_records=True)
        await broker.legacy.add_subscriptions(txn, [SUB], in_records=True)
        copy = await broker.store.header(txn)
        assert copy is not None
        assert (copy.state, copy.deadline_ms - copy.created_ms) == ("OPEN", MINUTE_MS)
        assert [each async for each in broker.store.due(10**15)] == []  # the book has its deadline
        seen = broker.follow(txn)
        outcome = await broker.legacy.end(txn, commit=commit)
        assert await broker.store.state(txn) == outcome
        assert seen.told == [(to_text(txn), outcome)]
        await asyncio.sleep(2000)
        assert await keys(broker.store) == []

    on_a_broker(scene)


def test_a_copy_is_made_final_after_a_crash_whether_or_not_it_was_there() -> None:
    async def main() -> None:
        world = World()
        first = await world.broker()
        txn = await begun(first)
        put = first.metadata.put

        def lost(key: str, *given: Any, **named: Any) -> Any:
            if key == header_key(txn):
                raise Unavailable("not now")
            return put(key, *given, **named)

        first.metadata.put = lost  # type: ignore[method-assign]
        await refused(first.legacy.add_partitions(txn, [T1], in_records=True), Unavailable)
        await world.kill(first)
        second = await world.broker()
        await asyncio.sleep(30)
        await second.legacy.end(txn, commit=True)
        assert await second.store.state(txn) == "COMMITTED"
        # What the first one put comes late, and opens nothing.
        await HeaderCopies(second.store).open(Header(to_text(txn), 0, 1))
        assert await second.store.state(txn) == "COMMITTED"
        await second.stop()

    run(main())


def test_a_copy_that_could_not_be_made_is_made_when_asked_again() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker)
        put = broker.metadata.put
        failing = True

        def sometimes(key: str, *given: Any, **named: Any) -> Any:
            if failing and key == header_key(txn):
                raise Unavailable("not now")
            return put(key, *given, **named)

        broker.metadata.put = sometimes  # type: ignore[method-assign]
        await refused(broker.legacy.add_partitions(txn, [T1], in_records=True), Unavailable)
        failing = False
        await broker.legacy.add_partitions(txn, [T1], in_records=True)
        assert await broker.store.state(txn) == "OPEN"

    on_a_broker(scene)
