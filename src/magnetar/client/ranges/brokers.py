"""Asking the brokers that have the segments of a topic, wherever those are by now.

Owns: `RangeBrokers`: who has which segment, as last heard, and the repeating of a question at the
new owner.

Invariants:
1. A question is repeated, after a new lookup, as long as its trouble passes, within the operation
   timeout. So it must be one that can be repeated.
2. What is asked of several segments takes one request per broker that has some of them. One that
   has moved is asked for again alone.
3. A broker without ranges is refused before anything is asked of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from magnetar.client.connection.connection import BrokerConnection
from magnetar.client.connection.pool import Connections, retrying
from magnetar.client.connection.server_errors import is_passing, raise_refusal
from magnetar.errors import MagnetarError, NotAllowed, ServiceNotReady, TopicNotFound

Key = TypeVar("Key")
Answer = TypeVar("Answer")

AskMany = Callable[[BrokerConnection, list[Key]], Awaitable[Sequence[Any]]]
"""Asks one broker for several segments; the answers, in their order, each with its own error."""


class RangeBrokers:
    """The brokers of one topic."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # As last heard; an entry that is wrong costs one refused question.
        self._owners: dict[str, BrokerConnection] = {}

    async def any(self, what: str, ask: Callable[[BrokerConnection], Awaitable[Answer]]) -> Answer:
        """Ask any broker."""

        async def attempt() -> Answer:
            return await ask(_able(await self._connections.service()))

        return await self._retrying(what, attempt)

    async def one(
        self, topic: str, what: str, ask: Callable[[BrokerConnection], Awaitable[Answer]]
    ) -> Answer:
        """Ask the broker that has a segment."""

        async def attempt() -> Answer:
            owner = await self.owner(topic)
            try:
                return await ask(owner)
            except MagnetarError as error:
                # The broker may have lost the segment: look it up again before the next try.
                if is_passing(error):
                    self.forget(topic)
                raise

        return await self._retrying(what, attempt)

    async def many(self, what: str, topics: Mapping[Key, str], ask: AskMany[Key]) -> dict[Key, Any]:
        """Ask for several segments; those that are gone are left out."""
        # What is still to be asked, over all tries; `found` keeps what was answered (invariant 2).
        left = dict(topics)
        found: dict[Key, Any] = {}

        async def attempt() -> None:
            groups = await self.groups(left)
            # Errors as results: what the others answered is kept.
            results = await asyncio.gather(
                *(ask(owner, keys) for owner, keys in groups.items()), return_exceptions=True
            )
            failure: MagnetarError | None = None
            for keys, result in zip(groups.values(), results, strict=True):
                failure = self._taken(what, keys, result, left, found) or failure
            if failure is not None:
                raise failure

        await self._retrying(what, attempt)
        return found

    def _taken(
        self,
        what: str,
        keys: list[Key],
        result: Sequence[Any] | BaseException,
        left: dict[Key, str],
        found: dict[Key, Any],
    ) -> MagnetarError | None:
        """Keep what one broker answered; passing trouble is returned, other trouble raised."""
        # A whole broker failed: all that it was asked for is asked again elsewhere.
        if isinstance(result, BaseException):
            if not isinstance(result, MagnetarError) or not is_passing(result):
                raise result
            for key in keys:
                self.forget(left[key])
            return result
        # Without this, answers would be taken for those of other segments.
        if len(result) != len(keys):
            return ServiceNotReady(f"{what}: {len(result)} answers to {len(keys)} questions")
        failure: MagnetarError | None = None
        # Each segment has an error of its own: answered, gone, moved, or refused for good.
        for key, answer in zip(keys, result, strict=True):
            try:
                raise_refusal(what, answer)
                found[key] = answer
            except TopicNotFound:
                pass  # it is gone: left out
            except MagnetarError as error:
                if not is_passing(error):
                    raise
                failure = error
                self.forget(left[key])
                continue
            del left[key]
        return failure

    async def groups(self, topics: Mapping[Key, str]) -> dict[BrokerConnection, list[Key]]:
        """Which broker has which of these."""
        owners = await asyncio.gather(*(self.owner(topic) for topic in topics.values()))
        found: dict[BrokerConnection, list[Key]] = {}
        for key, owner in zip(topics, owners, strict=True):
            found.setdefault(owner, []).append(key)
        return found

    async def owner(self, topic: str) -> BrokerConnection:
        """The broker that has a segment, as last heard."""
        known = self._owners.get(topic)
        if known is not None and known.is_open:
            return known
        found = _able(await self._connections.lookup(topic))
        self._owners[topic] = found
        return found

    def forget(self, topic: str) -> None:
        """Forget who has a segment: it has moved, or nobody knows."""
        self._owners.pop(topic, None)

    async def _retrying(self, what: str, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        connections = self._connections
        timeout_s = connections.settings.operation_timeout
        return await retrying(what, attempt, connections.backoff(), timeout_s)


def _able(broker: BrokerConnection) -> BrokerConnection:
    if not broker.features.supports_ranges:
        raise NotAllowed(
            f"{broker.address} cannot read ranges of topics",
            hint="connect to a Magnetar server of this version; Apache Pulsar has no such command",
        )
    return broker
