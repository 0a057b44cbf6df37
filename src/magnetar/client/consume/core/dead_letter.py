"""Messages that fail again and again, put off or put aside in topics of their own.

Owns: `DeadLetters`, the dead letters of one consumer, and those that it is to retry later.

Invariants:
1. A message is acknowledged only after its copy is stored. If that fails it is given back, and
   comes again.
2. A message is put aside when it was delivered `max_redeliveries` times more than once: at its next
   delivery, or when the application gives it back for the last time.
3. One message at a time is put aside. Those that wait are within the limits of what is fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from magnetar.client.consume.segment.queue_segment import QueueSegment
from magnetar.client.consume.segment.settings import DeadLetterPolicy
from magnetar.client.message.message import Message
from magnetar.client.produce.producer import Producer
from magnetar.errors import MagnetarError, UnreadableMessage
from magnetar.model.ids import ScalableMessageId
from magnetar.model.names import TopicName
from magnetar.runtime.logs import logger
from magnetar.runtime.signal import Signal

# The names are those of Pulsar's clients, so that theirs understand these letters.
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_SUBSCRIPTION: Final = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
"""Properties of a dead letter: where it comes from."""

RETRIES: Final = "RECONSUMETIMES"
DELAY_MS: Final = "DELAY_TIME"
"""Properties of a message that was put off: how often, and how long the last time."""

# Before a message whose letter could not be stored is delivered again.
RETRY_S: Final = 5.0

_LOG: Final = logger(__name__)

MakeProducer = Callable[[str], Awaitable[Producer[bytes]]]


class DeadLetters:
    """Puts messages of one consumer aside. `run` is its work."""

    def __init__(
        self, policy: DeadLetterPolicy, subscription: str, make_producer: MakeProducer
    ) -> None:
        self.retry_topic: str | None = None
        """Where messages wait that are to be consumed again later; None: nowhere."""
        self._policy = policy
        self._subscription = subscription
        self._make_producer = make_producer
        self._producers: dict[str, Producer[bytes]] = {}
        self._waiting: deque[tuple[Message[Any], Callable[[], None]]] = deque()
        self._arrived = Signal()

    def wants(self, message: Message[Any], *, is_given_back: bool) -> bool:
        """Whether a message was delivered too often."""
        most = self._policy.max_redeliveries
        return (
            # Given back, it would be delivered once more: that delivery is counted already
            # (invariant 2).
            message.redelivery_count >= most if is_given_back else message.redelivery_count > most
        )

    def put(self, message: Message[Any], *, then: Callable[[], None]) -> None:
        """Store a message with the dead letters soon; `then` is called in any case."""
        self._waiting.append((message, then))
        self._arrived.advance()

    async def run(self) -> None:
        """Put messages aside as they come, one at a time."""
        version = 0
        while True:
            while self._waiting:
                message, then = self._waiting.popleft()
                try:
                    await self._put_aside(message)
                # Whatever became of it, its segment goes on: the permit is given back.
                finally:
                    then()
            version = await self._arrived.past(version)

    async def close(self) -> None:
        """Close the producers."""
        async with AsyncExitStack() as parts:
            for producer in self._producers.values():
                parts.push_async_callback(producer.close)

    async def _put_aside(self, message: Message[Any]) -> None:
        segment = message._source
        assert isinstance(segment, QueueSegment), "only they have dead letters"
        topic = self.topic_for(message)
        try:
            await self._store(message, topic, self._properties(message))
        except MagnetarError as error:
            _LOG.error("dead-letter-failed", error, topic=topic, message=str(message._raw_id))
            segment.give_back_later(message, RETRY_S)
            return
        # Only now (invariant 1).
        segment.ack(message._raw_id, message._chunk_ids)

    async def retry(
        self, message: Message[Any], delay_s: float, properties: Mapping[str, str]
    ) -> None:
        """Store a message where it is consumed again after a while, or with the dead letters."""
        times = _retries_of(message) + 1
        letter = {
            **self._properties(message),
            **properties,
            RETRIES: str(times),
            DELAY_MS: str(round(delay_s * 1000)),
        }
        # Put off as often as it may be: it goes where it is consumed by nobody of this
        # subscription.
        if times > self._policy.max_redeliveries:
            await self._store(message, self.topic_for(message), letter)
        else:
            assert self.retry_topic is not None, "the consumer has retries"
            await self._store(message, self.retry_topic, letter, delay_s=delay_s)

    async def _store(
        self,
        message: Message[Any],
        topic: str,
        properties: Mapping[str, str],
        *,
        delay_s: float = 0.0,
    ) -> None:
        context = message.encryption
        # Its copy would have other metadata, and so could be decrypted by nobody any more.
        if context is not None and context.is_encrypted:
            raise UnreadableMessage(
                f"{message._raw_id} is encrypted, and cannot be stored elsewhere",
                hint="give the consumer the key, or acknowledge the message",
            )
        producer = await self._producer(topic)
        try:
            await producer.send(
                None if message.is_null else message.data,
                # A key that is not text travels as bytes: its copy must have the same one.
                key=message.key_bytes if message.key is None else message.key,
                ordering_key=message.ordering_key,
                properties=properties,
                event_time=message.event_time_ms,
                deliver_after=delay_s or None,
            )
        except MagnetarError:
            await self._drop(topic)
            raise

    def topic_for(self, message: Message[Any]) -> str:
        """Where the dead letters of its topic go."""
        if self._policy.topic is not None:
            return self._policy.topic
        return letters_of(TopicName.parse(self._origin(message)), self._subscription, "DLQ")

    def _origin(self, message: Message[Any]) -> str:
        """The topic that it was sent to at first."""
        # A message that was put off says where it came from; else its topic does.
        if str(TopicName.parse(message.topic).without_partition()) == self.retry_topic:
            return message.properties.get(REAL_TOPIC, message.topic)
        return message.topic

    def _properties(self, message: Message[Any]) -> dict[str, str]:
        message_id = message.id
        raw = message._raw_id
        text = f"{raw.ledger_id}:{raw.entry_id}:{raw.partition}:{raw.batch_index}"
        if isinstance(message_id, ScalableMessageId):
            text = f"{message_id.segment_id}:{text}"
        origin = self._origin(message)
        if origin != message.topic:  # it was retried, and says where it comes from
            text = message.properties.get(ORIGIN_MESSAGE_ID, text)
        return {
            **message.properties,
            REAL_TOPIC: origin,
            REAL_SUBSCRIPTION: self._subscription,
            ORIGIN_MESSAGE_ID: text,
        }

    async def _producer(self, topic: str) -> Producer[bytes]:
        known = self._producers.get(topic)
        if known is None:
            known = self._producers[topic] = await self._make_producer(topic)
        return known

    async def _drop(self, topic: str) -> None:
        """A producer that failed may never work again: the next letter gets a new one."""
        failed = self._producers.pop(topic, None)
        if failed is not None:
            await failed.close()


def letters_of(topic: TopicName, subscription: str, kind: str) -> str:
    """The topic beside another one that holds its letters."""
    name = topic.without_partition()
    return f"{name}-{kind}" if name.domain.is_scalable else f"{name}-{subscription}-{kind}"


def _retries_of(message: Message[Any]) -> int:
    said = message.properties.get(RETRIES, "")
    return int(said) if said.isdecimal() else 0
