"""The sends of a transaction that a segment has stored, by producer and sequence id (pure).

Owns: `TxnSequences`, of one transaction in one segment, and `TxnRuns`, of one producer there;
`SequenceNews`, what became of them, until whoever keeps the topic's dedup takes it.

A send covers the sequences from its own id to its highest (of a batch; else the same). Of a chunked
message only the last chunk counts; its caller does not ask about the others.

Invariants:
1. DUPLICATE is said only of what is durable; of what is in flight, UNKNOWN.
2. Spans of a producer are disjoint and ascending; neighbours are one.
3. What is stored takes 16 bytes for each run of sequences, however many messages it has.
4. A plain send (one message, above `pushed`) is certainly new: it is noted without being judged
   (`pushed`, `plain`), and settled in the order of the sends.
5. News are taken in the order in which they came, and kept only while somebody follows them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from magnetar.txn.records import State


class TxnVerdict(Enum):
    """The verdict on a send inside a transaction: append it, only confirm it, or refuse it."""

    STORE = "store"
    DUPLICATE = "duplicate"
    # In flight: a receipt would promise too much, and a second append may store it twice.
    UNKNOWN = "unknown"


class Sent(NamedTuple):
    """Sequences of one producer, both ends included."""

    name: str
    first: int
    last: int


class TxnRuns:
    """Sequences of one producer."""

    __slots__ = ("firsts", "flying", "lasts", "plain", "pushed")

    def __init__(self) -> None:
        # Two arrays side by side, sorted: a run in each costs 16 bytes (invariant 3).
        self.firsts = array("q")
        self.lasts = array("q")
        self.flying: set[int] = set()
        """First sequences of sends that were judged and are not durable yet."""
        self.pushed = -1
        """No send had a higher sequence, in flight or stored."""
        self.plain = 0
        """Plain sends in flight."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """What is stored: the first and the last of each run."""
        return zip(self.firsts, self.lasts, strict=True)

    def holds(self, sequence_id: int) -> bool:
        at = bisect_right(self.firsts, sequence_id) - 1
        return at >= 0 and sequence_id <= self.lasts[at]

    def judge(self, first: int, last: int) -> TxnVerdict:
        # A resend that came before the outcome of the first attempt.
        if first in self.flying:
            return TxnVerdict.UNKNOWN
        # A resend of what is durable: its receipt was lost on the way.
        if self.holds(first):
            return TxnVerdict.DUPLICATE
        # Plain sends in flight are counted, not listed: it may be one of those.
        if self.plain and first <= self.pushed:
            return TxnVerdict.UNKNOWN
        # Never seen. It may stand below others: a gap that a failed append left is filled so.
        self.flying.add(first)
        self.pushed = max(self.pushed, last)
        return TxnVerdict.STORE

    def plain_stored(self, sequence_id: int) -> None:
        """The next plain send is durable."""
        self.plain -= 1
        lasts = self.lasts
        # Nearly always right behind the last run: no search, and one number changes.
        if lasts and lasts[-1] == sequence_id - 1:
            lasts[-1] = sequence_id
        else:
            self.add(sequence_id, sequence_id)

    def plain_run_stored(self, sequence_ids: list[int]) -> None:
        """The next plain sends, which came together, are durable."""
        first, last, count = sequence_ids[0], sequence_ids[-1], len(sequence_ids)
        # They ascend: so many between the two are all of them.
        if last - first == count - 1:
            self.plain -= count
            self.add(first, last)
        else:
            for sequence_id in sequence_ids:
                self.plain_stored(sequence_id)

    def add(self, first: int, last: int) -> None:
        """Note sequences that are in the log."""
        self.pushed = max(self.pushed, last)
        at = bisect_right(self.firsts, first)
        # It overlaps or continues the run before it, or else begins one.
        if at and first <= self.lasts[at - 1] + 1:
            self.lasts[at - 1] = max(last, self.lasts[at - 1])
            at -= 1
        else:
            self.firsts.insert(at, first)
            self.lasts.insert(at, last)
        # The runs that it reaches now become one with it (invariant 2).
        following = at + 1
        while following < len(self.firsts) and self.firsts[following] <= self.lasts[at] + 1:
            self.lasts[at] = max(self.lasts[at], self.lasts[following])
            del self.firsts[following]
            del self.lasts[following]


class TxnSequences:
    """The sequences that one transaction has stored in one segment, by producer.

    `begun` hears of each new producer.
    """

    __slots__ = ("_begun", "_by_name")

    def __init__(self, begun: Callable[[str, TxnRuns], None]) -> None:
        self._begun = begun
        self._by_name: dict[str, TxnRuns] = {}

    def of(self, name: str) -> TxnRuns:
        runs = self._by_name.get(name)
        if runs is None:
            runs = self._by_name[name] = TxnRuns()
            # At the first send, not at the end: until then dedup must not take
            # these for stored, nor for new.
            self._begun(name, runs)
        return runs

    def judge(self, sent: Sent) -> TxnVerdict:
        """After STORE it is in flight, and the caller owes `settled`."""
        return self.of(sent.name).judge(sent.first, sent.last)

    def settled(self, sent: Sent, *, stored: bool) -> None:
        """A send is in flight no more."""
        self.of(sent.name).flying.discard(sent.first)
        if stored:
            self.note(sent)

    def note(self, sent: Sent) -> None:
        """Note a send that is in the log; again: no change."""
        self.of(sent.name).add(sent.first, sent.last)

    def __iter__(self) -> Iterator[tuple[str, TxnRuns]]:
        """All producers, by name."""
        return iter(self._by_name.items())


class StoredInTxn(NamedTuple):
    """The sequences of one producer in one transaction: OPEN, when the first of them came."""

    state: State
    name: str
    stored: TxnRuns | Sent
    """Of an open transaction the runs grow; `Sent` became durable after the end."""


class SequenceNews:
    """The news of what the transactions of one segment stored, and of what became of it.

    Dedup stands above: it takes the news when it judges (`take`), nothing here calls it.
    """

    __slots__ = ("_news", "is_followed")

    def __init__(self) -> None:
        self.is_followed = False
        """Whether the topic has dedup; without it nobody takes anything, and nothing is kept."""
        self._news: list[StoredInTxn] = []

    def __bool__(self) -> bool:
        return bool(self._news)

    def began(self, name: str, stored: TxnRuns) -> None:
        """Note that a producer stores in a transaction: so much, and what is to come."""
        self._note("OPEN", name, stored)

    def ended(self, state: State, name: str, stored: TxnRuns) -> None:
        """Note that what it stored counts from now on (COMMITTED) or is forgotten."""
        self._note(state, name, stored)

    def late(self, state: State, sent: Sent) -> None:
        """Note a send that became durable after the end of its transaction."""
        self._note(state, sent.name, sent)

    def take(self) -> list[StoredInTxn]:
        """Take all news since the last call, in order."""
        news, self._news = self._news, []
        return news

    def _note(self, state: State, name: str, stored: TxnRuns | Sent) -> None:
        # Without dedup nobody takes them, and they would grow for ever (invariant 5).
        if self.is_followed:
            self._news.append(StoredInTxn(state, name, stored))
