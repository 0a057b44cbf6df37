"""Coordinators of legacy transactions: begin, add, end, deadlines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import pytest

from magnetar.errors import (
    DeadlineExceeded,
    DiskFailed,
    InvalidTxnStatus,
    NotAllowed,
    ServiceNotReady,
    TooManyRequests,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from magnetar.model.ids import Position
from magnetar.runtime.limits import Limits
from magnetar.txn.coordinator_partitions import PARTITIONS
from magnetar.txn.ids import METADATA_BIT, is_metadata
from magnetar.txn.legacy.coordinator_entries import (
    Ended,
    Entry,
)
from magnetar.txn.legacy.coordinator_log import log_exists
from magnetar.wire.messages import TxnId
from tests.unit.txn.coordinator_world import (
    MINUTE_MS,
    Broker,
    World,
    on_a_broker,
)
from tests.unit.txn.legacy.legacy_begun import SUB, T1, T2, begun, refused, state

# --- begin


def test_numbers_ascend_from_one_and_are_of_the_legacy_kind() -> None:
    async def scene(world: World, broker: Broker) -> None:
        ids = [await broker.legacy.begin(each, MINUTE_MS) for each in (0, 0, 3, 3, 0)]
        assert ids == [(0, 1), (0, 2), (3, 1), (3, 2), (0, 3)]
        assert not any(is_metadata(txn) for txn in ids)
        assert broker.coordinators.open_by_coordinator()[0] == 3

    on_a_broker(scene)


def test_no_log_is_opened_before_the_first_transaction() -> None:
    async def scene(world: World, broker: Broker) -> None:
        await asyncio.sleep(5)
        assert list(broker.legacy.here()) == []
        await refused(broker.legacy.end(TxnId(2, 1), commit=True), TransactionNotFound)
        assert not await log_exists(broker.metadata, 2)
        await broker.legacy.begin(2, MINUTE_MS)
        assert [each.partition for each in broker.legacy.here()] == [2]

    on_a_broker(scene)


def test_timeouts_partitions_and_limits_are_checked_at_once() -> None:
    async def scene(world: World, broker: Broker) -> None:
        legacy = broker.legacy
        for timeout_ms in (0, 10**12):
            await refused(legacy.begin(0, timeout_ms), NotAllowed)
        await refused(legacy.begin(PARTITIONS, MINUTE_MS), TransactionCoordinatorNotFound)
        for _ in range(3):
            await legacy.begin(0, MINUTE_MS, "alice")
        with pytest.raises(TooManyRequests, match="txn_open_per_coordinator_max"):
            await legacy.begin(0, MINUTE_MS, "alice")
        await legacy.begin(1, MINUTE_MS, "alice")
        with pytest.raises(TooManyRequests, match="txn_open_per_owner_max"):
            await legacy.begin(1, MINUTE_MS, "alice")
        # An owner's limit counts both kinds.
        with pytest.raises(TooManyRequests, match="txn_open_per_owner_max"):
            await broker.coordinators.begin(1, MINUTE_MS, "alice")
        await legacy.begin(1, MINUTE_MS, "bob")
        await legacy.end(TxnId(0, 1), commit=True, owner="alice")
        await legacy.begin(0, MINUTE_MS, "alice")

    on_a_broker(scene, Limits(txn_open_per_coordinator_max=3, txn_open_per_owner_max=4))


# --- end


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_reaches_all_and_may_be_repeated_but_not_crossed(commit: bool) -> None:
    async def scene(world: World, broker: Broker) -> None:
        legacy = broker.legacy
        txn = await begun(broker, T1, T2)
        await legacy.add_subscriptions(txn, [SUB])
        await legacy.add_partitions(txn, [T1])
        outcome = "COMMITTED" if commit else "ABORTED"
        assert await legacy.end(txn, commit=commit) == outcome
        assert world.participants.outcomes(txn) == {T1: commit, T2: commit, f"{T1} s": commit}
        assert await state(broker, txn) == outcome
        for _ in range(2):
            assert await legacy.end(txn, commit=commit) == outcome
            await refused(legacy.end(txn, commit=not commit), InvalidTxnStatus)
        await refused(legacy.add_partitions(txn, [T1]), InvalidTxnStatus)
        await refused(legacy.add_subscriptions(txn, [SUB]), InvalidTxnStatus)
        assert len(world.participants.ends) == 3
        assert broker.coordinators.open_count == 0

    on_a_broker(scene)


def test_who_is_not_the_owner_is_told_that_there_is_none() -> None:
    async def scene(world: World, broker: Broker) -> None:
        legacy = broker.legacy
        txn = await legacy.begin(1, MINUTE_MS, "alice")
        for other in ("bob", ""):
            await refused(legacy.end(txn, commit=True, owner=other), TransactionNotFound)
            await refused(legacy.add_partitions(txn, [T1], other), TransactionNotFound)
            await refused(legacy.add_subscriptions(txn, [SUB], other), TransactionNotFound)
        await refused(legacy.end(TxnId(1, 99), commit=True), TransactionNotFound)
        assert await legacy.end(txn, commit=True, owner="alice") == "COMMITTED"
        await refused(legacy.end(txn, commit=True, owner="bob"), TransactionNotFound)

    on_a_broker(scene)


def test_the_id_tells_who_decides() -> None:
    async def scene(world: World, broker: Broker) -> None:
        coordinators = broker.coordinators
        legacy, other = await begun(broker, T1), (await broker.begin()).id
        assert coordinators.of(legacy) is broker.legacy
        assert coordinators.of(other) is coordinators
        assert coordinators.of(other, scalable=True) is coordinators
        with pytest.raises(TransactionNotFound, match="legacy"):
            coordinators.of(legacy, scalable=True)
        for txn in (TxnId(0, 1 | METADATA_BIT), legacy):
            assert await coordinators.of(txn).end(txn, commit=True) == "COMMITTED"
        assert world.participants.outcomes(legacy) == {T1: True}

    on_a_broker(scene)


def test_commit_and_abort_at_once_have_one_outcome() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        ends = [broker.legacy.end(txn, commit=each) for each in (True, False) * 3]
        results = await asyncio.gather(*ends, return_exceptions=True)
        assert results[::2] == ["COMMITTED"] * 3
        assert all(isinstance(each, InvalidTxnStatus) for each in results[1::2])
        assert world.participants.outcomes(txn) == {T1: True}

    on_a_broker(scene)


def test_a_participant_is_asked_until_it_has_ended_it() -> None:
    async def scene(world: World, broker: Broker) -> None:
        stage = world.participants
        txn = await begun(broker, T1, T2)
        stage.failing = {T1: ServiceNotReady("elsewhere"), T2: DiskFailed("broken")}
        asked = asyncio.create_task(broker.legacy.end(txn, commit=True))
        await asyncio.sleep(9.5)
        assert stage.attempts[T1] == 10
        assert stage.attempts[T2] == 3  # after 2 and 4 more seconds
        assert await state(broker, txn) == "COMMITTING"
        await refused(broker.legacy.end(txn, commit=False), InvalidTxnStatus)
        again = asyncio.create_task(broker.legacy.end(txn, commit=True))
        await asyncio.sleep(0.1)
        assert not again.done()
        assert (stage.attempts[T1], stage.attempts[T2]) == (11, 4)  # at once, for who asks again
        stage.failing = {}
        assert await asked == await again == "COMMITTED"
        assert stage.outcomes(txn) == {T1: True, T2: True}

    on_a_broker(scene)


def test_an_error_that_nobody_foresaw_ends_no_attempt() -> None:
    async def scene(world: World, broker: Broker) -> None:
        stage = world.participants
        txn = await begun(broker, T1, T2)
        stage.failing = {T1: ValueError("a defect")}
        asked = asyncio.create_task(broker.legacy.end(txn, commit=True))
        await asyncio.sleep(9.5)
        assert stage.attempts[T1] == 3
        assert await state(broker, txn) == "COMMITTING"
        stage.failing = {}
        assert await asked == "COMMITTED"
        assert stage.outcomes(txn) == {T1: True, T2: True}

    on_a_broker(scene)


def test_an_end_that_broke_off_is_carried_out_by_the_next_opening() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        (own,) = broker.legacy.here()
        append = own.log.append

        async def broken(entry: Entry) -> Position:
            if isinstance(entry, Ended):
                raise ValueError("a defect")
            return await append(entry)

        own.log.append = broken  # type: ignore[method-assign]
        await refused(broker.legacy.end(txn, commit=True), TransactionCoordinatorNotFound)
        await asyncio.sleep(2)
        assert await state(broker, txn) == "COMMITTED"
        assert await broker.legacy.end(txn, commit=True) == "COMMITTED"

    on_a_broker(scene)


def test_who_waits_too_long_is_told_and_the_decision_stays() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        world.participants.away.clear()
        with pytest.raises(DeadlineExceeded, match="COMMITTING"):
            await broker.legacy.end(txn, commit=True)
        world.participants.away.set()
        assert await broker.legacy.end(txn, commit=True) == "COMMITTED"

    on_a_broker(scene)


def test_an_end_goes_on_without_who_asked() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        asked = asyncio.create_task(broker.legacy.end(txn, commit=True))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.sleep(1)
        assert await state(broker, txn) == "COMMITTED"
        assert world.participants.outcomes(txn) == {T1: True}

    on_a_broker(scene)


def test_participants_are_limited() -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        await broker.legacy.add_subscriptions(txn, [SUB])
        with pytest.raises(NotAllowed, match="txn_participants_max"):
            await broker.legacy.add_partitions(txn, [T2])
        await broker.legacy.add_partitions(txn, [T1, T1])  # what is in takes no more room
        await broker.legacy.add_subscriptions(txn, [SUB], in_records=True)
        await broker.legacy.end(txn, commit=True)
        assert world.participants.outcomes(txn) == {T1: True, f"{T1} s": True}

    on_a_broker(scene, Limits(txn_participants_max=2))


def test_the_low_watermark_is_below_all_that_is_not_over() -> None:
    async def scene(world: World, broker: Broker) -> None:
        stage = world.participants
        txns = [await begun(broker, T1) for _ in range(4)]
        for index in (2, 1, 0, 3):
            await broker.legacy.end(txns[index], commit=True)
        assert [call.low_watermark for call in stage.ends] == [0, 0, 0, 3]
        last = await begun(broker, T1)
        (own,) = broker.legacy.here()
        assert own.low_watermark == last.least - 1 == 4
        await broker.legacy.end(last, commit=True)
        assert own.low_watermark == 5

    on_a_broker(scene)


def test_what_is_over_behind_a_stuck_one_leaves_nothing_behind() -> None:
    async def scene(world: World, broker: Broker) -> None:
        world.participants.failing = {T1: ServiceNotReady("elsewhere")}
        stuck = await begun(broker, T1)
        ending = asyncio.create_task(broker.legacy.end(stuck, commit=True))
        for _ in range(50):
            await broker.legacy.end(await begun(broker, T2), commit=True)
        (own,) = broker.legacy.here()
        assert own.low_watermark == stuck.least - 1
        assert list(own._unfinished) == [stuck.least]
        world.participants.failing = {}
        await ending
        assert own.low_watermark == own.last_number

    on_a_broker(scene)


class _Forgetful(OrderedDict[int, None]):
    def __setitem__(self, number: int, nothing: None) -> None:
        """Not noted."""


@pytest.mark.parametrize("noted", [True, False])
def test_one_that_is_being_begun_holds_the_low_watermark(noted: bool) -> None:
    async def scene(world: World, broker: Broker) -> None:
        txn = await begun(broker, T1)
        (own,) = broker.legacy.here()
        if not noted:
            own._unfinished = _Forgetful()
        gate, durable = asyncio.Event(), own.log.durable

        async def slow(submitted: asyncio.Future[Position]) -> Position:
            await gate.wait()
            return await durable(submitted)

        own.log.durable = slow  # type: ignore[method-assign]
        beginning = asyncio.create_task(broker.legacy.begin(0, MINUTE_MS))
        await asyncio.sleep(0.1)
        own.log.durable = durable  # type: ignore[method-assign]
        await broker.legacy.end(txn, commit=True)
        told = own.low_watermark
        gate.set()
        # Below the low watermark topics would refuse what it publishes.
        assert (told < (await beginning).least) is noted

    on_a_broker(scene)


# --- deadlines


def test_what_nobody_ends_is_aborted_at_its_deadline() -> None:
    async def scene(world: World, broker: Broker) -> None:
        short, long = await begun(broker, T1, timeout_ms=2000), await begun(broker, T1)
        await asyncio.sleep(1.9)
        assert await state(broker, short) == "OPEN"
        await asyncio.sleep(0.3)
        assert await state(broker, short) == "ABORTED"
        assert world.participants.outcomes(short) == {T1: False}
        await refused(broker.legacy.end(short, commit=True), InvalidTxnStatus)
        assert await broker.legacy.end(short, commit=False) == "ABORTED"
        assert await state(broker, long) == "OPEN"

    on_a_broker(scene)


def test_one_that_cannot_end_holds_no_other_deadline_up() -> None:
    async def scene(world: World, broker: Broker) -> None:
        world.participants.failing = {T1: ServiceNotReady("elsewhere")}
        stuck = await begun(broker, T1, timeout_ms=1000)
        fine = await begun(broker, T2, timeout_ms=2000)
        await asyncio.sleep(3)
        assert await state(broker, stuck) == "ABORTING"
        assert await state(broker, fine) == "ABORTED"

    on_a_broker(scene)
