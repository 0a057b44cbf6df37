"""Records that go once what they say stands elsewhere.

Owns: `AckCleanup`: which records of acknowledgements a subscription's owner may discard, and when.

Invariants:
1. What was `merged` is discarded only after a cursor write whose snapshot was taken after that.
   What was `dropped` goes at once.
2. One cursor write at a time; the next one covers all that was merged meanwhile.
3. What could not be discarded stays and is tried again, unless another owner has it all by now.
4. Nobody waits for any of this: what gathers within `GATHER_SECONDS` is settled together.

Relies on: `Cursor.flush`, which takes its snapshot at or after the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Generic, TypeVar

from magnetar.errors import MagnetarError, ManagedLedgerFenced, StorageClosed
from magnetar.managed_ledger.cursor import Cursor
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.txn.outcomes import GATHER_MAX, GATHER_SECONDS

RETRY_SECONDS: Final = 1.0
"""Between two attempts: nobody waits for it."""

Done = TypeVar("Done")

_LOG: Final = logger(__name__)


class AckCleanup(Generic[Done]):
    """The records of one subscription that are left to discard, and the loop that does it."""

    def __init__(
        self, cursor: Cursor, discard: Callable[[list[Done]], Awaitable[None]], *, clock: Clock
    ) -> None:
        self._cursor = cursor
        self._discard = discard
        self._clock = clock
        # Two lists because of invariant 1: what the cursor must hold first, and what goes at once.
        self._merged: list[Done] = []
        self._dropped: list[Done] = []
        self._is_settling = False

    @property
    def unsettled(self) -> int:
        """How many records are still to be discarded."""
        return len(self._merged) + len(self._dropped)

    def merged(self, records: Iterable[Done]) -> None:
        """The cursor in memory holds what these say, or has begun a new incarnation since."""
        self._merged += records

    def dropped(self, records: Iterable[Done]) -> None:
        """What these say does not count."""
        self._dropped += records

    def settle_soon(self, tasks: Service) -> None:
        """Have all discarded; one coroutine at a time, and none without work."""
        # One loop at a time: a second one would discard the same records,
        # and flush beside the first.
        if self.unsettled and not self._is_settling:
            self._is_settling = True
            tasks.spawn(self._settle_in_task(), "settled acks")

    async def _settle_in_task(self) -> None:
        try:
            await self.settle_all()
        finally:
            self._is_settling = False

    async def settle_all(self) -> None:
        """Discard what may be until nothing is left, or another owner has it all."""
        where = self._cursor.name
        while self.unsettled:
            if self.unsettled < GATHER_MAX:
                await self._clock.sleep(GATHER_SECONDS)
            try:
                await self.settle()
            # The topic has moved, or the broker stops: the next owner reads the records and merges
            # them again, which changes nothing.
            except (ManagedLedgerFenced, StorageClosed) as error:
                _LOG.info("acks-left-to-next-owner", subscription=where, error=str(error))
                return
            except MagnetarError as error:
                # The records stay, and with them the acknowledgements: late is all that it is.
                _LOG.warning("acks-not-settled", subscription=where, error=str(error))
                await self._clock.sleep(RETRY_SECONDS)

    async def settle(self) -> None:
        """Make merges durable, then discard their records: as many as are discarded together."""
        if self._merged:
            # Counted before the flush: its snapshot is taken at or after the call, and what is
            # merged while it is under way is not surely in it ('ack intents outlive the cursor').
            covered = len(self._merged)
            await self._cursor.flush()
            self._dropped += self._merged[:covered]
            del self._merged[:covered]
        gone = self._dropped[:GATHER_MAX]
        # A copy, and cut off only afterwards: should it fail, all of them are tried again; a
        # record that is gone already is no error.
        await self._discard(gone)
        del self._dropped[: len(gone)]
