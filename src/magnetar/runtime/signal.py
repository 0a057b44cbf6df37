"""A level-triggered signal: how a lower layer tells upper ones that something moved on.

Owns: `Signal`, a version that only grows. The owner advances it; anyone waits until it is past
the version that they have already dealt with.

Invariants:
1. `version` never decreases.
2. No lost wake-up: `past(n)` returns once `version > n`, whatever happened between the moment
   the caller learned `n` and the call.
3. A waiter that was cancelled leaves nothing behind.
4. After `close`, versions already reached are still reported; only a wait for more fails.

Relies on: one event loop. Threads hand their news over with `loop.call_soon_threadsafe`.
An advance costs one pass over the present waiters, and next to nothing without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping


class Signal:
    """A version that grows, and coroutines that wait for it."""

    __slots__ = ("__weakref__", "_error", "_version", "_waiters")

    def __init__(self, version: int = 0) -> None:
        self._version = version
        self._error: Exception | None = None
        # Each waiter with the version that it has seen: an advance wakes only those it is news for.
        self._waiters: dict[asyncio.Future[None], int] = {}

    @property
    def version(self) -> int:
        return self._version

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def waiters(self) -> int:
        """How many coroutines wait now."""
        return len(self._waiters)

    def advance(self) -> int:
        """Move on by one; the new version."""
        self._version += 1
        if self._waiters:
            self._wake()
        return self._version

    async def past(self, version: int) -> int:
        """Wait until the signal is past `version`; the version it is at then.

        Raises the error given to `close` if that version cannot be reached any more.
        """
        # Invariant 2: what happened before the call counts; no event between the two is missed.
        if self._version > version:
            return self._version
        if self._error is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = version
            try:
                await waiter
            finally:
                # Also when cancelled (invariant 3).
                self._waiters.pop(waiter, None)
        # Looked at again: an advance and a close may both have happened before we ran.
        if self._version <= version:
            assert self._error is not None, "woken neither by an advance nor by close"
            # One error object serves every waiter: a trace kept on it would grow with each.
            raise self._error.with_traceback(None)
        return self._version

    async def past_within(self, version: int, seconds: float) -> int:
        """Wait as `past` does, but so long at most: the version may still be the given one then."""
        try:
            async with asyncio.timeout(seconds):
                return await self.past(version)
        except TimeoutError:
            return self._version

    @staticmethod
    async def past_any(seen: Mapping[Signal, int]) -> None:
        """Wait until one of these signals is past its version, or closed."""
        if any(each.closed or each.version > version for each, version in seen.items()):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for each, version in seen.items():
            # One future in the list of each: whoever moves first resolves it.
            each._waiters[waiter] = version
        try:
            await waiter
        finally:
            for each in seen:
                each._waiters.pop(waiter, None)

    def close(self, error: Exception) -> None:
        """Fail every present and later wait for a version not reached; the first error stays."""
        if self._error is None:
            self._error = error
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _wake(self) -> None:
        for waiter, version in self._waiters.items():
            if version < self._version and not waiter.done():
                waiter.set_result(None)
