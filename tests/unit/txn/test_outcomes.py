"""What a broker knows of transactions: one call tells all, nothing is missed, little is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.errors import InvariantBroken
from magnetar.metadata.memory import MemoryMetadata
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn import outcomes, transitions
from magnetar.txn.ids import metadata_id
from magnetar.txn.outcomes import REREAD_SECONDS, Outcomes
from magnetar.txn.records import GroupMembership, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

T1, T2 = metadata_id(0, 1), metadata_id(0, 2)
EPOCH_MS = 1_700_000_000_000


class Seen:
    """A participant that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[TxnId, State]] = []

    def decided(self, txn: TxnId, state: State) -> None:
        self.told.append((txn, state))


class World:
    def __init__(self) -> None:
        self.clock = LoopClock(EPOCH_MS)
        self.metadata = MemoryMetadata(self.clock)
        self.store = TxnStore(self.metadata.connect())
        self.own: set[TxnId] = set()
        self.known = Outcomes(
            TxnStore(self.metadata.connect()),
            self.clock,
            coordinates=lambda txn: txn in self.own,
        )

    async def begin(self, txn: TxnId, group: GroupMembership | None = None) -> None:
        await self.store.create(transitions.begun(txn, now_ms=0, timeout_ms=1, group=group))

    async def header_known(self, txn: TxnId) -> None:
        header = await self.store.header(txn)
        assert header is not None
        self.known.opened(header.id)


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(World())

    run(main())


def test_all_participants_are_told_in_one_call() -> None:
    async def scenario(world: World) -> None:
        some = [Seen(), Seen(), Seen()]
        for each in some:
            world.known.join(T1, each)
        world.known.leave(T1, some[2])
        world.known.learn(T1, "COMMITTED")
        assert [each.told for each in some] == [[(T1, "COMMITTED")]] * 2 + [[]]
        world.known.learn(T1, "COMMITTED")
        assert len(some[0].told) == 1
        with pytest.raises(InvariantBroken):
            world.known.learn(T1, "ABORTED")

    in_world(scenario)


def test_open_is_believed_only_while_it_is_coordinated_here() -> None:
    async def scenario(world: World) -> None:
        await world.begin(T1)
        await world.header_known(T1)
        world.own.add(T1)
        await world.store.end(T1, "ABORTED", 1)
        assert world.known.known(T1) == "OPEN"
        assert await world.known.state(T1) == "OPEN"
        world.own.clear()
        assert await world.known.state(T1) == "ABORTED"
        assert world.known.known(T1) == "ABORTED"
        assert await world.known.state(T2) is None

    in_world(scenario)


def test_a_decision_elsewhere_comes_by_the_watch() -> None:
    async def scenario(world: World) -> None:
        await world.begin(T1)
        seen = Seen()
        world.known.join(T1, seen)
        await asyncio.sleep(0.1)
        await world.store.end(T1, "COMMITTED", 1)
        await asyncio.sleep(0.1)
        assert seen.told == [(T1, "COMMITTED")]
        assert not world.known._tasks

    in_world(scenario)


def test_a_member_is_decided_by_its_group() -> None:
    async def scenario(world: World) -> None:
        first = transitions.opened(None, "app", "g", "r", now_ms=0, retired_max=9)
        await world.store.change_group("app", lambda _: first)
        await world.begin(T1, GroupMembership("app", 1, 0))
        seen = Seen()
        world.known.join(T1, seen)
        await asyncio.sleep(0.1)
        later = transitions.opened(first, "app", "g", "r2", now_ms=0, retired_max=9)
        await world.store.change_group("app", lambda _: later)
        await asyncio.sleep(0.1)
        assert seen.told == [(T1, "ABORTED")]

    in_world(scenario)


def test_what_nobody_told_of_is_found_by_reading_again() -> None:
    async def scenario(world: World) -> None:
        await world.known.start()
        await world.begin(T1)
        await world.header_known(T1)
        world.own.add(T1)
        seen = Seen()
        world.known.join(T1, seen)
        await world.store.end(T1, "COMMITTED", 1)
        await asyncio.sleep(3 * REREAD_SECONDS)
        assert seen.told == [(T1, "COMMITTED")]
        await world.known.stop()

    in_world(scenario)


def test_a_coordinator_that_moves_away_is_followed() -> None:
    async def scenario(world: World) -> None:
        await world.known.start()
        await world.begin(T1)
        await world.header_known(T1)
        world.own.add(T1)
        seen = Seen()
        world.known.join(T1, seen)
        world.own.clear()
        await asyncio.sleep(REREAD_SECONDS + 1)
        assert world.known.known(T1) is None
        await world.store.end(T1, "ABORTED", 1)
        await asyncio.sleep(0.1)
        assert seen.told == [(T1, "ABORTED")]
        await world.known.stop()

    in_world(scenario)


def test_a_missing_header_is_told_to_those_who_asked() -> None:
    async def scenario(world: World) -> None:
        missing: list[TxnId] = []
        seen = Seen()
        world.known.join(T1, seen, missing.append)
        world.known.join(T1, Seen())
        await asyncio.sleep(0.1)
        assert missing == [T1]
        assert seen.told == []
        world.known.leave(T1, seen)

    in_world(scenario)


def test_the_end_of_the_last_participant_ends_the_watch() -> None:
    async def scenario(world: World) -> None:
        await world.begin(T1)
        seen = Seen()
        world.known.join(T1, seen)
        await asyncio.sleep(0.1)
        world.known.leave(T1, seen)
        await asyncio.sleep(0.1)
        assert not world.known._tasks
        assert not world.known._followed

    in_world(scenario)


def test_only_the_latest_decisions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "FINAL_MAX", 10)

    async def scenario(world: World) -> None:
        for number in range(50):
            world.known.learn(metadata_id(0, number), "COMMITTED")
        assert world.known.known(metadata_id(0, 49)) == "COMMITTED"
        assert world.known.known(metadata_id(0, 0)) is None
        assert len(world.known._final) == 10

    in_world(scenario)
