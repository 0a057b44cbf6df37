"""The rates that one subscription waits for before it reads: its own, and that of its topic.

Owns: `DispatchThrottle`, `DispatchTurn`, one step of dispatch under it, and `ThrottleCounts`.

Invariants:
1. A turn begins only with room under every rate. It takes what it may read at most, so that others
   who read at the same time have the rest; at its end only what was handed out counts.
2. Entries are read and delivered whole: the last one of a turn may be more than there was room for,
   and the next turn waits until that is made up for.
3. Messages count one by one, or each entry as one of them, as the broker is set up.

Relies on: its dispatcher, which ends every turn before it begins another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from magnetar.broker.api import Delivery
from magnetar.broker.rates.rate_limiter import RateLimiter
from magnetar.runtime.signal import Signal


class ThrottleCounts:
    """The times that one subscription had to wait, as statistics show them."""

    __slots__ = ("own_bytes", "own_messages", "topic_bytes", "topic_messages")

    def __init__(self) -> None:
        # For its own rate and for its topic's, each by what there was no room for.
        self.own_messages = self.own_bytes = 0
        self.topic_messages = self.topic_bytes = 0

    def count(self, limiter: RateLimiter, *, is_own: bool) -> None:
        """Count a wait that begins."""
        _, size = limiter.room()
        if is_own:
            self.own_bytes += size < 1
            self.own_messages += size >= 1
        else:
            self.topic_bytes += size < 1
            self.topic_messages += size >= 1


class DispatchTurn:
    """A step of dispatch: what it may read, and what it has handed out."""

    __slots__ = ("_by_entries", "_limiters", "_messages", "_reserved", "_size", "bytes", "entries")

    def __init__(
        self,
        limiters: Sequence[RateLimiter],
        entries: int,
        size: int,
        reserved: float,
        *,
        by_entries: bool,
    ) -> None:
        self.entries = entries
        """How many may be read."""
        self.bytes = size
        """As much of them, but for one entry."""
        self._limiters = limiters
        self._reserved = reserved
        self._by_entries = by_entries
        self._messages = self._size = 0

    def hand_out(self, turns: Iterable[Sequence[Delivery]]) -> None:
        """Count what consumers get."""
        for each in turns:
            self._size += sum([len(delivery.payload) for delivery in each])
            self._messages += (
                len(each) if self._by_entries else sum([delivery.num_messages for delivery in each])
            )

    def end(self) -> None:
        """Let the rates know what came of it."""
        for each in self._limiters:
            each.settle(self._messages - self._reserved, self._size - self.bytes)


class DispatchThrottle:
    """The rates of one subscription; at least one of the two."""

    def __init__(
        self, own: RateLimiter | None, shared: RateLimiter | None, *, by_entries: bool
    ) -> None:
        self.own = own
        self.counts = ThrottleCounts()
        """Given by its dispatcher, which keeps them over changes of the rates."""
        self._limiters = [each for each in (own, shared) if each is not None]
        self._by_entries = by_entries

    def begin(
        self, wake: Signal, entries: int, size: int, messages_per_entry: float
    ) -> DispatchTurn | None:
        """A turn for a read of so much at most; None: `wake` advances when to ask again."""
        # Its own first: a place in the line of the topic is not kept for one that may not read.
        for each in self._limiters:
            before = each.times
            if not each.admits(wake):
                if each.times > before:
                    self.counts.count(each, is_own=each is self.own)
                return None
        rooms = [each.room() for each in self._limiters]
        messages, size_left = (min(each) for each in zip(*rooms, strict=True))
        per_entry = 1.0 if self._by_entries else messages_per_entry
        entries = int(min(entries, max(messages / per_entry, 1)))
        size = int(min(size, max(size_left, 1)))
        for each in self._limiters:
            each.take(entries * per_entry, size)
        return DispatchTurn(
            self._limiters, entries, size, entries * per_entry, by_entries=self._by_entries
        )

    def leave(self, wake: Signal) -> None:
        """Wait no more."""
        for each in self._limiters:
            each.leave(wake)
