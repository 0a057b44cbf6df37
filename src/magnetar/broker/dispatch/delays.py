"""The messages of one subscription that wait for their time, and when to look at them again.

Owns: `Delays`: the index, the clock beside it, and its part of the metric.

Invariants:
1. What is here was read, is open as far as the cursor knew then, and is at no consumer.
2. `seconds_left` is above zero, or None: whoever waits that long never spins. It ends where a
   bucket of the index does, so at most two of them are waited for in a tick.
3. It is told of every rewind: what it holds is read again then.

Relies on: `limits.subscription_delayed_entries` for its size. Beyond it `is_full`, and its owner
reads nothing new until something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.entries import EntryView
from magnetar.ledger.api import Entry
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import DELAYED_ENTRIES

# The wall clock may be set, and times are by it: a wait by the other clock is cut in pieces.
_LOOK_SECONDS: Final = 60.0
_MS_PER_SECOND: Final = 1000
# More than one: a sweep that starts when half is needless ends before as much again has come.
_SWEPT_PER_ENTRY: Final = 4


class Delays:
    """The messages that wait on one subscription. Made when the first one does."""

    def __init__(self, rule: Callable[[], DelayRule], clock: Clock, limits: Limits) -> None:
        self._rule = rule
        self._clock = clock
        self._entries_max = limits.subscription_delayed_entries
        self._index = DelayedIndex()
        self.is_run = False
        """Whether all that was read last had to wait: then more may be read at a time."""

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, position: Position) -> bool:
        return position in self._index

    @property
    def size_bytes(self) -> int:
        return self._index.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether nothing new is to be read: too many wait, or what follows waits as long."""
        full = len(self._index) >= self._entries_max or self._index.is_fixed(self._rule())
        return full and not self.has_due

    # --- coming

    def sift(self, entries: list[Entry], marked: list[Entry]) -> list[Entry]:
        """Keep those of `marked` that have to wait; the other entries, in order."""
        rule, now_ms = self._rule(), self._clock.now_ms()
        late: set[Position] = set()
        for entry in marked:
            at_ms = EntryView.of(entry).deliver_at
            # One that is due when it is read never waits.
            if at_ms is not None and not rule.is_due(at_ms, now_ms):
                self._add(entry.position, at_ms, rule)
                late.add(entry.position)
        self.is_run = len(late) == len(entries)
        return [entry for entry in entries if entry.position not in late] if late else entries

    def _add(self, position: Position, at_ms: int, rule: DelayRule) -> None:
        before = len(self._index)
        self._index.add(position, at_ms, rule)
        self._index.sweep(_SWEPT_PER_ENTRY)
        DELAYED_ENTRIES.inc(len(self._index) - before)

    # --- going

    @property
    def has_due(self) -> bool:
        return self._index.has_due(self._clock.now_ms(), self._rule())

    def first_due(self, count: int) -> list[Position]:
        """The first that are due; they stay until they are removed."""
        if not self._index:
            return []
        return self._index.first_due(count, self._clock.now_ms(), self._rule())

    def remove(self, position: Position) -> bool:
        """False: it was not here, or not any more."""
        removed = self._index.remove(position)
        if removed:
            DELAYED_ENTRIES.dec()
        return removed

    def remove_all(self, positions: Iterable[Position]) -> None:
        before = len(self._index)
        for position in positions:
            self._index.remove(position)
        DELAYED_ENTRIES.dec(before - len(self._index))

    def drop_through(self, position: Position) -> None:
        """Take out what is acknowledged up to a position."""
        before = len(self._index)
        self._index.drop_through(position)
        DELAYED_ENTRIES.dec(before - len(self._index))

    def clear(self) -> None:
        """Take all out: it is read again, or nobody reads any more."""
        DELAYED_ENTRIES.dec(len(self._index))
        self._index.clear()

    # --- waiting

    def seconds_left(self) -> float | None:
        """How long until something is due; None: nothing waits, or only for a consumer."""
        rule, now_ms = self._rule(), self._clock.now_ms()
        at_ms = self._index.next_ms(rule)
        if at_ms is None or self._index.has_due(now_ms, rule):
            return None
        return min(max(at_ms - now_ms, 1) / _MS_PER_SECOND, _LOOK_SECONDS)
