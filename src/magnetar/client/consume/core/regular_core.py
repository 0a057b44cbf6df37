"""The inside of a consumer of regular topics: subscription types, patterns, termination.

Owns: `RegularTopicsCore`, for one topic (partitioned or not), for several, or for all whose name
matches a pattern; `TopicPattern`. `Consumer`, which applications have, stands on it.

Invariants:
1. Every partition of every topic is consumed; partitions and topics that come later too.
2. Once every topic was terminated and all of its messages are acknowledged, a receive raises
   `TopicTerminated`, and an iteration ends.
3. Cumulative acknowledgements are only for types that deliver in order, and cover one partition.
4. A pattern is looked for again every `PATTERN_S`. A topic that is gone is let go, and is not
   created again by its consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import re2

from magnetar.client.connection.pool import Connections
from magnetar.client.consume.core.dead_letter import MakeProducer
from magnetar.client.consume.core.queue_core import QueueCore
from magnetar.client.consume.core.segments import SegmentKey
from magnetar.client.consume.segment.ack_outbox import AckTransaction
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged
from magnetar.client.consume.segment.queue_segment import QueueSegment
from magnetar.client.consume.segment.segment_consumer import SegmentConsumer, SegmentSpec
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.message.message import AnyMessageId, Message
from magnetar.client.message.message_ids import id_from, plain_id
from magnetar.client.schema.info import Schema
from magnetar.errors import (
    InvalidSetting,
    MagnetarError,
    NotAllowed,
    TopicNotFound,
    TopicTerminated,
)
from magnetar.model.ids import MessageId
from magnetar.model.names import NamespaceName, TopicName
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy, SubscriptionType
from magnetar.runtime.logs import logger

T = TypeVar("T")

# As Pulsar's clients look (patternAutoDiscoveryPeriod).
PATTERN_S: Final = 60.0

_ASKED_CHARACTERS_MAX: Final = 50
"""Brokers refuse longer patterns, or ignore them."""

_LOG: Final = logger(__name__)
# RE2, as brokers have it: a pattern of the application cannot take exponential time.
_QUIET: Final = re2.Options()
_QUIET.log_errors = False


class TopicPattern:
    """Topics of a namespace whose full name matches a regular expression."""

    def __init__(self, namespace: NamespaceName, pattern: str) -> None:
        self.namespace = namespace
        self.pattern = pattern
        try:
            self._compiled = re2.compile(_without_domain(pattern), _QUIET)
        except re2.error as error:
            raise InvalidSetting(f"{pattern!r} is not a regular expression: {error}") from error

    async def topics(self, connections: Connections) -> set[TopicName]:
        """The topics that match now; a partitioned one counts once."""
        is_short = len(self.pattern) <= _ASKED_CHARACTERS_MAX
        answer = await connections.topics(
            str(self.namespace), pattern=self.pattern if is_short else None
        )
        found = {TopicName.parse(each).without_partition() for each in answer.topics}
        # Brokers may ignore a pattern: older ones, and those that are told to.
        return found if answer.filtered else {each for each in found if self._matches(each)}

    def _matches(self, topic: TopicName) -> bool:
        return self._compiled.fullmatch(_without_domain(str(topic))) is not None


class RegularTopicsCore(QueueCore[T]):
    """One consumer of regular topics, over all their partitions."""

    def __init__(
        self,
        connections: Connections,
        topics: Iterable[TopicName],
        *,
        subscription: str,
        subscription_type: SubscriptionType,
        key_shared: KeySharedPolicy | None,
        pattern: TopicPattern | None,
        schema: Schema[T],
        settings: ConsumerSettings,
        name: str,
        make_producer: MakeProducer,
    ) -> None:
        super().__init__(
            connections,
            topics,
            subscription=subscription,
            schema=schema,
            settings=settings,
            name=name,
            make_producer=make_producer,
            # A pattern names topics that exist; a name that a consumer asks for may be created.
            create_if_missing=pattern is None,
        )
        self.subscription_type = subscription_type
        self._key_shared = key_shared
        self._pattern = pattern
        # Asked when the queue is empty: terminated topics end the iteration of an application.
        self.receive_queue.end = self._end

    # --- settling

    def _end(self) -> MagnetarError | None:
        """Every topic was terminated, and everything of it is acknowledged."""
        present = self._segments.present.values()
        # With a pattern there may be another topic tomorrow.
        if not present or self._pattern is not None:
            return None
        if not all(each.end_is_final for each in present):
            return None
        return TopicTerminated(f"{', '.join(self.topics)}: there will be no more messages")

    def ack_cumulative(
        self, message: Message[Any] | AnyMessageId, txn: AckTransaction | None
    ) -> Acknowledged:
        """Acknowledge everything that was received of a topic or partition, up to a message."""
        self.check_open()
        if not self.subscription_type.takes_cumulative_acks:
            raise NotAllowed(
                f"a {self.subscription_type.name} subscription has no order to acknowledge up to",
                hint="acknowledge each message with ack",
            )
        segment, message_id = self._segment_and_id(message)
        if segment is None:
            return NOTHING_TO_DO
        # A message from before a seek, or before an abort brought everything back: in a transaction
        # it would have two results, which is an error; without one there is nothing to do.
        if isinstance(message, Message) and txn is not None:
            segment.refuse_stale(message)
        elif isinstance(message, Message) and message._generation != segment.generation:
            return NOTHING_TO_DO
        segment.acknowledging(message, is_cumulative=True)
        if txn is not None:
            return segment.ack_through_in(txn, message_id)
        return segment.ack_through(message_id)

    async def unsubscribe(self, *, force: bool = False) -> None:
        """Delete the subscription, with everything that it has not acknowledged, and close."""
        self.check_open()
        for segment in list(self._segments.present.values()):
            await segment.ask_again("UNSUBSCRIBE", force=force)
        await self.close()

    async def last_message_ids(self) -> dict[str, MessageId]:
        """The last message of each topic or partition, acknowledged or not."""
        self.check_open()
        found = {}
        for segment in list(self._segments.present.values()):
            answer = await segment.ask_again("GET_LAST_MESSAGE_ID")
            found[segment.topic] = plain_id(id_from(answer.last_message_id))
        return found

    # --- its parts

    async def _open(self) -> None:
        if self._pattern is not None:
            for topic in sorted(await self._pattern.topics(self._connections), key=str):
                try:
                    await self._add_topic(topic, are_new=False)
                except TopicNotFound:
                    continue  # it was deleted meanwhile
            self._segments.spawn(self._look_again(self._pattern), "pattern")
        await super()._open()

    async def _look_again(self, pattern: TopicPattern) -> None:
        while True:
            await asyncio.sleep(PATTERN_S)
            try:
                found = await pattern.topics(self._connections)
                # The retry topic need not match: it is this consumer's own.
                kept = {str(topic) for topic in (*found, self._retry_topic)}
                for gone in set(self._watches) - kept:
                    await self._remove_topic(gone)
            except MagnetarError as error:
                _LOG.info("pattern-not-looked-for", pattern=pattern.pattern, reason=str(error))
                continue
            # One that was deleted and is found may have been created again.
            self._gone.clear()
            self._segments.stirred.advance()
            # In the order of their names: a run with the same chance is the same run.
            for topic in sorted(found, key=str):
                if str(topic) not in self._watches:
                    await self._try_topic(topic)

    async def _try_topic(self, topic: TopicName) -> None:
        """Consume a topic that was found; if it cannot be, the next look tries again."""
        try:
            await self._add_topic(topic, are_new=True)
        except MagnetarError as error:
            _LOG.info("topic-not-added", topic=str(topic), reason=str(error))

    def tolerates(self, segment: SegmentConsumer, error: MagnetarError) -> bool:
        """Whether it goes on without a topic: one that was found, not asked for, may be deleted."""
        # Invariant 4.
        is_deleted = isinstance(error, TopicNotFound) and self._pattern is not None
        return is_deleted or super().tolerates(segment, error)

    def _subscribe_fields(self) -> Mapping[str, Any]:
        fields: dict[str, Any] = {"subType": int(self.subscription_type)}
        if self.subscription_type is SubscriptionType.KEY_SHARED:
            fields["keySharedMeta"] = _key_shared_meta(self._key_shared or KeySharedPolicy())
        return fields

    def make(self, key: SegmentKey, spec: SegmentSpec) -> SegmentConsumer:
        return QueueSegment(
            self,
            spec,
            dead_letters=self._dead_letters,
            takes_redelivery_ids=not self.subscription_type.takes_cumulative_acks,
        )


def _without_domain(text: str) -> str:
    """Patterns are matched without it, as brokers do."""
    return text.partition("://")[2] if "://" in text else text


def _key_shared_meta(policy: KeySharedPolicy) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "keySharedMode": int(policy.mode),
        "allowOutOfOrderDelivery": policy.out_of_order,
    }
    if policy.mode is KeySharedMode.STICKY:
        meta["hashRanges"] = [{"start": each.start, "end": each.end} for each in policy.ranges]
    return meta
