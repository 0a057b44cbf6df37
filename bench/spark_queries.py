"""Streaming queries, timed the same way whatever they read and write.

It relies on PySpark alone: the environment of a peer, which has no Magnetar, uses it too. A figure
is taken from the progress that Spark reports, so that the start of a query does not count. Every
query runs `ROUNDS` times: the first has a JVM and workers that never ran it, the others are warm.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

SIZES: Final = {"100 B": (100, 2_000_000), "1 KiB": (1024, 500_000)}
"""Bytes of a value, and how many rows of them."""

ROUNDS: Final = 4
"""The first is cold."""

ONE_ROWS: Final = 40
ONE_ROWS_WARM: Final = 10
PARTITIONS: Final = 2
WAIT_SECONDS: Final = 600.0

TRANSFORM: Final = ("key", "value")
"""What `source -> transform -> sink` selects, after a filter that keeps all."""


class Target(NamedTuple):
    """A format with its options."""

    format: str
    options: Mapping[str, str] = {}
    schema: str | None = None


class Rates(NamedTuple):
    """Rows per second, the first time and in the middle of the others."""

    cold: float
    warm: float


def reading(spark: SparkSession, source: Target) -> DataFrame:
    reader = spark.readStream.format(source.format).options(**source.options)
    return (reader if source.schema is None else reader.schema(source.schema)).load()


def transformed(rows: DataFrame) -> DataFrame:
    return rows.where("length(value) > 0").selectExpr(*TRANSFORM)


def drained(rows: DataFrame, sink: Callable[[int], Target], folder: Path) -> Rates:
    """Read all that is there; `sink` gives one for each round."""
    rates: list[float] = []
    for number in range(ROUNDS):
        checkpoint = folder / f"checkpoint-{number}"
        target = sink(number)
        writer = rows.writeStream.format(target.format).options(**target.options)
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = writer.start()
        if not query.awaitTermination(int(WAIT_SECONDS)):
            query.stop()
            raise SystemExit(f"{target.format} did not end within {WAIT_SECONDS:g} s")
        done = [each for each in query.recentProgress if each["numInputRows"]]
        read = sum(each["numInputRows"] for each in done)
        seconds = sum(each["durationMs"]["triggerExecution"] for each in done) / 1000
        rates.append(read / seconds)
        shutil.rmtree(checkpoint)
    return Rates(rates[0], statistics.median(rates[1:]))


def generated(spark: SparkSession, rows: int, folder: Path) -> float:
    """Rows per second of Spark's own rate source to nowhere: what a batch can be at best."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    query = (
        source.option("numPartitions", PARTITIONS)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    deadline = time.monotonic() + WAIT_SECONDS
    while len(query.recentProgress) < ROUNDS and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()
    taken = [int(each["durationMs"]["triggerExecution"]) for each in query.recentProgress[1:]]
    return rows / (statistics.median(taken) / 1000)


def one_by_one(rows: DataFrame, sink: Target, feed: Callable[[int], None], folder: Path) -> float:
    """Milliseconds of a micro-batch with one row, in the middle."""
    writer = rows.writeStream.format(sink.format).options(**sink.options)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    taken: list[int] = []
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        for number in range(ONE_ROWS):
            feed(number)
            seen = len(taken)
            while len(taken) == seen:
                if time.monotonic() > deadline or not query.isActive:
                    raise SystemExit(f"a batch of one row did not come: {query.exception()}")
                time.sleep(0.01)
                taken = [
                    each["durationMs"]["triggerExecution"]
                    for each in query.recentProgress
                    if each["numInputRows"]
                ]
    finally:
        query.stop()
    return statistics.median(taken[ONE_ROWS_WARM:])
