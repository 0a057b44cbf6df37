"""Whether layouts are looked up and told as quickly with ten thousand segments as with a few.

    python -m bench.layouts [--topics 1000] [--segments 10] [--lookups 2000] [--splits 200]

A server gets scalable topics through the admin interface: first a few, then all. Each time:
lookups of layouts (command 70), LOOKUP and PRODUCER of random segments, layouts by REST; then,
with a watch of every layout and one of the namespace open, splits of random topics and new topics,
and how long it took until the watch was told (71, 77), counted from the start of the admin call
and from its answer. Then the server is stopped, started, killed and started. Every figure stands
beside that of the few topics, or of the empty server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.layouts_clients import (
    CREATION_FIGURES,
    LOOKUP,
    NAMESPACE,
    SEGMENT,
    SPLIT_KNOWN,
    WAIT_SECONDS,
    Client,
    Times,
    TopicsWatch,
    Watch,
    administering,
    lines_to,
    timed,
)
from bench.report import Row, publish
from bench.split import Served, serving
from bench.storage import percentile, scratch

FEW = 20
LINES = 10
CREATED_AT_ONCE = 8
STOP_SECONDS = 120.0
POLL_SECONDS = 0.02
P99_MAX_MS = 10.0
MEMORY_MAX_MIB = 500.0
RESTART_MAX_SECONDS = 2.0

LIMITED = (LOOKUP, SPLIT_KNOWN)
"""Of many at a time the ratio counts: how long one of them waits depends on the machine."""


def topic_name(number: int) -> str:
    return f"{NAMESPACE}/layouts-{number}"


@contextmanager
def killed_at_end(folder: Path) -> Iterator[Served]:
    """A server process; how long a stop takes is measured apart."""
    with serving(folder) as served:
        try:
            yield served
        finally:
            os.kill(served.running.pid, signal.SIGKILL)


def stop(pid: int) -> float:
    """Tell a server to stop; the seconds until it has."""
    begun = time.perf_counter()
    os.kill(pid, signal.SIGTERM)
    while " Z " not in Path(f"/proc/{pid}/stat").read_text():  # whoever started it waits for it
        if time.perf_counter() - begun > STOP_SECONDS:
            raise SystemExit(f"the server did not stop within {STOP_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - begun


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- measuring


class Found(NamedTuple):
    times: Times
    opened: float
    """Seconds that it took to open all the watches."""
    memory: list[float]
    """MiB: before the lookups, after them, with the watches, after the splits."""


async def measure(served: Served, topics: Sequence[str], options: argparse.Namespace) -> Found:
    pid, memory = served.running.pid, [memory_mib(served.running.pid)]
    chance = random.Random(options.seed)
    async with administering(served) as admin, lines_to(served, LINES + 1) as lines:
        client = Client(admin, lines[:LINES], topics, chance)
        times = await client.lookups(options.lookups)
        memory.append(memory_mib(pid))
        begun = time.perf_counter()
        watches = [Watch(lines[number % LINES], topic) for number, topic in enumerate(topics)]
        for watch in watches:
            await watch.past(-1)
        opened = time.perf_counter() - begun
        names = TopicsWatch(lines[LINES])
        await names.told(topics[0])
        memory.append(memory_mib(pid))
        times |= await client.splits(watches, options.splits)
        times |= await client.creations(names, f"new-{len(topics)}")
        await names.close()
        memory.append(memory_mib(pid))
    return Found(times, opened, memory)


async def create(served: Served, topics: Iterable[str], segments: int) -> list[float]:
    """Create topics, several at a time; how long each took."""
    wanted = list(topics)
    left = iter(wanted)
    console = Console(stderr=True)
    columns = (TextColumn("creating topics"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
    async with administering(served) as admin:
        # Topics without any load would be merged.
        policy = f"/admin/v2/namespaces/{NAMESPACE}/scalableTopicAutoScalePolicy"
        await admin("POST", policy, {"enabled": False})
        with bar:
            task = bar.add_task("", total=len(wanted))

            async def one() -> float:
                begun = time.perf_counter()
                await admin.create(next(left), segments)
                bar.advance(task)
                return time.perf_counter() - begun

            return await timed(len(wanted), CREATED_AT_ONCE, one)


async def controlled(served: Served, topics: int) -> None:
    """Wait until so many topics have their controllers."""
    async with administering(served) as admin, asyncio.timeout(WAIT_SECONDS):
        while True:
            for text in (await admin("GET", "/metrics")).splitlines():
                name, _, value = text.partition(" ")
                if name.startswith("magnetar_scalable_controllers") and float(value) >= topics:
                    return
            await asyncio.sleep(POLL_SECONDS)


async def cold(served: Served, topics: Sequence[str], options: argparse.Namespace) -> list[float]:
    """LOOKUP and PRODUCER of segments that nobody has used since the start."""
    async with administering(served) as admin, lines_to(served, 1) as lines:
        client = Client(admin, lines, topics, random.Random(options.seed))
        return await timed(min(options.lookups, 10 * len(topics)) // 8, 1, client.produce)


# --- what was found


def milliseconds(
    name: str, times: list[float], anchor: str | None = None, beside: list[float] | None = None
) -> list[Row]:
    rows = []
    for kind, quantile in (("p50", 0.5), ("p99", 0.99)):
        value, other = percentile(times, quantile), None
        if beside is not None:
            other = percentile(beside, quantile)
        is_compared = other is not None and other > 0 < value
        rows.append(
            Row(
                measure=f"{name}, {kind}",
                value=value * 1e3,
                unit="ms",
                anchor=anchor if is_compared else None,
                ratio=value / other if is_compared and other else None,
                samples=len(times),
            )
        )
    return rows


def seconds(name: str, value: float, anchor: str | None = None, other: float = 1.0) -> Row:
    ratio = None if anchor is None else value / other
    return Row(measure=name, value=value, unit="s", anchor=anchor, ratio=ratio)


def memory_rows(few: Found, many: Found, empty: float, options: argparse.Namespace) -> list[Row]:
    moments = ("", ", looked up", ", watched", ", split")
    found = [(f"{FEW} topics", few.memory[0])]
    found += [
        (f"{options.topics:,} topics{moment}", value)
        for moment, value in zip(moments, many.memory, strict=True)
    ]
    return [
        Row(measure=f"memory, {name}", value=value, unit="MiB", anchor="the empty server",
            ratio=value / empty)
        for name, value in [("empty", empty), *found]
    ]  # fmt: skip


def started(folder: Path, topics: Sequence[str], count: int, options: argparse.Namespace,
            anchor: float, how: str) -> list[Row]:  # fmt: skip
    """Start the server upon what it has; the figures."""
    begun = time.perf_counter()
    with killed_at_end(folder) as served:
        ready = time.perf_counter() - begun
        uvloop.run(controlled(served, count))
        led = time.perf_counter() - begun
        rows = [
            seconds(f"start after it was {how}, ready", ready, "the empty server", anchor),
            seconds(f"start after it was {how}, all controllers", led, "the empty server", anchor),
        ]
        if how == "stopped":
            rows += milliseconds(f"{SEGMENT}, cold", uvloop.run(cold(served, topics, options)))
    return rows


def run(folder: Path, options: argparse.Namespace) -> list[Row]:
    topics = [topic_name(number) for number in range(options.topics)]
    begun = time.perf_counter()
    with killed_at_end(folder) as served:
        first_start = time.perf_counter() - begun
        empty = memory_mib(served.running.pid)
        made_few = uvloop.run(create(served, topics[:FEW], options.segments))
        few = uvloop.run(measure(served, topics[:FEW], options))
        begun = time.perf_counter()
        made = uvloop.run(create(served, topics[FEW:], options.segments))
        creating = time.perf_counter() - begun
        many = uvloop.run(measure(served, topics, options))
        stopping = stop(served.running.pid)
    count = len(topics) + 2 * CREATION_FIGURES
    beside = f"{FEW} topics"
    rows = [
        seconds("creating the topics, all", creating),
        *milliseconds(f"creating a topic, {CREATED_AT_ONCE} at a time", made, beside, made_few),
    ]
    for name, times in many.times.items():
        rows += milliseconds(name, times, beside, few.times[name])
    rows += [
        seconds(f"opening {len(topics):,} watches", many.opened),
        *memory_rows(few, many, empty, options),
        seconds("stop", stopping),
        *started(folder, topics, count, options, first_start, "stopped"),
        *started(folder, topics, count, options, first_start, "killed"),
    ]
    return rows


def not_as_wanted(rows: Iterable[Row]) -> list[str]:
    limits = {f"{name}, p99": P99_MAX_MS for name in LIMITED}
    wrong = []
    for row in rows:
        limit = limits.get(row.measure)
        if row.measure.startswith("memory"):
            limit = MEMORY_MAX_MIB
        elif row.measure.startswith("start after"):
            limit = RESTART_MAX_SECONDS
        if limit is not None and row.value > limit:
            wrong.append(f"{row.measure}: {row.value:.3g} {row.unit}, at most {limit:g} wanted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.layouts")
    parser.add_argument("--topics", type=int, default=1000, help=f"more than {FEW}")
    parser.add_argument("--segments", type=int, default=10, help="of each topic")
    parser.add_argument("--lookups", type=int, default=2000, help="one at a time; others by it")
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.topics <= FEW or options.lookups < 8:
        parser.error(f"more than {FEW} topics and at least 8 lookups")
    load_before = os.getloadavg()[0]
    with scratch() as folder:
        rows = run(folder, options)
    publish("layouts", rows)
    load = f"{load_before:.2f} before, {os.getloadavg()[0]:.2f} after"
    print(f"seed {options.seed}; load of the machine: {load}")
    wrong = not_as_wanted(rows)
    for text in wrong:
        print(f"not as wanted: {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
