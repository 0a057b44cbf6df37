"""Finished transactions are forgotten, once all that they did is done.

Owns: `TransactionGc`, the loop of one broker for all coordinators that it leads, and for the topics
that it has: who coordinates a transaction may be unable to reach its participants.

Invariants:
1. A header is deleted only when its retention has passed and, after that, no op record of it was
   found: nothing is forced.
2. Op records are deleted by the participant that they belong to. The collector asks it to look
   again; it deletes them itself only if there is no such topic or subscription any more.
3. The ops of many transactions are looked for in one pass: a round costs the finished headers that
   are due, and the op records that exist, which are few.

Relies on: the retention being longer than an owner that can still append works on one message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Final, NamedTuple

from magnetar.errors import MagnetarError, StoreClosed
from magnetar.metadata.api import Record
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_COLLECTED, TXN_REPAIRS
from magnetar.txn.coordinator_partitions import CoordinatorPartitions
from magnetar.txn.records import BY_END, OPS, AckOp, Header, Pin, decode, number
from magnetar.txn.store import StoredOp, TxnStore

# Bounds the memory of a pass; a backlog of more takes several passes of one round.
_ROUND_MAX: Final = 5000
"""Finished transactions looked at in one pass."""

_DELETES_AT_ONCE: Final = 500

_LOG: Final = logger(__name__)


class Leftover(NamedTuple):
    """A participant that has not finished a transaction."""

    segment: str
    subscription: str | None
    """None: what it wrote; else what it acknowledged there."""


Repair = Callable[[Leftover], Awaitable[bool]]
"""Make the participant, wherever it is, look at its op records again; False: there is none."""


class TransactionGc:
    """Run by its owner until the store is closed."""

    def __init__(
        self,
        store: TxnStore,
        partitions: CoordinatorPartitions,
        clock: Clock,
        limits: Limits,
        repair: Repair,
        forget_groups: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._partitions = partitions
        self._clock = clock
        self._limits = limits
        self._repair = repair
        self._forget_groups = forget_groups

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._limits.txn_collect_seconds)
            try:
                await self.collect()
                await self._forget_groups()
            except StoreClosed:
                return
            except MagnetarError as error:
                _LOG.warning("txn-collection-failed", error=str(error))

    async def collect(self) -> None:
        """One round: everything that is due and led here."""
        # What still has ops is due in every pass of this round: without `kept` it would
        # come up forever. `repaired`: each participant is asked once a round, however
        # many transactions it has.
        kept: set[str] = set()
        repaired: set[Leftover] = set()
        while True:
            names = await self._due(kept)
            if not names:
                break
            ops = await self._ops(names)
            # 'GC never forces': the retention has passed, then ops were looked for, then the header
            # goes. An op that is written in between finds no header, and its writer gives up.
            await self._forget([each for name, each in names.items() if name not in ops])
            kept.update(ops)
            for name, records in ops.items():
                await self._finish(name, records, repaired)
            # A pass that was not full has seen everything that is due.
            if len(names) < _ROUND_MAX:
                break
        await self._finish_others(repaired)

    async def _finish_others(self, repaired: set[Leftover]) -> None:
        """Look again at what transactions of other brokers' coordinators left in topics here."""
        # Their coordinators may not reach the topics that this broker has: asked from here, too.
        # Their headers stay, which only their leader deletes.
        names = await self._due(set(), led=False)
        for records in (await self._ops(names)).values() if names else ():
            for left in _by_participant(records):
                if left in repaired:
                    continue
                repaired.add(left)
                try:
                    await self._repair(left)
                except MagnetarError as error:  # most often: it is another broker's
                    _LOG.debug("txn-repair-elsewhere", topic=left.segment, error=str(error))

    async def _due(self, kept: set[str], *, led: bool = True) -> dict[str, StoredOp]:
        """Finished transactions by name, with the place and the version of their headers."""
        before = self._clock.now_ms() - round(self._limits.txn_retention_seconds * 1000)
        found: dict[str, StoredOp] = {}
        records = self._store.metadata.scan_index(BY_END, "", number(before))
        async with aclosing(records) as due:
            async for record in due:
                header = decode(record, Header)
                # The index holds the finished transactions of all coordinators.
                if header.txn not in kept and self._partitions.leads(header.id.most) is led:
                    found[header.txn] = StoredOp(record.key, record.version)
                if len(found) >= _ROUND_MAX:
                    break
        return found

    async def _ops(self, names: Iterable[str]) -> dict[str, list[Record]]:
        """The op records that are left of these transactions."""
        # What participants elsewhere wrote before now must be seen.
        await self._store.metadata.sync()
        # One scan of all ops, which exist only while something is unfinished, instead of one index
        # scan for each of thousands of headers.
        wanted = set(names)
        found: dict[str, list[Record]] = {}
        async with aclosing(self._store.metadata.scan(OPS)) as records:
            async for record in records:
                name = _txn_of(record)
                if name in wanted:
                    found.setdefault(name, []).append(record)
        return found

    async def _forget(self, headers: list[StoredOp]) -> None:
        for first in range(0, len(headers), _DELETES_AT_ONCE):
            some = headers[first : first + _DELETES_AT_ONCE]
            # As they were seen: a final header never changes.
            await self._store.metadata.delete_seen(some)
            TXN_COLLECTED.inc(len(some))

    async def _finish(self, name: str, records: list[Record], repaired: set[Leftover]) -> None:
        for left, ops in _by_participant(records).items():
            if left in repaired:
                continue  # it has looked at all its records
            try:
                is_there = await self._repair(left)
            # The owner is loading, or elsewhere: the header stays with its
            # ops until the next round.
            except MagnetarError as error:
                _LOG.warning("txn-repair-failed", txn=name, topic=left.segment, error=str(error))
                continue
            TXN_REPAIRS.inc()
            # Its owner has looked and deletes what it has materialised; an op that belongs to a
            # topic or subscription that is gone has no owner who could ('no leak').
            if is_there:
                repaired.add(left)
            else:
                await self._store.delete_ops(ops)


def _txn_of(record: Record) -> str:
    # Ids are two numbers joined by "_": the first "-" ends the id.
    return record.key[len(OPS) + 1 :].partition("-")[0]


def _by_participant(records: list[Record]) -> dict[Leftover, list[StoredOp]]:
    found: dict[Leftover, list[StoredOp]] = {}
    for record in records:
        if record.key[len(OPS) + 1 :].split("-", 2)[1] == "w":
            left = Leftover(decode(record, Pin).segment, None)
        else:
            ack = decode(record, AckOp)
            left = Leftover(ack.segment, ack.subscription)
        found.setdefault(left, []).append(StoredOp(record.key, record.version))
    return found
