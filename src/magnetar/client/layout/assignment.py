"""Membership in a group of consumers of a scalable topic: which segments are this member's.

Owns: `AssignmentSession` (commands 73, 74, 75 and 82).

Invariants:
1. `assignment` never goes back: one of a lower layout epoch is dropped. One of an equal epoch is
   normal (a segment was drained, a member came). The answer to 73 counts in the order in which it
   arrived among the updates, of which some may come before it.
2. `changes` advances with every assignment taken. It is closed if the member is refused for good
   before it ever had one.
3. A session that lost its connection is opened again under the same name: the broker keeps the
   place of a member for a while.
4. A member that leaves is gone at once. Pulsar 5.0.0-M1 has no command for that, and cuts the
   connection on which it hears the one of Magnetar: there a member has a connection of its own,
   whose end is all that tells the broker, and its place is free after the broker's grace time.

Relies on: a `LayoutWatch` of the same topic, which says where the groups are managed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from magnetar.client.connection.connection import CONSUMER, BrokerConnection
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import may_open
from magnetar.client.layout.watch import LayoutWatch
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Command, Received
from magnetar.wire.pb import pulsar_pb2 as pb

_LOG: Final = logger(__name__)


class AssignmentSession(Service):
    """One member of a group."""

    def __init__(
        self,
        connections: Connections,
        watch: LayoutWatch,
        *,
        subscription: str,
        consumer_name: str,
        kind: pb.ScalableConsumerType,
    ) -> None:
        timeout_s = connections.settings.operation_timeout
        super().__init__(f"member {consumer_name} of {subscription}", stop_seconds=timeout_s)
        self.assignment: pb.ScalableConsumerAssignment | None = None
        self.changes = Signal()
        self._connections = connections
        self._watch = watch
        self._subscription = subscription
        self._consumer_name = consumer_name
        self._kind = kind
        self._failure: MagnetarError | None = None
        # The connection and number under which the broker knows this member, while it does.
        self._open: tuple[BrokerConnection, int] | None = None
        self._connection_end = Signal()

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")

    async def first(self) -> pb.ScalableConsumerAssignment:
        """The assignment, as soon as there is one; raises why there is none."""
        timeout_s = self._connections.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout_s):
                await self.changes.past(0)
        except TimeoutError as error:
            # The reason of the last try says more than that it took too long.
            if self._failure is not None:
                raise self._failure from None
            text = f"{self.name}: no assignment came within {timeout_s} s"
            raise DeadlineExceeded(text) from error
        assert self.assignment is not None, "the first change is the first assignment"
        return self.assignment

    async def leave(self) -> None:
        """Give the place up now; without a connection the broker does so after a while."""
        if self._open is not None:
            connection, number = self._open
            # Invariant 4: Pulsar 5.0.0-M1 cuts a connection on which it hears this command.
            if connection.is_magnetar:
                await connection.request("SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=number)

    async def _follow(self) -> None:
        backoff = self._connections.backoff()
        while True:
            known = self.changes.version
            try:
                await self._serve()
            except MagnetarError as error:
                self._failure = error
                # Refused before it ever had a place: a name, a permission, a type. Once it had one,
                # everything is tried again.
                if self.assignment is None and not may_open(error, was_open=False):
                    self.changes.close(error)
                    return
                _LOG.info("assignment-ended", member=self.name, reason=str(error))
            # It worked for a while, so the next trouble is a new one.
            if self.changes.version > known:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _serve(self) -> None:
        """Be a member on one connection, until that is lost: raises why."""
        await self._watch.first()
        connection = await self._connections.at(self._watch.controller_url)
        if connection.is_magnetar:
            await self._serve_on(connection)
            return
        # With other brokers the end of the connection is the only way to leave.
        own = await self._connections.apart(connection.address)
        try:
            await self._serve_on(own)
        finally:
            own.abort()
            await own.closed.past(0)

    async def _serve_on(self, connection: BrokerConnection) -> None:
        number = connection.register(CONSUMER, self)
        # Before the request: the connection may be lost while it waits.
        ended = self._connection_end = Signal()
        try:
            await connection.request(
                "SCALABLE_TOPIC_SUBSCRIBE",
                on_answer=self._answered,
                topic=str(self._watch.topic),
                subscription=self._subscription,
                consumer_name=self._consumer_name,
                consumer_id=number,
                consumer_type=self._kind,
            )
            self._open = (connection, number)
            await ended.past(0)
        finally:
            self._open = None
            connection.unregister(CONSUMER, number)

    def _answered(self, body: pb.CommandScalableTopicSubscribeResponse) -> bool:
        # Called in the order of arrival: an update may come before the answer, and must not be
        # overwritten by it (invariant 1).
        self._adopt(body.assignment)
        return True

    def _adopt(self, assignment: pb.ScalableConsumerAssignment) -> None:
        before = self.assignment
        if before is None or assignment.layout_epoch >= before.layout_epoch:
            self.assignment = assignment
            self.changes.advance()

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        self._adopt(body.assignment)

    def lost(self, error: MagnetarError) -> None:
        self._connection_end.close(error)
