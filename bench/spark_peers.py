"""Kafka and Spark's connector for it, in an environment of their own: fetched, started, measured.

The connector's jars exist for PySpark 4.2.0, which is not the version that this project locks: so
the peer has an interpreter environment, jars and processes of its own below `build/peers`. It needs
Maven and Java 17. What is measured is in `bench/spark_kafka.py`, which runs there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.kafka_server import KAFKA, kafka_server
from bench.report import ROOT
from bench.spark_queries import Rates
from magnetar.spark.pipeline.java import java_home
from tests.interop_java.maven import lacking

PEERS: Final = ROOT / "build" / "peers" / "kafka"
LOCKS: Final = (ROOT / "requirements" / "uv.txt", ROOT / "requirements" / "peers.txt")
"""What builds the wheel of PySpark, and PySpark."""

RUN_SECONDS: Final = 1800.0


def kafka_rates(folder: Path) -> dict[str, dict[str, Rates]]:
    """Rows per second by size and measure."""
    python = _environment()
    with kafka_server(folder / "kafka", synced=False) as server:
        address = f"127.0.0.1:{server.port}"
        done = subprocess.run(
            [python, "-m", "bench.spark_kafka", address, KAFKA.class_path(), str(folder)],
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


def _environment() -> Path:
    """The peer's interpreter, made once; and the jars."""
    missing = lacking()
    if missing is not None:
        raise SystemExit(f"PEERS=1 needs Java and Maven ({missing}): install them, or leave it out")
    KAFKA.build()
    python = PEERS / "env" / "bin" / "python"
    if not (PEERS / "made").exists():
        shutil.rmtree(PEERS, ignore_errors=True)
        PEERS.mkdir(parents=True)
        print("fetching PySpark 4.2.0, about 450 MB, once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / "env")], check=True)
        install = (str(python), "-m", "pip", "install", "--quiet", "--require-hashes")
        for lock in LOCKS:
            subprocess.run([*install, "--no-build-isolation", "-r", str(lock)], check=True)
        (PEERS / "made").touch()
    return python
