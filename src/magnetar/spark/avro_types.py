"""Pure: columns of Arrow beside the fields of an Avro definition, which describes JSON topics too.

Owns: `cast_for`, the types that a column is cast to so that a payload can be made of it, and
`definition_of`, a definition for a topic that has none.

Invariants:
1. A column that can never fit its field raises `InvalidSetting`, which names it, before a row is
   looked at. What depends on the values (a NULL, a number that is too large) is found at the cast.
2. Times become whole numbers of the unit that the definition names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from magnetar.errors import InvalidSetting

_WHOLE: Final = {"int": pa.int32(), "long": pa.int64()}
# Whole numbers fit these too; the other way round a fraction would be cut off.
_BROKEN: Final = {"float": pa.float32(), "double": pa.float64()}
_TIMES: Final = {
    "timestamp-millis": "ms",
    "timestamp-micros": "us",
    "local-timestamp-millis": "ms",
    "local-timestamp-micros": "us",
}
_DEPTH_MAX: Final = 32


class Cast(NamedTuple):
    """A column is cast to the one, then to the other."""

    typed: pa.DataType
    plain: pa.DataType


def cast_for(defined: Any, found: pa.DataType, where: str) -> Cast:
    """How values of a type become those of a field."""
    return _cast(defined, found, where, {}, 0)


def is_nullable(defined: Any) -> bool:
    return isinstance(defined, list) and "null" in defined


def _cast(
    defined: Any, found: pa.DataType, where: str, named: Mapping[str, Any], depth: int
) -> Cast:
    if depth > _DEPTH_MAX:
        raise _misfit(where, found, "a type that holds itself")
    # As `spark_types` reads it: NULL and one type. Whether a NULL may come is looked at with the
    # values, in `is_nullable`.
    if isinstance(defined, list):
        members = [each for each in defined if each != "null"]
        if len(members) != 1:
            raise _misfit(where, found, f"a choice of {len(members)} types")
        return _cast(members[0], found, where, named, depth)
    if isinstance(defined, str):
        if defined in named:
            return _cast(named[defined], found, where, named, depth + 1)
        return _primitive(defined, found, where)
    return _compound(defined, found, where, named, depth)


def _primitive(name: str, found: pa.DataType, where: str) -> Cast:
    types = pa.types
    # Only casts that keep the value, or fail for one that is too large; text is never made of
    # numbers or read as one.
    if name in _WHOLE and types.is_integer(found):
        return Cast(_WHOLE[name], _WHOLE[name])
    if name in _BROKEN and (types.is_floating(found) or types.is_integer(found)):
        return Cast(_BROKEN[name], _BROKEN[name])
    if name == "boolean" and types.is_boolean(found):
        return Cast(found, found)
    if name == "string" and (types.is_string(found) or types.is_large_string(found)):
        return Cast(pa.string(), pa.string())
    if name == "bytes" and (types.is_binary(found) or types.is_large_binary(found)):
        return Cast(pa.binary(), pa.binary())
    raise _misfit(where, found, name)


def _compound(
    defined: Mapping[str, Any], found: pa.DataType, where: str, named: Mapping[str, Any], depth: int
) -> Cast:
    # Logical types first: below each is a plain type, which a column of that plain type may still
    # be written as, without the cast.
    kind, logical = defined.get("type"), defined.get("logicalType")
    if "name" in defined:
        named = {**named, str(defined["name"]): defined}
    if logical in _TIMES and pa.types.is_timestamp(found):
        return Cast(pa.timestamp(_TIMES[logical], found.tz), pa.int64())
    if logical == "date" and pa.types.is_date(found):
        return Cast(pa.date32(), pa.int32())
    if logical == "decimal" and pa.types.is_decimal(found):
        typed = pa.decimal128(int(defined["precision"]), int(defined.get("scale", 0)))
        return Cast(typed, typed)
    # Then what holds other types, then the plain ones, and last a definition inside a definition.
    if kind == "record" and pa.types.is_struct(found):
        return _record(defined, found, where, named, depth)
    if kind == "array" and pa.types.is_list(found):
        inner = _cast(defined["items"], found.value_type, f"{where}[]", named, depth + 1)
        return Cast(pa.list_(inner.typed), pa.list_(inner.plain))
    if kind == "map" and pa.types.is_map(found) and pa.types.is_string(found.key_type):
        inner = _cast(defined["values"], found.item_type, f"{where}[]", named, depth + 1)
        return Cast(pa.map_(pa.string(), inner.typed), pa.map_(pa.string(), inner.plain))
    if kind in ("enum", "string") and pa.types.is_string(found):
        return Cast(found, found)
    if kind == "fixed" and pa.types.is_binary(found):
        return Cast(found, found)
    if isinstance(kind, str) and kind not in ("record", "array", "map", "enum", "fixed"):
        return _cast(kind, found, where, named, depth + 1)
    if isinstance(kind, list | dict):
        return _cast(kind, found, where, named, depth + 1)
    raise _misfit(where, found, str(kind))


def _record(
    defined: Mapping[str, Any], found: pa.DataType, where: str, named: Mapping[str, Any], depth: int
) -> Cast:
    given = {found.field(n).name: found.field(n).type for n in range(found.num_fields)}
    wanted = {each["name"]: each["type"] for each in defined["fields"]}
    # Inside a value there are no defaults: fields of the struct and of the record are the same.
    for name in [*given, *wanted]:
        if (name in given) != (name in wanted):
            raise _misfit(f"{where}.{name}", found, "a record of other fields")
    # In the order of the column: a cast of structs goes by place.
    inner = {
        name: _cast(wanted[name], type_, f"{where}.{name}", named, depth + 1)
        for name, type_ in given.items()
    }
    return Cast(
        pa.struct([(name, cast.typed) for name, cast in inner.items()]),
        pa.struct([(name, cast.plain) for name, cast in inner.items()]),
    )


def _misfit(where: str, found: pa.DataType, wanted: str) -> InvalidSetting:
    return InvalidSetting(
        f"the column {where} is {found}, and the topic's schema wants {wanted} there",
        hint=f"cast it in the query, or write `value` yourself: to_json(struct({where}, ...))",
    )


# --- the other way round

# Only types that Spark's columns have: it knows no unsigned numbers.
_NAMES: Final[dict[pa.DataType, Any]] = {
    pa.bool_(): "boolean",
    pa.int8(): "int",
    pa.int16(): "int",
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
}


def definition_of(fields: Iterable[pa.Field], name: str = "Row") -> dict[str, Any]:
    """A record of these columns; each may be NULL, so that later ones can be added."""
    return {
        "type": "record",
        "name": name,
        "fields": [
            {
                "name": each.name,
                "type": ["null", _defined(each.type, f"{name}_{each.name}")],
                "default": None,
            }
            for each in fields
        ],
    }


def _defined(found: pa.DataType, name: str) -> Any:
    if found in _NAMES:
        return _NAMES[found]
    if pa.types.is_timestamp(found):
        # Spark's timestamps have microseconds; one without a zone is local time.
        kind = "timestamp-micros" if found.tz is not None else "local-timestamp-micros"
        return {"type": "long", "logicalType": kind}
    if pa.types.is_decimal(found):
        size = {"precision": found.precision, "scale": found.scale}
        return {"type": "bytes", "logicalType": "decimal", **size}
    if pa.types.is_struct(found):
        return definition_of([found.field(n) for n in range(found.num_fields)], name)
    if pa.types.is_list(found):
        return {"type": "array", "items": ["null", _defined(found.value_type, name)]}
    if pa.types.is_map(found):
        return {"type": "map", "values": ["null", _defined(found.item_type, name)]}
    raise _misfit(name, found, "a type that Avro has")
