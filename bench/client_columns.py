"""How fast columns are made of entries, and entries of columns: rows per second of processor time.

    python -m bench.client_columns

No server and no connection: what one core can do, beside the same work message by message (with
protobuf objects, as receiving and sending single messages does it). Rows have values of 100 B, in
the second kind one of a thousand keys, and in the third a key that is hardly repeated, an event
time and two properties.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa

from bench.report import Row, publish
from magnetar.client.arrow.arrow import RawEntry, entries_batch, entries_schema
from magnetar.client.arrow.outgoing_rows import OutgoingRows
from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    filled_entry,
    messages_in,
    open_entry,
    shared_metadata,
)
from magnetar.client.message.routing import Router
from magnetar.model.segments import SegmentLayout
from magnetar.wire.compression import Compression

ROWS: Final = 20_000
BATCH_MESSAGES: Final = 1000
BATCH_BYTES: Final = 128 * 1024
TIMES: Final = 7
FIRST: Final = 1_000_000
MOMENT_MS: Final = 1_700_000_000_000
STAMP: Final = Stamp("bench", MOMENT_MS)
KEYS: Final = 1000
KINDS: Final = {
    "values": ("value",),
    "key": ("value", "key"),
    "key, time, two properties": ("value", "key", "event_time", "properties"),
}


def message(number: int, names: Sequence[str]) -> Outgoing:
    made = Outgoing(payload=bytes(100), sequence_id=FIRST + number)
    if "key" in names:
        made.key = f"key-{number % KEYS}"
    if "properties" in names:
        made.key = f"key-{number * 7919 % 5000}"
        made.event_time_ms = MOMENT_MS + number
        made.properties = {"kind": "order", "trace": f"{number:016x}"}
    return made


def seconds(work: Callable[[], object]) -> float:
    """Processor time, the least of some tries."""
    best = float("inf")
    for _ in range(TIMES):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def encoded(batch: Any, router: Router) -> int:
    """Make entries of a record batch, as a producer does; how many bytes they have."""
    rows = OutgoingRows.of(batch)
    assert rows is not None
    placed, places = rows.placed(router)
    size = at = 0
    for place in places:
        while at < place.end:
            count = placed.fitting(
                at, place.end, messages_max=BATCH_MESSAGES, bytes_max=BATCH_BYTES
            )
            part, first = placed.slice(at, count), FIRST + at
            shared = Outgoing(payload=b"", sequence_id=first, key=part.only_key)
            entry = filled_entry(
                shared_metadata(shared, STAMP),
                part.payload(first),
                Compression.NONE,
                num_messages=count,
                sequence_ids=(first, first + count - 1),
                places=part.hash_span,
                txn=None,
            )
            size += len(entry.headers_and_payload)
            at += count
    return size


def taken_apart(entry: bytes) -> list[tuple[Any, ...]]:
    """What an application gets that takes messages."""
    return [
        (
            payload,
            said.partition_key,
            said.event_time,
            {each.key: each.value for each in said.properties},
        )
        for said, payload in messages_in(open_entry(entry))
    ]


def all_taken_apart(entries: Sequence[bytes]) -> list[Any]:
    return [taken_apart(each) for each in entries]


def all_entries(parts: Sequence[Sequence[Outgoing]]) -> list[Any]:
    return [batch_entry(each, STAMP, hashes=True) for each in parts]


def row(name: str, columns: Callable[[], object], objects: Callable[[], object]) -> Row:
    ours = seconds(columns)
    return Row(
        measure=f"columns of 100 B, {name}",
        value=ROWS / ours,
        unit="1/s",
        anchor="message by message",
        ratio=seconds(objects) / ours,
        samples=TIMES,
    )


def measured() -> list[Row]:
    found: list[Row] = []
    router = Router(SegmentLayout.create(1, now_ms=1))
    for kind, names in KINDS.items():
        messages = [message(number, names) for number in range(ROWS)]
        parts = [messages[at : at + BATCH_MESSAGES] for at in range(0, ROWS, BATCH_MESSAGES)]
        entries = [batch_entry(part, STAMP, hashes=True).headers_and_payload for part in parts]
        raw = [RawEntry(1, number, entry) for number, entry in enumerate(entries)]
        schema = entries_schema((*names, "entry_id", "batch_index"))
        batch = entries_batch(raw, entries_schema(names))
        if "key" in names:  # as text, as applications have it
            texts = batch.column("key").cast(pa.string())
            batch = batch.set_column(batch.schema.get_field_index("key"), "key", texts)
        found.append(
            row(
                f"{kind}: decode",
                partial(entries_batch, raw, schema),
                partial(all_taken_apart, entries),
            )
        )
        found.append(
            row(
                f"{kind}: encode",
                partial(encoded, batch, router),
                partial(all_entries, parts),
            )
        )
    return found


if __name__ == "__main__":
    publish("client-columns", measured())
