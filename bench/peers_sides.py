"""The systems that `make bench-peers` compares: how each is started, prepared and put under load.

Owns: `Side`, what a turn needs of a system, and the three of them. A server runs in a process and
on a folder of its own and is gone when its `with` ends. Those that speak Pulsar's protocol differ
in their start and in how a scalable topic is made, and in nothing else.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

from bench.broker import Running, load
from bench.kafka_server import KAFKA as KAFKA_PROJECT
from bench.kafka_server import kafka_server
from bench.peers_report import KAFKA, OURS, PULSAR
from bench.report import CHANGED, measured_commit
from bench.split import Served, serving
from bench.txn import Inputs
from bench.txn_load import COORDINATORS
from magnetar.testing.virtual.driver import Driver
from tests.client_e2e.pulsar import PULSAR as PULSAR_PROJECT
from tests.client_e2e.pulsar import PulsarProcess
from tests.interop.serving import ask_admin

TOPICS: Final = 8
TXN_PARTITIONS: Final = 16
LOOKUP_SECONDS: Final = 30.0
FILL_SECONDS: Final = 2.0
READ_WINDOW: Final = 20_000
READ_LIMIT: Final = 6.0
"""Twenty times so many seconds, and a reader is given up."""

FEW: Final = 50
FEW_OF_EACH: Final = 5
"""Transactions that tell the rate: so many, and so many for each client."""

SPARE: Final = 3.0
"""So many times the inputs that are expected to be used."""

ASSIGNMENTS: Final = "persistent://pulsar/system/transaction_coordinator_assign"
"""A coordinator of the older kind is where its partition of this topic is."""

LEGACY: Final = "legacy"
SCALABLE: Final = "txn"


class Side(Protocol):
    """A running system."""

    @property
    def running(self) -> Running: ...

    @property
    def kinds(self) -> Sequence[str]:
        """Which kinds of transactions it has."""
        ...

    def publish(self, topics: int, **options: Any) -> dict[str, float]:
        """Publish to so many topics; `rate` and `count` are of requests, `cpu` is in cores."""
        ...

    def fill(self, count: int) -> int:
        """Write a backlog of at least so many messages; of how many."""
        ...

    def read(self, count: int, name: str) -> dict[str, float]:
        """Read the backlog from its beginning."""
        ...

    def transact(self, kind: str, clients: int, seconds: float) -> dict[str, Any]: ...


class PulsarSide:
    """A server of Pulsar's protocol."""

    kinds = (SCALABLE, LEGACY)

    def __init__(self, served: Served) -> None:
        self.running = served.running
        self._served = served
        self._names = 0
        self._opened: set[str] = set()
        self._inputs: dict[str, Inputs] = {}
        self._rates: dict[str, float] = {}

    def publish(self, topics: int, **options: Any) -> dict[str, float]:
        topic = _plain(f"peers-{topics}")
        names = [topic] if topics == 1 else [f"{topic}-{number}" for number in range(topics)]
        for name in names:
            self._open(name)
        return load(
            self.running, "publish", topic=topic, topics=topics, name=self._name(), **options
        )

    def fill(self, count: int) -> int:
        backlog = _plain("peers-backlog")
        self._open(backlog, *("first", "second"))
        written = 0.0
        while written < count:
            written += load(
                self.running, "publish", topic=backlog, name=self._name(), window=1000,
                seconds=FILL_SECONDS / 2,
            )["count"]  # fmt: skip
        return int(written)

    def read(self, count: int, name: str) -> dict[str, float]:
        return load(
            self.running, "consume", topic=_plain("peers-backlog"), name=name, entries=count,
            window=READ_WINDOW, seconds=READ_LIMIT,
        )  # fmt: skip

    def transact(self, kind: str, clients: int, seconds: float) -> dict[str, Any]:
        flags = ("--legacy",) if kind == LEGACY else ()
        topic, inputs = self._transacted(kind), self._inputs[kind]
        clients_of = {"concurrent": clients, "connections": clients}
        key = f"{kind}-{clients}"
        if key not in self._rates:
            # How many inputs are needed depends on the rate, which a few transactions tell.
            count = FEW + FEW_OF_EACH * clients
            inputs.fill(count)
            got = inputs.transact(topic, *flags, count=count, **clients_of)
            self._rates[key] = got["rate"]
        inputs.fill(int(self._rates[key] * SPARE * seconds))
        got = inputs.transact(topic, *flags, seconds=seconds, **clients_of)
        self._rates[key] = got["rate"]
        return got

    def _transacted(self, kind: str) -> str:
        """Where transactions of a kind publish; and where they acknowledge, in `_inputs`."""
        names = [f"peers-{kind}-{use}" for use in ("in", "out")]
        made = _plain if kind == LEGACY else _segment
        if kind not in self._inputs:
            for name in names:
                if kind != LEGACY:
                    self._served.create(f"public/default/{name}")
                self._open(made(name))
            if kind == LEGACY:
                for number in range(COORDINATORS):
                    self._open(f"{ASSIGNMENTS}-partition-{number}")
            self._inputs[kind] = Inputs(self._served, made(names[0]))
        return made(names[1])

    def _name(self) -> str:
        self._names += 1
        return f"peers-{self._names}"

    def _open(self, topic: str, *subscriptions: str) -> None:
        """Have the server take the topic, once: Pulsar serves what somebody has looked up."""
        if topic not in self._opened:
            self._opened.add(topic)
            asyncio.run(_look_up(self.running.port, topic, subscriptions))


def _plain(name: str) -> str:
    return f"persistent://public/default/{name}"


def _segment(name: str) -> str:
    return f"segment://public/default/{name}/0000-ffff-0"


async def _look_up(port: int, topic: str, subscriptions: Sequence[str]) -> None:
    driver = await Driver.connect("127.0.0.1", port)
    await driver.request("LOOKUP", topic=topic, timeout_s=LOOKUP_SECONDS)
    for name in subscriptions:
        await driver.request(
            "SUBSCRIBE", topic=topic, subscription=name, subType=0, consumer_id=1,
            initialPosition=1, timeout_s=LOOKUP_SECONDS,
        )  # fmt: skip
        await driver.request("CLOSE_CONSUMER", consumer_id=1)
    await driver.close()


class _ServedPulsar(Served):
    """Apache Pulsar, which is told the number of segments."""

    def create(self, topic: str) -> None:
        path = f"/admin/v2/scalable/{topic}?numInitialSegments=1"
        status, answer = ask_admin(self.admin_url, "PUT", path)
        if status >= 300:
            raise ConnectionError(f"{path}: {status} {answer}")


class KafkaSide:
    """A Kafka node; its generator is a program of its own."""

    kinds = (SCALABLE,)

    def __init__(self, running: Running) -> None:
        self.running = running
        self._created: set[str] = set()

    def publish(self, topics: int, **options: Any) -> dict[str, float]:
        self._create("peers", TOPICS)
        return self._load("publish", topic="peers", topics=TOPICS, **options)

    def fill(self, count: int) -> int:
        self._create("backlog", 1, "--unsynced")
        written = 0.0
        while written < count:
            written += self._load(
                "publish", topic="backlog", connections=TOPICS, window=100, seconds=FILL_SECONDS
            )["count"]
        return int(written)

    def read(self, count: int, name: str) -> dict[str, float]:
        return self._load("consume", topic="backlog", name=name, entries=count)

    def transact(self, kind: str, clients: int, seconds: float) -> dict[str, Any]:
        for topic in ("out", "in"):
            self._create(topic, TXN_PARTITIONS)
        return self._load(
            "transact", topic="out", topics=TXN_PARTITIONS, input="in", name=f"txn-{clients}",
            connections=clients, seconds=seconds,
        )  # fmt: skip

    def _create(self, topic: str, partitions: int, *flags: str) -> None:
        if topic not in self._created:
            self._created.add(topic)
            self._load("create", *flags, topic=topic, topics=partitions)

    def _load(self, kind: str, *flags: str, **options: Any) -> dict[str, Any]:
        return load(self.running, kind, *flags, program="bench.kafka_load", **options)


# --- starts


@contextmanager
def magnetar(folder: Path) -> Iterator[Side]:
    with serving(folder) as served:
        yield PulsarSide(served)


@contextmanager
def pulsar(folder: Path) -> Iterator[Side]:
    process = PulsarProcess(folder / "pulsar", measured=True)
    try:
        process.start()
        port = int(process.service_url.rpartition(":")[2])
        running = Running(port, process.pid)
        yield PulsarSide(_ServedPulsar(running, process.service_url, process.admin_url))
    finally:
        process.kill()


@contextmanager
def kafka(folder: Path) -> Iterator[Side]:
    with kafka_server(folder / "kafka", synced=True) as node:
        yield KafkaSide(Running(node.port, node.pid))


STARTS: Final = {OURS: magnetar, PULSAR: pulsar, KAFKA: kafka}
PROJECTS: Final = {PULSAR: PULSAR_PROJECT, KAFKA: KAFKA_PROJECT}
_JARS: Final = {PULSAR: r"pulsar-broker-(\d.*?)\.jar", KAFKA: r"kafka_2\.13-(\d.*?)\.jar"}


def versions(systems: Sequence[str]) -> dict[str, str]:
    """What is measured, and the Java that ran the peers."""
    found = {name: version_of(name) for name in systems}
    if len(systems) > 1:
        done = subprocess.run(["java", "-version"], capture_output=True, text=True)
        java = re.search(r'version "(.+?)"', done.stdout + done.stderr)
        found["Java"] = java[1] if java else "unknown"
    return found


def version_of(name: str) -> str:
    """Our version and commit, or what the name of the peer's jar says."""
    if name == OURS:
        commit = measured_commit()
        mark = CHANGED if commit.endswith(CHANGED) else ""
        return f"{version('magnetar')} ({commit[:12]}{mark})"
    found = re.search(_JARS[name], PROJECTS[name].class_path())
    return found[1] if found else "unknown"
