"""What `consume` makes of entries: batches, chunks, compression, damage."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from magnetar.cli.unpacked import Chunks, split_batch, unpacked
from magnetar.cli.verbs.consume import ack_frame
from magnetar.errors import RemoteProtocolError
from magnetar.wire.messages import Delivered, RareDelivered, encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb


def delivered(
    payload: bytes, *, ack_set: Sequence[int] = (), entry: int = 3, **fields: Any
) -> Delivered:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=7, **fields)
    body = pb.CommandMessage(
        consumer_id=1, message_id=pb.MessageIdData(ledgerId=2, entryId=entry), ack_set=ack_set
    )
    return RareDelivered(body, encode_entry(metadata, payload), True)


def batch(*payloads: bytes) -> bytes:
    data = b""
    for number, payload in enumerate(payloads):
        single = pb.SingleMessageMetadata(payload_size=len(payload), partition_key=f"k{number}")
        encoded = single.SerializeToString()
        data += struct.pack(">I", len(encoded)) + encoded + payload
    return data


def test_a_single_message() -> None:
    (message,) = unpacked(delivered(b"hello", partition_key="k"), Chunks())
    assert (message.id, message.text, message.key, message.publish_time) == ("2:3", "hello", "k", 7)
    (message,) = unpacked(delivered(b"\xff\xfe"), Chunks())
    assert (message.text, message.note) == (None, "2 bytes")


def test_a_batch_partly_acknowledged() -> None:
    data = zlib.compress(batch(b"a", b"b", b"c"))
    found = unpacked(
        delivered(
            data,
            ack_set=[0b101],
            num_messages_in_batch=3,
            compression=pb.ZLIB,
            uncompressed_size=len(batch(b"a", b"b", b"c")),
        ),
        Chunks(),
    )
    assert [(each.id, each.text, each.key, each.is_open) for each in found] == [
        ("2:3:0", "a", "k0", True),
        ("2:3:1", "b", "k1", False),
        ("2:3:2", "c", "k2", True),
    ]


def test_what_cannot_be_opened_is_a_note() -> None:
    sealed = delivered(b"???", num_messages_in_batch=4, compression=pb.ZSTD)
    (message,) = unpacked(sealed, Chunks())
    assert (message.text, message.permits) == (None, 4)
    assert "ZSTD" in message.note
    (message,) = unpacked(delivered(b"???", compression=pb.ZLIB), Chunks())
    assert "zlib cannot open" in message.note


def test_chunks_are_put_together() -> None:
    chunks = Chunks()
    for number, piece in enumerate((b"he", b"l")):
        part = delivered(piece, entry=number, uuid="u", chunk_id=number, num_chunks_from_msg=3)
        assert unpacked(part, chunks) == []
    end = delivered(b"lo", entry=2, uuid="u", chunk_id=2, num_chunks_from_msg=3)
    (message,) = unpacked(end, chunks)
    assert message.text == "hello"
    assert [each.entryId for each in message.earlier_chunks] == [0, 1]
    lost = delivered(b"lo", uuid="v", chunk_id=1, num_chunks_from_msg=2)
    assert unpacked(lost, chunks) == []


@pytest.mark.parametrize("cut", range(1, len(batch(b"abc"))))
def test_a_damaged_batch_is_refused(cut: int) -> None:
    with pytest.raises(RemoteProtocolError):
        split_batch(batch(b"abc")[:cut], 1)


def test_an_acknowledgement_names_what_is_still_open() -> None:
    frame = ack_frame(1, [pb.MessageIdData(ledgerId=2, entryId=3)], {63, 64}, 70)
    sent = pb.BaseCommand.FromString(frame[8:]).ack
    assert list(sent.message_id[0].ack_set) == [-(2**63), 1]
