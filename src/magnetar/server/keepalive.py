"""Whether the peer of a connection still lives.

Owns: the deadline of the handshake, the regular PING, and the check of a peer that stands in
another one's way (a producer's name, an exclusive subscription).

Invariants:
1. A connection whose handshake is not done within `connection_handshake_seconds` is closed.
2. A peer that has sent nothing since the PING of one interval ago is closed. Anything it sends
   counts, not only PONG.
3. A connection that is not read (back-pressure) is not judged: what its peer sent is unread.
4. A check of a peer ends within `connection_liveness_seconds`, however many ask for it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.signal import Signal


class Peer(Protocol):
    """What is needed of a session."""

    heard: Signal
    """Advances when bytes come in."""

    @property
    def is_connected(self) -> bool:
        """Is the handshake done?"""
        ...

    @property
    def is_read(self) -> bool: ...

    @property
    def is_closing(self) -> bool: ...

    def ping(self) -> None: ...

    def abandon(self, reason: str) -> None:
        """Close without waiting for what is unsent."""
        ...


async def keep_alive(peer: Peer, clock: Clock, limits: Limits) -> None:
    """Close the connection when its peer is silent; runs until then, or until cancelled."""
    await clock.sleep(limits.connection_handshake_seconds)
    if not peer.is_connected:
        peer.abandon("no handshake in time")
        return
    while not peer.is_closing:
        asked_at = peer.heard.version
        peer.ping()
        await clock.sleep(limits.connection_keepalive_seconds)
        if peer.heard.version == asked_at and peer.is_read:
            peer.abandon("no answer to a ping")


async def is_alive(peer: Peer, limits: Limits) -> bool:
    """Ask the peer now; closes the connection and says False if it stays silent."""
    if peer.is_closing:
        return False
    if not peer.is_read:
        return True
    asked_at = peer.heard.version
    peer.ping()
    try:
        async with asyncio.timeout(limits.connection_liveness_seconds):
            await peer.heard.past(asked_at)
    except TimeoutError:
        if not peer.is_read:
            return True
        peer.abandon("no answer when asked for another client's sake")
        return False
    return not peer.is_closing
