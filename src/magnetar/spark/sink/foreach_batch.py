"""Exactly once from `foreachBatch`: for Update mode, and for several sinks of one query.

Owns: `foreach_batch_writer`.

Invariants:
1. A micro-batch that Spark runs again writes nothing again.
2. A query whose checkpoint was lost is refused, not taken for the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from magnetar.errors import InvalidSetting

_QUERY: Final = "sql.streaming.queryId"


def foreach_batch_writer(
    *,
    name: str = "",
    transactional_id: str | None = None,
    query_id: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    format_name: str = "magnetar",
    **options: object,
) -> Callable[[Any, int], None]:
    """A function for `foreachBatch` that writes each micro-batch to a topic, exactly once.

        writer = foreach_batch_writer(
            serviceUrl="pulsar://localhost:6650", topic="topic://public/default/totals"
        )
        totals.writeStream.outputMode("update").foreachBatch(writer).start()

    `options` are those of the sink. `transform` turns the data frame of a batch into the columns
    of a message. A query that has several such writers calls each by a `name` of its own. With
    Spark Connect, which tells nobody the id of a query, `query_id` has to be given: any text that
    is the same for as long as the checkpoint is.
    """

    def write(frame: Any, batch_id: int) -> None:
        # Asked for with every batch, not when the writer is made: the query does not exist yet
        # then.
        query = query_id or _query_of(frame)
        # Without a name of its own the query's id is it: a new checkpoint then is a new writer, and
        # nothing of the old one is skipped.
        application = transactional_id or query
        written = frame if transform is None else transform(frame)
        writer = written.write.format(format_name).mode("append")
        for key, value in options.items():
            writer = writer.option(key, value)
        # The batch number makes a repeated batch one that was seen (invariant 1); the query as
        # generation refuses one whose numbers began again (invariant 2).
        writer = writer.option("txnAppId", f"{application}/{name}" if name else application)
        writer.option("txnVersion", batch_id).option("txnGeneration", query).save()

    return write


def _query_of(frame: Any) -> str:
    # Spark Connect has no context; in `foreachBatch` the JVM has set the property for this thread.
    context = getattr(frame.sparkSession, "sparkContext", None)
    found = None if context is None else context.getLocalProperty(_QUERY)
    if found is None:
        raise InvalidSetting(
            "Spark does not say which query this is",
            hint="call it from foreachBatch; with Spark Connect, give query_id",
        )
    return str(found)
