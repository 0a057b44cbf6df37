"""Whether a topic can split and merge under load without its clients noticing.

    python -m bench.split [--rate 5000] [--segments 8] [--pause 0.4]

A producer with keyed traffic and a stream, a queue and a checkpoint consumer are at work while the
topic goes from one segment to eight and back, one change after the other, through the admin
interface. Then: is every message there, is every key in order, and how long did receipts take,
counted from the moment at which each message was due? Beside it: publishing to a segment and to a
regular topic, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench.broker import READY_SECONDS, Running, load
from bench.report import Row, publish
from bench.storage import percentile, scratch

TOPIC = "public/default/split"
PLAIN = "public/default/plain"
WARM_UP_SECONDS = 1.0
SETTLE_SECONDS = 0.2
"""So long after a change has been answered, a slow receipt still counts as caused by it."""

DONE_SECONDS = 120.0
REQUEST_SECONDS = 30.0
ROUNDS = 7
ROUND_SECONDS = 1.5

P99_MAX_MS = 50.0
STALL_MAX_MS = 200.0
COST_MAX = 1.05


# --- the server


class Served(NamedTuple):
    running: Running
    url: str
    admin_url: str

    def admin(self, method: str, path: str, body: object = None) -> Any:
        """A request to the admin interface; what it answers, if anything."""
        request = urllib.request.Request(
            f"{self.admin_url}/admin/v2/scalable/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            data = answer.read()
        return json.loads(data) if data else None

    def create(self, topic: str) -> None:
        """A topic of one segment that changes only when it is told to."""
        self.admin("PUT", topic)
        self.admin("POST", f"{topic}/autoScalePolicy", {"enabled": False})


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    command = [str(Path(sys.executable).with_name("magnetar")), "serve", "--json"]
    options = ["--port", "0", "--admin-port", "0", "--log-level", "error"]
    process = subprocess.Popen(
        [*command, "--data", str(folder / "data"), *options], stdout=subprocess.PIPE, text=True
    )
    try:
        ready = json.loads(_pipe(process.stdout).readline())
        port = int(ready["service_url"].rpartition(":")[2])
        yield Served(Running(port, process.pid), ready["service_url"], ready["admin_url"])
    finally:
        process.terminate()
        process.wait(READY_SECONDS)
        _pipe(process.stdout).close()


@contextmanager
def client(kind: str, served: Served, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that is ready; it works until it is told to end."""
    target = ["--url", served.url, "--topic", f"topic://{TOPIC}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.split_load", kind, *target, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ready = _pipe(process.stdout).readline().strip()
        if ready != "ready":
            raise SystemExit(f"the {kind} process did not start")
        yield process
    finally:
        process.kill()
        process.wait(READY_SECONDS)
        for pipe in (process.stdin, process.stdout):
            _pipe(pipe).close()


def finish(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """Tell a client to end; what it found."""
    output, _ = process.communicate(f"{line}\n", timeout=DONE_SECONDS)
    if process.returncode:
        raise SystemExit(f"a client process failed with status {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


# --- the changes


class Part(NamedTuple):
    """An active segment."""

    start: int
    end: int
    segment_id: int


def parts_of(record: dict[str, Any]) -> list[Part]:
    """The active segments of a topic's record, in ring order."""
    return sorted(
        Part(each["hashRange"]["start"], each["hashRange"]["end"], each["segmentId"])
        for each in record["segments"].values()
        if each["state"] == "ACTIVE"
    )


def next_split(parts: Sequence[Part]) -> str:
    """The widest segment, and of those the first."""
    widest = max(parts, key=lambda part: (part.end - part.start, -part.start))
    return f"split/{widest.segment_id}"


def next_merge(parts: Sequence[Part]) -> str:
    """The two neighbours that are smallest together."""
    lower, upper = min(pairwise(parts), key=lambda pair: (pair[1].end - pair[0].start, pair[0]))
    return f"merge/{lower.segment_id}/{upper.segment_id}"


class Change(NamedTuple):
    """From when to when a change was under way (monotonic time)."""

    begun: float
    ended: float


def change_all(served: Served, segments: int, pause: float) -> list[Change]:
    """From one segment to so many, and back to one."""
    changes = []
    for next_change, goal in ((next_split, segments), (next_merge, 1)):
        while len(parts := parts_of(served.admin("GET", TOPIC))) != goal:
            begun = time.monotonic()
            served.admin("POST", f"{TOPIC}/{next_change(parts)}")
            changes.append(Change(begun, time.monotonic()))
            time.sleep(pause)
    return changes


# --- what was found


def stalls_in(stalls: Sequence[Sequence[float]], changes: Sequence[Change]) -> list[float]:
    """Of the messages that were waiting at some moment of a change: how long each waited."""
    return [
        seconds
        for due_at, seconds in stalls
        if any(
            due_at <= change.ended + SETTLE_SECONDS and change.begun <= due_at + seconds
            for change in changes
        )
    ]


def stall_rows(name: str, stalls: list[float]) -> list[Row]:
    figures = (
        ("p50", percentile(stalls, 0.5)),
        ("p99", percentile(stalls, 0.99)),
        ("max", max(stalls)),
    )
    return [
        Row(measure=f"{name}, {kind}", value=seconds * 1e3, unit="ms", samples=len(stalls))
        for kind, seconds in figures
    ]


def splits(served: Served, options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The figures, and what is wrong."""
    served.create(TOPIC)
    rate = ("--rate", str(options.rate))
    with client("consume", served) as consumers, client("produce", served, *rate) as producer:
        time.sleep(WARM_UP_SECONDS)
        warm = time.monotonic()
        changes = change_all(served, options.segments, options.pause)
        sent = finish(producer, "end")
        found = finish(consumers, str(sent["sent"]))
    stalls = [each for each in sent["stalls"] if each[0] >= warm]
    during = stalls_in(stalls, changes)
    times = [change.ended - change.begun for change in changes]
    count = int(sent["sent"])
    rows = [
        Row(measure="sent while splitting and merging", value=sent["rate"], unit="/s",
            samples=count),
        *stall_rows("receipt during a change", during),
        *stall_rows("receipt, whole run", [seconds for _, seconds in stalls]),
        Row(measure="change, p50", value=percentile(times, 0.5) * 1e3, unit="ms",
            samples=len(times)),
        Row(measure="change, max", value=max(times) * 1e3, unit="ms", samples=len(times)),
        Row(measure="delivered again", value=found["again"], unit="messages", samples=3 * count),
        Row(measure="violations", value=len(found["broken"]), unit="", samples=3 * count),
    ]  # fmt: skip
    wrong = [
        f"the {kind} consumer got {got} of {count} messages"
        for kind, got in found["got"].items()
        if got != count
    ]
    return rows, [*wrong, *found["broken"][:10], *_slow(during)]


def _slow(during: list[float]) -> list[str]:
    p99, most = percentile(during, 0.99) * 1e3, max(during) * 1e3
    wrong = []
    if p99 > P99_MAX_MS:
        wrong.append(f"receipts during a change: p99 {p99:.1f} ms, at most {P99_MAX_MS:g} wanted")
    if most > STALL_MAX_MS:
        wrong.append(
            f"receipts during a change: max {most:.1f} ms, at most {STALL_MAX_MS:g} wanted"
        )
    return wrong


def plain_publishes(served: Served) -> tuple[list[Row], list[str]]:
    """The same load on a segment and on a regular topic, in turns."""
    served.create(PLAIN)
    topics = {
        "segment": f"segment://{PLAIN}/0000-ffff-0",
        "persistent": "persistent://public/default/split-plain",
    }
    rates: dict[str, list[float]] = {name: [] for name in topics}
    cpu: dict[str, list[float]] = {name: [] for name in topics}
    counts = dict.fromkeys(topics, 0)
    for number in range(ROUNDS):
        # Who goes first has the colder caches: each does in turn.
        for name in sorted(topics, reverse=bool(number % 2)):
            # Deduplication takes a name that begins again for one that repeats itself.
            got = load(served.running, "publish", topic=topics[name], name=f"{name}-{number}",
                       connections=1, window=1000, seconds=ROUND_SECONDS)  # fmt: skip
            rates[name].append(got["rate"])
            cpu[name].append(got["cpu"] / got["rate"])
            counts[name] += int(got["count"])
    cost = statistics.median(
        other / own for own, other in zip(rates["segment"], rates["persistent"], strict=True)
    )
    work = statistics.median(
        own / other for own, other in zip(cpu["segment"], cpu["persistent"], strict=True)
    )
    rate = statistics.median(rates["segment"])
    rows = [
        Row(measure="publish to a segment, time of each", value=1e6 / rate, unit="us",
            anchor="a regular topic", ratio=cost, samples=counts["segment"]),
        Row(measure="publish to a segment, CPU of each", unit="us",
            value=statistics.median(cpu["segment"]) * 1e6,
            anchor="a regular topic", ratio=work, samples=counts["segment"]),
    ]  # fmt: skip
    slow = f"a publish to a segment costs {cost:.3f} of one to a regular topic, {COST_MAX:g} wanted"
    return rows, [slow] if cost > COST_MAX else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.split")
    parser.add_argument("--rate", type=float, default=5000.0, help="messages per second")
    parser.add_argument("--segments", type=int, default=8, help="how many there are at most")
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between changes")
    options = parser.parse_args()
    with scratch() as folder, serving(folder) as served:
        rows, wrong = splits(served, options)
        more_rows, more_wrong = plain_publishes(served)
    publish("split", [*rows, *more_rows])
    for text in [*wrong, *more_wrong]:
        print(f"not as wanted: {text}")
    if not wrong:
        print("every message came, each key in its order")
    return int(bool(wrong or more_wrong))


if __name__ == "__main__":
    sys.exit(main())
