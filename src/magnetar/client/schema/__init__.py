"""Pure: schemas: how values become payloads.

Single values: `BYTES`, `STRING`, `BOOL`, `INT8` ... `FLOAT64`. Records: `JsonSchema(cls)`,
`AvroSchema(cls)`, `ProtobufSchema(cls)`. `AutoSchema()` reads whatever a topic holds.
"""

from magnetar.client.schema.auto_schema import AutoSchema
from magnetar.client.schema.avro_schema import AvroSchema
from magnetar.client.schema.info import Schema, SchemaInfo, SchemaType
from magnetar.client.schema.json_schema import JsonSchema
from magnetar.client.schema.primitives import (
    BOOL,
    BYTES,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
)
from magnetar.client.schema.protobuf_schema import ProtobufSchema

__all__ = [
    "BOOL",
    "BYTES",
    "FLOAT32",
    "FLOAT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "STRING",
    "AutoSchema",
    "AvroSchema",
    "JsonSchema",
    "ProtobufSchema",
    "Schema",
    "SchemaInfo",
    "SchemaType",
]
