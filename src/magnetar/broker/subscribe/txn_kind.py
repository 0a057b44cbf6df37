"""The kind of a transaction on one topic: kept in records, or by markers and logs.

Owns: `TxnKind`, the rule that sends and acknowledgements share.

A topic serves both kinds at once: the id tells. Segments of scalable topics have no markers. Where
the policy of the namespace says so, legacy transactions are kept in records, as the others are;
one that has begun in one way goes on so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from magnetar.errors import NotAllowed, TransactionConflict
from magnetar.txn.ids import is_metadata, to_text
from magnetar.wire.messages import TxnId

Refusal = TypeVar("Refusal", NotAllowed, TransactionConflict)


class TxnKind:
    """The rule of one topic."""

    def __init__(self, *, has_markers: bool, in_records: Callable[[], bool]) -> None:
        self._has_markers = has_markers
        self._in_records = in_records
        """Whether legacy transactions that are new here are kept in records."""

    def is_legacy(self, txn: TxnId, *, is_in_records: bool, is_in_log: bool) -> bool:
        """Whether one goes the legacy way; it has begun in records, in the log, or not at all."""
        # Records win over the policy: a transaction that began in them would not find its holds in
        # a log.
        if not self._has_markers or is_metadata(txn) or is_in_records:
            return False
        return is_in_log or not self._in_records()

    def refusal(self, txn: TxnId, error: type[Refusal]) -> Refusal | None:
        """Why a transaction can go neither way, if so."""
        # Left over: a legacy id on a segment, whose namespace does not keep those in records.
        if self._has_markers or is_metadata(txn) or self._in_records():
            return None
        return error(
            f"{to_text(txn)} is a legacy transaction: segments of scalable topics take none",
            hint="set the transactionKind of the namespace to metadata, or use a v5 client",
        )
