"""Which sends of a transaction are stored in a segment, by producer and sequence id (pure).

Owns: `TxnSequences`, of one transaction in one segment.

A send covers the sequences from its own id to its highest (of a batch; else the same). Of a chunked
message only the last chunk counts; its caller does not ask about the others.

Invariants:
1. DUPLICATE is said only of what is durable; of what is in flight, UNKNOWN.
2. Spans of a producer are disjoint and ascending; neighbours are one.
3. What is stored takes 16 bytes for each run of sequences, however many messages it has.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class TxnVerdict(Enum):
    """What to do with a send inside a transaction."""

    STORE = "store"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"


class Sent(NamedTuple):
    """Sequences of one producer, both ends included."""

    name: str
    first: int
    last: int


class _Runs:
    """Sequences of one producer."""

    __slots__ = ("firsts", "flying", "lasts")

    def __init__(self) -> None:
        self.firsts = array("q")
        self.lasts = array("q")
        self.flying: set[int] = set()
        """First sequences of sends that are not durable yet."""

    def holds(self, sequence_id: int) -> bool:
        at = bisect_right(self.firsts, sequence_id) - 1
        return at >= 0 and sequence_id <= self.lasts[at]

    def add(self, first: int, last: int) -> None:
        at = bisect_right(self.firsts, first)
        if at and first <= self.lasts[at - 1] + 1:
            self.lasts[at - 1] = max(last, self.lasts[at - 1])
            at -= 1
        else:
            self.firsts.insert(at, first)
            self.lasts.insert(at, last)
        following = at + 1
        while following < len(self.firsts) and self.firsts[following] <= self.lasts[at] + 1:
            self.lasts[at] = max(self.lasts[at], self.lasts[following])
            del self.firsts[following]
            del self.lasts[following]


class TxnSequences:
    """What one transaction has stored in one segment."""

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: dict[str, _Runs] = {}

    def judge(self, name: str, sequence_id: int) -> TxnVerdict:
        """After STORE it is in flight, and the caller owes `settled`."""
        runs = self._by_name.get(name)
        if runs is None:
            runs = self._by_name[name] = _Runs()
        if sequence_id in runs.flying:
            return TxnVerdict.UNKNOWN
        if runs.holds(sequence_id):
            return TxnVerdict.DUPLICATE
        runs.flying.add(sequence_id)
        return TxnVerdict.STORE

    def settled(self, sent: Sent, *, stored: bool) -> None:
        """A send is in flight no more."""
        self._by_name[sent.name].flying.discard(sent.first)
        if stored:
            self.note(sent)

    def note(self, sent: Sent) -> None:
        """It is in the log; again: the same."""
        runs = self._by_name.get(sent.name)
        if runs is None:
            runs = self._by_name[sent.name] = _Runs()
        runs.add(sent.first, sent.last)

    def __iter__(self) -> Iterator[Sent]:
        """All that is stored."""
        for name, runs in self._by_name.items():
            for first, last in zip(runs.firsts, runs.lasts, strict=True):
                yield Sent(name, first, last)
