"""The ends of legacy transactions: every topic and subscription carries the decision out.

Owns: `Ends`: asking participants, all at once, and asking again those that could not;
`Participants`, the seam between a coordinator and whatever holds topics; `HeaderCopies`, headers of
legacy transactions for topics that keep them in records (policy `transactionKind` = `metadata`).

Invariants of `Ends`:
1. `carry_out` returns once every participant has returned: nothing is given up, whatever the error.
   What may pass by itself is tried again every second; else the pauses grow.
2. A participant that waits for its next attempt takes no room from others. Who asks for the same
   end again has it tried at once (`hurry`).
3. Cancelling it is safe at any time: participants are idempotent, and whoever leads next begins
   again from the log.

Invariants that whoever implements `Participants` keeps:
4. A return means that the end is done and durable, or that there is nothing to end: the topic or
   the subscription never was, is gone, or has nothing of this transaction.
5. Both calls are idempotent: the coordinator repeats them until one returned, also after a restart.
6. What may pass by itself is raised as `ServiceNotReady`, `Unavailable` or another transient error;
   the coordinator then tries again.

Invariants of `HeaderCopies`:
7. The log decides; a header is a copy. It is OPEN before a topic is told that it takes part, and
   final before the transaction has ended.
8. A copy has no deadline: the coordinator's own list of open transactions aborts it. Once final it
   is collected like any header.
9. One that comes late, from a former leader, never opens what is final.

`low_watermark`: no transaction of this coordinator at or below this number is open any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final, Protocol

from magnetar.errors import BadVersion, MagnetarError
from magnetar.metadata.api import ABSENT
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_END_RETRIES
from magnetar.runtime.signal import Signal
from magnetar.txn import transitions
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinator_state import OUTCOMES, LegacyTransaction, header_of
from magnetar.txn.records import Header, State, encode, header_indexes, header_key
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId


class HeaderCopies:
    """The headers that all legacy coordinators of one broker copy for topics with records."""

    def __init__(self, store: TxnStore) -> None:
        self._store = store

    async def open(self, header: Header) -> None:
        """Let topics know that a transaction is open; again: nothing."""
        try:
            # Without indexes: a copy is found by its key alone, and its deadline is the
            # coordinator's to keep (invariant 8).
            await self._store.metadata.put(header_key(header.id), encode(header), expected=ABSENT)
        except BadVersion:
            return  # it is there, and perhaps final

    async def end(self, header: Header, state: State, now_ms: int) -> None:
        """Let topics know the decision, whether or not they knew of the transaction."""

        def ended(present: Header | None) -> Header:
            # Absent: the put of the OPEN copy was lost, or never came. A final one is made all the
            # same, so that a late OPEN one finds it (invariant 9).
            return transitions.ended(present or header, state, now_ms, header.decided_by)

        await self._store.change(header_key(header.id), Header, ended, header_indexes)


class Participants(Protocol):
    """The topics and subscriptions in which legacy transactions end, wherever they are."""

    async def end_on_topic(
        self, topic: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None: ...

    async def end_on_subscription(
        self, topic: str, subscription: str, txn: TxnId, *, commit: bool, low_watermark: int
    ) -> None: ...


# Most often a topic is being loaded or moved, which is over within seconds.
RETRY_SECONDS: Final = 1.0
_PAUSE_MAX_SECONDS: Final = 60.0
_AT_ONCE: Final = 1000
"""Participants asked at a time by one broker."""

End = Callable[[], Awaitable[None]]

_LOG: Final = logger(__name__)


class Ends:
    """The ends under way of all coordinators of one broker."""

    def __init__(self, participants: Participants, copies: HeaderCopies) -> None:
        self._participants = participants
        self._copies = copies
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._hurries: dict[TxnId, Signal] = {}

    async def carry_out(
        self, txn: TxnId, known: LegacyTransaction, low_watermark: Callable[[], int]
    ) -> None:
        """Return once all its topics and subscriptions have ended a decided transaction."""
        # One signal for all its participants: a repeated END_TXN wakes every pause at once.
        hurry = self._hurries[txn] = Signal()
        try:
            # All at once: a commit is visible everywhere as soon as the slowest one has it.
            async with asyncio.TaskGroup() as group:
                for where, end in self._all(txn, known, low_watermark):
                    group.create_task(self._insist(txn, where, end, hurry))
        finally:
            del self._hurries[txn]

    def hurry(self, txn: TxnId) -> None:
        """Ask those that could not end a transaction again at once: a client waits."""
        if (waiting := self._hurries.get(txn)) is not None:
            waiting.advance()

    def _all(
        self, txn: TxnId, known: LegacyTransaction, low_watermark: Callable[[], int]
    ) -> Iterator[tuple[str, End]]:
        """Whom to ask, and how."""
        commit, ask = known.commits, self._participants

        async def on_topic(topic: str) -> None:
            # The watermark of the moment of asking, not of the decision: it
            # lets topics forget more.
            await ask.end_on_topic(topic, txn, commit=commit, low_watermark=low_watermark())

        async def on_subscription(topic: str, name: str) -> None:
            await ask.end_on_subscription(
                topic, name, txn, commit=commit, low_watermark=low_watermark()
            )

        for topic in known.topics:
            yield topic, partial(on_topic, topic)
        for each in known.subscriptions:
            where = f"{each.topic} {each.subscription}"
            yield where, partial(on_subscription, each.topic, each.subscription)
        # The header is one more participant: final before `Ended`, so it is never
        # left open (invariant 7).
        if known.has_copy:
            header, state = header_of(txn, known), OUTCOMES[known.state]
            yield "its header", partial(self._copies.end, header, state, known.decided_ms)

    async def _insist(self, txn: TxnId, where: str, end: End, hurry: Signal) -> None:
        pause = RETRY_SECONDS
        told = ""
        while True:
            # Before the attempt: a `hurry` that comes while it runs is not lost.
            seen = hurry.version
            try:
                # Not held during the pause: one topic that is down takes no room (invariant 2).
                async with self._room:
                    await end()
                return
            except Exception as error:  # noqa: BLE001  nothing is given up: it would never end
                passes = isinstance(error, MagnetarError) and error.retryable
                pause = RETRY_SECONDS if passes else min(pause * 2, _PAUSE_MAX_SECONDS)
                # Once per kind of trouble, not once per attempt: this may go on for hours.
                if repr(error) != told:
                    told = repr(error)
                    _tell_late(txn, where, error)
            TXN_END_RETRIES.inc()
            await hurry.past_within(seen, pause)


def _tell_late(txn: TxnId, where: str, error: Exception) -> None:
    if isinstance(error, MagnetarError):
        _LOG.warning("txn-end-late", txn=to_text(txn), where=where, error=str(error))
    else:
        _LOG.error("txn-end-failed", error, txn=to_text(txn), where=where)
