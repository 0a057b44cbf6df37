"""The 16-bit hash ring that keys are routed on (pure).

Owns: the hash of a routing key, the two 16-bit halves taken from it, and `HashRange`.

Invariants:
1. The hash is MurmurHash3 x86 32 with seed 0 over the key's UTF-8 bytes: clients compute the same.
2. The high half chooses the segment, the low half the entry bucket, so the two are independent.
3. Both ends of a range belong to it, and 0 <= start <= end <= 65535.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mmh3

from magnetar.errors import InvalidLayout

# One half of a 32-bit hash: the four hexadecimal digits that segment names are written with.
RING_SIZE: Final = 65536
HASH_MAX: Final = RING_SIZE - 1


def key_hash(key: str | bytes) -> int:
    """The unsigned 32-bit hash of a routing key."""
    # Invariant 1: with another seed, or a signed hash, a key would go to
    # another segment here than at the client that produces it.
    return mmh3.hash(key, 0, False)


def segment_hash(hash32: int) -> int:
    """Where a key stands on the ring of segments."""
    return hash32 >> 16


def bucket_hash(hash32: int) -> int:
    """Where a key stands on the ring of entry buckets inside its segment."""
    return hash32 & 0xFFFF


def partition_of(hash32: int, partitions: int) -> int:
    """The partition of a regular partitioned topic that v4 clients send this key to."""
    # Java's clients clear the sign bit before the remainder; regular topics go by that for ever.
    return (hash32 & 0x7FFF_FFFF) % partitions


@dataclass(frozen=True, slots=True, order=True)
class HashRange:
    """A part of the ring, both ends included."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= HASH_MAX:
            raise InvalidLayout(f"{self.start}-{self.end} is not a range within 0-{HASH_MAX}")

    def __contains__(self, position: int) -> bool:
        return self.start <= position <= self.end

    def __str__(self) -> str:
        return f"{self.start:04x}-{self.end:04x}"

    @property
    def size(self) -> int:
        return self.end - self.start + 1

    @property
    def midpoint(self) -> int:
        """The last position of the lower half."""
        return self.start + (self.end - self.start) // 2

    def overlaps(self, other: HashRange) -> bool:
        return self.start <= other.end and other.start <= self.end

    def is_before(self, other: HashRange) -> bool:
        """Does `other` begin right after this one?"""
        return self.end + 1 == other.start

    def split(self, after: int) -> tuple[HashRange, HashRange]:
        """The part up to and including `after`, and the rest; neither may be empty."""
        # `after == end` would leave an upper half without positions, which no key could ever reach.
        if not self.start <= after < self.end:
            raise InvalidLayout(
                f"range {self} cannot be split after {after:04x}",
                hint=f"choose a point from {self.start:04x} to just below {self.end:04x}"
                if self.size > 1
                else "a range of one position cannot be split",
            )
        return HashRange(self.start, after), HashRange(after + 1, self.end)


FULL_RING: Final = HashRange(0, HASH_MAX)
