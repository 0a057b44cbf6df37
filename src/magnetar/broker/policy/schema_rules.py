"""Pure: what a schema of each type must look like, when two are one, and when one fits another.

Owns: `Definition`, what the bytes of a schema say; `read`, which refuses those that are none of
their type; `incompatibility`, by one strategy; and the byte form of KEY_VALUE.

Invariants:
1. Two schemas are one version if their type and `meaning` are equal. AVRO, JSON and PROTOBUF go by
   what their Avro schema says, KEY_VALUE by its parts, primitives by their type, the others by
   their bytes.
2. A change of type, also of a part of KEY_VALUE, fits no strategy that compares.
3. No message holds a word that clients of Pulsar look for in errors, whatever a schema's names are.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.avro import SLICE_STEPS, AvroType, NotAvro, Steps, meaning, parsed
from magnetar.broker.policy.avro_resolution import Effort, problem
from magnetar.errors import DISK_FULL_WORDS, InvalidSchema, without_client_words
from magnetar.metadata.api import VALUE_BYTES_MAX
from magnetar.wire.pb import pulsar_pb2 as pb

SCHEMA_BYTES_MAX: Final = VALUE_BYTES_MAX
"""In one definition: more would not fit into its record."""

# Numbers of Schema.Type in the protocol.
NO_SCHEMA_TYPE: Final = 0
AUTO_CONSUME_TYPE: Final = 21
_STRING: Final = pb.Schema.String
_AVRO: Final = pb.Schema.Avro
KEY_VALUE_TYPE: Final = pb.Schema.KeyValue
_PROTOBUF_NATIVE: Final = pb.Schema.ProtobufNative
_EXTERNAL: Final = pb.Schema.External
_AS_AVRO: Final = frozenset((_AVRO, pb.Schema.Json, pb.Schema.Protobuf))
_EMPTY: Final = frozenset(
    (
        pb.Schema.Bool,
        pb.Schema.Int8,
        pb.Schema.Int16,
        pb.Schema.Int32,
        pb.Schema.Int64,
        pb.Schema.Float,
        pb.Schema.Double,
        pb.Schema.Date,
        pb.Schema.Time,
        pb.Schema.Timestamp,
        pb.Schema.Instant,
        pb.Schema.LocalDate,
        pb.Schema.LocalTime,
        pb.Schema.LocalDateTime,
    )
)

# As tools write them: upper case, with words apart in some.
_SPELLED: Final = {
    "NoSchema": "NONE",
    "KeyValue": "KEY_VALUE",
    "LocalDate": "LOCAL_DATE",
    "LocalTime": "LOCAL_TIME",
    "LocalDateTime": "LOCAL_DATE_TIME",
    "ProtobufNative": "PROTOBUF_NATIVE",
    "AutoConsume": "AUTO_CONSUME",
    "Bool": "BOOLEAN",
}
TYPE_NAMES: Final = {
    number: _SPELLED.get(name, name.upper()) for name, number in pb.Schema.Type.items()
}
"""The names that tools know types by, by their numbers."""
TYPES: Final = {
    # Read in more spellings than are written: those of the protocol, and BYTES for no schema.
    **{name.upper(): number for name, number in pb.Schema.Type.items()},
    **{name: number for number, name in TYPE_NAMES.items()},
    "BYTES": NO_SCHEMA_TYPE,
}


@dataclass(frozen=True, slots=True)
class Definition:
    """One schema, read."""

    type: int
    meaning: bytes
    avro: AvroType | None = None
    root: str = ""
    """Of PROTOBUF_NATIVE: the full name of the message."""
    parts: tuple[Definition, ...] = ()
    """Of KEY_VALUE: that of the key and that of the value."""


def type_name(number: int) -> str:
    """The name that applications know a type of schema by: `JSON`, `AVRO`."""
    return TYPE_NAMES.get(number, f"of type {number}")


def raw_digest(schema: SchemaData) -> bytes:
    """The digest of its very bytes, which costs nothing to make."""
    said = b"%d:" % schema.type
    # The parts of KEY_VALUE have their types there, and of two primitive ones nothing else.
    if schema.type == KEY_VALUE_TYPE:
        said += "|".join(_part_types(schema)).encode() + b"|"
    return sha256(said + schema.data).digest()


def read(schema: SchemaData) -> Steps[Definition]:
    """What a schema says; raises `InvalidSchema` if it is none of its type."""
    if len(schema.data) > SCHEMA_BYTES_MAX:
        raise InvalidSchema(
            f"a schema of {len(schema.data)} bytes; the limit is {SCHEMA_BYTES_MAX}"
        )
    if schema.type in _AS_AVRO:
        return (yield from _read_avro(schema))
    if schema.type == KEY_VALUE_TYPE:
        return (yield from _read_key_value(schema))
    if schema.type == _PROTOBUF_NATIVE:
        root = yield from _root_message(schema.data)
        return Definition(schema.type, raw_digest(schema), root=root)
    if schema.type == _STRING or schema.type in _EMPTY:
        # Old clients for Python wrote "null" for a text.
        if schema.data and not (schema.type == _STRING and schema.data == b"null"):
            raise InvalidSchema(f"a schema of type {type_name(schema.type)} has no definition")
        return Definition(schema.type, raw_digest(SchemaData(schema.type, b"")))
    if schema.type == _EXTERNAL:
        return Definition(schema.type, raw_digest(schema))
    raise InvalidSchema(f"a schema of type {type_name(schema.type)} cannot be registered")


def incompatibility(
    new: Definition, old: Definition, strategy: str, effort: Effort
) -> Steps[str | None]:
    """Why `new` may not follow `old` by a strategy that compares; None: it may."""
    # ALWAYS_COMPATIBLE and ALWAYS_INCOMPATIBLE compare nothing: they are not asked here.
    if new.type != old.type:
        return f"the schema of the topic is {type_name(old.type)}, not {type_name(new.type)}"
    for label, one, other in zip(("key", "value"), new.parts, old.parts, strict=False):
        found = yield from incompatibility(one, other, strategy, effort)
        if found is not None:
            return f"its {label}: {found}"
    if new.root != old.root:
        return said(f"the message of the topic is {old.root!r}, not {new.root!r}")
    if new.avro is None or old.avro is None or new.meaning == old.meaning:
        return None
    if strategy.startswith(("BACKWARD", "FULL")):
        found = yield from problem(old.avro, new.avro, effort)
        if found is not None:
            return said(f"with the new schema old messages cannot be read: {found}")
    if strategy.startswith(("FORWARD", "FULL")):
        found = yield from problem(new.avro, old.avro, effort)
        if found is not None:
            return said(f"with the old schema new messages cannot be read: {found}")
    return None


def said(text: str) -> str:
    """A text with names of a schema in it, without words that clients look for (invariant 3)."""
    plain = without_client_words(text)
    return plain.replace(DISK_FULL_WORDS, f"{DISK_FULL_WORDS[0]}~{DISK_FULL_WORDS[1:]}")


# --- Avro


def _read_avro(schema: SchemaData) -> Steps[Definition]:
    try:
        avro = yield from parsed(schema.data)
    except NotAvro as error:
        kind = type_name(schema.type)
        raise InvalidSchema(said(f"a schema of type {kind} is no Avro schema: {error}")) from error
    # As Pulsar's broker: JSON and PROTOBUF may be one.
    if schema.type == _AVRO and avro.kind == "union":
        raise InvalidSchema("a schema of type AVRO is a union; let it be one of its branches")
    return Definition(schema.type, (yield from meaning(avro)), avro)


# --- key and value


def key_value_bytes(key: bytes, value: bytes) -> bytes:
    """The definition of KEY_VALUE: each part behind its length."""
    return b"".join(len(each).to_bytes(4, "big") + each for each in (key, value))


def key_value_parts(data: bytes) -> tuple[bytes, bytes]:
    """The definitions of the key and of the value."""
    parts, rest = [], data
    for _ in range(2):
        size = int.from_bytes(rest[:4], "big")
        if len(rest) < 4 + size:
            raise InvalidSchema("a schema of type KEY_VALUE ends within one of its two parts")
        parts.append(rest[4 : 4 + size])
        rest = rest[4 + size :]
    if rest:
        raise InvalidSchema(f"a schema of type KEY_VALUE has {len(rest)} bytes behind its parts")
    return parts[0], parts[1]


def _part_types(schema: SchemaData) -> tuple[str, str]:
    # Absent: clients that have only bytes there say nothing.
    properties = schema.properties
    key, value = properties.get("key.schema.type"), properties.get("value.schema.type")
    return key or "BYTES", value or "BYTES"


def _read_key_value(schema: SchemaData) -> Steps[Definition]:
    parts = []
    for name, data in zip(_part_types(schema), key_value_parts(schema.data), strict=True):
        number = TYPES.get(name.upper())
        # One in another would take the properties of its own parts, which have no place.
        if number is None or number == KEY_VALUE_TYPE:
            raise InvalidSchema(said(f"a part of KEY_VALUE cannot be {name[:80]!r}"))
        if number == NO_SCHEMA_TYPE:
            parts.append(Definition(number, b""))
        else:
            parts.append((yield from read(SchemaData(number, data))))
    together = b"".join(b"%d:%s" % (each.type, each.meaning) for each in parts)
    return Definition(schema.type, sha256(together).digest(), parts=tuple(parts))


# --- protobuf


class _Native(msgspec.Struct, rename="camel"):
    """The definition of PROTOBUF_NATIVE, as clients write it."""

    file_descriptor_set: str
    root_message_type_name: str
    root_file_descriptor_name: str


def _root_message(data: bytes) -> Steps[str]:
    """The full name of the message, once its file and all that it imports are found to be sound."""
    try:
        definition = msgspec.json.decode(data, type=_Native)
        files = FileDescriptorSet.FromString(b64decode(definition.file_descriptor_set))
        by_name = {each.name: each for each in files.file}
        # A pool of its own: the default one refuses a second file of a name.
        pool = DescriptorPool()
        order = _imports_first(definition.root_file_descriptor_name, by_name)
        for index, each in enumerate(order):
            if index % SLICE_STEPS == SLICE_STEPS - 1:
                yield
            pool.AddSerializedFile(each.SerializeToString())
        message = pool.FindMessageTypeByName(definition.root_message_type_name)
    except (ValueError, TypeError, KeyError, RecursionError, DecodeError, binascii.Error) as error:
        raise InvalidSchema(
            said(f"a schema of type PROTOBUF_NATIVE cannot be used: {str(error)[:200]}")
        ) from error
    if message.file.name != definition.root_file_descriptor_name:
        raise InvalidSchema("the message of a schema of type PROTOBUF_NATIVE is in another file")
    return definition.root_message_type_name


def _imports_first(root: str, by_name: dict[str, FileDescriptorProto]) -> list[FileDescriptorProto]:
    """A file and what it imports, in an order in which each comes behind its own imports."""
    # Files stand in any order in the set. A file that imports itself never becomes ready, and the
    # pool refuses whoever needs it.
    order: list[FileDescriptorProto] = []
    done: set[str] = set()
    pending = [(root, False)]
    while pending:
        name, ready = pending.pop()
        if ready:
            order.append(by_name[name])
        elif name not in done:
            done.add(name)
            if name not in by_name:
                raise ValueError(f"it lacks the file {name!r}")
            pending.append((name, True))
            pending += [(each, False) for each in by_name[name].dependency]
    return order
