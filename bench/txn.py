"""What transactions cost, and how soon a commit is answered and seen.

    python -m bench.txn [--finished 100000] [--seconds 3] [--concurrent 64]

A real server, durable and with its defaults; its clients are processes of their own. A transaction
is one message of 1 KiB and one acknowledgement unless said otherwise. Beside each figure, in the
same run: the same work without transactions, or bare syncs. What is asked of transactions is judged
at the end: the status says whether something was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.bare import sync_loop
from bench.broker import load
from bench.report import Row, publish
from bench.split import REQUEST_SECONDS, Served, serving
from bench.storage import percentile, scratch
from bench.txn_load import COMMIT, TTL_MS, subscribe, txn_fields, txn_of
from magnetar.testing.virtual.driver import Driver, build_message

MESSAGES: Final = 100
WINDOWS: Final = (1, 1000)
"""One message in flight, where a publish is a sync, and many, where it is work."""

ROUNDS: Final = 5
ROUND_SECONDS: Final = 1.5
BARE_SECONDS: Final = 0.5
WAKES: Final = 500
BLOCKED_SECONDS: Final = 5.0
BEHIND: Final = 1000
"""Messages that wait behind the open transaction."""

FEW_FINISHED: Final = 1000
PROBE: Final = 5000
"""Transactions of which the cost is taken, after few and after many."""

CROWD: Final = {"concurrent": 64, "connections": 64}
INPUT_BYTES: Final = 64
SPARE_INPUTS: Final = 5000
QUIET_SECONDS: Final = 0.3
QUIET_CORES: Final = 0.05
SETTLE_SECONDS: Final = 60.0

COST_MAX: Final = 1.05
RATE_MIN: Final = 5000.0
COMMIT_P50_MAX_MS: Final = 1.0
COMMIT_P99_MAX_MS: Final = 5.0
GROWTH_MAX: Final = 1.2
BLOCKED_MAX: Final = 0.01
WAKE_P99_MAX_MS: Final = 5.0


class Found(NamedTuple):
    """Figures, and what is not as wanted."""

    rows: list[Row]
    wrong: list[str]


# --- what they all need


def topic(served: Served, name: str) -> str:
    """A new topic of one segment; the name of the segment."""
    served.create(f"public/default/{name}")
    return f"segment://public/default/{name}/0000-ffff-0"


def client(served: Served, kind: str, *flags: str, **options: object) -> dict[str, Any]:
    """Run a client process; what it measured, and the CPU seconds of the server meanwhile."""
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    target = ["--port", str(served.running.port), *flags]
    before = served.running.cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "bench.txn_load", kind, *target, *given],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    found["cpu_seconds"] = served.running.cpu_seconds() - before
    return found


def cores(served: Served, seconds: float) -> float:
    """What the server uses while the bench does nothing."""
    before, began = served.running.cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    return (served.running.cpu_seconds() - before) / (time.perf_counter() - began)


def settle(served: Served) -> None:
    """Wait until the server has nothing left to do."""
    end = time.monotonic() + SETTLE_SECONDS
    while cores(served, QUIET_SECONDS) > QUIET_CORES:
        if time.monotonic() > end:
            raise SystemExit(f"the server still works {SETTLE_SECONDS:g} s after its clients ended")


def judged(text: str, value: float, unit: str, most: float) -> list[str]:
    """A line if a figure is above what is wanted."""
    return [f"{text}: {value:.4g} {unit}, at most {most:g} wanted"] if value > most else []


class Inputs:
    """A topic with messages that wait to be acknowledged."""

    def __init__(self, served: Served, topic: str) -> None:
        self._served = served
        self.topic = topic
        self._waiting = 0
        self._fills = 0
        asyncio.run(self._subscribe())

    async def _subscribe(self) -> None:
        driver = await Driver.connect("127.0.0.1", self._served.running.port)
        await subscribe(driver, self.topic)
        await driver.close()

    def transact(self, topic: str, *flags: str, **options: Any) -> dict[str, Any]:
        """Have transactions acknowledge from here and publish there."""
        self._fills += 1
        found = client(
            self._served,
            "transact",
            *flags,
            topic=topic,
            input=self.topic,
            name=f"transact-{self._fills}",
            **options,
        )
        self._waiting -= found["count"]
        return found

    def fill(self, wanted: int) -> None:
        """For so many transactions; what consumers hold beyond that must not be missing."""
        while self._waiting < wanted + SPARE_INPUTS:
            self._fills += 1
            found = load(self._served.running, "publish", topic=self.topic,
                         name=f"fill-{self._fills}", window=1000, bytes=INPUT_BYTES,
                         seconds=0.5)  # fmt: skip
            self._waiting += int(found["count"])


# --- publishing


def publishes(served: Served, window: int) -> Found:
    """The same load in transactions and outside, in turns, with so many messages in flight."""
    segment = topic(served, f"txn-publish-{window}")
    kinds: dict[str, tuple[str, ...]] = {"txn": (), "plain": ("--plain",)}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    work: dict[str, list[float]] = {name: [] for name in kinds}
    count, clients = 0, 0.0
    for number in range(ROUNDS):
        # Who goes first has the colder caches: each does in turn.
        for name in sorted(kinds, reverse=bool(number % 2)):
            got = client(served, "publish", *kinds[name], topic=segment, messages=MESSAGES,
                         name=f"{name}-{number}", window=window, seconds=ROUND_SECONDS)  # fmt: skip
            rates[name].append(got["rate"])
            work[name].append(got["cpu_seconds"] / got["count"])
            count += got["count"]
            clients = max(clients, got["own_cpu"])
    cost = statistics.median(
        plain / own for own, plain in zip(rates["txn"], rates["plain"], strict=True)
    )
    cpu = statistics.median(
        own / plain for own, plain in zip(work["txn"], work["plain"], strict=True)
    )
    name = f"publish, {MESSAGES} messages per transaction, {window} in flight"
    rows = [
        Row(measure=f"{name}, time of each", value=1e6 / statistics.median(rates["txn"]),
            unit="us", anchor="publish without", ratio=cost, samples=count),
        Row(measure=f"{name}, CPU of each", value=statistics.median(work["txn"]) * 1e6,
            unit="us", anchor="publish without", ratio=cpu, samples=count),
        Row(measure=f"{name}, CPU of the client at most", value=clients, unit="cores"),
    ]  # fmt: skip
    missed = judged(f"a publish with {window} in flight", cost, "of a plain one", COST_MAX)
    return Found(rows, missed)


# --- transactions


def concurrent(served: Served, inputs: Inputs, options: argparse.Namespace) -> Found:
    """So many clients, each with one transaction after the other; and all on one connection."""
    segment = topic(served, "txn-concurrent")
    rows, rates = [], []
    plain = load(served.running, "publish", topic=segment, name="anchor", window=1,
                 connections=options.concurrent, seconds=ROUND_SECONDS)  # fmt: skip
    for connections in (options.concurrent, 1):
        inputs.fill(int(options.seconds * 2 * RATE_MIN))
        got = inputs.transact(segment, concurrent=options.concurrent, connections=connections,
                              seconds=options.seconds)  # fmt: skip
        name = f"{options.concurrent} transactions at once, {connections} connections"
        samples = int(got["count"])
        rates.append(got["rate"])
        rows += [
            Row(measure=name, value=got["rate"], unit="/s", samples=samples,
                anchor=f"publishes of {options.concurrent} clients",
                ratio=got["rate"] / plain["rate"]),
            Row(measure=f"{name}, p50", value=got["p50"] * 1e3, unit="ms", samples=samples),
            Row(measure=f"{name}, p99", value=got["p99"] * 1e3, unit="ms", samples=samples),
            Row(measure=f"{name}, CPU of each", unit="us", samples=samples,
                value=got["cpu_seconds"] / samples * 1e6),
            Row(measure=f"{name}, CPU of the clients", value=got["own_cpu"], unit="cores",
                samples=samples),
        ]  # fmt: skip
    slow = f"{options.concurrent} at once: {min(rates):.0f} transactions per second"
    wrong = [f"{slow}, at least {RATE_MIN:g} wanted"] if min(rates) < RATE_MIN else []
    return Found(rows, wrong)


def one_client(served: Served, inputs: Inputs, folder: Path, seconds: float) -> Found:
    """One transaction at a time: how long its commit takes."""
    segment = topic(served, "txn-single")
    plain = load(served.running, "publish", topic=segment, name="anchor", window=1,
                 connections=1, seconds=ROUND_SECONDS)  # fmt: skip
    bare = percentile(sync_loop(folder, 512, 1, BARE_SECONDS), 0.5) * 1e3
    inputs.fill(int(seconds * 2000))
    got = inputs.transact(segment, seconds=seconds)
    samples = int(got["count"])
    p50, p99, whole = (got[name] * 1e3 for name in ("commit_p50", "commit_p99", "p50"))
    beside = f"a publish, {plain['p50'] * 1e3:.3g} ms"
    rows = [
        Row(measure="commit, one client, p50", value=p50, unit="ms", samples=samples,
            anchor="bare sync, p50", ratio=p50 / bare),
        Row(measure="commit, one client, p50", value=p50, unit="ms", samples=samples,
            anchor=beside, ratio=p50 / (plain["p50"] * 1e3)),
        Row(measure="commit, one client, p99", value=p99, unit="ms", samples=samples,
            anchor="a publish, p99", ratio=p99 / (plain["p99"] * 1e3)),
        Row(measure="transaction, one client, p50", value=whole, unit="ms", samples=samples,
            anchor=beside, ratio=whole / (plain["p50"] * 1e3)),
    ]  # fmt: skip
    slow = judged("commit with one client, p50", p50, "ms", COMMIT_P50_MAX_MS)
    return Found(rows, slow + judged("commit, p99", p99, "ms", COMMIT_P99_MAX_MS))


def flatness(served: Served, finished: int) -> Found:
    """What a transaction costs a new server after a thousand others, and after so many."""
    inputs, segment = Inputs(served, topic(served, "txn-inputs")), topic(served, "txn-many")
    name = f"CPU of a transaction after {finished} others"
    done = 0
    costs, rates = [], []
    for goal in (FEW_FINISHED, finished):
        if goal > done:
            inputs.fill(goal - done)
            done += inputs.transact(segment, count=goal - done, **CROWD)["count"]
        settle(served)
        inputs.fill(PROBE)
        settle(served)
        got = inputs.transact(segment, count=PROBE, **CROWD)
        done += got["count"]
        costs.append(got["cpu_seconds"] / got["count"] * 1e6)
        rates.append(got["rate"])
    growth = costs[1] / costs[0]
    few = f"after {FEW_FINISHED}"
    rows = [
        Row(measure=name, value=costs[1], unit="us", anchor=few, ratio=growth, samples=PROBE),
        Row(measure=f"time of each after {finished} others", value=1e6 / rates[1], unit="us",
            anchor=few, ratio=rates[0] / rates[1], samples=PROBE),
    ]  # fmt: skip
    return Found(rows, judged(name, growth, f"of that {few}", GROWTH_MAX))


# --- metadata writes


class Writes(NamedTuple):
    """Changes of the metadata store so far."""

    puts: float
    deletes: float
    decisions: float

    def since(self, before: Writes) -> Writes:
        return Writes(*(now - then for now, then in zip(self, before, strict=True)))


def metrics(served: Served) -> str:
    with urllib.request.urlopen(f"{served.admin_url}/metrics", timeout=REQUEST_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def value_of(text: str, series: str) -> float:
    """The sum of all series whose names and labels begin so."""
    found = re.findall(rf"^{re.escape(series)}.* ([0-9.e+]+)$", text, re.MULTILINE)
    return sum(float(each) for each in found)


def writes(served: Served) -> Writes:
    text = metrics(served)
    return Writes(
        value_of(text, 'magnetar_metadata_changes_total{kind="put"}'),
        value_of(text, 'magnetar_metadata_changes_total{kind="delete"}'),
        value_of(text, 'pulsar_txn_metadata_store_header_cas_total{result="ok"}'),
    )


class Shape(NamedTuple):
    """What a transaction does: messages to each of the segments, and commands of one ack each."""

    messages: int
    segments: int
    acks: int


SHAPES: Final = (Shape(1, 1, 1), Shape(100, 1, 1), Shape(100, 3, 10))


class Single:
    """One client with producers and a consumer, each transaction of which is looked at."""

    def __init__(self, served: Served, driver: Driver, segments: Sequence[str]) -> None:
        self._served = served
        self._driver = driver
        self._segments = segments
        self._sequence = 0

    async def open(self) -> None:
        for number, segment in enumerate(self._segments):
            await self._driver.request("PRODUCER", topic=segment, producer_id=number)
        await subscribe(self._driver, self._segments[0])
        for _ in range(sum(shape.acks for shape in SHAPES) + 1):
            self._sequence += 1
            await self._driver.publish(0, self._sequence, build_message(b"input"))
        self._driver.send("FLOW", consumer_id=1, messagePermits=100_000)

    async def run(self, shape: Shape) -> tuple[Writes, Writes]:
        """Writes up to the commit's answer, and those that came afterwards."""
        served, driver = self._served, self._driver
        before = writes(served)
        answer = await driver.request("NEW_TXN", txn_ttl_millis=TTL_MS, scalable=True)
        ids = txn_fields(txn_of(answer))
        for number in range(shape.segments):
            for _ in range(shape.messages):
                self._sequence += 1
                message = build_message(bytes(1024), sequence_id=self._sequence, **ids)
                await driver.publish(number, self._sequence, message, **ids)
        for _ in range(shape.acks):
            await driver.request(
                "ACK", consumer_id=1, ack_type=0, message_id=[await self._input()], **ids
            )
        # All of it was answered and nothing is decided, so that nothing is under way: what the
        # decision itself writes is counted by the decisions, and what it gives rise to comes later.
        worked = writes(served).since(before)
        await driver.request("END_TXN", txn_action=COMMIT, scalable=True, **ids)
        await asyncio.to_thread(settle, served)
        total = writes(served).since(before)
        until = Writes(worked.puts + total.decisions, worked.deletes, total.decisions)
        return until, total.since(until)

    async def _input(self) -> dict[str, int]:
        while True:
            pushed: Any = await self._driver.pushes.get()
            if type(pushed).__name__ == "Delivered":
                found = pushed.body.message_id
                return {"ledgerId": found.ledgerId, "entryId": found.entryId}


async def metadata_writes(served: Served) -> Found:
    """For transactions of several shapes: what the store is asked to write."""
    segments = [topic(served, f"txn-writes-{number}") for number in range(3)]
    driver = await Driver.connect("127.0.0.1", served.running.port)
    single = Single(served, driver, segments)
    await single.open()
    # The first one of a coordinator takes a block of ids, the first ack the cursor's record.
    await single.run(Shape(1, len(segments), 1))
    found = Found([], [])
    for shape in SHAPES:
        until, later = await single.run(shape)
        name = f"metadata writes, {shape.messages} messages x {shape.segments}, {shape.acks} acks"
        most = 3 + shape.segments + shape.acks
        found.rows.extend(
            [
                Row(measure=f"{name}, to the answer", value=until.puts + until.deletes, unit="",
                    anchor="the most wanted", ratio=(until.puts + until.deletes) / most),
                Row(measure=f"{name}, later puts", value=later.puts, unit=""),
                Row(measure=f"{name}, later deletes", value=later.deletes, unit=""),
            ]
        )  # fmt: skip
        found.wrong.extend(judged(name, until.puts + until.deletes, "writes", most))
    await driver.close()
    return found


# --- a consumer that waits


async def blocked(served: Served) -> Found:
    """What the server does while a consumer waits behind an open transaction."""
    segment = topic(served, "txn-blocked")
    driver = await Driver.connect("127.0.0.1", served.running.port)
    await driver.request("PRODUCER", topic=segment, producer_id=1)
    await subscribe(driver, segment)
    driver.send("FLOW", consumer_id=1, messagePermits=100_000)
    await asyncio.to_thread(settle, served)
    idle = await asyncio.to_thread(cores, served, BLOCKED_SECONDS)
    answer = await driver.request("NEW_TXN", txn_ttl_millis=TTL_MS, scalable=True)
    ids = txn_fields(txn_of(answer))
    await driver.publish(1, 0, build_message(bytes(1024), **ids), **ids)
    for number in range(1, BEHIND + 1):
        await driver.publish(1, number, build_message(bytes(1024), sequence_id=number))
    if len(driver.pushes):
        raise SystemExit("a message came before its transaction was committed")
    await asyncio.to_thread(settle, served)
    used = await asyncio.to_thread(cores, served, BLOCKED_SECONDS)
    await driver.request("END_TXN", txn_action=COMMIT, scalable=True, **ids)
    await driver.close()
    name = "CPU of the server, a consumer waits behind an open transaction"
    rows = [
        Row(measure=name, value=used * 100, unit="%"),
        Row(measure="CPU of the server, no transaction", value=idle * 100, unit="%"),
    ]
    return Found(rows, judged(name, used * 100, "%", BLOCKED_MAX * 100))


def wakes(served: Served, folder: Path) -> Found:
    """From the answer to a commit until the consumer has the message."""
    got = client(served, "wake", topic=topic(served, "txn-wake"), count=WAKES)
    bare = percentile(sync_loop(folder, 1124, 1, BARE_SECONDS), 0.5)
    rows = [
        Row(measure=f"from the commit's answer to the delivery, {name}", value=got[name] * 1e3,
            unit="ms", anchor="bare sync, p50", ratio=got[name] / bare, samples=WAKES)
        for name in ("p50", "p99")
    ]  # fmt: skip
    return Found(
        rows, judged("delivery after the commit, p99", got["p99"] * 1e3, "ms", WAKE_P99_MAX_MS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.txn")
    parser.add_argument("--finished", type=int, default=100_000,
                        help="transactions after which the cost is taken again")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--concurrent", type=int, default=64, help="transactions at once")
    options = parser.parse_args()
    with scratch() as folder, serving(folder) as served:
        inputs = Inputs(served, topic(served, "txn-inputs"))
        found = [
            asyncio.run(metadata_writes(served)),
            asyncio.run(blocked(served)),
            wakes(served, folder),
            *(publishes(served, window) for window in WINDOWS),
            one_client(served, inputs, folder, options.seconds),
            concurrent(served, inputs, options),
        ]
    with scratch() as folder, serving(folder) as served:
        found.append(flatness(served, options.finished))
    publish("txn", [row for each in found for row in each.rows])
    wrong = [text for each in found for text in each.wrong]
    for text in wrong:
        print(f"not as wanted: {text}")
    if not wrong:
        print("everything is as wanted")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
