"""Pure: which consumer of a Key_Shared subscription gets which key.

Owns: the ring of key hashes, the four ways to hand it out (`RangeSplitting`, `ConsistentHashing`,
`StickyRanges`, `EntryBuckets`), and `HashHolds`, which keeps a key in order while it moves between
consumers.

Invariants:
1. The ring is 0..65535. Only sticky consumers, who name their ranges themselves, have position 0.
2. Every position belongs to exactly one consumer (sticky ranges: at most one), if there is one at
   all.
3. A change of membership moves positions only from the one that leaves or to the one that joins
   (entry buckets: whole buckets between any two). `join` and `leave` return exactly what moved.
4. A hash is held by the consumer at which all its unacknowledged entries are. Nobody else may get
   an entry of it before the last of them is acknowledged, given back, or its consumer leaves.

Holding every hash that has entries at a consumer, not only those that moved, makes the draining of
a moved hash (PIP-379) follow from one rule: draining is "held by another than the selected one".
With entry buckets all entries of a bucket stand at one position, so buckets are held and drained.

Relies on: `KeySharedPolicy` for entry buckets that tile the ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from magnetar.errors import InvariantBroken
from magnetar.model.hashing import HASH_MAX, RING_SIZE, HashRange, key_hash
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy

# Pulsar's default for subscriptionKeySharedConsistentHashingReplicaPoints: with it shares differ by
# about a tenth.
POINTS_PER_CONSUMER: Final = 100

_POSITIVE: Final = 0x7FFF_FFFF


class Moved(NamedTuple):
    """A part of the ring that changed hands; None: nobody had it, or nobody has it now."""

    range: HashRange
    source: int | None
    target: int | None


class AssignRefused(NamedTuple):
    """A refusal: a consumer cannot have the ranges it names (ConsumerAssignError on the wire)."""

    reason: str


class _Part(NamedTuple):
    """Positions up to `end`, from where the part before ends."""

    end: int
    owner: int | None


class KeySelector(ABC):
    """The ring, handed out to consumers. Consumers are known by the keys their owner gave them."""

    first_position = 1

    def __init__(self) -> None:
        self._set([_Part(HASH_MAX, None)])

    def ring_position(self, hash32: int) -> int:
        """Where a key with this 32-bit hash stands."""
        # Position 0 is left out: it means "no hash" to Pulsar's dispatcher
        # (STICKY_KEY_HASH_NOT_SET).
        first = self.first_position
        return (hash32 & _POSITIVE) % (RING_SIZE - first) + first

    def select(self, position: int) -> int | None:
        """The consumer of a position on the ring."""
        return self._owners[bisect_left(self._ends, position)]

    def ranges_of(self, key: int) -> list[HashRange]:
        """What a consumer has."""
        return [HashRange(start, end) for start, end, owner in self._spans() if owner == key]

    def join(
        self, key: int, name: str, ranges: Sequence[HashRange] = ()
    ) -> list[Moved] | AssignRefused:
        """Give a new consumer its part; `ranges` is what a sticky one asks for."""
        refused = self._add(key, name, ranges)
        return self._rearrange() if refused is None else refused

    def leave(self, key: int) -> list[Moved]:
        """Hand a consumer's part to the others."""
        self._remove(key)
        return self._rearrange()

    @abstractmethod
    def _add(self, key: int, name: str, ranges: Sequence[HashRange]) -> AssignRefused | None: ...

    @abstractmethod
    def _remove(self, key: int) -> None: ...

    @abstractmethod
    def _parts(self) -> list[_Part]:
        """The ring as it is now: ends ascending, the last one `HASH_MAX`."""

    def _set(self, parts: list[_Part]) -> None:
        self._ends = [part.end for part in parts]
        self._owners = [part.owner for part in parts]

    def _rearrange(self) -> list[Moved]:
        before = list(self._spans())
        # The last consumer left: the whole ring belongs to nobody.
        self._set(self._parts() or [_Part(HASH_MAX, None)])
        return _moves(before, list(self._spans()))

    def _spans(self) -> Iterator[tuple[int, int, int | None]]:
        start = self.first_position
        for end, owner in zip(self._ends, self._owners, strict=True):
            yield start, end, owner
            start = end + 1


class RangeSplitting(KeySelector):
    """One range per consumer: a new one takes the lower half of the widest."""

    def __init__(self) -> None:
        super().__init__()
        self._halves: list[_Part] = []

    def _add(self, key: int, name: str, ranges: Sequence[HashRange]) -> AssignRefused | None:
        # The first consumer has the whole ring.
        if not self._halves:
            self._halves.append(_Part(HASH_MAX, key))
            return None
        starts = [self.first_position, *(part.end + 1 for part in self._halves)]
        sizes = [part.end - start for start, part in zip(starts, self._halves, strict=False)]
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        # More consumers than positions: a range of one position cannot be halved.
        if sizes[widest] < 1:
            return AssignRefused(f"all {len(sizes)} positions of the ring have a consumer")
        middle = HashRange(starts[widest], self._halves[widest].end).midpoint
        self._halves.insert(widest, _Part(middle, key))
        return None

    def _remove(self, key: int) -> None:
        index = next(at for at, part in enumerate(self._halves) if part.owner == key)
        del self._halves[index]
        # The part above grows down by itself; the topmost has none above it.
        if self._halves and index == len(self._halves):
            self._halves[-1] = _Part(HASH_MAX, self._halves[-1].owner)

    def _parts(self) -> list[_Part]:
        return list(self._halves)


class ConsistentHashing(KeySelector):
    """Many points per consumer; a position belongs to the next point, around the ring."""

    def __init__(self) -> None:
        super().__init__()
        self._points: dict[int, list[tuple[str, int, int]]] = {}
        """Who stands at a point: (name, its number among equal names, key), in that order, so that
        equal points have the same winner whoever came first."""
        self._members: dict[int, tuple[str, int]] = {}

    def _add(self, key: int, name: str, ranges: Sequence[HashRange]) -> AssignRefused | None:
        # Equal names are allowed. The lowest free number tells them apart, so that one that comes
        # back under its name stands at its old points.
        numbers = {number for other, number in self._members.values() if other == name}
        number = next(free for free in range(len(numbers) + 1) if free not in numbers)
        self._members[key] = (name, number)
        for point in self._points_of(name, number):
            insort(self._points.setdefault(point, []), (name, number, key))
        return None

    def _remove(self, key: int) -> None:
        name, number = self._members.pop(key)
        for point in self._points_of(name, number):
            standing = self._points[point]
            standing.remove((name, number, key))
            if not standing:
                del self._points[point]

    def _parts(self) -> list[_Part]:
        points = sorted(self._points)
        if not points:
            return []
        parts = [_Part(point, self._points[point][0][2]) for point in points]
        # Around the ring: positions above the last point belong to the first one.
        if points[-1] < HASH_MAX:
            parts.append(_Part(HASH_MAX, parts[0].owner))
        # Neighbours of one owner become one range, so that a lookup searches less.
        joined = [lower for lower, upper in pairwise(parts) if lower.owner != upper.owner]
        return [*joined, parts[-1]]

    def _points_of(self, name: str, number: int) -> list[int]:
        # Two points of one consumer may fall together; it stands there once.
        texts = (f"{name}\0{number}\0{index}" for index in range(POINTS_PER_CONSUMER))
        return sorted({self.ring_position(key_hash(text)) for text in texts})


class StickyRanges(KeySelector):
    """Each consumer gets the ranges it names; positions nobody named belong to nobody."""

    first_position = 0

    def __init__(self) -> None:
        super().__init__()
        self._named: list[tuple[HashRange, int]] = []

    def _add(self, key: int, name: str, ranges: Sequence[HashRange]) -> AssignRefused | None:
        if not ranges:
            return AssignRefused(f"consumer {name!r} names no hash range")
        # Ranges that overlap, one's own or those of others, would give a position two consumers
        # (invariant 2): refused, as in Pulsar.
        wanted = sorted(ranges)
        for lower, upper in pairwise(wanted):
            if lower.overlaps(upper):
                return AssignRefused(f"hash ranges {lower} and {upper} of {name!r} overlap")
        merged = sorted([*self._named, *((each, key) for each in wanted)])
        # In ring order only neighbours can overlap, and among those of one owner none do.
        for (lower, owner), (upper, _) in pairwise(merged):
            if lower.overlaps(upper):
                mine, named = (lower, upper) if owner == key else (upper, lower)
                return AssignRefused(f"hash range {mine} of {name!r} overlaps {named}, taken")
        self._named = merged
        return None

    def _remove(self, key: int) -> None:
        self._named = [(named, owner) for named, owner in self._named if owner != key]

    def _parts(self) -> list[_Part]:
        parts: list[_Part] = []
        start = self.first_position
        for named, owner in self._named:
            # A gap between named ranges: its entries wait until a consumer names it.
            if named.start > start:
                parts.append(_Part(named.start - 1, None))
            parts.append(_Part(named.end, owner))
            start = named.end + 1
        if start <= HASH_MAX:
            parts.append(_Part(HASH_MAX, None))
        return parts


class EntryBuckets(KeySelector):
    """Runs of whole buckets, as equal as possible, to the consumers in the order of their names.

    Who has what depends on nothing but who is there. Consumers beyond the number of buckets have
    none.
    """

    first_position = 0

    def __init__(self, buckets: Sequence[HashRange]) -> None:
        super().__init__()
        self._buckets = tuple(buckets)
        self._starts = [each.start for each in buckets]
        self._sharers: list[tuple[str, int]] = []

    def ring_position(self, hash32: int) -> int:
        """Where the entries of a bucket stand; the hash is that of the ring of buckets, 16 bits."""
        # All entries of a bucket stand at its start, so one hold covers the bucket; never at 0,
        # which some clients leave out of their first bucket.
        return max(self._starts[bisect_right(self._starts, hash32) - 1], 1)

    def _add(self, key: int, name: str, ranges: Sequence[HashRange]) -> AssignRefused | None:
        # Consumers that cut the ring differently would have parts of each other's buckets.
        if tuple(ranges) != self._buckets:
            return AssignRefused(
                f"consumer {name!r} names {len(ranges)} entry buckets that are not the"
                f" {len(self._buckets)} of the others"
            )
        insort(self._sharers, (name, key))
        return None

    def _remove(self, key: int) -> None:
        self._sharers = [each for each in self._sharers if each[1] != key]

    def _parts(self) -> list[_Part]:
        buckets, sharers = len(self._buckets), len(self._sharers)
        parts: list[_Part] = []
        start = 0
        for index, (_, key) in enumerate(self._sharers):
            # Rounded ends: shares differ by one bucket at most, and nothing depends on who came
            # first.
            end = (index + 1) * buckets // sharers
            if end > start:
                parts.append(_Part(self._buckets[end - 1].end, key))
            start = end
        return parts


def selector_for(policy: KeySharedPolicy, consistent_hashing: bool) -> KeySelector:
    """A ring without consumers, handed out as a subscription's policy and the settings say."""
    # Before the mode: consumers that share buckets call themselves sticky on the wire.
    if policy.entry_buckets:
        return EntryBuckets(policy.ranges)
    if policy.mode is KeySharedMode.STICKY:
        return StickyRanges()
    return ConsistentHashing() if consistent_hashing else RangeSplitting()


def _moves(
    before: list[tuple[int, int, int | None]], after: list[tuple[int, int, int | None]]
) -> list[Moved]:
    """What is different between two ways to hand out the whole ring, ascending."""
    moves: list[Moved] = []
    old, new = 0, 0
    # Both cover the whole ring, so they are walked together, from boundary to boundary.
    while old < len(before) and new < len(after):
        low = max(before[old][0], after[new][0])
        high = min(before[old][1], after[new][1])
        source, target = before[old][2], after[new][2]
        if source != target:
            last = moves[-1] if moves else None
            # Pieces of one move that a boundary cut are told as one range.
            if last is not None and last.range.end + 1 == low and last[1:] == (source, target):
                moves[-1] = Moved(HashRange(last.range.start, high), source, target)
            else:
                moves.append(Moved(HashRange(low, high), source, target))
        old += before[old][1] == high
        new += after[new][1] == high
    return moves


class HashHolds:
    """The holder of each hash: a consumer, and how many unacknowledged entries it has."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def allows(self, position: int, key: int) -> bool:
        """May this consumer get an entry of this hash now?"""
        held = self._held.get(position)
        return held is None or held[0] == key

    def take(self, position: int, key: int) -> None:
        """One more entry of this hash is at the consumer."""
        held = self._held.get(position)
        # Free: nothing of this hash is unacknowledged, whoever had it before.
        if held is None:
            self._held[position] = (key, 1)
        elif held[0] == key:
            self._held[position] = (key, held[1] + 1)
        else:
            raise InvariantBroken(f"hash {position} goes to {key}, but {held[0]} holds it")

    def release(self, position: int) -> bool:
        """One entry less; True: it was the last, the hash is free."""
        key, count = self._held[position]
        if count > 1:
            self._held[position] = (key, count - 1)
            return False
        del self._held[position]
        return True

    def release_all(self, position: int) -> None:
        """The consumer that holds a hash is gone, with all its entries."""
        del self._held[position]

    def clear(self) -> None:
        self._held.clear()

    def holders(self) -> dict[int, tuple[int, int]]:
        """Consumer and number of entries by hash."""
        return dict(self._held)

    def draining(self, selector: KeySelector) -> dict[int, int]:
        """Hashes that wait for their former consumer: how many entries it still has."""
        # A held hash whose selected consumer is another one: what PIP-379 calls draining hashes.
        return {
            position: count
            for position, (key, count) in self._held.items()
            if selector.select(position) != key
        }
