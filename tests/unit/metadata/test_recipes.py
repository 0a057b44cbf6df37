"""Recipes on the memory backend, with delays and cuts, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from magnetar.errors import (
    CorruptMetadata,
    DeadlineExceeded,
    InvalidArgument,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.api import Index, Record
from magnetar.metadata.memory import MemoryMetadata
from magnetar.metadata.recipes import (
    CAS_ATTEMPTS_MAX,
    Content,
    Counter,
    Fate,
    LeaderElection,
    TableView,
    cas_settle,
    cas_update,
    get_patiently,
)
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual.virtual_time import run

SEED = 7
TIMEOUT_S = 6.0


def new_server(*, slow: bool = False) -> MemoryMetadata:
    choose = random.Random(SEED)

    async def delay() -> None:
        await asyncio.sleep(choose.random() * 0.01)

    return MemoryMetadata(LoopClock(0), delay=delay if slow else None)


def increment(record: Record | None) -> Content:
    return Content(b"%d" % (1 + (0 if record is None else int(record.value))))


@asynccontextmanager
async def taking_part(*elections: LeaderElection) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for election in elections:
            group.create_task(election.run())
        yield
        for election in elections:
            await election.close()


# --- cas_update ---


def test_cas_update_under_contention() -> None:
    async def main() -> None:
        server = new_server(slow=True)
        stores = [server.connect() for _ in range(4)]
        await asyncio.gather(*(cas_update(store, "/n", increment) for store in stores * 10))
        record = await stores[0].get("/n")
        assert record is not None
        assert record.value == b"40"

    run(main())


def test_cas_update_returns_what_is_there_then() -> None:
    async def main() -> None:
        store = new_server().connect()
        created = await cas_update(store, "/r", lambda _: Content(b"1", (Index("i", "k"),)))
        assert created == await store.get("/r")
        assert [record.key async for record in store.scan_index("i")] == ["/r"]
        assert await cas_update(store, "/r", lambda _: None) == created
        assert await cas_update(store, "/none", lambda _: None) is None

    run(main())


def test_cas_update_waits_for_the_connection_until_its_deadline() -> None:
    async def main() -> None:
        server = new_server()
        store = server.connect()
        server.cut(store)
        with pytest.raises(DeadlineExceeded):
            await cas_update(store, "/n", increment, timeout_s=2)
        update = asyncio.ensure_future(cas_update(store, "/n", increment))
        await asyncio.sleep(1)
        server.heal(store)
        record = await update
        assert record is not None
        assert record.value == b"1"

    run(main())


def test_cas_update_leaves_an_unknown_outcome_to_the_caller() -> None:
    async def main() -> None:
        server = new_server(slow=True)
        store = server.connect()
        cut = False

        def cut_while_it_travels() -> None:
            nonlocal cut
            cut = True
            server.cut(store, in_flight_arrives=True)

        def change(record: Record | None) -> Content:
            if not cut:
                asyncio.get_running_loop().call_later(0.0001, cut_while_it_travels)
            return increment(record)

        with pytest.raises(OutcomeUnknown):
            await cas_update(store, "/n", change)

    run(main())


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("fate", [Content(b"mine"), Fate.GONE])
def test_cas_settle_reads_what_became_of_an_unknown_outcome(
    fate: Content | Fate, arrives: bool
) -> None:
    async def main() -> None:
        server = new_server(slow=True)
        store, other = server.connect(), server.connect()
        await other.put("/n", b"theirs")
        loop = asyncio.get_running_loop()
        calls = 0

        def change(record: Record | None) -> Content | Fate:
            nonlocal calls
            calls += 1
            if calls == 1:
                loop.call_later(0.0001, lambda: server.cut(store, in_flight_arrives=arrives))
                loop.call_later(1.0, lambda: server.heal(store))
            return fate

        await cas_settle(store, "/n", change)
        found = await get_patiently(store, "/n")
        assert (None if found is None else found.value) == (
            fate.value if isinstance(fate, Content) else None
        )
        await cas_settle(store, "/n", lambda _: Fate.KEPT)
        assert await get_patiently(store, "/n") == found

    run(main())


def test_cas_update_gives_up_after_many_lost_races() -> None:
    async def main() -> None:
        store = new_server().connect()
        calls = 0

        def change(record: Record | None) -> Content:
            nonlocal calls
            calls += 1
            # Submitted before the put of `cas_update`, so it wins every race.
            rival.append(store.put("/n", b"0"))
            return increment(record)

        rival = [store.put("/n", b"0")]
        with pytest.raises(Unavailable):
            await cas_update(store, "/n", change)
        assert calls == CAS_ATTEMPTS_MAX
        await asyncio.gather(*rival)

    run(main())


# --- Counter ---


def test_counters_of_two_holders_never_share_a_number() -> None:
    async def main() -> None:
        server = new_server(slow=True)
        counters = [Counter(server.connect(), "/ids", block=7) for _ in range(3)]
        given = await asyncio.gather(*(counters[n % 3].next() for n in range(100)))
        assert len(set(given)) == 100
        assert min(given) == 1
        for position in range(3):
            own = given[position::3]
            assert list(own) == sorted(own)

    run(main())


def test_counter_takes_one_write_per_block() -> None:
    async def main() -> None:
        store = new_server().connect()
        counter = Counter(store, "/ids", block=10)
        assert [await counter.next() for _ in range(25)] == list(range(1, 26))
        record = await store.get("/ids")
        assert record is not None
        assert (record.value, record.stat.mods) == (b"30", 2)

    run(main())


def test_counter_skips_a_block_of_unknown_outcome() -> None:
    async def main() -> None:
        server = new_server(slow=True)
        store, other = server.connect(), server.connect()
        choose = random.Random(SEED)
        counters = [Counter(store, "/ids", block=2), Counter(other, "/ids", block=2)]

        async def take(counter: Counter) -> list[int]:
            return [await counter.next(timeout_s=100) for _ in range(100)]

        taking = asyncio.gather(*(take(counter) for counter in counters))
        while not taking.done():
            await asyncio.sleep(choose.random() * 0.1)
            server.cut(store, in_flight_arrives=choose.random() < 0.5)
            await asyncio.sleep(choose.random() * 0.05)
            server.heal(store)
        given = [number for numbers in await taking for number in numbers]
        assert len(set(given)) == 200

    run(main())


def test_counter_refuses_nonsense() -> None:
    async def main() -> None:
        store = new_server().connect()
        await store.put("/ids", b"-5")
        with pytest.raises(CorruptMetadata):
            await Counter(store, "/ids").next()
        with pytest.raises(InvalidArgument):
            Counter(store, "/ids", block=0)

    run(main())


# --- LeaderElection ---


def test_leader_steps_down_before_its_session_can_expire() -> None:
    async def main() -> None:
        server = new_server()
        first, second = server.connect(TIMEOUT_S), server.connect(TIMEOUT_S)
        elections = [LeaderElection(first, "/l", b"1"), LeaderElection(second, "/l", b"2")]
        async with taking_part(*elections):
            epoch = await elections[0].lead(timeout_s=1)
            server.cut(first)
            seen = elections[0].changes.version
            await elections[0].changes.past(seen)
            assert not elections[0].leading
            record = await second.get("/l")
            assert record is not None, "stepped down after the record was gone"
            assert record.version == epoch
            assert await elections[1].lead(timeout_s=TIMEOUT_S + 2) > epoch
            server.heal(first)

    run(main())


def test_a_put_whose_answer_was_lost_still_leads() -> None:
    async def main() -> None:
        for seed in range(20):
            choose = random.Random(seed)

            async def delay() -> None:
                await asyncio.sleep(0.01)

            server = MemoryMetadata(LoopClock(0), delay=delay)
            store = server.connect(TIMEOUT_S)
            election = LeaderElection(store, "/l", b"1")
            async with taking_part(election):
                await asyncio.sleep(choose.random() * 0.06)
                server.cut(store, in_flight_arrives=True)
                await asyncio.sleep(choose.random() * 0.06)
                server.heal(store)
                epoch = await election.lead(timeout_s=10)
                record = await store.get("/l")
                assert record is not None, f"seed {seed}"
                assert record.version == epoch, f"seed {seed}"

    run(main())


def test_lead_has_a_deadline_and_close_ends_run() -> None:
    async def main() -> None:
        server = new_server()
        store = server.connect()
        await store.put("/l", b"someone else")
        election = LeaderElection(store, "/l", b"1")
        await election.close()
        election = LeaderElection(store, "/l", b"1")
        async with taking_part(election):
            with pytest.raises(DeadlineExceeded):
                await election.lead(timeout_s=5)
        running = asyncio.ensure_future(LeaderElection(store, "/l", b"2").run())
        await asyncio.sleep(1)
        await store.close()
        await asyncio.wait_for(running, 5)

    run(main())


# --- TableView ---


def test_table_view_follows_through_cuts() -> None:
    async def main() -> None:
        choose = random.Random(SEED)
        server = new_server(slow=True)
        store, writer = server.connect(), server.connect()
        view = TableView(store, "/t")
        running = asyncio.ensure_future(view.run())
        for n in range(300):
            key = f"/t/{choose.randrange(20):02d}"
            if choose.random() < 0.6:
                await writer.put(key, b"%d" % n)
            elif choose.random() < 0.8:
                await writer.delete(key)
            else:
                await writer.delete_range("/t", key[3:], f"{choose.randrange(20):02d}")
            if n % 40 == 10:
                server.cut(store)
            if n % 40 == 20:
                server.heal(store)
        server.heal(store)
        await view.loaded(timeout_s=5)
        await asyncio.sleep(10)
        assert dict(view.records) == {record.key: record async for record in writer.scan("/t")}
        await store.close()
        await asyncio.wait_for(running, 5)

    run(main())


def test_table_view_that_cannot_load() -> None:
    async def main() -> None:
        server = new_server()
        store = server.connect()
        server.cut(store)
        view = TableView(store, "/t")
        running = asyncio.ensure_future(view.run())
        with pytest.raises(DeadlineExceeded):
            await view.loaded(timeout_s=3)
        server.heal(store)
        await view.loaded(timeout_s=3)
        running.cancel()

    run(main())
