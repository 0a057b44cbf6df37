"""The handles of a connection on topics: producers, consumers, and the loops that serve them.

Owns: `ProducerHandle`, which sends receipts as sends are settled, `ConsumerHandle` with the loop
that sends deliveries and the answers to acknowledgements. One loop per handle, none per message.

Invariants:
1. A handle is registered before anything is awaited for it, so that two commands with one id never
   both open it; it stands in its session until it is closed.
2. Nothing is sent for a handle before the answer to the command that opened it, nor, but for
   receipts of what was in flight, after it was closed.
3. A handle that the broker closed tells the client so and stays known for one keepalive interval:
   what the client sent before it learned of it is ignored.
4. `owed` of a session is the sum of the sends that its handles have not settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from magnetar.broker.api import Delivery, Receipt, ReceiptRun
from magnetar.broker.dispatch.consumer import Consumer, News
from magnetar.broker.publish.producer import Producer
from magnetar.broker.subscribe.nonpersistent_subscription import NonPersistentSubscription
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.nonpersistent import LoadedTopic, NonPersistentTopic
from magnetar.errors import MagnetarError
from magnetar.runtime.logs import logger
from magnetar.runtime.slices import slices
from magnetar.server.replies import NO_REQUEST, ack_refusal, send_refusal
from magnetar.wire.frames import (
    command,
    encode_message,
    encode_messages,
    encode_receipt,
    encode_receipts,
)

if TYPE_CHECKING:
    from magnetar.server.session import Session

OpenSubscription: TypeAlias = Subscription | NonPersistentSubscription

_log = logger(__name__)

_NO_PARTITION: Final = -1
# What a MESSAGE says besides its entry: redelivery count, ack set and epoch; and the entry.
_TOLD_BESIDES: Final = itemgetter(3, 4, 5)
_ENTRY: Final = itemgetter(0, 1)

# They are cheap: a microsecond each.
_DELIVERIES_PER_TURN: Final = 1000


class ProducerHandle:
    """One producer id of a connection."""

    def __init__(self, session: Session, producer_id: int) -> None:
        self.producer_id = producer_id
        self.opening = asyncio.Event()
        """Set once the attempt to open it is over, well or not."""
        self.topic: LoadedTopic | None = None
        self.producer: Producer | None = None
        self.owed = 0
        """Sends that it has not settled; the session counts them up."""
        self.is_watching = False
        """Whether it will look at what is in flight by itself."""
        self._session = session
        self._loop: asyncio.Task[None] | None = None
        self._closing = False
        self._closed_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self.producer is not None

    @property
    def is_closed_by_broker(self) -> bool:
        return self._closed_at is not None

    @property
    def is_forgotten(self) -> bool:
        """Closed so long ago that its client must know."""
        if self._closed_at is None:
            return False
        age = self._session.context.clock.monotonic() - self._closed_at
        return age > self._session.limits.connection_keepalive_seconds

    def open(self, topic: LoadedTopic, producer: Producer) -> None:
        """The broker has the producer; its client has been told."""
        self.topic = topic
        self.producer = producer
        self._loop = self._session.spawn(self._until_ended(producer), "receipts")

    # --- receipts

    def watch(self) -> None:
        """Give receipts once the first send in flight is settled."""
        producer = self.producer
        future = None if producer is None else producer.first_in_flight
        if future is not None:
            self.is_watching = True
            future.add_done_callback(self._settled)

    def _settled(self, _: object) -> None:
        # By the loop, as are all callbacks of futures: receipts of sends that became durable
        # together are gathered in the same turn, and the connection is written to once.
        self.is_watching = False
        producer = self.producer
        if producer is None:
            return
        try:
            self._give_receipts(producer)
        # A bug: its client would wait for ever, so it is made to reconnect.
        except Exception as error:  # noqa: BLE001  logged, and told by the end of the connection
            _log.error("receipts-failed", error, producer=producer.name)
            self._session.abandon("receipts could not be given")

    def _give_receipts(self, producer: Producer) -> None:
        """Write all receipts that are due, and look again when the next send is settled."""
        session, number = self._session, self.producer_id
        receipts = producer.take_receipts()
        if len(receipts) == 1 and type(receipts[0]) is Receipt and receipts[0].error is None:
            sequence_id, highest, position, _ = receipts[0]
            session.outbound.write(encode_receipt(number, sequence_id, *position, highest))
            self.owed -= 1
            session.settled(1)
        elif receipts:
            self._write_receipts(receipts)
        if not self.is_watching and producer.first_in_flight is not None:
            self.watch()

    def _write_receipts(self, receipts: list[Receipt | ReceiptRun]) -> None:
        session, number = self._session, self.producer_id
        frames: list[bytes] = []
        count = len(receipts)
        for each in receipts:
            if type(each) is ReceiptRun:
                sequence_ids, first = each
                frames.append(encode_receipts(number, sequence_ids, *first))
                count += len(sequence_ids) - 1
                continue
            assert type(each) is Receipt, "there are two kinds"
            sequence_id, highest, position, error = each
            if error is None:
                frames.append(encode_receipt(number, sequence_id, *position, highest))
            else:
                frames.append(send_refusal(number, sequence_id, self._explained(error)))
        session.outbound.write_all(frames)
        self.owed -= count
        session.settled(count)

    async def _until_ended(self, producer: Producer) -> None:
        """What no send in flight would tell: sends that were held, and the end."""
        seen = 0
        while True:
            self._give_receipts(producer)
            if producer.has_ended:
                break
            seen = await producer.changed.past(seen)
        # What the broker stopped gets no receipt: the client sends it again on its next producer.
        self._session.settled(self.owed)
        self.owed = 0
        if not self._closing:
            await self._closed_by_broker()

    def _explained(self, error: MagnetarError) -> MagnetarError:
        assert self.topic is not None, "it has receipts"
        return self._session.context.explained(self.topic.name, error)

    async def _closed_by_broker(self) -> None:
        self._closed_at = self._session.context.clock.monotonic()
        number = self.producer_id
        # Behind the last receipt: a client that reconnects knows what it need not send again.
        self._session.write(command("CLOSE_PRODUCER", producer_id=number, request_id=NO_REQUEST))
        await self._remove()

    async def close(self) -> None:
        """End it for its client, or because that is gone: what is in flight is settled first."""
        # A close may overtake the answer to its PRODUCER: requests run side by side.
        await self.opening.wait()
        self._closing = True
        if self.producer is not None:
            self.producer.stop()
        if self._loop is not None:  # it may be about to leave the topic by itself
            await asyncio.wait({self._loop}, timeout=self._session.limits.close_seconds)
            await self._remove()

    async def _remove(self) -> None:
        topic, producer = self.topic, self.producer
        # Before the await: of two that close it, the second finds nothing left to do.
        self.topic = self.producer = None
        if topic is not None and producer is not None:
            await topic.remove_producer(producer)


class ConsumerHandle:
    """One consumer id of a connection."""

    def __init__(self, session: Session, consumer_id: int) -> None:
        self.consumer_id = consumer_id
        self.opening = asyncio.Event()
        """Set once the attempt to open it is over, well or not."""
        self.leaving = False
        """Its client has asked for its end, and need not be told of it."""
        self.topic: LoadedTopic | None = None
        self.subscription: OpenSubscription | None = None
        self.consumer: Consumer | None = None
        self._session = session
        self._partition = _NO_PARTITION
        # Acks that wait for the cursor's next durable write; one loop answers them all.
        self._acks: list[tuple[OpenSubscription, int]] = []
        self._answering = False

    @property
    def is_open(self) -> bool:
        return self.consumer is not None

    def open(self, topic: LoadedTopic, subscription: OpenSubscription, consumer: Consumer) -> None:
        """The broker has the consumer; its client has been told."""
        partition = topic.name.partition
        self.topic = topic
        self.subscription = subscription
        self.consumer = consumer
        self._partition = _NO_PARTITION if partition is None else partition
        self._session.spawn(self._deliver(consumer), "deliveries")

    async def _deliver(self, consumer: Consumer) -> None:
        outbound, number, partition = self._session.outbound, self.consumer_id, self._partition
        seen = 0
        while True:
            seen = await consumer.outbox_ready.past(seen)
            # Before anything is taken: what the peer has no room for stays in the outbox, where it
            # stops dispatch to this consumer alone.
            await outbound.writable()
            # Asked after both waits: its deliveries were taken back, and go to others.
            if consumer.is_stopped:
                break
            # ACTIVE_CONSUMER_CHANGE stands before the messages that follow from it.
            for news in consumer.take_news():
                self._tell(news)
            taken = consumer.take()
            # As sent from here on: those of the later slices are, unless the consumer is stopped.
            for some in slices(taken, _DELIVERIES_PER_TURN):
                # One write for all; payloads are pieces of their own, so large ones are not copied.
                outbound.write_all(_frames_of(some, number, partition))
                if len(taken) > _DELIVERIES_PER_TURN:
                    await asyncio.sleep(0)
                    if consumer.is_stopped:
                        break
        self.tell_if_stopped()

    def _tell(self, news: News) -> None:
        number, session = self.consumer_id, self._session
        # Clients of other languages do not know this command, and close the connection.
        if news is News.REACHED_END:
            if session.client is not None and session.client.hears_ends:
                session.write(command("REACHED_END_OF_TOPIC", consumer_id=number))
            return
        active = news is News.ACTIVE
        session.write(command("ACTIVE_CONSUMER_CHANGE", consumer_id=number, is_active=active))

    def tell_if_stopped(self) -> None:
        """Tell the client that the broker has ended its consumer, if so and not done yet."""
        if self.consumer is not None and self.consumer.is_stopped and not self.leaving:
            self._closed_by_broker()

    def _closed_by_broker(self) -> None:
        topic, subscription = self.topic, self.subscription
        # Taken out before anything is sent: commands that cross CLOSE_CONSUMER find no consumer.
        self.topic = self.subscription = self.consumer = None
        session, number = self._session, self.consumer_id
        if topic is not None and subscription is not None and not subscription.durable:
            session.spawn(self._release_later(topic, subscription), "release of a reader")
        # The client may have subscribed again with this id.
        if session.consumers.get(number) is self:
            del session.consumers[number]
        session.write(command("CLOSE_CONSUMER", consumer_id=number, request_id=NO_REQUEST))

    async def _release_later(self, topic: LoadedTopic, subscription: OpenSubscription) -> None:
        """A reader comes back after a seek and finds its new position; it has one interval."""
        session = self._session
        try:
            await session.context.clock.sleep(session.limits.connection_keepalive_seconds)
        finally:
            await release(topic, subscription)

    # --- acknowledgements whose clients wait for an answer

    def answer_when_durable(self, subscription: OpenSubscription, request_id: int) -> None:
        """Answer an acknowledgement once everything acknowledged so far is durable."""
        self._acks.append((subscription, request_id))
        self._session.owe_ack()
        if not self._answering:
            self._answering = True
            self._session.spawn(self._answer_acks(), "ack answers")

    async def _answer_acks(self) -> None:
        try:
            while self._acks:
                # All that came until now share one cursor write; those that come meanwhile, the
                # next one.
                due, self._acks = self._acks, []
                error: MagnetarError | None = None
                try:
                    await due[-1][0].ack_durable()  # the same for all, or a later one
                except MagnetarError as failed:
                    error = failed
                # A failed write is every waiter's failure: none of their acks is known to be
                # durable.
                for _, request_id in due:
                    self._session.write(self._ack_answer(request_id, error))
                self._session.acks_answered(len(due))
        finally:
            self._answering = False

    def _ack_answer(self, request_id: int, error: MagnetarError | None) -> bytes:
        if error is not None:
            return ack_refusal(self.consumer_id, request_id, error)
        return command("ACK_RESPONSE", consumer_id=self.consumer_id, request_id=request_id)

    async def close(self) -> None:
        """Give up the consumer; what it holds goes to others."""
        # A close may overtake its SUBSCRIBE.
        await self.opening.wait()
        topic, subscription, consumer = self.topic, self.subscription, self.consumer
        self.topic = self.subscription = self.consumer = None
        if topic is not None and subscription is not None and consumer is not None:
            subscription.remove_consumer(consumer)
            await release(topic, subscription)


def _frames_of(deliveries: Sequence[Delivery], number: int, partition: int) -> list[bytes]:
    """MESSAGE frames, in pieces."""
    pieces: list[bytes] = []
    # Nearly all come for the first time and whole, and all of them by one epoch of their consumer.
    for (count, ack_set, epoch), run in groupby(deliveries, _TOLD_BESIDES):
        if not count and not ack_set:
            pieces += encode_messages(number, partition, epoch, map(_ENTRY, run))
            continue
        for position, payload, *_ in run:
            pieces += encode_message(number, position, partition, count, ack_set, payload, epoch)
    return pieces


class TopicListWatch:
    """A client's watch of the topics that match a pattern."""

    def __init__(self, loop: asyncio.Task[None]) -> None:
        self._loop = loop

    def close(self) -> None:
        self._loop.cancel()


async def release(topic: LoadedTopic, subscription: OpenSubscription) -> None:
    """A subscription that is not durable goes with its last consumer."""
    if isinstance(topic, NonPersistentTopic):
        assert isinstance(subscription, NonPersistentSubscription), "a topic has its kind of them"
        await topic.release(subscription)
    else:
        assert isinstance(subscription, Subscription), "a topic has its kind of them"
        await topic.release(subscription)
