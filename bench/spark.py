"""Source and sink on Spark, beside what Spark brings with it.

    python -m bench.spark [--peers]

Broker, driver and executors share the machine: `local[2]`, a real server, durable. Beside each
figure, in the same run: Spark's rate source, parquet and text files; with `--peers` also Spark's
own Kafka source and sink, in an environment of their own (`bench/spark_kafka.py`). What is asked of
pipelines is judged at the end: the status says whether something was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession

from bench.report import Row, publish
from bench.spark_queries import (
    ONE_ROWS,
    PARTITIONS,
    ROUNDS,
    SIZES,
    Rates,
    Target,
    drained,
    generated,
    one_by_one,
    reading,
    transformed,
)
from bench.split import Served, serving
from bench.storage import percentile, scratch
from magnetar import FROM_EARLIEST, Client
from magnetar.blocking import Client as BlockingClient
from magnetar.spark.pipeline.session import start

MASTER: Final = f"local[{PARTITIONS},4]"
FILL_ROWS: Final = 10_000
KEYS: Final = 1000
COLUMNS: Final = "key STRING, value BINARY"

LATENCY_RATE: Final = 1000
LATENCY_WARM_SECONDS: Final = 15.0
LATENCY_SECONDS: Final = 30.0
TICK_SECONDS: Final = 0.01
NANOSECONDS_PER_MS: Final = 1_000_000

NOOP_MIN: Final = {"100 B": 300_000.0, "1 KiB": 120_000.0}
SINK_MIN: Final = {"100 B": 186_000.0, "1 KiB": 82_000.0}
"""Twice what Kafka's pair did on such a machine, cold."""
PEER_TIMES_MIN: Final = 2.0
LATENCY_P50_MAX_MS: Final = 200.0
ONE_ROW_TIMES_MAX: Final = 1.3


class Bench:
    """One run: figures, and what is not as wanted."""

    def __init__(self, spark: SparkSession, served: Served, folder: Path) -> None:
        self._spark = spark
        self._served = served
        self._folder = folder
        self._folders = 0
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.sink_rates: dict[str, Rates] = {}

    def figure(self, measure: str, value: float, unit: str, **anchor: Any) -> None:
        self.rows.append(Row(measure=measure, value=value, unit=unit, **anchor))
        print(f"{measure}: {value:,.0f} {unit}", file=sys.stderr, flush=True)

    def want(self, is_met: bool, what: str) -> None:
        if not is_met:
            self.wrong.append(what)

    def scratch(self) -> Path:
        self._folders += 1
        folder = self._folder / f"work-{self._folders}"
        folder.mkdir()
        return folder

    # --- throughput

    def throughput(self, size: str) -> None:
        length, count = SIZES[size]
        topic = self._topic(f"in-{length}", PARTITIONS)
        self._fill(topic, length, count)
        place, nowhere = self._ours(topic, startingOffsets="earliest"), Target("noop")
        # Spark leaves out what a query does not need of its own sources; of ours a user says it.
        source = reading(self._spark, place._replace(schema=COLUMNS))
        # Ours come first: their first round has a JVM as cold as a peer's.
        ours = drained(source, lambda _: nowhere, self.scratch())
        sinks = [self._topic(f"out-{length}-{number}", PARTITIONS) for number in range(ROUNDS)]
        moved = drained(transformed(source), lambda n: self._ours(sinks[n]), self.scratch())

        everything = drained(reading(self._spark, place), lambda _: nowhere, self.scratch())

        rate = generated(self._spark, count, self.scratch())
        self.figure(f"rate source -> noop, {count:,} rows", rate, "rows/s")
        files = self._parquet(topic, count)
        parquet = reading(self._spark, Target("parquet", {"path": str(files)}, COLUMNS))
        plain = drained(parquet, lambda _: nowhere, self.scratch())
        out = self.scratch()
        copied = drained(
            transformed(parquet),
            lambda n: Target("parquet", {"path": str(out / str(n))}),
            self.scratch(),
        )
        self.rates(f"parquet -> noop, {size}", plain)
        self.rates(f"source -> noop, {size}", ours, "parquet -> noop", plain)
        self.rates(f"source -> noop, all columns, {size}", everything, "parquet -> noop", plain)
        copy = "parquet -> transform -> parquet"
        self.rates(f"{copy}, {size}", copied)
        self.rates(f"source -> transform -> exactly-once sink, {size}", moved, copy, copied)
        self.sink_rates[size] = moved
        found = min(ours.warm, everything.warm)
        self.want(found >= NOOP_MIN[size], f"source -> noop, {size}: {found:,.0f} rows/s")
        self.want(moved.warm >= SINK_MIN[size], f"to the sink, {size}: {moved.warm:,.0f} rows/s")

    def rates(
        self, measure: str, rates: Rates, anchor: str = "", beside: Rates | None = None
    ) -> None:
        """Both figures, each with its ratio to the same of an anchor."""
        for name, value in rates._asdict().items():
            against: dict[str, Any] = {}
            if beside is not None:
                against = {"anchor": f"{anchor}, {name}", "ratio": value / getattr(beside, name)}
            samples = 1 if name == "cold" else ROUNDS - 1
            self.figure(f"{measure}, {name}", value, "rows/s", samples=samples, **against)

    def _topic(self, name: str, segments: int) -> str:
        path = f"public/default/{name}"
        self._served.admin("PUT", f"{path}?numInitialSegments={segments}")
        self._served.admin("POST", f"{path}/autoScalePolicy", {"enabled": False})
        return f"topic://{path}"

    def _ours(self, topic: str, **options: str) -> Target:
        return Target("magnetar", {"serviceUrl": self._served.url, "topic": topic} | options)

    def _fill(self, topic: str, length: int, count: int) -> None:
        """Rows with a thousand keys, in batches as a busy producer makes them."""
        with BlockingClient(self._served.url) as client, client.producer(topic) as producer:
            for first in range(0, count, FILL_ROWS):
                numbers = range(first, min(count, first + FILL_ROWS))
                producer.send_arrow(
                    pa.RecordBatch.from_pydict(
                        {
                            "key": [f"key-{number % KEYS}" for number in numbers],
                            "value": [b"%010d" % number + bytes(length - 10) for number in numbers],
                        }
                    )
                )

    def _parquet(self, topic: str, count: int) -> Path:
        """The same rows as files, and the check that reading gives all of them."""
        folder = self.scratch() / "rows"
        source = self._ours(topic, startingOffsets="earliest")
        found = self._spark.read.format(source.format).options(**source.options).load()
        rows = found.select("key", "value").repartition(PARTITIONS)
        rows.write.parquet(str(folder))
        stored = self._spark.read.parquet(str(folder)).count()
        if stored != count:
            raise SystemExit(f"{topic} has {count} messages, {stored} were read")
        return folder

    # --- a batch of one row

    def one_row(self) -> None:
        watched, written = self.scratch(), self.scratch()
        lines = reading(self._spark, Target("text", {"path": str(watched)}))

        def feed_file(number: int) -> None:
            new = watched / f".{number}"
            new.write_text("row\n")
            new.rename(watched / f"{number}.txt")

        text = one_by_one(lines, Target("text", {"path": str(written)}), feed_file, self.scratch())
        self.figure("one row, file -> file", text, "ms", samples=ONE_ROWS)
        source, sink = self._topic("one-in", 1), self._topic("one-out", 1)
        rows = transformed(reading(self._spark, self._ours(source, startingOffsets="earliest")))
        with BlockingClient(self._served.url) as client, client.producer(source) as producer:

            def feed(number: int) -> None:
                producer.send(b"%d" % number, key="k")

            ours = one_by_one(rows, self._ours(sink), feed, self.scratch())
        self.figure(
            "one row, source -> exactly-once sink",
            ours,
            "ms",
            anchor="file -> file",
            ratio=ours / text,
            samples=ONE_ROWS,
        )
        self.want(ours <= ONE_ROW_TIMES_MAX * text, f"one row: {ours / text:.2f} of file -> file")

    # --- latency

    def latency(self) -> None:
        source, sink = self._topic("late-in", PARTITIONS), self._topic("late-out", PARTITIONS)
        rows = transformed(reading(self._spark, self._ours(source, startingOffsets="earliest")))
        target = self._ours(sink)
        writer = rows.writeStream.format(target.format).options(**target.options)
        query = writer.option("checkpointLocation", str(self.scratch() / "checkpoint")).start()
        try:
            taken = asyncio.run(_latencies(self._served.url, source, sink))
        finally:
            query.stop()
        for share in (0.5, 0.9, 0.99):
            self.figure(
                f"input -> output at {LATENCY_RATE:,} rows/s, p{share * 100:g}",
                percentile(taken, share),
                "ms",
                samples=len(taken),
            )
        middle = percentile(taken, 0.5)
        self.want(middle <= LATENCY_P50_MAX_MS, f"input -> output p50: {middle:.0f} ms")


async def _latencies(url: str, source: str, sink: str) -> list[float]:
    """Milliseconds from the send of a row until it is read, committed, from the sink."""
    taken: list[float] = []
    begun = time.monotonic()
    async with (
        Client(url) as client,
        await client.producer(source) as producer,
        await client.checkpoint_consumer(sink, start=FROM_EARLIEST) as consumer,
    ):

        async def send() -> None:
            sent = 0
            while (age := time.monotonic() - begun) < LATENCY_WARM_SECONDS + LATENCY_SECONDS:
                while sent < age * LATENCY_RATE:
                    await producer.submit(b"%d" % time.time_ns(), key=f"key-{sent % KEYS}")
                    sent += 1
                await asyncio.sleep(TICK_SECONDS)
            await producer.flush()

        sending = asyncio.create_task(send())
        while not sending.done():
            received = await consumer.receive_many(10_000, timeout=1.0)
            if time.monotonic() - begun > LATENCY_WARM_SECONDS:
                now = time.time_ns()
                taken += [(now - int(message.data)) / NANOSECONDS_PER_MS for message in received]
        await sending
    return taken


def beside_kafka(bench: Bench, folder: Path) -> None:
    from bench.spark_peers import kafka_rates

    for size, measured in kafka_rates(folder).items():
        for measure, rates in measured.items():
            bench.rates(f"Kafka: {measure}, {size}", rates)
        kafka, ours = measured["source -> transform -> sink"], bench.sink_rates[size]
        bench.rates(f"exactly-once sink, {size}", ours, "Kafka's pair, at least once", kafka)
        for name, value in ours._asdict().items():
            times = value / getattr(kafka, name)
            bench.want(times >= PEER_TIMES_MIN, f"{size}, {name}: {times:.2f} of Kafka's pair")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", action="store_true", help="beside Kafka, which is fetched")
    asked = parser.parse_args()
    with scratch() as folder, serving(folder) as served:
        spark = start("bench", master=MASTER, log_file=folder / "spark.txt")
        bench = Bench(spark, served, folder)
        try:
            for size in SIZES:
                bench.throughput(size)
            bench.one_row()
            bench.latency()
        finally:
            spark.stop()
        if asked.peers:
            beside_kafka(bench, folder)
    publish("spark", bench.rows)
    for line in bench.wrong:
        print(f"MISSED  {line}")
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
