"""The parts of a producer and of a transaction that the other one knows.

Owns: `SendTransaction`, a transaction as producers see it, and `Sender`, a producer as transactions
see it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from magnetar.client.message.message import AnyMessageId
from magnetar.errors import MagnetarError
from magnetar.wire.messages import TxnId


class Sender(Protocol):
    """The part of a producer that a transaction needs."""

    def hurry(self) -> None:
        """Send what is being gathered."""
        ...

    def drop(self, txn_id: TxnId, error: MagnetarError) -> None:
        """Fail those messages of a transaction that were not sent yet."""
        ...


class SendTransaction(Protocol):
    """The part of a transaction that a producer needs."""

    @property
    def txn_id(self) -> TxnId: ...

    async def enlist(self, topic: str) -> None:
        """Called before each send; does nothing if the transaction knows the topic."""
        ...

    def sending(self, receipt: asyncio.Future[AnyMessageId], sender: Sender) -> None:
        """Called with each send; raises if the transaction takes no more.

        From then on `sender` may be asked to `hurry`, and to `drop` what it was given.
        """
        ...
