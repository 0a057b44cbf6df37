"""`magnetar serve` with one rule of transactions taken away: broken_txn_server.py RULE serve ...

The rules are patched out here; no switch for them exists in the server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.cli.main import main
from magnetar.model.ids import Position
from magnetar.txn.store import FoundAck, FoundPin, TxnStore
from magnetar.wire.messages import TxnId


def pins_are_not_recovered() -> None:
    """A new owner of a topic does not learn who writes to it."""

    async def none(self: TxnStore, segment: str) -> list[FoundPin]:
        return []

    TxnStore.pins = none  # type: ignore[method-assign]


def acks_are_not_recovered() -> None:
    """A new owner of a subscription has what its cursor says, and no more."""

    async def none(self: TxnStore, segment: str, subscription: str) -> list[FoundAck]:
        return []

    TxnStore.acks = none  # type: ignore[method-assign]


def sends_are_not_recovered() -> None:
    """A new owner of a topic does not learn what open transactions have stored there."""

    async def nothing(
        self: TopicTransactions, txns: set[TxnId], first: Position, end: Position
    ) -> None:
        """Take every send of theirs for new."""

    TopicTransactions.stored_in = nothing  # type: ignore[method-assign]


RULES: dict[str, Callable[[], None]] = {
    rule.__name__: rule
    for rule in (pins_are_not_recovered, acks_are_not_recovered, sends_are_not_recovered)
}

if __name__ == "__main__":
    RULES[sys.argv.pop(1)]()
    main()
