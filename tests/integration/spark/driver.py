"""A program: one streaming query from a source of numbers to the sink, until a batch is done.

python -m tests.integration.spark.driver '{"url": ..., "topic": ..., "checkpoint": ..., "faults":
..., ...}'

The numbers come from Spark's own `rate-micro-batch`, which gives a batch the same rows whenever it
runs: batch n has [n * ROWS, (n + 1) * ROWS). Its last line is `done`, or the error of the query.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from magnetar.spark import foreach_batch_writer
from tests.integration.spark.faulty import FOLDER, Faults, FaultySource

ROWS = 40
PARTITIONS = 4
"""Every key is in one of them: rows of a key have an order."""
REMOTE = "connect:"
_POLL_S = 0.05


def session(master: str = "local[2,4]", **settings: str) -> SparkSession:
    """A small one, whose workers use this interpreter."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    chosen = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        # Several record batches for each task, so that one can be stopped between them.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "4",
        "spark.log.level": "ERROR",
    } | settings
    builder = SparkSession.builder.appName("sink test")
    # Spark Connect is asked for by the master of a server that is started for it.
    is_remote = master.startswith(REMOTE)
    builder = builder.remote(master[len(REMOTE) :]) if is_remote else builder.master(master)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.dataSource.register(FaultySource)
    return made


def numbers(spark: SparkSession, partitions: int = PARTITIONS) -> DataFrame:
    """Columns `key` and `value`."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
    found = source.option("numPartitions", partitions).load()
    return found.selectExpr(
        f"cast(value % {PARTITIONS} as string) key", "cast(value as string) value"
    )


def start(frame: DataFrame, plan: dict[str, Any]) -> StreamingQuery:
    options = {"serviceUrl": plan["url"], "topic": plan["topic"]} | plan.get("options", {})
    writer = frame.writeStream.option("checkpointLocation", plan["checkpoint"])
    writer = writer.outputMode(plan.get("mode", "append"))
    if plan.get("kind") == "foreach":
        faults = Faults(Path(plan["faults"]))
        write = foreach_batch_writer(format_name="faulty", **options)

        def each(batch: DataFrame, number: int) -> None:
            write(batch, number)
            faults.hold("after-commit", number)

        return writer.foreachBatch(each).start()
    writer = writer.format("faulty").option(FOLDER, plan["faults"])
    for name, value in options.items():
        writer = writer.option(name, value)
    return writer.start()


def run(query: StreamingQuery, plan: dict[str, Any]) -> None:
    """Until a batch is in the checkpoint, or a fault is reached; raises if the query fails."""
    done = Path(plan["checkpoint"]) / "commits" / str(plan["until"])
    reached = Path(plan["faults"]) / f"reached-{plan.get('stop_at')}"
    while not done.exists() and not reached.exists():
        failure = query.exception()
        if failure is not None:
            raise failure
        time.sleep(_POLL_S)
    if reached.exists():
        reached.with_name(f"go-{plan['stop_at']}").touch()
    query.stop()


def main() -> int:
    plan = json.loads(sys.argv[1])
    spark = session(plan.get("master", "local[2,4]"), **plan.get("settings", {}))
    try:
        rows = numbers(spark, plan.get("partitions", PARTITIONS))
        if plan.get("shuffle"):
            rows = rows.repartition(2, "key")
        query = start(rows, plan)
        run(query, plan)
    except PySparkException as error:
        sys.stdout.write(f"failed: {error}\n")
        return 1
    sys.stdout.write("done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
