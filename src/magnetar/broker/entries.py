"""Pure: what the broker needs to know of an entry, read from its metadata once and when asked.

Owns: `EntryView`; `may_be_batch` and `wrong_count`, which judge how many messages a send claims;
`may_be_delayed`, which judges whether one has a time of delivery; and `publish_time_of` for the
search by time.

Invariants:
1. The metadata is parsed at most once, and the payload behind it is never looked at.
2. An entry has at most as many messages as its bytes could hold, whatever its client claims.
3. An entry whose metadata cannot be read is still an entry: one message without a key, `readable`
   is False, and it is delivered like others (its consumer reports and acknowledges it).
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from magnetar.errors import NotAllowed, RemoteProtocolError
from magnetar.ledger.api import Entry
from magnetar.model.hashing import HASH_MAX, bucket_hash, key_hash
from magnetar.model.ids import Position
from magnetar.wire.messages import Send, TxnId, metadata_of
from magnetar.wire.pb import pulsar_pb2 as pb

NO_MARKER: Final = -1

UNPLACED: Final = Position(0, 0)
"""The position of a view that only the metadata of an entry is asked of."""

BATCH_SIZE_TAG: Final = b"\x58"
"""The byte with which field 11 (num_messages_in_batch, a number) begins in MessageMetadata."""

Finds: TypeAlias = Callable[[bytes, int, int], re.Match[bytes] | None]
"""Searches between two places."""

# Field 19 (deliver_at_time, a number) begins with these in MessageMetadata.
_finds_delay: Final = re.compile(rb"\x98\x01").search
_finds_batch: Final = re.compile(re.escape(BATCH_SIZE_TAG)).search

# How an entry begins: magic number and CRC-32C, if its client sent them; the metadata's size.
_CHECKSUM_MAGIC: Final = b"\x0e\x01"
_CHECKSUM_BYTES: Final = 6
_SIZE_BYTES: Final = 4

# A message of a batch has its size (4 bytes) and metadata of at least one field.
_MESSAGE_BYTES_MIN: Final = 5

# The most that these can make of a byte, by their formats; ZSTD: blocks of 128 KiB in 4 bytes.
_UNFOLDS: Final[dict[int, int]] = {pb.LZ4: 255, pb.ZLIB: 1032, pb.SNAPPY: 64, pb.ZSTD: 32_768}

# Known by identity, because metadata may also be empty and readable.
_UNREADABLE: Final = pb.MessageMetadata()


class EntryView:
    """One entry of the log, as dispatch and replay see it."""

    __slots__ = ("_hash", "_metadata", "open_indexes", "payload", "position")

    def __init__(self, position: Position, payload: bytes, open_indexes: int | None = None) -> None:
        self.position = position
        self.payload = payload
        """headers_and_payload, as it is stored and sent."""
        self.open_indexes = open_indexes
        """Of a partly acknowledged batch: set bits are messages still to be delivered."""
        self._metadata: pb.MessageMetadata | None = None
        self._hash: int | None = None

    @classmethod
    def of(cls, entry: Entry, open_indexes: int | None = None) -> EntryView:
        return cls(entry.position, entry.payload, open_indexes)

    @property
    def metadata(self) -> pb.MessageMetadata:
        if self._metadata is None:
            try:
                self._metadata = metadata_of(self.payload)
            except RemoteProtocolError:
                self._metadata = _UNREADABLE
        return self._metadata

    @property
    def readable(self) -> bool:
        return self.metadata is not _UNREADABLE

    @property
    def num_messages(self) -> int:
        # A client may claim anything; an entry without a message could never be acknowledged, and
        # one of billions would use up the permits of all consumers.
        claimed: int = self.metadata.num_messages_in_batch
        return 1 if claimed < 2 else min(claimed, self.messages_max)

    @property
    def messages_max(self) -> int:
        """The number of messages that its bytes could be at most."""
        size, metadata = len(self.payload), self.metadata
        if metadata.compression != pb.NONE:
            # The size that it unfolds to is claimed as well.
            unfolded = size * _UNFOLDS.get(metadata.compression, 1)
            size = max(size, min(metadata.uncompressed_size, unfolded))
        return max(size // _MESSAGE_BYTES_MIN, 1)

    @property
    def is_batch(self) -> bool:
        return self.metadata.HasField("num_messages_in_batch")

    @property
    def publish_time(self) -> int:
        return self.metadata.publish_time

    @property
    def deliver_at(self) -> int | None:
        """When it is to be delivered, in ms; None: at once."""
        metadata = self.metadata
        return metadata.deliver_at_time if metadata.HasField("deliver_at_time") else None

    # --- its producer

    @property
    def producer_name(self) -> str:
        return self.metadata.producer_name

    @property
    def sequence_id(self) -> int:
        return self.metadata.sequence_id

    @property
    def highest_sequence_id(self) -> int:
        """The last sequence id of a batch whose producer says so, else its only one."""
        return max(self.metadata.highest_sequence_id, self.metadata.sequence_id)

    # --- its key

    @property
    def key(self) -> bytes | None:
        """The ordering key, else the key, as bytes."""
        metadata = self.metadata
        # Pulsar's sticky key: an ordering key wins, so that messages can be routed by one key and
        # ordered by another.
        if metadata.HasField("ordering_key"):
            return metadata.ordering_key
        if not metadata.HasField("partition_key"):
            return None
        key = metadata.partition_key.encode()
        if metadata.partition_key_b64_encoded:
            try:
                return b64decode(key, validate=True)
            except binascii.Error:
                return key  # it is no base64: any fixed reading of it keeps the order of the key
        return key

    @property
    def key_hash(self) -> int:
        """The 32-bit hash of its key; without one every send has a key of its own."""
        if self._hash is None:
            key = self.key
            if key is None:
                # As Pulsar does it: messages without a key are spread, and one that comes again has
                # the same hash.
                key = f"{self.metadata.producer_name}-{self.metadata.sequence_id}".encode()
            self._hash = key_hash(key)
        return self._hash

    @property
    def bucket_hash(self) -> int:
        """Where it stands on the ring of entry buckets: all its messages are of one bucket.

        A producer that batches by bucket says so; else its key tells. Without one it is 0.
        """
        metadata = self.metadata
        if metadata.HasField("entry_hash_min"):
            return min(metadata.entry_hash_min, HASH_MAX)  # a client may claim anything
        return 0 if self.key is None else bucket_hash(self.key_hash)

    # --- chunks, markers, transactions

    @property
    def is_chunk(self) -> bool:
        return self.metadata.num_chunks_from_msg > 1

    @property
    def is_last_chunk(self) -> bool:
        """True also of a message that is not chunked."""
        metadata = self.metadata
        return metadata.num_chunks_from_msg <= 1 or (
            metadata.chunk_id == metadata.num_chunks_from_msg - 1
        )

    @property
    def marker_type(self) -> int:
        """What a broker wrote here for itself; NO_MARKER for messages of clients."""
        metadata = self.metadata
        return metadata.marker_type if metadata.HasField("marker_type") else NO_MARKER

    @property
    def is_marker(self) -> bool:
        return self.metadata.HasField("marker_type")

    @property
    def txn_id(self) -> TxnId | None:
        metadata = self.metadata
        # Half an id is none: both fields are needed to find the coordinator and the transaction.
        if metadata.HasField("txnid_most_bits") and metadata.HasField("txnid_least_bits"):
            return TxnId(metadata.txnid_most_bits, metadata.txnid_least_bits)
        return None


def _may_have_field(finds: Finds, payload: bytes) -> bool:
    """Whether the metadata of an entry may have a field; found without parsing it.

    Metadata without the bytes that begin the field cannot have the field.
    """
    # Nearly always: a checksum (14 begins the magic number), and metadata of less than 64 KiB. This
    # is once per entry, so the general way has its own function.
    if len(payload) > 9 and payload[0] == 14 and not payload[6] and not payload[7]:
        return finds(payload, 10, 10 + payload[9] + (payload[8] << 8)) is not None
    return finds(payload, *_metadata_span(payload)) is not None


may_be_batch: Final[Callable[[bytes], bool]] = partial(_may_have_field, _finds_batch)
"""Whether an entry may say how many messages it has."""

may_be_delayed: Final[Callable[[bytes], bool]] = partial(_may_have_field, _finds_delay)
"""Whether an entry may say when it is to be delivered."""


def _metadata_span(payload: bytes) -> tuple[int, int]:
    """Where the metadata of an entry of any form begins and ends."""
    start = _CHECKSUM_BYTES if payload.startswith(_CHECKSUM_MAGIC) else 0
    body = start + _SIZE_BYTES
    return body, body + int.from_bytes(payload[start:body], "big")


def may_have_batches(payloads: Sequence[bytes]) -> bool:
    """Whether some entry may say how many messages it has (`may_be_batch`)."""
    return _may_some(_finds_batch, may_be_batch, payloads)


def may_have_delays(payloads: Sequence[bytes]) -> bool:
    """Whether some entry may say when it is to be delivered (`may_be_delayed`)."""
    return _may_some(_finds_delay, may_be_delayed, payloads)


def _may_some(finds: Finds, judge: Callable[[bytes], bool], payloads: Sequence[bytes]) -> bool:
    try:
        for each in payloads:
            # As `judge` does it, in full and without a call, for this is once per entry. Those of a
            # rare form are left to it.
            if (
                finds(each, 10, 10 + each[9] + (each[8] << 8)) or each[0] != 14 or each[6] | each[7]
            ) and judge(each):
                return True
    except IndexError:  # one is too short for a checksum
        return any(map(judge, payloads))
    return False


def wrong_count(send: Send) -> NotAllowed | None:
    """Why the number of messages that a send claims cannot be; None: it can."""
    count = send.num_messages
    # One message, and nothing says otherwise: nearly all sends that are no batch.
    if count == 1 and not may_be_batch(send.headers_and_payload):
        return None
    view = EntryView(UNPLACED, send.headers_and_payload)
    claimed: int = view.metadata.num_messages_in_batch
    if claimed == count and 1 <= count <= view.messages_max:
        return None
    if claimed != count:
        what = f"{count} messages in its command and {claimed} in its metadata"
    else:
        what = f"{count} messages in {len(send.headers_and_payload)} bytes"
    return NotAllowed(
        f"message {send.sequence_id} of producer {send.producer_id} claims {what}",
        hint="a batch names the number of its messages, 1 or more, in both",
    )


def publish_time_of(payload: bytes) -> int:
    """The publish time of a stored entry, as `ManagedLedger.find_by_time` asks for it."""
    return EntryView(Position(0, 0), payload).publish_time
