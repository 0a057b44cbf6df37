"""Pure: the rates of publishing for whose sake a broker does not read a connection.

Owns: `Throttling`, what the broker has said of that; only Magnetar says it.

Invariants:
1. `rate` is what sends wait for now. It lasts until the broker says that it reads again.
2. A rate that held sends back for a while is known afterwards, by when that ended.
"""

from __future__ import annotations


class Throttling:
    """The state of one connection; a moment is a time of the loop."""

    __slots__ = ("_ended_at", "_last", "rate")

    def __init__(self) -> None:
        self.rate: str | None = None
        """The policy, its value and its topic, in words; None: nothing waits."""
        self._last: str | None = None
        self._ended_at = 0.0

    def note(self, rate: str | None, now: float) -> None:
        """Take over what the broker says; None: it reads again."""
        if rate is None:
            self._ended_at = now
        else:
            self._last = rate
        self.rate = rate

    def rate_since(self, moment: float) -> str | None:
        """The rate that has held sends back since a moment, if only for a part of that time."""
        if self.rate is None and self._ended_at < moment:
            return None
        return self._last
