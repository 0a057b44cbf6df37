"""Pure: the messages of a subscription that wait for their time of delivery.

Owns: `DelayedIndex`: positions by the time at which they are due, in buckets, and which of them
are due by now.

Invariants (`check_invariants`):
1. A position is here at most once. It leaves by `remove`, `drop_through` or `clear` alone.
2. No position is due before the rule in force says so. A bucket has the time at which the last of
   its messages is due: times are cut to the largest power of two that is not above the tick, and
   rounded up. So a strict rule is late by less than a tick, and the other one early by a tick.
3. What is due comes in the order of the log, as far as it became due together.
4. What was removed leaves its bucket when that is due, or when `sweep` comes to it: it takes memory
   until then. With a sweep after each `add` no more than what waits does, and some buckets.
5. A bucket of one position is a number, one of few an array, and one of many a bitmap. Where times
   are spread widely nearly all are of the first two kinds, and a bitmap would take ten times as
   much: a million messages take 1 to 110 MB, by how widely their times are spread.

Relies on: positions that come in the order of the log, and once each between two calls of `clear`,
as dispatch reads them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, TypeAlias

from pyroaring import BitMap64

from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position

_ENTRY_BITS: Final = 32
_ENTRY_MASK: Final = (1 << _ENTRY_BITS) - 1

Bucket: TypeAlias = "int | array[int] | BitMap64"
_ARRAY_MAX: Final = 64

# Measured: a bucket with its place in dict and heap, what an array adds, and what each entry does.
_BUCKET_BYTES: Final = 85
_ARRAY_BYTES: Final = 96
_ENTRY_BYTES: Final = 9


class DelayedIndex:
    """Positions by their time."""

    __slots__ = (
        "_buckets",
        "_due",
        "_is_fixed",
        "_latest_ms",
        "_ledgers",
        "_placed",
        "_times",
        "_unswept",
        "_waiting",
    )

    def __init__(self) -> None:
        # Positions as numbers: the number of the ledger here, then the entry. Buckets may name some
        # that were removed since: what is not in `_waiting` is nowhere.
        self._ledgers: list[int] = []
        self._waiting = BitMap64()
        self._due = BitMap64()
        self._buckets: dict[int, Bucket] = {}
        self._times: list[int] = []
        self._placed = 0
        """Numbers in buckets, of what was removed too."""
        self._unswept: list[int] = []
        # Whether all were due in the order in which they came, as where each is as late as the
        # others; and the latest time so far.
        self._is_fixed = True
        self._latest_ms = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, position: Position) -> bool:
        number = self._number_of(position)
        return number is not None and number in self._waiting

    @property
    def size_bytes(self) -> int:
        """What it takes of memory, estimated."""
        entries, buckets = len(self._waiting), len(self._buckets)
        arrays = min(buckets, max(entries - buckets, 0))
        return buckets * _BUCKET_BYTES + arrays * _ARRAY_BYTES + entries * _ENTRY_BYTES

    # --- what waits

    def add(self, position: Position, deliver_at_ms: int, rule: DelayRule) -> None:
        """Put one in that is not due yet; if it is in already, nothing changes."""
        ledgers = self._ledgers
        if not ledgers or ledgers[-1] != position.ledger_id:
            if ledgers and ledgers[-1] > position.ledger_id:
                raise InvariantBroken(f"{position} was read after ledger {ledgers[-1]}")
            ledgers.append(position.ledger_id)
        number = len(ledgers) - 1 << _ENTRY_BITS | position.entry_id
        if number in self._waiting:
            return
        self._waiting.add(number)
        self._placed += 1
        step = rule.step_ms
        at = (deliver_at_ms + step - 1) & -step
        bucket = self._buckets.get(at)
        if bucket is None:
            self._buckets[at] = number
            heappush(self._times, at)  # where a sweep was it may stand twice: the second is empty
        else:
            self._buckets[at] = _joined(bucket, number)
        self._is_fixed = self._is_fixed and deliver_at_ms >= self._latest_ms - rule.tick_ms
        self._latest_ms = max(self._latest_ms, deliver_at_ms)

    def remove(self, position: Position) -> bool:
        """Take one out, due or not; False: it was not in."""
        number = self._number_of(position)
        if number is None or number not in self._waiting:
            return False
        self._waiting.discard(number)
        self._due.discard(number)
        self._forget_if_empty()
        return True

    def drop_through(self, position: Position) -> None:
        """Take everything at or below a position out."""
        above = bisect_right(self._ledgers, position.ledger_id)
        if above and self._ledgers[above - 1] == position.ledger_id:
            end = above - 1 << _ENTRY_BITS | min(position.entry_id + 1, _ENTRY_MASK)
        else:
            end = above << _ENTRY_BITS
        for each in (self._waiting, self._due):
            each.remove_range(0, end)
        self._forget_if_empty()

    def clear(self) -> None:
        """Take all out."""
        self._waiting.clear()
        self._forget_if_empty()

    def sweep(self, buckets: int) -> None:
        """If most of what is in buckets was removed, forget it in so many of them."""
        if not self._unswept:
            if self._placed < 2 * len(self._waiting) + buckets:
                return
            self._unswept = list(self._buckets)
        for at in self._unswept[-buckets:]:
            self._sweep_bucket(at)
        del self._unswept[-buckets:]
        # The heap is made anew once most of it is needless: rarely, and a few ms for 10^5 times.
        if not self._unswept and len(self._times) > 2 * len(self._buckets):
            self._times = list(self._buckets)
            heapify(self._times)

    def _sweep_bucket(self, at: int) -> None:
        bucket = self._buckets.get(at)
        if bucket is None:
            return  # due meanwhile
        kept = _numbers(bucket) & self._waiting
        self._placed -= _size(bucket) - len(kept)
        if not kept:
            del self._buckets[at]
        elif len(kept) < _size(bucket):
            self._buckets[at] = array("Q", kept) if len(kept) <= _ARRAY_MAX else kept

    # --- what is due

    def has_due(self, now_ms: int, rule: DelayRule) -> bool:
        if self._due:
            return True
        return bool(self._times) and rule.is_due(self._times[0], now_ms)

    def first_due(self, count: int, now_ms: int, rule: DelayRule) -> list[Position]:
        """The first of those that are due; they stay in. The work is that of what is given."""
        due, times = self._due, self._times
        while len(due) < count and times and rule.is_due(times[0], now_ms):
            bucket = self._buckets.pop(heappop(times), None)
            # Some may have been removed, or all.
            if bucket is not None:
                self._placed -= _size(bucket)
                due |= _numbers(bucket) & self._waiting
        return [
            Position(self._ledgers[each >> _ENTRY_BITS], each & _ENTRY_MASK)
            for each in islice(due, count)
        ]

    def next_ms(self, rule: DelayRule) -> int | None:
        """When to look again for what is due, if nothing is now; None: nothing waits."""
        if not self._times:
            return None
        # Not strict: with the first of the bucket, not with its last.
        return self._times[0] - (0 if rule.strict else rule.step_ms)

    def is_fixed(self, rule: DelayRule) -> bool:
        """Whether so many wait, all equally late, that what follows is not due before them."""
        return self._is_fixed and 0 < rule.fixed_delay_entries <= len(self._waiting)

    # --- parts

    def _number_of(self, position: Position) -> int | None:
        at = bisect_right(self._ledgers, position.ledger_id) - 1
        if at < 0 or self._ledgers[at] != position.ledger_id:
            return None
        return at << _ENTRY_BITS | position.entry_id

    def _forget_if_empty(self) -> None:
        """Begin anew once nothing is in, with times and ledgers too."""
        if not self._waiting:
            self._due.clear()
            self._buckets, self._times, self._ledgers = {}, [], []
            self._unswept, self._placed = [], 0
            self._is_fixed, self._latest_ms = True, 0

    def check_invariants(self) -> None:
        placed = BitMap64(self._due)
        if not self._buckets.keys() <= set(self._times):
            raise InvariantBroken("a bucket has no time in the heap")
        found = sum(map(_size, self._buckets.values()))
        if found != self._placed:
            raise InvariantBroken(f"{found} are in buckets, {self._placed} are counted")
        for bucket in self._buckets.values():
            numbers = _numbers(bucket)
            if numbers & placed:
                raise InvariantBroken(f"positions {list(numbers & placed)} wait twice")
            placed |= numbers
        if not self._waiting <= placed or not self._due <= self._waiting:
            raise InvariantBroken("what waits is not what is in buckets or due")


def _joined(bucket: Bucket, number: int) -> Bucket:
    """A bucket with one more in it."""
    if isinstance(bucket, int):
        return array("Q", (bucket, number))
    if isinstance(bucket, BitMap64):
        bucket.add(number)
        return bucket
    if len(bucket) < _ARRAY_MAX:
        bucket.append(number)
        return bucket
    return BitMap64((*bucket, number))


def _numbers(bucket: Bucket) -> BitMap64:
    if isinstance(bucket, BitMap64):
        return bucket
    return BitMap64((bucket,) if isinstance(bucket, int) else bucket)


def _size(bucket: Bucket) -> int:
    return 1 if isinstance(bucket, int) else len(bucket)
