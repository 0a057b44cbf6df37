"""What the topics of one broker share for transactions.

Owns: `Transactions`. A broker without one refuses transactional work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from magnetar.runtime.limits import Limits
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.store import TxnStore


@dataclass(frozen=True, slots=True)
class Transactions:
    """The records of all transactions, and what this broker knows of their ends."""

    store: TxnStore
    outcomes: Outcomes
    shares_journal: bool = False
    """Whether records and entries become durable in the order in which they are submitted."""
    limits: Limits = field(default_factory=Limits)
