"""The clients of the split bench, each a process of its own so that none takes another's time.

    python -m bench.split_load produce --url U --topic T
    python -m bench.split_load consume --url U --topic T

Both print `ready`, then work until a line comes on standard input. The producer then waits for its
last receipts, and prints how many messages it sent, when each was due and how long its receipt
took. The consumers are told that number, read until each has all of them, and print what their
history breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from harness.simulation.scalable.clients import CheckpointConsumer, QueueConsumer, StreamConsumer
from harness.simulation.scalable.history import Delivered, Event, Published, Receipted, violations
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.errors import DeadlineExceeded

KEYS = 1000
PRODUCER = "load"
WINDOW = 10_000
TICK_SECONDS = 0.001
IDLE_SECONDS = 20.0
"""So long without a message, and the rest is taken for lost."""

Consumer = QueueConsumer | StreamConsumer | CheckpointConsumer


def key_of(sequence: int) -> str:
    """Spread over the keys, so that neighbours in time are not neighbours on the ring."""
    return f"key-{sequence * 7919 % KEYS}"


async def told() -> str:
    """The next line of standard input."""
    return await asyncio.to_thread(sys.stdin.readline)


async def produce(options: argparse.Namespace) -> dict[str, object]:
    payload = bytes(options.bytes)
    now = asyncio.get_running_loop().time
    async with (
        Links(options.url) as links,
        ScalableProducer(links, options.topic, PRODUCER, window=WINDOW) as producer,
    ):
        print("ready", flush=True)
        end = asyncio.ensure_future(told())
        start, sent = now(), 0
        while not end.done():
            while (due_at := start + sent / options.rate) <= now():
                await producer.send(key_of(sent), payload, due_at=due_at)
                sent += 1
            await asyncio.sleep(TICK_SECONDS)
        await producer.flush()
        seconds = now() - start
        # The clock of the loop is the system's monotonic one, which all processes share.
        return {"sent": sent, "rate": sent / seconds, "stalls": producer.stalls}


async def consume(options: argparse.Namespace) -> dict[str, object]:
    events: list[Event] = []
    async with (
        Links(options.url) as links,
        QueueConsumer(links, options.topic, "queue", "q", record=events.append) as queue,
        StreamConsumer(links, options.topic, "stream", "s", record=events.append) as stream,
        CheckpointConsumer(links, options.topic, "checkpoint", record=events.append) as reader,
    ):
        goal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        consumers: list[Consumer] = [queue, stream, reader]
        reading = [asyncio.create_task(_read(each, goal)) for each in consumers]
        print("ready", flush=True)
        goal.set_result(int(await told()))
        counts = await asyncio.gather(*reading)
    begun = time.perf_counter()
    sent = goal.result()
    history: list[Event] = []
    for sequence in range(sent):
        history += [Published(PRODUCER, sequence, key_of(sequence)), Receipted(PRODUCER, sequence)]
    broken = violations(history + events)
    again = sum(isinstance(event, Delivered) for event in events) - sum(counts)
    return {
        "got": dict(zip(("queue", "stream", "checkpoint"), counts, strict=True)),
        "again": again,
        "broken": broken,
        "check_seconds": time.perf_counter() - begun,
    }


async def _read(consumer: Consumer, goal: asyncio.Future[int]) -> int:
    """Until everything came, or nothing comes any more; how many different messages came."""
    seen: set[int] = set()
    while not goal.done() or len(seen) < goal.result():
        all_sent = goal.done()
        try:
            delivery = await consumer.receive(IDLE_SECONDS if all_sent else TICK_SECONDS * 100)
        except DeadlineExceeded:
            if all_sent:
                break
            continue
        seen.add(delivery.sequence)
        if not isinstance(consumer, CheckpointConsumer):
            consumer.ack(delivery)
    return len(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("produce", "consume"))
    parser.add_argument("--url", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rate", type=float, default=5000.0)
    parser.add_argument("--bytes", type=int, default=1024)
    options = parser.parse_args()
    work = {"produce": produce, "consume": consume}[options.kind]
    print(json.dumps(asyncio.run(work(options))))


if __name__ == "__main__":
    main()
