"""Frames on the wire: their layout and limits, and how commands become bytes.

A frame is `u32 total`, `u32 size of the command`, BaseCommand, and for SEND and MESSAGE what
`messages.py` describes; RANGE_READ_RESPONSE has any number of that, whose sizes it lists. `total`
counts everything after itself; all numbers are big-endian.

The encoders of the hot path (`encode_send`, `encode_receipt`, `encode_message`, `encode_ack`, and
the answers to commands of transactions) put varints from a table together by hand; they cost a
fraction of building and serializing a BaseCommand.

Invariants:
1. What an encoder here makes is byte for byte what protobuf makes of the same command.
2. A number outside 0..2^64-1 is written as the low 64 bits of its two's complement, as protobuf
   writes negative ones: (-1, -1) is the message id of a dropped duplicate.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.message import EncodeError

from magnetar.errors import LocalProtocolError
from magnetar.model.ids import Position
from magnetar.wire.commands import MEMBERS, TYPES
from magnetar.wire.pb import pulsar_pb2 as pb

MESSAGE_BYTES_MAX: Final = 5 * 1024 * 1024
"""The size of a message that a server announces unless it is set up otherwise."""

FRAME_HEADROOM_BYTES: Final = 10 * 1024
"""A frame may exceed the announced size by this: clients do not count metadata and command."""

HANDSHAKE_FRAME_BYTES_MAX: Final = 64 * 1024
"""The largest frame of a peer that nobody knows yet; a CONNECT with any token fits."""

SIZES: Final = struct.Struct(">II")
"""Total size and size of the command, with which every frame begins."""

SIZE_BYTES: Final = 4

_UINT64_MASK: Final = 2**64 - 1

# Numbers below 2^14 have their varint here; larger ones are put together from 14-bit pieces.
_PIECE_BITS: Final = 14
_PIECE_MASK: Final = (1 << _PIECE_BITS) - 1
_VARINTS: Final = tuple(
    bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(1 << _PIECE_BITS)
)
_PIECES: Final = tuple(bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(1 << _PIECE_BITS))

_TWO_PIECES: Final = 1 << 2 * _PIECE_BITS
_FIELDS_2: Final = tuple(b"\x10" + encoded for encoded in _VARINTS)
_PIECES_2: Final = tuple(b"\x10" + piece for piece in _PIECES)
# Enough for the producers, consumers and ledgers in use at a time; more of them begin anew.
_CACHED_FIELDS: Final = 8192

# The body of the hot commands is shorter than 128 bytes but for a long ack set: its length is one
# byte then, and what stands before the body follows from it.
_SHORT: Final = 0x80
_RECEIPT_LEAD: Final = bytes((0x08, TYPES["SEND_RECEIPT"], TYPES["SEND_RECEIPT"] << 3 | 2))
_RECEIPT_HEADS: Final = tuple(
    SIZES.pack(SIZE_BYTES + 4 + n, 4 + n) + _RECEIPT_LEAD + bytes((n,)) for n in range(_SHORT)
)
_ACK_LEAD: Final = bytes((0x08, TYPES["ACK"], TYPES["ACK"] << 3 | 2))
_SEND_LEAD: Final = bytes((0x08, TYPES["SEND"], TYPES["SEND"] << 3 | 2))
_MESSAGE_LEAD: Final = bytes((0x08, TYPES["MESSAGE"], TYPES["MESSAGE"] << 3 | 2))
_MESSAGE_LEADS: Final = tuple(_MESSAGE_LEAD + bytes((n,)) for n in range(_SHORT))
# The message id is field 3 of a receipt and field 2 of a message.
_ID_3: Final = tuple(bytes((0x1A, n)) for n in range(_SHORT))
_ID_2: Final = tuple(bytes((0x12, n)) for n in range(_SHORT))


class _Fields(dict[int, bytes]):
    """A field by its value, for those of which few values are in use at a time."""

    def __init__(self, tag: bytes) -> None:
        super().__init__()
        self._tag = tag

    def __missing__(self, value: int) -> bytes:
        if len(self) >= _CACHED_FIELDS:
            self.clear()
        field = self[value] = self._tag + varint(value)
        return field


# 1: producer, consumer, ledger. 3: partition, redelivery count.
_FIRST: Final = _Fields(b"\x08")
_THIRD: Final = _Fields(b"\x18")


def frame_bytes_max(message_bytes_max: int = MESSAGE_BYTES_MAX) -> int:
    """The largest `total` of a frame, for an announced maximal message size."""
    return message_bytes_max + FRAME_HEADROOM_BYTES


def base_command(type_name: str, **fields: object) -> pb.BaseCommand:
    """A command by the name of its type; nested messages may be given as dicts."""
    number = TYPES.get(type_name)
    if number is None:
        raise LocalProtocolError(f"there is no command {type_name!r}")
    try:
        made = pb.BaseCommand(**{"type": number, MEMBERS[number]: fields})  # type: ignore[arg-type]
        # An empty body would otherwise be absent.
        getattr(made, MEMBERS[number]).SetInParent()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"{type_name} cannot hold {fields!r}: {error}") from error
    return made


def command(type_name: str, **fields: object) -> bytes:
    """The frame of a command without payload."""
    return encode_command(base_command(type_name, **fields))


def encode_command(base: pb.BaseCommand) -> bytes:
    """The frame of a command without payload."""
    encoded = _serialized(base)
    return SIZES.pack(SIZE_BYTES + len(encoded), len(encoded)) + encoded


def encode_with_payload(base: pb.BaseCommand, headers_and_payload: bytes) -> list[bytes]:
    """The frame of a SEND or MESSAGE, in pieces to be written in order."""
    encoded = _serialized(base)
    total = SIZE_BYTES + len(encoded) + len(headers_and_payload)
    # Two pieces: joining them would copy every payload once more.
    return [SIZES.pack(total, len(encoded)) + encoded, headers_and_payload]


def encode_with_entries(base: pb.BaseCommand, entries: Sequence[bytes]) -> list[bytes]:
    """The frame of a RANGE_READ_RESPONSE, which lists their sizes, in pieces to be written."""
    encoded = _serialized(base)
    total = SIZE_BYTES + len(encoded) + sum(map(len, entries))
    return [SIZES.pack(total, len(encoded)) + encoded, *entries]


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    if 0 <= value <= _PIECE_MASK:
        return _VARINTS[value]
    value &= _UINT64_MASK
    encoded = b""
    while value > _PIECE_MASK:
        encoded += _PIECES[value & _PIECE_MASK]
        value >>= _PIECE_BITS
    return encoded + _VARINTS[value]


def encode_send(
    producer_id: int,
    sequence_id: int,
    headers_and_payload: bytes,
    *,
    num_messages: int = 1,
    txn: tuple[int, int] | None = None,
    highest_sequence_id: int | None = None,
    is_chunk: bool = False,
) -> list[bytes]:
    """The frame of a SEND, in pieces to be written in order; `txn` is its most and least bits."""
    # In the order of their numbers, as protobuf writes them (invariant 1): 18 is
    # num_messages, 20 and 28 are the least and the most bits of the transaction.
    body = _FIRST[producer_id] + _second(sequence_id)
    if num_messages != 1:
        body += _THIRD[num_messages]
    if txn is not None:
        body += b"\x20" + varint(txn[1]) + b"\x28" + varint(txn[0])
    if highest_sequence_id is not None:
        body += b"\x30" + varint(highest_sequence_id)
    if is_chunk:
        body += b"\x38\x01"
    size = len(body) + 4  # shorter than 128 bytes, whatever its numbers
    head = SIZES.pack(SIZE_BYTES + size + len(headers_and_payload), size) + _SEND_LEAD
    return [head + bytes((size - 4,)) + body, headers_and_payload]


def encode_receipt(
    producer_id: int,
    sequence_id: int,
    ledger: int,
    entry: int,
    highest_sequence_id: int | None = None,
) -> bytes:
    """The frame of a SEND_RECEIPT."""
    # Both numbers as `_second` writes them, without the calls where it has two lookups.
    if _PIECE_MASK < entry < _TWO_PIECES and _PIECE_MASK < sequence_id < _TWO_PIECES:
        message_id = (
            _FIRST[ledger] + _PIECES_2[entry & _PIECE_MASK] + _VARINTS[entry >> _PIECE_BITS]
        )
        second = _PIECES_2[sequence_id & _PIECE_MASK] + _VARINTS[sequence_id >> _PIECE_BITS]
    else:
        message_id, second = _FIRST[ledger] + _second(entry), _second(sequence_id)
    body = _FIRST[producer_id] + second + _ID_3[len(message_id)] + message_id
    if highest_sequence_id is not None:
        body += b"\x20" + varint(highest_sequence_id)
    return _RECEIPT_HEADS[len(body)] + body


def encode_receipts(
    producer_id: int, sequence_ids: Iterable[int], ledger: int, first_entry: int
) -> bytes:
    """The frames of the SEND_RECEIPTs of entries that follow one another."""
    producer, ledger_field = _FIRST[producer_id], _FIRST[ledger]
    size = len(ledger_field)
    frames: list[bytes] = []
    add = frames.append
    for entry, sequence_id in enumerate(sequence_ids, first_entry):
        field = _second(entry)
        body = producer + _second(sequence_id) + _ID_3[size + len(field)] + ledger_field + field
        add(_RECEIPT_HEADS[len(body)] + body)
    return b"".join(frames)


def encode_message(
    consumer_id: int,
    position: Position,
    partition: int,
    redelivery_count: int,
    ack_set: Sequence[int] | None,
    headers_and_payload: bytes,
    consumer_epoch: int | None = None,
) -> list[bytes]:
    """The frame of a MESSAGE, in pieces to be written in order.

    A negative partition (the topic has none) and a redelivery count of 0 are left out.
    """
    # The id first: its length stands before it, as does that of the body before the body.
    message_id = _FIRST[position[0]] + _second(position[1])
    if partition >= 0:
        message_id += _THIRD[partition]
    body = _FIRST[consumer_id] + _ID_2[len(message_id)] + message_id
    if redelivery_count:
        body += _THIRD[redelivery_count]
    if ack_set:
        body += b"".join([b"\x20" + varint(word) for word in ack_set])
    if consumer_epoch is not None:
        body += b"\x28" + varint(consumer_epoch)
    # Only a long ack set makes a body of 128 bytes, whose length needs a varint of its own.
    size = len(body)
    body = _MESSAGE_LEADS[size] + body if size < _SHORT else _MESSAGE_LEAD + varint(size) + body
    size = len(body)
    sizes = SIZES.pack(SIZE_BYTES + size + len(headers_and_payload), size)
    return [sizes + body, headers_and_payload]


def encode_messages(
    consumer_id: int,
    partition: int,
    consumer_epoch: int | None,
    entries: Iterable[tuple[Position, bytes]],
) -> list[bytes]:
    """The frames of MESSAGEs that are nothing but their entries: each is delivered for the first
    time, and whole. In pieces to be written in order.
    """
    consumer, rest = _FIRST[consumer_id], b"" if partition < 0 else _THIRD[partition]
    epoch = b"" if consumer_epoch is None else b"\x28" + varint(consumer_epoch)
    pack, base = SIZES.pack, len(consumer) + len(epoch) + 2 + len(_MESSAGE_LEADS[0])
    pieces: list[bytes] = []
    add = pieces.append
    for (ledger, entry), payload in entries:
        # As `_second` writes it, without the call where it is two lookups.
        if _PIECE_MASK < entry < _TWO_PIECES:
            second = _PIECES_2[entry & _PIECE_MASK] + _VARINTS[entry >> _PIECE_BITS]
        else:
            second = _second(entry)
        message_id = _FIRST[ledger] + second + rest
        id_size = len(message_id)
        size = base + id_size  # shorter than 128 bytes, whatever its numbers
        add(
            pack(SIZE_BYTES + size + len(payload), size)
            + _MESSAGE_LEADS[size - len(_MESSAGE_LEADS[0])]
            + consumer
            + _ID_2[id_size]
            + message_id
            + epoch
        )
        add(payload)
    return pieces


def encode_txn_answer(name: str, request_id: int, txn: tuple[int, int]) -> bytes:
    """The frame of an answer that names a request and a transaction (its most and least bits)."""
    most, least = txn
    body = b"\x08" + varint(request_id) + b"\x10" + varint(least) + b"\x18" + varint(most)
    return _TXN_ANSWERS[name][len(body)] + body


def encode_ack_answer(consumer_id: int, request_id: int, txn: tuple[int, int]) -> bytes:
    """The frame of an ACK_RESPONSE in a transaction."""
    most, least = txn
    body = _FIRST[consumer_id] + b"\x10" + varint(least) + b"\x18" + varint(most)
    body += b"\x30" + varint(request_id)
    return _TXN_ANSWERS["ACK_RESPONSE"][len(body)] + body


def encode_ack(
    consumer_id: int,
    request_id: int,
    items: Iterable[tuple[Position, Sequence[int], int]],
    *,
    cumulative: bool = False,
    txn: tuple[int, int] | None = None,
) -> bytes:
    """The frame of an ACK: positions, each with the messages of its batch that are left, and its
    batch size (no words, 0: it is no batch); `txn` is its most and least bits.
    """
    # Tags of CommandAck: 10 the type (1: cumulative), 1a a message id, 30 and 38 the transaction,
    # 40 the request. Of MessageIdData: 28 a word of the ack set, 30 the batch size.
    pieces = [_FIRST[consumer_id], b"\x10\x01" if cumulative else b"\x10\x00"]
    for (ledger, entry), ack_set, batch_size in items:
        message_id = _FIRST[ledger] + _second(entry)
        if ack_set:
            message_id += b"".join([b"\x28" + varint(word) for word in ack_set])
        if batch_size:
            message_id += b"\x30" + varint(batch_size)
        size = len(message_id)
        pieces.append((_ID_3[size] if size < _SHORT else b"\x1a" + varint(size)) + message_id)
    if txn is not None:
        pieces.append(b"\x30" + varint(txn[1]) + b"\x38" + varint(txn[0]))
    pieces.append(b"\x40" + varint(request_id))
    body = b"".join(pieces)
    command_bytes = _ACK_LEAD + varint(len(body)) + body
    return SIZES.pack(SIZE_BYTES + len(command_bytes), len(command_bytes)) + command_bytes


def _second(value: int) -> bytes:
    """Field 2: a sequence or entry number, each used once or twice."""
    if 0 <= value <= _PIECE_MASK:
        return _FIELDS_2[value]
    # Up to 2^28: two lookups instead of a loop, for nearly every sequence and entry number.
    if 0 < value < _TWO_PIECES:
        return _PIECES_2[value & _PIECE_MASK] + _VARINTS[value >> _PIECE_BITS]
    return b"\x10" + varint(value)


def _heads(name: str) -> list[bytes]:
    """What stands in front of the body of a command, by the size of that body."""
    number = TYPES[name]
    lead = b"\x08" + varint(number) + varint(number << 3 | 2)
    sizes = [len(lead) + 1 + size for size in range(_SHORT)]
    return [
        SIZES.pack(SIZE_BYTES + size, size) + lead + bytes((n,)) for n, size in enumerate(sizes)
    ]


_TXN_ANSWERS: Final = {
    name: _heads(name)
    for name in (
        "NEW_TXN_RESPONSE",
        "ADD_PARTITION_TO_TXN_RESPONSE",
        "ADD_SUBSCRIPTION_TO_TXN_RESPONSE",
        "END_TXN_RESPONSE",
        "END_TXN_ON_PARTITION_RESPONSE",
        "END_TXN_ON_SUBSCRIPTION_RESPONSE",
        "ACK_RESPONSE",
    )
}


def _serialized(base: pb.BaseCommand) -> bytes:
    try:
        return base.SerializeToString()
    except EncodeError as error:
        raise LocalProtocolError(f"a command lacks a required field: {error}") from error
