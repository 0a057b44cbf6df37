"""The outgoing frames of a connection: gathered, and written once per turn of the loop.

Owns: `Outbound`, the only writer of a session's transport, and `WriteTurn`, which writes what those
of one server have gathered.

Invariants:
1. Frames leave in the order of the `write` calls, whatever coroutine made them.
2. One write per turn: pieces are joined while that is cheaper than handing them over singly.
3. Nothing is written to a transport that is closing (uvloop raises there), or behind its end.
4. `writable` returns only while the transport is below its high-water mark, so who produces much
   (deliveries) waits, and the rest (answers to commands) is bounded by not reading commands.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from magnetar.runtime.signal import Signal

_JOIN_BYTES_MAX: Final = 256 * 1024
"""Copying this much costs about as much as a system call with many pieces."""


class Stall(NamedTuple):
    """A peer that does not take what is written."""

    pause: int
    """Tells one pause from another."""
    unsent: int
    """Bytes."""


class WriteTurn:
    """The connections for which frames were gathered in this turn of the loop."""

    def __init__(self) -> None:
        self._gathering: list[Outbound] = []

    def add(self, outbound: Outbound) -> None:
        # One callback for all: a sync answers publishers on hundreds of connections.
        if not self._gathering:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathering.append(outbound)

    def _flush(self) -> None:
        gathering = self._gathering
        try:
            while gathering:
                gathering.pop().flush()
        finally:
            # One of them failed: the others are written all the same.
            if gathering:
                asyncio.get_running_loop().call_soon(self._flush)


class Outbound:
    """Gathers frames for one transport."""

    def __init__(
        self, transport: asyncio.Transport, high_water_bytes: int, turn: WriteTurn
    ) -> None:
        self._transport = transport
        self._turn = turn
        self._high_water_bytes = high_water_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._scheduled = False
        self._resumed = Signal()
        self.paused = False
        self._has_ended = False
        """The end was written: nothing may follow it."""
        # Above this asyncio calls `pause_writing`, below a quarter of it `resume_writing`.
        transport.set_write_buffer_limits(high=high_water_bytes)

    def write(self, frame: bytes) -> None:
        self._pieces.append(frame)
        self._size += len(frame)
        # Once per turn of the loop (invariant 2): receipts of many producers leave in one segment.
        if not self._scheduled:
            self._scheduled = True
            self._turn.add(self)

    def write_all(self, pieces: list[bytes]) -> None:
        """Many frames, in pieces that follow one another."""
        self._pieces += pieces
        self._size += sum(map(len, pieces))
        if not self._scheduled:
            self._scheduled = True
            self._turn.add(self)

    def flush(self) -> None:
        """Hand everything gathered to the transport now."""
        self._scheduled = False
        if not self._pieces:
            return
        pieces, size = self._pieces, self._size
        self._pieces, self._size = [], 0
        # Invariant 3. What was gathered is lost, as it would be in the kernel.
        if self._has_ended or self._transport.is_closing():
            return
        # One frame as it is; many small ones in one copy; large ones piece by piece, without a
        # copy.
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif size <= _JOIN_BYTES_MAX:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._resumed.advance()

    @property
    def stall(self) -> Stall | None:
        """What waits for the peer while writing is paused; None: it is not."""
        if not self.paused:
            return None
        # Both halves of the queue: ours, and what the transport could not send yet.
        return Stall(self._resumed.version, self._size + self._transport.get_write_buffer_size())

    async def writable(self) -> None:
        """Wait until the peer has taken enough of what was written."""
        if self._size >= self._high_water_bytes:
            self.flush()  # much was gathered in this turn: the transport must judge it first
        while self.paused:
            await self._resumed.past(self._resumed.version)

    def say_goodbye(self) -> None:
        """Write what was gathered, then the end; the peer closes when it has read them."""
        self.flush()
        if self._transport.is_closing():
            return
        # TLS cannot be half-closed.
        if self._transport.can_write_eof():
            self._has_ended = True
            self._transport.write_eof()
        else:
            self._transport.close()

    def close(self) -> None:
        """Write what was gathered, then close."""
        self.flush()
        self._transport.close()
