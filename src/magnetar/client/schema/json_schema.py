"""Pure: records as JSON.

Owns: `JsonSchema`. Its definition in the registry is an Avro record, as brokers expect of JSON.

Invariants:
1. `decode(encode(x)) == x` for values of the class.
2. A field that the class does not have is ignored, one that is missing gets its default: what
   earlier and later versions of the class wrote can be read without the registry.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.client.schema.record_types import RecordType

T = TypeVar("T")


class JsonSchema(Generic[T]):
    """Values of a dataclass, msgspec Struct, pydantic model or TypedDict as JSON.

    @dataclass
    class Order:
        id: int
        note: str = ""

    producer = await client.producer("topic://public/default/orders", schema=JsonSchema(Order))
    """

    needs_writer: Final = False

    def __init__(self, of: type[T]) -> None:
        self._type = RecordType(of)
        # Brokers check the compatibility of JSON topics by an Avro definition.
        data = msgspec.json.encode(self._type.definition)
        self.info = SchemaInfo(SchemaType.JSON, data, of.__name__)

    def encode(self, value: T) -> bytes:
        return self._type.to_json(value)

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> T:
        return self._type.from_json(data)
