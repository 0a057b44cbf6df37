"""The sink with places where it stops or fails, as a data source of its own: `faulty`.

Faults stand in a file, `faults.json`, in the folder of the option `faultFolder`: a list of objects
with `point` and `batch`, and for some `partition`. Each happens once. One that holds says so by a
file `reached-<number>` and goes on when there is a file `go-<number>`; until then a test kills what
it wants to kill.

| point | what happens |
|---|---|
| `mid-write` | holds after the first rows of a task were handed in |
| `after-write` | holds when a task has everything stored, before Spark is told |
| `before-commit`, `after-commit` | holds around the commit of a batch |
| `fail-write` | a task fails after its rows were stored |
| `fail-before-commit`, `fail-after-commit` | the commit raises |
| `lost-answer` | the first answer to COMMIT_GROUP is lost |
| `fail-abort` | abort raises |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from magnetar.client.connection.connection import BrokerConnection
from magnetar.errors import ConnectionLost
from magnetar.spark.option_table import Use
from magnetar.spark.options import parse
from magnetar.spark.sink.writers import batch_writer, stream_writer

FOLDER = "faultfolder"
_POLL_S = 0.02


class Faults:
    """What is to happen, by place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def at(self, point: str, batch: int, partition: int = 0) -> bool:
        """Whether it happens here and now; it never happens a second time."""
        faults = json.loads((self._folder / "faults.json").read_text())
        for number, fault in enumerate(faults):
            here = (fault["point"], fault["batch"], fault.get("partition", 0))
            if here != (point, batch, partition):
                continue
            try:
                (self._folder / f"taken-{number}").touch(exist_ok=False)
            except FileExistsError:
                return False
            (self._folder / f"pid-{number}").write_text(str(os.getpid()))
            (self._folder / f"reached-{number}").touch()
            self._number = number
            return True
        return False

    def hold(self, point: str, batch: int, partition: int = 0) -> None:
        if self.at(point, batch, partition):
            while not (self._folder / f"go-{self._number}").exists():
                time.sleep(_POLL_S)

    def fail(self, point: str, batch: int, partition: int = 0) -> None:
        if self.at(point, batch, partition):
            raise RuntimeError(f"the test wanted {point} in batch {batch}")


class FaultyWriter(DataSourceStreamArrowWriter):
    """The writer of the sink, with its faults."""

    def __init__(self, wrapped: Any, folder: str) -> None:
        self._wrapped = wrapped
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context: Any = TaskContext.get()
        place = (int(context.getLocalProperty("streaming.sql.batchId")), context.partitionId())
        faults = Faults(Path(self._folder))

        def rows() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(iterator):
                if number == 1:
                    faults.hold("mid-write", *place)
                yield batch

        done: WriterCommitMessage = self._wrapped.write(rows())
        faults.hold("after-write", *place)
        faults.fail("fail-write", *place)
        return done

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        faults = Faults(Path(self._folder))
        faults.hold("before-commit", batchId)
        faults.fail("fail-before-commit", batchId)
        if faults.at("lost-answer", batchId):
            _lose_an_answer()
        self._wrapped.commit(messages, batchId)
        faults.hold("after-commit", batchId)
        faults.fail("fail-after-commit", batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        Faults(Path(self._folder)).fail("fail-abort", batchId)
        self._wrapped.abort(messages, batchId)


class FaultySource(DataSource):
    """Only writes; batch writes have no faults."""

    @classmethod
    def name(cls) -> str:
        return "faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        options = dict(self.options)
        folder = options.pop(FOLDER)
        return FaultyWriter(stream_writer(parse(options, Use.WRITE), schema, overwrite), folder)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = {name: text for name, text in self.options.items() if name != FOLDER}
        return batch_writer(parse(options, Use.WRITE), schema, overwrite)


def _lose_an_answer() -> None:
    real: Any = BrokerConnection.request

    async def request(self: BrokerConnection, what: str, **fields: Any) -> Any:
        answer = await real(self, what, **fields)
        if what == "COMMIT_GROUP":
            BrokerConnection.request = real  # type: ignore[method-assign]
            raise ConnectionLost("the test dropped the answer")
        return answer

    BrokerConnection.request = request  # type: ignore[method-assign,assignment]
