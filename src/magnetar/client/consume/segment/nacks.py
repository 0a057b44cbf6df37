"""Pure: when messages that the application did not settle are asked for again.

Owns: `RedeliveryDelay`, how long to wait by the number of deliveries; `Deadlines`, entries with
a time each: those given back, and those that the application has had for too long.

Invariants:
1. A delay never shrinks from one delivery to the next, and never exceeds its limit.
2. `due` gives each entry once, at or after its time, earliest first; one that was settled or set
   anew in between is not given.
3. What is kept is at most twice the entries that are set: an entry that is set again and again
   does not leave its old times behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from magnetar.errors import InvalidSetting
from magnetar.model.ids import Position

NACK_DELAY_S: Final = 60.0

# Below this the old times in the heap cost less than cleaning up.
_TIDY_FROM: Final = 64
# 2.0 to the 64th is beyond any limit; a redelivery count may be anything.
_EXPONENT_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class RedeliveryDelay:
    """The time to wait before a message is delivered again, in seconds.

    RedeliveryDelay(1.0)                                # always a second
    RedeliveryDelay(1.0, factor=2.0, most=60.0)         # 1, 2, 4, ... up to 60
    """

    first: float = NACK_DELAY_S
    """Before the second delivery."""
    factor: float = 1.0
    """How much longer it is from one delivery to the next."""
    most: float = 600.0
    """It does not grow beyond this."""

    def __post_init__(self) -> None:
        if not (0 <= self.first <= self.most < float("inf") and 1 <= self.factor < float("inf")):
            raise InvalidSetting(
                f"{self}: it must be 0 <= first <= most, and the factor at least 1"
            )

    def after(self, redelivery_count: int) -> float:
        """The delay before delivery number `redelivery_count` + 1 (the first one is number 0)."""
        exponent = min(max(0, redelivery_count), _EXPONENT_MAX)
        try:
            return min(self.most, self.first * self.factor**exponent)
        except OverflowError:
            return self.most


class Deadlines:
    """Entries of one segment, each with a time."""

    def __init__(self) -> None:
        self._times: dict[Position, float] = {}
        self._queue: list[tuple[float, Position]] = []

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, position: Position) -> bool:
        return position in self._times

    def set(self, position: Position, at: float) -> None:
        """The time of an entry from now on."""
        if self._times.get(position) == at:
            return
        self._times[position] = at
        heappush(self._queue, (at, position))
        if len(self._queue) > _TIDY_FROM and len(self._queue) > 2 * len(self._times):
            self._queue = [(time, each) for each, time in self._times.items()]
            heapify(self._queue)

    def drop(self, position: Position) -> None:
        """Forget the time of an entry."""
        self._times.pop(position, None)

    def clear(self) -> None:
        self._times.clear()
        self._queue.clear()

    @property
    def next_at(self) -> float | None:
        """The earliest time; None: there is none."""
        queue = self._queue
        # The heap keeps times that were set anew or dropped; they are passed over when they come
        # up.
        while queue and self._times.get(queue[0][1]) != queue[0][0]:
            heappop(queue)
        return queue[0][0] if queue else None

    def due(self, now: float) -> list[Position]:
        """The entries whose time has come; they have none from now on."""
        found = []
        while (at := self.next_at) is not None and at <= now:
            position = heappop(self._queue)[1]
            del self._times[position]
            found.append(position)
        return found
