"""Columns while segments split and merge, connections break and brokers die.

As with messages: everything comes, and from a stream or a checkpoint once and in the order of keys.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.consume.receiving import Receiving
from magnetar.client.message.message import Checkpoint
from tests.integration.client.test_consuming_in_trouble import (
    BREAKS,
    CHANGES,
    FIRST,
    QUIET_S,
    SEEDS,
    Got,
    run,
)
from tests.integration.client.test_producing_in_trouble import Trouble
from tests.integration.server.scalable_stage import NAME


def add(got: Got, batch: Any) -> None:
    keys, values = (batch.column(name).to_pylist() for name in ("key", "value"))
    for key, value in zip(keys, values, strict=True):
        got.by_key[key.decode()].append(value)


async def each_batch(consumer: Receiving[bytes], got: Got, ack: Any, chance: Random) -> None:
    while batch := await consumer.receive_arrow(chance.randrange(1, 40), timeout=QUIET_S):
        add(got, batch)
        if chance.random() < 0.4:
            await asyncio.sleep(0.05 * chance.random())
        acked = ack(batch)
        if chance.random() < 0.7:
            await acked


async def by_queue(client: Client, got: Got, chance: Random) -> None:
    async with await client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer:
        await each_batch(consumer, got, consumer.ack_arrow, chance)


async def by_stream(client: Client, got: Got, chance: Random) -> None:
    async with await client.stream_consumer(NAME, "s", initial_position=FIRST) as consumer:
        await each_batch(consumer, got, consumer.ack_arrow, chance)


async def by_checkpoint(client: Client, got: Got, chance: Random) -> None:
    place = FROM_EARLIEST
    while True:
        async with await client.checkpoint_consumer(NAME, start=place) as consumer:
            for _ in range(chance.randrange(1, 12)):
                batch = await consumer.receive_arrow(chance.randrange(1, 40), timeout=QUIET_S)
                if not batch.num_rows:
                    return
                add(got, batch)
            place = Checkpoint.from_bytes(consumer.checkpoint().to_bytes())


@pytest.mark.parametrize("troubles", [CHANGES, BREAKS], ids=["changes", "breaks"])
@pytest.mark.parametrize("consume", [by_queue, by_stream, by_checkpoint])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_every_row_comes_once(seed: int, consume: Any, troubles: tuple[Trouble, ...]) -> None:
    got, kept = run(seed, consume, *troubles)
    if consume is by_queue:
        got.check_all(kept, once=True)
    else:
        got.check_exact(kept)
