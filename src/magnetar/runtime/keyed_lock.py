"""`KeyedLock`: one lock for each key, made when it is asked for and forgotten when nobody uses it.

Owns: `KeyedLock`. Whoever holds the lock of a key is alone with it; others get it in the order in
which they came. Of keys that nobody waits for nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class _Lock:
    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0


class KeyedLock(Generic[Key]):
    """A lock per key, for instance per topic of one broker."""

    def __init__(self) -> None:
        self._locks: dict[Key, _Lock] = {}

    def __len__(self) -> int:
        """How many keys somebody uses or waits for."""
        return len(self._locks)

    @asynccontextmanager
    async def of(self, key: Key) -> AsyncIterator[None]:
        """The lock of a key, held for the length of the `async with` block."""
        entry = self._locks.setdefault(key, _Lock())
        # Counted before the wait: who waits must find the lock that is held, not make another.
        entry.users += 1
        try:
            async with entry.lock:
                yield
        finally:
            entry.users -= 1
            # The last one out forgets it, or a key that comes once would be kept for ever.
            if not entry.users:
                del self._locks[key]
