"""A program: one streaming read into files, up to what is there, held at a named point.

python -m tests.integration.spark.source_driver '{"folder": ..., "options": {...}, "hold":
"after-wal:1"}'

Held at a point it makes a file `reached` and stays there, to be killed. The number behind the point
is the batch of this run.

| point | where |
|---|---|
| `before-wal` | the end of a batch is planned, and not written down |
| `after-wal` | it is written down, and no task has begun |
| `in-read` | a task has read its first rows |
| `in-commit` | the source is told that the batch before is done |
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from magnetar.spark.data_source import MagnetarSource
from magnetar.spark.pipeline.session import start
from tests.integration.spark.files import Files

_FOLDER, _HOLD = "holdFolder", "hold"
_POLL_S = 0.05


class HeldReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of the source, which stops at one point."""

    def __init__(self, wrapped: Any, folder: str, hold: str) -> None:
        self._wrapped = wrapped
        self._folder = folder
        self._hold = hold
        self._passed = dict.fromkeys(("before-wal", "after-wal", "in-commit"), 0)

    def _pass(self, point: str) -> None:
        number = self._passed[point]
        self._passed[point] += 1
        if self._hold == f"{point}:{number}":
            self._stay()

    def _stay(self) -> None:
        (Path(self._folder) / "reached").touch()
        while True:
            time.sleep(_POLL_S)

    def initialOffset(self) -> dict[str, Any]:
        found: dict[str, Any] = self._wrapped.initialOffset()
        return found

    def getDefaultReadLimit(self) -> ReadLimit:
        found: ReadLimit = self._wrapped.getDefaultReadLimit()
        return found

    def prepareForTriggerAvailableNow(self) -> None:
        self._wrapped.prepareForTriggerAvailableNow()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end: dict[str, Any] = self._wrapped.latestOffset(start, limit)
        if end != start:
            self._pass("before-wal")
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._pass("after-wal")
        found: Sequence[InputPartition] = self._wrapped.partitions(start, end)
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for batch in self._wrapped.read(partition):
            yield batch
            if self._hold == "in-read":
                self._stay()

    def commit(self, end: dict[str, Any]) -> None:
        self._pass("in-commit")
        self._wrapped.commit(end)

    def stop(self) -> None:
        self._wrapped.stop()


class HeldSource(MagnetarSource):
    """The source, as `held`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._folder, self._hold = options.pop(_FOLDER), options.pop(_HOLD)
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "held"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return HeldReader(super().streamReader(schema), self._folder, self._hold)


def main() -> None:
    plan = json.loads(sys.argv[1])
    spark = start("held", master="local[2,4]", settings={"spark.log.level": "ERROR"})
    spark.dataSource.register(HeldSource)
    options = plan["options"] | {_FOLDER: plan["folder"], _HOLD: plan["hold"]}
    Files(Path(plan["folder"])).run(spark.readStream.format("held").options(**options).load())
    spark.stop()


if __name__ == "__main__":
    main()
