"""The rows of one task on their way to topics.

Owns: `RowWriter`: which rows go where, how their payloads are made, and what becomes of rows that
cannot be written.

The rows of one record batch travel while Spark makes the next: at most one batch is under way.

Invariants:
1. A row that cannot be written goes to the dead letter topic, in the transaction of the others, or
   fails the task. No row is left out.
2. Rows of one topic and key are sent in the order in which they came.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from magnetar.blocking import Client, Transaction
from magnetar.client.consume.core.dead_letter import REAL_TOPIC
from magnetar.client.schema.info import SchemaInfo
from magnetar.errors import InvalidTopicName, InvalidValue
from magnetar.model.names import TopicName
from magnetar.spark.options import Options
from magnetar.spark.sink.columns import SinkColumns
from magnetar.spark.sink.producers import TaskProducers, send
from magnetar.spark.sink.value_encoding import ValueEncoder, encoder_for

REASON: Final = "magnetar-dead-letter-reason"
"""A property of dead letters: why the row could not be written."""

_NO_TOPIC: Final = "the row has no topic"


class RowWriter:
    """Sends the rows of one task."""

    def __init__(self, client: Client, options: Options, columns: SinkColumns) -> None:
        self._client = client
        self._options = options
        self._columns = columns
        # What a topic needs is found out once for each task: its producer, its encoder, and whether
        # its name can be one.
        self._outlets = TaskProducers(client, options)
        self._encoders: dict[str, ValueEncoder] = {}
        self._names: dict[str, str | None] = {}
        # One thread keeps the order (invariant 2), and sends while Spark makes the next batch.
        self._sender = ThreadPoolExecutor(1, "magnetar sink")
        self._sending: Future[None] | None = None
        self.rows = 0
        self.bytes = 0

    def write(self, batch: pa.RecordBatch, txn: Transaction | None) -> None:
        """Hand rows in; raises what became of those before."""
        # The batch before must be stored first: at most one is under way.
        self.settle()
        self._sending = self._sender.submit(self._write, batch, txn)

    def settle(self) -> None:
        """Returns when all rows are stored, or raises why they are not."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _write(self, batch: pa.RecordBatch, txn: Transaction | None) -> None:
        for topic, rows in self._columns.by_topic(batch, self._options["topic"]):
            reason = self._wrong_name(topic)
            # NULL, or no name that a topic can have: none of these rows can be sent (invariant 1).
            if topic is None or reason is not None:
                faults = dict.fromkeys(range(rows.num_rows), reason or _NO_TOPIC)
                self._put_aside(topic, rows, faults, txn)
            else:
                self._write_to(topic, rows, txn)
        self.rows += batch.num_rows

    def done(self) -> None:
        """All rows are stored."""
        self._sender.shutdown()
        self._outlets.give_back()

    def failed(self) -> None:
        """The task is given up; what is under way has ended, since its transaction has."""
        self._sender.shutdown()
        self._outlets.drop()

    def _write_to(self, topic: str, rows: pa.RecordBatch, txn: Transaction | None) -> None:
        # A payload that the query made itself is sent as it is, without a schema; fields are
        # encoded by the topic's.
        info: SchemaInfo | None = None
        if self._columns.value is not None:
            values = rows.column(self._columns.value).cast(pa.binary())
        else:
            encoder = self._encoder(topic, rows.schema)
            encoded, faults = encoder.encode(rows)
            info = encoder.info
            # The dead letters go first, in the same transaction; the others keep their order.
            if faults:
                self._put_aside(topic, rows, faults, txn)
                kept = pa.array([n for n in range(rows.num_rows) if n not in faults], pa.int64())
                rows = rows.take(kept)
                encoded = [encoded[number] for number in kept.to_pylist()]
            values = pa.array(encoded, pa.binary())
        if rows.num_rows:
            outgoing = self._columns.outgoing(rows, values)
            by_row = self._columns.needs_rows
            send(self._outlets.producer(topic, info), outgoing, txn, by_row=by_row)
        # The sum over no rows is NULL.
        self.bytes += pc.sum(pc.binary_length(values)).as_py() or 0

    def _encoder(self, topic: str, schema: pa.Schema) -> ValueEncoder:
        known = self._encoders.get(topic)
        if known is None:
            info = self._client.topic_schema(topic)
            value_format = self._options["valueFormat"]
            known = encoder_for(topic, info, value_format, self._columns, schema)
            self._encoders[topic] = known
        return known

    def _wrong_name(self, topic: str | None) -> str | None:
        """Why rows cannot be sent to a topic of that name."""
        if topic is None:
            return None
        if topic not in self._names:
            try:
                TopicName.parse(topic)
                self._names[topic] = None
            except InvalidTopicName as error:
                self._names[topic] = str(error)
        return self._names[topic]

    # --- what cannot be written

    def _put_aside(
        self,
        topic: str | None,
        rows: pa.RecordBatch,
        faults: dict[int, str],
        txn: Transaction | None,
    ) -> None:
        # Without such a topic the task fails, and shows one of the rows: enough to find the
        # mistake.
        to = self._options["deadLetterTopic"]
        if to is None:
            number, reason = next(iter(faults.items()))
            row = rows.slice(number, 1).to_pylist()[0]
            raise InvalidValue(
                f"{len(faults)} of {rows.num_rows} rows cannot be written to {topic}: {reason}; "
                f"one of them: {str(row)[:200]}",
                hint="mend the query, or set the option deadLetterTopic",
            )
        producer = self._outlets.producer(to, None)
        key = self._columns.parts.get("key")
        for number, reason in faults.items():
            row = rows.slice(number, 1).to_pylist(maps_as_pydicts="lossy")[0]
            producer.submit(
                self._letter(row),
                key=None if key is None else row[key],
                # As dead letters of consumers have it, so that one tool can read both.
                properties={REAL_TOPIC: topic or "", REASON: reason},
                txn=txn,
            )
        producer.flush()

    def _letter(self, row: dict[str, Any]) -> bytes | None:
        """The payload if there is one, else the fields as JSON."""
        if self._columns.value is None:
            fields = {name: row[name] for name in self._columns.fields}
            return msgspec.json.encode(fields, enc_hook=str)
        value = row[self._columns.value]
        return value.encode() if isinstance(value, str) else value
