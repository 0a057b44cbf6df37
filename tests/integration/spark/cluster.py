"""A standalone Spark cluster of two workers with different host names, on this machine.

Owns: `cluster`, and `Events`, what Spark wrote down of stages and tasks while a driver ran.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark

from tests.meta.tree import ROOT

HOSTS = ("127.0.0.1", "127.0.0.2")
"""Both are this machine, and two hosts to Spark, which puts a speculative copy on another one."""
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1s",
}
WHERE_THE_FILES_ARE = {"spark.speculation": "false", "spark.locality.wait": "60s"}
"""A task that reads shuffle files runs, once, on a host that has some of them."""

_CLASS = "org.apache.spark.deploy"
_STARTED = re.compile(r"Starting Spark master at (spark://\S+)")
_JOINED = "Registering worker"
_PATIENCE_S = 900.0
_POLL_S = 0.1


class Events:
    """The log of events of one driver, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": folder.as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
        }

    def ends(self) -> list[str]:
        """How tasks ended, in Spark's words: `Success`, `FetchFailed`, `ExecutorLostFailure`."""
        ended = self._of("SparkListenerTaskEnd")
        return [str(each["Task End Reason"]["Reason"]) for each in ended]

    def speculated(self) -> int:
        """How many tasks were copies of slow ones."""
        begun = self._of("SparkListenerTaskStart")
        return sum(bool(each["Task Info"]["Speculative"]) for each in begun)

    def retries(self) -> int:
        """How many times a stage was run again."""
        begun = self._of("SparkListenerStageSubmitted")
        return sum(int(each["Stage Info"]["Stage Attempt ID"]) > 0 for each in begun)

    def _of(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for each in self._folder.iterdir() for line in each.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        return [each for each in found if each["Event"] == kind]


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Its master's URL."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        text = _start(folder, started, "master", "master.Master", "--host", HOSTS[0], "--port", "0")
        url = _until(text, _STARTED, 1)[0]
        for number, host in enumerate(HOSTS):
            place = ("--work-dir", str(folder / f"work-{number}"), "--cores", "1")
            size = ("--memory", "1g")
            _start(folder, started, f"worker-{number}", "worker.Worker", "--host", host, *place,
                   *size, url)  # fmt: skip
        _until(text, re.compile(_JOINED), len(HOSTS))
        yield url
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill_executor_of(pid: int) -> None:
    """kill -9 of the JVM in which a task of that Python process runs."""
    os.kill(_parent(_parent(pid)), signal.SIGKILL)


def _parent(pid: int) -> int:
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _start(
    folder: Path, started: list[subprocess.Popen[bytes]], name: str, role: str, *arguments: str
) -> Path:
    home = Path(pyspark.__file__).parent
    text = folder / f"{name}.txt"
    environ = os.environ | {
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    command = [str(home / "bin" / "spark-class"), f"{_CLASS}.{role}", "--webui-port", "0"]
    with text.open("wb") as out:
        started.append(
            subprocess.Popen(
                [*command, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        )
    return text


def _until(text: Path, pattern: re.Pattern[str], count: int) -> list[str]:
    deadline = time.monotonic() + _PATIENCE_S
    while len(found := pattern.findall(text.read_text())) < count:
        assert time.monotonic() < deadline, text.read_text()
        time.sleep(_POLL_S)
    return found
