"""Random lives of a topic with legacy transactions: ends are told to it until they are done."""

from __future__ import annotations

import asyncio

from magnetar.errors import MagnetarError
from magnetar.txn.records import State
from magnetar.wire.messages import TxnId
from tests.unit.broker.txn_history import History, Session, _Fresh

ASKED_SECONDS = 5.0


class LegacyHistory(History):
    """One life. Its coordinator insists, as the real one does."""

    def _id(self, number: int) -> TxnId:
        return TxnId(0, number)

    async def _begin(self, txn: TxnId) -> None:
        self.begun.setdefault(txn, "begun")

    def _publish(self, session: Session, txn: TxnId | None) -> None:
        if txn is None or txn not in self.asked:
            if txn is not None:
                self.begun.setdefault(txn, "begun")
            super()._publish(session, txn)

    async def _end(self, txn: TxnId, state: State) -> None:
        if txn in self.begun and txn not in self.asked:
            self.asked[txn] = state
            await self._insist(txn, state)
            self.begun[txn] = "ended"

    async def _insist(self, txn: TxnId, state: State) -> None:
        while True:
            low = min(each.least for each, how in self.begun.items() if how == "begun") - 1
            if self.sessions:
                topic = self.sessions[-1].topic
                try:
                    async with asyncio.timeout(ASKED_SECONDS):
                        assert topic.legacy_transactions is not None
                        await topic.legacy_transactions.end(
                            txn, commit=state == "COMMITTED", low_watermark=low
                        )
                    return
                except (MagnetarError, TimeoutError):
                    pass  # it is asked again
            await asyncio.sleep(0.5)

    async def _collect(self) -> None:
        """The record is written again."""
        await asyncio.sleep(6)

    async def _fresh(self) -> _Fresh:
        fresh = await super()._fresh()
        assert fresh.topic.undecided == 0, "all have ended"
        return fresh
