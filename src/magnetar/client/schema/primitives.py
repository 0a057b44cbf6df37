"""Pure: schemas of single values: bytes, text, truth values and numbers.

Owns: `BYTES`, `STRING`, `BOOL`, `INT8` to `INT64`, `FLOAT32`, `FLOAT64`. Numbers are big-endian,
as the Java client writes them.

Invariants:
1. `decode(encode(x)) == x` for every value that `encode` takes (a FLOAT32 is rounded first).
2. A value of another type, or out of range, raises `InvalidValue`; bytes of another length, or that
   are not UTF-8, raise `UnreadableMessage`.
"""

from __future__ import annotations

import struct
from typing import Final

from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidValue, UnreadableMessage


class BytesSchema:
    """Payloads as they are."""

    info: Final = SchemaInfo(SchemaType.BYTES)
    needs_writer: Final = False

    def encode(self, value: bytes) -> bytes:
        # Text would have to be guessed an encoding for.
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _wrong(value, "bytes", "encode it, or give the producer a schema")
        return bytes(value)

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> bytes:
        return data


class StringSchema:
    """Text in UTF-8."""

    # The property is part of the schema that the Java client registers: without it they would
    # differ.
    info: Final = SchemaInfo(SchemaType.STRING, name="String", properties={"__charset": "UTF-8"})
    needs_writer: Final = False

    def encode(self, value: str) -> bytes:
        if not isinstance(value, str):
            raise _wrong(value, "a str")
        try:
            return value.encode()
        # Lone surrogates, as in file names.
        except UnicodeEncodeError as error:
            raise InvalidValue(f"a text cannot be written as UTF-8: {error}") from error

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise UnreadableMessage(f"a payload is not UTF-8: {error}") from error


class BoolSchema:
    """One byte: 0 is false, all else is true."""

    info: Final = SchemaInfo(SchemaType.BOOL, name="Boolean")
    needs_writer: Final = False

    def encode(self, value: bool) -> bytes:
        if not isinstance(value, bool):
            raise _wrong(value, "a bool")
        return b"\x01" if value else b"\x00"

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> bool:
        if len(data) != 1:
            raise UnreadableMessage(f"a truth value of {len(data)} bytes")
        return data != b"\x00"


class IntSchema:
    """A signed number of a fixed size."""

    needs_writer: Final = False

    def __init__(self, kind: SchemaType, size: int) -> None:
        self.info = SchemaInfo(kind, name=kind.name)
        self._size = size

    def encode(self, value: int) -> bytes:
        # `True` is an int in Python, and hardly ever meant as one.
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong(value, "an int")
        try:
            return value.to_bytes(self._size, "big", signed=True)
        except OverflowError as error:
            raise InvalidValue(f"{value} does not fit into {self.info.name}") from error

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> int:
        if len(data) != self._size:
            raise UnreadableMessage(f"{self.info.name} has {self._size} bytes, not {len(data)}")
        return int.from_bytes(data, "big", signed=True)


class FloatSchema:
    """A floating-point number of a fixed size."""

    needs_writer: Final = False

    def __init__(self, kind: SchemaType, form: str) -> None:
        self.info = SchemaInfo(kind, name=kind.name.capitalize())
        self._form = struct.Struct(form)

    def encode(self, value: float) -> bytes:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(value, "a float")
        try:
            return self._form.pack(value)
        except (OverflowError, struct.error) as error:
            raise InvalidValue(f"{value} does not fit into {self.info.name}") from error

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> float:
        if len(data) != self._form.size:
            raise UnreadableMessage(
                f"{self.info.name} has {self._form.size} bytes, not {len(data)}"
            )
        value: float = self._form.unpack(data)[0]
        return value


BYTES: Final = BytesSchema()
STRING: Final = StringSchema()
BOOL: Final = BoolSchema()
# Names and sizes as the Java client registers them, so that both can share a topic.
INT8: Final = IntSchema(SchemaType.INT8, 1)
INT16: Final = IntSchema(SchemaType.INT16, 2)
INT32: Final = IntSchema(SchemaType.INT32, 4)
INT64: Final = IntSchema(SchemaType.INT64, 8)
FLOAT32: Final = FloatSchema(SchemaType.FLOAT, ">f")
FLOAT64: Final = FloatSchema(SchemaType.DOUBLE, ">d")


def _wrong(value: object, wanted: str, hint: str | None = None) -> InvalidValue:
    return InvalidValue(f"the schema takes {wanted}, not {type(value).__name__}", hint=hint)
