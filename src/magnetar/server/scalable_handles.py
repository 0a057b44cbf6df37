"""The handles of a connection beyond topics: watches, and its places in consumer groups.

Owns: `ScalableHandles`, one per session; `OpenWatch`, a watch from the command that asks for it to
its end; `OpenPoll`, a request that may wait long; `MemberHandle`, one consumer that has segments
assigned to it.

Invariants:
1. A handle is registered before anything is awaited for it: a close that overtakes the answer finds
   it, and nothing is sent for it afterwards.
2. Each kind has ids of its own, chosen by the client for this connection.
3. When the connection is gone every consumer is detached, never removed: it keeps its segments for
   the grace period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from magnetar.errors import MagnetarError
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import SCALABLE_CONSUMERS, SCALABLE_WATCHES
from magnetar.scalable.groups.sessions import ConsumerSession

if TYPE_CHECKING:
    from magnetar.server.session import Session

_log: Final = logger(__name__)


class OpenWatch:
    """A watch that is being opened, or followed by a loop."""

    def __init__(self, kind: str) -> None:
        # Looked at after each await of the request that opens it (invariant 1).
        self.is_closed = False
        self._kind = kind
        self._loop: asyncio.Task[None] | None = None
        SCALABLE_WATCHES.labels(kind).inc()

    def follow(self, session: Session, work: Coroutine[Any, Any, None]) -> None:
        """The client has its first answer: tell it what changes."""
        self._loop = session.spawn(work, f"watch of {self._kind}")

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            SCALABLE_WATCHES.labels(self._kind).dec()
            if self._loop is not None:
                self._loop.cancel()


class OpenPoll(OpenWatch):
    """A request that waits for news; closed, it is answered no more."""

    def __init__(self, request_id: int) -> None:
        super().__init__("ranges")
        self.request_id = request_id

    def answered(self) -> None:
        """End a poll that its own loop has answered."""
        # Not cancelled: the loop itself is calling, and would end before it has cleaned up.
        self._loop = None
        self.close()


class MemberHandle:
    """One consumer id of a connection that was registered with a scalable topic."""

    def __init__(self, key: tuple[str, ...]) -> None:
        self.key = key
        """Which consumer it is: topic, kind, group, name."""
        self.opening = asyncio.Event()
        """Set once the attempt to attach it is over, well or not."""
        self.member: ConsumerSession | None = None
        self._loop: asyncio.Task[None] | None = None

    def open(self, member: ConsumerSession, loop: asyncio.Task[None]) -> None:
        self.member = member
        self._loop = loop
        SCALABLE_CONSUMERS.inc()

    async def detach(self) -> None:
        """Detach it: its connection is lost, or another consumer id took its place."""
        # A SUBSCRIBE that is under way would attach it after it was detached.
        await self.opening.wait()
        member = self.member
        # Before the await: nothing is pushed to a connection that is gone, or to the former
        # consumer id.
        self._end()
        if member is not None:
            await member.detach()

    async def leave(self) -> None:
        """Leave the group for good: others may have its segments at once."""
        await self.opening.wait()
        if self.member is not None:
            await self.member.leave()  # it stays registered if that fails
        self._end()

    def _end(self) -> None:
        if self.member is not None:
            self.member = None
            SCALABLE_CONSUMERS.dec()
        if self._loop is not None:
            self._loop.cancel()


class ScalableHandles:
    """All watches and group members of one connection."""

    def __init__(self) -> None:
        self.layouts: dict[int, OpenWatch] = {}
        """By session id."""
        self.topics: dict[int, OpenWatch] = {}
        """By watch id."""
        self.coordinators: dict[int, OpenWatch] = {}
        """Of who coordinates transactions; by watch id."""
        self.polls: dict[int, OpenPoll] = {}
        """For news of ranges; by poll id."""
        self.members: dict[int, MemberHandle] = {}
        """By consumer id."""
        self._attached = 0

    def __len__(self) -> int:
        watches = len(self.layouts) + len(self.topics) + len(self.coordinators) + len(self.polls)
        return watches + len(self.members)

    def connection_name(self, session: Session) -> str:
        """A name for one attachment, like no other of this broker."""
        # Addresses are used again by later connections, and ids within one: together they are
        # unique.
        self._attached += 1
        return f"{session.address} {session.connected_at_ms} {self._attached}"

    def close_watches(self) -> None:
        # Closed one by one: each counts in a metric.
        for watches in (self.layouts, self.topics, self.coordinators):
            for watch in watches.values():
                watch.close()
            watches.clear()
        for poll in self.polls.values():
            poll.close()
        self.polls.clear()

    async def detach(self) -> None:
        """The connection is gone, and no request of it runs any more."""
        self.close_watches()  # a request that was under way may have opened one
        members, self.members = self.members, {}
        for handle in members.values():
            try:
                await handle.detach()
            # The others must be detached all the same; this one's grace period ends by itself.
            except MagnetarError as error:
                _log.error("detaching-failed", error, consumer=" ".join(handle.key))
