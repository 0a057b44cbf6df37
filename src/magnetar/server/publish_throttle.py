"""Back-pressure of the whole server: publishers are not read while storage is behind.

Owns: `PublishThrottle`, which knows whether connections that publish may be read.

Invariants:
1. Once half of `journal_queue_bytes` waits for the journal, no connection with a producer is read
   until a quarter of it is left. What one read of a connection may still bring fits into the rest,
   so a publisher is slowed, not refused.
2. Connections without producers are never held: consumers go on.

Relies on: sessions, which ask `has_room` after each read that brought a SEND, and obey `is_open`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal


class WriteQueue(Protocol):
    """The queue of writes that are not durable yet."""

    progress: Signal
    """Advances when some of it has become durable."""

    @property
    def queued_bytes(self) -> int: ...


class PublishThrottle:
    """The throttle: whether connections that publish may be read."""

    def __init__(self, queue: WriteQueue, limits: Limits, changed: Callable[[], None]) -> None:
        """`changed` has every connection look at `is_open`."""
        self.is_open = True
        self._queue = queue
        # Half: all connections together may bring as much again before they have stopped. A
        # quarter: with a gap between the two the throttle does not flutter.
        self._close_at = limits.journal_queue_bytes // 2
        self._open_at = limits.journal_queue_bytes // 4
        self._changed = changed
        self._closed = Signal()

    def has_room(self) -> bool:
        """Look at the queue, and close if it is too long."""
        if self.is_open and self._queue.queued_bytes >= self._close_at:
            self.is_open = False
            self._closed.advance()
            self._changed()
        return self.is_open

    async def reopen_when_drained(self) -> None:
        """Open again each time that the queue is short enough; runs until cancelled."""
        while True:
            # Versions are read before the state: what changes after that ends the wait.
            seen = self._closed.version
            while not self.is_open:
                # Read before the look, for the same reason.
                progress = self._queue.progress.version
                if self._queue.queued_bytes <= self._open_at:
                    self.is_open = True
                    self._changed()
                else:
                    await self._queue.progress.past(progress)
            await self._closed.past(seen)
