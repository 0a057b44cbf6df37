"""What tests of Spark share: a server each, and with a JVM one session for a process.

Py4J keeps threads and sockets for as long as there is a session: modules that use it say so with a
fixture `nothing_left_behind` of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from magnetar.spark.pipeline.session import start
from tests.integration.spark.stage import Stage, stage


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    settings = {
        "spark.driver.memory": "512m",
        "spark.log.level": "ERROR",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
    }
    made = start("tests", master="local[2,4]", settings=settings)
    yield made
    made.stop()


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "data") as made:
        yield made
