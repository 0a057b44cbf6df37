"""The outcomes of transactions that this broker knows, and the participants it must tell.

Owns: `Outcomes`, and what a `Participant` is: a segment's buffer, a subscription's pending acks;
`DecisionQueue`, the participant of those who stand above, and follow it.

Invariants:
1. A decision, learnt by whatever path, is told to all participants here in one call without an
   await: on one broker a commit shows in all its topics in one turn of the loop. Who follows a
   `DecisionQueue` applies it in the turn after, which is before END_TXN is answered.
2. A final state never changes.
3. That a transaction is open is believed from memory only while this broker coordinates it; else
   the store is asked.
4. No decision is missed for good: a transaction that others coordinate is watched while it has
   participants here, and every one with participants is read again every `REREAD_SECONDS`.
5. What is remembered is bounded: open transactions of own coordinators, those with participants,
   of which each has so many at most, and `FINAL_MAX` decisions.

Relies on: own coordinators, which tell of what they began (`opened`) and decided (`learn`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from magnetar.errors import (
    InvariantBroken,
    MagnetarError,
    NotAllowed,
    StoreClosed,
    TransactionNotFound,
)
from magnetar.metadata.api import Event, Watch
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.txn.ids import to_text
from magnetar.txn.records import State, group_key, header_key
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId

# Watches tell within milliseconds; this bounds what a lost watch or a failed read costs.
REREAD_SECONDS: Final = 5.0
"""After how long a missed decision is found."""

# The outcome cache: a send or acknowledgement that comes after the end is refused from memory
# ('fence') instead of by a read of the store.
FINAL_MAX: Final = 20_000
"""Decisions that are remembered, the latest ones."""

# Nobody waits for what is left to be written behind a decision; one after the other it would cost
# more than the decisions themselves.
GATHER_SECONDS: Final = 0.05
"""So long participants gather what they delete and write behind decisions."""

GATHER_MAX: Final = 500
"""Records that are deleted in one turn of the loop; with so many waiting nothing is gathered."""

STOP_SECONDS: Final = 5.0

_LOG: Final = logger(__name__)


class Participant(Protocol):
    """A part of this broker that a transaction changes: a segment's buffer, a subscription."""

    def decided(self, txn: TxnId, state: State) -> None:
        """COMMITTED or ABORTED. In memory, without an await and without an error."""
        ...


Missing = Callable[[TxnId], None]


class LegacyCoordination(Protocol):
    """The coordinators of legacy transactions, whom a topic asks before it lets one in."""

    def takes_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> bool | None:
        """Whether it is open and will be ended there; False: it may not; None: ask `take_part`."""
        ...

    async def take_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> None:
        """Have it ended there too, durably; raises unless its coordinator says that it is open."""
        ...


class _NoLegacy:
    """A broker without coordinators of legacy transactions: it gave no id out."""

    def takes_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> bool | None:
        return False

    async def take_part(self, txn: TxnId, topic: str, subscription: str | None = None) -> None:
        raise TransactionNotFound(f"there is no transaction {to_text(txn)}")


class DecisionQueue:
    """A `Participant` that takes decisions down, for an owner that stands above and follows it."""

    __slots__ = ("_waiting", "news")

    def __init__(self) -> None:
        self.news = Signal()
        """Advances when there is something to take."""
        self._waiting: list[tuple[TxnId, State | None]] = []

    def decided(self, txn: TxnId, state: State) -> None:
        self._waiting.append((txn, state))
        self.news.advance()

    def missing(self, txn: TxnId) -> None:
        """A transaction turned out to have no header."""
        self._waiting.append((txn, None))
        self.news.advance()

    def take(self) -> list[tuple[TxnId, State | None]]:
        """What was decided since the last call, in order; None: there is no header."""
        waiting, self._waiting = self._waiting, []
        return waiting


class _Followed:
    """A transaction that has participants here."""

    __slots__ = ("is_watched", "news", "participants", "since")

    def __init__(self, since: float) -> None:
        # In the order of joining. The callback beside each is what a subscription needs: should
        # there be no header, nothing else ends what it holds for the transaction.
        self.participants: dict[Participant, Missing | None] = {}
        self.news: Signal | None = None
        """For who watches it; None: it is coordinated here."""
        self.since = since
        self.is_watched = False


class Outcomes(Service):
    """All that one broker knows of transactions. It works once made; `start` adds the repair."""

    def __init__(
        self,
        store: TxnStore,
        clock: Clock,
        *,
        coordinates: Callable[[TxnId], bool],
        legacy: Callable[[], LegacyCoordination] = _NoLegacy,
        participants_max: int = Limits().txn_participants_max,
    ) -> None:
        super().__init__("transaction decisions", stop_seconds=STOP_SECONDS)
        self._legacy = legacy
        self._store = store
        self._clock = clock
        self._coordinates = coordinates
        self._participants_max = participants_max
        # What memory knows: begun by an own coordinator, decided (bounded, the oldest is forgotten
        # first), and those that somebody here waits for.
        self._open: set[TxnId] = set()
        self._final: OrderedDict[TxnId, State] = OrderedDict()
        self._followed: dict[TxnId, _Followed] = {}

    async def _start(self) -> None:
        self.spawn(self._repair(), "repair")

    @property
    def legacy(self) -> LegacyCoordination:
        """Asked before a legacy transaction writes or acknowledges somewhere first."""
        return self._legacy()

    # --- what is known

    def known(self, txn: TxnId) -> State | None:
        """What memory says; OPEN may be out of date."""
        final = self._final.get(txn)
        if final is not None:
            return final
        return "OPEN" if txn in self._open else None

    def is_open_here(self, txn: TxnId) -> bool:
        """Whether it is certainly open: it was begun here, and nobody else decides on it."""
        return txn in self._open and self._coordinates(txn)

    async def state(self, txn: TxnId) -> State | None:
        """What memory says if that is certain, else the store; None: there is no header."""
        known = self.known(txn)
        # OPEN is believed only of an own transaction (invariant 3): another broker may have decided
        # it a moment ago, and its watch is still on the way.
        if known is not None and (known != "OPEN" or self._coordinates(txn)):
            return known
        return await self.read(txn)

    async def read(self, txn: TxnId) -> State | None:
        """What the store says now; a decision that it tells is applied."""
        state = await self._store.state(txn)
        if state is not None:
            self.learn(txn, state)
        # While the store answered, the decision may have come by another path: that one is
        # newer than an OPEN just read.
        return self._final.get(txn, state)

    def opened(self, txn: TxnId) -> None:
        """A coordinator of this broker began a transaction, durably."""
        # A deadline of a few milliseconds may have been decided before this is
        # told: final stays final.
        if txn not in self._final:
            self._open.add(txn)

    def learn(self, txn: TxnId, state: State) -> None:
        """Apply a decision to every participant; again, or OPEN: nothing."""
        if state == "OPEN":
            return
        # The first one to tell wins, and a second one can only repeat it ('one decision').
        known = self._final.setdefault(txn, state)
        if known != state:
            raise InvariantBroken(f"transaction {to_text(txn)} is {known}, and then {state}")
        self._final.move_to_end(txn)
        if len(self._final) > FINAL_MAX:
            self._final.popitem(last=False)
        self._open.discard(txn)
        # Taken out first: `decided` makes participants leave, and the loop must not see that.
        followed = self._followed.pop(txn, None)
        if followed is not None:
            # No await in this loop: all topics and subscriptions of this broker change in one
            # turn ('all or nothing').
            for participant in followed.participants:
                participant.decided(txn, state)
            if followed.news is not None:
                followed.news.advance()

    # --- participants

    def join(self, txn: TxnId, participant: Participant, missing: Missing | None = None) -> None:
        """Tell this participant of the decision to come; what is `known` by now it asks itself.

        `missing` is called, perhaps repeatedly, if there turns out to be no header.
        """
        followed = self._followed.get(txn)
        if followed is None:
            followed = self._followed[txn] = _Followed(self._clock.monotonic())
        followed.participants[participant] = missing
        # An own coordinator tells by itself; only others' decisions have to be watched.
        if not self._coordinates(txn):
            self._watch(txn, followed)

    def check_room(self, txn: TxnId, participant: Participant) -> None:
        """Raise if a transaction cannot have one more participant here; one it has is none more."""
        followed, most = self._followed.get(txn), self._participants_max
        # Counted per transaction, so that telling all of them stays one short turn of the loop.
        if followed is None or len(followed.participants) < most:
            return
        if participant not in followed.participants:
            raise NotAllowed(
                f"transaction {to_text(txn)} has {most} topics and subscriptions here, the limit",
                hint="use more transactions, or raise txn_participants_max",
            )

    def leave(self, txn: TxnId, participant: Participant) -> None:
        """Take a participant off a transaction that it is done with; not joined: nothing."""
        followed = self._followed.get(txn)
        if followed is None:
            return
        followed.participants.pop(participant, None)
        if not followed.participants:
            del self._followed[txn]
            # Nobody asks any more: `_follow` wakes and ends its watches.
            if followed.news is not None:
                followed.news.advance()

    # --- following

    def _watch(self, txn: TxnId, followed: _Followed) -> None:
        if not followed.is_watched and not self.stopping:
            followed.is_watched = True
            news = followed.news = followed.news or Signal()
            self.spawn(self._follow(txn, followed, news), f"follow {to_text(txn)}")

    async def _follow(self, txn: TxnId, followed: _Followed, news: Signal) -> None:
        """Until the decision is known, nobody asks any more, or it is coordinated here."""
        watches: dict[str, Watch[Event]] = {}
        pumps: list[asyncio.Task[None]] = []
        try:
            while self._followed.get(txn) is followed and not self._coordinates(txn):
                seen = news.version
                # Watch first, then read: nothing is missed in between.
                for key in await self._keys(txn):
                    if key not in watches:
                        watches[key] = self._store.metadata.watch(key=key)
                        pumps.append(asyncio.create_task(_pump(watches[key], news)))
                await self._look(txn, followed)
                # Woken by the watch, by `leave`, or after the time in which
                # a lost watch is repaired.
                await news.past_within(seen, REREAD_SECONDS)
        except StoreClosed:
            return
        finally:
            followed.is_watched = False
            for watch in watches.values():
                watch.close()
            for pump in pumps:
                pump.cancel()

    async def _keys(self, txn: TxnId) -> list[str]:
        """Where its decision will be: its header, or for a member the record of its group."""
        try:
            header = await self._store.header(txn)
        except StoreClosed:
            raise
        except MagnetarError:
            header = None  # the next reading tells
        # A member's header is only a copy, which comes later: the group's record decides.
        keys = [header_key(txn)]
        if header is not None and header.group is not None:
            keys.append(group_key(header.group.application))
        return keys

    async def _look(self, txn: TxnId, followed: _Followed) -> None:
        try:
            state = await self.read(txn)
        except StoreClosed:
            raise
        except MagnetarError as error:
            _LOG.info("transaction-not-read", txn=to_text(txn), error=str(error))
            return
        # Checked again after the read: a participant that left meanwhile must not be called.
        if state is None and self._followed.get(txn) is followed:
            for missing in list(followed.participants.values()):
                if missing is not None:
                    missing(txn)

    async def _repair(self) -> None:
        """Find decisions that nobody told of, and coordinators that moved away."""
        while True:
            await self._clock.sleep(REREAD_SECONDS)
            late = self._clock.monotonic() - REREAD_SECONDS
            try:
                for txn, followed in list(self._followed.items()):
                    # The coordinator has moved to another broker: from now on its
                    # decision must be watched.
                    if not self._coordinates(txn):
                        self._watch(txn, followed)
                    # An own one that is long open: read it in case that a decision was stored and
                    # its answer lost (OutcomeUnknown). Younger ones are given the time to be told.
                    elif followed.since <= late:
                        await self._look(txn, followed)
            except StoreClosed:
                return
            self._open = {txn for txn in self._open if self._coordinates(txn)}


async def _pump(watch: Watch[Event], news: Signal) -> None:
    async for _ in watch:
        news.advance()
