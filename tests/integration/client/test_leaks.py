"""Many times open and closed: no task, no connection, no object of the client is left.

On the simulated network, so that it is quick; `test_over_sockets.py` counts sockets.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

import magnetar.client
from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.consume.receiving import Receiving
from magnetar.model.ids import EARLIEST
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, Stage

FIRST: Final = InitialPosition.EARLIEST
REGULAR: Final = "persistent://public/default/plain"
CLIENT_FILES: Final = str(Path(magnetar.client.__file__).parent / "*")


async def use(client: Client, turn: int) -> None:
    """A producer, a consumer of some kind, a transaction; some are left for the client to close."""
    topic = NAME if turn % 2 else REGULAR
    producer = await client.producer(topic)
    await producer.send(b"x", key=f"k{turn % 5}")
    consumer = await some_consumer(client, turn % 5)
    for message in await consumer.receive_many(3, timeout=0.01):
        assert message.value == b"x"
    txn = await client.transaction(timeout=5)
    await producer.send(b"x", txn=txn)
    if turn % 4 == 0:
        await txn.commit()
    elif turn % 4 == 1:
        await txn.abort()
    if turn % 3 == 0:
        await consumer.close()
        await producer.close()


async def some_consumer(client: Client, kind: int) -> Receiving[Any]:
    if kind == 0:
        return await client.queue_consumer(NAME, "queue", initial_position=FIRST)
    if kind == 1:
        return await client.stream_consumer(NAME, "stream", initial_position=FIRST)
    if kind == 2:
        return await client.checkpoint_consumer(NAME, start=FROM_EARLIEST)
    if kind == 3:
        return await client.consumer(REGULAR, "regular", initial_position=FIRST)
    return await client.reader(REGULAR, start=EARLIEST)


def repeat(turns: int, look: Any) -> list[Any]:
    """So many clients, one after the other; what is seen after a tenth of them and after all."""
    seen: list[Any] = []

    async def story(stage: Stage) -> None:
        await stage.create(1)
        for turn in range(turns):
            async with new_client(stage) as client:
                await use(client, turn)
            assert client._connections.count == 0
            del client
            if turn + 1 in (turns // 10, turns):
                await asyncio.sleep(1)  # the brokers' sides of connections end, too
                gc.collect()
                seen.append(look())
                seen[-1] = (seen[-1], len(asyncio.all_tasks()))
        assert not [link for link in stage.host.network.links if not link.is_over]

    play(story)
    return seen


def client_objects() -> Counter[str]:
    """How many objects of the client's classes there are."""
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        each.__name__ for each in kinds if str(each.__module__).startswith("magnetar.client")
    )


@pytest.mark.slow
@pytest.mark.parametrize("clients", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_closed_clients_leave_nothing_behind(clients: int) -> None:
    before = client_objects()  # of tests that ran in this process earlier
    (some, tasks), (all_of_them, tasks_then) = repeat(clients, client_objects)
    assert all_of_them - some == Counter()
    assert "Client" not in all_of_them - before
    assert tasks_then == tasks


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_clients() -> None:
    def held() -> int:
        snapshot = tracemalloc.take_snapshot()
        found = snapshot.filter_traces([tracemalloc.Filter(True, CLIENT_FILES)])
        return sum(each.size for each in found.traces)

    tracemalloc.start()
    try:
        (some, _), (all_of_them, _) = repeat(100, held)
    finally:
        tracemalloc.stop()
    assert all_of_them - some < 16 * 1024
