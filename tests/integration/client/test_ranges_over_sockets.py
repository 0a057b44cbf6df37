"""Ranges over real sockets, with a server in this process that stores on disk."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S
from magnetar.blocking import Client as BlockingClient
from magnetar.client.client import Client
from magnetar.client.ranges.ranges import ORIGIN, RangePosition, Ranges
from magnetar.errors import (
    AlreadyClosed,
    MagnetarError,
    NotAllowed,
    RangeLost,
    TopicNotFound,
    WireCode,
)
from magnetar.model.names import TopicName
from tests.integration.client.service import service
from tests.unit.server.serving import LIMITS, connected, published, serving

REGULAR = "persistent://public/default/regular"
SCALABLE = "topic://public/default/scalable"
TOPICS = [REGULAR, SCALABLE]


async def values(
    ranges: Ranges, number: int, start: RangePosition, end: RangePosition
) -> list[bytes]:
    """The messages of a range, by its columns."""
    found: list[bytes] = []
    async for page in ranges.read(number, start, end):
        found += page.record_batch().column("value").to_pylist()
    return found


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("topic", TOPICS)
def test_what_was_sent_is_read(tmp_path: Path, topic: str, batching: bool) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            async with await client.producer(topic, batching=batching) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n, key="k") for n in range(500)))
            ranges = await client.ranges(topic)
            layout = await ranges.layout()
            assert [each.number for each in layout.segments] == [0]
            (state,) = (await ranges.states([0])).values()
            assert state.first == ORIGIN
            assert not state.is_sealed
            expected = [b"%d" % n for n in range(500)]
            assert await values(ranges, 0, state.first, state.stable) == expected
            assert await values(ranges, 0, state.stable, state.stable) == []

    asyncio.run(story())


def test_a_topic_that_is_not_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            for topic in TOPICS:
                with pytest.raises(TopicNotFound):
                    await client.ranges(topic)

    asyncio.run(story())


def test_an_open_transaction_holds_the_end_and_an_aborted_one_is_not_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            producer = await client.producer(SCALABLE)
            await producer.send(b"before")
            ranges = await client.ranges(SCALABLE)
            before = (await ranges.states([0]))[0]
            txn = await client.transaction()
            await producer.send(b"aborted", txn=txn)
            await producer.send(b"behind")
            assert (await ranges.states([0]))[0] == before
            tail = (await ranges.states([0], isolation="uncommitted"))[0].stable
            assert tail > before.stable
            assert not await ranges.news({0: before.stable}, 0, wait_ms=10)
            polling = asyncio.create_task(ranges.news({0: before.stable}, 0, wait_ms=60_000))
            await asyncio.sleep(0)
            await txn.abort()
            assert await polling
            after = (await ranges.states([0]))[0]
            assert after.stable == tail
            assert await values(ranges, 0, ORIGIN, after.stable) == [b"before", b"behind"]
            assert await values(ranges, 0, before.stable, after.stable) == [b"behind"]

    asyncio.run(story())


def test_a_split_is_news_and_its_parent_ends(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            producer = await client.producer(SCALABLE)
            await producer.send(b"parent")
            ranges = await client.ranges(SCALABLE)
            before = await ranges.layout()
            stable = (await ranges.states([0]))[0].stable
            polling = asyncio.create_task(ranges.news({0: stable}, before.epoch, wait_ms=60_000))
            await asyncio.sleep(0)
            await server.context.scalable.split(TopicName.parse(SCALABLE), 0)
            assert await polling
            after = await ranges.layout()
            assert (after.epoch, after.creation_id) == (before.epoch + 1, before.creation_id)
            assert [(each.number, each.parents) for each in after.segments] == [
                (0, ()),
                (1, (0,)),
                (2, (0,)),
            ]
            began = [each.created_ms for each in after.segments]
            assert 0 < began[0] <= began[1] == began[2]
            states = await ranges.states([0, 1, 2])
            assert [state.is_sealed for state in states.values()] == [True, False, False]
            assert states[0].stable == stable
            assert states[1].stable == ORIGIN
            assert await values(ranges, 0, ORIGIN, stable) == [b"parent"]

    asyncio.run(story())


def test_a_topic_that_was_made_anew_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            producer = await client.producer(REGULAR)
            await producer.send(b"old")
            ranges = await client.ranges(REGULAR)
            layout, state = await ranges.layout(), (await ranges.states([0]))[0]
            await producer.close()
            await server.context.topics.delete(TopicName.parse(REGULAR), force=True)
            async with await client.producer(REGULAR) as another:
                await another.send(b"new")
            with pytest.raises(RangeLost, match="begins at"):
                await values(ranges, 0, RangePosition(state.stable.ledger, 0), state.stable)
            with pytest.raises(RangeLost, match="another one has its name"):
                await client.ranges(REGULAR, creation_id=layout.creation_id)

    asyncio.run(story())


def test_threads_read_ranges(tmp_path: Path) -> None:
    with service(tmp_path) as url, BlockingClient(url, operation_timeout=PATIENCE_S) as client:
        with client.producer(SCALABLE) as producer:
            for number in range(100):
                producer.send(b"%d" % number)
        ranges = client.ranges(SCALABLE)
        (state,) = ranges.states([0]).values()
        assert ranges.news({0: ORIGIN}, ranges.layout().epoch, wait_ms=0)
        found = [
            value
            for page in ranges.read(0, state.first, state.stable)
            for value in page.record_batch().column("value").to_pylist()
        ]
        assert found == [b"%d" % number for number in range(100)]


def test_a_message_in_chunks_is_where_its_last_one_is(tmp_path: Path) -> None:
    async def story() -> None:
        large = bytes(range(256)) * 40
        async with (
            serving(tmp_path, max_message_bytes=2000) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
            await client.producer(REGULAR, chunking=True, batching=False) as producer,
            await client.producer(REGULAR, batching=False) as other,
        ):
            await producer.send(b"before")
            sending = asyncio.gather(producer.send(large), *(other.send(b"x") for _ in range(50)))
            await sending
            await producer.send(b"behind")
            ranges = await client.ranges(REGULAR)
            (state,) = (await ranges.states([0])).values()
            found = await values(ranges, 0, ORIGIN, state.stable)
            assert sorted(found) == sorted([b"before", large, b"behind", *[b"x"] * 50])
            assert (await ranges.counts({0: (ORIGIN, state.stable)}))[0].messages == 53
            cuts = [ORIGIN]
            while cuts[-1] < state.stable:
                cuts.append(await ranges.cut(0, cuts[-1], state.stable, messages=3))
            parts = [await values(ranges, 0, *each) for each in pairwise(cuts)]
            assert [value for part in parts for value in part] == found
            assert {len(part) for part in parts[:-1]} == {3}

    asyncio.run(story())


def test_polls_of_a_connection_are_limited(tmp_path: Path) -> None:
    limits = replace(LIMITS, connection_range_polls_max=2)

    async def story() -> None:
        async with serving(tmp_path, limits=limits) as server:
            driver = await connected(server)
            await published(driver, 1, topic=REGULAR)
            at = {"ledger_id": 2**40, "entry_id": 0}
            fields: dict[str, Any] = {
                "topic": REGULAR,
                "epoch": 0,
                "places": [{"topic": REGULAR, "position": at}],
            }

            def poll(number: int, wait_ms: int = 60_000) -> asyncio.Task[Any]:
                asking = driver.request("RANGE_NEWS", poll_id=number, wait_ms=wait_ms, **fields)
                return asyncio.create_task(asking)

            first, second = poll(1), poll(2)
            with pytest.raises(MagnetarError) as refused:
                await poll(3)
            assert refused.value.wire_code == WireCode.TOO_MANY_REQUESTS
            replacing = poll(1, wait_ms=1)
            assert not (await first).is_news, "another one has its number"
            assert not (await replacing).is_news
            assert not (await poll(3, wait_ms=1)).is_news, "there is room again"
            await driver.close()
            with pytest.raises(MagnetarError):
                await second

    asyncio.run(story())


def test_a_page_is_never_empty_for_being_small(tmp_path: Path) -> None:
    """One entry comes whatever its size; the rest waits for the next page."""
    limits = replace(LIMITS, range_page_bytes=10)

    async def story() -> None:
        async with (
            serving(tmp_path, limits=limits) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
            await client.producer(REGULAR, batching=False) as producer,
        ):
            sent = [b"%d" % number * 100 for number in range(10)]
            for each in sent:
                await producer.send(each)
            ranges = await client.ranges(REGULAR)
            (state,) = (await ranges.states([0])).values()
            pages = [page async for page in ranges.read(0, ORIGIN, state.stable)]
            assert [len(page) for page in pages] == [1] * 10
            assert await values(ranges, 0, ORIGIN, state.stable) == sent

    asyncio.run(story())


def test_names_that_have_no_ranges(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            serving(tmp_path) as server,
            Client(server.service_url, operation_timeout=PATIENCE_S) as client,
        ):
            for topic in ("non-persistent://public/default/x", f"{SCALABLE}/0000-ffff-0"):
                name = topic.replace("topic://", "segment://")
                with pytest.raises(NotAllowed, match="use topic://"):
                    await client.ranges(name)

    asyncio.run(story())


def test_threads_see_the_end_of_their_client_and_may_stop_early(tmp_path: Path) -> None:
    with service(tmp_path) as url:
        client = BlockingClient(url, operation_timeout=PATIENCE_S)
        with client.producer(REGULAR, batching=False) as producer:
            for number in range(10):
                producer.send(b"%d" % number * 400_000)
        ranges = client.ranges(REGULAR)
        (state,) = ranges.states([0]).values()
        early = ranges.read(0, ORIGIN, state.stable)
        assert len(next(early)) == 2
        early.close()  # type: ignore[attr-defined]
        late = ranges.read(0, ORIGIN, state.stable)
        next(late)
        client.close()
        with pytest.raises(AlreadyClosed):
            list(late)


def test_positions_travel_to_other_processes() -> None:
    position = RangePosition(3, 4, 5)
    assert pickle.loads(pickle.dumps(position)) == position
    assert RangePosition(3, 4, 4) < position < RangePosition(3, 5)
