"""How fast our client is beside the official one, on the same server in one run.

    python -m bench.client [--seconds 3] [--rounds 3] [--backlog 100000]

The server is durable, with its defaults, and one for all; each client is a process of its own, and
they take turns. Figures are medians over the rounds. Each comes with the processor time that a
message costs the client's process, also beside that of the official client: on a busy machine it
says more than the rate. What is asked of the client is judged at the end, by rates: the status says
whether something was missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import client_columns
from bench.broker import Running, server
from bench.client_load import Measured
from bench.report import Row, publish
from bench.storage import scratch

PROCESS_SECONDS: Final = 120.0

_subscriptions = count()


class Measure(NamedTuple):
    """Something of ours, what the official client does for it, and what is wanted."""

    name: str
    what: str
    official: tuple[str, ...]
    """The faster of these is what ours is compared with."""
    at_least: float | None
    topic: str


PRODUCING: Final = (
    Measure("produce, single messages of 1 KiB", "produce-singles", ("produce-singles",), 0.5, "s"),
    Measure("produce, batches of 100 B", "produce-batches", ("produce-batches",), 1.0, "b"),
    Measure("produce, Arrow, 100 B", "produce-arrow", ("produce-batches",), None, "a"),
)
CONSUMING: Final = (
    Measure("consume, single messages of 1 KiB", "receive", ("receive",), 0.5, "singles"),
    Measure("consume, one by one of batches", "receive", ("receive",), 0.5, "batches"),
    Measure(
        "consume, many of batches", "receive-many", ("receive", "receive-many"), None, "batches"
    ),
    Measure(
        "consume, Arrow of batches", "receive-arrow", ("receive", "receive-many"), 1.0, "batches"
    ),
)


class Bench:
    """One run against one server."""

    def __init__(self, target: Running, options: argparse.Namespace) -> None:
        self._url = f"pulsar://127.0.0.1:{target.port}"
        self._options = options
        self._measured: dict[tuple[str, str, str], list[Measured]] = {}

    def client(self, who: str, what: str, topic: str, **more: Any) -> Measured:
        arguments = {
            "url": self._url,
            "topic": f"persistent://public/default/{topic}",
            "seconds": self._options.seconds,
            "count": self._options.backlog,
            **more,
        }
        flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        done = subprocess.run(
            [sys.executable, "-m", "bench.client_load", who, what, *flags],
            capture_output=True,
            text=True,
            timeout=PROCESS_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{who} {what}: {done.stderr[-2000:]}")
        return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))

    def fill(self) -> None:
        """Backlogs that are long enough, for any number of subscriptions."""
        for topic, what in (("singles", "produce-singles"), ("batches", "produce-batches")):
            stored = 0.0
            while stored < self._options.backlog * 1.1:
                rate = self.client("magnetar", what, topic).rate
                stored += rate * self._options.seconds * 0.9

    def round(self) -> None:
        for measure in (*PRODUCING, *CONSUMING):
            for what in measure.official:
                self._measure("official", what, measure.topic)
            self._measure("magnetar", measure.what, measure.topic)

    def _measure(self, who: str, what: str, topic: str) -> None:
        found = self._measured.setdefault((who, what, topic), [])
        subscription = f"bench-{next(_subscriptions)}"
        found.append(self.client(who, what, topic, subscription=subscription))

    def median(self, who: str, what: str, topic: str) -> Measured:
        found = self._measured[who, what, topic]
        return Measured(*(statistics.median(each) for each in zip(*found, strict=True)))

    def rows(self) -> tuple[list[Row], list[str]]:
        rows, missed = [], []
        for measure in (*PRODUCING, *CONSUMING):
            ours = self.median("magnetar", measure.what, measure.topic)
            others = [self.median("official", what, measure.topic) for what in measure.official]
            theirs = max(each.rate for each in others)
            ratio = ours.rate / theirs
            cpu_ratio = ours.cpu_us / min(each.cpu_us for each in others)
            for name, value, unit, beside in (
                (measure.name, ours.rate, "1/s", ratio),
                (f"{measure.name}: processor time", ours.cpu_us, "us", cpu_ratio),
            ):
                rows.append(
                    Row(
                        measure=name,
                        value=value,
                        unit=unit,
                        anchor="the official client",
                        ratio=beside,
                        samples=self._options.rounds,
                    )
                )
            if measure.at_least is not None and ratio < measure.at_least:
                missed.append(f"{measure.name}: {ratio:.2f}, wanted {measure.at_least}")
        return rows, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backlog", type=int, default=100_000)
    options = parser.parse_args()
    folder: Path
    with scratch() as folder, server(folder) as target:
        bench = Bench(target, options)
        bench.fill()
        for _ in range(options.rounds):
            bench.round()
        rows, missed = bench.rows()
    publish("client", [*rows, *client_columns.measured()])
    for each in missed:
        print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
