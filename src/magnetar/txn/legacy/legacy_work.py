"""One legacy transaction on one topic.

Owns: `MarkedTransaction`.
"""

from __future__ import annotations

import asyncio

from magnetar.errors import MagnetarError
from magnetar.model.ids import Position
from magnetar.txn.buffer.txn_dedup import TxnSequences
from magnetar.txn.buffer.txn_work import SegmentTransaction
from magnetar.wire.messages import TxnId


class MarkedTransaction(SegmentTransaction):
    """What its topic knows of it until its end is durable."""

    __slots__ = ("ending", "trouble")

    def __init__(self, txn: TxnId, bound: Position, sequences: TxnSequences) -> None:
        super().__init__(txn, bound, sequences)
        self.ending: asyncio.Task[None] | None = None
        """The attempt to end it that is under way."""
        self.trouble: MagnetarError | None = None
        """Why the last attempt failed."""
