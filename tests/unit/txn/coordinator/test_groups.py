"""Transaction groups at a coordinator: epochs, commits, replays, roll-forward, their end."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest

from magnetar.errors import (
    GroupFenced,
    InvalidTxnStatus,
    NotAllowed,
    TooManyRequests,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
)
from magnetar.metadata.api import VALUE_BYTES_MAX, Stat
from magnetar.metadata.memory import MemoryMetadata
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.coordinator.groups import NAME_BYTES_MAX
from magnetar.txn.coordinator_partitions import PARTITIONS, partition_of
from magnetar.txn.ids import METADATA_BIT, to_text
from magnetar.txn.records import Group, GroupMembership, Header, Retired, State, encode
from magnetar.wire.messages import TxnId
from tests.unit.txn.coordinator_world import MINUTE_MS, Broker, World, keys, on_a_broker

APP = "job"
HOME = partition_of(APP)


async def member(
    broker: Broker, epoch: int, sequence: int, *, timeout_ms: int = MINUTE_MS, owner: str = ""
) -> Header:
    membership = GroupMembership(APP, epoch, sequence)
    return await broker.coordinators.begin(HOME, timeout_ms, owner, membership)


async def opened(broker: Broker, run_name: str = "run-1") -> int:
    return (await broker.coordinators.open_group(APP, "query", run_name)).epoch


async def commit(broker: Broker, epoch: int, sequence: int, *winners: Header) -> bool:
    """Whether it was a replay."""
    ids = [header.id for header in winners]
    return (await broker.coordinators.commit_group(APP, epoch, sequence, ids)).replayed


async def states(broker: Broker, *members: Header) -> list[State | None]:
    return [await broker.store.state(each.id) for each in members]


async def header_states(broker: Broker, *members: Header) -> list[str | None]:
    headers = [await broker.store.header(each.id) for each in members]
    return [None if each is None else each.state for each in headers]


class OneTurn:
    """A participant that fails if it is told of decisions in different turns of the loop."""

    def __init__(self) -> None:
        self.told: dict[str, State] = {}
        self.is_over = False

    def decided(self, txn: TxnId, state: State) -> None:
        assert not self.is_over, "told in a later turn"
        if not self.told:
            asyncio.get_running_loop().call_soon(self._over)
        self.told[to_text(txn)] = state

    def _over(self) -> None:
        self.is_over = True


# --- records


@pytest.mark.parametrize("sign", ["a", "\N{DIGIT ONE}", '"', "\x01", "\N{GRINNING FACE}"])
def test_the_largest_record_of_a_group_has_room_in_the_store(sign: str) -> None:
    limits = Limits()
    name = sign
    while len(msgspec.json.encode(name + sign)) - 2 <= NAME_BYTES_MAX:
        name += sign
    txns = [to_text(TxnId(PARTITIONS - 1, 2**63 - 1 - each)) for each in range(20_000)]
    record = Group(
        name,
        2**40,
        name,
        name,
        2**40,
        2**40,
        tuple(txns[: limits.txn_group_commit_max]),
        name,
        tuple(txns[: limits.txn_group_aborted_max]),
        tuple([Retired(name, name)] * limits.txn_group_retired_max),
        2**50,
        name,
    )
    assert len(encode(record)) < VALUE_BYTES_MAX


# --- epochs


def test_a_new_run_fences_the_former_one() -> None:
    async def scene(world: World, broker: Broker) -> None:
        open_group = broker.coordinators.open_group
        assert (await open_group(APP, "query", "run-1")).epoch == 1
        assert (await open_group(APP, "query", "run-1")).epoch == 1
        old = await member(broker, 1, 0)
        seen = broker.follow(old.id)
        assert (await open_group(APP, "query", "run-2")).epoch == 2
        assert seen.told == [(old.txn, "ABORTED")]
        with pytest.raises(GroupFenced):
            await open_group(APP, "query", "run-1")
        with pytest.raises(GroupFenced):
            await member(broker, 1, 0)
        with pytest.raises(GroupFenced):
            await commit(broker, 1, 0, old)
        await asyncio.sleep(1)
        assert await header_states(broker, old) == ["ABORTED"]
        assert (await open_group(APP, "other query", "run-1")).epoch == 3
        with pytest.raises(GroupFenced):
            await open_group(APP, "query", "run-3")

    on_a_broker(scene)


def test_a_new_epoch_keeps_what_was_committed() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        winner = await member(broker, epoch, 4)
        await commit(broker, epoch, 4, winner)
        group = await broker.coordinators.open_group(APP, "query", "run-2")
        assert (group.epoch, group.sequence, group.decided) == (2, 4, (winner.txn,))
        assert await states(broker, winner) == ["COMMITTED"]
        assert await commit(broker, 2, 4, winner)
        with pytest.raises(InvalidTxnStatus):
            await member(broker, 2, 4)

    on_a_broker(scene)


def test_names_have_bounds_and_owners_their_groups() -> None:
    async def scene(world: World, broker: Broker) -> None:
        coordinators = broker.coordinators
        for names in (
            ("", "g", "r"),
            ("a", "", "r"),
            ("a", "g", "*"),
            ("a", "g", "r" * 300),
            ("a", "\U00010000" * 100, "r"),
        ):
            with pytest.raises(NotAllowed):
                await coordinators.open_group(*names)
        await coordinators.open_group(APP, "g", "r", "alice")
        header = await member(broker, 1, 0, owner="alice")
        for work in (
            coordinators.open_group(APP, "g", "r2", "bob"),
            coordinators.commit_group(APP, 1, 0, [header.id], "bob"),
            coordinators.group_status(APP, "bob"),
            coordinators.begin(HOME, MINUTE_MS, "bob", GroupMembership(APP, 1, 0)),
        ):
            with pytest.raises(NotAllowed):
                await work
        await coordinators.commit_group(APP, 1, 0, [header.id], "alice")

    on_a_broker(scene)


# --- the decision


def test_winners_commit_and_all_others_abort_in_one_turn() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        won = [await member(broker, epoch, 0) for _ in range(250)]
        lost = [await member(broker, epoch, 0) for _ in range(3)]
        later = await member(broker, epoch, 1)
        seen = OneTurn()
        for each in (*won, *lost, later):
            broker.outcomes.join(each.id, seen)
        assert not await commit(broker, epoch, 0, *won)
        wanted = {each.txn: "COMMITTED" for each in won} | {each.txn: "ABORTED" for each in lost}
        assert seen.told == wanted
        await asyncio.sleep(1)
        assert await header_states(broker, *won, *lost, later) == [
            *["COMMITTED"] * 250,
            *["ABORTED"] * 3,
            "OPEN",
        ]
        assert broker.coordinators.open_count == 1

    on_a_broker(scene)


def test_a_sequence_that_is_skipped_aborts_what_is_below_it() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        low, high = await member(broker, epoch, 3), await member(broker, epoch, 7)
        seen = broker.follow(low.id, high.id)
        await commit(broker, epoch, 7, high)
        await asyncio.sleep(1)
        assert sorted(seen.told) == sorted([(low.txn, "ABORTED"), (high.txn, "COMMITTED")])

    on_a_broker(scene)


def test_a_replay_aborts_what_it_lists_beside_the_decided() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        won, lost = await member(broker, epoch, 0), await member(broker, epoch, 0)
        await commit(broker, epoch, 0, won)
        early = await member(broker, epoch, 1)
        seen = broker.follow(early.id)
        assert await commit(broker, epoch, 0, won, lost, early)
        assert seen.told == [(early.txn, "ABORTED")]
        assert await states(broker, won, lost, early) == ["COMMITTED", "ABORTED", "ABORTED"]
        status = await broker.coordinators.group_status(APP)
        assert (status.sequence, status.decided) == (0, (won.txn,))
        # Of an earlier sequence the ids are forgotten; its transactions stay what they are.
        await commit(broker, epoch, 2)
        assert await commit(broker, epoch, 0, won, lost)
        assert await states(broker, won, lost) == ["COMMITTED", "ABORTED"]

    on_a_broker(scene)


def test_a_commit_with_one_that_does_not_belong_decides_nothing() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        good, other = await member(broker, epoch, 0), await member(broker, epoch, 1)
        over = await member(broker, epoch, 0)
        await broker.coordinators.end(over.id, commit=False)
        alone = await broker.begin(HOME)
        unknown = TxnId(HOME, METADATA_BIT | 999)
        for ids, kind in (
            ([good.id, other.id], InvalidTxnStatus),
            ([good.id, over.id], InvalidTxnStatus),
            ([good.id, alone.id], TransactionNotFound),
            ([good.id, unknown], TransactionNotFound),
        ):
            with pytest.raises(kind):
                await broker.coordinators.commit_group(APP, epoch, 0, ids)
        assert (await broker.coordinators.group_status(APP)).sequence == -1
        assert await states(broker, good, other, over) == ["OPEN", "OPEN", "ABORTED"]
        await commit(broker, epoch, 0, good)

    on_a_broker(scene)


def test_a_member_is_never_committed_alone() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        one, two = await member(broker, epoch, 0), await member(broker, epoch, 0)
        end = broker.coordinators.end
        with pytest.raises(NotAllowed):
            await end(one.id, commit=True)
        seen = broker.follow(one.id, two.id)
        assert await end(one.id, commit=False) == "ABORTED"
        assert await end(one.id, commit=False) == "ABORTED"
        with pytest.raises(InvalidTxnStatus):
            await end(one.id, commit=True)
        await commit(broker, epoch, 0, two)
        assert await end(two.id, commit=True) == "COMMITTED"
        with pytest.raises(InvalidTxnStatus):
            await end(two.id, commit=False)
        assert seen.told == [(one.txn, "ABORTED"), (two.txn, "COMMITTED")]

    on_a_broker(scene)


def test_members_have_deadlines_and_the_group_decides_them() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        many = [await member(broker, epoch, 0, timeout_ms=3000) for _ in range(150)]
        kept = await member(broker, epoch, 0)
        seen = broker.follow(*(each.id for each in many))
        await asyncio.sleep(3.5)
        assert sorted(seen.told) == sorted((each.txn, "ABORTED") for each in many)
        with pytest.raises(InvalidTxnStatus):
            await commit(broker, epoch, 0, many[0], kept)
        await commit(broker, epoch, 0, kept)
        group = await broker.store.group(APP)
        assert group is not None
        assert group.aborted == ()

    on_a_broker(scene)


def test_limits_of_a_group() -> None:
    limits = Limits(close_seconds=5, txn_group_commit_max=3, txn_group_aborted_max=4)

    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        members = [await member(broker, epoch, 0) for _ in range(20)]
        for each in members[:14]:  # more than the limit: those that are noted are forgotten
            await broker.coordinators.end(each.id, commit=False)
        with pytest.raises(TooManyRequests):
            await commit(broker, epoch, 0, *members[14:18])
        await commit(broker, epoch, 0, *members[14:17])
        wanted: list[State | None] = ["ABORTED"] * 14
        assert await states(broker, *members) == [*wanted, *["COMMITTED"] * 3, *["ABORTED"] * 3]

    on_a_broker(scene, limits)


# --- the coordinator


def test_a_group_has_one_coordinator() -> None:
    async def main() -> None:
        world = World()
        first, second = await world.broker(), await world.broker()
        epoch = await opened(first)
        elsewhere = second.coordinators
        for work in (
            elsewhere.open_group(APP, "query", "run-2"),
            elsewhere.commit_group(APP, epoch, 0, []),
            elsewhere.group_status(APP),
        ):
            with pytest.raises(TransactionCoordinatorNotFound):
                await work
        wrong = (HOME + 1) % PARTITIONS
        with pytest.raises(NotAllowed):
            await first.coordinators.begin(wrong, MINUTE_MS, "", GroupMembership(APP, epoch, 0))
        for broker in (first, second):
            await broker.stop()

    run(main())


def test_a_broker_dies_between_the_commit_and_the_roll_forward() -> None:
    async def main() -> None:
        world = World()
        first, second = await world.broker(), await world.broker()
        epoch = await opened(first)
        won, lost = await member(first, epoch, 0), await member(first, epoch, 0)
        await first.begin(HOME)
        seen = second.follow(won.id, lost.id)
        await commit(first, epoch, 0, won)
        await world.kill(first)
        assert await header_states(second, won, lost) == ["OPEN", "OPEN"]
        assert await states(second, won, lost) == ["COMMITTED", "ABORTED"]
        await asyncio.sleep(30)
        assert sorted(seen.told) == sorted([(won.txn, "COMMITTED"), (lost.txn, "ABORTED")])
        assert await commit(second, epoch, 0, won)
        after = await member(second, epoch, 1)
        assert not await commit(second, epoch, 1, after)
        assert (await header_states(second, won))[0] == "COMMITTED"
        assert await states(second, won, lost, after) == ["COMMITTED", "ABORTED", "COMMITTED"]
        await second.stop()

    run(main())


def test_a_member_that_is_stored_too_late_is_refused() -> None:
    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        create = broker.store.create

        async def slow(header: Header) -> Stat:
            await asyncio.sleep(1)
            return await create(header)

        broker.store.create = slow  # type: ignore[method-assign]
        late = asyncio.create_task(member(broker, epoch, 0))
        await asyncio.sleep(0.5)
        await commit(broker, epoch, 0)
        with pytest.raises(InvalidTxnStatus):
            await late
        await asyncio.sleep(90)
        assert await keys(broker.store) != []
        await asyncio.sleep(1000)
        assert await keys(broker.store) == [f"/txn/group/{APP}"]

    on_a_broker(scene)


# --- its end


@pytest.mark.slow
def test_a_group_is_remembered_and_then_forgotten() -> None:
    limits = Limits(close_seconds=5, txn_group_retention_seconds=4000.0)

    async def scene(world: World, broker: Broker) -> None:
        epoch = await opened(broker)
        won, lost = await member(broker, epoch, 5), await member(broker, epoch, 5)
        await broker.coordinators.end(lost.id, commit=False)
        await commit(broker, epoch, 5, won)
        await asyncio.sleep(3500)
        assert await keys(broker.store) == [f"/txn/group/{APP}"]
        status = await broker.coordinators.group_status(APP)
        assert (status.sequence, status.decided) == (5, (won.txn,))
        assert await commit(broker, epoch, 5, won)
        await opened(broker)  # it is in use
        await asyncio.sleep(3500)
        assert await commit(broker, epoch, 5, won)
        await asyncio.sleep(700)
        assert await keys(broker.store) == []
        with pytest.raises(TransactionNotFound):
            await broker.coordinators.group_status(APP)

    on_a_broker(scene, limits)


# --- all at once


@pytest.mark.parametrize("seed", range(20))
def test_one_outcome_whatever_happens_at_once(seed: int) -> None:
    random = Random(seed)

    async def delay() -> None:
        await asyncio.sleep(random.random() * 0.02)

    async def main() -> None:
        world = World()
        world.metadata = MemoryMetadata(world.clock, delay=delay)
        broker = await world.broker()
        epoch = await opened(broker)
        decided: dict[str, set[State]] = {}
        members: list[Header] = []
        committed: set[str] = set()

        async def attempt(sequence: int) -> None:
            await asyncio.sleep(random.random())
            try:
                header = await member(
                    broker, epoch, sequence, timeout_ms=random.choice([300, 9000])
                )
            except InvalidTxnStatus:
                return  # the sequence is over
            members.append(header)
            broker.outcomes.join(header.id, Notes(decided))
            if random.random() < 0.3:
                await asyncio.sleep(random.random())
                try:
                    await broker.coordinators.end(header.id, commit=False)
                except InvalidTxnStatus:
                    assert (await states(broker, header)) == ["COMMITTED"]

        async def commits(sequence: int) -> None:
            await asyncio.sleep(random.random() * 2)
            listed = [
                each
                for each in members
                if each.group is not None
                and each.group.sequence == sequence
                and random.random() < 0.8
            ]
            try:
                if not await commit(broker, epoch, sequence, *listed):
                    committed.update(each.txn for each in listed)
            except InvalidTxnStatus:
                return  # one of them is over, and nothing was decided

        for sequence in range(4):
            work = [attempt(sequence) for _ in range(8)] + [commits(sequence) for _ in range(3)]
            await asyncio.gather(*work)
        await asyncio.sleep(20)
        assert {txn for txn, found in decided.items() if found == {"COMMITTED"}} == committed
        assert all(len(found) == 1 for found in decided.values())
        assert len(decided) == len(members)
        wanted = ["COMMITTED" if each.txn in committed else "ABORTED" for each in members]
        assert await header_states(broker, *members) == wanted
        await broker.stop()

    run(main())


class Notes:
    """A participant that keeps every decision it is told, by transaction."""

    def __init__(self, found: dict[str, set[State]]) -> None:
        self._found = found

    def decided(self, txn: TxnId, state: State) -> None:
        self._found.setdefault(to_text(txn), set()).add(state)
