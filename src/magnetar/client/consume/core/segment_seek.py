"""Moving a subscription in segments that nobody consumes at the moment.

Owns: `SegmentSeek`, for one segment: it takes the segment for itself, and then moves it.

Invariants:
1. While it is occupied, no other consumer can get the segment; one that another has is refused.
2. It never takes a message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.client.connection.connection import CONSUMER, BrokerConnection
from magnetar.client.connection.pool import Connections, retrying
from magnetar.errors import ConsumerBusy, MagnetarError, NotAllowed
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.wire.messages import Command


class SegmentSeek:
    """One segment that is to be moved."""

    def __init__(
        self, connections: Connections, topic: str, subscription: str, consumer_name: str
    ) -> None:
        self._connections = connections
        self._topic = topic
        self._subscription = subscription
        self._consumer_name = consumer_name
        self._occupied: tuple[BrokerConnection, int] | None = None

    async def occupy(self) -> None:
        """Raises `NotAllowed` if somebody else consumes it."""
        try:
            await self._retrying("occupying", self._occupy)
        except ConsumerBusy as error:
            raise NotAllowed(
                f"{self._topic} is consumed by another member of {self._subscription}",
                hint="a group is moved by its only member",
            ) from error

    async def seek(self, fields: dict[str, Any]) -> None:
        """Move it; it is not occupied any more then."""

        async def attempt() -> None:
            # Occupied again if the connection was lost meanwhile: a seek needs a consumer.
            connection, number = self._occupied or await self._occupy()
            try:
                await connection.request("SEEK", consumer_id=number, **fields)
            finally:
                self.leave()

        await self._retrying("moving", attempt)

    def leave(self) -> None:
        """Let go of the segment; nobody waits for the answer."""
        if self._occupied is not None:
            connection, number = self._occupied
            self._occupied = None
            connection.unregister(CONSUMER, number)
            connection.tell_request("CLOSE_CONSUMER", consumer_id=number)

    async def _occupy(self) -> tuple[BrokerConnection, int]:
        connection = await self._connections.lookup(self._topic)
        number = connection.register(CONSUMER, self)
        self._occupied = (connection, number)
        try:
            await connection.request(
                "SUBSCRIBE",
                topic=self._topic,
                subscription=self._subscription,
                consumer_name=self._consumer_name,
                consumer_id=number,
                # Exclusive: refused while another member has it, and keeps others away (invariant
                # 1).
                subType=int(SubscriptionType.EXCLUSIVE),
                initialPosition=int(InitialPosition.LATEST),
                force_topic_creation=False,
            )
        except BaseException:
            self.leave()
            raise
        return connection, number

    async def _retrying(self, what: str, attempt: Callable[[], Awaitable[object]]) -> None:
        timeout_s = self._connections.settings.operation_timeout
        backoff = self._connections.backoff()
        await retrying(f"{what} {self._topic}", attempt, backoff, timeout_s)

    # --- the connection's side

    def take(self, command: Command) -> None:
        """Whatever is pushed: no message was asked for, and a seek ends it."""

    def lost(self, error: MagnetarError) -> None:
        self._occupied = None
