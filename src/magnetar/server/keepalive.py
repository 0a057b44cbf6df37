"""The keepalive of a connection: finding out whether its peer still lives.

Owns: the deadline of the handshake, the regular PING, and the check of a peer that stands in
another one's way (a producer's name, an exclusive subscription).

Invariants:
1. A connection whose handshake is not done within `connection_handshake_seconds` is closed.
2. A peer that has sent nothing since the PING of one interval ago is closed. Anything it sends
   counts, not only PONG.
3. A connection that is not read (back-pressure) is not judged by what it sent: that is unread. It
   is closed if it is not read because its peer takes nothing, and has taken nothing for one
   interval: nobody knows of it whether it lives. Its own PINGs are unread, too: it is sent one
   twice in an interval, so that it hears something in each of its own, whenever those begin.
4. A frame that is being read, and has no end within `connection_frame_seconds`, closes its
   connection at the next PING: single bytes now and then do not keep it.
5. A check of a peer ends within `connection_liveness_seconds`, however many ask for it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal
from magnetar.server.outbound import Stall


class Peer(Protocol):
    """The part of a session that the keepalive needs."""

    heard: Signal
    """Advances when bytes come in."""
    frame_since: float | None
    """Since when the end of a frame is waited for, not counting while the peer is not read."""

    @property
    def is_connected(self) -> bool:
        """Is the handshake done?"""
        ...

    @property
    def is_read(self) -> bool: ...

    @property
    def stall(self) -> Stall | None:
        """What waits for the peer to take it, while that keeps the session from writing."""
        ...

    @property
    def is_closing(self) -> bool: ...

    def ping(self) -> None: ...

    def abandon(self, reason: str) -> None:
        """Close without waiting for what is unsent."""
        ...


async def keep_alive(peer: Peer, clock: Clock, limits: Limits) -> None:
    """Close the connection when its peer is silent; runs until then, or until cancelled."""
    # Before the first PING: a peer that never says CONNECT holds a place among the connections.
    await clock.sleep(limits.connection_handshake_seconds)
    if not peer.is_connected:
        peer.abandon("no handshake in time")
        return
    while not peer.is_closing:
        # Before the PING: an answer that comes at once must count.
        asked_at = peer.heard.version
        peer.ping()
        before = peer.stall
        await clock.sleep(limits.connection_keepalive_seconds / 2)
        if not peer.is_read and not peer.is_closing:
            peer.ping()
        await clock.sleep(limits.connection_keepalive_seconds / 2)
        # Invariant 3: while it is not read, its silence is of our making.
        if peer.heard.version == asked_at and peer.is_read:
            peer.abandon("no answer to a ping")
        # Two looks, one interval apart: the same pause, and no byte taken in between.
        elif before is not None and _is_no_better(before, peer.stall):
            peer.abandon("it takes nothing of what is written to it")
        elif peer.is_read and _is_late(peer.frame_since, clock, limits):
            peer.abandon("the end of a frame did not come in time")


def _is_no_better(before: Stall, now: Stall | None) -> bool:
    return now is not None and now.pause == before.pause and now.unsent >= before.unsent


def _is_late(since: float | None, clock: Clock, limits: Limits) -> bool:
    return since is not None and clock.monotonic() - since >= limits.connection_frame_seconds


async def is_alive(peer: Peer, limits: Limits) -> bool:
    """Ask the peer now; closes the connection and says False if it stays silent."""
    if peer.is_closing:
        return False
    # Held back by its own load: it is busy, not dead.
    if not peer.is_read:
        return True
    asked_at = peer.heard.version
    peer.ping()
    try:
        async with asyncio.timeout(limits.connection_liveness_seconds):
            await peer.heard.past(asked_at)
    except TimeoutError:
        # Back-pressure began while it was asked.
        if not peer.is_read:
            return True
        peer.abandon("no answer when asked for another client's sake")
        return False
    return not peer.is_closing
