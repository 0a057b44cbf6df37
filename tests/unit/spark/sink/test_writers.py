"""The process of Spark that commits a streaming batch is known by the file that it runs."""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pyspark
import pytest
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructField, StructType

from magnetar.spark.sink import writers

RENAMED = (
    f"PySpark {pyspark.__version__} does not make the writer that commits a streaming batch in "
    f"pyspark/sql/worker/{writers._COMMIT_RUNNER}. Find the file that calls `streamWriter` and "
    "then `commit`, and give magnetar.spark.sink.writers._COMMIT_RUNNER its name: else, with "
    "commitMode=single, every commit begins a transaction that nobody uses"
)
SCHEMA = StructType([StructField("value", StringType())])
BATCH = 7

_seen: list[tuple[str, object]] = []


class _Writer(DataSourceStreamWriter):
    def write(self, iterator: Any) -> WriterCommitMessage:
        raise AssertionError("rows are written by tasks")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _seen.append(("commit", batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _seen.append(("abort", batchId))


class _Source(DataSource):
    def __init__(self) -> None:
        super().__init__({})

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        _seen.append(("is_committing", writers._is_committing()))
        return _Writer()


def _runner() -> ModuleType:
    name = f"pyspark.sql.worker.{writers._COMMIT_RUNNER.removesuffix('.py')}"
    if importlib.util.find_spec(name) is None:
        pytest.fail(RENAMED)
    return importlib.import_module(name)


def _sent(*, is_abort: bool) -> io.BytesIO:
    """What the JVM sends to that process: source, schema, overwrite, messages, batch, abort."""
    source, schema = pickle.dumps(_Source()), SCHEMA.json().encode()
    sent = struct.pack(f"!i{len(source)}s", len(source), source)
    sent += struct.pack(f"!i{len(schema)}s", len(schema), schema)
    return io.BytesIO(sent + struct.pack("!?iq?", False, 0, BATCH, is_abort))


@pytest.mark.parametrize("is_abort", [False, True])
def test_the_writer_that_commits_is_made_in_the_file_that_is_looked_for(is_abort: bool) -> None:
    runner = _runner()
    assert runner.__file__ is not None
    assert Path(runner.__file__).name == writers._COMMIT_RUNNER, RENAMED
    _seen.clear()
    runner._main(_sent(is_abort=is_abort), io.BytesIO())
    done = ("abort" if is_abort else "commit", BATCH)
    assert _seen == [("is_committing", True), done], RENAMED


def test_a_writer_that_is_made_elsewhere_does_not_commit() -> None:
    _seen.clear()
    _Source().streamWriter(SCHEMA, overwrite=False)
    assert _seen == [("is_committing", False)]
