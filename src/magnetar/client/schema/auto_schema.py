"""Pure: values of topics whose schema the application does not know.

Owns: `AutoSchema`, for consumers: each message is read with the schema that it was written with.

Invariants:
1. Records of JSON and Avro come as dicts, protobuf messages as messages of a class made for them,
   single values as what they are, and bytes where there is no schema.
2. What it cannot read raises `UnreadableMessage`; it never guesses.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from magnetar.client.schema import primitives
from magnetar.client.schema.avro_schema import AvroPayloads
from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.client.schema.protobuf_schema import message_class, parsed
from magnetar.errors import InvalidValue, UnreadableMessage

# Topics that change their schema all the time must not fill the memory.
_READERS_MAX: Final = 256

_SINGLE: Final[dict[SchemaType, Any]] = {
    SchemaType.BYTES: primitives.BYTES,
    SchemaType.STRING: primitives.STRING,
    SchemaType.BOOL: primitives.BOOL,
    SchemaType.INT8: primitives.INT8,
    SchemaType.INT16: primitives.INT16,
    SchemaType.INT32: primitives.INT32,
    SchemaType.INT64: primitives.INT64,
    SchemaType.FLOAT: primitives.FLOAT32,
    SchemaType.DOUBLE: primitives.FLOAT64,
}


class AutoSchema:
    """Whatever a topic holds: for consumers only."""

    info: Final = SchemaInfo(SchemaType.AUTO_CONSUME, name="AutoConsume")
    needs_writer: Final = True

    def __init__(self) -> None:
        self._readers: dict[tuple[SchemaType, bytes], Any] = {}

    def encode(self, value: object) -> bytes:
        raise InvalidValue("this schema only reads", hint="give the producer a schema of its own")

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> Any:
        # No schema, a single value, or a record. What has a type that is none of these (key and
        # value, times) is refused rather than guessed at (invariant 2).
        if writer is None:
            return data
        single = _SINGLE.get(writer.type)
        if single is not None:
            return single.decode(data)
        if writer.type is SchemaType.JSON:
            try:
                return msgspec.json.decode(data)
            except ValueError as error:
                raise UnreadableMessage(f"a payload is not JSON: {error}") from error
        if writer.type is SchemaType.AVRO:
            return self._reader(writer).read(data, None)
        if writer.type is SchemaType.PROTOBUF_NATIVE:
            return parsed(self._reader(writer), data)
        raise UnreadableMessage(f"a message has a schema of type {writer.type.name}")

    def _reader(self, writer: SchemaInfo) -> Any:
        # By its definition: versions of several topics may be the same.
        place = (writer.type, writer.data)
        known = self._readers.get(place)
        if known is None:
            if len(self._readers) >= _READERS_MAX:
                self._readers.clear()
            is_avro = writer.type is SchemaType.AVRO
            known = _avro(writer.data) if is_avro else message_class(writer.data)
            self._readers[place] = known
        return known


def _avro(data: bytes) -> AvroPayloads:
    try:
        return AvroPayloads(msgspec.json.decode(data, type=dict[str, Any]))
    except ValueError as error:
        raise UnreadableMessage(f"the schema of a message cannot be used: {error}") from error
