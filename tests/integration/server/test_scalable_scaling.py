"""Auto-scale end to end on virtual time: real brokers, real traffic, nobody who asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.simulation.scalable.producer import ScalableProducer
from magnetar.model.segments import SegmentLayout
from tests.integration.server.scalable_stage import TOPIC, Stage, owned, play, read_all, send, until

SPLIT_RATE = 8
MERGE_RATE = 2
INTERVAL_S = 60.0
REPORT_S = 10.0
COOLDOWN_S = 60.0
MERGE_S = 300.0
"""The window in which segments must be cold, and the pause between merges."""

LIMITS: dict[str, Any] = {
    "scalable_split_msg_rate_in": SPLIT_RATE,
    "scalable_merge_msg_rate_in": MERGE_RATE,
}


async def traffic(
    producer: ScalableProducer, per_second: float, seconds: float, key: Callable[[int], str]
) -> None:
    for number in range(int(per_second * seconds)):
        await producer.send(key(number), b"m")
        await asyncio.sleep(1 / per_second)
    await producer.flush()


def spread(number: int) -> str:
    return f"k{number % 97}"


def layout_now(stage: Stage) -> SegmentLayout:
    record = stage.host.server.context.scalable.layouts.cached(TOPIC)
    assert record is not None
    assert record.layout is not None
    return record.layout.layout()


@pytest.mark.slow
def test_an_overloaded_segment_splits_within_the_cool_down_and_merges_back() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(auto_scale=True)
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links) as consumer,
        ):
            await asyncio.sleep(COOLDOWN_S)
            load = asyncio.create_task(traffic(producer, 1.6 * SPLIT_RATE, 240, spread))
            took = await until(lambda: layout_now(stage).epoch == 1, 300, "a split")
            assert took <= INTERVAL_S + REPORT_S + 5
            await load
            assert len(layout_now(stage).active) == 2, "two segments can take it"
            await read_all(stage, consumer)
            await until(lambda: len(layout_now(stage).active) == 1, 3 * MERGE_S, "a merge")
            layout = layout_now(stage)
            assert layout.epoch == 2
            await asyncio.sleep(MERGE_S)
            assert layout_now(stage).epoch == 2, "at rest nothing changes"
            await send(producer, 30)
            await read_all(stage, consumer)

    play(story, **LIMITS)


@pytest.mark.slow
def test_a_hot_key_does_not_cause_endless_splits() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(auto_scale=True)
        async with stage.process() as links, stage.producer(links) as producer:
            await traffic(producer, 2 * SPLIT_RATE, 240, lambda number: "hot")
            first = layout_now(stage).epoch
            assert first <= 1
            await traffic(producer, 2 * SPLIT_RATE, 240, lambda number: "hot")
            assert layout_now(stage).epoch == first
        stage.is_complete = False

    play(story, **LIMITS)


def test_consumers_above_the_segments_have_one_split_and_get_a_segment_each() -> None:
    """Defect 3: the split that a consumer causes helps that consumer."""

    async def story(stage: Stage) -> None:
        await stage.create(auto_scale=True)
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.stream(links, "s1") as first,
        ):
            await send(producer, 20)
            await read_all(stage, first)
            await asyncio.sleep(COOLDOWN_S)
            async with stage.stream(links, "s2") as second:
                await until(lambda: layout_now(stage).epoch == 1, COOLDOWN_S + INTERVAL_S)
                await until(lambda: sorted(owned(first) + owned(second)) == [1, 2], 5)
                assert len(owned(first)) == len(owned(second)) == 1
                await send(producer, 40)
                await read_all(stage, first, second)

    play(story)


@pytest.mark.slow
def test_a_restarted_broker_scales_and_prunes_though_nobody_asks_it_anything() -> None:
    """Defect 15: controllers are there as soon as their broker is."""

    async def story(stage: Stage) -> None:
        await stage.create(auto_scale=True)
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.queue(links) as consumer,
        ):
            await send(producer, 20)
            await read_all(stage, consumer)
        await stage.host.kill()
        assert await stage.host.start()
        async with stage.process() as links, stage.producer(links, "q") as producer:
            load = asyncio.create_task(traffic(producer, 2 * SPLIT_RATE, 150, spread))
            await until(lambda: layout_now(stage).epoch == 1, 300, "a split")
            await load
        # A new controller, which sees the sealed segment for the first time.
        await stage.host.kill()
        assert await stage.host.start()
        async with stage.process() as links, stage.queue(links) as consumer:
            await read_all(stage, consumer)
        await until(lambda: 0 not in layout_now(stage).segments, 400, "the segment is pruned")

    play(story, disk=True, scalable_sealed_seconds=120.0, **LIMITS)


@pytest.mark.slow
def test_a_load_around_the_threshold_does_not_thrash() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(auto_scale=True)
        async with stage.process() as links, stage.producer(links) as producer:
            epochs = []
            for number in range(8):
                rate = SPLIT_RATE * (1.3 if number % 2 else 0.5)
                await traffic(producer, rate, 90, spread)
                epochs.append(layout_now(stage).epoch)
            assert epochs[-1] <= 2, epochs
        stage.is_complete = False

    play(story, **LIMITS)
