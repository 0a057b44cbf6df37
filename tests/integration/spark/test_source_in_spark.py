"""The source in Spark itself: found without registration, idle, restarted, aggregated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.integration.spark.files import PATIENCE_S, Files
from tests.integration.spark.stage import TOPIC, Stage, check
from tests.integration.spark.test_source_times import let_time_pass

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The session has threads and sockets that stay."""


def stream(spark: SparkSession, on: Stage, **options: str) -> DataFrame:
    given = {"startingOffsets": "earliest"} | options
    return spark.readStream.format("magnetar").options(**on.options(given)).load()


@pytest.mark.parametrize("name", ["magnetar", "pulsar"])
def test_it_is_found_without_registration(spark: SparkSession, on: Stage, name: str) -> None:
    on.send(30)
    found = spark.read.format(name).options(**on.options({})).load()
    assert found.count() == 30
    options = ", ".join(f"'{key}' '{value}'" for key, value in on.options({}).items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders USING {name} OPTIONS ({options})")
    assert spark.sql("SELECT count(DISTINCT messageId) FROM orders").collect()[0][0] == 30


def test_workers_import_pyspark_with_its_bytecode(spark: SparkSession) -> None:
    def place(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    (found,) = spark.sparkContext.parallelize([0], 1).map(place).collect()
    assert found == pyspark.__file__, "and not from the zip file of Spark, which has none"


def test_filters_are_pushed_down(spark: SparkSession, on: Stage) -> None:
    on.send(40)
    on.split(0)
    on.send(40)
    frame = spark.read.format("magnetar").options(**on.options({"pushdown": "true"})).load()
    assert frame.where("segment = 1").select("segment").distinct().collect()[0][0] == 1
    assert frame.where("key = 'k3' AND publishTime > timestamp'2020-01-01'").count() == 10


def test_splits_restarts_other_limits_and_a_replay(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    on.send(60)
    files.run(stream(spark, on, maxMessagesPerTrigger="25"))
    on.split(0)
    on.send(60)
    files.forget_last_commit()
    files.run(stream(spark, on, maxMessagesPerTrigger="40"))
    on.split(1)
    on.merge(2, 4)
    on.send(60)
    files.run(stream(spark, on))
    check(files.rows(), on.sent)
    on.send(60)
    files.run(stream(spark, on, minPartitions="6"))
    rows = sorted(files.rows(), key=lambda row: int(row.value))
    check(rows, on.sent)


def test_a_running_query_follows_splits_and_then_rests(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    """Acceptance: an idle query runs no batch in ten seconds."""
    files = Files(tmp_path)
    on.send(20)
    query = files.start(stream(spark, on, subscription="spark"), available_now=False)
    try:
        for number in range(3):
            query.processAllAvailable()
            on.split(number)
            on.send(20)
        query.processAllAvailable()
        check(files.rows(), on.sent)
        before = files.batches()
        assert not query.awaitTermination(10)
        assert files.batches() == before
        (progress,) = query.recentProgress[-1:]
        assert json.loads(progress.sources[0].latestOffset)["lagMessages"] == 0
    finally:
        query.stop()


def test_a_windowed_aggregation_over_uneven_splits_drops_no_row(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    """Acceptance: it equals a batch computation over the same rows."""
    on.send(8)
    on.split(0)
    hot = 1
    for number in range(4):
        let_time_pass()
        on.send_to(60, half=0)
        on.send_to(2, half=1)
        let_time_pass()
        on.split(hot)
        hot = 3 + 2 * number
    on.send(8)
    windows = F.window("publishTime", "10 milliseconds")
    batch = spark.read.format("magnetar").options(**on.options({})).load()
    expected = {tuple(row) for row in _counted(batch.groupBy(windows).count()).collect()}

    late = stream(spark, on, maxMessagesPerTrigger="40").withWatermark(
        "publishTime", "4 milliseconds"
    )
    counted = _counted(late.groupBy(windows).count())
    query = (
        counted.writeStream.format("memory")
        .queryName("windows")
        .outputMode("complete")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE_S)
    found = {tuple(row) for row in spark.table("windows").collect()}
    dropped = [
        operator.numRowsDroppedByWatermark
        for progress in query.recentProgress
        for operator in progress.stateOperators
    ]
    assert sum(dropped) == 0
    assert found == expected


def _counted(windows: DataFrame) -> DataFrame:
    return windows.select("window.start", "count")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "nowhere"}, "persistent://public/default/nowhere does not exist"),
        ({"serviceUrl": "pulsar://127.0.0.1:1", "operationTimeoutMs": "300"}, "serviceUrl right"),
        ({"maxMesagesPerTrigger": "1"}, "is maxMessagesPerTrigger meant?"),
    ],
)
def test_a_mistake_is_told_at_load(
    spark: SparkSession, on: Stage, options: dict[str, str], said: str
) -> None:
    on.send(1)
    reader: Any = spark.readStream.format("magnetar").options(**on.options(options))
    with pytest.raises(PySparkException) as raised:
        reader.load()
    assert said in str(raised.value)


def test_the_checkpoint_of_another_topic_is_told(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    on.send(5)
    on.send(5, "topic://public/default/another")
    files.run(stream(spark, on))
    query = files.start(stream(spark, on, topic="topic://public/default/another"))
    with pytest.raises(PySparkException, match="checkpoint folder of its own"):
        query.awaitTermination(PATIENCE_S)
    assert TOPIC in str(query.exception())
