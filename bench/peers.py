"""Magnetar beside Apache Pulsar and Apache Kafka: one command, one machine, in turns.

    python -m bench.peers [--turns 3] [--seconds 3] [--systems Magnetar,Pulsar,Kafka]

`make bench-peers` runs it. In each turn every system is started on an empty folder, warmed up by
the load that is measured next, measured, and ended; which one is first changes from turn to turn.
Servers sync what they acknowledge. What the systems have not in common is printed below the table
(`bench/peers_report.py`). A load that a system fails is told there, too, and the run goes on.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from bench.bare import sync_loop
from bench.peers_report import (
    NOT_THE_SAME,
    OURS,
    SYSTEMS,
    Machine,
    Report,
    cells,
    circumstances,
    headings,
    rows,
)
from bench.peers_sides import PROJECTS, STARTS, TOPICS, Side, versions
from bench.report import RESULTS, keep
from bench.storage import percentile, scratch
from magnetar.errors import MagnetarError
from tests.interop_java.maven import BuildFailed, lacking

WHOLE: Final = RESULTS / "peers" / "report.json"
BATCH: Final = 15
"""Messages of 1 KiB: Kafka's producers gather up to 16 KiB unless told otherwise."""

BACKLOG_PER_SECOND: Final = 50_000
"""Messages to be read, for each second of the other loads."""

CLIENTS: Final = 64
WARM: Final = 0.75
"""How long a load warms a system up, against how long it is measured; the first one twice that."""

SYNC_SECONDS: Final = 0.5
TABLE_WIDTH: Final = 190
REASON_CHARACTERS: Final = 200

FAILURES: Final = (AssertionError, MagnetarError, OSError, subprocess.SubprocessError)
"""How starts, requests and generators fail; `TimeoutError` is an `OSError`."""

Found = dict[str, float]


class Turn:
    """One system: its start, its loads one after the other, and its end."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._say = say
        self.found: Found = {}
        self.failures: list[str] = []

    def run(self, start: Callable[[Path], AbstractContextManager[Side]]) -> None:
        self._try("start", partial(self._started, start))

    def _started(self, start: Callable[[Path], AbstractContextManager[Side]]) -> None:
        with scratch() as folder, start(folder) as side:
            self._side = side
            self._loads()

    def _loads(self) -> None:
        self._try("pipelined", self._pipelined)
        self._try("batches", self._batches)
        self._try("crowd", self._crowd)
        self._try("single", self._single)
        self._try("dispatch", self._dispatch)
        for kind in self._side.kinds:
            self._try(f"{kind}_crowd", partial(self._transactions, kind))
        self.found["memory"] = resident_mib(self._side.running.pid)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        self._say(name)
        try:
            work()
        except FAILURES as error:
            self.failures.append(f"{name}: {reason_of(error)}")

    def _pipelined(self) -> None:
        load = {"connections": TOPICS, "window": 1000}
        self._side.publish(TOPICS, seconds=self._seconds * WARM * 2, **load)
        self._published("pipelined", self._side.publish(TOPICS, seconds=self._seconds, **load))

    def _batches(self) -> None:
        load = {"connections": TOPICS, "window": 100, "messages": BATCH, "bytes": BATCH * 1024}
        self._side.publish(TOPICS, seconds=self._seconds * WARM / 2, **load)
        got = self._side.publish(TOPICS, seconds=self._seconds, **load)
        self.found["batches"] = got["rate"] * BATCH

    def _crowd(self) -> None:
        load = {"connections": 100, "window": 1}
        self._side.publish(1, seconds=self._seconds * WARM, **load)
        self._published("crowd", self._side.publish(1, seconds=self._seconds, **load))

    def _single(self) -> None:
        load = {"connections": 1, "window": 1}
        self._side.publish(1, seconds=self._seconds * WARM / 2, **load)
        got = self._side.publish(1, seconds=self._seconds, **load)
        for name in ("p50", "p99"):
            self.found[f"single_{name}"] = got[name] * 1e3

    def _dispatch(self) -> None:
        count = self._side.fill(int(BACKLOG_PER_SECOND * self._seconds))
        self._side.read(count, "first")
        self.found["dispatch"] = self._side.read(count, "second")["rate"]

    def _transactions(self, kind: str) -> None:
        for clients in (CLIENTS, 1):
            self._side.transact(kind, clients, self._seconds * WARM)
            got = self._side.transact(kind, clients, self._seconds)
            if clients == CLIENTS:
                self.found[f"{kind}_crowd"] = got["rate"]
                continue
            self.found[f"{kind}_single_p50"] = got["p50"] * 1e3
            self.found[f"{kind}_commit_p50"] = got["commit_p50"] * 1e3

    def _published(self, name: str, got: dict[str, Any]) -> None:
        self.found[name] = got["rate"]
        self.found[f"{name}_cpu"] = got["cpu"] / got["rate"] * 1e6


def reason_of(error: Exception) -> str:
    """What went wrong, in a line; of a generator, the last one that it wrote."""
    written = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(written).splitlines() if line.strip()]
    return lines[-1][:REASON_CHARACTERS] if lines else type(error).__name__


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# --- the whole


class Taken(NamedTuple):
    """The samples by measure and system, and what failed."""

    samples: dict[str, dict[str, list[float | None]]]
    failures: list[str]


def turns_of(systems: Sequence[str], turns: int, seconds: float) -> Taken:
    """Every system in each turn, on a folder of its own."""
    found: dict[str, list[Found]] = {name: [] for name in systems}
    failures: list[str] = []
    began = time.monotonic()
    for number in range(turns):
        # Who is first has the cooler machine: each is in turn.
        first = number % len(systems)
        for name in [*systems[first:], *systems[:first]]:
            heading = f"turn {number + 1} of {turns}  {name}"
            turn = Turn(seconds, partial(progress, began, heading))
            turn.run(STARTS[name])
            found[name].append(turn.found)
            failures += [f"{heading}: {each}" for each in turn.failures]
    keys = dict.fromkeys(key for each in found.values() for turn in each for key in turn)
    samples = {
        key: {name: [taken.get(key) for taken in each] for name, each in found.items()}
        for key in keys
    }
    return Taken(samples, failures)


def progress(began: float, heading: str, step: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {heading}: {step}", flush=True)


def machine(load_before: float) -> Machine:
    """What ran it. `load_before` was taken before anything was started."""
    described = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in described if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with scratch() as folder:
        sync = percentile(sync_loop(folder, 1024, 1, SYNC_SECONDS), 0.5) * 1e3
    return Machine(
        processor=models[0] if models else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=memory / (1 << 30),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        sync_p50_ms=sync,
        load_before=load_before,
        load_after=os.getloadavg()[0],
    )


def show(report: Report) -> None:
    """Ratios first, then each system's figures, then what is to be known of them."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    table = Table(title="median (least-most) of the turns", title_justify="left")
    for number, text in enumerate(headings(report)):
        table.add_column(text, justify="right" if number else "left")
    for line in cells(report):
        table.add_row(*line)
    console.print(table)
    notes = [f"- {each}" for each in NOT_THE_SAME]
    failed = [f"failed: {each}" for each in report.failures]
    for text in [*circumstances(report), "Not the same:", *notes, *failed]:
        console.print(text, highlight=False, markup=False)


def prepared(systems: Sequence[str]) -> str | None:
    """Fetch what is not here; why that cannot be done, if it cannot."""
    projects = [PROJECTS[name] for name in systems if name in PROJECTS]
    if not projects:
        return None
    missing = lacking()
    if missing is not None:
        return f"Apache Pulsar and Kafka need Java 17 or newer, and Maven: {missing}"
    try:
        for project in projects:
            project.build()
    except BuildFailed as error:
        return f"Maven could not fetch a peer: {error}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, Magnetar first")
    options = parser.parse_args()
    systems: list[str] = options.systems.split(",")
    if systems[0] != OURS or not set(systems) <= set(SYSTEMS):
        parser.error(f"--systems: {OURS} first, then any of {', '.join(SYSTEMS[1:])}")
    # So that the servers end, too, where somebody ends this program.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    print("looking for what is to be fetched (once, about 300 MB)", flush=True)
    missing = prepared(systems)
    if missing is not None:
        print(f"magnetar: {missing}", file=sys.stderr)
        return 2
    before = os.getloadavg()[0]
    taken = turns_of(systems, options.turns, options.seconds)
    report = Report(
        date=time.strftime("%Y-%m-%d"),
        machine=machine(before),
        versions=versions(systems),
        turns=options.turns,
        seconds=options.seconds,
        samples=taken.samples,
        failures=taken.failures,
    )
    keep("peers", rows(report))
    WHOLE.parent.mkdir(parents=True, exist_ok=True)
    WHOLE.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    show(report)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the servers are ended")
