"""Pure: when publishes are refused for lack of disk space, and how large the reserve should be.

Owns: `SpaceRules`, which is told what a disk has left, again and again, and keeps what it decided.

What is left is counted without the reserve, whether that is taken or not, and without what the
journal still has to bring home: so neither of the two makes a server change its mind.

Invariants:
1. Publishes are refused below the floor, and for `HOLD_S` after a write found no space though the
   disk says that there is enough: it may have a quota, or no more inodes.
2. They are taken again once a quarter more than the floor is left, with the whole reserve in place.
3. The reserve grows to its whole size from a quarter of the floor on. Below that it keeps what it
   has: others would take what it gives up before it is needed.
4. A disk that does not say its size has neither floor nor reserve.
5. The same disk, seen once more, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from magnetar.runtime.limits import Limits

HOLD_S: Final = 10.0
"""How long a write counts that found no space where there seems to be some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSeen:
    """One look at the disk."""

    free: int
    total: int
    reserved: int
    """What the reserve has now."""
    unsettled: int = 0
    """What is durable in the journal and will be written once more, at home."""
    has_failed: bool = False
    """A write found no space since the last look."""
    now: float = 0.0


class SpaceRules:
    """The decisions for one data folder."""

    def __init__(self, limits: Limits) -> None:
        self.is_refusing = False
        """Whether publishes are refused."""
        self._limits = limits
        self._held_until: float | None = None

    def floor(self, total: int) -> int:
        """How much has to be left on a disk of that size."""
        limits = self._limits
        return min(limits.disk_floor_bytes, total * limits.disk_floor_percent // 100)

    def reserve(self, total: int) -> int:
        """How much is kept on a disk of that size; never more than the floor."""
        return min(self._limits.disk_reserve_bytes, self.floor(total))

    def left(self, seen: SpaceSeen) -> int:
        """What publishes may still take, down to the floor and below it."""
        missing = max(0, self.reserve(seen.total) - seen.reserved)
        return seen.free - seen.unsettled - missing

    def wanted_reserve(self, seen: SpaceSeen) -> int:
        """The size that the reserve should have now (invariant 3)."""
        whole = self.reserve(seen.total)
        has_room = self.left(seen) >= self.floor(seen.total) // 4
        return whole if has_room and not self._is_held(seen) else min(seen.reserved, whole)

    def judge(self, seen: SpaceSeen) -> bool:
        """Whether publishes are refused from now on."""
        floor, left = self.floor(seen.total), self.left(seen)
        if seen.has_failed and (left >= floor or not floor):
            self._held_until = seen.now + HOLD_S
        if self._is_held(seen):
            self.is_refusing = True
        # No size, no floor (invariant 4); what is left then means nothing either.
        elif not floor:
            self.is_refusing = False
        elif self.is_refusing:
            is_whole = seen.reserved >= self.reserve(seen.total)
            self.is_refusing = left < floor + floor // 4 or not is_whole
        else:
            self.is_refusing = left < floor
        return self.is_refusing

    def _is_held(self, seen: SpaceSeen) -> bool:
        return self._held_until is not None and seen.now < self._held_until
