"""What a subscription is: name, type, where it starts, whether it lasts (pure).

Owns: `Subscription` and the policy of a Key_Shared one. The numbers of the enums are those of the
protocol.

Invariants:
1. A name is not blank, holds no control character, and fits into a metadata key.
2. Only a Key_Shared subscription has a key-shared policy.
3. Sticky ranges are not empty, lie on the ring and do not overlap; they are kept in ring order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

from magnetar.errors import InvalidLayout, NotAllowed
from magnetar.model.hashing import HashRange

SUBSCRIPTION_NAME_BYTES_MAX: Final = 256

_UNUSABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class SubscriptionType(IntEnum):
    """How the consumers of a subscription share its messages."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3

    @property
    def takes_cumulative_acks(self) -> bool:
        """Only where one consumer at a time sees messages in order."""
        return self in (SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER)


class InitialPosition(IntEnum):
    """Where a new subscription starts."""

    LATEST = 0
    EARLIEST = 1


class KeySharedMode(IntEnum):
    """Who decides which consumer gets which keys."""

    AUTO_SPLIT = 0
    STICKY = 1


@dataclass(frozen=True, slots=True)
class KeySharedPolicy:
    """What one consumer of a Key_Shared subscription asks for."""

    mode: KeySharedMode = KeySharedMode.AUTO_SPLIT
    ranges: tuple[HashRange, ...] = ()
    out_of_order: bool = False
    """May a key move to another consumer before its earlier messages are acknowledged?"""

    def __post_init__(self) -> None:
        if self.mode is KeySharedMode.AUTO_SPLIT:
            if self.ranges:
                raise NotAllowed("hash ranges are for sticky consumers only")
            return
        if not self.ranges:
            raise NotAllowed("a sticky consumer must name at least one hash range")
        for lower, upper in pairwise(self.ranges):
            if lower.end >= upper.start:
                raise NotAllowed(f"hash ranges {lower} and {upper} overlap")

    @classmethod
    def sticky(
        cls, ranges: Iterable[tuple[int, int]], *, out_of_order: bool = False
    ) -> KeySharedPolicy:
        """From (start, end) pairs in any order, both ends included."""
        try:
            ordered = tuple(sorted(HashRange(start, end) for start, end in ranges))
        except InvalidLayout as error:
            raise NotAllowed(f"sticky consumer: {error}") from error
        return cls(KeySharedMode.STICKY, ordered, out_of_order)

    def conflicts_with(self, other: KeySharedPolicy) -> bool:
        """Could the same key go to both of two sticky consumers?"""
        return any(mine.overlaps(theirs) for mine in self.ranges for theirs in other.ranges)


@dataclass(frozen=True, slots=True)
class Subscription:
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
