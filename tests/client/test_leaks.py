"""A thousand times open and closed: no task, no connection, no memory is left.

On the simulated network, so that it is quick; `test_over_sockets.py` counts sockets.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path
from typing import Final

import pytest

import magnetar.client
from magnetar.client.checkpoint_consumer import FROM_EARLIEST
from magnetar.client.client import Client
from magnetar.model.ids import EARLIEST
from magnetar.model.subscriptions import InitialPosition
from tests.client.stage import new_client, play
from tests.server.scalable_stage import NAME, Stage

FIRST: Final = InitialPosition.EARLIEST
REGULAR: Final = "persistent://public/default/plain"
WARM: Final = 100
GROWTH_BYTES_MAX: Final = 64 * 1024
"""What the client's own code may hold more after all turns than after the first hundred."""

CLIENT_FILES: Final = str(Path(magnetar.client.__file__).parent / "*")


async def use_producers(client: Client, turn: int) -> None:
    producer = await client.producer(NAME if turn % 2 else REGULAR)
    await producer.send(b"x", key=f"k{turn % 5}")
    if turn % 3:
        await producer.close()


async def use_consumers(client: Client, turn: int) -> None:
    """One of each kind; every second time they are left for the client to close."""
    made = [
        await client.queue_consumer(NAME, "queue", initial_position=FIRST),
        await client.stream_consumer(NAME, "stream", initial_position=FIRST, name="m"),
        await client.checkpoint_consumer(NAME, start=FROM_EARLIEST),
        await client.consumer(REGULAR, "regular", initial_position=FIRST),
        await client.reader(REGULAR, start=EARLIEST),
    ]
    for consumer in made:
        await consumer.receive_many(3, timeout=0.01)
    if turn % 2:
        for consumer in made:
            await consumer.close()


async def use_transactions(client: Client, turn: int) -> None:
    producer = await client.producer(NAME)
    queue = await client.queue_consumer(NAME, "txn", initial_position=FIRST)
    txn = await client.transaction(timeout=5)
    await producer.send(b"x", txn=txn)
    for message in await queue.receive_many(2, timeout=0.01):
        queue.ack(message, txn=txn)
    if turn % 3 == 0:
        await txn.commit()
    elif turn % 3 == 1:
        await txn.abort()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("use", [use_producers, use_consumers, use_transactions])
def test_a_thousand_clients_leave_nothing_behind(use: object) -> None:
    turns = 1000

    async def story(stage: Stage) -> None:
        await stage.create(1)
        before = client_tasks()
        held: list[int] = []
        tracemalloc.start()
        try:
            for turn in range(turns):
                async with new_client(stage) as client:
                    await use(client, turn)  # type: ignore[operator]
                assert client.connections.count == 0
                del client
                if turn + 1 in (WARM, turns):
                    held.append(held_by_client())
        finally:
            tracemalloc.stop()
        await asyncio.sleep(60)
        assert client_tasks() <= before
        assert not [link for link in stage.host.network.links if not link.is_over]
        assert held[1] - held[0] < GROWTH_BYTES_MAX, held
        alive = [each for each in gc.get_objects() if isinstance(each, Client)]
        assert not alive

    play(story)


def client_tasks() -> set[str]:
    """Names of all tasks: those of clients have names of their own."""
    return {task.get_name() for task in asyncio.all_tasks()}


def held_by_client() -> int:
    """Bytes that the client's code has allocated and that are still there."""
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, CLIENT_FILES)])
    return sum(each.size for each in found.traces)
