"""The durable side of acknowledgements in transactions, for one subscription.

Owns: `MetadataPendingAckStore`: the ack ops that one owner of a subscription writes, finds and
deletes.

Invariants:
1. What `write` returned is durable. `confirm` returns only if this owner was still the owner after
   that: a later owner then finds the op, because it reads ops after it has become the owner.
2. Ops of a committed transaction are `merged` (see `ack_cleanup`); so are those from before a
   seek, which then is durable. Those of an aborted one are `dropped`. Each is deleted only in the
   version written or found.
3. Keys name the owner's epoch and a number that it uses once: owners never write the same record.

Relies on: the managed ledger's record, whose epoch names the present owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from magnetar.errors import MagnetarError, ManagedLedgerFenced, OutcomeUnknown
from magnetar.managed_ledger.cursor import Cursor
from magnetar.managed_ledger.names import managed_ledger_key
from magnetar.managed_ledger.records import decode_managed_ledger
from magnetar.metadata.api import Stat
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_OP_WRITES
from magnetar.runtime.slices import SlicePace
from magnetar.txn.acks.ack_cleanup import AckCleanup
from magnetar.txn.acks.pending_acks import WHOLE, Acked
from magnetar.txn.ids import to_text
from magnetar.txn.records import AckedEntry, AckOp
from magnetar.txn.store import FoundAck, StoredOp, TxnStore
from magnetar.wire.messages import TxnId

RECORD_BYTES: Final = 64 * 1024
"""Of the entries in one record: about as many as a turn of the loop has time for."""

_ENTRY_BYTES: Final = 48
"""Two numbers and what stands around them, at most."""

_LOG: Final = logger(__name__)


class Submitted(NamedTuple):
    """An intent that was submitted."""

    txn: TxnId
    serial: int
    op: AckOp


class MetadataPendingAckStore(AckCleanup[StoredOp]):
    """The ack ops of one subscription, as one owner sees them."""

    def __init__(
        self,
        segment: str,
        cursor: Cursor,
        store: TxnStore,
        *,
        managed_ledger: str,
        epoch: int,
        clock: Clock,
    ) -> None:
        super().__init__(cursor, store.delete_ops, clock=clock)
        self._segment = segment
        self._store = store
        self._managed_ledger = managed_ledger
        # Both are parts of the ops' keys (invariant 3).
        self._epoch = epoch
        self._serial = 0

    # --- intents

    async def write(self, txn: TxnId, acks: Sequence[Acked], cumulative: bool) -> list[StoredOp]:
        """Make durable what a transaction acknowledges, for the cursor's present incarnation.

        All of it or, as far as the store answers, nothing; more than one record has room for goes
        into several.
        """
        # The incarnation of this moment: by it an owner knows intents that a later seek made void.
        name, incarnation = to_text(txn), self._cursor.incarnation
        writes, pace = [], SlicePace()
        for entries in _records_of(acks):
            self._serial += 1
            op = AckOp(name, self._segment, self._cursor.name, incarnation, entries, cumulative)
            writes.append(self._store.write_ack(txn, self._epoch, self._serial, op))
            await pace.after(len(entries))
        # Nearly always: one command fits into one record.
        if len(writes) == 1:
            return [await writes[0]]
        results = await asyncio.gather(*writes, return_exceptions=True)
        failures = [each for each in results if isinstance(each, BaseException)]
        ops = [each for each in results if not isinstance(each, BaseException)]
        # The client is told that nothing was acknowledged, so nothing of it may stay; deleted in
        # the version written, so that no other record is hit.
        if failures:
            try:
                await self._store.delete_ops(ops)
            except MagnetarError as error:
                # The transaction's end removes them, whatever that is.
                _LOG.warning("acks-left-behind", segment=self._segment, error=str(error))
            raise failures[0]
        return ops

    def submit(
        self, txn: TxnId, acks: Sequence[Acked], cumulative: bool
    ) -> tuple[Submitted, asyncio.Future[Stat]] | None:
        """Write whole entries, submitted when called; None: one record has no room for them.

        `settled` is asked if the outcome is unknown.
        """
        if len(acks) * _ENTRY_BYTES > RECORD_BYTES or any(each.messages != WHOLE for each in acks):
            return None
        entries = tuple([AckedEntry(*each.position) for each in acks])
        incarnation = self._cursor.incarnation
        name = self._cursor.name
        op = AckOp(to_text(txn), self._segment, name, incarnation, entries, cumulative)
        self._serial += 1
        put = self._store.submit_ack(txn, self._epoch, self._serial, op)
        return Submitted(txn, self._serial, op), put

    def written(self, stat: Stat) -> StoredOp:
        """What was submitted is durable."""
        TXN_OP_WRITES.inc()
        return StoredOp(stat.key, stat.version)

    async def settled(self, submitted: Submitted) -> StoredOp:
        """What was submitted, if it is there; else it stays unknown."""
        txn, serial, op = submitted
        found = await self._store.settle_ack(txn, self._epoch, serial, op)
        if found is None:
            raise OutcomeUnknown(f"whether {op.txn} has acknowledged is not known")
        return found

    async def confirm(self) -> None:
        """ManagedLedgerFenced unless this is still the owner: the managed ledger has one."""
        key = managed_ledger_key(self._managed_ledger)
        # A linearizable read: without it a lagging replica could still name this owner, whose op
        # the next one has not seen.
        await self._store.metadata.sync(key)
        found = await self._store.metadata.get(key)
        record = None
        if found is not None:
            record = decode_managed_ledger(key, self._managed_ledger, found.value)
        # Checked between the durable intent and the answer: a later owner has read the ops by now,
        # perhaps before this one came, and would never hold it.
        if record is None or record.epoch != self._epoch or record.deleted:
            raise ManagedLedgerFenced(f"{self._managed_ledger} has another owner")

    async def found(self) -> list[FoundAck]:
        """All ops of the subscription, whoever wrote them."""
        return await self._store.acks(self._segment, self._cursor.name)

    async def delete_all(self) -> None:
        """The subscription is gone: so is all that was acknowledged on it."""
        await self._store.delete_ops([each.op for each in await self.found()])


def _records_of(acks: Sequence[Acked]) -> Iterator[tuple[AckedEntry, ...]]:
    """What goes into each record, of bounded size."""
    entries: list[AckedEntry] = []
    size = 0
    for entry in map(_entry, acks):
        added = _ENTRY_BYTES + len(entry.unacked)
        # Never an empty record: an entry that is larger than that by itself goes alone.
        if entries and size + added > RECORD_BYTES:
            yield tuple(entries)
            entries, size = [], 0
        entries.append(entry)
        size += added
    yield tuple(entries)


def _entry(ack: Acked) -> AckedEntry:
    left_out = ack.unacked
    return AckedEntry(*ack.position, f"{left_out:x}" if left_out else "")
