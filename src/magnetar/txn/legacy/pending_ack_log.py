"""The logs in which subscriptions keep what legacy transactions have acknowledged.

Owns: `PendingAckLog`, a managed ledger beside that of the topic, and `PendingAckLogs`, those of one
topic.

Invariants:
1. Opening a log fences its former owner: what that one had appended is read, and nothing of it
   comes later. What `submit` gave a position is durable.
2. Entries that are done with are discarded together: after a crash all of them are there again, or
   none. To meet them again changes nothing.
3. The topic's stream record names every subscription with a log before the log begins, and for as
   long as it lasts. So a topic without one looks for none, and a deletion that was not finished is.
4. The name of a log is no topic's: topics' names have no further part.

Relies on: `LegacyTransactionBuffer`, which keeps that record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from magnetar.errors import MagnetarError
from magnetar.ledger.api import LedgerStore
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import MetadataStore
from magnetar.model.ids import Position
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.txn.legacy.entry_log import EntryLog, LedgerWithCursor, open_ledger
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer
from magnetar.txn.legacy.pending_ack_entries import CODEC, PendingAckEntry

# Pulsar's names, of the cursor and of the ledger beside the topic's.
CURSOR: Final = "__pending_ack_state"

_SUFFIX: Final = "__transaction_pending_ack"
_LOG: Final = logger(__name__)


class PendingAckLog(EntryLog[PendingAckEntry]):
    """The log of one subscription, as one owner has it."""

    def __init__(self, kept_in: LedgerWithCursor) -> None:
        super().__init__(kept_in, CODEC)

    async def discard(self, positions: Iterable[Position]) -> None:
        """Let entries go whose transactions are done with."""
        self.forget(positions)
        await self.trim_if_due()


class PendingAckLogs:
    """The pending-ack logs of one topic."""

    def __init__(
        self,
        topic: str,
        buffer: LegacyTransactionBuffer,
        metadata: MetadataStore,
        ledgers: LedgerStore,
        *,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._topic = topic
        """The name of its managed ledger."""
        self._buffer = buffer
        self._metadata = metadata
        self._ledgers = ledgers
        self._clock = clock
        self._limits = limits

    @property
    def topic(self) -> str:
        """The topic whose subscriptions have these logs."""
        return self._buffer.segment

    def exists(self, subscription: str) -> bool:
        return self._buffer.has_ack_log(subscription)

    async def open(self, subscription: str) -> PendingAckLog:
        """Take over the log of a subscription, or begin one."""
        # Named in the stream record first (invariant 3), so that a crash leaves no log unfound.
        if not self.exists(subscription):
            await self._buffer.note_ack_log(subscription)
        # An opening, even of an empty log: that is what fences a former owner of the subscription.
        log = await self._opened(subscription)
        try:
            await log.trim()
        except BaseException:
            await log.close()
            raise
        return log

    def lost(self, error: MagnetarError) -> None:
        """A log has failed for good: only who reads it knows what is in it, and that is a load."""
        self._buffer.fail(error)

    async def delete(self, subscription: str) -> None:
        """Delete the log of a deleted subscription, which is closed; there need not be one."""
        if self.exists(subscription):
            # The log, then its name: a crash in between leaves a name whose log is deleted again.
            await (await self._opened(subscription)).delete()
            await self._buffer.forget_ack_log(subscription)

    async def delete_all(self) -> None:
        """Delete all logs, as their topic is deleted: the record that names them goes next."""
        for subscription in self._buffer.ack_logs:
            await (await self._opened(subscription)).delete()

    async def sweep(self, subscriptions: Iterable[str]) -> None:
        """Delete what subscriptions left behind that are none of these."""
        # Of subscriptions that were deleted while a crash kept their logs ('no leak').
        for subscription in {*self._buffer.ack_logs} - {*subscriptions}:
            try:
                await self.delete(subscription)
            except MagnetarError as error:
                # The next load tries again; a subscription of that name would take it over.
                _LOG.warning("pending-ack-log-kept", topic=self._topic, error=str(error))

    async def _opened(self, subscription: str) -> PendingAckLog:
        name = f"{self._topic}/{encode_name(subscription)}{_SUFFIX}"
        kept_in = await open_ledger(
            name, CURSOR, self._metadata, self._ledgers, clock=self._clock, limits=self._limits
        )
        return PendingAckLog(kept_in)
