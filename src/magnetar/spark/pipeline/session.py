"""A Spark session with settings that fit pipelines on Magnetar.

Owns: how a session is started: its Java, its interpreter, the settings below, and where the JVM
writes its text. A setting of the caller wins over every one of them.

Invariants:
1. Without Java the caller gets `JavaMissing`, never what Spark says then.
2. On a local master the Python workers run the interpreter, and find the modules, of this process.
3. With a log file, nothing of the JVM or of its workers reaches this process's stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from magnetar.spark.pipeline.interpreter import workers_python
from magnetar.spark.pipeline.java import java_home

DEFAULT_MASTER: Final = "local[*,4]"
"""All cores of this machine. A task is tried four times, as on a cluster: plain `local[*]` ends a
query at the first failure."""

_LOOPBACK: Final = "127.0.0.1"

SETTINGS: Final = {
    # Every row that crosses between JVM and Python does so in columns; larger batches gain nothing.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}
LOCAL_SETTINGS: Final = {
    # The name of the machine need not resolve, and nobody else is to reach this driver.
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    # Writes the logs of a query a few times faster than the default and renames as that one does.
    # For local disks and HDFS; an object store needs the default.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    # Rows go to Python workers and back; over TCP every task waits 40 ms for an acknowledgement.
    # Not for clusters: the path of a socket is short, those of their temporary folders are long.
    "spark.python.unix.domain.socket.enabled": "true",
}


def start(
    name: str,
    *,
    master: str = DEFAULT_MASTER,
    settings: Mapping[str, str] | None = None,
    log_file: Path | None = None,
) -> SparkSession:
    """A session of this process; there is one, so whoever started it stops it."""
    # Before the builder: it starts the JVM with what the environment says (invariants 1 and 2).
    os.environ["JAVA_HOME"] = str(java_home())
    chosen = dict(SETTINGS)
    if is_local(master):
        if "PYSPARK_PYTHON" not in os.environ:
            os.environ["PYSPARK_PYTHON"] = workers_python()
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        chosen |= LOCAL_SETTINGS
        # Spark's default of 200 would run 200 tasks for each small batch.
        chosen["spark.sql.shuffle.partitions"] = str(_cores())
    if find_spec("pandas") is None:
        # Else Spark warns of every function: it would carry rows in columns, but only with pandas.
        chosen["spark.sql.execution.pythonUDF.arrow.enabled"] = "false"
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (chosen | dict(settings or {})).items():
        builder = builder.config(key, value)
    with _errors_to(log_file):
        return builder.getOrCreate()


def is_local(master: str) -> bool:
    """Whether everything runs on this machine, in one JVM."""
    return master == "local" or master.startswith("local[")


def _cores() -> int:
    return os.cpu_count() or 1


@contextmanager
def _errors_to(log_file: Path | None) -> Iterator[None]:
    """Processes that start in this block have the file as their stderr."""
    if log_file is None:
        yield
        return
    # The descriptor itself is replaced: the JVM inherits number 2, whatever `sys.stderr` is.
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with log_file.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)
