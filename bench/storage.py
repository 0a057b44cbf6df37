"""How fast the embedded storage is, as ratios to bare loops of the same batches in the same run.

`make bench` runs all of it. Every figure includes the whole work: settling (moving entries to
ledger files and changes to SQLite) goes on while the load runs.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop

from bench.bare import sqlite_loop, sync_loop
from bench.own_sync import OwnSyncMetadata
from bench.report import Row, publish
from magnetar.managed_ledger.managed_ledger import EARLIEST, ManagedLedger
from magnetar.metadata.api import Index, MetadataStore
from magnetar.runtime import metrics
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.limits import Limits
from magnetar.server.embedded import Storage, open_storage

SECONDS = 3.0
WARM_UP = 0.5
ENTRY = bytes(1024)
ENTRY_ON_DISK = 1024 + 25
VALUE = bytes(218)
PIPELINE = 1000
WRITERS = (1, 10, 100)

Work = Callable[[int], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A rate, the latencies of single operations, and the mean size of a journal batch."""

    rate: float
    times: list[float]
    records_per_batch: float

    def p(self, quantile: float) -> float:
        return percentile(self.times, quantile)


def percentile(times: list[float], quantile: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]


async def with_writers(storage: Storage, writers: int, work: Work) -> Measured:
    """`writers` coroutines, each with one operation in flight."""
    times: list[float] = []
    numbers = iter(range(1 << 62))
    start = time.perf_counter() + WARM_UP
    end = start + SECONDS

    async def write() -> None:
        while (now := time.perf_counter()) < end:
            await work(next(numbers))
            if now >= start:
                times.append(time.perf_counter() - now)

    batches = journal_batches(storage)
    await asyncio.gather(*[write() for _ in range(writers)])
    return Measured(len(times) / SECONDS, times, batches())


async def pipelined(storage: Storage, submit: Work) -> Measured:
    """One coroutine with PIPELINE operations in flight."""
    waiting: deque[tuple[float, Awaitable[object]]] = deque()
    times: list[float] = []
    batches = journal_batches(storage)
    start = time.perf_counter() + WARM_UP
    end = start + SECONDS
    number = 0
    while (now := time.perf_counter()) < end:
        waiting.append((now, submit(number)))
        number += 1
        if len(waiting) >= PIPELINE:
            begun, future = waiting.popleft()
            await future
            if begun >= start:
                times.append(time.perf_counter() - begun)
    for _, future in waiting:
        await future
    return Measured(len(times) / SECONDS, times, batches())


def journal_batches(storage: Storage) -> Callable[[], float]:
    """A function that tells the mean records per batch since now."""
    storage.count()
    before = _journal_counts()

    def mean() -> float:
        storage.count()
        records, batches = (now - then for now, then in zip(_journal_counts(), before, strict=True))
        return records / batches if batches else 1.0

    return mean


def _journal_counts() -> tuple[float, float]:
    found = {}
    for line in metrics.render().decode().splitlines():
        name, _, value = line.partition(" ")
        found[name] = value
    names = ("magnetar_journal_records_total", "magnetar_journal_batches_total")
    return float(found[names[0]]), float(found[names[1]])


# --- the measures ---


async def appends(folder: Path) -> list[Row]:
    rows: list[Row] = []
    async with opened(folder) as storage:
        ledger = await managed_ledger(storage)
        for writers in WRITERS:
            got = await with_writers(storage, writers, lambda _: ledger.append(ENTRY))
            rows += _append_rows(f"append, {writers} writers", got, folder)
        got = await pipelined(storage, lambda _: ledger.append(ENTRY))
        rows += _append_rows(f"append, pipelined {PIPELINE}", got, folder)
        await ledger.close()
    return rows


def _append_rows(name: str, got: Measured, folder: Path) -> list[Row]:
    per_sync = max(1, round(got.records_per_batch))
    bare = sync_loop(folder, ENTRY_ON_DISK, per_sync, SECONDS / 2)
    bare_rate = per_sync / statistics.fmean(bare)
    anchor = f"bare fdatasync, {per_sync} a batch"
    return _rows(name, got, bare, bare_rate, anchor)


async def puts(folder: Path) -> list[Row]:
    rows: list[Row] = []
    async with opened(folder) as storage, storage.connect() as store:
        for writers in WRITERS:
            got = await with_writers(storage, writers, partial(put, store, f"w{writers}"))
            rows += _put_rows(f"metadata put, {writers} writers", got, folder)
        got = await pipelined(storage, partial(put, store, "p"))
        rows += _put_rows(f"metadata put, pipelined {PIPELINE}", got, folder)
    return rows


def put(store: MetadataStore, name: str, number: int) -> Awaitable[object]:
    key = f"{name}-{number:020d}"
    return store.put(f"/bench/{key}", VALUE, indexes=(Index("by-key", key[-6:]),))


def _put_rows(name: str, got: Measured, folder: Path) -> list[Row]:
    per_commit = max(1, round(got.records_per_batch))
    bare = sqlite_loop(folder, len(VALUE), per_commit, SECONDS / 2)
    bare_rate = per_commit / statistics.fmean(bare)
    return _rows(name, got, bare, bare_rate, f"bare SQLite FULL, {per_commit} a commit")


def _rows(name: str, got: Measured, bare: list[float], bare_rate: float, anchor: str) -> list[Row]:
    samples = len(got.times)
    return [
        Row(measure=name, value=got.rate, unit="/s", anchor=anchor,
            ratio=got.rate / bare_rate, samples=samples),
        *(
            Row(measure=f"{name}, p{quantile * 100:.0f}", value=got.p(quantile) * 1e6, unit="us",
                anchor=anchor, ratio=got.p(quantile) / percentile(bare, quantile), samples=samples)
            for quantile in (0.5, 0.99)
        ),
    ]  # fmt: skip


async def together(folder: Path) -> list[Row]:
    """One append and one put, as a transaction does, by the shared journal and by two syncs."""
    rows: list[Row] = []
    async with opened(folder) as storage, storage.connect() as store:
        ledger = await managed_ledger(storage)
        own = OwnSyncMetadata()
        own_store = await own.open(folder)

        async def both(metadata: MetadataStore, name: str, number: int) -> None:
            stored = put(metadata, name, number)
            await ledger.append(ENTRY)
            await stored

        for writers in (1, 100):
            alone = await with_writers(storage, writers, lambda _: ledger.append(ENTRY))
            for name, metadata in (("shared journal", store), ("SQLite's own sync", own_store)):
                got = await with_writers(storage, writers, partial(both, metadata, f"t{writers}"))
                measure = f"append + put, {writers} writers, {name}"
                rows += _rows(measure, got, alone.times, alone.rate, "append alone")
        await own.close()
        await ledger.close()
    return rows


async def cursor_of_many_holes(folder: Path, holes: int = 1_000_000) -> list[Row]:
    """Open a managed ledger whose cursor has a million individually acknowledged entries."""
    payload = b"x" * 16
    async with opened(folder) as storage, storage.connect() as store:
        ledger = await ManagedLedger.open(
            "holes", store, storage.ledgers, clock=SystemClock(), limits=Limits()
        )
        cursor = await ledger.create_cursor("sub", EARLIEST)
        for _ in range(2 * holes // PIPELINE):
            positions = await asyncio.gather(*[ledger.append(payload) for _ in range(PIPELINE)])
            for position in positions[1::2]:
                cursor.ack(position)
        await cursor.flush()
        await ledger.close()
        start = time.perf_counter()
        ledger = await ManagedLedger.open(
            "holes", store, storage.ledgers, clock=SystemClock(), limits=Limits()
        )
        seconds = time.perf_counter() - start
        await ledger.close()
    return [Row(measure=f"open a cursor with {holes} holes", value=seconds, unit="s")]


def opening(folder: Path) -> list[Row]:
    """Open 10^6 records and 10^4 ledgers in a fresh process."""
    uvloop.run(_fill(folder))
    code = (
        "import sys, pathlib; from bench.storage import open_and_report;"
        "open_and_report(pathlib.Path(sys.argv[1]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(folder / "data")],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, mib = map(float, answer.stdout.split())
    what = "open 10^6 records and 10^4 ledgers"
    return [
        Row(measure=what, value=seconds, unit="s"),
        Row(measure=f"{what}, resident memory", value=mib, unit="MiB"),
    ]


async def _fill(folder: Path) -> None:
    async with opened(folder) as storage, storage.connect() as store:
        for _ in range(100):
            writers = await asyncio.gather(*[storage.ledgers.create() for _ in range(100)])
            await asyncio.gather(*[writer.append(ENTRY) for writer in writers])
            await asyncio.gather(*[writer.close() for writer in writers])
        for first in range(0, 1_000_000, 10_000):
            await asyncio.gather(*[put(store, "many", first + each) for each in range(10_000)])


def open_and_report(folder: Path) -> None:
    """For a fresh process: print the seconds that opening took and the resident MiB."""

    async def run() -> None:
        start = time.perf_counter()
        storage = await open_storage(folder)
        seconds = time.perf_counter() - start
        print(seconds, _peak_mib())
        await storage.close()

    uvloop.run(run())


def _peak_mib() -> float:
    """The most memory this process held. (`getrusage` would count the parent's before exec.)"""
    status = Path("/proc/self/status").read_text()
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(peak) / 1024


# --- plumbing ---


class opened:
    """An embedded storage in a folder of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "data"
        self._storage: Storage | None = None

    async def __aenter__(self) -> Storage:
        self._storage = await open_storage(self._folder)
        return self._storage

    async def __aexit__(self, *_: object) -> None:
        assert self._storage is not None
        await self._storage.close()


async def managed_ledger(storage: Storage) -> ManagedLedger:
    return await ManagedLedger.open(
        "bench", storage.connect(), storage.ledgers, clock=SystemClock(), limits=Limits()
    )


@contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=Path.cwd()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    rows: list[Row] = []
    for measure in (appends, puts, together, cursor_of_many_holes):
        with scratch() as folder:
            rows += uvloop.run(measure(folder))
    with scratch() as folder:
        rows += opening(folder)
    publish("storage", rows)


if __name__ == "__main__":
    main()
