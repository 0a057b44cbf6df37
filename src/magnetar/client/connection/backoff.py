"""Pure: how long to wait before the next try.

Owns: `Backoff`: each pause is twice the one before, up to a limit, and shortened by chance so that
clients that lost the same broker do not come back in step.

Invariants:
1. A pause lies between (1 - JITTER) of its nominal length and all of it; the nominal length starts
   at `first_s`, doubles, and never exceeds `most_s`.
2. After `reset` the next pause is the first one again.
"""

from __future__ import annotations

from typing import Final, Protocol

JITTER: Final = 0.2

# Short, since most trouble is a topic that moves; long at the end, since a broker that is down for
# minutes gains nothing from being asked.
FIRST_S: Final = 0.05
MOST_S: Final = 30.0


class Chance(Protocol):
    """A source of chance; a `random.Random` will do."""

    def random(self) -> float:
        """A number from 0 up to, but not including, 1."""
        ...


class Backoff:
    """The pauses between the tries of one thing."""

    __slots__ = ("_chance", "_first_s", "_most_s", "_nominal_s")

    def __init__(self, chance: Chance, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> None:
        self._chance = chance
        self._first_s = first_s
        self._most_s = most_s
        self._nominal_s = 0.0

    def next(self) -> float:
        """The seconds to wait before the next try."""
        doubled = 2 * self._nominal_s
        self._nominal_s = min(self._most_s, max(self._first_s, doubled))
        return self._nominal_s * (1 - JITTER * self._chance.random())

    def reset(self) -> None:
        """Begin anew, since it worked: the next failure is another one."""
        self._nominal_s = 0.0
