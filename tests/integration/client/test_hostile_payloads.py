"""Payloads that unfold far, or claim to: what a client keeps of them has a bound on every path."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from magnetar.client.arrow.arrow import RawEntry, entries_batch, entries_schema
from magnetar.client.client import Client
from magnetar.model.subscriptions import InitialPosition
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.compression import Compression
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
MIB = 1024 * 1024
CLAIM = 64 * MIB
LARGE = 2 * MIB
COUNT = 24
HOSTILE: dict[str, Any] = {
    "compression": int(Compression.ZSTD),
    "uncompressed_size": CLAIM,
}

Open = Callable[[Client], Any]
CONSUMERS: dict[str, Open] = {
    "queue": lambda client: client.queue_consumer(
        NAME, "s", initial_position=FIRST, queue_bytes=4 * MIB
    ),
    "stream": lambda client: client.stream_consumer(
        NAME, "s", initial_position=FIRST, queue_bytes=4 * MIB
    ),
}


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", CONSUMERS)
def test_what_is_fetched_ahead_unfolds_only_into_the_budget(kind: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with client.producer(
                NAME, compression=Compression.ZSTD, batching=False
            ) as producer:
                for number in range(COUNT):
                    await producer.send(b"%4d" % number + bytes(LARGE), key="k")
            with memory_below(16 * MIB):
                async with CONSUMERS[kind](client) as consumer:
                    await asyncio.sleep(20)  # all of them have arrived
                    queue = consumer._core.receive_queue
                    assert queue.bytes <= 4 * MIB + 2 * LARGE
                    for number in range(COUNT):
                        message = await consumer.receive(timeout=20)
                        assert message.value[:4] == b"%4d" % number
                        await asyncio.sleep(0)
                    assert await consumer.receive_many(timeout=5) == []
                    assert queue.bytes == 0

    play(story)


def test_rows_of_arrow_unfold_only_into_the_budget() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with client.producer(NAME, compression=Compression.ZSTD) as producer:
                for number in range(COUNT):
                    batch = [b"%4d" % number + bytes(LARGE // 16)] * 16
                    await producer.send_arrow(pa.RecordBatch.from_pydict({"value": batch}))
            async with CONSUMERS["queue"](client) as consumer:
                await asyncio.sleep(20)
                queue = consumer._core.receive_queue
                assert queue.bytes <= 4 * MIB + 2 * LARGE
                rows: list[bytes] = []
                while len(rows) < COUNT * 16:
                    found = await consumer.receive_arrow(10, timeout=20)
                    rows += [value.as_py()[:4] for value in found.column("value")]
                assert rows == sorted(rows)
                assert queue.bytes == 0

    play(story)


def test_a_claim_takes_no_memory_as_columns_of_ranges_and_spark() -> None:
    """The pages of ranges, which the Spark source reads too, become columns by `entries_batch`."""
    entries = [RawEntry(1, number, build_message(b"x", **HOSTILE)) for number in range(200)]
    with memory_below(8 * MIB):
        made = entries_batch(entries, entries_schema(("value", "entry_id")))
    assert made.num_rows == 200
    assert max(len(value.as_py() or b"") for value in made.column("value")) < 1000


def test_a_claim_takes_no_memory_as_rows_of_arrow() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        driver = await stage.driver()
        segment = "segment://public/default/orders/0000-ffff-0"
        await driver.request("PRODUCER", topic=segment, producer_id=1)
        for number in range(200):
            await driver.publish(1, number, build_message(b"x", sequence_id=number, **HOSTILE))
        async with new_client(stage) as client, CONSUMERS["queue"](client) as consumer:
            count = 0
            with memory_below(8 * MIB):
                while count < 200:
                    count += (await consumer.receive_arrow(500, timeout=20)).num_rows

    play(story)
