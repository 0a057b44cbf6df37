"""Pure: the messages in an entry as compaction sees them: opened, and put together again.

Owns: `Opened`, an entry with what has to be known of it (`opened`, `unfolded`); `last_of_keys`,
what a batch says of each of its keys; and `rebuilt`, a batch of which only some messages are left.

Invariants:
1. A survivor of a batch keeps its index and its bytes. Each of the others becomes a message without
   key and payload that is marked `compacted_out`, and `compacted_batch_indexes` of the batch's
   metadata lists the survivors. Size and checksum are made anew; all else stays as it was.
2. What cannot be opened is not judged: `opened` and `unfolded` say None, or `last_of_keys` raises
   `UnreadableMessage`, and whoever asked keeps the entry whole. An encrypted batch is one message.
3. A message that was compacted out before counts no more, neither as a key nor as a survivor.
4. Nothing read here is believed: sizes and counts that do not fit raise `UnreadableMessage`.
5. The steps yield after every `SLICE_MESSAGES`, so that a batch of any size can be worked on in
   slices.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Generator, Iterable
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from magnetar.errors import ProtocolError, UnreadableMessage
from magnetar.wire.compression import Compression, compress, decompress
from magnetar.wire.messages import encode_entry, layout_of
from magnetar.wire.pb import pulsar_pb2 as pb

SLICE_MESSAGES: Final = 500
"""Messages looked at between two turns for others: about half a millisecond."""

LARGE_BYTES: Final = 1024 * 1024
"""From this size on an entry is opened and rebuilt off the event loop."""

_SIZE: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IBB")
"""Of a message that begins with its key: bytes of its metadata, the key's tag, bytes of the key."""
# SingleMessageMetadata: payload_size 0, compacted_out.
_GONE_METADATA: Final = b"\x18\x00\x20\x01"
_GONE: Final = _SIZE.pack(len(_GONE_METADATA)) + _GONE_METADATA
# Tags of SingleMessageMetadata, and the largest digit that is the last of its number.
_KEY: Final = 0x12
_PAYLOAD_SIZE: Final = 0x18
_SEQUENCE_ID: Final = 0x40
_DIGIT: Final = 0x7F
_NUMBER_BYTES: Final = 10
"""Tag and digits of a number that is looked at by hand."""

# No text in UTF-8 has this byte, so keys that are bytes never equal keys that are text.
_BASE64_MARK: Final = b"\xff"


class Chunk(NamedTuple):
    """A part of a message that was too large for one entry."""

    message: str
    """The same for all parts of the message, and for no other message."""
    number: int
    of: int
    """How many there are."""


class Opened(NamedTuple):
    """An entry of which the metadata could be read."""

    metadata: pb.MessageMetadata
    payload: bytes
    """As it is sent; after `unfolded`, decompressed."""

    @property
    def is_batch(self) -> bool:
        """Whether its messages can be told apart: not if it is encrypted."""
        return self.metadata.HasField("num_messages_in_batch") and not self.metadata.encryption_keys

    @property
    def size(self) -> int:
        """How many bytes it takes to open it, as far as it says so itself."""
        return max(len(self.payload), self.metadata.uncompressed_size)

    @property
    def messages(self) -> int:
        """How many messages it has, without those that were compacted out."""
        metadata = self.metadata
        if not self.is_batch:
            return 1
        return len(metadata.compacted_batch_indexes) or metadata.num_messages_in_batch

    @property
    def key(self) -> bytes | None:
        """The key of the entry as a whole."""
        return _key_of(self.metadata)

    @property
    def is_null(self) -> bool:
        """Whether it is one message that deletes its key."""
        metadata = self.metadata
        # Of a payload that is compressed nothing must be left, whatever its frame takes.
        if metadata.compression != pb.NONE and metadata.HasField("uncompressed_size"):
            return metadata.null_value or not metadata.uncompressed_size
        return metadata.null_value or not self.payload

    @property
    def chunk(self) -> Chunk | None:
        """Which part of a large message it is; None: it is a message, or several."""
        metadata = self.metadata
        if metadata.num_chunks_from_msg <= 1:
            return None
        message = f"{metadata.producer_name}/{metadata.uuid}"
        return Chunk(message, metadata.chunk_id, metadata.num_chunks_from_msg)


def opened(entry: bytes) -> Opened | None:
    """Read the metadata of an entry; None: it cannot be read."""
    try:
        layout = layout_of(entry)
        metadata = pb.MessageMetadata.FromString(entry[layout.metadata : layout.payload])
    except (ProtocolError, DecodeError):
        return None
    return Opened(metadata, entry[layout.payload :])


def unfolded(batch: Opened) -> Opened | None:
    """Decompress a batch; None: that cannot be done."""
    metadata = batch.metadata
    try:
        data = decompress(metadata.compression, batch.payload, metadata.uncompressed_size)
    except UnreadableMessage:
        return None
    return Opened(metadata, data)


def last_of_keys(batch: Opened) -> Generator[None, None, dict[bytes, int]]:
    """Find each key of a batch: the index of its last message, or `~index` if that deletes it."""
    # Within a batch the last message of a key is all that counts, so later steps see each key once.
    usual = yield from _usual_keys(batch.payload, batch.metadata.num_messages_in_batch)
    if usual is not None:
        return usual
    found: dict[bytes, int] = {}
    data, at, parse = batch.payload, 0, pb.SingleMessageMetadata.FromString
    count = batch.metadata.num_messages_in_batch
    try:
        for index in range(count):
            start = at + 4
            end = start + _SIZE.unpack_from(data, at)[0]
            said = parse(data[start:end])
            size = said.payload_size
            at = end + size
            if size < 0 or at > len(data):
                raise UnreadableMessage(f"message {index} of a batch goes beyond its end")
            if not said.compacted_out and said.HasField("partition_key"):
                key = said.partition_key.encode()
                if said.partition_key_b64_encoded:
                    key = _BASE64_MARK + key
                found[key] = ~index if said.null_value or not size else index
            if index % SLICE_MESSAGES == SLICE_MESSAGES - 1:
                yield
    except (struct.error, DecodeError) as error:
        raise UnreadableMessage(f"a message of a batch cannot be read: {error}") from error
    if at != len(data):
        raise UnreadableMessage(f"a batch of {count} messages has {len(data) - at} bytes more")
    return found


def _usual_keys(data: bytes, count: int) -> Generator[None, None, dict[bytes, int] | None]:
    """Read messages of the usual form by hand, twice as fast; None: one of them has another form.

    That is a key in ASCII and a payload size, both short, and a sequence id or nothing more.
    """
    found: dict[bytes, int] = {}
    at, head = 0, _HEAD.unpack_from
    try:
        for index in range(count):
            said_bytes, tag, key_bytes = head(data, at)
            tail = at + 6 + key_bytes
            stop = at + 4 + said_bytes
            if tag != _KEY or data[tail] != _PAYLOAD_SIZE:
                return None
            key = data[at + 6 : tail]
            size = data[tail + 1]
            tail += 2
            # Two digits, that is up to 16 KiB.
            if size > _DIGIT:
                if data[tail] > _DIGIT:
                    return None
                size += (data[tail] << 7) - 128
                tail += 1
            # Nothing more; a sequence id of three digits, without a call; or one of any length.
            left = stop - tail
            if left == 4 and data[stop - 1] <= _DIGIT < data[stop - 2] and data[stop - 3] > _DIGIT:
                if data[tail] != _SEQUENCE_ID:
                    return None
            elif left and not _is_number(data, tail, stop):
                return None
            found[key] = index if size else ~index
            at = stop + size
            if index % SLICE_MESSAGES == SLICE_MESSAGES - 1:
                yield
    except (IndexError, struct.error):
        return None
    # Other text is for protobuf to check, and what does not fit is for the general way to tell.
    return found if at == len(data) and b"".join(found).isascii() else None


def _is_number(data: bytes, at: int, stop: int) -> bool:
    """Whether a sequence id and nothing more stands there."""
    # All its digits but the last say that another one follows: so no field is hidden in it.
    left = stop - at
    if data[at] != _SEQUENCE_ID or not 2 <= left <= _NUMBER_BYTES or data[stop - 1] > _DIGIT:
        return False
    return left == 2 or min(data[at + 1 : stop - 1]) > _DIGIT


def rebuilt(batch: Opened, survivors: Collection[int]) -> Generator[None, None, list[bytes] | None]:
    """The messages of a batch without the others; None: the entry stays as it is.

    `packed_entry` makes an entry of them: that takes long for a large batch, and can be done
    elsewhere.
    """
    pieces: list[bytes] = []
    data, at, parse = batch.payload, 0, pb.SingleMessageMetadata.FromString
    wanted, had_others = set(survivors), False
    for index in range(batch.metadata.num_messages_in_batch):
        start = at + 4
        end = start + int(_SIZE.unpack_from(data, at)[0])
        said = parse(data[start:end])
        following = end + said.payload_size
        if index in wanted:
            pieces.append(data[at:following])
        else:
            had_others = had_others or not said.compacted_out
            pieces.append(_GONE)
        at = following
        if index % SLICE_MESSAGES == SLICE_MESSAGES - 1:
            yield
    # A producer may have written a list of its own: what is kept must not say what is not so.
    if not had_others and set(batch.metadata.compacted_batch_indexes) in (set(), wanted):
        return None
    return pieces


def packed_entry(
    entry: bytes,
    metadata: pb.MessageMetadata,
    pieces: Iterable[bytes],
    survivors: Iterable[int],
) -> bytes:
    """The entry with what `rebuilt` left: compressed as before, its size and checksum made anew."""
    said = pb.MessageMetadata()
    said.CopyFrom(metadata)
    del said.compacted_batch_indexes[:]
    said.compacted_batch_indexes.extend(sorted(survivors))
    payload = b"".join(pieces)
    if said.compression != pb.NONE or said.HasField("uncompressed_size"):
        said.uncompressed_size = len(payload)
    layout = layout_of(entry)
    # What a broker put before the message stays there.
    before = b"" if layout.broker_entry < 0 else entry[: _broker_end(entry, layout.broker_entry)]
    return before + encode_entry(said, compress(Compression(said.compression), payload))


def last_index(entry: bytes) -> int:
    """The index of the last message of an entry that is there; -1: it is no batch."""
    found = opened(entry)
    if found is None or not found.metadata.HasField("num_messages_in_batch"):
        return -1
    last = found.metadata.num_messages_in_batch - 1
    return max((each for each in _listed(found.metadata) if each <= last), default=last)


def survivors_of(entry: bytes, messages: int) -> int | None:
    """The set of messages of a batch that are there, a bit each; None: all of them."""
    found = opened(entry)
    if found is None or not found.metadata.compacted_batch_indexes:
        return None
    survivors = 0
    for index in _listed(found.metadata):
        # As many as its bytes may hold, whatever it says: an index costs a bit of memory each.
        survivors |= 1 << index if index < messages else 0
    return survivors or None


def _listed(metadata: pb.MessageMetadata) -> Iterable[int]:
    return (index for index in metadata.compacted_batch_indexes if index >= 0)


def _key_of(metadata: pb.MessageMetadata) -> bytes | None:
    if not metadata.HasField("partition_key"):
        return None
    key = metadata.partition_key.encode()
    return _BASE64_MARK + key if metadata.partition_key_b64_encoded else key


def _broker_end(entry: bytes, start: int) -> int:
    return start + int(_SIZE.unpack_from(entry, start - _SIZE.size)[0])
