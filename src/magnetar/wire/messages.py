"""Messages behind a SEND or MESSAGE command, and the values that a connection hands out.

After the command: `[0x0e02 u32 size BrokerEntryMetadata]? [0x0e01 u32 crc32c]? u32 size
MessageMetadata payload`. The CRC32C is over everything after itself. From the checksum on, these
bytes are what an entry of a ledger holds, verbatim; here they are called headers_and_payload.

Invariants:
1. Nothing here opens a payload: batches, compression and encryption are the clients' affair.
2. A layout that does not hold what it announces raises `RemoteProtocolError`, whoever reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from crc32c import crc32c
from google.protobuf.message import DecodeError, Message

from magnetar.errors import RemoteProtocolError
from magnetar.model.ids import Position
from magnetar.wire.frames import varint
from magnetar.wire.pb import pulsar_pb2 as pb

MAGIC_CHECKSUM: Final = 0x0E01
MAGIC_BROKER_ENTRY: Final = 0x0E02

CHECKSUM: Final = struct.Struct(">HI")
"""The magic number and the CRC32C, or the magic number and the size of broker entry metadata."""

CHECKSUM_BYTES: Final = CHECKSUM.size

_SIZE: Final = struct.Struct(">I")
_MAGIC: Final = struct.Struct(">H")
_METADATA_START: Final = CHECKSUM_BYTES + _SIZE.size


class TxnId(NamedTuple):
    """A transaction as the wire names it."""

    most: int
    least: int


class Send:
    """A SEND as nearly all of them are: what it does not say has its default here."""

    __slots__ = ("headers_and_payload", "num_messages", "producer_id", "sequence_id")

    # `TxnSend` and `RareSend` have these as slots of their own.
    highest_sequence_id: int | None = None
    txn_id: TxnId | None = None
    is_chunk: bool = False
    marker: bool = False
    checksum_ok: bool = True

    def __init__(
        self, producer_id: int, sequence_id: int, num_messages: int, headers_and_payload: bytes
    ) -> None:
        self.producer_id = producer_id
        self.sequence_id = sequence_id
        self.num_messages = num_messages
        self.headers_and_payload = headers_and_payload

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(producer_id={self.producer_id}, "
            f"sequence_id={self.sequence_id}, num_messages={self.num_messages}, "
            f"{len(self.headers_and_payload)} bytes)"
        )

    def _values(self) -> tuple[object, ...]:
        return (
            self.producer_id,
            self.sequence_id,
            self.num_messages,
            self.highest_sequence_id,
            self.txn_id,
            self.is_chunk,
            self.marker,
            self.checksum_ok,
            self.headers_and_payload,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Send) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())


class SendRun:
    """SENDs of one producer and one kind (plain, or of one transaction) that came together.

    Their sequences ascend and their checksums hold, so that what takes them can judge them by the
    first and the last.
    """

    __slots__ = ("counts", "payloads", "producer_id", "sequence_ids", "size", "txn_id")

    def __init__(self, first: Send) -> None:
        self.producer_id = first.producer_id
        self.txn_id = first.txn_id
        self.sequence_ids = [first.sequence_id]
        self.counts = [first.num_messages]
        self.payloads = [first.headers_and_payload]
        self.size = len(first.headers_and_payload)
        """Bytes of all payloads."""

    def __repr__(self) -> str:
        ends = f"{self.sequence_ids[0]}-{self.sequence_ids[-1]}"
        return f"SendRun(producer_id={self.producer_id}, sequence_ids={ends}, {self.size} bytes)"

    def sends(self) -> list[Send]:
        """What the run consists of, one by one."""
        txn, each = self.txn_id, zip(self.sequence_ids, self.counts, self.payloads, strict=True)
        if txn is None:
            return [Send(self.producer_id, *values) for values in each]
        return [TxnSend(self.producer_id, *values, txn) for values in each]


class TxnSend(Send):
    """A SEND that says one thing more: its transaction. It has a checksum, and that holds."""

    __slots__ = ("txn_id",)

    def __init__(
        self,
        producer_id: int,
        sequence_id: int,
        num_messages: int,
        headers_and_payload: bytes,
        txn_id: TxnId,
    ) -> None:
        super().__init__(producer_id, sequence_id, num_messages, headers_and_payload)
        self.txn_id: TxnId = txn_id

    def metadata_ends_with(self, trailer: bytes) -> bool:
        """Whether these are the last fields of the message's metadata."""
        data = self.headers_and_payload  # as `metadata_ends_with`
        end = _METADATA_START + int(_SIZE.unpack_from(data, CHECKSUM_BYTES)[0])
        return data.endswith(trailer, 0, end)


class RareSend(Send):
    """A SEND that says more, or whose checksum does not hold."""

    __slots__ = ("checksum_ok", "highest_sequence_id", "is_chunk", "marker", "txn_id")

    def __init__(
        self, command: pb.CommandSend, headers_and_payload: bytes, checksum_ok: bool
    ) -> None:
        super().__init__(
            command.producer_id, command.sequence_id, command.num_messages, headers_and_payload
        )
        highest = command.HasField("highest_sequence_id")
        self.highest_sequence_id = command.highest_sequence_id if highest else None
        # Half an id names no transaction; Pulsar's broker takes such a message as a plain one, too.
        both = command.HasField("txnid_most_bits") and command.HasField("txnid_least_bits")
        self.txn_id = TxnId(command.txnid_most_bits, command.txnid_least_bits) if both else None
        self.is_chunk = command.is_chunk
        self.marker = command.marker
        self.checksum_ok = checksum_ok


class Delivered:
    """A MESSAGE, as a client gets it."""

    __slots__ = (
        "_body",
        "ack_set",
        "checksum_ok",
        "consumer_id",
        "headers_and_payload",
        "partition",
        "position",
        "redelivery_count",
    )

    def __init__(
        self,
        consumer_id: int,
        position: Position,
        headers_and_payload: bytes,
        partition: int = -1,
        redelivery_count: int = 0,
        ack_set: Sequence[int] = (),
        checksum_ok: bool = True,
    ) -> None:
        self.consumer_id = consumer_id
        self.position = position
        self.headers_and_payload = headers_and_payload
        self.partition = partition
        self.redelivery_count = redelivery_count
        self.ack_set = ack_set
        """The messages of a batch that are left; none: all of them."""
        self.checksum_ok = checksum_ok
        self._body: pb.CommandMessage | None = None

    @property
    def body(self) -> pb.CommandMessage:
        """The command, as protobuf has it."""
        # Made when it is asked for: the fast path came without protobuf to save just this.
        if self._body is None:
            ledger, entry = self.position
            message_id = pb.MessageIdData(ledgerId=ledger, entryId=entry)
            if self.partition >= 0:
                message_id.partition = self.partition
            self._body = pb.CommandMessage(consumer_id=self.consumer_id, message_id=message_id)
            if self.redelivery_count:
                self._body.redelivery_count = self.redelivery_count
        return self._body

    def _values(self) -> tuple[object, ...]:
        return self.body, self.headers_and_payload, self.checksum_ok

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Delivered) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.position, self.headers_and_payload))

    def __repr__(self) -> str:
        return f"Delivered({self.position}, {len(self.headers_and_payload)} bytes)"


class RareDelivered(Delivered):
    """A MESSAGE that protobuf has read."""

    __slots__ = ()

    def __init__(
        self, body: pb.CommandMessage, headers_and_payload: bytes, checksum_ok: bool
    ) -> None:
        message_id = body.message_id
        super().__init__(
            body.consumer_id,
            Position(_signed(message_id.ledgerId), _signed(message_id.entryId)),
            headers_and_payload,
            message_id.partition,
            body.redelivery_count,
            body.ack_set,
            checksum_ok,
        )
        self._body = body


class Received(NamedTuple):
    """Any other command: the number of its type, and its body."""

    type: int
    body: Message


class ReceivedEntries(NamedTuple):
    """An answer that entries follow: what it says, and their bytes, one behind the other."""

    type: int
    body: pb.CommandRangeReadResponse
    data: bytes


class Unknown(NamedTuple):
    """A command of a type that the .proto does not have; the rest of its frame was skipped."""

    type: int


Command: TypeAlias = Send | SendRun | Delivered | Received | ReceivedEntries | Unknown


class Layout(NamedTuple):
    """The offsets of the parts of headers_and_payload; -1 where there is no such part."""

    broker_entry: int
    checksum: int
    metadata: int
    payload: int


def txn_trailer(txn: TxnId) -> bytes:
    """The id of a transaction as the last fields of a message's metadata.

    What would follow it, had the message more of them, are those of chunks and of batches.
    """
    # Fields 22 and 23.
    return b"\xb0\x01" + varint(txn.least) + b"\xb8\x01" + varint(txn.most)


def metadata_ends_with(headers_and_payload: bytes, trailer: bytes) -> bool:
    """Whether these are the last fields of the metadata of a message that has a checksum."""
    # With a checksum in front, metadata begins at a fixed place.
    end = _METADATA_START + int(_SIZE.unpack_from(headers_and_payload, CHECKSUM_BYTES)[0])
    return headers_and_payload.endswith(trailer, 0, end)


def with_txn(headers_and_payload: bytes, txn: TxnId) -> bytes:
    """A message whose metadata names this transaction, as one that a client sent so.

    The fields are put behind the others, which stay as they are, also those that nobody knows here.
    """
    data = headers_and_payload
    layout = layout_of(data)
    metadata = data[layout.metadata : layout.payload] + txn_trailer(txn)
    rest = b"".join((_SIZE.pack(len(metadata)), metadata, data[layout.payload :]))
    # Without a checksum (the protocol lets clients leave it out) the size comes first.
    if layout.checksum < 0:
        return data[: layout.metadata - _SIZE.size] + rest
    before = data[: layout.checksum - _MAGIC.size]
    return before + CHECKSUM.pack(MAGIC_CHECKSUM, crc32c(rest)) + rest


def layout_of(headers_and_payload: bytes) -> Layout:
    """Find the parts, each within bounds (the payload may be empty)."""
    data = headers_and_payload
    broker_entry = checksum = -1
    start = 0
    # A broker put it there, for consumers that understand it; producers never send one.
    if _magic_at(data, start) == MAGIC_BROKER_ENTRY:
        broker_entry = start + CHECKSUM.size
        start = broker_entry + _size_at(data, start + _MAGIC.size)
    # Checksums are optional in the protocol: without one the metadata's size comes first.
    if _magic_at(data, start) == MAGIC_CHECKSUM:
        checksum = start + _MAGIC.size
        start += CHECKSUM.size
    metadata = start + _SIZE.size
    payload = metadata + _size_at(data, start)
    return Layout(broker_entry, checksum, metadata, payload)


def payload_offset(headers_and_payload: bytes) -> int:
    """Where the payload starts, behind every header."""
    return layout_of(headers_and_payload).payload


def metadata_of(headers_and_payload: bytes) -> pb.MessageMetadata:
    """The metadata of the message or batch."""
    layout = layout_of(headers_and_payload)
    try:
        return pb.MessageMetadata.FromString(headers_and_payload[layout.metadata : layout.payload])
    except DecodeError as error:
        raise RemoteProtocolError(f"message metadata cannot be decoded: {error}") from error


def broker_entry_metadata_of(headers_and_payload: bytes) -> pb.BrokerEntryMetadata | None:
    """What a broker put before the entry, if it did."""
    start = layout_of(headers_and_payload).broker_entry
    if start < 0:
        return None
    end = start + _size_at(headers_and_payload, start - _SIZE.size)
    try:
        return pb.BrokerEntryMetadata.FromString(headers_and_payload[start:end])
    except DecodeError as error:
        raise RemoteProtocolError(f"broker entry metadata cannot be decoded: {error}") from error


def checksum_holds(headers_and_payload: bytes) -> bool:
    """True unless there is a checksum and the bytes after it have another one."""
    data = headers_and_payload
    start = 0
    if _magic_at(data, start) == MAGIC_BROKER_ENTRY:
        start = CHECKSUM.size + _size_at(data, _MAGIC.size)
    # Nothing to compare with; whether the rest makes sense, `layout_of` finds out.
    if _magic_at(data, start) != MAGIC_CHECKSUM or len(data) < start + CHECKSUM.size:
        return True
    stored: int = CHECKSUM.unpack_from(data, start)[1]
    return crc32c(memoryview(data)[start + CHECKSUM.size :]) == stored


def encode_entry(metadata: pb.MessageMetadata, payload: bytes, *, checksum: bool = True) -> bytes:
    """headers_and_payload of a message, as a client makes it."""
    encoded = metadata.SerializeToString()
    rest = b"".join((_SIZE.pack(len(encoded)), encoded, payload))
    return CHECKSUM.pack(MAGIC_CHECKSUM, crc32c(rest)) + rest if checksum else rest


def _signed(number: int) -> int:
    """Ids are unsigned on the wire, where -1 is the largest of them."""
    return number - (1 << 64) if number >> 63 else number


def _magic_at(data: bytes, offset: int) -> int:
    # Metadata of 234 MiB would begin like a magic number; no frame is that large.
    return int.from_bytes(data[offset : offset + _MAGIC.size], "big")


def _size_at(data: bytes, offset: int) -> int:
    """The size that stands at `offset`; what it counts must be there."""
    if offset + _SIZE.size > len(data):
        raise RemoteProtocolError(f"the headers of a message end after {len(data)} bytes")
    size: int = _SIZE.unpack_from(data, offset)[0]
    if size > len(data) - offset - _SIZE.size:
        raise RemoteProtocolError(f"a message announces a header of {size} bytes and has fewer")
    return size
