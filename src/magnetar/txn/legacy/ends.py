"""A decision is carried out by every topic and subscription of a transaction.

Owns: `Ends`: asking participants, all at once, and asking again those that could not.

Invariants:
1. `carry_out` returns once every participant has returned: nothing is given up, whatever the error.
   What may pass by itself is tried again every second; else the pauses grow.
2. A participant that waits for its next attempt takes no room from others.
3. Cancelling it is safe at any time: participants are idempotent, and whoever leads next begins
   again from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from magnetar.errors import MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import TXN_END_RETRIES
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.coordinator_state import Transaction
from magnetar.txn.legacy.participants import Participants
from magnetar.wire.messages import TxnId

RETRY_SECONDS: Final = 1.0
_PAUSE_MAX_SECONDS: Final = 60.0
_AT_ONCE: Final = 1000
"""Participants asked at a time by one broker."""

_LOG: Final = logger(__name__)


class Ends:
    """Of all coordinators of one broker."""

    def __init__(self, participants: Participants, clock: Clock) -> None:
        self._participants = participants
        self._clock = clock
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def carry_out(
        self, txn: TxnId, known: Transaction, low_watermark: Callable[[], int]
    ) -> None:
        """Return once all its topics and subscriptions have ended a decided transaction."""
        async with asyncio.TaskGroup() as group:
            for topic in known.topics:
                end = partial(self._participants.end_on_topic, topic, txn, commit=known.commits)
                group.create_task(self._insist(txn, topic, end, low_watermark))
            for each in known.subscriptions:
                topic, name = each.topic, each.subscription
                end = partial(
                    self._participants.end_on_subscription, topic, name, txn, commit=known.commits
                )
                group.create_task(self._insist(txn, f"{topic} {name}", end, low_watermark))

    async def _insist(
        self,
        txn: TxnId,
        where: str,
        end: Callable[..., Awaitable[None]],
        low_watermark: Callable[[], int],
    ) -> None:
        pause = RETRY_SECONDS
        told = ""
        while True:
            try:
                async with self._room:
                    await end(low_watermark=low_watermark())
                return
            except MagnetarError as error:
                longer = min(pause * 2, _PAUSE_MAX_SECONDS)
                pause = RETRY_SECONDS if error.retryable else longer
                if str(error) != told:
                    told = str(error)
                    _LOG.warning("txn-end-late", txn=to_text(txn), where=where, error=told)
            TXN_END_RETRIES.inc()
            await self._clock.sleep(pause)
