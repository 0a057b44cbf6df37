"""A pipeline on executors of their own: they run the code that the driver sent, and it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest

from magnetar.errors import ConfigError
from magnetar.spark.pipeline.shipping import environment_settings, pack
from tests.integration.spark.cluster import cluster
from tests.integration.spark.reading import check_numbers, messages
from tests.integration.spark.stage import Stage

PIPELINE: Final = """
name: shipped
checkpoint: ./checkpoint
sources:
  words: {format: text, options: {path: PATH/in}}
steps:
  - {name: found, python: "steps.py:found"}
sinks:
  out: {format: parquet, options: {path: PATH/out}}
trigger: available-now
"""
TOPICS: Final = """
name: copied
service_url: URL
checkpoint: ./checkpoint
sources:
  numbers:
    topic: topic://public/default/orders
    options: {startingOffsets: earliest}
    select: [key, value]
sinks:
  out: {topic: "topic://public/default/copies"}
trigger: available-now
spark:
  settings: {spark.executor.memory: 512m, spark.executor.cores: "1", spark.cores.max: "2"}
"""
STEPS: Final = """
from pyspark.sql.functions import udf

@udf("string")
def where(word):
    import magnetar.spark.pipeline.file
    return magnetar.spark.pipeline.file.__file__

def found(spark, views):
    return views["words"].select("value", where("value").alias("at"))
"""


@pytest.mark.soak
def test_executors_run_what_the_driver_sent(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "words.txt").write_text("one\ntwo\n")
    (tmp_path / "steps.py").write_text(STEPS)
    file = tmp_path / "shipped.yaml"
    file.write_text(PIPELINE.replace("PATH", str(tmp_path)))
    done = _run(file, "local-cluster[1,1,1024]")
    assert done.returncode == 0, done.stderr
    assert "shipped finished after" in done.stdout
    (written,) = (tmp_path / "out").glob("*.parquet")
    rows = parquet.read_table(written).to_pylist()
    assert {row["value"] for row in rows} == {"one", "two"}
    assert all("magnetar.zip" in row["at"] for row in rows)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_topics_are_copied_by_a_standalone_cluster(on: Stage, tmp_path: Path) -> None:
    on.send(500)
    on.split(0)
    on.send(500)
    file = tmp_path / "copied.yaml"
    file.write_text(TOPICS.replace("URL", on.url))
    with cluster(tmp_path) as master:
        for _ in range(2):
            done = _run(file, master)
            assert done.returncode == 0, done.stderr
    check_numbers(messages(on.client, "topic://public/default/copies", 1000), range(1000))


def _run(file: Path, master: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-c", "from magnetar.cli.main import main; main()", "pipeline")
    return subprocess.run(
        [*command, "run", str(file), "--master", master],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_the_archive_has_what_executors_import(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(pack(tmp_path)).namelist())
    assert {
        "magnetar/__init__.py",
        "magnetar/spark/pipeline/session.py",
        "magnetar/errors.py",
    } <= names
    assert not [name for name in names if name.startswith(("magnetar/cli/", "magnetar/testing/"))]


def test_an_environment_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="venv-pack"):
        environment_settings("/nowhere/environment.tar.gz")
    settings = environment_settings("hdfs://names/environment.tar.gz")
    assert settings["spark.archives"] == "hdfs://names/environment.tar.gz#environment"
