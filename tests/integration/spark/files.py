"""A streaming query into files, which Spark writes exactly once, and what is in them.

Owns: `Files`: the query, its checkpoint, and the rows of all committed batches in their order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from tests.integration.spark.stage import Row

PATIENCE_S: Final = 300
"""For a machine that does much else."""


class Files:
    """A query into files, which Spark writes exactly once, and what is in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, frame: DataFrame, *, available_now: bool = True) -> StreamingQuery:
        picked = frame.selectExpr("cast(value AS STRING) value", "key", "segment", "messageId")
        writer = picked.writeStream.format("json").option("path", str(self._folder / "out"))
        writer = writer.option("checkpointLocation", str(self._folder / "checkpoint"))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(self, frame: DataFrame) -> None:
        query = self.start(frame)
        assert query.awaitTermination(PATIENCE_S)
        assert query.exception() is None

    def batches(self) -> list[int]:
        return sorted(int(each.name) for each in self._log("offsets"))

    def _log(self, name: str) -> list[Path]:
        folder = self._folder / "checkpoint" / name
        return [each for each in folder.iterdir() if each.name.isdecimal()]

    def forget_last_commit(self) -> None:
        """As after a crash behind the last batch: Spark runs it again."""
        max(self._log("commits"), key=lambda each: int(each.name)).unlink()
        for each in (self._folder / "checkpoint" / "commits").glob(".*.crc"):
            each.unlink()

    def rows(self) -> list[Row]:
        """In the order of the batches."""
        found: list[Row] = []
        for file in self._files():
            for line in file.read_text().splitlines():
                row = json.loads(line)
                value = row["value"].encode()
                found.append(Row(row["key"], value, row["segment"], row["messageId"]))
        return found

    def _files(self) -> list[Path]:
        log = self._folder / "out" / "_spark_metadata"
        names = [each.name for each in log.iterdir() if each.name[0].isdecimal()]
        compact = [int(each.partition(".")[0]) for each in names if each.endswith(".compact")]
        first = max(compact, default=-1)
        chosen = [each for each in names if int(each.partition(".")[0]) > first]
        order = [f"{first}.compact"] if compact else []
        order += sorted((each for each in chosen if each.isdecimal()), key=int)
        return [
            Path(json.loads(line)["path"].removeprefix("file://"))
            for name in order
            for line in (log / name).read_text().splitlines()[1:]
        ]
