"""Schemas by type: what is sound, what is the same, what may follow what."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from magnetar.broker.api import SchemaData
from magnetar.broker.policy.avro_resolution import Effort
from magnetar.broker.policy.schema_rules import (
    SCHEMA_BYTES_MAX,
    TYPES,
    incompatibility,
    key_value_bytes,
    key_value_parts,
    raw_digest,
    read,
    said,
)
from magnetar.errors import DISK_FULL_WORDS, InvalidSchema
from tests.unit.broker.policy.avro_samples import field, record, whole

ORDER = msgspec.json.encode(record(field("a", "int")))
LARGER = msgspec.json.encode(record(field("a", "int"), field("b", "int", default=1)))
OTHER = msgspec.json.encode(record(field("a", "string")))


def schema(kind: str, data: bytes = b"", **properties: str) -> SchemaData:
    given = {name.replace("_", ".", 2): value for name, value in properties.items()}
    return SchemaData(TYPES[kind], data, "s", given)


def pair(key: str, value: str, data: bytes) -> SchemaData:
    return schema("KEY_VALUE", data, key_schema_type=key, value_schema_type=value)


def native(
    message: str = "shop.Order", root: str = "order.proto", *, imports: bool = True, **fields: Any
) -> bytes:
    """A definition of PROTOBUF_NATIVE, whose files stand in the wrong order."""
    files = FileDescriptorSet()
    order = files.file.add(name="order.proto", package="shop", dependency=["money.proto"])
    made = order.message_type.add(name="Order")
    made.field.add(name="cost", number=1, type=11, label=1, type_name=".shop.Money")
    made.nested_type.add(name="Line")
    order.message_type.add(name="Invoice")
    if imports:
        files.file.add(name="money.proto", package="shop").message_type.add(name="Money")
    given = {
        "fileDescriptorSet": b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": message,
        "rootFileDescriptorName": root,
    }
    return msgspec.json.encode(given | fields)


SOUND = {
    "avro": schema("AVRO", ORDER),
    "avro of one value": schema("AVRO", b'"long"'),
    "json": schema("JSON", ORDER),
    "json as a union": schema("JSON", b'["null", "int"]'),
    "protobuf": schema("PROTOBUF", ORDER),
    "a protobuf message": schema("PROTOBUF_NATIVE", native()),
    "one in another": schema("PROTOBUF_NATIVE", native("shop.Order.Line")),
    "text": schema("STRING"),
    "text of old clients": schema("STRING", b"null"),
    **{kind: schema(kind) for kind in ("BOOLEAN", "INT8", "INT64", "DOUBLE", "LOCAL_DATE_TIME")},
    "something else": schema("EXTERNAL", b"\x00\xff whatever"),
    "a pair": pair("STRING", "AVRO", key_value_bytes(b"", ORDER)),
    "a pair of bytes": schema("KEY_VALUE", key_value_bytes(b"", b"")),
}
UNSOUND = {
    "avro that is no json": schema("AVRO", b"{"),
    "avro that is none": schema("AVRO", b"{}"),
    "avro as a union": schema("AVRO", b'["null", "int"]'),
    "json that is no avro": schema("JSON", b'{"type": "object"}'),
    "protobuf that is no avro": schema("PROTOBUF", native()),
    "a message that is not there": schema("PROTOBUF_NATIVE", native("shop.Nothing")),
    "a file that is not there": schema("PROTOBUF_NATIVE", native(root="nothing.proto")),
    "a message of another file": schema("PROTOBUF_NATIVE", native("shop.Money")),
    "an import that is not there": schema("PROTOBUF_NATIVE", native(imports=False)),
    "a set that is no base64": schema("PROTOBUF_NATIVE", native(fileDescriptorSet="\u00e4")),
    "a set that is none": schema("PROTOBUF_NATIVE", native(fileDescriptorSet="////")),
    "no set": schema("PROTOBUF_NATIVE", b"{}"),
    "text with a definition": schema("STRING", b"x"),
    "a number with a definition": schema("INT32", b"null"),
    "whatever there is": schema("AUTO_CONSUME"),
    "a type that nobody knows": SchemaData(99, b""),
    "a pair without data": pair("STRING", "STRING", b""),
    "a pair that ends early": pair("STRING", "STRING", b"\x00\x00\x00\x00\x00\x00\x00\x05abc"),
    "a pair with something behind it": pair("STRING", "STRING", bytes(9)),
    "a pair with an unsound part": pair("STRING", "AVRO", key_value_bytes(b"", b"{}")),
    "a pair of no known type": pair("POEM", "STRING", bytes(8)),
    "a pair in a pair": pair("KEY_VALUE", "STRING", key_value_bytes(bytes(8), b"")),
    "too many bytes": schema("EXTERNAL", bytes(SCHEMA_BYTES_MAX + 1)),
}


@pytest.mark.parametrize("sound", SOUND.values(), ids=SOUND.keys())
def test_sound_schemas_are_read(sound: SchemaData) -> None:
    assert whole(read(sound)).type == sound.type


@pytest.mark.parametrize("unsound", UNSOUND.values(), ids=UNSOUND.keys())
def test_unsound_schemas_are_refused(unsound: SchemaData) -> None:
    with pytest.raises(InvalidSchema):
        whole(read(unsound))


def test_a_file_that_imports_itself_is_refused() -> None:
    files = FileDescriptorSet()
    files.file.add(name="a.proto", dependency=["b.proto"]).message_type.add(name="A")
    files.file.add(name="b.proto", dependency=["a.proto"])
    packed = b64encode(files.SerializeToString()).decode()
    with pytest.raises(InvalidSchema):
        whole(read(schema("PROTOBUF_NATIVE", native("A", "a.proto", fileDescriptorSet=packed))))


def meanings(*of: SchemaData) -> int:
    """How many different things they say."""
    return len({(each.type, whole(read(each)).meaning) for each in of})


def test_schemas_are_the_same_by_what_they_say() -> None:
    spaced = msgspec.json.format(ORDER, indent=4)
    for kind in ("AVRO", "JSON", "PROTOBUF"):
        assert meanings(schema(kind, ORDER), schema(kind, spaced)) == 1
        assert meanings(schema(kind, ORDER), schema(kind, LARGER)) == 2
    assert meanings(schema("AVRO", ORDER), schema("JSON", ORDER)) == 2
    assert meanings(schema("STRING"), schema("STRING", b"null")) == 1
    assert meanings(schema("EXTERNAL", b"a"), schema("EXTERNAL", b"b")) == 2
    compact = native()
    assert meanings(*(schema("PROTOBUF_NATIVE", each) for each in (compact, compact + b" "))) == 2
    one, other = key_value_bytes(b"", ORDER), key_value_bytes(b"null", spaced)
    assert meanings(pair("STRING", "AVRO", one), pair("STRING", "AVRO", other)) == 1
    # Of two primitive parts the types are all there is.
    assert meanings(pair("STRING", "INT32", bytes(8)), pair("INT32", "STRING", bytes(8))) == 2
    assert raw_digest(pair("STRING", "INT32", bytes(8))) != raw_digest(
        pair("INT32", "STRING", bytes(8))
    )


def verdict(old: SchemaData, new: SchemaData, strategy: str) -> str | None:
    return whole(incompatibility(whole(read(new)), whole(read(old)), strategy, effort=Effort()))


COMPARED = ("BACKWARD", "FORWARD", "FULL")


def fits(old: SchemaData, new: SchemaData) -> tuple[bool, ...]:
    """By each strategy, which is the same with `_TRANSITIVE` for one older schema."""
    found = tuple(verdict(old, new, each) is None for each in COMPARED)
    assert found == tuple(verdict(old, new, f"{each}_TRANSITIVE") is None for each in COMPARED)
    return found


@pytest.mark.parametrize("kind", ["AVRO", "JSON", "PROTOBUF"])
def test_what_is_written_as_avro_is_compared_as_avro(kind: str) -> None:
    base, without = schema(kind, ORDER), record(field("a", "int"), field("b", "int"))
    stricter = schema(kind, msgspec.json.encode(without))
    assert fits(base, schema(kind, LARGER)) == (True, True, True)
    assert fits(base, schema(kind, OTHER)) == (False, False, False)
    assert fits(base, stricter) == (False, True, False)
    assert fits(stricter, base) == (True, False, False)


def test_a_type_stays() -> None:
    found = verdict(schema("AVRO", ORDER), schema("JSON", ORDER), "FULL")
    assert found == "the schema of the topic is AVRO, not JSON"
    assert fits(schema("STRING"), schema("INT32")) == (False, False, False)
    assert fits(schema("STRING"), schema("STRING", b"null")) == (True, True, True)
    assert fits(schema("EXTERNAL", b"a"), schema("EXTERNAL", b"b")) == (True, True, True)


def test_a_protobuf_message_keeps_its_name() -> None:
    old = schema("PROTOBUF_NATIVE", native())
    assert fits(old, schema("PROTOBUF_NATIVE", native("shop.Invoice"))) == (False, False, False)
    found = verdict(old, schema("PROTOBUF_NATIVE", native("shop.Invoice")), "FULL")
    assert found == "the message of the topic is 'shop.Order', not 'shop.Invoice'"


def test_each_part_of_a_pair_is_compared() -> None:
    old = pair("STRING", "AVRO", key_value_bytes(b"", ORDER))
    assert fits(old, pair("STRING", "AVRO", key_value_bytes(b"", LARGER))) == (True, True, True)
    wrong = pair("STRING", "AVRO", key_value_bytes(b"", OTHER))
    assert verdict(old, wrong, "BACKWARD") == (
        "its value: with the new schema old messages cannot be read:"
        " at 'a': int cannot be read as string"
    )
    turned = pair("INT32", "AVRO", key_value_bytes(b"", ORDER))
    assert verdict(old, turned, "FULL") == ("its key: the schema of the topic is STRING, not INT32")
    of_bytes = schema("KEY_VALUE", bytes(8))
    assert fits(of_bytes, of_bytes) == (True, True, True)


def test_the_parts_of_a_pair_come_back() -> None:
    assert key_value_parts(key_value_bytes(b"key", b"")) == (b"key", b"")
    assert key_value_bytes(b"ab", b"c") == b"\x00\x00\x00\x02ab\x00\x00\x00\x01c"


@pytest.mark.parametrize(
    "word",
    [
        "TopicNotFound",
        "TopicTerminatedError",
        "ProducerBlockedQuotaExceededException",
        "ProducerFenced",
        "SubscriptionNotFound",
        "AuthorizationError",
        "ConsumerBusy",
        "InvalidTopicName",
        "IncompatibleSchema",
        "ConsumerAssignError",
        "NotAllowedError",
        DISK_FULL_WORDS,
    ],
)
def test_no_name_of_a_schema_makes_a_client_give_up(word: str) -> None:
    """Clients for Go look for these in the text of any error."""
    assert word not in said(f"a{word}{word}b")
    name = word.replace(" ", "_")
    old = schema("AVRO", msgspec.json.encode(record(field(name, "int"), name=name)))
    new = schema("AVRO", msgspec.json.encode(record(field(name, "string"), name=name)))
    found = verdict(old, new, "FULL")
    assert found is not None
    assert word not in found
    with pytest.raises(InvalidSchema) as refused:
        whole(read(schema("AVRO", msgspec.json.encode(name))))
    assert word not in str(refused.value)
