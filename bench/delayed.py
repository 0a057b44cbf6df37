"""What a million messages that wait for their time cost one subscription of a real server.

    python -m bench.delayed [--messages 1000000]

They are published with times spread over a week, which is the widest that an index of half-second
buckets gets to see. The server is started again, and a first Shared consumer comes: how long until
it has read past all of them (a message without a time stands at the end), what the server's memory
has grown by, what it uses of the processor while nothing is due, and how late or early messages
come that are due meanwhile. Memory includes what reading a million entries leaves in caches.

Returns 1 if memory, processor or lateness is above its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.broker import Running
from bench.load import FrameCounter
from bench.report import Row, publish
from bench.restart import connected, free_port, serving
from bench.storage import scratch
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.frames import encode_send
from magnetar.wire.messages import Delivered

TOPIC = "persistent://public/default/delayed"
MEMORY_MIB_MAX = 200.0
CPU_PERCENT_MAX = 5.0
TICK_MS = 1000

WEEK_MS = 7 * 24 * 3600 * 1000
TOO_LATE_MS = 3600 * 1000
"""None of the million is due during the run."""
SOON = 20_000
SOON_MS = (3000, 13_000)
CHUNK = 5000
IDLE_SECONDS = 10.0
READ_SECONDS = 240.0
PERMITS = 100_000
SHARED, EARLIEST = 1, 1


class Publisher(FrameCounter):
    """Publishes with a time for each message, a chunk at a time."""

    def __init__(self, times_ms: list[int]) -> None:
        super().__init__()
        self._times = times_ms
        self._at = self._owed = 0

    def counted(self, frames: int) -> None:
        self._owed -= frames
        if self._owed > 0:
            return
        chunk = self._times[self._at : self._at + CHUNK]
        if not chunk:
            self.done.set_result(None)
            self.transport.close()
            return
        self._owed = len(chunk)
        for number, at_ms in enumerate(chunk, self._at):
            self.transport.writelines(encode_send(1, number, message(number, at_ms)))
        self._at += len(chunk)


def message(number: int, at_ms: int) -> bytes:
    fields: dict[str, Any] = {"deliver_at_time": at_ms} if at_ms else {}
    return build_message(b"%100d" % at_ms, sequence_id=number, **fields)


async def fill(port: int, times_ms: list[int]) -> None:
    driver = await connected(port)
    await subscribe(driver, 0)
    await driver.request("PRODUCER", topic=TOPIC, producer_id=1)
    publisher = Publisher(times_ms)
    publisher.begin(driver.detach())
    await asyncio.wait_for(publisher.done, READ_SECONDS)


async def subscribe(driver: Driver, permits: int) -> None:
    await driver.request(
        "SUBSCRIBE", topic=TOPIC, subscription="s", subType=SHARED, consumer_id=1,
        initialPosition=EARLIEST,
    )  # fmt: skip
    if permits:
        driver.send("FLOW", consumer_id=1, messagePermits=permits)


def rss_mib(running: Running) -> float:
    pages = int(Path(f"/proc/{running.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def times_of(count: int) -> list[int]:
    """So many times, and one message without a time behind them."""
    rng = random.Random(1)
    begin = time.time_ns() // 1_000_000 + TOO_LATE_MS
    return [*(begin + rng.randrange(WEEK_MS) for _ in range(count)), 0]


async def received(driver: Driver, seconds: float) -> Delivered:
    while True:
        found = await driver.pushes.get(seconds)
        if isinstance(found, Delivered):
            return found


async def waiting(running: Running) -> dict[str, float]:
    """The measures of one server that has them all stored."""
    driver = await connected(running.port)
    await driver.request("PRODUCER", topic=TOPIC, producer_id=1)  # loads the topic
    before, cpu, start = rss_mib(running), running.cpu_seconds(), time.perf_counter()
    await subscribe(driver, PERMITS)
    await received(driver, READ_SECONDS)
    found = {
        "read": time.perf_counter() - start,
        "read cpu": running.cpu_seconds() - cpu,
        "memory": rss_mib(running) - before,
    }
    cpu, start = running.cpu_seconds(), time.perf_counter()
    await asyncio.sleep(IDLE_SECONDS)
    idle = time.perf_counter() - start
    found["idle cpu"] = 100 * (running.cpu_seconds() - cpu) / idle
    return found | await soon(running, driver)


async def soon(running: Running, driver: Driver) -> dict[str, float]:
    """Messages that are due in some seconds, beside the million: how early, how late."""
    rng = random.Random(2)
    now = time.time_ns() // 1_000_000
    times = [now + rng.randint(*SOON_MS) for _ in range(SOON)]
    for number, at_ms in enumerate(times):
        driver.send("SEND", message(number, at_ms), producer_id=1, sequence_id=number)
        if number % 500 == 0:
            await asyncio.sleep(0)
    late: list[int] = []
    while len(late) < SOON:
        delivered = await received(driver, READ_SECONDS)
        body: Any = delivered.body
        driver.send("ACK", consumer_id=1, ack_type=0, message_id=[body.message_id])
        at_ms = int(bytes(delivered.headers_and_payload[-100:]))
        late.append(time.time_ns() // 1_000_000 - at_ms)
    late.sort()
    return {"early": -late[0], "late p99": late[len(late) * 99 // 100], "late": late[-1]}


def measure(messages: int) -> list[Row]:
    with scratch() as folder:
        port = free_port()
        with serving(folder, port):
            started = time.perf_counter()
            uvloop.run(fill(port, times_of(messages)))
            print(f"published in {time.perf_counter() - started:.0f} s")
        with serving(folder, port) as running:
            found = uvloop.run(waiting(running))
    name = f"{messages:,} waiting"
    units = {
        "memory": "MiB",
        "read": "s",
        "read cpu": "s",
        "idle cpu": "% of a core",
        "early": "ms",
        "late p99": "ms",
        "late": "ms",
    }
    return [
        Row(measure=f"{name}: {key}", value=found[key], unit=unit) for key, unit in units.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.delayed")
    parser.add_argument("--messages", type=int, default=1_000_000)
    rows = measure(parser.parse_args().messages)
    publish("delayed", rows)
    values = {row.measure.rpartition(": ")[2]: row.value for row in rows}
    broken = [
        values["memory"] > MEMORY_MIB_MAX,
        values["idle cpu"] > CPU_PERCENT_MAX,
        values["early"] > TICK_MS,
        values["late"] > TICK_MS,
    ]
    return int(any(broken))


if __name__ == "__main__":
    sys.exit(main())
