"""The shape of a query's values, asked of the registry when the query is defined.

Owns: `shape_for`.

Invariants:
1. The registry is asked only where the answer matters.
2. Several topics in one query have the same columns, or the query is refused.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import StructType

from magnetar.client.client import Client, connections_of
from magnetar.client.schema.info import SchemaInfo
from magnetar.errors import InvalidSetting
from magnetar.spark.links import client_for, patiently
from magnetar.spark.options import Options
from magnetar.spark.source.batch_plan import check_bounds
from magnetar.spark.source.columns import Shape, shape_of, shape_of_columns
from magnetar.spark.source.watched_topics import Watched

_MS_PER_SECOND: Final = 1000


def shape_for(options: Options, asked: StructType | None) -> Shape:
    """The shape from the options, the registry and the columns that the user named, if any."""
    check_bounds(options)
    wanted = options["valueFormat"]
    # Invariant 1: columns that the user named, or a payload as it is, need no registry, and a query
    # can be defined while no broker runs.
    if asked is not None and wanted != "avro":
        return shape_of_columns(asked, options, None)
    if wanted in ("bytes", "string"):
        return shape_of(wanted, None, "")
    infos = patiently(
        client_for(options),
        "the schema",
        lambda client: _infos(client, options),
        options["operationTimeoutMs"] / _MS_PER_SECOND,
    )
    # A pattern that matches nothing yet.
    if not infos:
        return shape_of("bytes" if wanted == "auto" else wanted, None, "no topic")
    if asked is not None:
        return shape_of_columns(asked, options, next(iter(infos.values())))
    shapes = {topic: shape_of(wanted, info, topic) for topic, info in infos.items()}
    (first, shape), *others = shapes.items()
    # Compared by columns, not by definition: names and defaults of schemas may differ (invariant
    # 2).
    for topic, other in others:
        if (other.format, other.fields) != (shape.format, shape.fields):
            raise InvalidSetting(
                f"{first} and {topic} have different schemas",
                hint='set valueFormat to "bytes", or read them in two queries',
            )
    return shape


async def _infos(client: Client, options: Options) -> dict[str, SchemaInfo | None]:
    watched = Watched(client, options)
    found: dict[str, SchemaInfo | None] = {}
    for topic in await watched.names():
        await watched.ranges(topic)  # raises if there is no such topic
        schema = await connections_of(client).schema(topic)
        found[topic] = None if schema is None else SchemaInfo.from_wire(schema)
    return found
