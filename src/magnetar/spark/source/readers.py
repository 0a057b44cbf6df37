"""The readers that Spark calls: of a stream, and of a batch with and without push-down.

Owns: `StreamReader`, `BatchReader`, `PushingBatchReader` and `SegmentRange`, what a task is told.

Invariants:
1. Readers are made in several processes, and pickled: nothing is connected before something is
   asked for, and what is asked for lives in the process (`links`).
2. Trouble with brokers that passes is sat out on the driver's side; Spark would end the query.
   Tasks are repeated by Spark.

Relies on: `planner`, for everything that is decided.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from magnetar.client.client import Client as AsyncClient
from magnetar.client.client import connections_of
from magnetar.client.schema.info import SchemaInfo
from magnetar.spark.links import client_for, close_all, patiently, stop_on_sigterm
from magnetar.spark.options import Options
from magnetar.spark.plain_errors import told_plainly
from magnetar.spark.source.batch_plan import BatchPlan, start_text
from magnetar.spark.source.columns import RowBatches, Shape
from magnetar.spark.source.filters import Bounds, bounds_of
from magnetar.spark.source.offsets import Sentinel, format_sentinel
from magnetar.spark.source.pace import BatchLimits
from magnetar.spark.source.planner import Planner
from magnetar.spark.source.tasks import ReadTask, pages_of

R = TypeVar("R")

_MS_PER_SECOND: Final = 1000


class SegmentRange(InputPartition):
    """The range that Spark hands to one task, or several that are short."""

    def __init__(self, *tasks: ReadTask) -> None:
        super().__init__(tasks)


class _Reading:
    """The task's side, which readers of streams and of batches have in common."""

    def __init__(self, options: Options, schema: StructType, shape: Shape) -> None:
        self._options = options
        self._schema = schema
        self._shape = shape

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one range; runs in a worker."""
        with told_plainly():
            yield from self._read(partition)

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # None is Spark's word for a read without partitions.
        for task in partition.value or ():
            yield from self._rows_of(task)

    def _rows_of(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        client = client_for(self._options)
        # The schema of a version is fetched only when a message of that version comes.
        rows = RowBatches(
            task.topic,
            task.number,
            self._schema,
            self._shape,
            self._options["columnStyle"],
            self._options["corruptRecord"] == "null",
            lambda version: _schema_of(client, task.topic, version),
        )
        for page in pages_of(client, task, self._options):
            yield from rows.of(page.entries())


def _schema_of(client: Any, topic: str, version: bytes) -> SchemaInfo | None:
    found = client.run(lambda asked: connections_of(asked).schema(topic, version))
    return None if found is None else SchemaInfo.from_wire(found)


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read."""

    def __init__(self, options: Options, schema: StructType, shape: Shape) -> None:
        super().__init__(options, schema, shape)
        # Made by the first question, in the process that asks (invariant 1).
        self._planner: Planner | None = None
        self._was_reached = False

    # --- in the long-lived process of the query

    @told_plainly()
    def initialOffset(self) -> dict[str, Any]:
        return format_sentinel(Sentinel(start_text(self._options)))

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit that Spark is told: one stands for all, since it has no word for several."""
        options = self._options
        # Spark only hands it back to `latestOffset`, where the options themselves are looked at.
        if options["maxMessagesPerTrigger"] is not None:
            return ReadMaxRows(options["maxMessagesPerTrigger"])
        if options["maxBytesPerTrigger"] is not None:
            return ReadMaxBytes(options["maxBytesPerTrigger"])
        if options["minMessagesPerTrigger"] is not None:
            return ReadMinRows(options["minMessagesPerTrigger"])
        return ReadAllAvailable()

    @told_plainly()
    def prepareForTriggerAvailableNow(self) -> None:
        self._do("the topics", lambda planner: planner.freeze())

    @told_plainly()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        options = self._options
        limits = BatchLimits(options["maxMessagesPerTrigger"], options["maxBytesPerTrigger"])
        # A query without limits, or a trigger that wants everything there is in one batch.
        if isinstance(limit, ReadAllAvailable):
            limits = BatchLimits()
        return self._do("what is new", lambda planner: planner.next_offset(start, limits))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._planner is None else self._planner.lag

    @told_plainly()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = self._do("the tasks", lambda planner: planner.stream_tasks(start, end))
        return [SegmentRange(*each) for each in tasks]

    @told_plainly()
    def commit(self, end: dict[str, Any]) -> None:
        self._do("the subscription", lambda planner: planner.committed(end))

    def stop(self) -> None:
        """The query is over, and this process with it."""
        close_all()

    def _do(self, what: str, ask: Callable[[Planner], Awaitable[R]]) -> R:
        client = client_for(self._options)
        # Spark ends this process with SIGTERM; the first call is the first chance to prepare for
        # it.
        if self._planner is None:
            stop_on_sigterm()

        async def ask_planner(asked: AsyncClient) -> R:
            if self._planner is None:
                self._planner = Planner(asked, self._options)
            return await ask(self._planner)

        # A service that was never reached is a wrong address; one that was comes back.
        first = self._options["operationTimeoutMs"] / _MS_PER_SECOND
        seconds = self._options["retryTimeout"] if self._was_reached else first
        found = patiently(client, what, ask_planner, seconds)
        self._was_reached = True
        return found

    # A planner holds connections of this process: the copy that goes to workers has none.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}


class BatchReader(_Reading, DataSourceReader):
    """A read of what is there."""

    @told_plainly()
    def partitions(self) -> Sequence[InputPartition]:
        return self._planned(None)

    def _planned(self, bounds: Bounds | None) -> list[InputPartition]:
        client = client_for(self._options)

        async def plan(asked: AsyncClient) -> list[ReadTask]:
            return await BatchPlan(asked, self._options).tasks(bounds)

        # A batch read is asked for by somebody who waits: no patience as for a stream that was
        # running.
        seconds = self._options["operationTimeoutMs"] / _MS_PER_SECOND
        return [SegmentRange(task) for task in patiently(client, "the tasks", plan, seconds)]


class PushingBatchReader(BatchReader):
    """One that lets filters spare reading. Spark refuses it unless push-down is switched on."""

    def __init__(self, options: Options, schema: StructType, shape: Shape) -> None:
        super().__init__(options, schema, shape)
        self._bounds: Bounds | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take filters, to read less; all are handed back, and Spark applies them itself."""
        self._bounds = bounds_of(filters)
        return filters

    @told_plainly()
    def partitions(self) -> Sequence[InputPartition]:
        return self._planned(self._bounds)


def batch_reader(options: Options, schema: StructType, shape: Shape) -> BatchReader:
    """The reader of a batch, with push-down if that is asked for."""
    return (PushingBatchReader if options["pushdown"] else BatchReader)(options, schema, shape)
