"""Moments without transactions, so that a layout change fails no send of one.

Owns: `TransactionBarrier`: before a change seals segments, no transaction begins on the connections
that use them, and the change waits for the open ones to end.

Why: when a layout comes in which a segment is no longer active, a v5 client closes its producer of
that segment, and with it fails every message that was not sent, or not receipted, by then: those in
an unfinished batch, and those that wait until their transaction is told of the segment. It sends
them again to the children, but gives up a transaction that ever had a failed send: its commit is
refused by the client itself. No order of sealing and telling spares it that, for which messages it
holds back nobody else can know; that it has ended a transaction can be known.

A client that says so (`supports_transactions_over_layouts`, as Magnetar's own does) repeats such a
send in its transaction and counts it as none that failed: its transactions `last`. They are neither
held nor waited for.

    waits -> granted -> over        (granted when nothing is open, at the latest after the limit)

Invariants:
1. A change waits `wait_seconds` at most, and a transaction that is about to begin as long, and then
   `HANDOVER_SECONDS` at most. Nothing else waits: messages, in transactions and outside, are taken
   until the segment is sealed, and open transactions end.
2. A transaction that was held begins after every watch of the layout was told the new one: its
   client has that before the answer, if both come on one connection.
3. It holds nothing that must survive: without it, or after its end, a change is as safe as ever.

Relies on: the connections of this broker. A client that has its coordinator at another broker is
not held there; transactions that wrote to the segments are waited for wherever they began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.topics import Topics
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.metrics import SCALABLE_LULLS, TXN_HELD
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId

# Three syncs and a push to every watch. Should they take longer, transactions begin all the same.
HANDOVER_SECONDS: Final = 1.0
"""Once granted: to seal, to commit, and to tell everybody."""

_PRUNE_AT: Final = 64


class ConnectionTransactions:
    """The transactions that one connection has begun, or is beginning."""

    __slots__ = ("_is_open", "beginning", "prune_at", "txns")

    def __init__(self, is_open: Callable[[TxnId], bool]) -> None:
        self._is_open = is_open
        self.beginning = 0
        """How many are being begun now."""
        self.txns: deque[TxnId] = deque()
        """At least those that are open."""
        self.prune_at = _PRUNE_AT

    def began(self, txn: TxnId) -> None:
        """A transaction is open from now on."""
        self.txns.append(txn)
        if len(self.txns) >= self.prune_at:
            # Those that have ended are dropped now and then, so that a connection which begins
            # many costs what it has open, and each costs a constant share of the pruning.
            self.txns = deque(each for each in self.txns if self._is_open(each))
            self.prune_at = max(_PRUNE_AT, 2 * len(self.txns))


class LayoutWait(NamedTuple):
    """The wait of a change for open transactions, for people to see."""

    txn: TxnId | None
    """One of those that it waits for; None: one is being begun."""
    seconds_left: float
    """So long at most."""


class _Barrier:
    """The barrier that one change of one topic asks for."""

    __slots__ = ("epoch", "grant_at", "granted", "over_at", "parents", "producing", "topic")

    def __init__(
        self, topic: TopicName, epoch: int, parents: Sequence[TopicName], grant_at: float
    ) -> None:
        self.topic = topic
        self.epoch = epoch
        """Of the layout that the change leads to."""
        self.parents = parents
        """The segments that are to be sealed."""
        self.grant_at = grant_at
        """When it is granted at the latest."""
        self.over_at = grant_at + HANDOVER_SECONDS
        """When it is over at the latest."""
        self.granted = False
        # By id: a barrier keeps no closed connection alive, and one that gets the same id
        # later is held for a moment at most.
        self.producing: set[int] = set()
        """Ids of connections that were seen to have a producer on one of the parents."""


class TransactionBarrier:
    """The barriers of one broker; a `Participant` of the transactions that they wait for."""

    def __init__(
        self,
        topics: Topics,
        outcomes: Outcomes,
        layout_watchers: LayoutWatchers,
        clock: Clock,
        *,
        wait_seconds: float,
    ) -> None:
        self._topics = topics
        self._outcomes = outcomes
        self._layout_watchers = layout_watchers
        self._clock = clock
        self._wait_seconds = wait_seconds
        # The one signal of all that may free a waiter: an end, a beginning, a layout that was told.
        self._moved = layout_watchers.moved
        self._barriers: dict[TopicName, _Barrier] = {}
        self._begun: WeakKeyDictionary[object, ConnectionTransactions] = WeakKeyDictionary()
        """By connection; they go with it."""
        self._lasting = ConnectionTransactions(self._is_open)
        """Those that survive a change, of whatever connection."""

    # --- transactions begin

    async def admitted(self, connection: object) -> ConnectionTransactions:
        """Wait until no barrier holds a connection; from then on it is beginning a transaction.

        The caller begins it, tells its id with `began`, and calls `over`, whatever happened.
        """
        if self._held_until(connection) is not None:
            await self._unheld(connection)
        return self._beginning(connection)

    def admitted_at_once(self, connection: object) -> ConnectionTransactions | None:
        """Do what `admitted` does; None: a barrier may hold the connection, so await that."""
        return None if self._barriers else self._beginning(connection)

    def _beginning(self, connection: object) -> ConnectionTransactions:
        begun = self._begun.get(connection)
        if begun is None:
            begun = self._begun[connection] = ConnectionTransactions(self._is_open)
        # Without an await since the check above: a change that asks now sees this one.
        begun.beginning += 1
        return begun

    def over(self, connection: object, begun: ConnectionTransactions) -> None:
        """A transaction that was `admitted` has begun, or will not begin."""
        begun.beginning -= 1
        # A change may have waited for this one, be it that it did not begin.
        if self._barriers and any(
            self._concerns(barrier, connection) for barrier in self._barriers.values()
        ):
            self._moved.advance()

    def lasts(self, txn: TxnId) -> None:
        """Note a transaction that survives a change of layout."""
        self._lasting.began(txn)

    async def _unheld(self, connection: object) -> None:
        TXN_HELD.inc()
        try:
            while (until := self._held_until(connection)) is not None:
                await self._news(self._moved.version, until)
        finally:
            TXN_HELD.dec()

    def _held_until(self, connection: object) -> float | None:
        """How long at most; None: it is not held."""
        if not self._barriers:
            return None
        now, held = self._clock.monotonic(), None
        for barrier in list(self._barriers.values()):
            # Dropped by whoever looks: no timer, and nothing stays behind a
            # controller that died (invariant 3).
            if self._is_over(barrier, now):
                del self._barriers[barrier.topic]
            # Any one of them will do: who waits so long looks at the others then.
            elif self._concerns(barrier, connection):
                held = barrier.over_at
        return held

    def _is_over(self, barrier: _Barrier, now: float) -> bool:
        """Whether its change is through and every client knows, or it has been given up."""
        if now >= barrier.over_at:
            return True
        return barrier.granted and self._layout_watchers.were_told(barrier.topic, barrier.epoch)

    def _concerns(self, barrier: _Barrier, connection: object) -> bool:
        """Whether a client may send to the parents in transactions that it begins there."""
        if id(connection) in barrier.producing:
            return True
        return self._layout_watchers.follows(barrier.topic, connection)

    def _is_open(self, txn: TxnId) -> bool:
        return self._outcomes.known(txn) == "OPEN"

    # --- layouts change

    async def granted(
        self, topic: TopicName, epoch: int, parents: Sequence[TopicName], seconds: float
    ) -> bool:
        """Wait so long for a moment in which the change to a layout may seal these segments."""
        now = self._clock.monotonic()
        for gone in [each for each in self._barriers.values() if self._is_over(each, now)]:
            del self._barriers[gone.topic]
        barrier = self._barriers.get(topic)
        # The controller asks in short slices, and finds its own barrier again with the limit that
        # still runs; another epoch is another change.
        if barrier is None or barrier.epoch != epoch:
            grant_at = self._clock.monotonic() + self._wait_seconds
            barrier = self._barriers[topic] = _Barrier(topic, epoch, parents, grant_at)
        deadline = min(self._clock.monotonic() + seconds, barrier.grant_at)
        while not barrier.granted:
            # Before the look: what moves during it ends the wait at once.
            seen = self._moved.version
            self._note_producers(barrier)
            blocker = self._blocker(barrier)
            now = self._clock.monotonic()
            # Four cases: nothing is open; the limit is over, and open ones may fail; the slice is
            # over, and the controller sees to other things; or wait.
            if blocker is None and not self._is_one_beginning(barrier):
                self._grant(barrier, now, "quiet")
            elif now >= barrier.grant_at:
                self._grant(barrier, now, "late")
            elif now >= deadline:
                return False
            else:
                await self._past_one(blocker, seen, deadline)
        return True

    def waiting(self, topic: TopicName) -> LayoutWait | None:
        """What a change of this topic waits for now, as far as this broker carries it out."""
        barrier, now = self._barriers.get(topic), self._clock.monotonic()
        if barrier is None or barrier.granted or now >= barrier.grant_at:
            return None
        return LayoutWait(self._blocker(barrier), barrier.grant_at - now)

    def _grant(self, barrier: _Barrier, now: float, outcome: str) -> None:
        barrier.granted = True
        barrier.over_at = now + HANDOVER_SECONDS
        SCALABLE_LULLS.labels(outcome).inc()

    def decided(self, txn: TxnId, state: State) -> None:
        self._moved.advance()

    async def _past_one(self, blocker: TxnId | None, seen: int, deadline: float) -> None:
        """Wait until this one has ended, or something else moved."""
        if blocker is None:
            await self._news(seen, deadline)
            return
        # As a participant: so an end that another broker decides is watched for, too.
        self._outcomes.join(blocker, self)
        try:
            await self._news(seen, deadline)
        finally:
            self._outcomes.leave(blocker, self)

    def _blocker(self, barrier: _Barrier) -> TxnId | None:
        """An open transaction that wrote to the parents, or that may do so any moment."""
        # Any one: when it has ended, the next look finds the next. First those that wrote to
        # the parents, wherever they began.
        lasting = set(self._lasting.txns)
        for topic in self._loaded(barrier.parents):
            for txn in () if topic.transactions is None else topic.transactions.undecided_ids():
                if txn not in lasting:
                    return txn
        # Then those of clients that know the parents, and may have a message for them in a batch.
        for connection, begun in list(self._begun.items()):
            if self._concerns(barrier, connection):
                while begun.txns and not self._is_open(begun.txns[0]):
                    begun.txns.popleft()
                if begun.txns:
                    return begun.txns[0]
        return None

    def _is_one_beginning(self, barrier: _Barrier) -> bool:
        return any(
            begun.beginning and self._concerns(barrier, connection)
            for connection, begun in list(self._begun.items())
        )

    def _note_producers(self, barrier: _Barrier) -> None:
        # Collected over the whole wait: one that goes and comes between two
        # looks counts all the same.
        for topic in self._loaded(barrier.parents):
            for producer in topic.producers.connected.values():
                barrier.producing.add(id(producer.options.connection))

    def _loaded(self, names: Sequence[TopicName]) -> Iterator[Topic]:
        for name in names:
            topic = self._topics.loaded.get(name)
            if isinstance(topic, Topic):
                yield topic

    async def _news(self, seen: int, deadline: float) -> None:
        await self._moved.past_within(seen, max(deadline - self._clock.monotonic(), 0.0))
