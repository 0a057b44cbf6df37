"""Conformance items 47-55 and 59-61: sessions, elections, restarts and closing."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import TracebackType
from typing import Self

from magnetar.errors import FolderInUse, OutcomeUnknown, SessionLost, StoreClosed, Unavailable
from magnetar.metadata.api import EventKind, MetadataStore, SessionEvent, Stat
from magnetar.metadata.recipes import LeaderElection
from magnetar.testing.kits.metadata_base import (
    WAIT_S,
    MetadataKitBase,
    MetadataWorld,
    eventually,
    eventually_gone,
    item,
    refuses,
    upcoming,
    value_of,
)

CANDIDATES = 5
# On top of the session timeout: to notice, and to take the record.
TAKEOVER_SLACK_S = 2.0
ELECTION_SEED = 55
ELECTION_ROUNDS = 60
LEADER_KEY = "/leader"


class _Candidates:
    """Candidates of one election, each with its store object; watches that at most one leads."""

    def __init__(self, stores: list[MetadataStore], *, exclusive: bool = True) -> None:
        self.stores = stores
        self._exclusive = exclusive
        self.elections = [
            LeaderElection(store, LEADER_KEY, b"candidate-%d" % n) for n, store in enumerate(stores)
        ]
        self.epochs: list[int] = []
        self._tasks: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.ensure_future(election.run()) for election in self.elections]
        self._tasks += [asyncio.ensure_future(self._check(each)) for each in self.elections]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for election in self.elections:
            await election.close()
        for task in self._tasks:
            # Done means failed here: a check that found two leaders speaks up now.
            if task.done():
                task.result()
            task.cancel()

    async def _check(self, election: LeaderElection) -> None:
        seen = 0
        while True:
            seen = await election.changes.past(seen)
            leading = [each for each in self.elections if each.leading]
            # At every change, not now and then: two leaders for a moment are two leaders.
            assert len(leading) <= 1 or not self._exclusive, "two leaders at a time"
            # Epochs grow: by them what a former leader still does is told from the new one's.
            if election.epoch is not None and election.epoch not in self.epochs:
                assert election.epoch > max(self.epochs, default=0), "an epoch did not grow"
                self.epochs.append(election.epoch)

    async def leader(self, *, other_than: int | None = None, within_s: float = WAIT_S) -> int:
        """The position of the one that leads."""

        def found() -> bool:
            return self._leads() not in (None, other_than)

        await eventually(found, within_s=within_s)
        position = self._leads()
        assert position is not None
        return position

    def _leads(self) -> int | None:
        for position, election in enumerate(self.elections):
            if election.leading:
                return position
        return None


async def _candidates(world: MetadataWorld) -> _Candidates:
    return _Candidates([await world.connect() for _ in range(CANDIDATES)])


class SessionItems(MetadataKitBase):
    """Sessions, elections, restarts and closing."""

    @item
    async def test_47_ephemeral_gone_after_close(self, world: MetadataWorld) -> None:
        owner = await world.connect()
        stat = await owner.put("/eph/a", b"mine", ephemeral=True)
        assert (stat.ephemeral, stat.mine) == (True, True)
        await owner.put("/eph/kept", b"")
        # Nobody else can look: the next start has to.
        if not world.shared:
            await world.restart()
            owner = await world.connect()
            assert await owner.scan_keys("/eph") == (["/eph/kept"] if self.durable else [])
            return
        other = await world.connect()
        seen = await other.get("/eph/a")
        assert seen is not None
        assert (seen.stat.ephemeral, seen.stat.mine) == (True, False)
        async with other.watch(key="/eph/a") as watch:
            await owner.close()
            await other.sync("/eph/a")
            assert await other.scan_keys("/eph") == ["/eph/kept"], "not gone at once"
            assert (await upcoming(watch)).kind is EventKind.DELETED

    @item
    async def test_48_ephemeral_gone_after_death(self, world: MetadataWorld) -> None:
        owner = await world.connect()
        other = await world.connect()
        await owner.put("/eph/dead", b"", ephemeral=True)
        async with other.watch(key="/eph/dead") as watch:
            await world.cut(owner)
            event = await upcoming(watch, within_s=world.session_timeout_s + TAKEOVER_SLACK_S)
            assert event.kind is EventKind.DELETED
        assert await other.get("/eph/dead") is None

    @item
    async def test_49_owner_knows_of_the_loss_first(self, world: MetadataWorld) -> None:
        owner = await world.connect()
        other = await world.connect()
        await owner.put("/eph/paused", b"", ephemeral=True)
        states = owner.session_events()
        assert await upcoming(states) is SessionEvent.CONNECTED
        await world.cut(owner)
        # SUSPENDED says that the store is not heard of; only LOST ends what the owner holds.
        while (state := await upcoming(states)) is not SessionEvent.LOST:
            assert state is SessionEvent.SUSPENDED
        # Told later, a former leader would act beside the new one for a moment.
        assert await other.get("/eph/paused") is not None, "told after it happened"
        with refuses(SessionLost, Unavailable):
            await owner.put("/eph/late", b"", ephemeral=True)
        await world.heal(owner)
        assert await upcoming(states) is SessionEvent.REESTABLISHED
        await eventually_gone(other, "/eph/paused")
        assert await other.get("/eph/late") is None
        assert (await owner.put("/eph/new", b"", ephemeral=True)).mine

    @item
    async def test_50_short_silence_keeps_the_session(self, world: MetadataWorld) -> None:
        owner = await world.connect()
        other = await world.connect()
        await owner.put("/eph/kept", b"", ephemeral=True)
        states = owner.session_events()
        for _ in range(3):
            await world.cut(owner)
            # The length of the silence is the subject here.
            await asyncio.sleep(world.session_timeout_s * 0.4)
            await world.heal(owner)
            while await upcoming(states) is not SessionEvent.CONNECTED:
                pass
            await asyncio.sleep(world.session_timeout_s * 2)
        record = await owner.get("/eph/kept")
        assert record is not None
        assert record.stat.mine
        assert await other.get("/eph/kept") is not None

    @item
    async def test_51_restart_inherits_nothing(self, world: MetadataWorld) -> None:
        store = await world.connect()
        await store.put("/eph/old", b"", ephemeral=True)
        await world.restart()
        store = await world.connect()
        assert await store.get("/eph/old") is None
        assert (await store.put("/eph/old", b"", ephemeral=True)).mods == 0
        # An ephemeral record that is replaced by a plain one stays.
        await store.put("/eph/old", b"plain")
        await world.restart()
        store = await world.connect()
        assert await value_of(store, "/eph/old") == (b"plain" if self.durable else None)

    @item
    async def test_52_one_leader_and_takeover(self, world: MetadataWorld) -> None:
        async with await _candidates(world) as field:
            gone: list[int] = []
            for _ in range(CANDIDATES - 1):
                leader = await field.leader()
                assert leader not in gone
                gone.append(leader)
                # By death where it can be played, else by resignation.
                if self.faults:
                    await world.cut(field.stores[leader])
                else:
                    await field.elections[leader].close()
                limit = world.session_timeout_s + TAKEOVER_SLACK_S
                await field.leader(other_than=leader, within_s=limit)
            assert len(field.epochs) >= CANDIDATES - 1
            for leader in gone if self.faults else ():
                await world.heal(field.stores[leader])

    @item
    async def test_53_former_leader_leaves_the_successor(self, world: MetadataWorld) -> None:
        store = await world.connect()
        async with _Candidates([store]) as field:
            await field.leader()
            # Behind its back: deleted and taken by another, all in one go.
            await asyncio.gather(store.delete(LEADER_KEY), store.put(LEADER_KEY, b"successor"))
            await field.elections[0].close()
            assert await value_of(store, LEADER_KEY) == b"successor"
            await store.delete(LEADER_KEY)
        if not self.faults:
            return
        other = await world.connect()
        async with _Candidates([store]) as field:
            await field.leader()
            # The same while the leader hears nothing, and it closes before it has looked.
            await world.cut(store)
            await other.delete(LEADER_KEY)
            await other.put(LEADER_KEY, b"successor")
            await world.heal(store)
            await field.elections[0].close()
            assert await value_of(other, LEADER_KEY) == b"successor"
            await other.delete(LEADER_KEY)
        async with await _candidates(world) as field:
            former = await field.leader()
            await world.cut(field.stores[former])
            successor = await field.leader(other_than=former)
            await world.heal(field.stores[former])
            await field.elections[former].close()
            record = await field.stores[successor].get(LEADER_KEY)
            assert record is not None
            assert record.version == field.elections[successor].epoch

    @item
    async def test_54_leader_record_deleted_by_hand(self, world: MetadataWorld) -> None:
        store = await world.connect()
        # Not exclusive: a candidate may learn of the deletion before the leader does.
        async with _Candidates([store, store], exclusive=False) as field:
            for rounds in range(1, 6):
                leader = await field.leader()
                epoch = field.elections[leader].epoch
                await store.delete(LEADER_KEY)
                await eventually(partial(self._won_more_than, field, rounds))
                assert epoch is not None
                assert field.epochs[-1] > epoch

    @staticmethod
    def _won_more_than(field: _Candidates, rounds: int) -> bool:
        return len(field.epochs) > rounds

    @item
    async def test_55_never_two_leaders(self, world: MetadataWorld) -> None:
        choose = random.Random(ELECTION_SEED)
        async with await _candidates(world) as field:
            cut: set[int] = set()
            for _ in range(ELECTION_ROUNDS if self.faults else 0):
                position = choose.randrange(CANDIDATES)
                if position in cut:
                    cut.discard(position)
                    await world.heal(field.stores[position])
                # One is always connected: without any there is no leader to wait for.
                elif len(cut) < CANDIDATES - 1:
                    cut.add(position)
                    await world.cut(field.stores[position])
                await asyncio.sleep(choose.random() * world.session_timeout_s)
            for position in sorted(cut):
                await world.heal(field.stores[position])
            leader = await field.leader()
            for _ in range(CANDIDATES - 1):
                await field.elections[leader].close()
                leader = await field.leader(other_than=leader)

    @item
    async def test_59_second_opener_is_refused(self, world: MetadataWorld) -> None:
        store = await world.connect()
        await store.put("/exclusive", b"")
        with refuses(FolderInUse):
            await world.open_store()
        assert await value_of(store, "/exclusive") == b""

    @item
    async def test_60_pending_writes_at_a_restart(self, world: MetadataWorld) -> None:
        store = await world.connect()
        other = await world.connect()
        for number in range(5):
            pending = [store.put(f"/pending/{number}-{n}", b"") for n in range(100)]
            # A turn later each time: before, within and after the sending.
            for _ in range(number):
                await asyncio.sleep(0)
            await world.cut(store)
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
            for n, outcome in enumerate(outcomes):
                known = isinstance(outcome, (Stat, Unavailable, OutcomeUnknown))
                assert known, f"{outcome!r}"
                there = await other.get(f"/pending/{number}-{n}") is not None
                # Whoever gets a definite answer can rely on it; OutcomeUnknown allows both.
                if not isinstance(outcome, OutcomeUnknown):
                    assert there == isinstance(outcome, Stat), f"{outcome!r}"
            with refuses(Unavailable):
                await store.get("/pending/x")
            await world.heal(store)
            await store.put("/pending/after", b"%d" % number)
            assert await value_of(other, "/pending/after") == b"%d" % number

    @item
    async def test_61_close(self, world: MetadataWorld) -> None:
        store = await world.connect()
        queued = [store.put(f"/queued/{n:03d}", b"") for n in range(500)]
        # Queued before the close: acknowledged, and durable.
        closing = asyncio.ensure_future(store.close())
        stats = await asyncio.gather(*queued)
        await closing
        await store.close()
        await _refuses_everything(store)
        await world.restart()
        again = await world.connect()
        expected = [stat.key for stat in stats] if self.durable else []
        assert await again.scan_keys("/queued") == expected


async def _refuses_everything(store: MetadataStore) -> None:
    with refuses(StoreClosed):
        await store.get("/a")
    with refuses(StoreClosed):
        await store.put("/a", b"")
    with refuses(StoreClosed):
        await store.put("/a", b"", ephemeral=True)
    with refuses(StoreClosed):
        await store.append("/a", b"")
    with refuses(StoreClosed):
        await store.delete("/a")
    with refuses(StoreClosed):
        await store.delete_range("/a")
    with refuses(StoreClosed):
        await store.scan_keys("/a")
    with refuses(StoreClosed):
        await anext(store.scan_index("a"))
    with refuses(StoreClosed):
        store.watch(key="/a")
    with refuses(StoreClosed):
        store.watch_sequence("/a")
    with refuses(StoreClosed):
        await store.sync()
    assert [state async for state in store.session_events()] == []
