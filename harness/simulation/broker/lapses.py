"""Pure: what of a simulated topic may have expired, and what surely has.

Owns: `Lapses`, told of the policies that were set and of what was looked at; the oracle of backlog
quotas (`share_bytes`, `evicted_through`), written apart from the product's.

Invariants:
1. A policy whose change was not answered may be in force or not: both are possible until a change
   of it is answered.
2. What may be gone is never taken back: time only goes on. What surely is gone is said by whoever
   waited until it was durable, one subscription at a time (`history`).
3. The search by publish time is exact where times ascend. Where they do not (a message that was
   sent again, late), whatever lies below one that is old enough may go with it.

Relies on: moments and publish times of one clock; a message is dated when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Final, Protocol

from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position

_CLOCK_STEP: Final = 0.002
_KEPT: Final = Fraction(9, 10)
"""The part of a quota that eviction leaves."""
_NOWHERE: Final = Position(-1, -1)


class Dated(Protocol):
    """A message that says when it was published."""

    @property
    def published_at(self) -> float: ...


class Lapses:
    """Of one topic."""

    def __init__(self) -> None:
        self.is_quota_open = False
        """A quota may be in force that nobody follows: all that is there may go."""
        self._ttls: dict[int, None] = {}
        self._through = _NOWHERE

    # --- policies

    @property
    def ttl(self) -> int | None:
        """Seconds, if it is known which time to live is in force; 0: none is."""
        return next(iter(self._ttls), 0) if len(self._ttls) < 2 else None

    def setting_ttl(self, seconds: int) -> None:
        """A client is about to ask for it."""
        self._ttls.setdefault(self.ttl or 0)
        self._ttls[seconds] = None

    def ttl_is(self, seconds: int) -> None:
        """The broker has answered; call `follow` before."""
        self._ttls = {seconds: None}

    # --- what may be gone

    def may_lapse(self, position: Position) -> bool:
        return self.is_quota_open or position <= self._through

    def add(self, through: Position) -> None:
        """Everything up to there may be gone."""
        self._through = max(self._through, through)

    def follow(self, log: Mapping[Position, Dated], now: float) -> None:
        """Time has gone on, under the policies that may be in force."""
        for seconds in self._ttls:
            if seconds:
                self.add(last_before(log, now - seconds))


def last_before(log: Mapping[Position, Dated], moment: float) -> Position:
    """The last entry that was published before a moment: all up to it may count as that old."""
    limit = moment + _CLOCK_STEP
    old = (position for position, sent in log.items() if sent.published_at < limit)
    return max(old, default=_NOWHERE)


def all_before(log: Mapping[Position, Dated], moment: float) -> Position:
    """The last of the entries at the beginning that all were published before a moment."""
    through = _NOWHERE
    for position in sorted(log):
        if log[position].published_at >= moment - _CLOCK_STEP:
            break
        through = position
    return through


# --- quotas


def share_bytes(spans: Iterable[LedgerSpan], first: Position) -> Fraction:
    """The size of the entries from a position on, each as large as the average of its ledger."""
    return sum((share for position, share in _shares(spans) if position >= first), Fraction(0))


def evicted_through(spans: Sequence[LedgerSpan], limit: int) -> Position:
    """Up to where the oldest must go, one by one, until the rest fits."""
    shares = _shares(spans)
    left, room = sum((share for _, share in shares), Fraction(0)), int(limit * _KEPT)
    through = _NOWHERE
    for position, share in shares:
        if left <= room:
            break
        left -= share
        through = position
    return through


def positions_of(spans: Iterable[LedgerSpan]) -> list[Position]:
    return [position for position, _ in _shares(spans)]


def _shares(spans: Iterable[LedgerSpan]) -> list[tuple[Position, Fraction]]:
    return [
        (Position(span.ledger_id, entry), Fraction(span.size_bytes, span.entries))
        for span in spans
        for entry in range(span.entries)
    ]
