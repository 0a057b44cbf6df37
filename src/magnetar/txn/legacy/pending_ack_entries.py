"""The entries of the log of a subscription's pending acknowledgements (pure).

Owns: the entries; `entry_codec` has their form. An end stands behind all that its transaction
acknowledged: nothing is accepted after it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from magnetar.model.ids import Position
from magnetar.txn.acks.pending_acks import Acked, acked_of
from magnetar.txn.legacy.entry_codec import EntryCodec
from magnetar.wire.messages import TxnId


class HeldEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry that a transaction acknowledges, or messages of its batch."""

    ledger_id: int
    entry_id: int
    unacked: str = ""
    """Hexadecimal, set bits: messages of the batch that it does not acknowledge; "": none."""
    size: int = 0
    """How many messages the batch has, if it is acknowledged in part."""


class AcksHeld(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The acknowledgements of one command of a transaction."""

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
    """The end of a transaction on this subscription."""

    # What it held is not repeated: its `AcksHeld` stand before this in the log.
    most: int
    least: int
    committed: bool

    @property
    def txn(self) -> TxnId:
        return TxnId(self.most, self.least)


PendingAckEntry: TypeAlias = AcksHeld | AcksEnded

CODEC: Final = EntryCodec[PendingAckEntry](
    msgspec.msgpack.Decoder(PendingAckEntry), "a pending-ack log"
)


def held(txn: TxnId, incarnation: int, acks: list[Acked], cumulative: bool) -> AcksHeld:
    entries = tuple(
        HeldEntry(*ack.position, f"{ack.unacked:x}", ack.size)
        # A whole entry, the usual case, is stored as two numbers.
        if ack.unacked
        else HeldEntry(*ack.position)
        for ack in acks
    )
    return AcksHeld(*txn, incarnation, entries, cumulative)
