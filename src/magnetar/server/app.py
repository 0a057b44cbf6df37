"""A server put together: storage, broker, listener, admin interface; its start and its end.

Owns: `Server`, the composition root.

Invariants:
1. A connection is accepted only when storage is recovered and the broker answers. The ports of
   clients and of the admin interface are both taken before: one that is busy ends the start.
2. Stopping, in this order: no new connections; nothing more is read; every send that was read gets
   its receipt; topics are closed, with their cursors written; connections end; storage is closed.
   All of it within `close_seconds`; what is late is cut off, which loses nothing acknowledged.
3. Storage that failed (a sync that did not succeed) ends the server: it must be restarted, and
   recovers from what is durable.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec

from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.policy.configuration import BrokerConfiguration
from magnetar.broker.policy.namespaces import Cluster, Namespaces
from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.publish.producers import ProducerNames
from magnetar.broker.topic.legacy_txn_ends import LegacyTxnEnds
from magnetar.broker.topic.ownership import SharedOwnership, SoleOwner
from magnetar.broker.topic.topic import TopicParts
from magnetar.broker.topic.topics import Topics
from magnetar.errors import NotAllowed
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING, Retention
from magnetar.metadata.api import MetadataStore
from magnetar.runtime.descriptors import descriptors_max, fitted
from magnetar.runtime.logs import logger
from magnetar.runtime.service import Service
from magnetar.scalable.layout.layout_watchers import LayoutWatchers
from magnetar.scalable.service import ScalableTopics
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.context import Context
from magnetar.server.handlers.table import HANDLERS
from magnetar.server.machine import Listener, Machine, ServerStorage
from magnetar.server.repairs import Repairs
from magnetar.server.replies import unasked_error
from magnetar.server.session import Session
from magnetar.txn.api import Transactions
from magnetar.txn.coordinator.coordinators import Coordinators
from magnetar.txn.coordinator_partitions import CoordinatorPartitions
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.txn.open_transactions import OpenTransactions
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.store import TxnStore

if TYPE_CHECKING:
    from aiohttp import web

CreateAdmin: TypeAlias = "Callable[[Server], web.Application]"

_log = logger(__name__)

# A failed storage confirms nothing any more: to see it a second later loses nothing.
_STORAGE_CHECK_SECONDS: Final = 1.0
_GOODBYE_SECONDS: Final = 2.0
"""What a peer has to take the last bytes, and to close, when the server stops."""


class Server(Service):
    """One broker process on one data folder."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        create_admin: CreateAdmin | None = None,
        machine: Machine | None = None,
    ) -> None:
        super().__init__("server", stop_seconds=config.limits.close_seconds)
        # Connections must not take the descriptors that the storage needs.
        limits = fitted(config.limits, descriptors_max())
        self.config = config = replace(config, limits=limits)
        self.machine = machine or Machine()
        self.clock = self.machine.clock
        self.folder = Path(config.data).absolute()
        # There once started; the admin interface and the commands reach everything through them.
        self.storage: ServerStorage
        self.metadata: MetadataStore
        self.namespaces: Namespaces
        self.schemas: Schemas
        self.topics: Topics
        self.outcomes: Outcomes
        self.coordinators: Coordinators
        self.context: Context
        self.service_url = ""
        self.admin_url: str | None = None
        """None: it has no admin interface."""
        self._create_admin = create_admin
        # As far as a start has come: a stop undoes what is there, also after a start that failed.
        self._listener: Listener | None = None
        self._admin: web.AppRunner | None = None
        self._admin_listener: Listener | None = None
        self._storage: ServerStorage | None = None
        self._sharing: SharedOwnership | None = None
        self._scalable: ScalableTopics | None = None
        self._services: list[Service | None] = []
        """In the order in which they rely on each other."""

    # --- start

    async def _start(self) -> None:
        config = self.config
        if self._create_admin is not None:
            await self.bind_admin()
        self.storage = await self.machine.open_storage(self.folder, config.limits)
        self._storage = self.storage
        self.metadata = self.storage.connect()
        self.configuration = BrokerConfiguration(self.metadata, config.policies)
        await self.configuration.load()
        policies = self.configuration.defaults.as_policies(config.limits)
        self.namespaces = Namespaces(self.metadata, config.cluster, policies)
        self.schemas = Schemas(self.metadata, self.clock)
        # Bound first: only the socket knows which port 0 became, and the address goes into records.
        # It accepts nothing yet (invariant 1).
        self._listener = await self.machine.listen(self._new_session, config.host, config.port)
        self.service_url = f"pulsar://{_in_url(self._advertised_host())}:{self._listener.port}"
        self._assemble()
        await self.namespaces.open(Cluster(broker_service_url=self.service_url))
        # Each relies on those before it: topics ask for outcomes, coordinators
        # end transactions on topics.
        await self.outcomes.start()
        await self.topics.start()
        await self.coordinators.start()
        if self._sharing is not None:
            # From now on other brokers send clients here.
            await self._sharing.start()
            self.spawn(self._let_lost_topics_go(self._sharing), "lost topics")
        if self._scalable is not None:
            await self._scalable.start()
        self.spawn(self._watch_storage(self.storage), "watch of the storage")
        self.spawn(self.context.publish_throttle.reopen_when_drained(), "inflow")
        # Last but for the admin interface, which clients need not wait for.
        await self._listener.start()
        _log.info("server-ready", url=self.service_url, data=self.folder)
        if self._create_admin is not None:
            await self.start_admin(self._create_admin)

    def _assemble(self) -> None:
        """All parts above the storage; nothing runs yet."""
        # From the bottom: what is made here gets only parts that were made above it.
        self._sharing = self.machine.share_topics(self.metadata, self.service_url)
        store, partitions = TxnStore(self.metadata), self._partitions()
        limits = self.config.limits
        self.outcomes = Outcomes(
            store,
            self.clock,
            coordinates=partitions.coordinates,
            # Looked up when it is called: the coordinators are made below, and of these outcomes.
            legacy=lambda: self.coordinators.legacy,
            participants_max=limits.txn_participants_max,
        )
        # The embedded storage has one journal for pins and entries, so that their order
        # is enough ('pin before entry').
        shares_journal = self.storage.shares_journal
        parts = self._topic_parts(Transactions(store, self.outcomes, shares_journal, limits))
        self.topics = Topics(parts, self.namespaces)
        self.coordinators = self._coordinators(store, partitions)
        is_scalable = self.config.scalable_topics_enabled
        self._scalable = self._scalable_topics() if is_scalable else None
        # Stopped from its end: who asks before who is asked.
        self._services = [self.outcomes, self.topics, self.coordinators, self._scalable]
        self.context = Context(
            self.config,
            self.topics,
            self.schemas,
            self.clock,
            Authority(),
            self.service_url,
            self.storage,
            self._scalable,
            owners=self._sharing,
            coordinators=self.coordinators,
        )

    def _topic_parts(self, transactions: Transactions) -> TopicParts:
        return TopicParts(
            metadata=self.metadata,
            ledgers=self.storage.ledgers,
            schemas=self.schemas,
            clock=self.clock,
            limits=self.config.limits,
            producer_names=ProducerNames(self.metadata, self.config.cluster),
            owner=urlsplit(self.service_url).netloc,
            ownership=self._sharing or SoleOwner(self.service_url),
            transactions=transactions,
            consistent_hashing=self.config.subscription_key_shared_use_consistent_hashing,
            publish_gate=self.storage.publish_gate,
            segment_retention=self._segment_retention(),
            delays=DelayRule(
                strict=self.config.is_delayed_delivery_deliver_at_time_strict,
                fixed_delay_entries=self.config.delayed_delivery_fixed_delay_detection_lookahead,
            ),
        )

    def _segment_retention(self) -> Retention:
        """What scalable topics keep by default: so long, and all of them together so much."""
        minutes = self.config.scalable_retention_minutes
        percent = self.config.scalable_retention_disk_percent
        # Neither makes sense without the other, as in the policy of a namespace.
        if not minutes or not percent:
            return KEEP_NOTHING
        total = self.machine.disk.space(self.folder).total
        # A file system that does not say how large it is sets no limit.
        return Retention(minutes * 60.0, total * percent // 100 if total else None)

    def _partitions(self) -> CoordinatorPartitions:
        return CoordinatorPartitions(
            self.metadata, broker=self._process(), url=self.service_url, limits=self.config.limits
        )

    def _coordinators(self, store: TxnStore, partitions: CoordinatorPartitions) -> Coordinators:
        limits = self.config.limits
        open_transactions = OpenTransactions(
            self.outcomes, per_owner_max=limits.txn_open_per_owner_max
        )
        legacy = LegacyCoordinators(
            partitions,
            open_transactions,
            LegacyTxnEnds(self.topics),
            store,
            self.storage.ledgers,
            clock=self.clock,
            limits=limits,
        )
        return Coordinators(
            store,
            partitions,
            open_transactions,
            legacy,
            clock=self.clock,
            limits=limits,
            repair=Repairs(self.topics),
        )

    def _process(self) -> str:
        """One process, not one address: what a former one held is lost."""
        return f"{urlsplit(self.service_url).netloc}-{self.clock.now_ms()}"

    def _scalable_topics(self) -> ScalableTopics:
        # One for both: sessions enter their watches, and segments tell by
        # them which clients follow.
        layout_watchers = LayoutWatchers()
        return ScalableTopics(
            self.topics,
            self.metadata,
            self.outcomes,
            clock=self.clock,
            limits=self.config.limits,
            broker=self._process(),
            url=self.service_url,
            auto_scale=self.config.scalable_auto_scale_enabled,
            retention=self._segment_retention(),
            host=self.machine.segments(self.topics, self._sharing, layout_watchers),
            layout_watchers=layout_watchers,
        )

    def _new_session(self) -> Session:
        return Session(self.context, HANDLERS)

    async def bind_admin(self) -> None:
        """Take the port of the admin interface; nothing is accepted there before `start_admin`."""
        if self._admin_listener is None:
            config = self.config
            self._admin_listener = await self.machine.listen(
                self._new_admin_connection, config.host, config.admin_port
            )

    def _new_admin_connection(self) -> asyncio.Protocol:
        server = None if self._admin is None else self._admin.server
        assert server is not None, "connections come only once it was started"
        if len(server.connections) >= self.config.limits.admin_connections_max:
            return _Refused()
        return _AdminDoor(server(), self.service_url)

    async def start_admin(self, create_admin: CreateAdmin) -> None:
        """Start the admin interface; clients are served before and meanwhile."""
        from aiohttp import web  # loading it takes as long as the rest of a start

        seconds = self.config.limits.admin_request_seconds
        self._admin = web.AppRunner(
            create_admin(self),
            access_log=None,
            handle_signals=False,
            # It runs from the opening of a connection too, whatever part of a request has come.
            keepalive_timeout=seconds,
            lingering_time=seconds,
        )
        await self._admin.setup()
        await self.bind_admin()
        assert self._admin_listener is not None, "it was just bound"
        await self._admin_listener.start()
        real_port = self._admin_listener.port
        self.admin_url = url = f"http://{_in_url(self._advertised_host())}:{real_port}"
        # Not before: the port is known only now, if a free one was asked for.
        await self.namespaces.clusters.change(
            self.config.cluster, lambda known: msgspec.structs.replace(known, service_url=url)
        )
        _log.info("admin-ready", url=url)

    def _advertised_host(self) -> str:
        # 0.0.0.0 is to listen on; no client can connect to it.
        host = self.config.advertised_host or self.config.host
        return socket.gethostname() if _is_any(host) else host

    async def _watch_storage(self, storage: ServerStorage) -> None:
        while storage.failure is None:
            await self.clock.sleep(_STORAGE_CHECK_SECONDS)
        # Invariant 3: a loop that ends with an error ends the server.
        if not self.stopping:  # which closes it
            raise storage.failure

    async def _let_lost_topics_go(self, sharing: SharedOwnership) -> None:
        """Unload all topics once this broker has lost its session: clients look them up again."""
        seen = 0
        while True:
            seen = await sharing.lost.past(seen)
            # Other brokers may have them by now; the managed ledgers fence
            # what is still written here.
            for name in list(self.topics.loaded):
                await self.topics.unload(name)

    # --- stop

    async def _stop(self) -> None:
        try:
            # Storage goes last, whatever failed before: until then all of that
            # still writes (invariant 2).
            await self._stop_serving()
        finally:
            if self._sharing is not None:
                await self._sharing.stop()
            if self._storage is not None:
                try:
                    await self.metadata.close()
                finally:
                    await self._storage.close()
        _log.info("server-stopped", data=self.folder)

    async def _stop_serving(self) -> None:
        if self._listener is not None:
            self._listener.close()
        # The operator's way in goes before the parts that it looks at.
        if self._admin_listener is not None:
            self._admin_listener.close()
        if self._admin is not None:
            await self._admin.cleanup()
        try:
            if self._listener is not None:
                # Sends that were read get their receipts while their topics are still open.
                await self._drain()
            async with AsyncExitStack() as stops:  # of all, though one fails; the last one first
                for service in self._services:
                    if service is not None:
                        stops.push_async_callback(service.stop)
        finally:
            if self._listener is not None:
                await self._end_sessions()
                await self._listener.wait_closed()

    async def _drain(self) -> None:
        """Give the receipts that are owed, as long as storage answers in time."""
        drains = [asyncio.create_task(session.drain()) for session in self.context.sessions]
        if not drains:
            return
        # Half of the time: the other half is for topics, whose cursors are to be written.
        _, late = await asyncio.wait(drains, timeout=self.config.limits.close_seconds / 2)
        for drain in late:
            drain.cancel()

    async def _end_sessions(self) -> None:
        """End the connections; one whose peer takes nothing, or does not close, is cut."""
        for session in list(self.context.sessions):
            session.say_goodbye()
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self.context.all_ended()
        except TimeoutError:
            for session in list(self.context.sessions):
                session.abandon("its peer does not close, and the server stops")
            await self.context.all_ended()


class _Refused(asyncio.Protocol):
    """One connection too many: closed without a word."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


class _AdminDoor(asyncio.Protocol):
    """The first bytes of a connection to the admin port: HTTP goes on, another protocol is told.

    A client of the binary protocol begins with the size of a frame, whose first byte is 0.
    """

    def __init__(self, http: asyncio.Protocol, service_url: str) -> None:
        self._http = http
        self._service_url = service_url
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Its clock runs from now on, whether or not a byte comes.
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None, "it was made"
        if data.startswith(b"\0"):
            peer = str(transport.get_extra_info("peername"))
            _log.info("binary-protocol-at-admin-port", address=peer)
            error = NotAllowed(
                "this is the port of the admin interface (HTTP)",
                hint=f"give the client {self._service_url}",
            )
            transport.write(unasked_error(error))
            transport.close()
        else:
            transport.set_protocol(self._http)
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)


def _is_any(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
