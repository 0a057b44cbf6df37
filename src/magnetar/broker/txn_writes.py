"""What a producer asks of its topic's transactions, whichever their kind.

Owns: `TransactionWrites`: which of a topic's buffers an id belongs to.

A topic serves both kinds at once: the id tells. Segments of scalable topics have no markers. Where
the policy of the namespace says so, legacy transactions are kept in records, as the others are;
one that has begun to write in one way goes on so.
"""

from __future__ import annotations

from collections.abc import Callable

from magnetar.errors import NotAllowed
from magnetar.txn.buffer import MetadataTransactionBuffer
from magnetar.txn.ids import is_metadata, to_text
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer
from magnetar.txn.legacy.legacy_work import LegacyWork
from magnetar.txn.txn_dedup import Sent, TxnVerdict
from magnetar.txn.txn_work import Answered, TxnLane, Work
from magnetar.wire.messages import TxnId


class TransactionWrites:
    """Both buffers of one topic as one. Each method is that of the id's buffer."""

    def __init__(
        self,
        metadata: MetadataTransactionBuffer,
        legacy: LegacyTransactionBuffer | None,
        in_records: Callable[[], bool],
    ) -> None:
        self._metadata = metadata
        self._legacy = legacy
        self._in_records = in_records
        """Whether legacy transactions that are new here are kept in records."""

    def _of(self, txn: TxnId) -> MetadataTransactionBuffer | LegacyTransactionBuffer:
        legacy = self._legacy
        if legacy is None or is_metadata(txn) or self._metadata.tracks(txn):
            return self._metadata
        if self._in_records() and not legacy.tracks(txn):
            return self._metadata
        return legacy

    def is_admitted(self, txn: TxnId) -> bool:
        return self._of(txn).is_admitted(txn)

    def refusal(self, txn: TxnId) -> NotAllowed | None:
        if self._legacy is None and not is_metadata(txn) and not self._in_records():
            return NotAllowed(
                f"{to_text(txn)} is a legacy transaction: segments of scalable topics take none",
                hint="set the transactionKind of the namespace to metadata, or use a v5 client",
            )
        return self._of(txn).refusal(txn)

    def ask(self, txn: TxnId, then: Answered | None = None) -> bool:
        return self._of(txn).ask(txn, then)

    def lane(self, txn: TxnId, name: str) -> TxnLane | None:
        return self._of(txn).lane(txn, name)

    def judge(self, txn: TxnId, sent: Sent) -> TxnVerdict:
        return self._of(txn).judge(txn, sent)

    def appending(self, txn: TxnId) -> Work:
        return self._of(txn).appending(txn)

    def settled(self, work: Work, sent: Sent | None, *, stored: bool) -> None:
        if isinstance(work, LegacyWork):
            assert self._legacy is not None, "the work is its own"
            self._legacy.settled(work, sent, stored=stored)
        else:
            self._metadata.settled(work, sent, stored=stored)
