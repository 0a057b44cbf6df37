"""Any valid command in any order from several connections: one answer each, and no bug shows.

A seed replays the same commands; the interleaving with the server is the machine's.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from magnetar.broker.topic.topic import Topic
from magnetar.model.names import TopicName
from magnetar.runtime import logs
from magnetar.server.app import Server
from tests.integration.server.chaos import ChaosClient, disturb
from tests.unit.server.serving import connected, run, serving

CLIENTS = 4
STEPS = 600


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logs.configure(text, level="info")
    yield text
    logging.getLogger(logs.ROOT).removeHandler(handler)


@pytest.mark.parametrize("seed", range(3))
def test_commands_in_any_order(tmp_path: Path, log: io.StringIO, seed: int) -> None:
    _run(tmp_path, log, seed, disturbed=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_commands_in_any_order_while_topics_come_and_go(
    tmp_path: Path, log: io.StringIO, seed: int
) -> None:
    _run(tmp_path, log, seed, disturbed=True)


def _run(folder: Path, log: io.StringIO, seed: int, *, disturbed: bool) -> None:
    try:
        run(_scene(folder, seed, disturbed=disturbed))
    except Exception as error:
        error.add_note(log.getvalue())
        raise
    lines = log.getvalue().splitlines()
    assert not [line for line in lines if " info " not in line]


async def _scene(folder: Path, seed: int, *, disturbed: bool) -> None:
    async with serving(folder) as server:
        await server.topics.create_partitioned(TopicName.parse("parts"), 2)
        random = Random(seed)
        clients = [
            ChaosClient(Random(random.getrandbits(64)), lambda: connected(server))
            for _ in range(CLIENTS)
        ]
        stop = asyncio.Event()
        disturbance = asyncio.create_task(disturb(server, Random(seed), stop))
        if not disturbed:
            stop.set()
        try:
            await asyncio.gather(*(client.run(STEPS) for client in clients))
        finally:
            stop.set()
            await disturbance
        await server.context.all_ended()
        _check_nothing_is_left(server)


def _check_nothing_is_left(server: Server) -> None:
    for topic in server.topics.loaded.values():
        assert not topic.producers.connected, topic.name
        assert not topic.producers.waiting, topic.name
        assert not topic.in_use, topic.name
        topic.producers.check_invariants()
        for subscription in topic.subscriptions.values():
            assert isinstance(topic, Topic), f"{topic.name} keeps {subscription.name}"
            assert subscription.durable, f"{topic.name} keeps {subscription.name}"
