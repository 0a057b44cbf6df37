"""Messages: where each of their fields comes from, and when values are decoded."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
from hypothesis import given

from magnetar.client.message.batch import (
    Outgoing,
    Stamp,
    batch_entry,
    messages_in,
    open_entry,
    single_entry,
)
from magnetar.client.message.message import (
    AnyMessageId,
    Message,
    MessageId,
    ScalableMessageId,
    Unreadable,
)
from magnetar.client.schema import INT8, STRING
from magnetar.errors import UnreadableMessage
from magnetar.model.ids import Position
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.outgoing import MESSAGES, STAMPS


class _Source:
    topic = "topic://t/n/x"
    wire_topic = "segment://t/n/x/0000-ffff-3"

    segment_id = 3

    def handing_out(self, message: Message[Any]) -> None:
        raise AssertionError("nobody hands it out here")

    def handing_out_rows(self, rows: Any, turn: int) -> None:
        raise AssertionError("nobody hands them out here")

    def id_of(self, message_id: MessageId, turn: int) -> AnyMessageId:
        return ScalableMessageId(3, message_id)


def _received(message: Outgoing, stamp: Stamp, *, batched: bool) -> Message[bytes]:
    if batched:
        opened = open_entry(batch_entry([message], stamp).headers_and_payload)
        (found,) = messages_in(opened)
        single, data = found.metadata, found.payload
    else:
        opened = open_entry(single_entry(message, stamp).headers_and_payload)
        single, data = None, opened.payload
    return Message(
        source=_Source(),
        position=Position(5, 7),
        data=data,
        metadata=opened.metadata,
        single=single,
        decode=lambda payload, _: payload,
    )


@given(MESSAGES, STAMPS)
def test_a_message_has_what_was_sent_alone_or_in_a_batch(message: Outgoing, stamp: Stamp) -> None:
    for batched in (False, True):
        found = _received(message, stamp, batched=batched)
        assert found.value == found.data == message.payload
        assert found.size == len(message.payload)
        assert found.properties == message.properties
        assert found.ordering_key == message.ordering_key
        assert found.sequence_id == message.sequence_id
        assert found.event_time_ms == (message.event_time_ms or None)
        assert found.publish_time_ms == stamp.publish_time_ms
        assert found.is_null == message.null_value
        is_text = isinstance(message.key, str)
        assert found.key == (message.key if is_text else None)
        key = message.key.encode() if isinstance(message.key, str) else message.key
        assert found.key_bytes == key
        assert found.topic == "topic://t/n/x"
        assert "5:7" in repr(found)


def test_golden_id() -> None:
    found = _received(Outgoing(payload=b"", sequence_id=0), Stamp("p", 0), batched=False)
    golden = "00000000000000030000000608051007300000000000ffffffffffffffff"
    assert found.id.to_bytes().hex() == golden
    assert ScalableMessageId.from_bytes(bytes.fromhex(golden)) == found.id


@pytest.mark.parametrize(
    ("name", "shown"), [("p-seg-12", "p"), ("p", "p"), ("a-seg-b", "a-seg-b"), ("-seg-1", "")]
)
def test_a_producer_is_known_by_the_name_that_it_was_given(name: str, shown: str) -> None:
    found = _received(Outgoing(payload=b"", sequence_id=0), Stamp(name, 0), batched=True)
    assert found.producer_name == shown


def test_the_rest_of_the_metadata() -> None:
    message = Outgoing(payload=b"", sequence_id=0, schema_version=b"v", txn=TxnId(1, 2))
    found = _received(message, Stamp("p", 0), batched=True)
    assert found.schema_version == b"v"
    assert found.transaction == TxnId(1, 2)
    assert found.replicated_from is None
    plain = _received(Outgoing(payload=b"", sequence_id=0), Stamp("p", 0), batched=False)
    assert plain.transaction is None


def test_a_value_is_decoded_once_and_only_when_it_is_asked_for() -> None:
    calls = []

    def decode(data: bytes, version: bytes) -> str:
        calls.append(version)
        return STRING.decode(data)

    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0)
    message = Message(
        source=_Source(),
        position=Position(1, 1),
        data=b"x",
        metadata=metadata,
        single=None,
        decode=decode,
    )
    assert not calls
    assert message.value == message.value == "x"
    assert calls == [b""]
    broken = Message(
        source=_Source(),
        position=Position(1, 1),
        data=b"xx",
        metadata=metadata,
        single=None,
        decode=lambda data, _: INT8.decode(data),
    )
    assert broken.data == b"xx"
    with pytest.raises(UnreadableMessage):
        _ = broken.value
    metadata.partition_key, metadata.partition_key_b64_encoded = "!", True
    with pytest.raises(UnreadableMessage, match="base64"):
        _ = broken.key_bytes


def test_an_unreadable_message_keeps_nothing_of_its_error_alive() -> None:
    """The frames of a traceback hold the buffers that were being filled."""

    class Buffer:
        pass

    def fail() -> Unreadable:
        buffer = Buffer()
        alive.append(ref(buffer))
        try:
            raise UnreadableMessage("broken", hint="none")
        except UnreadableMessage as error:
            return Unreadable(error)

    alive: list[ref[Buffer]] = []
    stored = fail()
    assert alive[0]() is None
    for _ in range(2):
        with pytest.raises(UnreadableMessage, match="broken"):
            stored(b"", b"")
