"""What one large transaction costs: memory, and the time of its end.

    python -m bench.txn_large [--largest 1000000]

Transactions of 10^2, 10^3, ... messages over two topics in two namespaces, each with a window of
messages in flight on a connection of its own. When the server has nothing left to do: how long the
commit takes (to its answer, and to the first message at a consumer), how long an abort takes, and
what memory the server has. Beside it: a server that got the same messages without transactions.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from bench.report import Row, publish
from bench.restart import compile_sources
from bench.split import REQUEST_SECONDS, Served, serving
from bench.storage import scratch
from bench.txn import settle
from bench.txn_load import COMMIT, FIRST_SEQUENCE, TTL_MS, Link, Sends, txn_fields, txn_of
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Delivered, TxnId

SMALLEST: Final = 100
NAMESPACES: Final = ("public/default", "public/second")
PAYLOAD: Final = bytes(100)
WINDOW: Final = 1000
ABORT: Final = 1
PUBLISH_SECONDS: Final = 600.0
REPEATS_SMALL: Final = 5
REPEATS: Final = {100_000: 3, 1_000_000: 2}
"""Of large transactions; of smaller ones, more."""

MEMORY_MAX_MIB: Final = 64.0
"""More than without transactions."""
COMMIT_MAX_MS: Final = 20.0

_RECEIPT: Final = TYPES["SEND_RECEIPT"]


def topic_name(namespace: str) -> str:
    return f"persistent://{namespace}/large"


class Stream(Link):
    """Sends so many messages, a window of them in flight."""

    def __init__(self, driver: Driver, txn: TxnId | None, first: int, count: int) -> None:
        super().__init__(driver)
        self._sends = Sends(PAYLOAD, txn)
        self._next = first
        self._unsent = self._unconfirmed = count
        self._put(WINDOW)
        self.flush()

    def take(self, kind: int, frame: bytes) -> None:
        if kind != _RECEIPT:
            raise ConnectionError(f"a send was answered with {kind}")
        self._unconfirmed -= 1
        self._put(1)
        if not self._unconfirmed:
            self.finish()

    def close(self) -> None:
        self._transport.close()

    def _put(self, most: int) -> None:
        count = min(most, self._unsent)
        if count:
            self.put(*self._sends.run(self._next, count))
            self._next += count
            self._unsent -= count


class Ended(NamedTuple):
    """How long it took, in milliseconds."""

    answered: float
    seen: float


class Client:
    """Begins and ends transactions, and waits for the first message of each."""

    def __init__(self, served: Served, driver: Driver) -> None:
        self._served = served
        self._driver = driver
        self._sequence = FIRST_SEQUENCE

    async def begin(self) -> TxnId:
        answer = await self._driver.request("NEW_TXN", txn_ttl_millis=TTL_MS, scalable=True)
        return txn_of(answer)

    async def publish(self, txn: TxnId | None, count: int) -> None:
        """Half of them to each topic."""
        part = count // len(NAMESPACES)
        streams = []
        for namespace in NAMESPACES:
            driver = await Driver.connect("127.0.0.1", self._served.running.port)
            await driver.request("PRODUCER", topic=topic_name(namespace), producer_id=1)
            streams.append(Stream(driver, txn, self._sequence, part))
        self._sequence += part
        async with asyncio.timeout(PUBLISH_SECONDS):
            await asyncio.gather(*(stream.done for stream in streams))
        for stream in streams:
            stream.close()
        await asyncio.to_thread(settle, self._served)

    async def read_behind(self) -> None:
        """A consumer of the first topic that gets what comes next, and nothing of before."""
        await self._driver.request(
            "SUBSCRIBE",
            topic=topic_name(NAMESPACES[0]),
            subscription="behind",
            subType=0,
            consumer_id=1,
            durable=False,
        )
        self._driver.send("FLOW", consumer_id=1, messagePermits=1)

    async def stop_reading(self) -> None:
        await self._driver.request("CLOSE_CONSUMER", consumer_id=1)

    async def end(self, txn: TxnId, action: int, *, is_seen: bool) -> Ended:
        began = time.perf_counter()
        await self._driver.request("END_TXN", txn_action=action, scalable=True, **txn_fields(txn))
        answered = time.perf_counter()
        while is_seen and not isinstance(await self._driver.pushes.get(), Delivered):
            pass
        return Ended((answered - began) * 1e3, (time.perf_counter() - began) * 1e3)


class Measured(NamedTuple):
    """Of one number of messages."""

    messages: int
    commits: list[Ended]
    aborts: list[float]
    memory_mib: float


async def transact(client: Client, count: int, action: int) -> Ended:
    is_seen = action == COMMIT
    if is_seen:
        await client.read_behind()
    txn = await client.begin()
    await client.publish(txn, count)
    ended = await client.end(txn, action, is_seen=is_seen)
    if is_seen:
        await client.stop_reading()
    return ended


async def in_transactions(served: Served, sizes: Sequence[int]) -> list[Measured]:
    client = Client(served, await Driver.connect("127.0.0.1", served.running.port))
    found = []
    for count in sizes:
        repeats = REPEATS.get(count, REPEATS_SMALL)
        commits = [await transact(client, count, COMMIT) for _ in range(repeats)]
        memory = memory_mib(served)
        aborts = [(await transact(client, count, ABORT)).answered for _ in range(repeats)]
        found.append(Measured(count, commits, aborts, max(memory, memory_mib(served))))
    return found


async def plainly(served: Served, sizes: Sequence[int]) -> list[float]:
    client = Client(served, await Driver.connect("127.0.0.1", served.running.port))
    found = []
    for count in sizes:
        repeats = REPEATS.get(count, REPEATS_SMALL)
        for _ in range(2 * repeats):
            await client.publish(None, count)
        found.append(memory_mib(served))
    return found


def memory_mib(served: Served) -> float:
    for line in Path(f"/proc/{served.running.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the server does not run")


def create_namespace(served: Served, name: str) -> None:
    request = urllib.request.Request(
        f"{served.admin_url}/admin/v2/namespaces/{name}",
        method="PUT",
        data=b"{}",
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=REQUEST_SECONDS).close()


def measure(sizes: Sequence[int]) -> tuple[list[Row], list[str]]:
    compile_sources()
    results: list[Any] = []
    for work in (plainly, in_transactions):
        with scratch() as folder, serving(folder) as served:
            create_namespace(served, NAMESPACES[1])
            results.append(uvloop.run(work(served, sizes)))
    plain, found = results
    rows, wrong = [], []
    for measured, memory in zip(found, plain, strict=True):
        rows += rows_of(measured, found[0], memory)
        commit = min(each.answered for each in measured.commits)
        name = f"{measured.messages:,} messages"
        if commit > COMMIT_MAX_MS:
            wrong.append(f"{name}: commit in {commit:.1f} ms, {COMMIT_MAX_MS:g} at most wanted")
        if measured.memory_mib > memory + MEMORY_MAX_MIB:
            wrong.append(f"{name}: {measured.memory_mib - memory:.0f} MiB more than without")
    return rows, wrong


def rows_of(measured: Measured, smallest: Measured, plain_mib: float) -> list[Row]:
    name, beside = f"{measured.messages:,} messages", f"{smallest.messages:,} messages"
    answered, seen = (min(each) for each in zip(*measured.commits, strict=True))
    base = min(each.answered for each in smallest.commits)
    times = {"commit": answered, "commit to a delivery": seen, "abort": min(measured.aborts)}
    rows = [
        Row(measure=f"{name}, {what}", value=value, unit="ms", anchor=f"commit, {beside}",
            ratio=value / base, samples=len(measured.commits))
        for what, value in times.items()
    ]  # fmt: skip
    memory = measured.memory_mib
    beside = "without transactions"
    more = f"{name}, memory"
    rows.append(
        Row(measure=more, value=memory, unit="MiB", anchor=beside, ratio=memory / plain_mib)
    )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.txn_large")
    parser.add_argument("--largest", type=int, default=1_000_000)
    options = parser.parse_args()
    sizes, size = [], SMALLEST
    while size <= options.largest:
        sizes.append(size)
        size *= 10
    rows, wrong = measure(sizes)
    publish("txn-large", rows)
    for text in wrong:
        print(f"not as wanted: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
