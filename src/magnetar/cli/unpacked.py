"""The messages inside an entry: batches opened, chunks put together, zlib undone.

Owns: `unpacked`, for the verb `consume`. Payloads that cannot be opened here (encrypted, or
compressed in a way that the standard library does not know) are shown as a note.

Invariants:
1. At most `_CHUNKED_MAX` incomplete chunked messages are kept; the oldest is given up first.
2. Sizes that a message claims are checked against what is there before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from magnetar.client.message.message import AnyMessageId, Message, ScalableMessageId
from magnetar.client.message.message_ids import plain_id
from magnetar.errors import RemoteProtocolError
from magnetar.wire.messages import Delivered, metadata_of, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

_CHUNKED_MAX: Final = 10
# A claim of more is not believed: a few bytes of zlib can become gigabytes (invariant 2).
_UNCOMPRESSED_MAX: Final = 128 * 1024 * 1024
_SIZE: Final = struct.Struct(">I")


@dataclass(slots=True)
class UnpackedMessage:
    """One message, as it is printed."""

    id: str
    index: int
    payload: bytes
    publish_time: int
    key: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    redelivery_count: int = 0
    is_open: bool = True
    """False: it was acknowledged before, but others of its batch were not."""
    permits: int = 1
    """More for a batch that could not be opened."""
    note: str = ""
    """Why there is no text."""
    earlier_chunks: tuple[pb.MessageIdData, ...] = ()

    @property
    def text(self) -> str | None:
        if self.note:
            return None
        try:
            return self.payload.decode()
        except UnicodeDecodeError:
            self.note = f"{len(self.payload)} bytes"
            return None


def id_text(message_id: AnyMessageId) -> str:
    """The id as verbs print it: segment, ledger, entry, and the index in a batch if it has one."""
    plain = plain_id(message_id)
    parts = [message_id.segment_id] if isinstance(message_id, ScalableMessageId) else []
    parts += plain.position
    if plain.batch_index >= 0:
        parts.append(plain.batch_index)
    return ":".join(map(str, parts))


def received(message: Message[bytes]) -> UnpackedMessage:
    """A message that our client has unpacked."""
    trouble = message.trouble
    return UnpackedMessage(
        id=id_text(message.id),
        index=0,
        payload=message.data,
        publish_time=message.publish_time_ms,
        key=message.key,
        properties=message.properties,
        redelivery_count=message.redelivery_count,
        note="" if trouble is None else str(trouble),
    )


class Chunks:
    """Chunked messages that are not complete yet."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[list[pb.MessageIdData], list[bytes]]] = {}

    def add(
        self, metadata: pb.MessageMetadata, message_id: pb.MessageIdData, payload: bytes
    ) -> tuple[bytes, tuple[pb.MessageIdData, ...]] | None:
        """The whole payload and where the earlier chunks stand, once the last one is there."""
        # A new one; what was begun and never ended makes room (invariant 1).
        if metadata.chunk_id == 0:
            while len(self._begun) >= _CHUNKED_MAX:
                del self._begun[next(iter(self._begun))]
            self._begun[metadata.uuid] = ([], [])
        ids, pieces = self._begun.get(metadata.uuid, ([], []))
        if metadata.chunk_id != len(pieces) or metadata.uuid not in self._begun:
            return None  # its beginning went to somebody else, or came twice
        pieces.append(payload)
        # Kept until the last one is there: all chunks are acknowledged together.
        if metadata.chunk_id < metadata.num_chunks_from_msg - 1:
            ids.append(message_id)
            return None
        del self._begun[metadata.uuid]
        return b"".join(pieces), tuple(ids)


def unpacked(delivered: Delivered, chunks: Chunks) -> list[UnpackedMessage]:
    """The messages of an entry; none for a chunk that is not the last."""
    metadata = metadata_of(delivered.headers_and_payload)
    payload = delivered.headers_and_payload[payload_offset(delivered.headers_and_payload) :]
    earlier: tuple[pb.MessageIdData, ...] = ()
    if metadata.num_chunks_from_msg > 1:
        whole = chunks.add(metadata, delivered.body.message_id, payload)
        if whole is None:
            return []
        payload, earlier = whole
    payload, note = _opened(metadata, payload)
    # A batch that cannot be opened is shown as one message, but has used the permits of all.
    if metadata.HasField("num_messages_in_batch") and not note:
        return _batch(delivered, metadata, payload)
    single = _message(delivered, metadata, payload)
    single.note, single.earlier_chunks = note, earlier
    single.permits = max(metadata.num_messages_in_batch, 1)
    return [single]


def _opened(metadata: pb.MessageMetadata, payload: bytes) -> tuple[bytes, str]:
    """The payload as its producer had it, or as it is and why."""
    # Encrypted last by its producer, so it cannot be decompressed either.
    if metadata.encryption_keys:
        return payload, f"{len(payload)} bytes, encrypted"
    kind = metadata.compression
    if kind == pb.NONE:
        return payload, ""
    if kind != pb.ZLIB or metadata.uncompressed_size > _UNCOMPRESSED_MAX:
        return payload, f"{len(payload)} bytes, compressed with {pb.CompressionType.Name(kind)}"
    try:
        return zlib.decompressobj().decompress(payload, max(metadata.uncompressed_size, 1)), ""
    except zlib.error as error:
        return payload, f"{len(payload)} bytes that zlib cannot open: {error}"


def _batch(
    delivered: Delivered, metadata: pb.MessageMetadata, payload: bytes
) -> list[UnpackedMessage]:
    found = []
    for index, (single, data) in enumerate(split_batch(payload, metadata.num_messages_in_batch)):
        message = _message(delivered, single, data)
        message.index = index
        message.id = f"{message.id}:{index}"
        message.publish_time = metadata.publish_time
        message.is_open = _is_open(delivered.body.ack_set, index)
        found.append(message)
    return found


def split_batch(payload: bytes, count: int) -> list[tuple[pb.SingleMessageMetadata, bytes]]:
    """The messages of a batch that is neither compressed nor encrypted any more."""
    found = []
    at = 0
    for index in range(count):
        if at + _SIZE.size > len(payload):
            raise RemoteProtocolError(f"a batch ends before its message {index}")
        (size,) = _SIZE.unpack_from(payload, at)
        start = at + _SIZE.size + size
        try:
            single = pb.SingleMessageMetadata.FromString(payload[at + _SIZE.size : start])
        except DecodeError as error:
            raise RemoteProtocolError(f"message {index} of a batch: {error}") from error
        end = start + single.payload_size
        # Sizes come from the producer: a negative or too large one is damage (invariant 2).
        if not start <= end <= len(payload):
            raise RemoteProtocolError(f"message {index} of a batch is larger than the batch")
        found.append((single, payload[start:end]))
        at = end
    return found


def _message(
    delivered: Delivered, metadata: pb.MessageMetadata | pb.SingleMessageMetadata, payload: bytes
) -> UnpackedMessage:
    where = delivered.body.message_id
    return UnpackedMessage(
        id=f"{where.ledgerId}:{where.entryId}",
        index=0,
        payload=payload,
        publish_time=metadata.publish_time if isinstance(metadata, pb.MessageMetadata) else 0,
        key=metadata.partition_key if metadata.HasField("partition_key") else None,
        properties={pair.key: pair.value for pair in metadata.properties},
        redelivery_count=delivered.body.redelivery_count,
    )


def _is_open(ack_set: Sequence[int], index: int) -> bool:
    if not ack_set:
        return True
    word, bit = divmod(index, 64)
    return word < len(ack_set) and bool(ack_set[word] >> bit & 1)
