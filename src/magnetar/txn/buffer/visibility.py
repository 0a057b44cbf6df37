"""Up to where a segment may be read, and which entries below that are not for consumers (pure).

Owns: `Visibility`: the undecided transactions of one segment with their lower bounds, the aborted
ones with their last positions, and the gate that is closed until both are known.

Invariants:
1. While the gate is closed nothing may be read. Then: what stands below the lowest bound of any
   undecided transaction, or without one, everything durable.
2. A bound is never raised. A transaction is tracked before its first entry is appended, and until
   its decision is applied: for an abort that is after its aborted record is durable.
3. An entry below the maxReadPosition of a transaction that is not aborted (or behind the last
   position of one that is) is committed.
4. The maxReadPosition of a segment never falls while the gate is open, as long as every bound is
   the next position of the log, or above, when it is tracked.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position
from magnetar.wire.messages import TxnId

NOTHING_READABLE: Final = Position(-1, -1)
"""As a maxReadPosition: no entry stands at or below it."""


class Visibility:
    """The part of one segment that its consumers may see."""

    def __init__(self) -> None:
        # The 'gate': closed until recovery has read pins and aborted records.
        self._open = False
        self._bounds: dict[TxnId, Position] = {}
        self._lowest: list[tuple[Position, TxnId]] = []
        """A heap of bounds; those that are tracked no more are dropped when they come up."""
        self._aborted: dict[TxnId, Position] = {}

    # --- recovery

    @property
    def is_open(self) -> bool:
        return self._open

    def open_gate(self) -> None:
        """All pins and aborted records are known."""
        self._open = True

    # --- transactions

    @property
    def undecided(self) -> Mapping[TxnId, Position]:
        """Lower bounds of those whose decision is not applied yet."""
        return MappingProxyType(self._bounds)

    @property
    def aborted(self) -> Mapping[TxnId, Position]:
        """Last positions of those that were aborted."""
        return MappingProxyType(self._aborted)

    def track(self, txn: TxnId, bound: Position) -> None:
        """A transaction may append at or above `bound`."""
        # A second bound could only be higher, and no bound is ever raised (invariant 2).
        if txn in self._bounds:
            raise InvariantBroken(f"{txn} is tracked twice")
        self._bounds[txn] = bound
        heapq.heappush(self._lowest, (bound, txn))

    def commit(self, txn: TxnId) -> None:
        """Show the entries of a transaction to consumers; one that is not tracked is ignored."""
        self._bounds.pop(txn, None)

    def abort(self, txn: TxnId, last: Position) -> None:
        """Hide the entries of a transaction up to `last`; the record of that is durable."""
        self._bounds.pop(txn, None)
        # Never lowered: what was hidden once stays hidden ('aborted stays known').
        self._aborted[txn] = max(last, self._aborted.get(txn, last))

    def forget_aborted(self, first_kept: Position) -> list[TxnId]:
        """Entries below this position are trimmed: who has none left is forgotten."""
        gone = [txn for txn, last in self._aborted.items() if last < first_kept]
        for txn in gone:
            del self._aborted[txn]
        return gone

    # --- questions

    def max_read_position(self, last_durable: Position) -> Position:
        """The last position that consumers may see."""
        if not self._open:
            return NOTHING_READABLE
        lowest = self.lowest_bound()
        # No open transaction, or none that has anything durable yet.
        if lowest is None or lowest > last_durable:
            return last_durable
        # Kafka's last stable offset: just below what the oldest open transaction may have written.
        return lowest.previous

    def lowest_bound(self) -> Position | None:
        """Nothing at or above it may be trimmed; None: no transaction is undecided."""
        # A bound in the middle is left where it is when its transaction ends: taking it out there
        # would cost as much as the heap is long.
        heap = self._lowest
        while heap and self._bounds.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def blocker(self) -> TxnId | None:
        """The transaction that holds the maxReadPosition."""
        return None if self.lowest_bound() is None else self._lowest[0][1]

    def is_aborted(self, txn: TxnId, position: Position) -> bool:
        """Whether an entry of a transaction is not for consumers."""
        last = self._aborted.get(txn)
        return last is not None and position <= last
