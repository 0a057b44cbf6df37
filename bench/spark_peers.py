"""Kafka and Spark's connector for it, in an environment of their own: fetched, started, measured.

The connector's jars exist for PySpark 4.2.0, which is not the version that this project locks: so
the peer has an interpreter environment, jars and processes of its own below `build/peers`. It needs
Maven and Java 17. What is measured is in `bench/spark_kafka.py`, which runs there.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.report import ROOT
from bench.spark_queries import Rates
from magnetar.spark.pipeline.java import java_home

PEERS: Final = ROOT / "build" / "peers" / "kafka"
LOCKS: Final = (ROOT / "requirements" / "uv.txt", ROOT / "requirements" / "peers.txt")
"""What builds the wheel of PySpark, and PySpark."""

POM: Final = ROOT / "bench" / "spark_kafka.xml"
READY_SECONDS: Final = 60.0
RUN_SECONDS: Final = 1800.0

SERVER: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}
num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


def kafka_rates(folder: Path) -> dict[str, dict[str, Rates]]:
    """Rows per second by size and measure."""
    python, jars = _environment()
    with _kafka(jars, folder / "kafka") as address:
        done = subprocess.run(
            [python, "-m", "bench.spark_kafka", address, str(jars), str(folder)],
            cwd=ROOT,
            env=os.environ | {"JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": str(python)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=RUN_SECONDS,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        size: {measure: Rates(*rates) for measure, rates in measured.items()}
        for size, measured in found.items()
    }


def _environment() -> tuple[Path, Path]:
    """The peer's interpreter and the folder of its jars, made once."""
    if shutil.which("mvn") is None:
        raise SystemExit("PEERS=1 needs Maven: install it, or leave PEERS out")
    python, jars = PEERS / "env" / "bin" / "python", PEERS / "jars"
    if not (PEERS / "made").exists():
        shutil.rmtree(PEERS, ignore_errors=True)
        PEERS.mkdir(parents=True)
        print("fetching Kafka and PySpark 4.2.0, about 600 MB, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / "env")], check=True)
        install = (str(python), "-m", "pip", "install", "--quiet", "--require-hashes")
        for lock in LOCKS:
            subprocess.run([*install, "--no-build-isolation", "-r", str(lock)], check=True)
        copy = ("dependency:copy-dependencies", f"-DoutputDirectory={jars}")
        subprocess.run(["mvn", "-q", "-B", "-f", str(POM), *copy], check=True)
        (PEERS / "made").touch()
    return python, jars


@contextmanager
def _kafka(jars: Path, folder: Path) -> Iterator[str]:
    """A broker of one node, stock settings; its address."""
    folder.mkdir()
    port, controller = _free_port(), _free_port()
    config = folder / "server.properties"
    config.write_text(SERVER.format(port=port, controller=controller, folder=folder / "logs"))
    java = [str(java_home() / "bin" / "java"), "-Xmx1G", "-cp", f"{jars}/*"]
    cluster = uuid.uuid4().hex[:22]
    with (folder / "said").open("wb") as said:
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)],
            stdout=said,
            stderr=said,
            check=True,
        )
        process = subprocess.Popen([*java, "kafka.Kafka", str(config)], stdout=said, stderr=said)
    try:
        _await(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as tried:
            tried.settimeout(1)
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit("Kafka did not start")
