"""Blocking: `Client`, for threads.

Written by `make blocking` from `magnetar.client.client`; edit that.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar, Unpack, overload

from magnetar.client.blocking.checkpoint_consumer import CheckpointConsumer
from magnetar.client.blocking.consumer import Consumer
from magnetar.client.blocking.groups import TransactionGroup
from magnetar.client.blocking.handle import Root
from magnetar.client.blocking.producer import Producer
from magnetar.client.blocking.queue_consumer import QueueConsumer
from magnetar.client.blocking.ranges import Ranges
from magnetar.client.blocking.reader import Reader
from magnetar.client.blocking.stream_consumer import StreamConsumer
from magnetar.client.blocking.transactions import Transaction
from magnetar.client.client import Client as AsyncClient
from magnetar.client.client import ProducerOptions
from magnetar.client.connection.connection import Connect
from magnetar.client.connection.metrics import ClientMetrics
from magnetar.client.connection.settings import Auth, TlsSettings
from magnetar.client.consume.checkpoint import FROM_LATEST
from magnetar.client.consumer_factory import (
    CheckpointOptions,
    ConsumerOptions,
    QueueOptions,
    ReaderOptions,
    SubscribingOptions,
)
from magnetar.client.message.interceptors import Interceptor
from magnetar.client.message.message import Checkpoint, MessageId
from magnetar.client.schema import BYTES, Schema, SchemaInfo
from magnetar.client.transaction.group import GroupStatus, GroupTicket
from magnetar.model.ids import LATEST
from magnetar.model.subscriptions import KeySharedPolicy, SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.wire.messages import TxnId

T = TypeVar("T")
Value = TypeVar("Value")


class Client(Root[AsyncClient]):
    """A client of one service.

    with Client("pulsar://localhost:6650") as client:
        with client.producer("orders") as producer:
            producer.send(b"hello")
        with client.consumer("orders", "billing") as consumer:
            consumer.ack(consumer.receive()).wait()
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
        super().__init__(
            lambda: AsyncClient(
                service_url,
                auth=auth,
                tls=tls,
                operation_timeout=operation_timeout,
                connect_timeout=connect_timeout,
                refused_timeout=refused_timeout,
                keepalive=keepalive,
                connections_per_broker=connections_per_broker,
                memory_limit=memory_limit,
                listener_name=listener_name,
                interceptors=interceptors,
                connect=connect,
                chance=chance,
                clock=clock,
            )
        )

    @overload
    def producer(
        self, topic: str, *, name: str | None = None, **options: Unpack[ProducerOptions]
    ) -> Producer[bytes]: ...

    @overload
    def producer(
        self,
        topic: str,
        *,
        schema: Schema[Value],
        name: str | None = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Value]: ...

    def producer(
        self,
        topic: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[ProducerOptions],
    ) -> Producer[Any]:
        """A producer of a topic, which is created if it may be.

            producer = client.producer(
                "topic://public/default/orders", compression=Compression.ZSTD
            )

        With a `name`, the broker drops what this name has sent before (where the topic drops
        duplicates, as scalable ones do): sequence ids go on from the last one it knows.
        """
        return Producer(
            self._thread,
            self._wait(lambda: self._wrapped.producer(topic, schema=schema, name=name, **options)),
        )

    @property
    def metrics(self) -> ClientMetrics:
        """How much is sent and received, for Prometheus.

        prometheus_client.REGISTRY.register(client.metrics)
        """
        return self._call(lambda: self._wrapped.metrics)

    def ranges(self, topic: str, *, creation_id: str | None = None) -> Ranges:
        """A topic to be read by ranges, from position to position, without a subscription.

            ranges = client.ranges("topic://public/default/orders")

        With the `creation_id` of a layout, `RangeLost` is raised if the topic is another one by
        now. Raises `NotAllowed` if the server has no ranges, as Apache Pulsar has not.
        """
        return Ranges(
            self._thread, self._wait(lambda: self._wrapped.ranges(topic, creation_id=creation_id))
        )

    def topic_schema(self, topic: str) -> SchemaInfo | None:
        """The latest schema in the registry for a topic; None: it has none."""
        return self._wait(lambda: self._wrapped.topic_schema(topic))

    @overload
    def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[bytes]: ...

    @overload
    def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        schema: Schema[T],
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[T]: ...

    def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[Any]:
        """A consumer that shares the messages of a topic, or of several, with others.

        consumer = client.queue_consumer("topic://public/default/jobs", "workers")
        """
        return QueueConsumer(
            self._thread,
            self._wait(
                lambda: self._wrapped.queue_consumer(
                    topic, subscription, schema=schema, name=name, **options
                )
            ),
        )

    @overload
    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[bytes]: ...

    @overload
    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T],
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[T]: ...

    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[Any]:
        """A consumer that gets the messages of each key in order, and shares keys with others.

            consumer = client.stream_consumer("topic://public/default/orders", "billing")

        Under the same `name` it gets the same segments again if it comes back soon.
        """
        return StreamConsumer(
            self._thread,
            self._wait(
                lambda: self._wrapped.stream_consumer(
                    topic, subscription, schema=schema, name=name, **options
                )
            ),
        )

    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Checkpoint = FROM_LATEST,
        group: str | None = None,
        name: str | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[bytes]: ...

    @overload
    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[T],
        start: Checkpoint = FROM_LATEST,
        group: str | None = None,
        name: str | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[T]: ...

    def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[Any] = BYTES,
        start: Checkpoint = FROM_LATEST,
        group: str | None = None,
        name: str | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[Any]:
        """A consumer whose place the application keeps; in a `group`, the segments are shared.

        consumer = client.checkpoint_consumer(topic, start=Checkpoint.from_bytes(stored))

        Raises `DataLost` if retention took messages that the checkpoint had not read. With
        `fail_on_data_loss=False` it warns, and goes on behind the gap.
        """
        return CheckpointConsumer(
            self._thread,
            self._wait(
                lambda: self._wrapped.checkpoint_consumer(
                    topic, schema=schema, start=start, group=group, name=name, **options
                )
            ),
        )

    @overload
    def consumer(
        self,
        topic: str | Sequence[str] | None,
        subscription: str,
        *,
        subscription_type: SubscriptionType = SubscriptionType.EXCLUSIVE,
        key_shared: KeySharedPolicy | None = None,
        pattern: str | None = None,
        namespace: str = "public/default",
        name: str | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[bytes]: ...

    @overload
    def consumer(
        self,
        topic: str | Sequence[str] | None,
        subscription: str,
        *,
        schema: Schema[T],
        subscription_type: SubscriptionType = SubscriptionType.EXCLUSIVE,
        key_shared: KeySharedPolicy | None = None,
        pattern: str | None = None,
        namespace: str = "public/default",
        name: str | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[T]: ...

    def consumer(
        self,
        topic: str | Sequence[str] | None,
        subscription: str,
        *,
        schema: Schema[Any] = BYTES,
        subscription_type: SubscriptionType = SubscriptionType.EXCLUSIVE,
        key_shared: KeySharedPolicy | None = None,
        pattern: str | None = None,
        namespace: str = "public/default",
        name: str | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer[Any]:
        """A consumer of a regular topic, of several, or (without a topic) of those that match.

        consumer = client.consumer("orders", "billing")
        consumer = client.consumer(None, "audit", pattern="persistent://public/default/o.*")
        """
        return Consumer(
            self._thread,
            self._wait(
                lambda: self._wrapped.consumer(
                    topic,
                    subscription,
                    schema=schema,
                    subscription_type=subscription_type,
                    key_shared=key_shared,
                    pattern=pattern,
                    namespace=namespace,
                    name=name,
                    **options,
                )
            ),
        )

    @overload
    def reader(
        self,
        topic: str,
        *,
        start: MessageId = LATEST,
        inclusive: bool = False,
        name: str | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Reader[bytes]: ...

    @overload
    def reader(
        self,
        topic: str,
        *,
        schema: Schema[T],
        start: MessageId = LATEST,
        inclusive: bool = False,
        name: str | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Reader[T]: ...

    def reader(
        self,
        topic: str,
        *,
        schema: Schema[Any] = BYTES,
        start: MessageId = LATEST,
        inclusive: bool = False,
        name: str | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Reader[Any]:
        """A reader of a regular topic, from behind a message on (`inclusive`: from it on).

        reader = client.reader("orders", start=EARLIEST)
        """
        return Reader(
            self._thread,
            self._wait(
                lambda: self._wrapped.reader(
                    topic, schema=schema, start=start, inclusive=inclusive, name=name, **options
                )
            ),
        )

    def transaction(self, *, timeout: float = 60.0, scalable: bool | None = None) -> Transaction:
        """A transaction: of any number of topics, scalable and regular.

            with client.transaction(timeout=60) as txn:
                producer.send(b"result", txn=txn)
                consumer.ack(message, txn=txn)

            txn = client.transaction()    # and `commit` or `abort` later

        It is aborted if it is not committed within `timeout` seconds. `scalable=False` takes a
        coordinator of the older kind, whose transactions are for regular topics only: Apache
        Pulsar 5 needs that for those, Magnetar does not.
        """
        return Transaction(
            self._thread,
            self._wait(lambda: self._wrapped.transaction(timeout=timeout, scalable=scalable)),
        )

    def join_transaction(
        self,
        txn_id: TxnId,
        *,
        time_left: float = 60.0,
        scalable: bool | None = None,
        ends_here: bool = False,
    ) -> Transaction:
        """A transaction that another process has begun; `time_left` is in seconds.

            txn = client.join_transaction(txn_id, time_left=20)
            producer.send(b"a part", txn=txn)
            txn.prepare()    # its parts are durable: now the other process may be told

        Whoever ends it (`ends_here`) must know that all others have prepared. Raises nothing if
        there is no such transaction: its first send does.
        """
        return Transaction(
            self._thread,
            self._wait(
                lambda: self._wrapped.join_transaction(
                    txn_id, time_left=time_left, scalable=scalable, ends_here=ends_here
                )
            ),
        )

    def open_group(self, application: str, *, generation: str, run: str) -> TransactionGroup:
        """Open a group of transactions that are committed together, and end its earlier runs.

            group = client.open_group("nightly", generation="query-1", run="run-1")

        Opening the same run again is no mistake: it goes on. A `generation` is what survives a
        restart (a streaming query, say), a `run` is one start of it. Raises `NotAllowed` if the
        server has no groups, as Apache Pulsar has not, and `GroupFenced` if a later run or
        generation has been opened.
        """
        return TransactionGroup(
            self._thread,
            self._wait(
                lambda: self._wrapped.open_group(application, generation=generation, run=run)
            ),
        )

    def group(self, ticket: GroupTicket) -> TransactionGroup:
        """A group that another process has opened."""
        return TransactionGroup(self._thread, self._wait(lambda: self._wrapped.group(ticket)))

    def group_status(self, application: str) -> GroupStatus:
        """What the server knows of a group: its run, and what was committed last."""
        return self._wait(lambda: self._wrapped.group_status(application))
