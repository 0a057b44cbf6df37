"""How soon a killed server serves again: process start to the first PRODUCER_SUCCESS.

    python -m bench.restart [--topics 1000] [--messages 1000]

A server gets so many topics, each with a subscription and so many messages, and is killed with
SIGKILL in the middle of publishing. Then it is started again and again; each time a client tries
to connect from the first moment on, opens a producer on one of the topics, and the server is
killed once more. Beside it: the start of an interpreter that does nothing.

The sources are compiled first, as an installation does it: where the environment forbids Python to
write bytecode, each start would compile them.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

import magnetar
from bench.broker import Running
from bench.load import FIRST_SEQUENCE, FrameCounter, Frames
from bench.report import Row, publish
from bench.storage import scratch
from magnetar.testing.virtual.driver import Driver, build_message

HOST = "127.0.0.1"
STARTS = 7
SECONDS_MAX = 1.0
PAYLOAD_BYTES = 100
READY_SECONDS = 30.0
FILL_SECONDS = 25.0
TOPICS_PER_CONNECTION = 50
RETRY_SECONDS = 0.002
EARLIEST = 1


def topic_name(number: int) -> str:
    return f"persistent://public/default/restart-{number}"


def compile_sources() -> None:
    """As an installation does it."""
    folder = Path(magnetar.__file__).parent
    if not compileall.compile_dir(folder, quiet=2):
        raise SystemExit(f"{folder} cannot be compiled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(folder: Path, port: int) -> Iterator[Running]:
    """A server process; killed at the end."""
    command = [str(Path(sys.executable).with_name("magnetar")), "serve", "--admin-port", "0"]
    options = ["--data", str(folder / "data"), "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        yield Running(port, process.pid)
    finally:
        process.kill()
        process.wait(READY_SECONDS)


async def connected(port: int) -> Driver:
    """A connection as soon as the server takes one."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            return await Driver.connect(HOST, port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_SECONDS)


# --- the store


class Filler(FrameCounter):
    """Publishes so many messages of each producer of a connection, one topic after the other."""

    def __init__(self, topics: range, messages: int) -> None:
        super().__init__()
        self._topics = iter(topics)
        self._messages = messages
        self._owed = 0

    def counted(self, frames: int) -> None:
        self._owed -= frames
        if self._owed:
            return
        number = next(self._topics, None)
        if number is None:
            self.done.set_result(None)
            self.transport.close()
            return
        self._owed = self._messages
        sends = Frames(number, bytes(PAYLOAD_BYTES), 1)
        self.transport.write(sends.run(FIRST_SEQUENCE, self._messages))


async def fill_some(port: int, topics: range, messages: int) -> None:
    """On a connection of its own, done before the server's first ping."""
    driver = await connected(port)
    for number in topics:
        topic = topic_name(number)
        await driver.request(
            "SUBSCRIBE", topic=topic, subscription="s", subType=0, consumer_id=number,
            initialPosition=EARLIEST,
        )  # fmt: skip
        await driver.request("PRODUCER", topic=topic, producer_id=number)
    filler = Filler(topics, messages)
    filler.begin(driver.detach())
    await asyncio.wait_for(filler.done, FILL_SECONDS)


async def fill(port: int, topics: int, messages: int) -> None:
    """Make the topics with their subscriptions, and publish; return with sends in flight."""
    for first in range(0, topics, TOPICS_PER_CONNECTION):
        some = range(first, min(first + TOPICS_PER_CONNECTION, topics))
        await fill_some(port, some, messages)
    driver = await connected(port)
    await driver.request("PRODUCER", topic=topic_name(0), producer_id=1)
    for number in range(messages):
        message = build_message(bytes(PAYLOAD_BYTES), sequence_id=number)
        driver.send("SEND", message, producer_id=1, sequence_id=number)
    await driver.pushes.get()


# --- the starts


async def first_producer(port: int, topic: str) -> None:
    driver = await connected(port)
    await driver.request("PRODUCER", topic=topic, producer_id=1)
    driver.abort()


def seconds_to_serve(folder: Path, topic: str) -> float:
    port = free_port()
    started = time.perf_counter()
    with serving(folder, port):
        uvloop.run(first_producer(port, topic))
        return time.perf_counter() - started


def interpreter_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


def rows_of(name: str, times: list[float], bare: float) -> list[Row]:
    return [
        Row(measure=f"{name}, {kind}", value=value, unit="s", anchor="an empty interpreter",
            ratio=value / bare, samples=len(times))
        for kind, value in (("median", statistics.median(times)), ("worst", max(times)))
    ]  # fmt: skip


def measure(topics: int, messages: int) -> list[Row]:
    compile_sources()
    bare = statistics.median([interpreter_seconds() for _ in range(STARTS)])
    with scratch() as folder:
        empty = [seconds_to_serve(folder, topic_name(0)) for _ in range(STARTS)]
    with scratch() as folder:
        port = free_port()
        with serving(folder, port):
            uvloop.run(fill(port, topics, messages))
        after_kill = seconds_to_serve(folder, topic_name(topics - 1))
        times = [seconds_to_serve(folder, topic_name(number)) for number in range(STARTS)]
    name = f"start with {topics * messages:,} messages in {topics:,} topics"
    return [
        *rows_of("start with few messages", empty, bare),
        *rows_of(f"{name}, killed under load", [after_kill], bare)[:1],
        *rows_of(name, times, bare),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.restart")
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=1000, help="per topic")
    options = parser.parse_args()
    rows = measure(options.topics, options.messages)
    publish("restart", rows)
    slow = [row.measure for row in rows if row.value >= SECONDS_MAX]
    for each in slow:
        print(f"slower than {SECONDS_MAX:g} s: {each}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
