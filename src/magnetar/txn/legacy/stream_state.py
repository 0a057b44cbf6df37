"""Pure: which legacy transactions of a stream are open, by what stands in it.

Owns: `StreamState`, and the record of it that is kept beside the stream.

The state is the fold of the stream over its entries: a message opens its transaction, a marker
ends it. The record is the state up to a position, so that a recovery reads the rest alone.

Invariants:
1. A record and the stream from its `scanned_to` on give the state that was there when the stream
   ended, whenever the record was taken. So `scanned_to` is never behind a marker of a transaction
   that the record calls open, durable or not (`marking`).
2. A transaction that is over is not opened again, for as long as its end is remembered
   (`ended_ids`).
3. `last_marker` is never before a marker: nothing behind it has to be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from magnetar.managed_ledger.names import encode_name
from magnetar.model.ids import Position
from magnetar.txn.ids import from_text, is_metadata, to_text
from magnetar.txn.legacy.ended_ids import EndedIds
from magnetar.txn.legacy.markers import Trace
from magnetar.wire.messages import TxnId

STREAM_RECORDS: Final = "/txn/legacy"

# A stream record holds them all, in one value of the store.
OPEN_MAX: Final = 4000
"""Open transactions of one topic: with all else that it holds, the record stays below its limit."""


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True):
    """None of its messages stands before this position."""

    txn: str
    ledger_id: int
    entry_id: int

    @property
    def first(self) -> Position:
        return Position(self.ledger_id, self.entry_id)


class LowWatermark(msgspec.Struct, frozen=True, array_like=True):
    """No transaction of a coordinator at or below this number is open."""

    coordinator: int
    number: int


class StreamRecord(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The state of a stream up to a position. Without one, it has no legacy transactions."""

    segment: str
    epoch: int
    """Of the owner that wrote or adopted it."""
    scanned_to: tuple[int, int]
    """The first position that it says nothing of."""
    open: tuple[OpenTransaction, ...] = ()
    ended: tuple[str, ...] = ()
    low: tuple[LowWatermark, ...] = ()
    last_marker: tuple[int, int] | None = None
    ack_logs: tuple[str, ...] = ()
    """Subscriptions that have a log of pending acknowledgements."""


def stream_key(segment: str) -> str:
    return f"{STREAM_RECORDS}/{encode_name(segment)}"


class StreamState:
    """The legacy transactions of one stream."""

    def __init__(self) -> None:
        # Kept in the record: `_open`, `_ended`, the last marker and which logs
        # there are. `_marking` is of this owner alone: markers that are being
        # appended, and where at the earliest.
        self.last_marker: Position | None = None
        self.ack_logs: set[str] = set()
        self._open: dict[TxnId, Position] = {}
        self._ended = EndedIds()
        self._marking: dict[TxnId, Position] = {}

    # --- questions

    @property
    def open(self) -> Mapping[TxnId, Position]:
        """Where the messages of each open transaction begin, at the earliest."""
        return MappingProxyType(self._open)

    def is_over(self, txn: TxnId) -> bool:
        """Whether a transaction has ended here, or anywhere by its coordinator's word."""
        return txn in self._ended

    def leftovers(self) -> list[TxnId]:
        """Open here, although their coordinator says that they are over: nobody will end them."""
        return [txn for txn in self._open if self._ended.is_below(txn)]

    # --- the fold

    def wrote(self, txn: TxnId, position: Position) -> None:
        """A message of a transaction stands at a position, or will."""
        # The first message sets the bound. One of a transaction that has ended is only met again: a
        # scan may begin before markers that the record includes.
        if txn not in self._open and txn not in self._ended:
            self._open[txn] = position

    def marking(self, txn: TxnId, floor: Position) -> None:
        """A marker is about to be appended, at this position or behind it."""
        self._marking.setdefault(txn, floor)

    def marked(self, txn: TxnId, position: Position) -> None:
        """The marker of a transaction stands at a position."""
        self._note_marker(position)
        self.over(txn)

    def over(self, txn: TxnId, end: Position | None = None) -> None:
        """A transaction has ended; without a marker that is known: `end` is that of the stream."""
        # Its append was given up, perhaps after it reached the log: `last_marker` errs upwards.
        if self._marking.pop(txn, None) is not None and end is not None:
            self._note_marker(end)  # an attempt to append one may have left it there
        self._open.pop(txn, None)
        self._ended.add(txn)

    def note_low(self, coordinator: int, number: int) -> bool:
        """A coordinator says that none at or below this number is open; False: that is not new."""
        return self._ended.note_low(coordinator, number)

    def scan(self, position: Position, trace: Trace) -> None:
        """An entry of the stream, in order."""
        # Of the other kind: pins and records tell of it, and it has no markers.
        if is_metadata(trace.txn):
            return
        if trace.end is None:
            self.wrote(trace.txn, position)
        else:
            self.marked(trace.txn, position)

    def trimmed(self, first_kept: Position) -> None:
        """Entries below this position are gone."""
        if self.last_marker is not None and self.last_marker < first_kept:
            self.last_marker = None

    def ended_before(self, trimmed_through: Position) -> None:
        """Entries up to this one are gone, and nothing of an open transaction is trimmed.

        The markers of those that had some of them may be gone too, with the record older than that.
        """
        for txn in [each for each, first in self._open.items() if first <= trimmed_through]:
            self.over(txn)

    def _note_marker(self, position: Position) -> None:
        last = self.last_marker
        self.last_marker = position if last is None else max(last, position)

    # --- the record

    def record(
        self, segment: str, epoch: int, end: Position, over: TxnId | None = None
    ) -> StreamRecord:
        """The state of this moment; `end` is behind the last durable entry.

        `over` is a transaction that the record itself ends: the stream takes no marker any more.
        """
        # Invariant 1: a marker in flight is scanned again, should it have reached the log.
        floors = [floor for txn, floor in self._marking.items() if txn != over]
        opened = self._open.items()
        return StreamRecord(
            segment,
            epoch,
            min([end, *floors]),
            tuple(OpenTransaction(to_text(txn), *at) for txn, at in opened if txn != over),
            tuple(to_text(txn) for txn in self._ended),
            tuple(LowWatermark(*each) for each in sorted(self._ended.low.items())),
            # Sealed with a marker whose append was given up: it may be the last entry.
            end if over in self._marking else self.last_marker,
            tuple(sorted(self.ack_logs)),
        )

    @classmethod
    def of(cls, record: StreamRecord) -> StreamState:
        """What a record says."""
        state = cls()
        state._open = {from_text(each.txn): each.first for each in record.open}
        low = {each.coordinator: each.number for each in record.low}
        state._ended = EndedIds((from_text(text) for text in record.ended), low)
        state.last_marker = None if record.last_marker is None else Position(*record.last_marker)
        state.ack_logs = set(record.ack_logs)
        return state
