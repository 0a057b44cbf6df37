"""Spark's own Kafka source and sink, measured in the peer's environment.

    python -m bench.spark_kafka ADDRESS CLASSPATH FOLDER

It imports PySpark alone, and prints one line of JSON: by size and measure, rows per second of the
first round and of the others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from bench.spark_queries import (
    PARTITIONS,
    ROUNDS,
    SIZES,
    Rates,
    Target,
    drained,
    reading,
    transformed,
)

CONNECTOR = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
KEYS = 1000


def main() -> None:
    address, jars, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]) / "kafka-work"
    folder.mkdir()
    chosen = [each for each in jars.split(os.pathsep) if Path(each).name.startswith(CONNECTOR)]
    builder = SparkSession.builder.master(f"local[{PARTITIONS},4]").appName("kafka")
    builder = builder.config("spark.jars", ",".join(chosen)).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.sql.shuffle.partitions", str(PARTITIONS))
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    found = {size: measured(spark, address, size, folder / size.split()[0]) for size in SIZES}
    spark.stop()
    print(json.dumps(found))


def measured(spark: SparkSession, address: str, size: str, folder: Path) -> dict[str, Rates]:
    length, count = SIZES[size]
    folder.mkdir()
    broker = {"kafka.bootstrap.servers": address}
    rows = spark.range(count).selectExpr(
        f"concat('key-', id % {KEYS}) AS key", f"rpad(cast(id AS STRING), {length}, 'x') AS value"
    )
    rows.write.format("kafka").options(**broker, topic=f"in-{length}").save()
    options = broker | {"subscribe": f"in-{length}", "startingOffsets": "earliest"}
    source = reading(spark, Target("kafka", options))
    sinks = [Target("kafka", broker | {"topic": f"out-{length}-{n}"}) for n in range(ROUNDS)]
    (folder / "noop").mkdir()
    (folder / "sink").mkdir()
    return {
        "source -> noop": drained(source, lambda _: Target("noop"), folder / "noop"),
        "source -> transform -> sink": drained(
            transformed(source), sinks.__getitem__, folder / "sink"
        ),
    }


if __name__ == "__main__":
    main()
