"""The data source that Spark finds: `format("magnetar")`, and `format("pulsar")`.

Owns: `MagnetarSource`, which checks options and hands over to the readers and writers.

Invariants:
1. Making one is cheap and asks nobody: Spark makes several, in several processes.
2. What the topic's schema says is asked once, when the query is defined, and travels with the
   pickled object: all tasks decode alike.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from magnetar.errors import InvalidSetting
from magnetar.spark.options import Options, Use, parse
from magnetar.spark.plain_errors import told_plainly


class MagnetarSource(DataSource):
    """A source and a sink."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # Asked for once and pickled with the source (invariant 2).
        self._shape: Any = None

    @classmethod
    def name(cls) -> str:
        return "magnetar"

    @told_plainly()
    def schema(self) -> StructType:
        """Not called if the user names the columns."""
        # Imports are inside the methods: Spark imports this module in every process that looks for
        # data sources, and few of those read or write (invariant 1).
        from magnetar.spark.source.columns import spark_schema
        from magnetar.spark.source.topic_schemas import shape_for

        options = self._parsed(Use.READ)
        self._shape = shape_for(options, None)
        return spark_schema(self._shape, options)

    @told_plainly()
    def reader(self, schema: StructType) -> DataSourceReader:
        from magnetar.spark.source.readers import batch_reader

        options = self._parsed(Use.BATCH)
        return batch_reader(options, schema, self._shape_for(options, schema))

    @told_plainly()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from magnetar.spark.source.readers import StreamReader

        options = self._parsed(Use.STREAM)
        return StreamReader(options, schema, self._shape_for(options, schema))

    @told_plainly()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from magnetar.spark.sink.writers import batch_writer

        return batch_writer(self._parsed(Use.WRITE), schema, overwrite)

    @told_plainly()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from magnetar.spark.sink.writers import stream_writer

        return stream_writer(self._parsed(Use.WRITE), schema, overwrite)

    def _parsed(self, use: Use) -> Options:
        options = parse(dict(self.options), use)
        # `load("...")` and `save("...")` hand the text over as a path.
        if "path" in options.spark:
            raise InvalidSetting(
                "a topic is no path", hint='use .option("topic", "...") and .load() without one'
            )
        return options

    def _shape_for(self, options: Options, schema: StructType) -> Any:
        # The user named the columns, so `schema` was never called.
        if self._shape is None:
            from magnetar.spark.source.topic_schemas import shape_for

            self._shape = shape_for(options, schema)
        return self._shape
