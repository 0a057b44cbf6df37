"""Pure: schemas as brokers store them, and the contract of those that applications use.

Owns: `SchemaType`, `SchemaInfo` and the `Schema` protocol.

Invariants:
1. `SchemaInfo.from_wire(info.to_wire()) == info`.
2. A schema that `needs_writer` is only ever asked to decode with the info of the version that the
   message was written with, if the registry still has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from magnetar.wire.pb import pulsar_pb2 as pb

T = TypeVar("T")


class SchemaType(IntEnum):
    """The numbers are those of the protocol."""

    BYTES = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOL = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21
    EXTERNAL = 22


@dataclass(frozen=True, slots=True)
class SchemaInfo:
    """A schema as the registry has it."""

    type: SchemaType
    data: bytes = b""
    """Its definition, in the form of its type."""
    name: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)

    def to_wire(self) -> pb.Schema | None:
        """The schema for PRODUCER and SUBSCRIBE; None: there is nothing to register."""
        # As the Java client does: a topic of bytes stays one without a schema.
        if self.type is SchemaType.BYTES:
            return None
        made = pb.Schema(name=self.name, schema_data=self.data, type=pb.Schema.Type.Name(self.type))
        for key, value in self.properties.items():
            made.properties.add(key=key, value=value)
        return made

    @classmethod
    def from_wire(cls, schema: pb.Schema | None) -> SchemaInfo:
        if schema is None:
            return cls(SchemaType.BYTES)
        pairs: Any = schema.properties
        properties = {each.key: each.value for each in pairs}
        return cls(SchemaType(schema.type), schema.schema_data, schema.name, properties)


class Schema(Protocol[T]):
    """The way of an application's values into payloads, and back."""

    @property
    def info(self) -> SchemaInfo:
        """What the broker registers for topics that it is used with."""
        ...

    @property
    def needs_writer(self) -> bool:
        """Whether `decode` needs the schema that a message was written with."""
        ...

    def encode(self, value: T) -> bytes:
        """Raises `InvalidValue` if it does not fit."""
        ...

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> T:
        """Raises `UnreadableMessage` if it does not fit."""
        ...
