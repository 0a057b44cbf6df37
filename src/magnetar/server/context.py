"""What the sessions of one server share.

Owns: `Context`: the broker below, the settings, who is connected, and the tasks by which sessions
end (they outlive their connections).

Invariants:
1. `sessions` holds every session from its connection until it has left all its topics.
2. No more than `connections_max` sessions are admitted at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, KeysView
from typing import TYPE_CHECKING, Any

from magnetar.broker.schemas import Schemas
from magnetar.broker.topics import Topics
from magnetar.runtime.clock import Clock
from magnetar.runtime.logs import logger
from magnetar.runtime.metrics import CONNECTIONS, CONNECTIONS_OPENED
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.inflow import Inflow, WriteQueue

if TYPE_CHECKING:
    from magnetar.server.session import Session

_log = logger(__name__)


class Context:
    """One per server."""

    def __init__(
        self,
        config: ServerConfig,
        topics: Topics,
        schemas: Schemas,
        clock: Clock,
        authority: Authority,
        service_url: str,
        queue: WriteQueue,
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.topics = topics
        self.schemas = schemas
        self.clock = clock
        self.authority = authority
        self._sessions: dict[Session, None] = {}
        self.service_url = service_url
        """What lookups answer."""
        self.inflow = Inflow(queue, config.limits, self._judge_publishers)
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> KeysView[Session]:
        """Oldest first."""
        return self._sessions.keys()

    def admit(self, session: Session) -> bool:
        """Take a new connection in, unless there are too many."""
        full = len(self.sessions) >= self.limits.connections_max
        self._sessions[session] = None  # an unwelcome one too, until it has ended
        CONNECTIONS_OPENED.inc()
        CONNECTIONS.set(len(self.sessions))
        return not full

    def _judge_publishers(self) -> None:
        for session in self.sessions:
            if session.producers:
                session.judge_reading()

    def end(self, session: Session, work: Coroutine[Any, Any, None]) -> None:
        """Run the end of a session, whatever becomes of its connection."""
        task = asyncio.create_task(work, name=f"end of {session.address}")
        self._endings.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session-end-failed", error, session=task.get_name())

    def forget(self, session: Session) -> None:
        """A session has left all its topics."""
        self._sessions.pop(session, None)
        CONNECTIONS.set(len(self.sessions))

    async def all_ended(self) -> None:
        """Wait until no session is left."""
        while self.sessions:
            await next(iter(self.sessions)).ended.wait()
