"""`magnetar pipeline` as a process, on sources and sinks that Spark brings with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import pytest

from harness.limits import PATIENCE_S

pytestmark = pytest.mark.slow

MAGNETAR: Final = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "pipeline")
WAIT_SECONDS: Final = PATIENCE_S
# Twenty rows per batch, whenever it runs: what comes out is known from the number of batches.
PIPELINE: Final = """
name: doubled
checkpoint: ./checkpoint
sources:
  numbers:
    format: rate-micro-batch
    options: {rowsPerBatch: 20, startTimestamp: 1000}
steps:
  - {name: even, sql: "SELECT value FROM numbers WHERE value % 2 = 0"}
  - {name: doubled, python: "steps.py:doubled"}
sinks:
  out: {format: parquet, options: {path: "PATH"}}
trigger: 1 second
"""
STEPS: Final = """
from pyspark.sql.functions import udf
from pyspark.sql.types import LongType

FACTOR = 2

def times(value):
    return value * FACTOR

def doubled(spark, views):
    return views["even"].select(udf(times, LongType())("value").alias("value"))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    path = tmp_path / "doubled.yaml"
    path.write_text(PIPELINE.replace("PATH", str(tmp_path / "out")))
    return path


def test_a_pipeline_goes_on_after_a_kill_and_ends_on_request(file: Path, tmp_path: Path) -> None:
    assert _said("status", file) == "never started\n"
    with _running(file, "--metrics-port", "0") as process:
        seen = _until(file, lambda state: state["queries"]["out"]["batch"] >= 1, process)
        assert seen["running"]
        assert seen["pid"] == process.pid
        with urlopen(seen["metrics_url"], timeout=PATIENCE_S) as answer:
            assert b'magnetar_pipeline_batches_total{sink="out"}' in answer.read()
        refused = _pipeline("run", file)
        assert refused.returncode == 1
        assert f"process {process.pid} runs a pipeline with this checkpoint" in refused.stderr
        process.kill()
    assert "killed while running" in _said("status", file)
    with _running(file) as process:
        # As soon as it says anything: before Spark has started, let alone committed a batch.
        known = _until(file, lambda _: True, process)
        assert known["queries"]["out"]["batch"] >= seen["queries"]["out"]["batch"]
        _until(file, lambda state: state["queries"]["out"]["batch"] >= 3, process)
        assert "stopped; last committed: out: batch" in _said("stop", file)
        assert process.wait(WAIT_SECONDS) == 0
        assert process.stdout is not None
        assert "doubled stopped after" in process.stdout.read()
    found = json.loads(_said("status", file, "--json"))
    assert (found["phase"], found["running"]) == ("stopped", False)
    assert _numbers(tmp_path / "out") == _expected(found["queries"]["out"]["batch"])


def test_what_spark_finds_wrong_is_one_line(file: Path) -> None:
    file.write_text(file.read_text().replace("SELECT value", "SELECT valeu"))
    assert "`valeu`" in _refusal("run", file)


def test_a_step_without_its_function_is_told_before_spark_starts(file: Path) -> None:
    (file.parent / "steps.py").write_text("")
    assert "steps.py has no function doubled" in _refusal("validate", file)
    file.write_text(file.read_text().replace("python: ", "sql_file: "))
    assert "steps.doubled.sql_file: " in _refusal("validate", file)


# --- the command


def _pipeline(verb: str, file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAGNETAR, verb, str(file), *more], capture_output=True, text=True, timeout=WAIT_SECONDS
    )


def _said(verb: str, file: Path, *more: str) -> str:
    done = _pipeline(verb, file, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _refusal(verb: str, file: Path) -> str:
    done = _pipeline(verb, file)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


@contextmanager
def _running(file: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*MAGNETAR, "run", str(file), *more], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def _until(
    file: Path, reached: Callable[[Any], bool], process: subprocess.Popen[str]
) -> dict[str, Any]:
    """The state once it is as wanted."""
    state_file = file.parent / "checkpoint" / ".pipeline" / "state.json"
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended"
        if state_file.exists():
            state = json.loads(state_file.read_text())
            if state["pid"] == process.pid and reached(state):
                found: dict[str, Any] = json.loads(_said("status", file, "--json"))
                return found
        time.sleep(0.2)
    raise AssertionError("not reached in time")


def _numbers(folder: Path) -> list[int]:
    """What the sink's own log says was committed."""
    import pyarrow.parquet as parquet

    names = [
        json.loads(line)["path"].rsplit("/", 1)[1]
        for entry in (folder / "_spark_metadata").glob("[0-9]*")
        for line in entry.read_text().splitlines()[1:]
    ]
    tables = [parquet.read_table(folder / name) for name in dict.fromkeys(names)]
    return sorted(value for table in tables for value in table["value"].to_pylist())


def _expected(last_batch: int) -> list[int]:
    return [value * 2 for value in range((last_batch + 1) * 20) if value % 2 == 0]
