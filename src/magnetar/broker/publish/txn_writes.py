"""The transactions of a topic as its producers ask for them, whichever their kind.

Owns: `TransactionWrites`: which of a topic's buffers an id belongs to, by the rule of `txn_kind`.
"""

from __future__ import annotations

from typing import TypeAlias

from magnetar.broker.subscribe.txn_kind import TxnKind
from magnetar.errors import NotAllowed
from magnetar.txn.buffer.segment_transactions import (
    Answered,
    PinnedTransaction,
    SegmentTransaction,
    TxnFastPath,
)
from magnetar.txn.buffer.transaction_buffer import MetadataTransactionBuffer
from magnetar.txn.buffer.txn_dedup import Sent, TxnVerdict
from magnetar.txn.ids import METADATA_BIT
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer, MarkedTransaction
from magnetar.wire.messages import TxnId

Buffer: TypeAlias = MetadataTransactionBuffer | LegacyTransactionBuffer


class TransactionWrites:
    """Both buffers of one topic as one. Each method is that of the id's buffer."""

    def __init__(
        self,
        metadata: MetadataTransactionBuffer,
        legacy: LegacyTransactionBuffer | None,
        kinds: TxnKind,
    ) -> None:
        self._metadata = metadata
        self._legacy = legacy
        self._kinds = kinds

    def holder(self, txn: TxnId) -> Buffer:
        """The buffer of a transaction of which messages are in the stream."""
        return self._of(txn, is_in_stream=True)

    def _of(self, txn: TxnId, *, is_in_stream: bool = False) -> Buffer:
        legacy, metadata = self._legacy, self._metadata
        # Most of them, without a further question (`is_metadata`).
        if legacy is None or txn.least & METADATA_BIT:
            return metadata
        # The id of a v4 client: it goes on as it began here; a new one goes as the policy says.
        is_legacy = self._kinds.is_legacy(
            txn,
            is_in_records=metadata.tracks(txn),
            is_in_log=is_in_stream or legacy.tracks(txn),
        )
        return legacy if is_legacy else metadata

    def is_admitted(self, txn: TxnId) -> bool:
        return self._of(txn).is_admitted(txn)

    def refusal(self, txn: TxnId) -> NotAllowed | None:
        # The kind first: a legacy id on a segment belongs to no buffer.
        return self._kinds.refusal(txn, NotAllowed) or self._of(txn).refusal(txn)

    def ask(self, txn: TxnId, then: Answered | None = None) -> bool:
        return self._of(txn).ask(txn, then)

    def fast_path(self, txn: TxnId, name: str) -> TxnFastPath | None:
        return self._of(txn).fast_path(txn, name)

    def judge(self, txn: TxnId, sent: Sent) -> TxnVerdict:
        return self._of(txn).judge(txn, sent)

    def appending(self, txn: TxnId) -> SegmentTransaction:
        return self._of(txn).appending(txn)

    def settled(self, segment_txn: SegmentTransaction, sent: Sent | None, *, stored: bool) -> None:
        # By its type, not by its id: the policy may have changed since the append, and the outcome
        # is owed to the buffer that took it.
        if isinstance(segment_txn, PinnedTransaction):
            self._metadata.settled(segment_txn, sent, stored=stored)
        else:
            assert isinstance(segment_txn, MarkedTransaction)
            assert self._legacy is not None, "the transaction is its own"
            self._legacy.settled(segment_txn, sent, stored=stored)
