"""How fast the broker is over real sockets, beside a stub that stores nothing and bare syncs.

`make bench-broker` runs all of it. The server, the stub and the load generator are processes of
their own; the server is durable, with its defaults. CPU is the server's, in cores.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bare import sync_loop
from bench.report import Row, publish
from bench.storage import percentile, scratch

SECONDS = 4.0
BACKLOG = 300_000
READY_SECONDS = 20.0
PRODUCER_CODE = """
import sys, time, pulsar
client = pulsar.Client(sys.argv[1], logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
producer = client.create_producer("persistent://public/default/official", batching_enabled=False,
    max_pending_messages=1000, block_if_queue_full=True)
payload = bytes(1024)
count = [0]
def done(result, message_id):
    count[0] += result == pulsar.Result.Ok
end = time.perf_counter() + float(sys.argv[2])
start = time.perf_counter()
while time.perf_counter() < end:
    for _ in range(100):
        producer.send_async(payload, done)
producer.flush()
print(count[0] / (time.perf_counter() - start))
client.close()
"""


@dataclass(frozen=True, slots=True)
class Running:
    """A server process and its port."""

    port: int
    pid: int
    admin_url: str = ""

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def server(folder: Path) -> Iterator[Running]:
    command = [str(Path(sys.executable).with_name("magnetar")), "serve", "--json"]
    ports = ["--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        [*command, "--data", str(folder / "data"), *ports], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        port = int(ready["service_url"].rpartition(":")[2])
        yield Running(port, process.pid, ready["admin_url"])
    finally:
        process.terminate()
        process.wait(READY_SECONDS)


@contextmanager
def stub() -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.stub", "--port", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield Running(port, process.pid)
    finally:
        process.kill()
        process.wait(READY_SECONDS)


def load(
    target: Running, kind: str, *flags: str, program: str = "bench.load", **options: object
) -> dict[str, float]:
    """Run the generator; what it measured, and the server's CPU meanwhile."""
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    before, start = target.cpu_seconds(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", program, kind, "--port", str(target.port), *flags, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    found["cpu"] = (target.cpu_seconds() - before) / (time.perf_counter() - start)
    return found


def official(target: Running) -> float:
    """Messages per second of the official Python client, unbatched."""
    url = f"pulsar://127.0.0.1:{target.port}"
    done = subprocess.run(
        [sys.executable, "-c", PRODUCER_CODE, url, str(SECONDS)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.strip().splitlines()[-1])


PUBLISHES: dict[str, dict[str, Any]] = {
    "publish, pipelined 1000": {"connections": 1, "window": 1000},
    "publish, 100 publishers, one in flight each": {"connections": 100, "window": 1},
    "publish, one in flight": {"connections": 1, "window": 1},
    "publish, batches of 1000 x 100 B": {
        "connections": 1, "window": 10, "bytes": 108_000, "messages": 1000,
    },
}  # fmt: skip


def publishes(broker: Running, empty: Running, folder: Path) -> list[Row]:
    rows: list[Row] = []
    for number, (name, options) in enumerate(PUBLISHES.items()):
        topic = f"persistent://public/default/publish-{number}"
        shared = {"seconds": SECONDS, "topic": topic, **options}
        got = load(broker, "publish", name="a", **shared)
        against = load(empty, "publish", name="a", **shared)
        in_flight = options["connections"] * options["window"]
        bare = sync_loop(folder, options.get("bytes", 1024) + 100, max(1, in_flight // 2), 1.0)
        bare_rate = max(1, in_flight // 2) / statistics.fmean(bare)
        samples = int(got["count"])
        rows += [
            _row(name, got["rate"], "/s", "stub", against["rate"], samples),
            _row(name, got["rate"], "/s", "bare syncs of half that many", bare_rate, samples),
            _row(f"{name}, p50", got["p50"] * 1e3, "ms", "stub", against["p50"] * 1e3, samples),
            _row(f"{name}, p99", got["p99"] * 1e3, "ms", "stub", against["p99"] * 1e3, samples),
            _row(f"{name}, CPU", got["cpu"], "cores", "stub", against["cpu"], samples),
        ]
        if options["connections"] == options["window"] == 1:
            sync_ms = percentile(bare, 0.5) * 1e3
            rows.append(
                _row(f"{name}, p50", got["p50"] * 1e3, "ms", "bare sync, p50", sync_ms, samples)
            )
    return rows


def consumes(broker: Running) -> list[Row]:
    topic = "persistent://public/default/consume"
    written = 0.0
    while written < BACKLOG:
        written += load(
            broker, "publish", topic=topic, name="fill", connections=1, window=1000, seconds=1.0
        )["count"]
    rows: list[Row] = []
    for name in ("first", "second"):
        got = load(broker, "consume", topic=topic, name=name, entries=int(written), window=20_000)
        rows += [
            Row(measure=f"dispatch of a backlog, {name} reader", value=got["rate"], unit="/s",
                samples=int(got["count"])),
            Row(measure=f"dispatch of a backlog, {name} reader, CPU", value=got["cpu"],
                unit="cores", samples=int(got["count"])),
        ]  # fmt: skip
    for clients in (1, 100):
        got = load(broker, "echo", topic=f"{topic}-echo{clients}", connections=clients,
                   seconds=SECONDS)  # fmt: skip
        rows += [
            Row(measure=f"end to end, {clients} clients, {key}", value=got[key] * 1e3, unit="ms",
                samples=int(got["count"]))
            for key in ("p50", "p99")
        ]  # fmt: skip
    return rows


def _row(
    measure: str, value: float, unit: str, anchor: str, anchor_value: float, samples: int
) -> Row:
    ratio = value / anchor_value if anchor_value else 0.0
    return Row(measure=measure, value=value, unit=unit, anchor=anchor, ratio=ratio, samples=samples)


def main() -> None:
    rows: list[Row] = []
    with scratch() as folder, server(folder) as broker, stub() as empty:
        rows += publishes(broker, empty, folder)
        rows += consumes(broker)
        got, against = official(broker), official(empty)
        rows.append(_row("official client, unbatched", got, "/s", "stub", against, 1))
    publish("broker", rows)


if __name__ == "__main__":
    main()
