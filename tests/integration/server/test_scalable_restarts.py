"""Scalable topics over restarts of real processes: of the server, and of its clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from bench.split import Served, next_merge, next_split, parts_of, serving
from harness.limits import PATIENCE_S
from harness.simulation.scalable.clients import CheckpointConsumer, QueueConsumer, StreamConsumer
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded
from tests.integration.server.scalable_stage import owned, read, send, until

PATH = "public/default/restarts"
TOPIC = f"topic://{PATH}"
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def change(served: Served, *choices: object) -> None:
    for choose in choices:
        assert callable(choose)
        parts = parts_of(served.admin("GET", PATH))
        served.admin("POST", f"{PATH}/{choose(parts)}")


def kill(served: Served) -> None:
    os.kill(served.running.pid, signal.SIGKILL)


async def produced(served: Served, count: int, first: int) -> None:
    async with (
        Links(served.url, wait_s=PATIENCE_S) as links,
        ScalableProducer(links, TOPIC, "p", first_sequence=first) as producer,
    ):
        await send(producer, count)


def test_a_checkpoint_is_restored_in_a_new_process_exactly_and_in_order(tmp_path: Path) -> None:
    """Two splits, a merge and a crash of the server after it was taken."""

    async def begin(served: Served) -> tuple[bytes, set[int]]:
        await produced(served, 200, 0)
        async with (
            Links(served.url, wait_s=PATIENCE_S) as links,
            CheckpointConsumer(links, TOPIC, "c") as reader,
        ):
            before = {each.sequence for each in await read(reader, 80)}
            return reader.checkpoint(), before

    with serving(tmp_path) as served:
        served.create(PATH)
        checkpoint, before = asyncio.run(begin(served))
        change(served, next_split, next_split)
        asyncio.run(produced(served, 100, 200))
        change(served, next_merge)
        asyncio.run(produced(served, 100, 300))
        kill(served)
    with serving(tmp_path) as served:
        reader = subprocess.run(
            [sys.executable, "-m", "tests.integration.server.scalable_reader", served.url, TOPIC,
             checkpoint.hex(), "320"],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
    found = json.loads(reader.stdout)
    assert sorted(sequence for _, sequence in found) == sorted(set(range(400)) - before)
    by_key = defaultdict(list)
    for key, sequence in found:
        by_key[key].append(sequence)
    assert all(sequences == sorted(sequences) for sequences in by_key.values())


def test_assignments_and_places_survive_a_crash_of_the_server(tmp_path: Path) -> None:
    """Within the grace period both members have what they had, and all goes on from its place."""

    async def first_life(served: Served) -> dict[str, list[int]]:
        async with (
            Links(served.url, wait_s=PATIENCE_S) as links,
            StreamConsumer(links, TOPIC, "s", "s1") as one,
            StreamConsumer(links, TOPIC, "s", "s2") as two,
            QueueConsumer(links, TOPIC, "q", "q1") as queue,
            ScalableProducer(links, TOPIC, "p") as producer,
        ):
            await until(lambda: len(owned(one)) == len(owned(two)) == 2, 5)
            await send(producer, 100)
            await read(queue, 100)
            for consumer in (one, two):
                await _read_quietly(consumer)
            places = {"s1": owned(one), "s2": owned(two)}
            await until(lambda: not _unsettled(one, two, queue), 5)
            kill(served)
            return places

    async def second_life(served: Served) -> dict[str, list[int]]:
        async with (
            Links(served.url, wait_s=PATIENCE_S) as links,
            StreamConsumer(links, TOPIC, "s", "s2") as two,
        ):
            places = {"s2": owned(two)}
            async with (
                StreamConsumer(links, TOPIC, "s", "s1") as one,
                QueueConsumer(links, TOPIC, "q", "q1") as queue,
                ScalableProducer(links, TOPIC, "p", first_sequence=100) as producer,
            ):
                places["s1"] = owned(one)
                await send(producer, 50)
                again = [each.sequence for each in await read(queue, 50)]
                for consumer in (one, two):
                    again += await _read_quietly(consumer)
                assert sorted(again) == sorted([*range(100, 150)] * 2)
        return places

    with serving(tmp_path) as served:
        served.admin("PUT", f"{PATH}?numInitialSegments=4")
        served.admin("POST", f"{PATH}/autoScalePolicy", {"enabled": False})
        before = asyncio.run(first_life(served))
    with serving(tmp_path) as served:
        assert asyncio.run(second_life(served)) == before


def _unsettled(*consumers: StreamConsumer | QueueConsumer) -> int:
    """Acknowledgements that are not durable yet."""
    return sum(len(feed._acks) for each in consumers for feed in each.feeds.values())


async def _read_quietly(consumer: StreamConsumer) -> list[int]:
    """Everything that is there for it."""
    found = []
    while True:
        try:
            found += [each.sequence for each in await read(consumer, 1, 0.3)]
        except DeadlineExceeded:
            return found
