"""The client: where an application begins.

Owns: `Client`, which makes producers and consumers, and closes whatever of them is still open.

Invariants:
1. Nothing is connected before something is asked for.
2. After `close` there is no connection and no task of the client left, and everything that it made
   raises `AlreadyClosed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack, overload

from magnetar.client.connection.connection import Connect
from magnetar.client.connection.metrics import ClientMetrics
from magnetar.client.connection.pool import Connections
from magnetar.client.connection.settings import (
    Auth,
    ClientSettings,
    NoAuth,
    ServiceUrl,
    TlsSettings,
    TokenAuth,
)
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.consumer_factory import ConsumerFactory
from magnetar.client.encryption.encryptor import EncryptionFailure
from magnetar.client.encryption.keys import KeyReader
from magnetar.client.message.interceptors import Interceptor
from magnetar.client.message.options import check_schema
from magnetar.client.message.routing import Routing
from magnetar.client.opening import Closable, opens
from magnetar.client.produce.producer import Producer
from magnetar.client.produce.producer_core import ProducerCore
from magnetar.client.produce.semaphore import WeightedSemaphore
from magnetar.client.produce.settings import AccessMode, ProducerSettings
from magnetar.client.ranges.ranges import Ranges
from magnetar.client.schema import BYTES, Schema, SchemaInfo
from magnetar.client.transaction_factory import TransactionFactory
from magnetar.errors import AlreadyClosed, NotAllowed
from magnetar.model.names import Domain, TopicName
from magnetar.runtime.clock import Clock
from magnetar.wire.compression import Compression

Value = TypeVar("Value")

# Twelve digits: names of clients of one topic hardly ever meet.
_NAME_BITS: Final = 48


# As a TypedDict, editors and mypy know each option at the call; a wrong one is found there.
class ProducerOptions(TypedDict, total=False):
    """The options of `Client.producer`; `ProducerSettings` says what each means."""

    access_mode: AccessMode
    send_timeout: float
    max_pending: int
    batching: bool
    batch_messages: int
    batch_bytes: int
    batch_delay: float
    batch_by_key: bool
    compression: Compression
    chunking: bool
    initial_sequence_id: int | None
    properties: Mapping[str, str]
    routing: Routing
    encryption_keys: Sequence[str]
    key_reader: KeyReader | None
    on_encryption_failure: EncryptionFailure


class Client(ConsumerFactory, TransactionFactory):
    """A client of one service.

    async with Client("pulsar://localhost:6650") as client:
        async with client.producer("orders") as producer:
            await producer.send(b"hello")
        async with client.consumer("orders", "billing") as consumer:
            await consumer.ack(await consumer.receive())
    """

    def __init__(
        self,
        service_url: str,
        *,
        auth: Auth | str | None = None,
        tls: TlsSettings | None = None,
        operation_timeout: float = 30.0,
        connect_timeout: float = 10.0,
        refused_timeout: float = 3.0,
        keepalive: float = 30.0,
        connections_per_broker: int = 1,
        memory_limit: int = 64 * 1024 * 1024,
        listener_name: str | None = None,
        interceptors: Sequence[Interceptor] = (),
        connect: Connect | None = None,
        chance: Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`auth` may be a token. `connect`, `chance` and `clock` are for simulations."""
        super().__init__()
        # Checked here, all of it: a wrong address or limit raises before there is anything to
        # close.
        settings = ClientSettings(
            service_url=ServiceUrl.parse(service_url),
            auth=TokenAuth(auth) if isinstance(auth, str) else auth or NoAuth(),
            tls=tls or TlsSettings(),
            listener_name=listener_name,
            operation_timeout=operation_timeout,
            connect_timeout=connect_timeout,
            refused_timeout=refused_timeout,
            keepalive=keepalive,
            connections_per_broker=connections_per_broker,
            memory_limit=memory_limit,
            interceptors=interceptors,
        )
        self._connections = Connections(settings, connect=connect, chance=chance, clock=clock)
        # Shared by all producers, however many topics they send to.
        self._memory = WeightedSemaphore(memory_limit)
        # What it made and nobody has closed, in the order of making.
        self._open: dict[Closable, None] = {}
        self._closing: asyncio.Task[None] | None = None

    # Without a schema values are bytes, with one they are what it takes: two signatures for mypy.
    @overload
    @opens
    async def producer(
        self, topic: str, *, name: str | None = None, **options: Unpack[ProducerOptions]
    ) -> Producer[bytes]: ...

    @overload
    @opens
    async def producer(
        self,
        topic: str,
        *,
        schema: Schema[Value],
        name: str | None = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Value]: ...

    @opens
    async def producer(
        self,
        topic: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Any]:
        """A producer of a topic, which is created if it may be.

            producer = await client.producer(
                "topic://public/default/orders", compression=Compression.ZSTD
            )

        With a `name`, the broker drops what this name has sent before (where the topic drops
        duplicates, as scalable ones do): sequence ids go on from the last one it knows.
        """
        self._check_open()
        check_schema(schema)
        # A segment is sealed when its topic splits: only a producer of the topic follows.
        target = TopicName.parse(topic)
        if target.domain is Domain.SEGMENT:
            hint = f"use {target.scalable_topic()}"
            raise NotAllowed(f"{topic} is a segment: its topic decides what it takes", hint=hint)
        core = ProducerCore(
            self._connections,
            target,
            name=name or self._new_name(),
            schema=schema,
            settings=ProducerSettings(**options),
            memory=self._memory,
            is_named_by_application=name is not None,
            on_close=self._forget,
        )
        # Before it is open: a client that is closed meanwhile closes it too.
        self._keep(core)
        try:
            await core.open()
        except BaseException:
            self._forget(core)
            raise
        return Producer(core, schema)

    @property
    def metrics(self) -> ClientMetrics:
        """How much is sent and received, for Prometheus.

        prometheus_client.REGISTRY.register(client.metrics)
        """
        return self._connections.metrics

    async def ranges(self, topic: str, *, creation_id: str | None = None) -> Ranges:
        """A topic to be read by ranges, from position to position, without a subscription.

            ranges = await client.ranges("topic://public/default/orders")

        With the `creation_id` of a layout, `RangeLost` is raised if the topic is another one by
        now. Raises `NotAllowed` if the server has no ranges, as Apache Pulsar has not.
        """
        self._check_open()
        made = Ranges(self._connections, TopicName.parse(topic), creation_id=creation_id)
        # So that a topic that is not there, or a server without ranges, is told here and now.
        await made.layout()
        return made

    async def topic_schema(self, topic: str) -> SchemaInfo | None:
        """The latest schema in the registry for a topic; None: it has none."""
        self._check_open()
        # Asked of the broker, not of what producers and consumers here have registered.
        found = await self._connections.schema(str(TopicName.parse(topic)))
        return None if found is None else SchemaInfo.from_wire(found)

    async def close(self) -> None:
        """Close every producer and consumer, abort what is open, then close every connection."""
        # Whoever closes it second waits for the same end; one that is cancelled does not stop it.
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(
                self._close(), name="client close"
            )
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Whatever fails, what comes behind it is closed all the same; the failure is raised then.
        async with AsyncExitStack() as parts:
            # Pushed first, so done last: everything else says goodbye over the connections.
            parts.push_async_callback(self._connections.close)
            parts.push_async_callback(self._leave_coordinators)
            # Side by side: each may wait for its last receipts or acknowledgements.
            closed = await asyncio.gather(
                *(each.close() for each in list(self._open)), return_exceptions=True
            )
            for each in closed:
                if isinstance(each, BaseException):
                    raise each

    async def _producer_for(self, settings: ConsumerSettings, topic: str) -> Producer[bytes]:
        # A dead letter may be as large as the message was: whatever came can be put aside.
        letters = settings.dead_letter
        if letters is None or not letters.encryption_keys:
            return await self.producer(topic, chunking=True)
        return await self.producer(
            topic,
            chunking=True,
            encryption_keys=letters.encryption_keys,
            key_reader=settings.key_reader,
        )

    def _keep(self, made: Closable) -> None:
        self._open[made] = None

    def _forget(self, closed: Closable) -> None:
        self._open.pop(closed, None)

    def _new_name(self) -> str:
        return f"magnetar-{self._connections.chance.getrandbits(_NAME_BITS):012x}"

    def _check_open(self) -> None:
        if self._closing is not None:
            raise AlreadyClosed("the client is closed")

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def connections_of(client: Client) -> Connections:
    """The connections of a client, for what is no part of it and speaks the protocol: Spark."""
    return client._connections
