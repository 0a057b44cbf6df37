"""A cursor as its durable record has it (pure).

Owns: `DurableCursor`: whether what a transaction acknowledged is in a cursor's record.

Relies on: acknowledgements that stand in the record itself, as those of a simulation do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from magnetar.managed_ledger.acked import AckedSet, ChunkKey
from magnetar.managed_ledger.records import CursorRecord, decode_chunk, decode_table
from magnetar.model.ids import Position
from magnetar.txn.records import AckOp


class DurableCursor:
    """What one record says."""

    def __init__(self, record: CursorRecord) -> None:
        self._mark_delete = Position(*record.mark_delete)
        self._acked = AckedSet()
        self.is_whole = record.table_pieces == 0
        """False: a part of it stands elsewhere, and is not known here."""
        for ref in decode_table(record.name, record.table):
            if ref.inline:
                chunk = decode_chunk(record.name, ref.inline)
                self._acked.load_chunk(ChunkKey(ref.ledger_id, ref.number), chunk)
            else:
                self.is_whole = False

    def __str__(self) -> str:
        return f"{self._mark_delete} and {list(self._acked.ranges())}"

    def missing(self, ack: AckOp, present: Iterable[Position]) -> Iterator[Position]:
        """What an intent says and the record does not; `present` are the entries of the log."""
        if not self.is_whole:
            return
        for each in ack.entries:
            if not self._holds(each.position, each.unacked_bits):
                yield each.position
        if ack.cumulative:
            last = max(each.position for each in ack.entries)
            yield from (each for each in present if each < last and not self._holds(each, 0))

    def _holds(self, position: Position, left_out: int) -> bool:
        if position <= self._mark_delete or position in self._acked:
            return True
        unacked = self._acked.unacked_indexes(position)
        return unacked is not None and left_out != 0 and unacked & ~left_out == 0
