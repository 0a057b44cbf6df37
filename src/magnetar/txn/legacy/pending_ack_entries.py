"""What the log of a subscription's pending acknowledgements holds (pure).

Owns: the entries, and their form: one byte for the version, then MessagePack.

Invariants:
1. An end stands behind all that its transaction acknowledged: nothing is accepted after it.
2. A form that this version does not know is refused, never guessed.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from magnetar.errors import CorruptData, FormatTooNew
from magnetar.model.ids import Position
from magnetar.txn.pending_acks import Acked, acked_of
from magnetar.wire.messages import TxnId

VERSION: Final = 1


class HeldEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry that a transaction acknowledges, or messages of its batch."""

    ledger_id: int
    entry_id: int
    unacked: str = ""
    """Hexadecimal, set bits: messages of the batch that it does not acknowledge; "": none."""
    size: int = 0
    """How many messages the batch has, if it is acknowledged in part."""


class AcksHeld(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What a transaction acknowledges with one command."""

    most: int
    least: int
    incarnation: int
    """Of the cursor: acknowledgements from before a seek do not count after it."""
    entries: tuple[HeldEntry, ...]
    cumulative: bool

    @property
    def txn(self) -> TxnId:
        return TxnId(self.most, self.least)

    @property
    def acks(self) -> list[Acked]:
        return [
            acked_of(
                Position(each.ledger_id, each.entry_id), int(each.unacked or "0", 16), each.size
            )
            for each in self.entries
        ]


class AcksEnded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What became of a transaction."""

    most: int
    least: int
    committed: bool

    @property
    def txn(self) -> TxnId:
        return TxnId(self.most, self.least)


PendingAckEntry: TypeAlias = AcksHeld | AcksEnded

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[PendingAckEntry]] = msgspec.msgpack.Decoder(PendingAckEntry)


def held(txn: TxnId, incarnation: int, acks: list[Acked], cumulative: bool) -> AcksHeld:
    entries = tuple(
        HeldEntry(*ack.position, f"{ack.unacked:x}", ack.size)
        if ack.unacked
        else HeldEntry(*ack.position)
        for ack in acks
    )
    return AcksHeld(*txn, incarnation, entries, cumulative)


def encode(entry: PendingAckEntry) -> bytes:
    return bytes((VERSION,)) + _ENCODER.encode(entry)


def decode(payload: bytes) -> PendingAckEntry:
    """The entry that `encode` made these bytes of."""
    if not payload:
        raise CorruptData("an entry of a pending-ack log is empty")
    if payload[0] != VERSION:
        raise FormatTooNew(f"an entry of a pending-ack log has version {payload[0]}")
    try:
        return _DECODER.decode(payload[1:])
    except msgspec.MsgspecError as error:
        raise CorruptData(f"an entry of a pending-ack log: {error}") from error
