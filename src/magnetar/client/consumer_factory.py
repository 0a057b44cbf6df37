"""The part of a client that makes consumers.

Owns: `ConsumerFactory`, the part of the client that has one method for each kind of consumer, and
the options that they take.

Invariant: what cannot work is refused before anything is connected: a wrong name, type or option.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, overload

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.checkpoint import FROM_LATEST, CheckpointConsumer
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.core.checkpoint_core import CheckpointCore
from magnetar.client.consume.core.consumer_core import ConsumerCore
from magnetar.client.consume.core.queue_core import QueueCore
from magnetar.client.consume.core.reader_core import ReaderCore
from magnetar.client.consume.core.regular_core import RegularTopicsCore, TopicPattern
from magnetar.client.consume.core.stream_core import StreamCore
from magnetar.client.consume.queue import QueueConsumer
from magnetar.client.consume.reader import Reader
from magnetar.client.consume.segment.nacks import RedeliveryDelay
from magnetar.client.consume.segment.settings import ConsumerSettings, DeadLetterPolicy
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.encryption.decryptor import DecryptionFailure
from magnetar.client.encryption.keys import KeyReader
from magnetar.client.message.message import Checkpoint, MessageId
from magnetar.client.message.options import check_member
from magnetar.client.opening import Closable, opens
from magnetar.client.produce.producer import Producer
from magnetar.client.schema import BYTES, Schema
from magnetar.errors import InvalidSetting, NotAllowed
from magnetar.model.ids import LATEST
from magnetar.model.names import Domain, NamespaceName, TopicName
from magnetar.model.subscriptions import (
    InitialPosition,
    KeySharedPolicy,
    SubscriptionType,
    check_subscription_name,
)

T = TypeVar("T")


# Each kind of consumer takes what means something to it, and nothing else: what only reads has
# nothing to settle, what settles in order has no redelivery of single messages.
class ReadingOptions(TypedDict, total=False):
    """Options of every consumer; `ConsumerSettings` says what each means."""

    queue_size: int
    queue_bytes: int
    properties: Mapping[str, str]
    chunked_messages_max: int
    chunk_timeout: float
    key_reader: KeyReader | None
    on_decryption_failure: DecryptionFailure


class CheckpointOptions(ReadingOptions, total=False):
    """Options of consumers that go on from a checkpoint."""

    fail_on_data_loss: bool


class SubscribingOptions(ReadingOptions, total=False):
    """Options of consumers with a subscription."""

    initial_position: InitialPosition
    unacked_max: int
    subscription_properties: Mapping[str, str]
    release_timeout: float


class QueueOptions(SubscribingOptions, total=False):
    """Options of consumers that settle each message on its own."""

    nack_delay: RedeliveryDelay
    processing_timeout: float
    processing_delay: RedeliveryDelay | None
    dead_letter: DeadLetterPolicy | None
    retries: bool
    priority_level: int


class ConsumerOptions(QueueOptions, total=False):
    """Options of consumers of regular topics."""

    read_compacted: bool


class ReaderOptions(ReadingOptions, total=False):
    """Options of readers of regular topics."""

    read_compacted: bool


class ConsumerFactory(ABC):
    """The consumers of a client."""

    _connections: Connections

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `AlreadyClosed` if the client was told to close."""

    @abstractmethod
    def _new_name(self) -> str:
        """A name for something that the application did not name."""

    @abstractmethod
    def _keep(self, made: Closable) -> None:
        """Close it with the client, unless it is closed before."""

    @abstractmethod
    def _forget(self, closed: Closable) -> None:
        """Close it no more: it is closed."""

    @abstractmethod
    async def _producer_for(self, settings: ConsumerSettings, topic: str) -> Producer[bytes]:
        """A producer for the letters of a consumer."""

    # Each method has two signatures: without a schema values are bytes, with one they are what it
    # makes. The third definition is what runs.
    # --- scalable topics

    @overload
    @opens
    async def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[bytes]: ...

    @overload
    @opens
    async def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        schema: Schema[T],
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[T]: ...

    @opens
    async def queue_consumer(
        self,
        topic: str | Sequence[str],
        subscription: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[QueueOptions],
    ) -> QueueConsumer[Any]:
        """A consumer that shares the messages of a topic, or of several, with others.

        consumer = await client.queue_consumer("topic://public/default/jobs", "workers")
        """
        self._check_open()
        check_subscription_name(subscription)
        settings = ConsumerSettings(**options)
        core = await self._opened(
            QueueCore(
                self._connections,
                # Regular topics as well: their partitions are consumed as segments.
                _topics(topic),
                subscription=subscription,
                schema=schema,
                settings=settings,
                name=name or self._new_name(),
                make_producer=partial(self._producer_for, settings),
            )
        )
        return QueueConsumer(core)

    @overload
    @opens
    async def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[bytes]: ...

    @overload
    @opens
    async def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[T],
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[T]: ...

    @opens
    async def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        schema: Schema[Any] = BYTES,
        name: str | None = None,
        **options: Unpack[SubscribingOptions],
    ) -> StreamConsumer[Any]:
        """A consumer that gets the messages of each key in order, and shares keys with others.

            consumer = await client.stream_consumer("topic://public/default/orders", "billing")

        Under the same `name` it gets the same segments again if it comes back soon.
        """
        self._check_open()
        check_subscription_name(subscription)
        core = await self._opened(
            StreamCore(
                self._connections,
                # One topic: an id says how far every segment of it was received, and of no other.
                _no_segment(TopicName.parse(topic)),
                subscription=subscription,
                schema=schema,
                settings=ConsumerSettings(**options),
                name=name or self._new_name(),
            )
        )
        return StreamConsumer(core)

    @overload
    @opens
    async def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Checkpoint = FROM_LATEST,
        group: str | None = None,
        name: str | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[bytes]: ...

    @overload
    @opens
    async def checkpoint_consumer(
        self,
        topic: str,
        *,
        schema: Schema[T],
        start: Checkpoint = FROM_LATEST,
        group: str | None = None,
        name: str | None = None,
        **options: Unpack[CheckpointOptions],
    ) -> CheckpointConsumer[T]: ...

    @opens
    async def checkpoint_consumer(
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

        consumer = await client.checkpoint_consumer(topic, start=Checkpoint.from_bytes(stored))

        Raises `DataLost` if retention took messages that the checkpoint had not read. With
        `fail_on_data_loss=False` it warns, and goes on behind the gap.
        """
        self._check_open()
        # A group is a subscription to its controller, and named like one.
        if group is not None:
            check_subscription_name(group)
        core = await self._opened(
            CheckpointCore(
                self._connections,
                _no_segment(TopicName.parse(topic)),
                start=start,
                group=group,
                schema=schema,
                settings=ConsumerSettings(**options),
                name=name or self._new_name(),
            )
        )
        return CheckpointConsumer(core)

    # --- regular topics

    @overload
    @opens
    async def consumer(
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
    @opens
    async def consumer(
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

    @opens
    async def consumer(
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

        consumer = await client.consumer("orders", "billing")
        consumer = await client.consumer(None, "audit", pattern="persistent://public/default/o.*")
        """
        self._check_open()
        check_subscription_name(subscription)
        # What cannot work, before anything is connected: no topic or two ways to name them, a
        # policy without its type, retries where messages are in order.
        if (topic is None) is (pattern is None):
            raise InvalidSetting("a consumer takes either topics or a pattern")
        check_member("subscription_type", subscription_type, SubscriptionType)
        if key_shared is not None and subscription_type is not SubscriptionType.KEY_SHARED:
            raise InvalidSetting("only a Key_Shared subscription has a key-shared policy")
        if options.get("retries") and subscription_type.takes_cumulative_acks:
            raise InvalidSetting(f"a {subscription_type.name} subscription has no retries")
        # A wrong expression raises here too.
        settings = ConsumerSettings(**options)
        found = None if pattern is None else TopicPattern(NamespaceName.parse(namespace), pattern)
        core = await self._opened(
            RegularTopicsCore(
                self._connections,
                # With a pattern the topics are found when it opens, and again every minute.
                () if topic is None else [_regular(each) for each in _names(topic)],
                subscription=subscription,
                subscription_type=subscription_type,
                key_shared=key_shared,
                pattern=found,
                schema=schema,
                settings=settings,
                name=name or self._new_name(),
                make_producer=partial(self._producer_for, settings),
            )
        )
        return Consumer(core)

    @overload
    @opens
    async def reader(
        self,
        topic: str,
        *,
        start: MessageId = LATEST,
        inclusive: bool = False,
        name: str | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Reader[bytes]: ...

    @overload
    @opens
    async def reader(
        self,
        topic: str,
        *,
        schema: Schema[T],
        start: MessageId = LATEST,
        inclusive: bool = False,
        name: str | None = None,
        **options: Unpack[ReaderOptions],
    ) -> Reader[T]: ...

    @opens
    async def reader(
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

        reader = await client.reader("orders", start=EARLIEST)
        """
        self._check_open()
        core = await self._opened(
            ReaderCore(
                self._connections,
                # Of the settings, those of a subscription have no meaning here, and cannot be
                # given.
                _regular(topic),
                start=start,
                inclusive=inclusive,
                schema=schema,
                settings=ConsumerSettings(**options),
                name=name or self._new_name(),
            )
        )
        return Reader(core)

    async def _opened(self, core: Core) -> Core:
        # Before it is open: a client that is closed meanwhile closes it too.
        self._keep(core)
        core.on_close = lambda: self._forget(core)
        await core.open()  # closes it if it fails
        return core


Core = TypeVar("Core", bound=ConsumerCore[Any])


def _names(topic: str | Sequence[str]) -> list[str]:
    # A text is a sequence too, of its letters: it must not be taken for several topics.
    names = [topic] if isinstance(topic, str) else list(topic)
    if not names:
        raise InvalidSetting("a consumer takes at least one topic")
    return names


def _topics(topic: str | Sequence[str]) -> list[TopicName]:
    return [_no_segment(TopicName.parse(each)) for each in _names(topic)]


def _no_segment(topic: TopicName) -> TopicName:
    if topic.domain is Domain.SEGMENT:
        # Read on its own, a segment would end with the next split.
        hint = f"use {topic.scalable_topic()}"
        raise NotAllowed(f"{topic} is a segment: its topic decides who reads it", hint=hint)
    return topic


def _regular(topic: str) -> TopicName:
    name = _no_segment(TopicName.parse(topic))
    # Pulsar's v4 protocol does not know the order of segments: keys would come out of order.
    if name.domain is Domain.TOPIC:
        raise NotAllowed(
            f"{name} is a scalable topic",
            hint="use a queue_consumer, stream_consumer or checkpoint_consumer",
        )
    return name
