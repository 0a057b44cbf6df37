"""The producers of this process, by topic, and how a batch of rows goes out.

Owns: `TaskProducers`, the producers of one task's client, which outlive the task: opening one costs
several round trips. `send`, for rows as columns or one by one.

Invariants:
1. At most `PRODUCERS_MAX` producers are open; the one not used for the longest is closed first.
2. After a failure a producer is closed and forgotten: the next task begins with a new one.
3. Rows of one topic are handed in, in their order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

import pyarrow as pa

from magnetar.blocking import Client, Producer, Transaction
from magnetar.client.schema import BYTES
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import MagnetarError
from magnetar.runtime.logs import logger
from magnetar.spark.options import Options
from magnetar.spark.sink.value_encoding import RowSchema
from magnetar.wire.compression import Compression

# A sink that routes by a column may meet any number of topics, and each producer holds buffers.
PRODUCERS_MAX: Final = 256

_LOG: Final = logger(__name__)
_OPTIONS: Final = (
    *("sendTimeoutMs", "maxPendingMessages", "batchingEnabled", "batchingMaxMessages"),
    *("batchingMaxBytes", "compression", "chunking"),
)
# Producers that no task has; the oldest use is in front.
_OPEN: Final[OrderedDict[tuple[Any, ...], Producer[bytes]]] = OrderedDict()
_TURN: Final = threading.Lock()


class TaskProducers:
    """The producers that one task uses."""

    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._options = options
        self._settings = tuple(options[name] for name in _OPTIONS)
        self._used: dict[tuple[Any, ...], Producer[bytes]] = {}

    def producer(self, topic: str, info: SchemaInfo | None) -> Producer[bytes]:
        """The producer of a topic, with the schema that its payloads are made by."""
        # Part of the key: the topic's schema may have changed since the last task.
        schema = (SchemaType.BYTES, b"") if info is None else (info.type, info.data)
        key = (self._client, topic, schema, self._settings)
        used = self._used.get(key)
        if used is not None:
            return used
        with _TURN:
            # Taken out while it is used: two tasks in one process never share a producer, or the
            # failure of one would close that of the other (invariant 2).
            found = _OPEN.pop(key, None)
        if found is None:
            found = self._made(topic, info)
        self._used[key] = found
        return found

    def give_back(self) -> None:
        """The task is done: its producers wait for the next one."""
        with _TURN:
            # At the end of the order, as the latest used; closing waits for the network, so outside
            # the lock.
            _OPEN.update(self._used)
            old = [_OPEN.popitem(last=False)[1] for _ in range(len(_OPEN) - PRODUCERS_MAX)]
        self._used.clear()
        _close(old)

    def drop(self) -> None:
        """The task failed."""
        old = [*self._used.values()]
        self._used.clear()
        _close(old)

    def _made(self, topic: str, info: SchemaInfo | None) -> Producer[bytes]:
        options = self._options
        return self._client.producer(
            topic,
            schema=BYTES if info is None else RowSchema(info),
            send_timeout=options["sendTimeoutMs"] / 1000,
            max_pending=options["maxPendingMessages"],
            batching=options["batchingEnabled"],
            batch_messages=options["batchingMaxMessages"],
            batch_bytes=options["batchingMaxBytes"],
            compression=Compression[options["compression"].upper()],
            chunking=options["chunking"],
        )


def close_all() -> None:
    """Close the producers that no task uses."""
    with _TURN:
        old = [*_OPEN.values()]
        _OPEN.clear()
    _close(old)


def send(
    producer: Producer[bytes], rows: pa.RecordBatch, txn: Transaction | None, *, by_row: bool
) -> None:
    """Hand the rows of a batch in, and wait until they are stored."""
    # Columns go out batch by batch, without an object for each message. Ordering keys and delayed
    # delivery have no columns in the client.
    if not by_row:
        producer.send_arrow(rows, txn=txn)
        return
    for row in rows.to_pylist(maps_as_pydicts="lossy"):
        value, ordering_key = row["value"], row.get("ordering_key")
        producer.submit(
            value.encode() if isinstance(value, str) else value,
            key=row.get("key"),
            ordering_key=ordering_key.encode() if isinstance(ordering_key, str) else ordering_key,
            properties=row.get("properties") or {},
            event_time=row.get("event_time"),
            deliver_at=row.get("deliver_at"),
            txn=txn,
        )
    # Returns when all are stored, as `send_arrow` does.
    producer.flush()


def _close(producers: list[Producer[bytes]]) -> None:
    for each in producers:
        try:
            each.close()
        except MagnetarError as error:
            _LOG.info("producer-not-closed", topic=each.topic, reason=str(error))
