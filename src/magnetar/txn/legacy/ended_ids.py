"""Pure: which legacy transactions have ended, as one of their participants remembers it.

Owns: `EndedIds`.

Invariants:
1. What has ended stays so: it is remembered until the low watermark of its coordinator has passed
   it, or `ENDED_MAX` later ones have come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from magnetar.wire.messages import TxnId

# What a topic's record has room for; the low watermark passes most of them long before.
ENDED_MAX: Final = 5000
"""Ends that are remembered above the low watermarks."""

_NONE: Final = -1


class EndedIds:
    """The ends that one participant was told."""

    def __init__(self, ended: Iterable[TxnId] = (), low: Mapping[int, int] | None = None) -> None:
        self._ended: OrderedDict[TxnId, None] = OrderedDict.fromkeys(ended)
        self._low = dict(low or {})

    def __contains__(self, txn: TxnId) -> bool:
        """Whether a transaction has ended here, or anywhere by its coordinator's word."""
        return self.is_below(txn) or txn in self._ended

    def __iter__(self) -> Iterator[TxnId]:
        """The ended transactions above the low watermarks, the oldest end first."""
        return iter(self._ended)

    @property
    def low(self) -> Mapping[int, int]:
        """The low watermark of each coordinator: none at or below this number is open."""
        return MappingProxyType(self._low)

    def is_below(self, txn: TxnId) -> bool:
        """Whether its coordinator's low watermark has passed it."""
        return txn.least <= self._low.get(txn.most, _NONE)

    def add(self, txn: TxnId) -> None:
        if self.is_below(txn):
            return
        self._ended[txn] = None
        self._ended.move_to_end(txn)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def note_low(self, coordinator: int, number: int) -> bool:
        """A coordinator says that none at or below this number is open; False: that is not new."""
        if number <= self._low.get(coordinator, _NONE):
            return False
        self._low[coordinator] = number
        # One number stands for all of these: that is what bounds the memory of a busy topic.
        for txn in [each for each in self._ended if self.is_below(each)]:
            del self._ended[txn]
        return True
