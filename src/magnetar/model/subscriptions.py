"""A subscription: its name, its type, where it starts, whether it lasts (pure).

Owns: `SubscriptionSpec` and the policy of a Key_Shared one. The numbers of the enums are those of
the protocol.

Invariants:
1. A name is not blank, holds no control character, and fits into a metadata key.
2. Only a Key_Shared subscription has a key-shared policy.
3. Sticky ranges are not empty, lie on the ring and do not overlap; they are kept in ring order.
4. Entry buckets are sticky ranges that tile the whole ring from 0 on. Position 1 is in the first:
   entries of position 0 stand there, because some clients leave 0 out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

from magnetar.errors import InvalidLayout, NotAllowed
from magnetar.model.hashing import HASH_MAX, HashRange

SUBSCRIPTION_NAME_BYTES_MAX: Final = 256

COMPACTION: Final = "__compaction"
"""Pulsar's name for the position of a topic's compaction: the broker's own, nobody's to read."""

_UNUSABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class SubscriptionType(IntEnum):
    """The type of a subscription: how its consumers share the messages."""

    EXCLUSIVE = 0
    """There is one consumer; others are refused."""
    SHARED = 1
    """Each message goes to any one of them."""
    FAILOVER = 2
    """One of them gets all messages; when it leaves, the next one does."""
    KEY_SHARED = 3
    """Each key's messages go to one of them, in order."""

    @property
    def takes_cumulative_acks(self) -> bool:
        """Only where one consumer at a time sees messages in order."""
        return self in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)


class InitialPosition(IntEnum):
    """The end of the topic at which a new subscription starts."""

    LATEST = 0
    """Behind what the topic holds: only new messages come."""
    EARLIEST = 1
    """At the first message that the topic still holds."""


class KeySharedMode(IntEnum):
    """The mode of a Key_Shared subscription: the broker deals keys out, or consumers name them."""

    AUTO_SPLIT = 0
    STICKY = 1


@dataclass(frozen=True, slots=True)
class KeySharedPolicy:
    """The key-shared policy that one consumer asks for."""

    mode: KeySharedMode = KeySharedMode.AUTO_SPLIT
    """Whether the broker shares the keys out, or consumers name their ranges."""
    ranges: tuple[HashRange, ...] = ()
    """The hashes of the keys that a sticky consumer wants."""
    out_of_order: bool = False
    """May a key move to another consumer before its earlier messages are acknowledged?"""
    entry_buckets: bool = False
    """Are the ranges all buckets of the topic, to be shared out among the consumers that name
    them, instead of the part that this consumer wants?"""

    def __post_init__(self) -> None:
        # The broker chooses the ranges: whoever names some has mistaken the mode.
        if self.mode is KeySharedMode.AUTO_SPLIT:
            if self.ranges or self.entry_buckets:
                raise NotAllowed("hash ranges and entry buckets are for sticky consumers only")
            return
        if not self.ranges:
            raise NotAllowed("a sticky consumer must name at least one hash range")
        # They are in ring order (invariant 3), so only neighbours can overlap.
        for lower, upper in pairwise(self.ranges):
            if lower.end >= upper.start:
                raise NotAllowed(f"hash ranges {lower} and {upper} overlap")
        if self.entry_buckets:
            self._check_buckets()

    def _check_buckets(self) -> None:
        # Buckets exist so that a key keeps its order while it moves.
        if self.out_of_order:
            raise NotAllowed("entry buckets move in order only")
        first, last = self.ranges[0], self.ranges[-1]
        # Invariant 4: entries of position 0 stand at position 1.
        if first.start != 0 or first.end < 1:
            raise NotAllowed(f"the first entry bucket is {first}: it must hold positions 0 and 1")
        for lower, upper in pairwise(self.ranges):
            if not lower.is_before(upper):
                raise NotAllowed(f"there is a gap between entry buckets {lower} and {upper}")
        if last.end != HASH_MAX:
            raise NotAllowed(f"the last entry bucket is {last}: it must end the ring")

    @classmethod
    def sticky(
        cls, ranges: Iterable[tuple[int, int]], *, out_of_order: bool = False
    ) -> KeySharedPolicy:
        """Make a sticky policy of (start, end) pairs in any order, both ends included."""
        return cls(KeySharedMode.STICKY, _ring_order(ranges), out_of_order)

    @classmethod
    def bucketed(cls, ranges: Iterable[tuple[int, int]]) -> KeySharedPolicy:
        """Make a policy of all entry buckets, (start, end) each; the first may start at 0 or 1."""
        buckets = _ring_order(ranges)
        # Some clients leave position 0 out; it belongs to the first bucket all the same.
        if buckets and buckets[0].start == 1:
            buckets = (HashRange(0, buckets[0].end), *buckets[1:])
        return cls(KeySharedMode.STICKY, buckets, entry_buckets=True)


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """A named reading position of a topic, as its first consumer asks for it."""

    name: str
    type: SubscriptionType
    initial_position: InitialPosition = InitialPosition.LATEST
    durable: bool = True
    key_shared: KeySharedPolicy | None = None

    def __post_init__(self) -> None:
        check_subscription_name(self.name)
        if self.key_shared is not None and self.type is not SubscriptionType.KEY_SHARED:
            raise NotAllowed(f"{self.name}: only a Key_Shared subscription has a key-shared policy")


def _ring_order(ranges: Iterable[tuple[int, int]]) -> tuple[HashRange, ...]:
    try:
        return tuple(sorted(HashRange(start, end) for start, end in ranges))
    except InvalidLayout as error:
        raise NotAllowed(f"sticky consumer: {error}") from error


def check_subscription_name(name: str) -> None:
    if not name.strip():
        raise NotAllowed("a subscription needs a name")
    if _UNUSABLE.search(name):
        raise NotAllowed(f"subscription name {name!r} holds a character that no name may have")
    size = len(name.encode())
    if size > SUBSCRIPTION_NAME_BYTES_MAX:
        raise NotAllowed(
            f"subscription name of {size} bytes; the limit is {SUBSCRIPTION_NAME_BYTES_MAX}"
        )
