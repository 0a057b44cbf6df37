"""One client in a process of its own, for `bench.client`: it prints messages per second, and the
processor time of a message, which a busy machine does not change much.

    python -m bench.client_load magnetar produce-batches --url pulsar://... --topic ... --seconds 3

Both clients do the same: the same payloads, the same limits on batches and on what is in flight,
and everything that is received is acknowledged. What is set up, and the first messages, are not
counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import uvloop

from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.produce.producer import Producer
from magnetar.model.subscriptions import InitialPosition

SINGLE_BYTES: Final = 1024
BATCHED_BYTES: Final = 100
SINGLES_IN_FLIGHT: Final = 1000
BATCHED_IN_FLIGHT: Final = 20_000
BATCH_MESSAGES: Final = 1000
BATCH_BYTES: Final = 128 * 1024
BATCH_DELAY_S: Final = 0.001
SOME: Final = 100
ARROW_ROWS: Final = 10_000
QUEUE_SIZE: Final = 10_000
TIMEOUT_S: Final = 10.0


class Measured(NamedTuple):
    """What a client did in a time."""

    rate: float
    """Messages per second."""
    cpu_us: float
    """Processor time of its process for each message, in microseconds."""


class Watch:
    """Counts from the first message after the warm-up on."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()
        self._end = self._start + seconds
        self.count = 0

    @property
    def goes_on(self) -> bool:
        return time.perf_counter() < self._end

    def measured(self) -> Measured:
        cpu_us = (time.process_time() - self._cpu_start) * 1e6
        return Measured(self.count / (time.perf_counter() - self._start), cpu_us / self.count)


# --- ours


async def ours(what: str, options: argparse.Namespace) -> Measured:
    async with Client(options.url, memory_limit=256 * 1024 * 1024) as client:
        if what.startswith("produce"):
            producer = await client.producer(
                options.topic,
                batching=what != "produce-singles",
                max_pending=SINGLES_IN_FLIGHT if what == "produce-singles" else BATCHED_IN_FLIGHT,
                batch_messages=BATCH_MESSAGES,
                batch_bytes=BATCH_BYTES,
                batch_delay=BATCH_DELAY_S,
            )
            await producer.send(b"first")
            return await OUR_PRODUCING[what](producer, options.seconds)
        consumer = await client.consumer(
            options.topic,
            options.subscription,
            initial_position=InitialPosition.EARLIEST,
            queue_size=QUEUE_SIZE,
            unacked_max=QUEUE_SIZE,
        )
        return await OUR_CONSUMING[what](consumer, options.count)


async def our_singles(producer: Producer[bytes], seconds: float) -> Measured:
    return await _submitted(producer, bytes(SINGLE_BYTES), seconds)


async def our_batches(producer: Producer[bytes], seconds: float) -> Measured:
    return await _submitted(producer, bytes(BATCHED_BYTES), seconds)


async def _submitted(producer: Producer[bytes], payload: bytes, seconds: float) -> Measured:
    produced = Watch(seconds)
    while produced.goes_on:
        for _ in range(SOME):
            await producer.submit(payload)
        produced.count += SOME
    await producer.flush()
    return produced.measured()


async def our_arrow(producer: Producer[bytes], seconds: float) -> Measured:
    import pyarrow as pa

    batch = pa.RecordBatch.from_pydict({"value": [bytes(BATCHED_BYTES)] * ARROW_ROWS})
    produced = Watch(seconds)
    while produced.goes_on:
        produced.count += await producer.send_arrow(batch)
    return produced.measured()


async def receive_each(consumer: Consumer[bytes], count: int) -> Measured:
    await consumer.ack(await consumer.receive(TIMEOUT_S))
    received = Watch()
    for _ in range(count - 1):
        message = await consumer.receive(TIMEOUT_S)
        _ = message.value
        consumer.ack(message)
    received.count = count - 1
    return received.measured()


async def receive_many(consumer: Consumer[bytes], count: int) -> Measured:
    await consumer.ack(await consumer.receive(TIMEOUT_S))
    received = Watch()
    while received.count < count - 1:
        messages = await consumer.receive_many(BATCH_MESSAGES, timeout=TIMEOUT_S)
        received.count += len([message.value for message in messages])
        consumer.ack_many(messages)
        assert messages, "the backlog is shorter than it should be"
    return received.measured()


async def receive_arrow(consumer: Consumer[bytes], count: int) -> Measured:
    first = await consumer.receive_arrow(1, timeout=TIMEOUT_S)
    await consumer.ack_arrow(first)
    received = Watch()
    while received.count < count - 1:
        batch = await consumer.receive_arrow(ARROW_ROWS, timeout=TIMEOUT_S)
        received.count += batch.num_rows
        consumer.ack_arrow(batch)
        assert batch.num_rows, "the backlog is shorter than it should be"
    return received.measured()


OUR_PRODUCING: Final[dict[str, Callable[[Producer[bytes], float], Awaitable[Measured]]]] = {
    "produce-singles": our_singles,
    "produce-batches": our_batches,
    "produce-arrow": our_arrow,
}
OUR_CONSUMING: Final[dict[str, Callable[[Consumer[bytes], int], Awaitable[Measured]]]] = {
    "receive": receive_each,
    "receive-many": receive_many,
    "receive-arrow": receive_arrow,
}


# --- the official client


def official(what: str, options: argparse.Namespace) -> Measured:
    import pulsar  # type: ignore[import-untyped]

    client = pulsar.Client(options.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        if what.startswith("produce"):
            is_single = what == "produce-singles"
            producer = client.create_producer(
                options.topic,
                batching_enabled=not is_single,
                max_pending_messages=SINGLES_IN_FLIGHT if is_single else BATCHED_IN_FLIGHT,
                block_if_queue_full=True,
                batching_max_messages=BATCH_MESSAGES,
                batching_max_allowed_size_in_bytes=BATCH_BYTES,
                batching_max_publish_delay_ms=round(BATCH_DELAY_S * 1000),
            )
            producer.send(b"first")
            payload = bytes(SINGLE_BYTES if is_single else BATCHED_BYTES)
            return _official_sent(pulsar, producer, payload, options.seconds)
        consumer = client.subscribe(
            options.topic,
            options.subscription,
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=QUEUE_SIZE,
            batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(BATCH_MESSAGES, -1, 100),
        )
        timeout_ms = round(TIMEOUT_S * 1000)
        consumer.acknowledge(consumer.receive(timeout_ms))
        if what == "receive":
            return _official_received(consumer, options.count - 1, timeout_ms)
        return _official_batches(consumer, options.count - 1)
    finally:
        client.close()


def _official_sent(pulsar: Any, producer: Any, payload: bytes, seconds: float) -> Measured:
    failed = [0]

    def done(result: Any, _message_id: Any) -> None:
        failed[0] += result != pulsar.Result.Ok

    produced = Watch(seconds)
    while produced.goes_on:
        for _ in range(SOME):
            producer.send_async(payload, done)
        produced.count += SOME
    producer.flush()
    assert not failed[0]
    return produced.measured()


def _official_received(consumer: Any, count: int, timeout_ms: int) -> Measured:
    received = Watch()
    for _ in range(count):
        message = consumer.receive(timeout_ms)
        _ = message.data()
        consumer.acknowledge(message)
    received.count = count
    return received.measured()


def _official_batches(consumer: Any, count: int) -> Measured:
    received = Watch()
    while received.count < count:
        messages = consumer.batch_receive()
        for message in messages:
            _ = message.data()
            consumer.acknowledge(message)
        received.count += len(messages)
    return received.measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=["magnetar", "official"])
    parser.add_argument("what")
    parser.add_argument("--url", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--subscription", default="bench")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    if options.who == "official":
        measured = official(options.what, options)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(ours(options.what, options))
    print(json.dumps(measured._asdict()))


if __name__ == "__main__":
    main()
