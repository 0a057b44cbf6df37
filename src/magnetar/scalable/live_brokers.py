"""The broker processes that live, as ephemeral records.

Owns: `LiveBrokers`: this process's ephemeral record under `BROKERS`, and a view of all of them.

Invariants:
1. Started, the view is whole and shows this process too.
2. While the store's session lives, this process's record is there: a record that went, with a lost
   session or by hand, is made anew, always with the session of now.
3. A stopped process takes its record along; one that dies without a word loses it with its session.

Relies on: ids that no two process starts share.
"""

from __future__ import annotations

import asyncio
from typing import Final

from magnetar.errors import (
    BadVersion,
    DeadlineExceeded,
    OutcomeUnknown,
    SessionLost,
    StoreClosed,
    Unavailable,
)
from magnetar.managed_ledger.names import encode_name
from magnetar.metadata.api import ABSENT, MetadataStore
from magnetar.metadata.recipes import TableView
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.scalable.records import BROKERS

_LOG: Final = logger(__name__)
# While the record is missing, consumers of this broker look lost: not a long pause.
_RETRY_SECONDS: Final = 0.5


class LiveBrokers(Service):
    """The view of one broker of all that live, itself included.

    `start_seconds` is for the first look and the own record.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        broker_id: str,
        *,
        start_seconds: float,
        stop_seconds: float,
    ) -> None:
        super().__init__("living brokers", stop_seconds=stop_seconds)
        self.broker_id = broker_id
        self._metadata = metadata
        self._key = f"{BROKERS}/{encode_name(broker_id)}"
        self._view = TableView(metadata, BROKERS)
        self._start_seconds = start_seconds
        self._news = Signal()

    @property
    def ids(self) -> frozenset[str]:
        """The brokers that live, by what the store said last."""
        return frozenset(record.value.decode() for record in self._view.records.values())

    @property
    def changes(self) -> Signal:
        """Advances after `ids` may have changed."""
        return self._view.changes

    async def _start(self) -> None:
        self.spawn(self._view.run(), "view")
        self.spawn(self._follow_session(), "session")
        # Two ways to lose the record: with the session, or deleted by hand while the session lives.
        self.spawn(self._follow_view(), "own record")
        self.spawn(self._stay_registered(), "registration")
        # A broker that does not see itself would take its own consumers for lost (invariant 1).
        try:
            async with asyncio.timeout(self._start_seconds):
                await self._view.changes.past(0)
                while self._key not in self._view.records:
                    await self._view.changes.past(self._view.changes.version)
        except TimeoutError as error:
            text = f"{self._key}: not stored within {self._start_seconds:g} s"
            raise DeadlineExceeded(text) from error

    async def _stop(self) -> None:
        try:
            await self._metadata.delete(self._key)
        except (Unavailable, OutcomeUnknown, StoreClosed) as error:
            _LOG.info("broker-record-left", key=self._key, error=str(error))

    # --- the own record

    async def _stay_registered(self) -> None:
        while not self.stopping:
            # The version first: news that comes while the record is written starts another round.
            seen = self._news.version
            try:
                await self._register()
            except StoreClosed:
                return
            except (BadVersion, Unavailable, SessionLost, OutcomeUnknown):
                # What is true shows at the next attempt; a new session is news by itself.
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await self._news.past(seen)

    async def _register(self) -> None:
        found = await self._metadata.get(self._key)
        if found is not None and found.stat.mine:
            return
        if found is not None:
            # Of this process's earlier session, which the store has yet to end.
            await self._metadata.delete(self._key, expected=found.version)
        # Checked after the awaits: `_stop` deletes the record, and must not
        # be overtaken by this put.
        if not self.stopping:
            value = self.broker_id.encode()
            await self._metadata.put(self._key, value, expected=ABSENT, ephemeral=True)

    async def _follow_session(self) -> None:
        async for _ in self._metadata.session_events():
            self._news.advance()

    async def _follow_view(self) -> None:
        while True:
            seen = self._view.changes.version
            if self._key not in self._view.records:
                self._news.advance()
            await self._view.changes.past(seen)
