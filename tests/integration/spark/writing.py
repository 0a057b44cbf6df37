"""Writers called by hand, without Spark, on a server in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from magnetar.blocking import Client
from magnetar.spark import links
from magnetar.spark.option_table import Use
from magnetar.spark.options import parse
from magnetar.spark.sink import producers
from magnetar.spark.sink.group_commit import WriteId
from magnetar.spark.sink.writers import SinkWriter, stream_writer
from tests.integration.client.service import service
from tests.integration.spark.reading import messages

TOPIC = "topic://public/default/output"
KEYED = StructType([StructField("key", StringType()), StructField("value", StringType())])


class Writing:
    """A server, and writers of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client(url)

    def sink(self, schema: StructType = KEYED, **options: str) -> SinkWriter:
        given = {"serviceUrl": self.url, "topic": TOPIC} | options
        given = {name: text for name, text in given.items() if text}
        return stream_writer(parse(given, Use.WRITE), schema, False)._sink

    def found(self, count: int, topic: str = TOPIC) -> list[Any]:
        return messages(self.client, topic, count)


@contextmanager
def writing_to(folder: Path) -> Iterator[Writing]:
    with service(folder) as url:
        writing = Writing(url)
        try:
            yield writing
        finally:
            producers.close_all()
            links.close_all()
            writing.client.close()


def write_id(batch: int, run: str = "run-1", query: str = "query-1", app: str = "") -> WriteId:
    return WriteId(app or query, query, run, batch)


def rows(numbers: Sequence[int], keys: int = 4) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"key": [str(n % keys) for n in numbers], "value": [str(n) for n in numbers]}
    )


def tasks(sink: SinkWriter, write: WriteId, *parts: Sequence[int]) -> list[Any]:
    """Each part is what one task writes."""
    return [sink.write(iter([rows(part)] if part else []), write) for part in parts]
