"""Ranges with real brokers on virtual time: moves, restarts, splits, news, cursors that follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

import pytest

from harness.simulation.scalable.world import Host
from magnetar.client.client import Client
from magnetar.client.ranges.page import RangePage
from magnetar.client.ranges.ranges import ORIGIN, RangePosition, Ranges
from magnetar.errors import RangeLost
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_producing_in_trouble import (
    cut_links,
    merge,
    replace,
    restart,
    split,
)
from tests.integration.server.scalable_stage import NAME, TOPIC, Stage, until

REGULAR = "persistent://public/default/partitioned"
COUNT = 300

Trouble = Callable[[Stage, Random], Awaitable[None]]


async def texts(pages: AsyncIterator[RangePage]) -> list[bytes]:
    return [value async for page in pages for value in of(page)]


def of(page: RangePage) -> list[bytes]:
    found: list[bytes] = page.record_batch().column("value").to_pylist()
    return found


async def read_all(ranges: Ranges) -> list[bytes]:
    """Everything there is, parents before children."""
    found: list[bytes] = []
    layout = await ranges.layout()
    for number, state in (await ranges.states(each.number for each in layout.segments)).items():
        found += await texts(ranges.read(number, state.first, state.stable))
    return found


async def send(client: Client, count: int = COUNT, *, first: int = 0, batch: int = 7) -> None:
    async with await client.producer(NAME, batch_messages=batch) as producer:
        numbers = range(first, first + count)
        await asyncio.gather(*(producer.send(b"%d" % n, key=f"k{n % 16}") for n in numbers))


async def unload(stage: Stage, _: Random) -> None:
    """Every segment goes, to be loaded by whoever is asked."""
    for host in stage.world.ready:
        await host.ask(unload_all)


async def unload_all(server: Server) -> None:
    for name in list(server.context.topics.loaded):
        await server.context.topics.unload(name)


@pytest.mark.parametrize(
    ("troubles", "brokers", "disk"),
    [
        ((unload, cut_links), "a", False),
        ((restart, restart), "a", True),
        ((replace, unload, replace), "ab", False),
        ((split, merge, split), "ab", False),
    ],
    ids=["unload", "restart", "two-brokers", "layout"],
)
def test_a_planned_range_is_read_whatever_happens(
    troubles: tuple[Trouble, ...], brokers: str, disk: bool
) -> None:
    chance = Random(3)

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage, operation_timeout=120) as client:
            await send(client)
            ranges = await client.ranges(NAME)
            planned = await ranges.states([0, 1])
            found: list[bytes] = []
            left = list(troubles)
            for number, state in planned.items():
                async for page in ranges.read(number, state.first, state.stable):
                    found += of(page)
                    if left:
                        await left.pop(0)(stage, chance)
            assert not left
            assert sorted(found, key=int) == [b"%d" % n for n in range(COUNT)]
            again = await ranges.states([0, 1])
            assert {n: each.stable for n, each in again.items()} == {
                n: each.stable for n, each in planned.items()
            }, "a position changes only with messages"

    play(story, brokers=brokers, disk=disk, range_page_bytes=400)


def test_a_reader_that_stops_leaves_nothing_behind() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client)
            ranges = await client.ranges(NAME)
            (state,) = (await ranges.states([0])).values()
            pages = ranges.read(0, ORIGIN, state.stable)
            assert of(await anext(pages))
            await pages.aclose()
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert not [name for name in names if "ranges of" in name]

    play(story, range_page_bytes=400)


def test_news_come_from_every_broker_and_over_its_death() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(4)
        async with new_client(stage, operation_timeout=60) as client:
            ranges = await client.ranges(NAME)
            layout = await ranges.layout()
            at = dict.fromkeys(range(4), ORIGIN)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            assert not await ranges.news(at, layout.epoch, wait_ms=500)
            assert 0.5 <= loop.time() - begun < 0.7
            polling = asyncio.create_task(ranges.news(at, layout.epoch, wait_ms=60_000))
            await asyncio.sleep(1)
            begun = loop.time()
            await send(client, 1)
            assert await polling
            assert loop.time() - begun < 1
            at = {n: each.stable for n, each in (await ranges.states(range(4))).items()}
            polling = asyncio.create_task(ranges.news(at, layout.epoch, wait_ms=60_000))
            await asyncio.sleep(1)
            await replace(stage, Random(5))
            await replace(stage, Random(6))
            assert not polling.done()
            await send(client, 16)
            assert await polling
            at = {n: each.stable for n, each in (await ranges.states(range(4))).items()}
            assert not await ranges.news(at, layout.epoch, wait_ms=100)
            for host in stage.world.hosts.values():
                await host.kill()
            polling = asyncio.create_task(ranges.news(at, layout.epoch, wait_ms=100))
            await asyncio.sleep(5)
            for host in stage.world.hosts.values():
                assert await host.start()
            assert not await polling, "it has outlived that nobody answered"
            await stage.split(0)
            assert await ranges.news(at, layout.epoch, wait_ms=60_000)
            assert await ranges.news({}, layout.epoch, wait_ms=60_000)

    play(story, brokers="ab")


def test_a_poll_that_may_not_wait_looks_all_the_same() -> None:
    """Also at a segment that has to be loaded first."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client, 1)
            ranges = await client.ranges(NAME)
            (state,) = (await ranges.states([0])).values()
            epoch = (await ranges.layout()).epoch
            for _ in range(2):
                await unload(stage, Random(1))
                assert await ranges.news({0: ORIGIN}, epoch, wait_ms=0)
                await unload(stage, Random(1))
                assert not await ranges.news({0: state.stable}, epoch, wait_ms=0)

    play(story)


def polls_of(server: Server) -> int:
    return sum(len(each.scalable.polls) for each in server.context.sessions)


def test_a_poll_waits_for_signals_and_ends_with_its_connection() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        client = new_client(stage)
        ranges = await client.ranges(NAME)
        epoch = (await ranges.layout()).epoch
        polling = asyncio.create_task(ranges.news({0: ORIGIN}, epoch, wait_ms=60_000))
        await asyncio.sleep(1)

        async def waiting(server: Server) -> tuple[int, int]:
            (topic,) = (each for each in server.context.topics.loaded.values())
            assert hasattr(topic, "readable")
            return polls_of(server), topic.readable.waiters

        assert await stage.host.ask(waiting) == (1, 1)
        polling.cancel()
        again = asyncio.create_task(ranges.news({0: ORIGIN}, epoch, wait_ms=60_000))
        await asyncio.sleep(1)
        assert await stage.host.ask(waiting) == (1, 1), "it took the place of the first"
        again.cancel()
        await client.close()
        await asyncio.sleep(1)
        assert await stage.host.ask(waiting) == (0, 0)

    play(story)


# --- a subscription that follows


def layout_now(host: Host) -> set[int]:
    assert host.server is not None
    record = host.server.context.scalable.layouts.cached(TOPIC)
    assert record is not None
    assert record.layout is not None
    return {each.segment_id for each in record.layout.segments}


async def backlogs(stage: Stage, name: str) -> dict[str, int]:
    """As statistics show them."""

    async def found(server: Server) -> dict[str, int]:
        return {
            str(topic.name): found.msg_backlog
            for topic in server.context.topics.loaded.values()
            if (found := topic.stats().subscriptions.get(name)) is not None
        }

    return await stage.host.ask(found)


@pytest.mark.parametrize("follows", [True, False])
def test_a_sealed_segment_is_kept_until_the_subscription_has_passed_it(follows: bool) -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await send(client, 40, batch=1)
            ranges = await client.ranges(NAME)
            (state,) = (await ranges.states([0])).values()
            if follows:
                await ranges.move_cursor("spark", {0: ORIGIN}, initial="earliest")
                assert await backlogs(stage, "spark") == {
                    (await ranges.layout()).segments[0].name: 40
                }
            await stage.split(0)
            await asyncio.sleep(60)
            assert (0 in layout_now(stage.host)) == follows
            if not follows:
                with pytest.raises(RangeLost, match="segment 0"):
                    await texts(ranges.read(0, state.first, state.stable))
                assert await ranges.states([1, 2])
                return
            await ranges.move_cursor(
                "spark", {0: RangePosition(state.stable.ledger, 30)}, initial="latest"
            )
            assert sum((await backlogs(stage, "spark")).values()) == 10
            await send(client, 16, first=40, batch=1)
            assert sum((await backlogs(stage, "spark")).values()) == 26, "children have it too"
            await asyncio.sleep(60)
            assert 0 in layout_now(stage.host)
            await ranges.move_cursor("spark", {}, drained=[0], initial="latest")
            await until(lambda: 0 not in layout_now(stage.host), 60, "the segment is pruned")
            # What is gone was passed: no mistake to name it again.
            await ranges.move_cursor("spark", {}, drained=[0], initial="latest")

    play(story, scalable_sealed_seconds=10.0, scalable_auto_scale_interval_seconds=5.0)


def test_what_was_committed_is_read_after_the_headers_are_gone() -> None:
    """R5: nothing is taken for aborted because nobody remembers its transaction."""

    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            async with client.transaction() as txn:
                await producer.send(b"committed", txn=txn)
            aborted = await client.transaction()
            await producer.send(b"aborted", txn=aborted)
            await aborted.abort()
            await producer.send(b"plain")
            ranges = await client.ranges(NAME)
            assert await read_all(ranges) == [b"committed", b"plain"]
            await asyncio.sleep(300)

            async def headers(server: Server) -> int:
                store = server.context.scalable.store.metadata
                return len(await store.scan_keys("/txn/id"))

            assert await stage.host.ask(headers) == 0
            assert await read_all(ranges) == [b"committed", b"plain"]
            await restart(stage, Random(1))
            assert await read_all(ranges) == [b"committed", b"plain"]

    play(story, disk=True, txn_retention_seconds=5.0, txn_collect_seconds=1.0)


def test_partitions_are_segments() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)

        async def create(server: Server) -> None:
            await server.context.topics.create_partitioned(name, 2)

        async def grow(server: Server) -> None:
            await server.context.topics.grow(name, 3)

        await stage.host.ask(create)
        async with new_client(stage) as client:
            async with await client.producer(REGULAR, batching=False) as producer:
                for number in range(20):
                    await producer.send(b"%d" % number, key=f"k{number}")
            ranges = await client.ranges(REGULAR)
            layout = await ranges.layout()
            assert [(each.number, each.name) for each in layout.segments] == [
                (number, f"{REGULAR}-partition-{number}") for number in (0, 1)
            ]
            assert sorted(await read_all(ranges), key=int) == [b"%d" % n for n in range(20)]
            states = await ranges.states([0, 1])
            at = {number: state.stable for number, state in states.items()}
            await ranges.move_cursor("spark", at, initial="earliest")
            assert set((await backlogs(stage, "spark")).values()) == {0}
            assert not await ranges.news(at, layout.epoch, wait_ms=10)
            await stage.host.ask(grow)
            assert await ranges.news(at, layout.epoch, wait_ms=10)
            after = await ranges.layout()
            assert (len(after.segments), after.creation_id) == (3, layout.creation_id)

    play(story)


def test_what_was_migrated_is_read_before_what_came_afterwards() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)

        async def create(server: Server) -> None:
            await server.context.topics.create_partitioned(name, 2)

        await stage.host.ask(create)
        async with new_client(stage) as client:
            async with await client.producer(REGULAR, batching=False) as producer:
                for number in range(10):
                    await producer.send(b"%d" % number, key=f"k{number}")
            before = await (await client.ranges(REGULAR)).layout()
            await stage.ask(lambda scalable: scalable.migrate(name))
            async with await client.producer(REGULAR, batching=False) as producer:
                await producer.send(b"10")
            with pytest.raises(RangeLost, match="another one has its name"):
                await client.ranges(REGULAR, creation_id=before.creation_id)
            ranges = await client.ranges(REGULAR)
            layout = await ranges.layout()
            assert layout.topic == str(name.scalable_topic())
            old = [each for each in layout.segments if each.is_sealed]
            assert [each.name for each in old] == [each.name for each in before.segments]
            assert all(each.parents == (0, 1) for each in layout.segments if not each.is_sealed)
            found = await read_all(ranges)
            assert sorted(found[:10], key=int) == [b"%d" % n for n in range(10)]
            assert found[10:] == [b"10"]

    play(story)


def test_a_time_of_delivery_does_not_change_a_range() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            await producer.send(b"later", deliver_after=3600)
            await producer.send(b"now")
            assert await read_all(await client.ranges(NAME)) == [b"later", b"now"]

    play(story)
