"""Pure: what a topic's schema says, in Spark's types.

Owns: `fields_of`, from an Avro definition (which describes JSON topics too) to the fields of a
Spark schema.

Invariants:
1. Every field may be NULL: an older message may lack it.
2. What Spark has no type for raises `InvalidSetting`, which names the field and the way around.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from magnetar.errors import InvalidSetting

# Avro's names for which Spark has a type of the same meaning; its enums are text here.
_PLAIN: Final[dict[str, type[DataType]]] = {
    "boolean": BooleanType,
    "int": IntegerType,
    "long": LongType,
    "float": FloatType,
    "double": DoubleType,
    "bytes": BinaryType,
    "fixed": BinaryType,
    "string": StringType,
    "enum": StringType,
}
# Times of day are not here: they stay the numbers that they are stored as.
_LOGICAL: Final[dict[str, type[DataType]]] = {
    "date": DateType,
    "timestamp-millis": TimestampType,
    "timestamp-micros": TimestampType,
    "local-timestamp-millis": TimestampNTZType,
    "local-timestamp-micros": TimestampNTZType,
    "uuid": StringType,
}
# A record may name itself; Spark's types cannot, and a real one is never this deep.
_DEPTH_MAX: Final = 32


def definition(data: bytes) -> Any:
    """The Avro definition that the registry has."""
    try:
        return msgspec.json.decode(data)
    except ValueError as error:
        raise InvalidSetting(
            f"the topic's schema is no Avro definition: {error}",
            hint='set valueFormat to "bytes" and decode the values in the query',
        ) from error


def fields_of(defined: Any) -> list[StructField]:
    """The columns of a record."""
    if not isinstance(defined, dict) or defined.get("type") != "record":
        raise InvalidSetting(
            "the topic's schema is no record", hint='set valueFormat to "bytes" or "string"'
        )
    found = _type(defined, "", {}, 0)
    assert isinstance(found, StructType), "a record is a struct"
    return list(found.fields)


def _type(defined: Any, where: str, named: dict[str, Any], depth: int) -> DataType:
    if depth > _DEPTH_MAX:
        raise _unknown(where, "a type that holds itself")
    # A union: with NULL it is a field that may be missing, with more it is a choice that no column
    # can hold. Then names: of a plain type, or of a record that was defined before.
    if isinstance(defined, list):
        members = [each for each in defined if each != "null"]
        if len(members) != 1:
            raise _unknown(where, f"a choice of {len(members)} types")
        return _type(members[0], where, named, depth)
    if isinstance(defined, str):
        if defined in _PLAIN:
            return _PLAIN[defined]()
        if defined in named:
            return _type(named[defined], where, named, depth + 1)
        raise _unknown(where, f"the type {defined}")
    return _compound(defined, where, named, depth)


def _compound(
    defined: Mapping[str, Any], where: str, named: dict[str, Any], depth: int
) -> DataType:
    kind, logical = defined.get("type"), defined.get("logicalType")
    # The logical type decides; the type below it is only how it is stored.
    if logical == "decimal":
        return DecimalType(int(defined["precision"]), int(defined.get("scale", 0)))
    if logical in _LOGICAL:
        return _LOGICAL[logical]()
    # Remembered before its fields are looked at: those may refer to it.
    if "name" in defined:
        named[str(defined["name"])] = defined
    if kind == "record":
        fields = []
        for each in defined["fields"]:
            found = _type(each["type"], f"{where}.{each['name']}".lstrip("."), named, depth + 1)
            fields.append(StructField(each["name"], found, True))
        return StructType(fields)
    if kind == "array":
        return ArrayType(_type(defined["items"], where, named, depth + 1), True)
    if kind == "map":
        return MapType(StringType(), _type(defined["values"], where, named, depth + 1), True)
    if isinstance(kind, str) and kind in _PLAIN:
        return _PLAIN[kind]()
    # `{"type": {"type": ...}}` and `{"type": [...]}`, which some generators write.
    if isinstance(kind, list | dict):
        return _type(kind, where, named, depth + 1)
    raise _unknown(where, f"the type {kind}")


def _unknown(where: str, what: str) -> InvalidSetting:
    return InvalidSetting(
        f"the field {where or 'of the value'} has {what}, which Spark has no column for",
        hint='set valueFormat to "bytes" and decode the values in the query',
    )
