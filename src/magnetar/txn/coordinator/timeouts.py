"""Transactions that nobody ends are aborted at their deadlines.

Owns: `TransactionTimeouts`, the loop of one broker for all coordinators that it leads.

Invariants:
1. The index is read every second for what is due, so that nothing is missed. For all else that is
   open the book is seeded from it, a pass after a coordinator has come to this broker: one that
   starts serves its topics first. What a former leader began after that is found when it is due.
2. What cannot be aborted now (the store does not answer) is tried again a second later, and stops
   nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from magnetar.errors import MagnetarError, StoreClosed
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.txn.coordinator_partitions import CoordinatorPartitions
from magnetar.txn.open_transactions import OpenTransactions
from magnetar.txn.records import Header
from magnetar.txn.store import TxnStore

REFRESH_SECONDS: Final = 1.0
"""Between two reads of the index, and between two attempts to abort a transaction."""

# A deadline that has just passed must not make the loop spin ('no poll, no spin').
_SHORTEST_SECONDS: Final = 0.01
# After a long outage many are due at once; other work of the loop comes between batches.
_AT_ONCE: Final = 256
_EVER_MS: Final = 10**17
"""Later than any deadline."""

Expire = Callable[[Sequence[Header]], Awaitable[None]]
"""Abort these; those that could not be aborted are still in the book afterwards."""

_LOG: Final = logger(__name__)


class TransactionTimeouts:
    """Run by its owner until the store is closed."""

    def __init__(
        self,
        store: TxnStore,
        partitions: CoordinatorPartitions,
        open_transactions: OpenTransactions,
        clock: Clock,
        expire: Expire,
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._open_transactions = open_transactions
        self._clock = clock
        self._expire = expire
        self._seeded: dict[int, int] = {}
        """The epoch of each leadership whose transactions are in the book."""
        self._noticed: dict[int, int] = {}
        """Those that were there at the last pass."""
        self._read_at = -REFRESH_SECONDS

    async def run(self) -> None:
        while True:
            try:
                await self._follow_leaders()
                await self._refresh()
                await self._abort_due()
            except StoreClosed:
                return
            except MagnetarError as error:
                _LOG.warning("txn-deadlines-late", error=str(error))
            await self._clock.sleep(self._pause())

    def _pause(self) -> float:
        """Until the next deadline that is known, and never longer than a second."""
        deadline = self._open_transactions.next_deadline_ms()
        if deadline is None:
            return REFRESH_SECONDS
        seconds = (deadline - self._clock.now_ms()) / 1000
        return min(max(seconds, _SHORTEST_SECONDS), REFRESH_SECONDS)

    async def _follow_leaders(self) -> None:
        led, noticed = self._partitions.led, self._noticed
        self._noticed = led
        # No leadership began or ended since all of them were seeded: nothing is read.
        if led == self._seeded:
            return
        self._open_transactions.keep_only(frozenset(led))
        # Seeded a pass after it was noticed (invariant 1): the start of a broker, which wins all
        # elections at once, is not slowed down by a scan of all open transactions.
        led = {each: epoch for each, epoch in led.items() if noticed.get(each) == epoch}
        new = {each for each, epoch in led.items() if self._seeded.get(each) != epoch}
        # The new ones count as seeded only after the scan: should it fail,
        # the next pass scans again.
        self._seeded = {each: epoch for each, epoch in led.items() if each not in new}
        if new:
            async for header in self._store.due(_EVER_MS):
                self._add(header, new)
        self._seeded = led

    async def _refresh(self) -> None:
        now = self._clock.monotonic()
        # The pause may be shorter than that, for a deadline that is near.
        if now - self._read_at < REFRESH_SECONDS:
            return
        self._read_at = now
        led = set(self._partitions.led)
        async for header in self._store.due(self._clock.now_ms()):
            self._add(header, led)

    def _add(self, header: Header, partitions: set[int]) -> None:
        most = header.id.most
        # The index holds all coordinators' transactions, and a leadership may end during the scan.
        if most in partitions and self._partitions.leads(most) and not header.is_final:
            self._open_transactions.add(header)

    async def _abort_due(self) -> None:
        while due := self._open_transactions.take_due(self._clock.now_ms(), _AT_ONCE):
            await self._expire(due)
            later = self._clock.now_ms() + round(REFRESH_SECONDS * 1000)
            # For those that could not be aborted; the list of open ones
            # ignores those that are over.
            for header in due:
                self._open_transactions.try_again(header, later)
