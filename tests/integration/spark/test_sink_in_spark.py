"""The sink in Spark itself: from topic to topic, batch writes, foreachBatch, refused modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from magnetar.spark import foreach_batch_writer
from tests.integration.spark.reading import check_numbers, messages
from tests.integration.spark.stage import Stage, stage

pytestmark = pytest.mark.slow

OUTPUT = "topic://public/default/copies"
_PATIENCE_S = 300


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The session has threads and sockets that stay."""


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "data") as made:
        yield made


def stream(spark: SparkSession, on: Stage) -> DataFrame:
    given = on.options({"startingOffsets": "earliest", "maxMessagesPerTrigger": "30"})
    return spark.readStream.format("magnetar").options(**given).load()


def sink(on: Stage) -> dict[str, str]:
    return {"serviceUrl": on.url, "topic": OUTPUT}


def copied(frame: DataFrame, on: Stage, folder: Path) -> None:
    writer = frame.writeStream.format("magnetar").options(**sink(on))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(_PATIENCE_S)
    assert query.exception() is None


def forget_last_commit(folder: Path) -> None:
    commits = folder / "checkpoint" / "commits"
    last = max((each for each in commits.iterdir() if each.name.isdecimal()),
               key=lambda each: int(each.name))  # fmt: skip
    last.unlink()
    for each in commits.glob(".*.crc"):
        each.unlink()


def test_a_topic_is_copied_once_over_splits_and_replays(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    """All columns of the source go into the sink as they are."""
    on.send(100)
    copied(stream(spark, on), on, tmp_path)
    on.split(0)
    on.send(100)
    forget_last_commit(tmp_path)
    copied(stream(spark, on), on, tmp_path)
    forget_last_commit(tmp_path)
    copied(stream(spark, on), on, tmp_path)
    check_numbers(messages(on.client, OUTPUT, 200), range(200))


def test_a_batch_write_can_be_repeated(spark: SparkSession, on: Stage) -> None:
    frame = spark.range(50).selectExpr("cast(id % 4 AS STRING) key", "cast(id AS STRING) value")
    frame = frame.repartition(3, "key")

    def save(mode: str = "append", **options: Any) -> None:
        frame.write.format("magnetar").options(**sink(on) | options).mode(mode).save()

    for _ in range(2):
        save(txnAppId="nightly", txnVersion=7)
    found = messages(on.client, OUTPUT, 50)
    assert sorted(int(each.value) for each in found) == list(range(50))
    with pytest.raises(PySparkException, match="restore the newest one"):
        save(txnAppId="nightly", txnVersion=6)
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        save("overwrite")
    with pytest.raises(PySparkException, match="txnVersion is missing"):
        save(txnAppId="nightly")
    save()
    assert len(messages(on.client, OUTPUT, 100)) == 100, "without a version it is written again"


def test_fields_are_encoded_with_a_schema_of_their_own(spark: SparkSession, on: Stage) -> None:
    frame = spark.sql(
        "SELECT 1 AS number, 'a' AS key, map('x', 2.5D) AS parts, TIMESTAMP_MILLIS(5) t"
    )
    frame.write.format("magnetar").options(**sink(on), valueFormat="json").mode("append").save()
    (only,) = messages(on.client, OUTPUT, 1)
    assert only.key == "a"
    assert msgspec.json.decode(only.value) == {"number": 1, "parts": {"x": 2.5}, "t": 5000}


def test_foreach_batch_gives_update_mode(spark: SparkSession, on: Stage, tmp_path: Path) -> None:
    on.send(80)
    writer = foreach_batch_writer(
        **sink(on), transform=lambda f: f.selectExpr("key", "cast(count AS STRING) value")
    )

    def run() -> None:
        counts = stream(spark, on).groupBy("key").agg(F.count("*").alias("count"))
        started = counts.writeStream.outputMode("update").foreachBatch(writer)
        started = started.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = started.trigger(availableNow=True).start()
        assert query.awaitTermination(_PATIENCE_S)
        assert query.exception() is None

    run()
    before = Counter((each.key, each.value) for each in messages(on.client, OUTPUT, 8))
    forget_last_commit(tmp_path)
    run()
    after = Counter((each.key, each.value) for each in messages(on.client, OUTPUT, 8))
    assert before == after
    assert {int(value) for key, value in after if key == "k0"} >= {10}


def test_modes_that_replace_rows_are_refused(
    spark: SparkSession, on: Stage, tmp_path: Path
) -> None:
    on.send(10)
    totals = stream(spark, on).groupBy("key").agg(F.count("*").cast("string").alias("value"))

    def start(mode: str) -> None:
        writer = totals.writeStream.format("magnetar").options(**sink(on)).outputMode(mode)
        writer = writer.option("checkpointLocation", str(tmp_path / mode))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination(_PATIENCE_S)

    with pytest.raises(PySparkException, match="Complete mode"):
        start("complete")
    with pytest.raises(PySparkException, match=r"(?i)update mode"):
        start("update")
