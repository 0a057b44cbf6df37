"""The inside of a producer: its parts, and its life.

Owns: `ProducerCore`, which puts the parts of one producer together, opens, flushes and closes them.
`Producer`, which applications have, stands on it. From top to bottom: `RowSender` and
`MessageSender` take what is sent, `SegmentProducers` route it, a `SegmentProducer` for each segment
writes it; `PendingMessages`, below all of them, counts and settles.

Invariants:
1. What failed to open, what no retry can heal, and `close` are final: every later send raises it.
2. `close` waits for receipts, but not longer than an operation may take; then the rest fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from magnetar.client.connection.pool import Connections
from magnetar.client.encryption.encryptor import Encryptor
from magnetar.client.layout.watch import LayoutWatch
from magnetar.client.produce.message_sender import MessageSender
from magnetar.client.produce.pending_messages import PendingMessages
from magnetar.client.produce.row_sender import Receipt, RowSender
from magnetar.client.produce.segment_producer import ProducerSpec
from magnetar.client.produce.segment_producers import SegmentProducers
from magnetar.client.produce.semaphore import WeightedSemaphore
from magnetar.client.produce.settings import ProducerSettings
from magnetar.client.schema.info import Schema
from magnetar.client.transaction.participants import SendTransaction
from magnetar.errors import AlreadyClosed, MagnetarError
from magnetar.model.names import TopicName
from magnetar.runtime.logs import logger

_LOG: Final = logger(__name__)


class ProducerCore:
    """One producer, whatever the type of its values."""

    def __init__(
        self,
        connections: Connections,
        topic: TopicName,
        *,
        name: str,
        schema: Schema[Any],
        settings: ProducerSettings,
        memory: WeightedSemaphore,
        is_named_by_application: bool,
        on_close: Callable[[ProducerCore], None],
    ) -> None:
        self.name = name
        self.schema = schema
        self._loop = asyncio.get_running_loop()
        encryptor = None
        if settings.key_reader is not None:
            encryptor = Encryptor(
                settings.encryption_keys,
                settings.key_reader,
                settings.on_encryption_failure,
                self._loop.time,
            )
        spec = ProducerSpec(name, settings, schema, is_named_by_application, encryptor)
        # Each part is handed what it needs once, and knows only parts made before it.
        self.pending = PendingMessages(connections, str(topic), name, settings, memory)
        self.segments = SegmentProducers(
            connections, spec, self.pending, LayoutWatch(connections, topic)
        )
        self.sender = MessageSender(
            settings, self.pending, self.segments, connections.clock, encryptor
        )
        self._rows = RowSender(settings, self.pending, self.segments, self.sender)
        self._flush_timeout = connections.settings.operation_timeout
        self._closing: asyncio.Task[None] | None = None
        self._on_close = on_close

    async def submit_rows(self, batch: Any, txn: SendTransaction | None) -> list[Receipt]:
        """Hand the rows of a record batch in; the receipts of entries and messages."""
        receipts = await self._rows.submit(batch, txn)
        # A whole record batch was handed in: nothing of it should wait for more.
        self.segments.close_batches()
        return receipts

    async def flush(self) -> None:
        """Wait until everything handed in so far is settled; raise the first failure of it."""
        self.segments.close_batches()
        await self.pending.flush()

    async def open(self) -> None:
        """Open a producer on every active segment; raises why that cannot be."""
        try:
            self.sender.prepare()
            await self.segments.start()
        except BaseException as error:
            if self.pending.failure is None:
                reason = error if isinstance(error, MagnetarError) else None
                self.pending.failure = reason or AlreadyClosed(f"{self.name} was not opened")
            raise

    async def close(self) -> None:
        """Send what was handed in, and leave; what cannot be sent in time fails."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name=f"close {self.name}")
        # Whoever is cancelled while waiting leaves the end to go on (others may wait for it).
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        pending, closed = self.pending, AlreadyClosed(f"{self.name} is closed")
        try:
            # Not if it has failed: then nothing is pending, and the first reason stays.
            if pending.failure is None:
                pending.failure = closed
                async with asyncio.timeout(self._flush_timeout):
                    await self.flush()
        except (TimeoutError, MagnetarError) as error:
            # Whoever awaits one of these messages is told, and it is logged.
            _LOG.info("producer-closed-early", producer=self.name, reason=str(error))
        finally:
            pending.fail(closed)
            if pending.deadline is not None:
                pending.deadline.cancel()
            self._on_close(self)
            await self.segments.stop()
