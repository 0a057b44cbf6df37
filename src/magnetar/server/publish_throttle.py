"""Back-pressure of the whole server: what all connections together may bring.

Owns: `PublishThrottle`, which knows whether connections that publish may be read (not while storage
is behind), `FrameBudget`, which counts the frames that have not arrived as a whole, and `ReadTurn`,
which shares a turn of the loop among connections.

Invariants:
1. Once half of `journal_queue_bytes` waits for the journal, no connection with a producer is read
   until a quarter of it is left. What one read of a connection may still bring fits into the rest,
   so a publisher is slowed, not refused.
2. Connections without producers are never held: consumers go on.
3. The beginnings of frames that wait for their end take `unfinished_frame_bytes` at most, over all
   connections. Beyond it the connection that has owed an end for the longest is closed: a frame
   that is being sent in earnest is whole soon.
4. A turn of the loop handles `ITEMS_PER_LOOP_TURN` commands and messages, and what one connection
   may do in it on top; who comes later is served in the next one, in the order of their coming.

Relies on: sessions, which ask `has_room` after each read that brought a SEND, obey `is_open`, and
tell the budget after each read what they keep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from magnetar.errors import MagnetarError, TooManyRequests
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal

ITEMS_PER_LOOP_TURN: Final = 2000
"""At three to five microseconds each they take ten milliseconds."""


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


class ReadTurn:
    """The share of a turn of the loop that is used up by what clients sent, on all connections."""

    def __init__(self) -> None:
        # While something is spent, `_end` is due.
        self._spent = 0
        self._later: deque[Callable[[], None]] = deque()

    @property
    def has_room(self) -> bool:
        return self._spent < ITEMS_PER_LOOP_TURN

    def spend(self, items: int) -> None:
        if not self._spent and items:
            asyncio.get_running_loop().call_soon(self._end)
        self._spent += items

    def give_back(self, items: int) -> None:
        """Take back so many that were spent in this turn and not handled after all."""
        # Not all of it: 0 would have the next one ask for another end of the same turn.
        self._spent = max(self._spent - items, 1)

    def later(self, go_on: Callable[[], None]) -> None:
        """Call this in a turn that has room, as there is none now; in the order of the calls."""
        self._later.append(go_on)

    def _end(self) -> None:
        self._spent = 0
        try:
            while self._later and self.has_room:
                self._later.popleft()()
        finally:
            # One of them failed before it spent anything: the others go on all the same.
            if self._later and not self._spent:
                asyncio.get_running_loop().call_soon(self._end)


class FrameHolder(Protocol):
    """A connection that keeps the beginning of a frame."""

    @property
    def is_read(self) -> bool: ...

    def end_unfinished(self, error: MagnetarError) -> None:
        """Drop the frame, tell the peer why, and close."""
        ...


class FrameBudget:
    """The memory that unfinished frames of all connections take."""

    def __init__(self, limits: Limits) -> None:
        self._bytes_max = limits.unfinished_frame_bytes
        # In the order in which their frames began.
        self._held: dict[FrameHolder, int] = {}
        self._total = 0

    @property
    def held_bytes(self) -> int:
        return self._total

    def note(self, holder: FrameHolder, held: int, *, is_new: bool) -> None:
        """A connection keeps so many bytes now; `is_new`: of another frame than before."""
        self._total += held - self._held.get(holder, 0)
        if is_new or not held:
            self._held.pop(holder, None)
        if held:
            self._held[holder] = held
        while self._total > self._bytes_max:
            self._end_one()

    def _end_one(self) -> None:
        # What is not read cannot be finished: that is back-pressure, and not its peer's doing.
        slowest = next((each for each in self._held if each.is_read), next(iter(self._held)))
        held = self._held.pop(slowest)
        self._total -= held
        slowest.end_unfinished(
            TooManyRequests(
                f"{held} bytes of a frame whose end has not come, and all connections together "
                f"have more than {self._bytes_max} such bytes here",
                hint="connect again; send smaller messages, or raise unfinished_frame_bytes",
            )
        )
