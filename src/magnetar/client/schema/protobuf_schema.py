"""Pure: protobuf messages.

Owns: `ProtobufSchema`, and `message_class`, a class made from what the registry has.

Invariants:
1. `decode(encode(x)) == x`.
2. The definition holds the file of the message and every file that it imports, so that a reader
   without the generated code can read it.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any, Final, Generic, TypeVar

import msgspec
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass

from magnetar.client.schema.info import SchemaInfo, SchemaType
from magnetar.errors import InvalidSetting, InvalidValue, UnreadableMessage

M = TypeVar("M", bound=Message)


class _Definition(msgspec.Struct, rename="camel"):
    """The definition in the registry, as the Java client writes it."""

    file_descriptor_set: str
    root_message_type_name: str
    root_file_descriptor_name: str


class ProtobufSchema(Generic[M]):
    """Messages of a generated protobuf class.

    schema = ProtobufSchema(orders_pb2.Order)
    """

    needs_writer: Final = False

    def __init__(self, of: type[M]) -> None:
        descriptor = getattr(of, "DESCRIPTOR", None)
        if descriptor is None or not issubclass(of, Message):
            raise InvalidSetting(f"{of!r} is no generated protobuf message")
        self._of = of
        self.info = SchemaInfo(SchemaType.PROTOBUF_NATIVE, _definition(descriptor), descriptor.name)

    def encode(self, value: M) -> bytes:
        # Messages of another class may serialize as well, and mean something else.
        if not isinstance(value, self._of):
            raise InvalidValue(
                f"the schema takes a {self._of.__name__}, not a {type(value).__name__}"
            )
        try:
            return value.SerializeToString()
        except EncodeError as error:
            raise InvalidValue(f"a message lacks a required field: {error}") from error

    def decode(self, data: bytes, writer: SchemaInfo | None = None) -> M:
        return parsed(self._of, data)


def parsed(of: type[M], data: bytes) -> M:
    try:
        return of.FromString(data)
    except DecodeError as error:
        raise UnreadableMessage(f"a payload is no {of.DESCRIPTOR.name}: {error}") from error


def message_class(data: bytes) -> type[Message]:
    """The class of the messages that a definition describes."""
    try:
        definition = msgspec.json.decode(data, type=_Definition)
        files = FileDescriptorSet.FromString(b64decode(definition.file_descriptor_set))
        # A pool of its own: the default one refuses a second file of a name.
        pool = DescriptorPool()
        for each in files.file:
            pool.Add(each)
        found: Any = pool.FindMessageTypeByName(definition.root_message_type_name)
        return GetMessageClass(found)
    except (ValueError, TypeError, KeyError, DecodeError, binascii.Error) as error:
        raise UnreadableMessage(f"the schema of a message cannot be used: {error}") from error


def _definition(descriptor: Any) -> bytes:
    files = FileDescriptorSet()
    seen: set[str] = set()

    def add(file: Any) -> None:
        if file.name not in seen:
            seen.add(file.name)
            # Imports first: a pool takes a file only if it has what that file imports (invariant
            # 2).
            for each in file.dependencies:
                add(each)
            file.CopyToProto(files.file.add())

    add(descriptor.file)
    packed = b64encode(files.SerializeToString()).decode()
    return msgspec.json.encode(_Definition(packed, descriptor.full_name, descriptor.file.name))
