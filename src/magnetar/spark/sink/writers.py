"""The sink: what Spark calls to write a data frame, as a stream or once.

Owns: `stream_writer` and `batch_writer`, which check everything that can be checked before a row is
read, and the two writers. A writer is pickled to where its tasks run; it holds plain values only.

Invariants:
1. Everything that a commit needs travels in what the tasks return (`Written`).
2. Which way to commit is decided on the driver, before the tasks: all of them go the same way.
3. A task that fails aborts its transaction and forgets its producers.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from magnetar.blocking import Client, Transaction
from magnetar.errors import InvalidSetting, MagnetarError
from magnetar.spark.links import client_for
from magnetar.spark.options import Options
from magnetar.spark.plain_errors import told_plainly
from magnetar.spark.sink import group_writes, single_writes
from magnetar.spark.sink.columns import SinkColumns
from magnetar.spark.sink.group_commit import TaskPlan, TaskReport, WriteId
from magnetar.spark.sink.rows import RowWriter
from magnetar.wire.messages import TxnId

BATCH_GENERATION: Final = "batch"
"""Of batch writes: they have no query."""

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"
"""Local properties of a task of a streaming query; of Spark's run ids only this one is there."""

# Spark's file in which the writer that commits is made; see `_is_committing`.
_COMMIT_RUNNER: Final = "python_streaming_sink_runner.py"
_AT_LEAST_ONCE: Final = "at-least-once"
_GROUP: Final = "group"
_SINGLE: Final = "single"
_PLAIN: Final = "plain"


@dataclass
class Written(WriterCommitMessage):
    """The message of a task to the driver."""

    part: TaskReport


class WriteTask(Protocol):
    """The part of one attempt of a task in the commit of its batch."""

    @property
    def txn(self) -> Transaction | None: ...

    def begin(self) -> TaskPlan:
        """Called with the first row."""
        ...

    def finish(self, rows: int, size: int) -> TaskReport:
        """Wait until everything that was sent is durable; what to tell the driver."""
        ...

    def explained(self, error: MagnetarError) -> MagnetarError:
        """What to tell the user of an error of this attempt."""
        ...

    def give_up(self) -> None: ...


class PlainTask:
    """Writes without transactions."""

    txn: Final = None

    def __init__(self, write: WriteId) -> None:
        self._write = write

    def begin(self) -> TaskPlan:
        return TaskPlan.WRITE

    def finish(self, rows: int, size: int) -> TaskReport:
        return TaskReport(self._write, rows=rows, bytes=size)

    def explained(self, error: MagnetarError) -> MagnetarError:
        return error

    def give_up(self) -> None:
        """What was sent stays: at least once."""


@dataclass(frozen=True)
class SinkWriter:
    """The settings and steps that both writers have in common; pickled to the tasks."""

    options: Options
    columns: SinkColumns
    mode: str
    single: TxnId | None = None
    """The transaction of all tasks, if there is one for all."""

    @property
    def timeout_s(self) -> float:
        return float(self.options["transactionTimeout"])

    def client(self) -> Client:
        return client_for(self.options)

    def write(self, batches: Iterator[pa.RecordBatch], write: WriteId) -> Written:
        """One attempt of a task."""
        # The transaction begins with the first row: most tasks of a small batch have none.
        task: WriteTask | None = None
        rows = RowWriter(self.client(), self.options, self.columns)
        skipped = 0
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                if task is None:
                    task = self._task(write)
                    plan = task.begin()
                # Counted all the same: a repeated batch must have as many rows as it had.
                if plan is TaskPlan.SKIP:
                    skipped += batch.num_rows
                else:
                    rows.write(batch, task.txn)
            # The last batch is still on its way; only then is the transaction complete.
            rows.settle()
            part = (
                TaskReport(write) if task is None else task.finish(rows.rows + skipped, rows.bytes)
            )
        # Also when Spark kills the task: an open transaction would hold back every reader of the
        # topic. First the transaction, then the producers: sends under way end with it (invariant
        # 3).
        except BaseException as error:
            told = error
            if task is not None:
                task.give_up()
                if isinstance(error, MagnetarError):
                    told = task.explained(error)
            rows.failed()
            if told is error:
                raise
            raise told from error
        rows.done()
        return Written(part)

    def _task(self, write: WriteId) -> WriteTask:
        if self.mode == _PLAIN:
            return PlainTask(write)
        if self.mode == _GROUP:
            return group_writes.GroupTask(self.client(), write, self.timeout_s)
        # Only `single` is left, whose transaction travels with the pickled writer.
        assert self.single is not None, "the driver has begun it"
        retry, attempt = _attempt()
        return single_writes.SingleTask(self.single_mode(), write, self.single, retry, attempt)

    def single_mode(self) -> single_writes.Mode:
        client = self.client()
        return single_writes.Mode(
            client,
            self.options["commitTopic"],
            self.timeout_s,
            # Of the older kind, unless the server has but one kind for all topics.
            scalable=None if group_writes.has_groups(client) else False,
        )

    def begun(self) -> SinkWriter:
        """The writer with the transaction of the next batch, if that has one for all tasks."""
        if self.mode != _SINGLE:
            return self
        mode = self.single_mode()
        topic = self.options["topic"] or ""
        # Transactions of the older kind do not reach scalable topics: told now, not by every task.
        if mode.scalable is False and topic.startswith("topic://"):
            raise InvalidSetting(
                f"{topic} cannot be written exactly once: the server has no transaction groups",
                hint="use a persistent:// topic, or semantics = at-least-once",
            )
        return replace(self, single=mode.begin(self.options["retryTimeout"]))

    def commit(self, sequence: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = _parts(messages)
        same_rows = self.options["repeatedRows"] == "check"
        # A plain write has nothing to commit: its rows were visible when they were stored.
        if self.mode == _GROUP:
            group_writes.commit(
                self.client(),
                sequence,
                parts,
                timeout_s=self.timeout_s,
                retry_s=self.options["retryTimeout"],
                same_rows=same_rows,
            )
        elif self.mode == _SINGLE:
            single_writes.commit(self.single_mode(), sequence, parts, same_rows=same_rows)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self.mode == _GROUP:
            group_writes.abort(self.client(), _parts(messages))
        elif self.mode == _SINGLE:
            single_writes.abort(self.single_mode(), _parts(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query."""

    def __init__(self, sink: SinkWriter) -> None:
        self._sink = sink

    @told_plainly()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.write(iterator, _streaming_id(self._sink.options["transactionalId"]))

    @told_plainly()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.commit(batchId, messages)

    @told_plainly()
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.abort(messages)


class BatchWriter(DataSourceArrowWriter):
    """Writes one data frame."""

    def __init__(self, sink: SinkWriter, write: WriteId) -> None:
        self._sink = sink
        self._write = write

    @told_plainly()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.write(iterator, self._write)

    @told_plainly()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.commit(self._write.sequence, messages)

    @told_plainly()
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.abort(messages)


def stream_writer(options: Options, schema: StructType, overwrite: bool) -> StreamWriter:
    """The writer for `df.writeStream`; raises what is wrong with options and columns."""
    # Refused before a row is read: what a log cannot do, and what would break exactly once.
    if overwrite:
        raise InvalidSetting(
            "a topic cannot be written in Complete mode: what was written stays",
            hint='use .outputMode("append"); for aggregations of whole tables use foreachBatch',
        )
    if options.spark.get("asyncprogresstrackingenabled", "").lower() == "true":
        raise InvalidSetting(
            "exactly once does not go with asyncProgressTrackingEnabled: batches that are run "
            "again would hold other rows",
            hint="leave that option out",
        )
    for name in ("txnAppId", "txnVersion", "txnGeneration"):
        if options[name] is not None:
            raise InvalidSetting(
                f"{name} is for batch writes; a stream counts its batches itself",
                hint="leave it out, or use transactionalId",
            )
    sink = _sink(options, schema)
    return StreamWriter(sink if _is_committing() else sink.begun())


def batch_writer(options: Options, schema: StructType, overwrite: bool) -> BatchWriter:
    """The writer for `df.write`; raises what is wrong with options and columns."""
    if overwrite:
        raise InvalidSetting(
            "a topic cannot be overwritten: what was written stays", hint='use .mode("append")'
        )
    application, version = options["txnAppId"], options["txnVersion"]
    if (application is None) != (version is None):
        missing = "txnVersion" if version is None else "txnAppId"
        raise InvalidSetting(
            f"{missing} is missing: only both together make a write that can be repeated",
            hint=f'add .option("{missing}", ...)',
        )
    # A write without a name of its own is never repeated: it gets one that nobody else has.
    run = uuid.uuid4().hex
    if application is None:
        application, version = f"{BATCH_GENERATION}-{run}", 0
    write = WriteId(application, options["txnGeneration"] or BATCH_GENERATION, run, version)
    return BatchWriter(_sink(options, schema).begun(), write)


def _sink(options: Options, schema: StructType) -> SinkWriter:
    types: Mapping[str, str] = {each.name: each.dataType.simpleString() for each in schema.fields}
    columns = SinkColumns.of(types, topic=options["topic"])
    options.required("serviceUrl", "pulsar://localhost:6650")
    return SinkWriter(options, columns, _mode(options))


def _mode(options: Options) -> str:
    if options["semantics"] == _AT_LEAST_ONCE:
        return _PLAIN
    chosen = str(options["commitMode"])
    if chosen != "auto":
        return chosen
    return _GROUP if group_writes.has_groups(client_for(options)) else _SINGLE


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[TaskReport | None]:
    parts: list[TaskReport | None] = []
    for each in messages:
        assert each is None or isinstance(each, Written), "every task returns one"
        parts.append(None if each is None else each.part)
    return parts


def _is_committing() -> bool:
    """Spark makes a writer to commit with as it makes one to write with; only who calls differs."""
    # Spark runs each step in a process of its own, and calls `streamWriter` with the same
    # arguments in both: the file on the stack is all that tells them apart. A commit taken for a
    # write would begin a transaction that no task joins. A test runs the file that Spark has.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMMIT_RUNNER):
            return True
        frame = frame.f_back
    return False


def _attempt() -> tuple[int, int]:
    """Which attempt of its task this is, from 0, and its number in this application."""
    context: Any = TaskContext.get()
    return (0, -1) if context is None else (context.attemptNumber(), context.taskAttemptId())


def _streaming_id(transactional_id: str | None) -> WriteId:
    """The id of the micro-batch that this task belongs to."""
    context: Any = TaskContext.get()
    found = {name: context.getLocalProperty(name) for name in (_QUERY, _BATCH, _RUN)}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise InvalidSetting(
            f"Spark does not say which batch this is ({missing[0]} is not set)",
            hint="PySpark 4.2 or later is needed, and writeStream in a query of its own",
        )
    # The query's id is in its checkpoint, and stays over restarts; the run's changes with each.
    query = found[_QUERY]
    return WriteId(transactional_id or query, query, found[_RUN], int(found[_BATCH]))
