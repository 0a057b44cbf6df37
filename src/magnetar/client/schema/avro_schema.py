"""Pure: records as Avro, read with the schema that they were written with.

Owns: `AvroSchema`, and `AvroPayloads`, one definition and its bytes, which `auto` uses too.

Invariants:
1. `decode(encode(x)) == x` for values of the class.
2. A payload is read with its writer's schema, whatever that calls its records. The reader's class
   then takes fields by their names; those that are missing get its defaults.

Relies on: fastavro, which is there with `magnetar[avro]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from io import BytesIO
from typing import Any, Final, Generic, TypeVar

import msgspec

from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.client.schema.record_types import RecordType
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage

T = TypeVar("T")

_VERSIONS_MAX: Final = 256
"""Writers' schemas that are kept parsed."""


class AvroPayloads:
    """Plain values and bytes of one Avro definition."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        try:
            # Imported here: only who uses Avro needs the extra.
            self._avro: Any = import_module("fastavro")
        except ImportError as error:
            raise InvalidSetting(
                "Avro needs fastavro, which is not installed", hint="install magnetar[avro]"
            ) from error
        self._writers: dict[bytes, Any] = {}
        try:
            self._parsed = self._avro.parse_schema(dict(definition))
        except (ValueError, TypeError, KeyError, self._avro.schema.SchemaParseException) as error:
            raise InvalidSetting(f"the Avro definition cannot be used: {error}") from error

    def write(self, plain: object) -> bytes:
        out = BytesIO()
        try:
            # Strict: a field too many is a mistake of the application, not something to drop.
            self._avro.schemaless_writer(out, self._parsed, plain, strict=True)
        except Exception as error:  # fastavro raises whatever the value does
            raise InvalidValue(f"a value does not fit its Avro definition: {error}") from error
        return out.getvalue()

    def read(self, data: bytes, writer: SchemaInfo | None) -> Any:
        # Without a writer's schema (it is gone from the registry, or the message has none) its own
        # is tried.
        written = self._parsed
        if writer is not None and writer.type is SchemaType.AVRO:
            written = self._parsed_writer(writer.data)
        source = BytesIO(data)
        try:
            # No reader's schema: fastavro would compare the names of records, and those are the
            # application's to choose (invariant 2).
            value = self._avro.schemaless_reader(source, written, None)
        except Exception as error:  # nor does it say what a broken payload raises
            raise UnreadableMessage(f"a payload cannot be read as Avro: {error}") from error
        return value

    def _parsed_writer(self, data: bytes) -> Any:
        known = self._writers.get(data)
        if known is None:
            if len(self._writers) >= _VERSIONS_MAX:
                self._writers.clear()
            known = self._writers[data] = parsed_definition(data)
        return known


class AvroSchema(Generic[T]):
    """Values of a dataclass, msgspec Struct, pydantic model or TypedDict as Avro.

    producer = await client.producer("topic://public/default/orders", schema=AvroSchema(Order))
    """

    needs_writer: Final = True

    def __init__(self, of: type[T]) -> None:
        self._type = RecordType(of)
        self._payloads = AvroPayloads(self._type.definition)
        data = msgspec.json.encode(self._type.definition)
        self.info = SchemaInfo(SchemaType.AVRO, data, of.__name__)

    def encode(self, value: T) -> bytes:
        return self._payloads.write(self._type.to_plain(value))

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> T:
        return self._type.from_plain(self._payloads.read(data, writer))


def parsed_definition(data: bytes) -> Any:
    """The Avro definition that the registry has."""
    try:
        avro: Any = import_module("fastavro")
        return avro.parse_schema(msgspec.json.decode(data))
    except ImportError as error:
        raise InvalidSetting(
            "Avro needs fastavro, which is not installed", hint="install magnetar[avro]"
        ) from error
    except Exception as error:  # it is from the registry, and may be anything
        raise UnreadableMessage(f"the schema of a message cannot be used: {error}") from error
