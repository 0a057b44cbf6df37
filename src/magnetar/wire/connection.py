"""A connection's bytes turned into commands: frames, limits and what is legal when.

Owns: `Connection`, for either side. It does no I/O: its owner feeds what arrives to `receive` and
writes what `frames.py` encodes.

A server's connection goes from NEW (only CONNECT is legal) to HANDSHAKE (AUTH_RESPONSE, PING and
PONG are) and, when its owner calls `open` on sending CONNECTED, to OPEN. A client's is OPEN once
CONNECTED has arrived. The first broken rule CLOSES either for good.

Invariants:
1. The commands handed out depend on the bytes only, not on how they were cut into pieces; but for
   which SENDs are handed out as one (`SendRun`), to an owner that asks for runs.
2. A frame larger than the limit of the state is refused when its first four bytes are there; until
   OPEN that limit is small. What is kept between calls is at most one incomplete frame.
3. Each byte is copied a bounded number of times, however small the pieces.
4. The fast path hands out what protobuf would: anything unexpected is left to protobuf.
5. Only errors of `magnetar.errors` leave `receive`. Commands before a broken frame are handed out
   first; what broke is in `error`, and is raised at the latest by the next call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final

from crc32c import crc32c
from google.protobuf.message import DecodeError

from magnetar.errors import (
    ForeignProtocol,
    FrameTooLarge,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from magnetar.wire.commands import (
    MEMBERS,
    NAMES,
    SENT_BEFORE_OPEN,
    SENT_BY,
    TYPES,
    WITH_ENTRIES,
    WITH_PAYLOAD,
    Side,
)
from magnetar.wire.deliveries import MESSAGE_START, take_deliveries
from magnetar.wire.frames import HANDSHAKE_FRAME_BYTES_MAX, SIZE_BYTES, frame_bytes_max
from magnetar.wire.messages import (
    CHECKSUM,
    CHECKSUM_BYTES,
    MAGIC_CHECKSUM,
    Command,
    RareDelivered,
    RareSend,
    Received,
    ReceivedEntries,
    Send,
    SendRun,
    TxnId,
    TxnSend,
    Unknown,
    checksum_holds,
)
from magnetar.wire.pb import pulsar_pb2 as pb

_SIZE: Final = struct.Struct(">I")

# What the fast path looks at: total, size of the command, and the command's first five bytes. They
# are `08 06 32 n 08` for a SEND with a body of n bytes that starts with its producer. (A body of
# 128 bytes or more has a length of two; the fields of the common form end long before that.)
_SEND_HEAD: Final = struct.Struct(">IIIB")
_SEND_LEAD: Final = 0x08063200
_LEAD_BYTES: Final = 4
_BODY_START: Final = _SEND_HEAD.size
"""Where the number of the producer stands in a frame: behind its tag."""
# The fast path may look this far beyond a command before it notices; metadata is never smaller.
_LOOK_AHEAD_BYTES: Final = 16
# A tenth group of seven bits would be 2^63 or more, which Java reads as a negative number.
_SEQUENCE_SHIFT_MAX: Final = 56

_SEND_START: Final = b"\x08\x06\x32"

# A run is handled in one step, which must be short; and a ledger takes it as a whole.
RUN_SENDS_MAX: Final = 256
RUN_BYTES_MAX: Final = 256 * 1024
_SIZES_BYTES: Final = 8

# How those begin who came to the wrong port, or were called at one: as the size of a frame, each of
# them is far above any limit.
_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"PATC", b"CONN", b"HTTP")
_TLS: Final = [
    bytes([kind, 3, minor, size]) for kind in (21, 22) for minor in range(4) for size in range(8)
]
_FOREIGN: Final = {**dict.fromkeys(_HTTP, "HTTP"), **dict.fromkeys(_TLS, "TLS")}

_CONNECT: Final = TYPES["CONNECT"]
_CONNECT_ONLY: Final = frozenset({_CONNECT})
_CONNECTED: Final = TYPES["CONNECTED"]
_SEND: Final = TYPES["SEND"]


_TakeCommon = Callable[[bytes, int, int, list[Command]], int]


class State(Enum):
    NEW = "new"
    HANDSHAKE = "handshake"
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """One end of one connection, as a state machine over bytes."""

    __slots__ = (
        "_common",
        "_error",
        "_gathers_runs",
        "_legal",
        "_limit",
        "_needed",
        "_open_limit",
        "_partial",
        "_side",
        "_state",
    )

    def __init__(
        self,
        max_frame_bytes: int = frame_bytes_max(),
        *,
        handshake_frame_bytes: int = HANDSHAKE_FRAME_BYTES_MAX,
        side: Side = Side.SERVER,
        gathers_runs: bool = False,
    ) -> None:
        self._side = side
        self._gathers_runs = gathers_runs
        self._state = State.NEW
        # What the peer may send in this state; and how the command begins that it sends above all,
        # and what takes a number of them.
        self._legal = _CONNECT_ONLY if side is Side.SERVER else SENT_BEFORE_OPEN[side.peer]
        self._common: tuple[bytes, _TakeCommon] | None = None
        self._open_limit = max_frame_bytes
        self._limit = min(handshake_frame_bytes, max_frame_bytes)
        # The beginning of a frame that has not arrived as a whole, and how much of it is needed
        # to go on: its first four bytes, or all of it.
        self._partial = bytearray()
        self._needed = SIZE_BYTES
        self._error: ProtocolError | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> ProtocolError | None:
        """What broke the stream. Set also while commands from before it are being handed out."""
        return self._error

    @property
    def buffered_bytes(self) -> int:
        """Kept between calls: at most one incomplete frame, unless there `is_more`."""
        return len(self._partial)

    @property
    def is_more(self) -> bool:
        """Whether `receive` stopped at its limit, and has more to give for no further bytes."""
        return len(self._partial) >= self._needed

    def open(self) -> None:
        """The server accepted the client: every command is legal, frames have their full size."""
        # The peer broke a rule while its owner was still checking who it is: nothing to open.
        if self._state is State.CLOSED:
            return
        if self._state is not State.HANDSHAKE:
            raise LocalProtocolError(f"a connection that is {self._state.value} cannot be opened")
        self._become_open()

    def close(self) -> None:
        """Drop what is buffered; `receive` refuses from now on."""
        self._state = State.CLOSED
        self._partial = bytearray()
        if self._error is None:
            self._error = RemoteProtocolError("bytes on a connection that is closed")

    def keep(self, data: bytes) -> None:
        """Put bytes aside for the next `receive`: nothing of them is looked at now."""
        if self._error is not None:
            raise self._error
        self._partial += data

    def receive(self, data: bytes, most: int | None = None) -> list[Command]:
        """The commands that `data` completes, in order; about `most`, then there `is_more`."""
        if self._error is not None:
            raise self._error
        partial = self._partial
        if partial:
            partial += data
            # Nothing is looked at until its size, and then all of it, is here: small
            # pieces cost no repeated parsing (invariant 3).
            if len(partial) < self._needed:
                return []
            data = bytes(partial)
            self._partial = bytearray()
        commands: list[Command] = []
        try:
            offset = self._take_frames(data, commands, most)
            if offset < len(data):
                self._keep(data, offset)
            else:
                self._needed = SIZE_BYTES
        except ProtocolError as error:
            # Invariant 5: what came before the broken frame was legal. Its owner gets
            # that first, and this error from `error` or the next call.
            self._error = error
            self.close()
            if not commands:
                raise
        return commands

    def _take_frames(self, data: bytes, commands: list[Command], most: int | None) -> int:
        """Take every whole frame, up to a limit; return where the first one left begins."""
        offset = 0
        while True:
            # Most frames are SENDs at a server and MESSAGEs at a
            # client: a run of them is taken at once.
            if self._common is not None and data.startswith(self._common[0], offset + _SIZES_BYTES):
                offset = self._common[1](data, offset, self._limit, commands)
            if len(data) - offset < SIZE_BYTES:
                return offset
            start = offset + SIZE_BYTES
            stop = start + self._checked_total(data, offset)
            # A run of common ones may have gone beyond the limit: they are cheap.
            if stop > len(data) or (most is not None and len(commands) >= most):
                return offset
            commands.append(self._command(data, start, stop))
            offset = stop

    def _keep(self, data: bytes, offset: int) -> None:
        """Keep the incomplete frame that begins at `offset`, if one does."""
        self._needed = SIZE_BYTES
        # Checked here too: a frame that is too large is refused before it arrives (invariant 2).
        if len(data) - offset >= SIZE_BYTES:
            self._needed += self._checked_total(data, offset)
        self._partial += data[offset:]

    def _checked_total(self, data: bytes, offset: int) -> int:
        total: int = _SIZE.unpack_from(data, offset)[0]
        if total > self._limit:
            # Before the handshake is done: later these four bytes are a size like any other.
            spoken = None if self._state is State.OPEN else _FOREIGN.get(data[offset : offset + 4])
            if spoken is not None:
                raise ForeignProtocol(f"the peer speaks {spoken}, not Pulsar's binary protocol")
            raise FrameTooLarge(
                f"a frame of {total} bytes, where at most {self._limit} are allowed "
                f"on a connection that is {self._state.value}"
            )
        if total < SIZE_BYTES:
            raise RemoteProtocolError(f"a frame of {total} bytes cannot hold a command")
        return total

    def _command(self, data: bytes, start: int, stop: int) -> Command:
        """The command of a whole frame (`start`: after its total)."""
        body_start = start + SIZE_BYTES
        body_end = body_start + int(_SIZE.unpack_from(data, start)[0])
        if body_end > stop:
            raise RemoteProtocolError("a command is larger than its frame")
        # From here on: rare commands, and SENDs and MESSAGEs that the fast path left over.
        base = _parsed(data[body_start:body_end])
        # A type that our .proto does not have is kept by protobuf as an unknown field.
        if not base.HasField("type"):
            return self._unknown(data[body_start:body_end])
        number: int = base.type
        # CONNECT twice, anything before the handshake is done, or a command of our own side.
        if number not in self._legal:
            raise RemoteProtocolError(
                f"{NAMES[number]} from a {self._side.peer.value} "
                f"on a connection that is {self._state.value}"
            )
        member = MEMBERS[number]
        body = getattr(base, member)
        # Whoever gets the body relies on its required fields.
        if not body.IsInitialized() or not base.HasField(member):
            raise RemoteProtocolError(f"{NAMES[number]} without a field that it must have")
        # A checksum that fails is no broken frame: the message is refused, the connection goes on.
        if number in WITH_PAYLOAD:
            payload = data[body_end:stop]
            checksum_ok = checksum_holds(payload)
            if number == _SEND:
                return RareSend(body, payload, checksum_ok)
            return RareDelivered(body, payload, checksum_ok)
        if number in WITH_ENTRIES:
            return ReceivedEntries(number, body, _entries(body, data[body_end:stop]))
        # No other command has bytes behind it: these would be read as something else, or lost.
        if body_end != stop:
            raise RemoteProtocolError(f"{stop - body_end} bytes after {NAMES[number]}")
        if number in (_CONNECT, _CONNECTED):
            self._move_on(number)
        return Received(number, body)

    def _unknown(self, encoded: bytes) -> Unknown:
        """A command that is newer than we are; its type is the first field, or it has none."""
        # 08 is the tag of field 1, which encoders write first.
        number = _varint_at(encoded, 1) if encoded[:1] == b"\x08" else None
        if number is None or number in NAMES:
            raise RemoteProtocolError("a command without a type")
        # A newer peer is answered when it is known who it is, not before.
        if self._state is not State.OPEN:
            raise RemoteProtocolError(f"unknown command {number} before the handshake is done")
        return Unknown(number)

    def _move_on(self, number: int) -> None:
        if number == _CONNECT:
            self._state = State.HANDSHAKE
            self._legal = SENT_BEFORE_OPEN[Side.CLIENT] - _CONNECT_ONLY
        elif number == _CONNECTED:
            self._become_open()

    def _become_open(self) -> None:
        self._state = State.OPEN
        # The handshake is over: a second CONNECT would change who the peer is.
        self._legal = SENT_BY[self._side.peer] - {_CONNECT, _CONNECTED}
        sends = _SEND_RUNS if self._gathers_runs else _SENDS
        self._common = sends if self._side is Side.SERVER else _DELIVERIES
        self._limit = self._open_limit


# Each `return offset` below means: another command, not all of it here, too large, or not of the
# common form. The caller's slow path tells which (invariant 4). The checksum comes last, for it
# is the dearest: it goes over all of the payload.
def _take_sends(
    data: bytes, offset: int, limit: int, commands: list[Command], *, run_sends_max: int
) -> int:
    """Take SENDs of the common form, one after the other; return where another frame begins.

    The common form: producer (below 2^14), sequence (below 2^63), perhaps the number of messages
    (below 2^14), perhaps a transaction, and a checksum that holds. All else is left to protobuf.
    Those that can be one run are; it begins with the second, a SEND alone stays one.
    """
    txn_fields, txn = b"", None
    # The first SEND of what may become a run, the run that it became, and how many more fit.
    first: Send | None = None
    run: SendRun | None = None
    room, last_producer, last_sequence = 0, -1, -1
    last_txn: TxnId | None = None
    view, end, take = memoryview(data), len(data), commands.append
    last = end - _SEND_HEAD.size
    read_head, read_checksum = _SEND_HEAD.unpack_from, CHECKSUM.unpack_from
    while offset <= last:
        total, size, lead, tag = read_head(data, offset)
        body_end = offset + _SIZES_BYTES + size
        stop = offset + SIZE_BYTES + total
        if (
            lead != _SEND_LEAD + size - _LEAD_BYTES
            or tag != 0x08
            or stop > end
            or body_end + _LOOK_AHEAD_BYTES > stop
            or total > limit
        ):
            return offset
        numbers = _numbers(data, offset + _BODY_START, body_end)
        if numbers is None:
            return offset
        producer_id, sequence_id, num_messages, at = numbers
        # Messages of one transaction follow each other and end alike: it is parsed once for a run.
        if at != body_end and not (txn_fields and data.startswith(txn_fields, at)):
            txn_fields = data[at:body_end]
            txn = _txn_of(txn_fields)
        magic, stored = read_checksum(data, body_end)
        if magic != MAGIC_CHECKSUM or crc32c(view[body_end + CHECKSUM_BYTES : stop]) != stored:
            return offset
        # What stands behind the numbers is nothing, or just a transaction.
        its_txn = None if at == body_end else txn
        if at + (0 if its_txn is None else len(txn_fields)) != body_end:
            return offset
        payload = data[body_end:stop]
        fits = producer_id == last_producer and sequence_id > last_sequence
        if fits and its_txn is last_txn and room:
            if run is None:
                assert first is not None, "there was one before"
                run = commands[-1] = SendRun(first)
            run.sequence_ids.append(sequence_id)
            run.counts.append(num_messages)
            run.payloads.append(payload)
            run.size += len(payload)
            room = room - 1 if run.size < RUN_BYTES_MAX else 0
        else:
            if its_txn is None:
                first = Send(producer_id, sequence_id, num_messages, payload)
            else:
                first = TxnSend(producer_id, sequence_id, num_messages, payload, its_txn)
            take(first)
            run, room = None, run_sends_max - 1
            last_producer, last_txn = producer_id, its_txn
        last_sequence = sequence_id
        offset = stop
    return offset


def _numbers(data: bytes, at: int, body_end: int) -> tuple[int, int, int, int] | None:
    """Producer, sequence and number of messages of a SEND, and where they end; None: not so."""
    producer_id = data[at]
    at += 1
    if producer_id > 0x7F:
        high = data[at]
        producer_id += (high << 7) - 0x80
        at += 1
        if high > 0x7F:
            return None
    if data[at] != 0x10:
        return None
    sequence_id = data[at + 1]
    at += 2
    if sequence_id > 0x7F:
        sequence_id &= 0x7F
        shift = 7
        while (byte := data[at]) > 0x7F:
            sequence_id |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > _SEQUENCE_SHIFT_MAX:
                return None
        sequence_id |= byte << shift
        at += 1
    # Nothing says how many messages it has: one.
    if at == body_end or data[at] != 0x18:
        return producer_id, sequence_id, 1, at
    num_messages = data[at + 1]
    at += 2
    if num_messages > 0x7F:
        high = data[at]
        num_messages += (high << 7) - 0x80
        at += 1
        if high > 0x7F:
            return None
    return producer_id, sequence_id, num_messages, at


_SENDS: Final = (_SEND_START, partial(_take_sends, run_sends_max=1))
_SEND_RUNS: Final = (_SEND_START, partial(_take_sends, run_sends_max=RUN_SENDS_MAX))
_DELIVERIES: Final = (MESSAGE_START, take_deliveries)


def _txn_of(fields: bytes) -> TxnId | None:
    """The transaction of a SEND that ends with these fields; None: they are not (only) that."""
    # As every client writes them: 20 and 28 are the tags of the least and of the most bits.
    if fields[:1] == b"\x20":
        least, at = _shortest_varint(fields, 1)
        if fields[at : at + 1] == b"\x28":
            most, at = _shortest_varint(fields, at + 1)
            if at == len(fields) and max(least, most) <= _UINT64_MAX:
                return TxnId(most, least)
    return _parsed_txn(fields)


def _parsed_txn(fields: bytes) -> TxnId | None:
    """The transaction as protobuf reads it, which takes everything."""
    said = pb.CommandSend()
    try:
        said.MergeFromString(fields)
    except DecodeError:
        return None
    txn = TxnId(said.txnid_most_bits, said.txnid_least_bits)
    # Anything that protobuf would write otherwise holds more than the transaction.
    canonical = pb.CommandSend(txnid_least_bits=txn.least, txnid_most_bits=txn.most)
    return txn if canonical.SerializePartialToString() == fields else None


_UINT64_MAX: Final = 2**64 - 1


def _shortest_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next field begins; above 64 bits unless it is as it must be."""
    value = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        at += 1
        if byte < 0x80:
            # A zero at the end says nothing: protobuf does not write it.
            return (value | byte << shift, at) if byte or not shift else (_UINT64_MAX + 1, at)
        value |= (byte & 0x7F) << shift
        shift += 7
    return _UINT64_MAX + 1, at


def _entries(body: pb.CommandRangeReadResponse, data: bytes) -> bytes:
    """What follows an answer, if it is as much as the answer says."""
    if sum(body.sizes) != len(data) or sum(run.count for run in body.runs) != len(body.sizes):
        raise RemoteProtocolError(f"{len(data)} bytes of entries are not those that were announced")
    return data


def _parsed(encoded: bytes) -> pb.BaseCommand:
    try:
        return pb.BaseCommand.FromString(encoded)
    except DecodeError as error:
        raise RemoteProtocolError(f"a command cannot be decoded: {error}") from error


def _varint_at(encoded: bytes, at: int) -> int | None:
    value = 0
    for shift, byte in enumerate(encoded[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value
    return None
