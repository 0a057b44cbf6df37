"""The columns of a data frame as parts of a message, and rows as the client sends them.

Owns: `SinkColumns`, made from the names and types of a data frame: `outgoing` turns a record batch
of Spark into the one that `Producer.send_arrow` takes; `by_topic` cuts it into topics.

Columns have plain names (`key`) or, as pulsar-spark has them, two underscores (`__key`). Where both
are there, the one with underscores is the part of the message and the other a field of the value.

Invariants:
1. Every column is used, is one that the source adds about a message, or is refused by name before
   anything is written.
2. Rows keep their order.
3. A NULL collection is an empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from magnetar.errors import InvalidSetting

_TEXT: Final = ("string", "binary")
_TIME: Final = ("timestamp", "bigint")
_PAIRS: Final = ("map<string,string>",)
_PAIR_LIST: Final = "array<struct<"
_UNDERSCORES: Final = "__"

_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "key": _TEXT,
    "properties": _PAIRS,
    "eventTime": _TIME,
    "orderingKey": _TEXT,
    "deliverAt": _TIME,
}
"""The parts of a message beside its value, and the types of Spark that they may have."""

_ALSO: Final = {"__messageProperties": "properties"}
_SENT_AS: Final = {
    "key": "key",
    "properties": "properties",
    "eventTime": "event_time",
    "orderingKey": "ordering_key",
    "deliverAt": "deliver_at",
}
"""The names that the client has for them."""

_ABOUT: Final = frozenset(
    {
        *("segment", "messageId", "offset", "publishTime", "producerName", "sequenceId"),
        *("schemaVersion", "keyBytes", "partition"),
        *("__messageId", "__publishTime"),
    }
)
"""What the source tells about a message, and a copy of it does not have."""

_STRINGS: Final = pa.map_(pa.string(), pa.string())
_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")


class Routed(NamedTuple):
    """The rows of a batch that go to one topic."""

    topic: str | None
    """None: the row has none."""
    rows: pa.RecordBatch


@dataclass(frozen=True)
class SinkColumns:
    """The columns of one write."""

    parts: Mapping[str, str]
    """By part of a message, the column it comes from; `topic` is left out if an option names it."""
    value: str | None
    """The column of the payload; None: it is made of `fields`."""
    fields: tuple[str, ...]
    about: tuple[str, ...]
    """Columns of the source that a value has only if its schema asks for them."""

    @classmethod
    def of(cls, types: Mapping[str, str], *, topic: str | None) -> SinkColumns:
        """Sort the columns of a data frame into parts; types are as Spark writes them."""
        parts = _parts(types)
        value = _value_column(types)
        for part, column in parts.items():
            _check_type(part, column, types[column])
        # Invariant 1: each column that is left is one that the source adds, or a field of the
        # value. Three frames are refused: fields beside a payload, no value at all, and no topic.
        left = [name for name in types if name != value and name not in parts.values()]
        about = tuple(name for name in left if name in _ABOUT)
        fields = tuple(name for name in left if name not in _ABOUT)
        if value is not None and fields:
            raise InvalidSetting(
                f"the column {fields[0]!r} is no part of a message that has a `value`",
                hint=f"select {', '.join(['value', *_TYPES])}; or leave `value` out, and all other "
                "columns become the fields of the value",
            )
        if value is None and not fields:
            raise InvalidSetting(
                "there is no column for the value of a message",
                hint="name one `value` (text or binary), or give the columns of its fields",
            )
        if topic is None and "topic" not in parts:
            raise InvalidSetting(
                "nothing says which topic to write to",
                hint='add .option("topic", "topic://public/default/output"), or a column `topic`',
            )
        # The option wins over a column: a frame that was read from one topic can be written to
        # another.
        used = {part: column for part, column in parts.items() if part != "topic" or topic is None}
        return cls(used, value, fields, about)

    def by_topic(self, batch: pa.RecordBatch, topic: str | None) -> Iterator[Routed]:
        """The rows of each topic, in the order of the batch."""
        if topic is not None:
            yield Routed(topic, batch)
            return
        names = batch.column(self.parts["topic"])
        # In the order of first appearance; `filter` keeps the order of rows (invariant 2).
        found = pc.unique(names).to_pylist()
        for name in found:
            if len(found) == 1:
                yield Routed(name, batch)
            else:
                # NULL equals nothing, not even NULL: rows without a topic need a question of their
                # own.
                chosen = pc.is_null(names) if name is None else pc.equal(names, name)
                yield Routed(name, batch.filter(chosen))

    def outgoing(self, batch: pa.RecordBatch, values: pa.Array) -> pa.RecordBatch:
        """What the client sends: these payloads, and the other parts of each message."""
        columns = {"value": values}
        for part, name in _SENT_AS.items():
            if part in self.parts:
                columns[name] = _sent(part, batch.column(self.parts[part]))
        return pa.RecordBatch.from_pydict(columns)

    @cached_property
    def needs_rows(self) -> bool:
        """Whether rows have to be sent one by one: some parts are not sent as columns."""
        return not {"orderingKey", "deliverAt"}.isdisjoint(self.parts)


def _parts(types: Mapping[str, str]) -> dict[str, str]:
    # Later ones win: the name with underscores over the plain one, and pulsar-spark's own over
    # both.
    parts = {part: part for part in _TYPES if part in types}
    parts |= {part: _UNDERSCORES + part for part in _TYPES if _UNDERSCORES + part in types}
    return parts | {part: column for column, part in _ALSO.items() if column in types}


def _value_column(types: Mapping[str, str]) -> str | None:
    """A column `value` that is neither text nor bytes is a field like others."""
    # A struct called `value` is a field whose encoding the topic's schema decides.
    for name in ("__value", "value"):
        if types.get(name) in _TEXT:
            return name
    return None


def _check_type(part: str, column: str, found: str) -> None:
    # Spark's map has one spelling as text; a list of pairs, as headers of Kafka come, has many.
    fits = found in _TYPES[part]
    if part == "properties" and found.startswith(_PAIR_LIST):
        fits = _is_pair_list(found)
    if not fits:
        wanted = " or ".join(_TYPES[part])
        also = " or array<struct<key:string,value:string>>" if part == "properties" else ""
        raise InvalidSetting(
            f"the column {column!r} is {found}", hint=f"the {part} of a message is {wanted}{also}"
        )


def _is_pair_list(found: str) -> bool:
    inner = found.removeprefix(_PAIR_LIST).removesuffix(">>").split(",")
    return len(inner) == 2 and all(each.rpartition(":")[2] in _TEXT for each in inner)


def _sent(part: str, column: pa.Array) -> pa.Array:
    if part == "properties":
        return _pairs(column)
    # Whole numbers are milliseconds already, as Pulsar has them.
    if part in ("eventTime", "deliverAt"):
        if not pa.types.is_integer(column.type):
            # Microseconds are cut off: a message has none.
            column = column.cast(_MILLISECONDS, safe=False)
        return column.cast(pa.int64())
    return column


def _pairs(column: Any) -> pa.Array:
    """Properties as a map without nulls (invariant 3)."""
    # A map and a list of pairs have the same layout in Arrow: one way for both.
    if pa.types.is_map(column.type):
        pair = pa.struct([column.type.key_field, column.type.item_field])
        column = column.cast(pa.list_(pair))
    # Offsets are made anew: those of the column may begin in the middle of a larger batch, and have
    # gaps where a list is NULL.
    lengths = pc.fill_null(pc.list_value_length(column), 0)
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    pairs = column.flatten()  # of this slice, and without what stands under a null
    names = pairs.field(0).cast(pa.string())
    texts = pc.fill_null(pairs.field(1).cast(pa.string()), "")
    return pa.MapArray.from_arrays(offsets, names, texts).cast(_STRINGS)
