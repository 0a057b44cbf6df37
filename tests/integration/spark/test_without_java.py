"""A machine without Java: Spark runs on the wheel's, or one line says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.limits import PATIENCE_S

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
from magnetar.spark.pipeline.session import start

spark = start("without-java")
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 7).load()
query = rows.writeStream.format("noop").option("checkpointLocation", sys.argv[1]).start()
while not query.recentProgress:
    query.awaitTermination(1)
query.stop()
print(os.environ["JAVA_HOME"], spark.sparkContext.parallelize([1, 2]).map(lambda n: n + 1).sum())
spark.stop()
"""

# The command on a machine where the wheel is not installed either.
COMMAND = """
from magnetar.spark.pipeline import java
java.find_spec = lambda name: None
from magnetar.cli.main import main
main()
"""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose search path has everything but Java."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in os.get_exec_path():
        for tool in Path(folder).glob("*"):
            if tool.name != "java" and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return kept | {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_spark_runs_on_the_java_of_the_wheel(hidden: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoint")],
        env=hidden,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    home, answer = done.stdout.split()
    assert Path(home).is_relative_to(tmp_path / "cache")
    assert answer == "5"


def test_with_nothing_to_run_on_one_line_says_what_to_install(
    hidden: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(
        "name: rates\ncheckpoint: ./checkpoint\n"
        "sources: {ticks: {format: rate}}\nsinks: {out: {format: noop}}\n"
    )
    for verb in (["quickstart"], ["pipeline", "run", str(file)]):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *verb],
            env=hidden,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: Spark needs Java 17 or newer")
        assert "openjdk-17-jre-headless" in line
    assert not (tmp_path / "checkpoint").exists(), "nothing was begun"
