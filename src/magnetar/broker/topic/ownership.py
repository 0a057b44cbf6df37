"""Which broker serves a topic: the seam between one broker alone and several that share topics.

Owns: `Ownership`, what `Topics` asks of it, and `SoleOwner`, for a broker that is alone.

Invariants:
1. A topic is loaded only between `claim` and `release`.
2. Two brokers that both believe to have a topic do no harm: the managed ledger lets only the later
   one write. Ownership says where clients should go.
"""

from __future__ import annotations

from typing import Protocol

from magnetar.model.names import TopicName


class Ownership(Protocol):
    """Says who serves which topic."""

    async def claim(self, name: TopicName) -> None:
        """This broker serves the topic from now on; again: no change.

        ServiceNotReady, with the owner's URL in its text, if another broker does.
        """
        ...

    async def owner_url(self, name: TopicName) -> str | None:
        """Where clients find the broker that serves a topic; None: none does yet."""
        ...

    async def release(self, name: TopicName) -> None:
        """This broker has unloaded the topic; one that it does not have is ignored."""
        ...


class SoleOwner:
    """The only broker there is: it serves every topic."""

    def __init__(self, url: str = "") -> None:
        self._url = url

    async def claim(self, name: TopicName) -> None:
        """Nobody else could."""

    async def owner_url(self, name: TopicName) -> str | None:
        return self._url

    async def release(self, name: TopicName) -> None:
        """Nobody else could take it."""
