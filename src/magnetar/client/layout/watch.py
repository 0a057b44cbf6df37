"""The segments of a topic, followed over lost connections.

Owns: `LayoutWatch` (commands 70, 71 and 72). The partitions of a regular topic are segments too:
brokers with scalable topics say so themselves; of others, and of topics that are not persistent,
the number of partitions is asked.

Invariants:
1. `layout` never goes back: an update of a lower epoch is dropped, one of an equal epoch is taken
   (a regular topic and what it is migrated to both have epoch 0).
2. `changes` advances with every new layout. It is closed if there never can be one (the topic does
   not exist, or the client may not see it), and when the watch is stopped.
3. A watch that lost its connection, or was ended by its broker, is opened again after a pause.
4. Partitions that are added to a regular topic are noticed within `PARTITIONS_S`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from magnetar.client.connection.connection import LAYOUT_WATCH, BrokerConnection
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.server_errors import may_open, refusal
from magnetar.client.message.layouts import is_regular, layout_from
from magnetar.errors import AlreadyClosed, DeadlineExceeded, MagnetarError, NotAllowed
from magnetar.model.names import Domain, TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.runtime.signal import Signal
from magnetar.wire.messages import Command, Received

# As often as the Java client looks (autoUpdatePartitionsInterval).
PARTITIONS_S: Final = 60.0
"""Between two looks at the number of partitions."""

_LOG: Final = logger(__name__)


class LayoutWatch(Service):
    """Follows the layout of one topic."""

    def __init__(
        self, connections: Connections, topic: TopicName, *, create_if_missing: bool = True
    ) -> None:
        timeout_s = connections.settings.operation_timeout
        super().__init__(f"layout of {topic}", stop_seconds=timeout_s)
        self.topic = topic
        self.layout: SegmentLayout | None = None
        self.controller_url: str | None = None
        """Where groups of consumers are managed; None: at any broker."""
        self.changes = Signal()
        self._connections = connections
        self._create = create_if_missing
        # The topic that a regular one was migrated to, and the open watch, if there is one.
        self._resolved: TopicName | None = None
        self._session: _Session | None = None
        self._failure: MagnetarError | None = None

    async def _start(self) -> None:
        self.spawn(self._follow(), "follow")
        # Layouts of scalable topics are pushed; a partition by itself has none to add.
        if not self.topic.domain.is_scalable and self.topic.partition is None:
            self.spawn(self._count_partitions(), "partitions")

    async def _stop(self) -> None:
        self.changes.close(AlreadyClosed(f"{self.name} is not followed any more"))
        if self._session is not None:
            self._session.end()

    async def first(self) -> SegmentLayout:
        """The layout, as soon as there is one; raises why there is none."""
        timeout_s = self._connections.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout_s):
                await self.changes.past(0)
        except TimeoutError as error:
            if self._failure is not None:
                raise self._failure from None
            text = f"the layout of {self.topic} did not come within {timeout_s} s"
            raise DeadlineExceeded(text) from error
        assert self.layout is not None, "the first change is the first layout"
        return self.layout

    def topic_of(self, segment: Segment) -> str:
        """The topic that holds the messages of a segment."""
        if segment.legacy_topic_name is not None:
            return segment.legacy_topic_name
        topic = self._resolved or self.topic.scalable_topic()
        return str(topic.segment(segment.descriptor))

    # --- following

    async def _follow(self) -> None:
        # One partition by name: a topic of its own, whatever its siblings do.
        if self.topic.partition is not None:
            self._adopt(SegmentLayout.of_regular([str(self.topic)]))
            return
        backoff = self._connections.backoff()
        while True:
            known = self.changes.version
            try:
                service = await self._connections.service()
                has_layouts = service.features.supports_scalable_topics
                # Brokers of version 4, and topics that are not persistent: one question, and
                # `_count_partitions` asks again.
                if not has_layouts or self.topic.domain is Domain.NON_PERSISTENT:
                    await self._ask_older(service)
                    return
                await self._serve()
            except MagnetarError as error:
                self._failure = error
                # Invariant 2: closed for good only if there never was a layout.
                if self.layout is None and not may_open(error, was_open=False):
                    self.changes.close(error)
                    return
                _LOG.info("layout-watch-ended", topic=str(self.topic), reason=str(error))
            if self.changes.version > known:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    async def _serve(self) -> None:
        """Watch on one connection, until the watch ends: raises why."""
        connection = await self._connections.lookup(str(self.topic))
        self._session = _Session(self, connection)
        try:
            await self._session.run(self._connections.settings.operation_timeout)
        finally:
            self._session = None

    async def _ask_older(self, broker: BrokerConnection) -> None:
        """The layout from a broker that knows regular topics only."""
        if self.topic.domain.is_scalable:
            raise NotAllowed(f"{broker.address} has no scalable topics: {self.topic}")
        count = await self._connections.partitions(str(self.topic), create=self._create)
        self._adopt(SegmentLayout.of_regular(self._partitions(count)))

    async def _count_partitions(self) -> None:
        """Brokers tell nobody of new partitions: ask now and then."""
        while True:
            await asyncio.sleep(PARTITIONS_S)
            known = self.layout
            if known is None:
                continue
            if not is_regular(known):
                return  # it was migrated
            try:
                count = await self._connections.partitions(str(self.topic), create=False)
            except MagnetarError as error:
                _LOG.info("partitions-not-counted", topic=str(self.topic), reason=str(error))
                continue
            # Looked at again after the await: a migration may have replaced it meanwhile.
            if self.layout is known and len(known.active) < count:
                self._adopt(SegmentLayout.of_regular(self._partitions(count)))

    def _partitions(self, count: int) -> list[str]:
        if count == 0:
            return [str(self.topic)]
        return [str(self.topic.with_partition(number)) for number in range(count)]

    # --- the session's side

    def ask(self, connection: BrokerConnection, session_id: int) -> None:
        """Open the watch on a connection."""
        connection.tell(
            "SCALABLE_TOPIC_LOOKUP",
            session_id=session_id,
            topic=str(self.topic),
            create_if_missing=self._create,
        )

    def update(self, body: Any) -> None:
        layout = layout_from(body.dag)
        # Invariant 1: another broker may lag behind the one that was watched before.
        if self.layout is not None and layout.epoch < self.layout.epoch:
            return
        plain, tls = body.dag.controller_broker_url, body.dag.controller_broker_url_tls
        self.controller_url = self._connections.url_of(plain, tls)
        if body.resolved_topic_name:
            self._resolved = TopicName.parse(body.resolved_topic_name)
        self._adopt(layout)

    def _adopt(self, layout: SegmentLayout) -> None:
        # A watch that is opened again is told what it knows; its users need not hear of that.
        if layout != self.layout:
            self.layout = layout
            self.changes.advance()


class _Session:
    """A watch on one connection."""

    def __init__(self, watch: LayoutWatch, connection: BrokerConnection) -> None:
        self._watch = watch
        self._connection = connection
        self._updates = Signal()
        self._number: int | None = None

    async def run(self, timeout_s: float) -> None:
        """Until the connection is lost or the broker ends the session: raises why."""
        self._number = self._connection.register(LAYOUT_WATCH, self)
        try:
            self._watch.ask(self._connection, self._number)
            # Only the first layout has a deadline: afterwards silence means that nothing changes.
            async with asyncio.timeout(timeout_s):
                await self._updates.past(0)
            version = self._updates.version
            while True:
                version = await self._updates.past(version)
        except TimeoutError as error:
            raise DeadlineExceeded("the layout did not come") from error
        finally:
            self.end()

    def end(self) -> None:
        """Tell the broker that nobody listens any more."""
        if self._number is not None:
            # Ended once, by whoever comes first: the loss, the stop, or the end of `run`.
            number, self._number = self._number, None
            self._connection.unregister(LAYOUT_WATCH, number)
            if self._connection.is_open:
                self._connection.tell("SCALABLE_TOPIC_CLOSE", session_id=number)

    # --- the connection's side

    def take(self, command: Command) -> None:
        assert isinstance(command, Received)
        body: Any = command.body
        if body.HasField("error"):
            self.lost(refusal("the layout", body.error, body.message))
        else:
            self._watch.update(body)
            self._updates.advance()

    def lost(self, error: MagnetarError) -> None:
        self._updates.close(error)
