"""Pure: messages put into entries, one by one or in batches, and taken out again.

Owns: `Outgoing`, a message on its way out; `OutgoingEntry`, what one SEND carries;
`PayloadCipher`, what encrypts it; `OpenBatches`, the batches of one segment that are being filled;
`open_entry` and `messages_in` for the way back.

In a batch each message is `u32 size, SingleMessageMetadata, payload`; all of them together are
compressed as one payload, and encrypted as one. `num_messages_in_batch` in the metadata says that
it is a batch.

Invariants:
1. `messages_in(open_entry(entry))` are the messages that the entry was made from, in their order.
2. Messages of one entry bucket keep their order, and no batch holds messages of two buckets. The
   batches of a segment are taken all at once, ordered by their last sequence ids, so that these
   grow from SEND to SEND: dedup in the broker takes a smaller one for a repetition.
3. All messages of a batch have one transaction and one schema version. Messages that the broker
   must see on their own (a delay, a choice of clusters) are never in a batch.
4. No batch grows past its limits, but for one message that alone is larger.
5. Nothing read here is believed: sizes and counts that do not fit raise `UnreadableMessage`.

Relies on: producers sending again what one batch held in batches of nothing else; part of a batch
is then either stored or not, and dedup can tell by its sequence id.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from magnetar.client.message.routing import entry_bucket_hash
from magnetar.errors import ProtocolError, UnreadableMessage
from magnetar.wire.compression import (
    UNCOMPRESSED_BYTES_MAX,
    Compression,
    compress,
    decompress,
)
from magnetar.wire.frames import varint
from magnetar.wire.messages import CHECKSUM_BYTES, MAGIC_CHECKSUM, TxnId, encode_entry, layout_of
from magnetar.wire.pb import pulsar_pb2 as pb

# The limits of the Java client; the delay is the longest that a message waits for others.
BATCH_MESSAGES_MAX: Final = 1000
BATCH_BYTES_MAX: Final = 128 * 1024
BATCH_DELAY_S: Final = 0.001

_SIZE: Final = struct.Struct(">I")
_CHECKSUM_MAGIC: Final = MAGIC_CHECKSUM.to_bytes(2, "big")
_PLAIN_START: Final = CHECKSUM_BYTES + _SIZE.size
"""Where metadata begins, if the broker put nothing before the entry."""
# Tags of MessageMetadata: a field's number and wire type, as one byte.
_PRODUCER_NAME: Final = 0x0A
_SEQUENCE_ID: Final = 0x10
_PUBLISH_TIME: Final = 0x18
_PARTITION_KEY: Final = 0x32
_VARINT_BYTES: Final = 9
_WIRE_COMPRESSION: Final = {
    Compression.LZ4: pb.LZ4,
    Compression.ZLIB: pb.ZLIB,
    Compression.ZSTD: pb.ZSTD,
    Compression.SNAPPY: pb.SNAPPY,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """A message as a producer sends it: its value is bytes by now."""

    payload: bytes
    sequence_id: int
    key: str | bytes | None = None
    ordering_key: bytes | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_time_ms: int = 0
    deliver_at_ms: int = 0
    replicate_to: Sequence[str] = ()
    null_value: bool = False
    schema_version: bytes = b""
    txn: TxnId | None = None

    @property
    def may_be_batched(self) -> bool:
        # Invariant 3: brokers delay and replicate entries, not messages inside of one.
        return not self.deliver_at_ms and not self.replicate_to

    @property
    def size(self) -> int:
        """About what it takes in a batch and in memory."""
        size = len(self.payload) + (0 if self.key is None else len(self.key))
        for name, text in self.properties.items():
            size += len(name) + len(text)
        return size


class PayloadCipher(Protocol):
    """The encryption of the payloads of a producer."""

    @property
    def overhead(self) -> int:
        """The bytes that an entry grows by, at most."""
        ...

    def encrypt(self, metadata: pb.MessageMetadata, payload: bytes) -> bytes:
        """The payload as it is sent, and how that was done told in the metadata."""
        ...


class OutgoingEntry(NamedTuple):
    """The content of one SEND; the fields before the bytes are those of its command."""

    sequence_id: int
    highest_sequence_id: int | None
    """Of a batch whose first sequence id is another one."""
    num_messages: int
    txn: TxnId | None
    headers_and_payload: bytes


@dataclass(frozen=True, slots=True)
class Stamp:
    """The facts that the entries of a producer have in common at one moment."""

    producer_name: str
    publish_time_ms: int
    compression: Compression = Compression.NONE
    cipher: PayloadCipher | None = None
    """None: payloads are not encrypted."""


# --- the way out


def single_entry(message: Outgoing, stamp: Stamp) -> OutgoingEntry:
    """An entry of one message, not as a batch."""
    metadata = metadata_for(message, stamp)
    payload = packed(message.payload, metadata, stamp.compression)
    data = sealed_entry(metadata, payload, stamp.cipher)
    return OutgoingEntry(message.sequence_id, None, 1, message.txn, data)


def sealed_entry(
    metadata: pb.MessageMetadata, payload: bytes, cipher: PayloadCipher | None
) -> bytes:
    """The bytes of an entry whose payload is compressed by now; encrypted, if it is to be."""
    if cipher is not None:
        payload = cipher.encrypt(metadata, payload)
    return encode_entry(metadata, payload)


def metadata_for(message: Outgoing, stamp: Stamp) -> pb.MessageMetadata:
    """The metadata of a message that is an entry of its own, but for its payload."""
    metadata = _common_metadata(message, stamp)
    if message.properties:
        _put_properties(metadata, message.properties)
    if message.event_time_ms:
        metadata.event_time = message.event_time_ms
    if message.deliver_at_ms:
        metadata.deliver_at_time = message.deliver_at_ms
    if message.replicate_to:
        metadata.replicate_to.extend(message.replicate_to)
    if message.null_value:
        metadata.null_value = True
    _put_keys(metadata, message)
    return metadata


def packed(payload: bytes, metadata: pb.MessageMetadata, compression: Compression) -> bytes:
    """The payload compressed, and that told in the metadata."""
    if compression is Compression.NONE:
        return payload
    metadata.compression = _WIRE_COMPRESSION[compression]
    metadata.uncompressed_size = len(payload)
    return compress(compression, payload)


class OpenBatch:
    """The messages of one entry bucket that wait to be sent."""

    __slots__ = ("messages", "size")

    def __init__(self) -> None:
        self.messages: list[Outgoing] = []
        self.size = 0

    def add(self, message: Outgoing) -> None:
        self.messages.append(message)
        self.size += message.size


class OpenBatches:
    """The batches of one segment (or partition) that are being filled.

    With `bucket_splits` (those of the segment) there is a batch per entry bucket, and each entry
    says which hashes it holds. With None, which is for regular topics, there is one batch; or with
    `by_key` one per key, as consumers of a Key_Shared subscription need it.
    """

    def __init__(
        self,
        *,
        bucket_splits: Sequence[int] | None,
        by_key: bool = False,
        messages_max: int = BATCH_MESSAGES_MAX,
        bytes_max: int = BATCH_BYTES_MAX,
    ) -> None:
        self._splits = bucket_splits
        self._by_key = by_key
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        # One batch per bucket, filled side by side; the limits hold for all of them together,
        # because all are sent together (invariant 2).
        self._batches: dict[object, OpenBatch] = {}
        self._shared: tuple[TxnId | None, bytes] = (None, b"")
        self.messages = 0
        self.size = 0

    @property
    def is_full(self) -> bool:
        return self.messages >= self._messages_max or self.size >= self._bytes_max

    def takes(self, message: Outgoing) -> bool:
        """Whether `add` may be called before `take`."""
        if not message.may_be_batched:
            return False
        # An empty batch takes any message, however large (invariant 4); else it must fit by size,
        # and share transaction and schema version (invariant 3).
        return not self.messages or (
            self.messages < self._messages_max
            and self.size + message.size <= self._bytes_max
            and self._shared == (message.txn, message.schema_version)
        )

    def add(self, message: Outgoing) -> None:
        if not self.messages:
            self._shared = (message.txn, message.schema_version)
        bucket = self.bucket_of(message)
        batch = self._batches.get(bucket)
        if batch is None:
            batch = self._batches[bucket] = OpenBatch()
        batch.add(message)
        self.messages += 1
        self.size += message.size

    def take(self) -> list[list[Outgoing]]:
        """What gathered, a list per entry, in the order in which they must be sent."""
        batches = [batch.messages for batch in self._batches.values()]
        if len(batches) > 1:
            # Invariant 2: dedup in the broker compares the last sequence id of an entry with the
            # highest it has seen, so an entry with a smaller one would be dropped as a repetition.
            batches.sort(key=lambda messages: messages[-1].sequence_id)
        self._batches = {}
        self.messages = self.size = 0
        return batches

    def bucket_of(self, message: Outgoing) -> object:
        """Messages of one bucket go into one entry."""
        # A scalable topic; a regular one with Key_Shared consumers; else everything in one batch.
        if self._splits:
            place = entry_bucket_hash(message.key, message.ordering_key)
            return bisect_right(self._splits, place)
        if self._by_key:
            return message.key if message.ordering_key is None else message.ordering_key
        return None


def batch_entry(
    messages: Sequence[Outgoing], stamp: Stamp, *, hashes: bool = False
) -> OutgoingEntry:
    """An entry of one or more messages, as a batch.

    `hashes`: say which positions among the entry buckets it holds.
    """
    # The span of hashes lets brokers dispatch the entry by key without opening it.
    first, last = messages[0], messages[-1]
    places = None
    if hashes:
        found = {entry_bucket_hash(each.key, each.ordering_key) for each in messages}
        places = min(found), max(found)
    shared = _common_metadata(first, stamp)
    # A key that all share stands in the entry's metadata too, where brokers look for it.
    if all(each.key == first.key and each.ordering_key == first.ordering_key for each in messages):
        _put_keys(shared, first)
    return filled_entry(
        shared,
        b"".join(_singles(messages)),
        stamp.compression,
        num_messages=len(messages),
        sequence_ids=(first.sequence_id, last.sequence_id),
        places=places,
        txn=first.txn,
        cipher=stamp.cipher,
    )


def filled_entry(
    metadata: pb.MessageMetadata,
    payload: bytes,
    compression: Compression,
    *,
    num_messages: int,
    sequence_ids: tuple[int, int],
    places: tuple[int, int] | None,
    txn: TxnId | None,
    cipher: PayloadCipher | None = None,
) -> OutgoingEntry:
    """The entry of a batch: `metadata` says what its messages have in common.

    `sequence_ids`: the first and the last; `places`: the lowest and highest among entry buckets.
    """
    sequence_id, last = sequence_ids
    highest = None if last == sequence_id else last
    metadata.num_messages_in_batch = num_messages
    metadata.sequence_id = sequence_id
    if highest is not None:
        metadata.highest_sequence_id = highest
    if places is not None:
        metadata.entry_hash_min, metadata.entry_hash_max = places
    data = sealed_entry(metadata, packed(payload, metadata, compression), cipher)
    return OutgoingEntry(sequence_id, highest, num_messages, txn, data)


def shared_metadata(message: Outgoing, stamp: Stamp) -> pb.MessageMetadata:
    """What the messages of a batch have in common, of which this one has it all."""
    metadata = _common_metadata(message, stamp)
    _put_keys(metadata, message)
    return metadata


def _singles(messages: Iterable[Outgoing]) -> list[bytes]:
    pieces: list[bytes] = []
    for message in messages:
        encoded = single_metadata(message)
        pieces += (_SIZE.pack(len(encoded)), encoded, message.payload)
    return pieces


def single_metadata(message: Outgoing) -> bytes:
    """SingleMessageMetadata, by hand where there is little to say: half of a batch's cost."""
    # The common message has a key that is text, or none, and nothing else to say. Tags are those of
    # SingleMessageMetadata: payload_size 0x18, sequence_id 0x40, partition_key 0x12.
    key = message.key
    if (
        message.properties
        or message.event_time_ms
        or message.null_value
        or message.ordering_key is not None
        or isinstance(key, bytes)
    ):
        return _rare_single_metadata(message)
    encoded = b"\x18" + varint(len(message.payload)) + b"\x40" + varint(message.sequence_id)
    if key is None:
        return encoded
    text = key.encode()
    return b"\x12" + varint(len(text)) + text + encoded


def _rare_single_metadata(message: Outgoing) -> bytes:
    metadata = pb.SingleMessageMetadata(
        payload_size=len(message.payload), sequence_id=message.sequence_id
    )
    _put_properties(metadata, message.properties)
    if message.event_time_ms:
        metadata.event_time = message.event_time_ms
    if message.null_value:
        metadata.null_value = True
    _put_keys(metadata, message)
    return metadata.SerializeToString()


def _common_metadata(message: Outgoing, stamp: Stamp) -> pb.MessageMetadata:
    metadata = pb.MessageMetadata(
        producer_name=stamp.producer_name,
        sequence_id=message.sequence_id,
        publish_time=stamp.publish_time_ms,
    )
    if message.schema_version:
        metadata.schema_version = message.schema_version
    if message.txn is not None:
        metadata.txnid_least_bits = message.txn.least
        metadata.txnid_most_bits = message.txn.most
    return metadata


def _put_keys(metadata: pb.MessageMetadata | pb.SingleMessageMetadata, message: Outgoing) -> None:
    key = message.key
    if isinstance(key, bytes):
        metadata.partition_key = b64encode(key).decode()
        metadata.partition_key_b64_encoded = True
    elif key is not None:
        metadata.partition_key = key
    if message.ordering_key is not None:
        metadata.ordering_key = message.ordering_key


def _put_properties(
    metadata: pb.MessageMetadata | pb.SingleMessageMetadata, properties: Mapping[str, str]
) -> None:
    for name, text in properties.items():
        metadata.properties.add(key=name, value=text)


# --- the way back


class OpenedEntry(NamedTuple):
    """An entry as a consumer reads it, its payload decompressed."""

    metadata: pb.MessageMetadata
    payload: bytes
    is_batch: bool

    @property
    def num_messages(self) -> int:
        return self.metadata.num_messages_in_batch if self.is_batch else 1


class Single(NamedTuple):
    """One message of a batch."""

    metadata: pb.SingleMessageMetadata
    payload: bytes


def open_entry(
    headers_and_payload: bytes, *, size_max: int = UNCOMPRESSED_BYTES_MAX
) -> OpenedEntry:
    """Read an entry that is not encrypted, and decompress its payload unless it is a chunk."""
    metadata, payload = read_entry(headers_and_payload)
    if metadata.encryption_keys:
        hint = "only consumers decrypt, if they are given a key_reader"
        raise UnreadableMessage("a message is encrypted", hint=hint)
    return unfolded(metadata, payload, size_max=size_max)


def read_entry(headers_and_payload: bytes) -> tuple[pb.MessageMetadata, bytes]:
    """The metadata of an entry, and its payload as it is."""
    try:
        layout = layout_of(headers_and_payload)
        metadata = pb.MessageMetadata.FromString(
            headers_and_payload[layout.metadata : layout.payload]
        )
    except (ProtocolError, DecodeError) as error:
        raise UnreadableMessage(f"an entry has broken headers: {error}") from error
    return metadata, headers_and_payload[layout.payload :]


def unfolded(
    metadata: pb.MessageMetadata, payload: bytes, *, size_max: int = UNCOMPRESSED_BYTES_MAX
) -> OpenedEntry:
    """An entry with its payload decompressed, unless it is a chunk."""
    # The checks of invariant 5, in order: an empty batch, and a size that does not fit.
    is_batch = metadata.HasField("num_messages_in_batch")
    if is_batch and metadata.num_messages_in_batch < 1:
        raise UnreadableMessage(f"a batch of {metadata.num_messages_in_batch} messages")
    # A chunk is part of a compressed payload, and can be unfolded only when all of them are there.
    if metadata.num_chunks_from_msg <= 1 and metadata.compression:
        payload = unpacked(payload, metadata, size_max=size_max)
    return OpenedEntry(metadata, payload, is_batch)


def plain_layout(headers_and_payload: bytes) -> tuple[int, int] | None:
    """Where metadata and payload of an entry begin that is one message, as it is.

    Its metadata has nothing but a producer, a number, a time, and perhaps a key in ASCII; None: it
    has more, or it is not worth a try. Protobuf can read what this has looked through.
    """
    data = headers_and_payload
    try:
        # Walks the fields in the order in which every client writes them; the first surprise ends
        # it, and protobuf reads the entry instead. Lengths of one byte only: longer ones are not
        # worth the code.
        at = _PLAIN_START
        stop = at + _SIZE.unpack_from(data, at - _SIZE.size)[0]
        if not data.startswith(_CHECKSUM_MAGIC) or data[at] != _PRODUCER_NAME:
            return None
        texts = at
        at += 2 + data[at + 1]
        texts_end = at
        # Numbers end with the first byte below 0x80; above nine bytes they do not fit a signed 64.
        for tag in (_SEQUENCE_ID, _PUBLISH_TIME):
            if data[at] != tag:
                return None
            start = at = at + 1
            while data[at] > 0x7F:
                at += 1
            at += 1
            if at - start > _VARINT_BYTES:
                return None
        if at != stop and data[at] == _PARTITION_KEY:
            end = at + 2 + data[at + 1]
            if not data[at:end].isascii():
                return None
            at = end
    except (IndexError, struct.error):
        return None
    # Protobuf refuses text that is not UTF-8; ASCII is proof enough that it will not.
    is_plain = at == stop <= len(data) and data[texts:texts_end].isascii()
    return (_PLAIN_START, stop) if is_plain else None


def unpacked(
    payload: bytes, metadata: pb.MessageMetadata, *, size_max: int = UNCOMPRESSED_BYTES_MAX
) -> bytes:
    """What `packed` was given."""
    size = metadata.uncompressed_size
    return decompress(metadata.compression, payload, size, size_max=size_max)


def messages_in(entry: OpenedEntry) -> list[Single]:
    """The messages of a batch, in order."""
    data, at = entry.payload, 0
    parse = pb.SingleMessageMetadata.FromString
    found = []
    try:
        # Every size is checked before it is used (invariant 5): a slice in Python would silently be
        # shorter.
        for _ in range(entry.num_messages):
            start = at + _SIZE.size
            stop = start + _SIZE.unpack_from(data, at)[0]
            if stop > len(data):
                raise UnreadableMessage("a batch ends inside the metadata of a message")
            metadata = parse(data[start:stop])
            at = stop + metadata.payload_size
            if not stop <= at <= len(data):
                raise UnreadableMessage("a batch ends inside the payload of a message")
            found.append(Single(metadata, data[stop:at]))
    except (struct.error, DecodeError) as error:
        raise UnreadableMessage(f"a batch cannot be taken apart: {error}") from error
    return found
