"""Acknowledgements on their way: how many go into a command, and what is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from magnetar.client.consume.segment.ack_outbox import ACKS_PER_COMMAND, AckOutbox
from magnetar.client.consume.segment.ack_state import AckItem
from magnetar.errors import ConnectionLost
from magnetar.model.ids import Position
from magnetar.wire.messages import TxnId

COUNT = 2 * ACKS_PER_COMMAND + 5


class Txn:
    txn_id = TxnId(1, 2)

    async def enlist_subscription(self, topic: str, subscription: str) -> None:
        """Nobody needs to know."""

    def acking(self, done: asyncio.Future[None], on_end: Callable[[bool], None]) -> None:
        """Nobody waits."""


class Nothing:
    """There are no others."""

    has_acks = False

    def take_acks(self) -> tuple[list[AckItem], bool]:
        return [], False

    def confirm_acks(self, items: Sequence[AckItem]) -> None:
        assert not items


def test_what_a_transaction_acknowledges_goes_in_parts_and_only_what_is_open_is_repeated() -> None:
    asked: list[int] = []

    async def ask(
        items: Sequence[AckItem], /, *, cumulative: bool, txn: TxnId | None = None
    ) -> None:
        asked.append(len(items))
        assert not cumulative
        assert txn == Txn.txn_id
        if len(asked) == 2:
            raise ConnectionLost("gone")

    async def story() -> None:
        outbox = AckOutbox(Nothing(), "topic", "subscription")
        items = [AckItem(Position(1, number)) for number in range(COUNT)]
        acked = outbox.join_txn(Txn(), items, cumulative=False, on_end=lambda committed: None)
        with pytest.raises(ConnectionLost):
            await outbox.send(ask)
        assert not acked.done()
        await outbox.send(ask)
        await acked

    asyncio.run(story())
    assert asked == [ACKS_PER_COMMAND, ACKS_PER_COMMAND, ACKS_PER_COMMAND, 5]
