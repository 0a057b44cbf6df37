"""A topic as those see it that read ranges of it: up to where, and what of it.

Owns: `RangeView`, one topic with one isolation, and what is wrong with a range.

`stable` is where dispatch, readers and the last message id end too: `max_read_position`, which is
below the lowest bound of any undecided transaction of either kind. That end never falls, also not
when the topic moves to another broker (bounds are pins in the store, and are read before anything
is served). So whoever took an end from here can read up to it for ever: which entries below it are
for consumers is decided, and stays so, until they are trimmed. With the other isolation it is the
last durable entry, and what is below is all messages: those of aborted transactions too.

Invariants:
1. A range is refused unless every entry of it that ever was is still there, and readable.
2. What is known of aborted transactions goes with their entries: whoever has read entries asks
   `check_kept` before `is_visible`, without an await between the two.
"""

from __future__ import annotations

from typing import Final

from magnetar.broker.dispatch.dispatcher import ReadableTopic, Uncommitted
from magnetar.errors import NotAllowed, RangeLost
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.isolation import ReadIsolation
from magnetar.model.ranges import ORIGIN, RangePosition, RangeState

_START_AGAIN: Final = "start at the first position that is kept, and let retention keep more"
_MADE_ANEW: Final = "look at the layout: the topic was made anew, or another one is meant"


class RangeView:
    """One topic as range readers see it; every question is asked of the topic anew."""

    def __init__(self, topic: ReadableTopic, isolation: ReadIsolation) -> None:
        self._topic = topic
        self._seen: ReadableTopic = topic
        if isolation is ReadIsolation.UNCOMMITTED:
            self._seen = Uncommitted(topic)

    @property
    def ledger(self) -> ManagedLedger:
        return self._topic.ledger

    # --- from where to where

    def first(self) -> RangePosition:
        """Behind the last entry that was trimmed."""
        return RangePosition.behind(self.ledger.trimmed_through)

    def stable(self) -> RangePosition:
        """Behind the last entry that may be read."""
        return self._behind_last(self._seen)

    def tail(self) -> RangePosition:
        """Behind the last entry."""
        return self._behind_last(Uncommitted(self._topic))

    def state(self) -> RangeState:
        ledger = self.ledger
        is_final = ledger.sealed and self._topic.max_read_position() >= ledger.last_position()
        return RangeState(self.first(), self.stable(), is_final)

    def has_more(self, position: RangePosition) -> bool:
        """Whether an entry that may be read stands at or behind a position."""
        following = self.ledger.next_valid(position.at)
        return following is not None and following <= self._seen.max_read_position()

    def is_visible(self, entry: Entry) -> bool:
        """Whether an entry of a range is for who reads it."""
        return self._seen.is_visible(entry)

    def _behind_last(self, seen: ReadableTopic) -> RangePosition:
        # The maxReadPosition may stand in a ledger that was trimmed since: then nothing is left to
        # read.
        last = self.ledger.last_valid(seen.max_read_position())
        return RangePosition.behind(self.ledger.trimmed_through if last is None else last)

    # --- what is wrong with a range

    def check(self, start: RangePosition, end: RangePosition) -> None:
        """Raise unless all of a range is there and may be read."""
        if start > end:
            raise NotAllowed(f"a range cannot begin at {start} and end at {end}")
        self.check_kept(start)
        stable = self.stable()
        # Three cases: readable now; stored but undecided, so a later call succeeds; or never there.
        if end <= stable:
            return
        if end <= self.tail():
            raise NotAllowed(
                f"{self._topic.name} can be read up to {stable} now, not up to {end}",
                hint="a transaction before that end is undecided",
            )
        raise RangeLost(f"{self._topic.name} ends at {stable}, before {end}", hint=_MADE_ANEW)

    def check_kept(self, start: RangePosition) -> None:
        """Raise if an entry at or behind a position is gone, or it is none of this topic."""
        name, first = self._topic.name, self.first()
        if start < first:
            raise RangeLost(f"{name} begins at {first}, behind {start}", hint=_START_AGAIN)
        if first == ORIGIN and start != ORIGIN and self.ledger.entries:
            # Nothing was ever trimmed, and ledger ids grow: it is of a topic before this one.
            present = RangePosition.before(self.ledger.first_position())
            if start < present:
                raise RangeLost(f"{name} begins at {present}, behind {start}", hint=_MADE_ANEW)
