"""The consumers of the test tools on a real server: splits, merges, cuts and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bench.split import Served, next_merge, next_split, parts_of, serving
from harness.limits import PATIENCE_S, within
from harness.simulation.scalable.clients import (
    FROM_LATEST,
    CheckpointConsumer,
    QueueConsumer,
    StreamConsumer,
)
from harness.simulation.scalable.history import Event, Receipted, violations
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded

PATH = "public/default/clients"
TOPIC = f"topic://{PATH}"
KEYS = 40

Consumer = QueueConsumer | StreamConsumer | CheckpointConsumer

pytestmark = pytest.mark.slow


class _Scene:
    def __init__(self, served: Served, links: Links) -> None:
        self.served = served
        self.links = links
        self.events: list[Event] = []
        self.record = self.events.append

    @property
    def receipts(self) -> int:
        return sum(isinstance(event, Receipted) for event in self.events)

    async def change(self, choose: Callable[..., str], times: int = 1) -> None:
        for _ in range(times):
            record = await asyncio.to_thread(self.served.admin, "GET", PATH)
            path = f"{PATH}/{choose(parts_of(record))}"
            await asyncio.to_thread(self.served.admin, "POST", path)


async def _send(producer: ScalableProducer, count: int) -> None:
    for number in range(count):
        await producer.send(f"k{number % KEYS}", b"payload")
        if number % 25 == 0:
            await asyncio.sleep(0.005)
    await producer.flush()


async def _drain(scene: _Scene, *consumers: Consumer) -> int:
    """Read with all of them together until everything came; how much each got, in sum."""
    seen: set[int] = set()

    async def read(consumer: Consumer) -> None:
        while len(seen) < scene.receipts:
            try:
                delivery = await consumer.receive(0.1)
            except DeadlineExceeded:
                continue
            seen.add(delivery.sequence)
            if not isinstance(consumer, CheckpointConsumer):
                consumer.ack(delivery)

    async with within("all messages"):
        await asyncio.gather(*map(read, consumers))
    return len(seen)


def _run(folder: Path, scene: Callable[[_Scene], Coroutine[Any, Any, None]]) -> None:
    async def whole(served: Served) -> None:
        async with Links(served.url, wait_s=PATIENCE_S) as links:
            made = _Scene(served, links)
            await scene(made)
            assert violations(made.events) == []

    with serving(folder) as served:
        served.create(PATH)
        asyncio.run(whole(served))


def test_queue_and_stream_over_changes_and_cut_connections(tmp_path: Path) -> None:
    async def story(scene: _Scene) -> None:
        async with (
            ScalableProducer(scene.links, TOPIC, "p", record=scene.record) as producer,
            QueueConsumer(scene.links, TOPIC, "q", "q1", record=scene.record) as queue,
            StreamConsumer(scene.links, TOPIC, "s", "s1", record=scene.record) as first,
            StreamConsumer(scene.links, TOPIC, "s", "s2", record=scene.record) as second,
        ):
            sending = asyncio.create_task(_send(producer, 1500))
            for choose in (next_split, next_split, next_merge, next_merge):
                await scene.change(choose)
                scene.links.cut()
            await sending
            await asyncio.gather(_drain(scene, queue), _drain(scene, first, second))

    _run(tmp_path, story)


def test_a_checkpoint_is_restored_after_splits_and_a_merge(tmp_path: Path) -> None:
    async def story(scene: _Scene) -> None:
        async with ScalableProducer(scene.links, TOPIC, "p", record=scene.record) as producer:
            await _send(producer, 300)
            async with CheckpointConsumer(scene.links, TOPIC, "c", record=scene.record) as reader:
                for _ in range(120):
                    await reader.receive()
                checkpoint = reader.checkpoint()
                for _ in range(50):
                    await reader.receive()
            await scene.change(next_split, 2)
            await _send(producer, 300)
            await scene.change(next_merge)
            await _send(producer, 100)
            async with CheckpointConsumer(
                scene.links, TOPIC, "c", start=checkpoint, record=scene.record
            ) as reader:
                sequences = [(await reader.receive()).sequence for _ in range(580)]
                assert len(set(sequences)) == 580
                with pytest.raises(DeadlineExceeded):
                    await reader.receive(0.2)

    _run(tmp_path, story)


def test_a_group_of_checkpoint_consumers_reads_everything(tmp_path: Path) -> None:
    async def story(scene: _Scene) -> None:
        async with (
            ScalableProducer(scene.links, TOPIC, "p", record=scene.record) as producer,
            CheckpointConsumer(scene.links, TOPIC, "a", group="g", record=scene.record) as reader,
        ):
            await _send(producer, 200)
            await scene.change(next_split)
            await _send(producer, 200)
            assert await _drain(scene, reader) == 400

    _run(tmp_path, story)


def test_consumers_that_begin_at_the_latest_message_lose_nothing_after_it(tmp_path: Path) -> None:
    async def story(scene: _Scene) -> None:
        async with ScalableProducer(scene.links, TOPIC, "p", record=scene.record) as producer:
            await _send(producer, 100)
            await scene.change(next_split)
            async with (
                QueueConsumer(
                    scene.links, TOPIC, "q", "q1", earliest=False, record=scene.record
                ) as queue,
                CheckpointConsumer(
                    scene.links, TOPIC, "c", start=FROM_LATEST, record=scene.record
                ) as reader,
            ):
                checkpoint = reader.checkpoint()
                await scene.change(next_split)
                await _send(producer, 100)
                deliveries = [await queue.receive() for _ in range(100)]
                for delivery in deliveries:
                    queue.ack(delivery)
                assert {each.sequence for each in deliveries} == set(range(100, 200))
                sequences = {(await reader.receive()).sequence for _ in range(100)}
                assert sequences == set(range(100, 200))
            async with CheckpointConsumer(
                scene.links, TOPIC, "c", start=checkpoint, record=scene.record
            ) as reader:
                sequences = {(await reader.receive()).sequence for _ in range(100)}
                assert sequences == set(range(100, 200))

    _run(tmp_path, story)
