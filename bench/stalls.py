"""Whether anything holds the server up: minutes at a share of what it can do, and its longest turn.

`make bench-stalls` runs it for ten minutes at 70 %. First the same load is measured as fast as it
goes: publishers, two consumers that acknowledge everything, some transactions. Then it is paced at
the share of that rate. Times of receipts count from when a message was due, so that a stall counts
for all that came during it; the longest turn is the server's own metric.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request

from bench.broker import Running, server
from bench.report import Row, publish
from bench.storage import scratch

FULL_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""Far below the minute for which the server tells of a turn."""
TRANSACTIONS_PER_SECOND = 50.0
LONG_TURNS_S = (0.005, 0.01, 0.02, 0.05, 0.1)


class Clients:
    """The load, as processes."""

    def __init__(self, target: Running, topic: str, rate: float, seconds: float) -> None:
        def run(kind: str, **options: object) -> subprocess.Popen[str]:
            arguments = [
                part for name, value in options.items() for part in (f"--{name}", str(value))
            ]
            shared = ["--port", str(target.port), "--topic", topic, "--seconds", str(seconds)]
            return subprocess.Popen(
                [sys.executable, "-m", "bench.stalls_load", kind, *shared, *arguments],
                stdout=subprocess.PIPE,
                text=True,
            )

        self._processes = {
            "consume": run("consume"),
            "transact": run("transact", rate=TRANSACTIONS_PER_SECOND),
            "publish": run("publish", rate=rate),
        }

    @property
    def are_at_work(self) -> bool:
        return all(each.poll() is None for each in self._processes.values())

    def results(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, process in self._processes.items():
            printed, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{name} ended with {process.returncode}")
            found[name] = json.loads(printed)
        return found


def metrics(target: Running) -> dict[str, float]:
    """The server's metrics, by name and labels."""
    with urllib.request.urlopen(f"{target.admin_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def longest_turns(target: Running, clients: Clients) -> tuple[float, float]:
    """The longest turn while the clients run, and the most processor time of one, in seconds."""
    longest = own = 0.0
    while clients.are_at_work:
        time.sleep(LOOK_SECONDS)
        values = metrics(target)
        longest = max(longest, values["magnetar_loop_longest_turn_seconds"])
        own = max(own, values["magnetar_loop_longest_turn_cpu_seconds"])
    return longest, own


def turns_longer_than(seconds: float, values: dict[str, float]) -> float:
    bucket = f'magnetar_loop_turn_seconds_bucket{{le="{seconds}"}}'
    return values["magnetar_loop_turn_seconds_count"] - values[bucket]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.7, help="of the full rate")
    options = parser.parse_args()
    topic = "persistent://public/default/stalls"
    with scratch() as folder, server(folder) as target:
        full = Clients(target, topic, 0.0, FULL_SECONDS).results()["publish"]["rate"]
    # A new one: what the full load did is not to be told of this one.
    with scratch() as folder, server(folder) as target:
        before = metrics(target)
        clients = Clients(target, topic, full * options.share, options.minutes * 60)
        longest = longest_turns(target, clients)
        found, after = clients.results(), metrics(target)
        rows = _rows(full, found, longest, before, after)
        rows.append(Row(measure="resident memory", value=target.resident_mib(), unit="MiB"))
    publish("stalls", rows)


def _rows(
    full: float,
    found: dict[str, dict[str, float]],
    longest: tuple[float, float],
    before: dict[str, float],
    after: dict[str, float],
) -> list[Row]:
    sent, transacted = found["publish"], found["transact"]
    samples = int(sent["count"])
    rows = [
        Row(measure="publishes", value=sent["rate"], unit="/s", anchor="as fast as it goes",
            ratio=sent["rate"] / full, samples=samples),
        Row(measure="deliveries", value=found["consume"]["count"], unit="", anchor="publishes",
            ratio=found["consume"]["count"] / samples),
    ]  # fmt: skip
    for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("longest", "longest")):
        rows.append(
            Row(measure=f"receipt, {name}", value=sent[key] * 1e3, unit="ms", samples=samples)
        )
    for key in ("p50", "p99", "longest"):
        count = int(transacted["count"])
        value = transacted[key] * 1e3
        rows.append(Row(measure=f"transaction, {key}", value=value, unit="ms", samples=count))
    own = longest[1] / longest[0] if longest[0] else 0.0
    rows += [
        Row(measure="longest turn of the loop", value=longest[0] * 1e3, unit="ms"),
        Row(measure="most processor time of a turn", value=longest[1] * 1e3, unit="ms",
            anchor="the longest turn", ratio=own),
    ]  # fmt: skip
    for seconds in LONG_TURNS_S:
        many = turns_longer_than(seconds, after) - turns_longer_than(seconds, before)
        measure = f"turns longer than {seconds * 1e3:.0f} ms"
        rows.append(Row(measure=measure, value=many, unit=""))
    return rows


if __name__ == "__main__":
    main()
