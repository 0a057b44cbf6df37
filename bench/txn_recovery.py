"""How soon a killed server delivers again, with many finished and many open transactions.

    python -m bench.txn_recovery [--finished 1000000] [--open 10000] [--topics 8]

A store gets the headers of finished transactions; then a real server gets the open ones, each with
a message in two of the topics and an acknowledgement on an input, behind committed messages, and is
killed. It is started again and again; each time a consumer connects from the first moment on and
waits for its first message: one of a topic, whose pins have to be read and adopted before anything
is delivered, or the next one of the input, whose pending acknowledgements have to be read. Then the
server is killed once more. Beside it: a start with a store that has no transactions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from bench.report import Row, publish
from bench.restart import (
    EARLIEST,
    PAYLOAD_BYTES,
    SECONDS_MAX,
    STARTS,
    compile_sources,
    connected,
    free_port,
    serving,
)
from bench.storage import scratch
from bench.txn_load import COMMIT, COORDINATORS, SHARED, SUBSCRIPTION, txn_fields, txn_of
from magnetar.server.embedded import open_storage
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.ids import metadata_id, to_text
from magnetar.txn.records import Header, State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import Delivered

PER_TOPIC: Final = 10
"""Committed messages that stand before all open transactions."""

AT_ONCE: Final = 200
PUTS_AT_ONCE: Final = 5000
FINISHED_FROM: Final = 1 << 40
"""Ids of finished transactions that no coordinator gives again."""

PERMITS: Final = 1000
"""What clients ask for."""

OPEN_MS: Final = 24 * 3600 * 1000
INPUT: Final = "persistent://public/default/recovery-input"


def topic_name(number: int) -> str:
    return f"persistent://public/default/recovery-{number}"


# --- the store


async def write_finished(folder: Path, count: int) -> None:
    """Headers as decisions leave them, of all coordinators in turn."""
    storage = await open_storage(folder / "data")
    async with storage.connect() as metadata:
        store, now_ms = TxnStore(metadata), round(time.time() * 1000)
        for first in range(0, count, PUTS_AT_ONCE):
            some = range(first, min(first + PUTS_AT_ONCE, count))
            await asyncio.gather(*(store.create(finished(number, now_ms)) for number in some))
    await storage.close()


def finished(number: int, now_ms: int) -> Header:
    name = to_text(metadata_id(number % COORDINATORS, FINISHED_FROM + number // COORDINATORS))
    state: State = "ABORTED" if number % 10 == 0 else "COMMITTED"
    return Header(name, now_ms - 100, now_ms + OPEN_MS, state, now_ms)


class Writer:
    """One connection with a producer for each topic and for the input, and a consumer of that."""

    def __init__(self, driver: Driver, topics: int) -> None:
        self._driver = driver
        self._topics = topics
        self._sequences = [0] * (topics + 1)

    async def open(self) -> None:
        await subscribed(self._driver, INPUT)
        for number in range(self._topics):
            await self._driver.request(
                "PRODUCER", topic=topic_name(number), producer_id=number, txn_enabled=True
            )
        await self._driver.request("PRODUCER", topic=INPUT, producer_id=self._topics)

    async def send(self, producer_id: int, ids: dict[str, Any]) -> Any:
        self._sequences[producer_id] += 1
        number = self._sequences[producer_id]
        message = build_message(bytes(PAYLOAD_BYTES), sequence_id=number, **ids)
        return (await self._driver.publish(producer_id, number, message, **ids)).message_id

    async def begin(self, number: int) -> dict[str, Any]:
        coordinator = number % COORDINATORS
        answer = await self._driver.request(
            "NEW_TXN", tc_id=coordinator, txn_ttl_millis=OPEN_MS, scalable=True
        )
        return txn_fields(txn_of(answer))

    async def committed(self) -> None:
        """One transaction over all topics."""
        ids = await self.begin(0)
        for _ in range(PER_TOPIC):
            await asyncio.gather(*(self.send(each, ids) for each in range(self._topics)))
        await self._driver.request("END_TXN", txn_action=COMMIT, **ids)

    async def left_open(self, number: int) -> None:
        """One that has an input, and messages in two topics."""
        found, ids = await self.send(self._topics, {}), await self.begin(number)
        position = {"ledgerId": found.ledgerId, "entryId": found.entryId}
        await asyncio.gather(
            self.send(number % self._topics, ids),
            self.send((number + 1) % self._topics, ids),
            self._driver.request("ACK", consumer_id=1, ack_type=0, message_id=[position], **ids),
        )


async def subscribed(driver: Driver, topic: str) -> None:
    await driver.request(
        "SUBSCRIBE", topic=topic, subscription=SUBSCRIPTION, subType=SHARED, consumer_id=1,
        initialPosition=EARLIEST,
    )  # fmt: skip


async def write_open(port: int, count: int, topics: int) -> None:
    writer = Writer(await connected(port), topics)
    await writer.open()
    await writer.committed()
    for first in range(0, count, AT_ONCE):
        some = range(first, min(first + AT_ONCE, count))
        await asyncio.gather(*(writer.left_open(number) for number in some))
    await writer.send(topics, {})  # the one input that nobody has acknowledged


# --- the starts


async def first_delivery(port: int, topic: str) -> None:
    driver = await connected(port)
    await subscribed(driver, topic)
    driver.send("FLOW", consumer_id=1, messagePermits=PERMITS)
    while not isinstance(await driver.pushes.get(), Delivered):
        pass
    driver.abort()


class Start(NamedTuple):
    """From the start of a process to a delivery."""

    seconds: float
    cpu_seconds: float


def start(folder: Path, topic: str) -> Start:
    port = free_port()
    started = time.perf_counter()
    with serving(folder, port) as running:
        uvloop.run(first_delivery(port, topic))
        return Start(time.perf_counter() - started, running.cpu_seconds())


def fill(folder: Path, options: argparse.Namespace, *, transactions: bool) -> None:
    if transactions:
        uvloop.run(write_finished(folder, options.finished))
    port = free_port()
    with serving(folder, port):
        uvloop.run(write_open(port, options.open if transactions else 0, options.topics))


def rows_of(name: str, starts: list[Start], base: Start) -> list[Row]:
    taken = [each.seconds for each in starts]
    median, cpu = statistics.median(taken), statistics.median(each.cpu_seconds for each in starts)
    found = {
        f"{name}, median": (median, base.seconds),
        f"{name}, worst": (max(taken), base.seconds),
        f"{name}, CPU": (cpu, base.cpu_seconds),
    }
    return [
        Row(measure=measure, value=value, unit="s", samples=len(starts),
            anchor="without transactions", ratio=value / beside)
        for measure, (value, beside) in found.items()
    ]  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    compile_sources()
    print(f"{options.finished:,} finished and {options.open:,} open transactions")
    with scratch() as folder:
        fill(folder, options, transactions=False)
        plain = [start(folder, topic_name(0)) for _ in range(STARTS)]
        base = Start(*(statistics.median(each) for each in zip(*plain, strict=True)))
    with scratch() as folder:
        fill(folder, options, transactions=True)
        after_kill = [start(folder, topic_name(0))]
        topics = [start(folder, topic_name(each % options.topics)) for each in range(STARTS)]
        inputs = [start(folder, INPUT) for _ in range(STARTS)]
    return [
        *rows_of("start to delivery, killed under load", after_kill, base)[:1],
        *rows_of("start to delivery of a topic", topics, base),
        *rows_of("start to delivery of the input", inputs, base),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.txn_recovery")
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--open", type=int, default=10_000)
    parser.add_argument("--topics", type=int, default=8)
    options = parser.parse_args()
    rows = measure(options)
    publish("txn-recovery", rows)
    slow = [row.measure for row in rows if row.value >= SECONDS_MAX]
    for each in slow:
        print(f"slower than {SECONDS_MAX:g} s: {each}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
