"""The interfaces of transactions: what clients may ask of a coordinator, and what topics share.

Owns: `TransactionCoordinator`, the interface of both kinds. An owner is who may end a transaction;
None stands for the broker itself or its operator, who may end every one. `Transactions`: what the
topics of one broker share; a broker without one refuses transactional work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from magnetar.runtime.limits import Limits
from magnetar.txn.legacy.coordinator_entries import Acknowledging
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import State
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId


class TransactionCoordinator(Protocol):
    """The coordinator of one kind of transactions: it adds participants, and decides."""

    async def add_partitions(
        self, txn: TxnId, topics: Iterable[str], owner: str | None = "", *, in_records: bool = False
    ) -> None:
        """A transaction is about to publish to these topics; raises unless it is open.

        `in_records`: some of them keep every transaction in records, whatever its kind.
        """
        ...

    async def add_subscriptions(
        self,
        txn: TxnId,
        subscriptions: Iterable[Acknowledging],
        owner: str | None = "",
        *,
        in_records: bool = False,
    ) -> None:
        """A transaction is about to acknowledge there; raises unless it is open."""
        ...

    async def end(self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = "") -> State:
        """Decide a transaction; what was decided. The same again is the same answer.

        `by`: who asks, as it is kept with the decision.
        """
        ...

    def ending(
        self, txn: TxnId, *, commit: bool, owner: str | None = "", by: str = ""
    ) -> asyncio.Future[State]:
        """Decide a transaction: in work of its own, which is not to be cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Transactions:
    """The records of all transactions, and what this broker knows of their ends."""

    # One of these per broker, handed to every topic: buffers and subscriptions join `outcomes`.
    store: TxnStore
    outcomes: Outcomes
    # Lets a buffer append behind a pin that is submitted but not yet durable: the journal keeps
    # 'pin before entry' by its order alone.
    shares_journal: bool = False
    """Whether records and entries become durable in the order in which they are submitted."""
    limits: Limits = field(default_factory=Limits)
