"""Who may do something to a topic, one after the other.

Owns: `Turns`. Whoever is in his turn with a name is alone with it; in the order in which they came.
Of names that nobody waits for nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from magnetar.model.names import TopicName


class _Turn:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class Turns:
    """Of all topics of one broker."""

    def __init__(self) -> None:
        self._turns: dict[TopicName, _Turn] = {}

    def __len__(self) -> int:
        """How many names somebody uses or waits for."""
        return len(self._turns)

    @asynccontextmanager
    async def of(self, name: TopicName) -> AsyncIterator[None]:
        turn = self._turns.setdefault(name, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[name]
