"""A topic with a managed ledger and subscriptions, and clients that take what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from magnetar.broker.api import Delivery, SubscribeRequest
from magnetar.broker.compact.compacted_ledger import CompactedLedger
from magnetar.broker.dispatch.consumer import Consumer, News
from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.dispatcher import ReadWindow
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription, first_mark_delete
from magnetar.ledger.api import Entry
from magnetar.managed_ledger.managed_ledger import ManagedLedger
from magnetar.model.ids import MessageId, Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, KeySharedPolicy, SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual import virtual_time
from magnetar.wire.messages import encode_entry, metadata_of, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.managed_ledger.world import MemoryWorld

EXCLUSIVE = SubscriptionType.EXCLUSIVE
SHARED = SubscriptionType.SHARED
FAILOVER = SubscriptionType.FAILOVER
KEY_SHARED = SubscriptionType.KEY_SHARED

PERMITS = 1000


class Topic:
    """What a subscription needs of its topic, with a ceiling and a filter that tests move."""

    def __init__(self, world: MemoryWorld, ledger: ManagedLedger, limits: Limits) -> None:
        self.world = world
        self.name = TopicName.parse("t")
        self.ledger = ledger
        self.limits = limits
        self.end: Position | None = None
        self.hidden: set[Position] = set()
        self.compacted: CompactedLedger | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self.delays = DelayRule()
        self.policies = TopicPolicies(
            max_unacked_per_consumer=limits.consumer_unacked_messages,
            max_unacked_per_subscription=limits.subscription_unacked_messages,
        )

    def max_read_position(self) -> Position:
        return self.ledger.last_position() if self.end is None else self.end

    def read_window(self) -> ReadWindow:
        end = self.max_read_position()
        return ReadWindow(end, end)

    def is_visible(self, entry: Entry) -> bool:
        return entry.position not in self.hidden

    @property
    def consumers(self) -> int:
        return sum(len(each.consumers) for each in self.subscriptions.values())

    def delay_rule(self) -> DelayRule:
        return self.delays

    def wake(self) -> None:
        for each in self.subscriptions.values():
            each.wake.advance()

    async def publish(
        self, *bodies: str, messages: int = 1, key: str | None = None, after: float | None = None
    ) -> None:
        for body in bodies:
            now_ms = self.world.clock.now_ms()
            metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=now_ms)
            if after is not None:
                metadata.deliver_at_time = now_ms + round(after * 1000)
            if messages > 1:
                metadata.num_messages_in_batch = messages
            if key is not None:
                metadata.partition_key = key
            await self.ledger.append(encode_entry(metadata, body.encode()))
        self.wake()

    async def subscription(
        self, name: str = "s", *, durable: bool = True, start: MessageId | None = None
    ) -> Subscription:
        """From the earliest message on; a durable one that exists goes on where it was."""
        if name in self.ledger.cursor_names():
            cursor = self.ledger.cursor(name)
        else:
            options = options_of(EXCLUSIVE, durable=durable, start=start)
            behind = first_mark_delete(options, self.ledger.last_position())
            if durable:
                cursor = await self.ledger.create_cursor(name, behind)
            else:
                cursor = self.ledger.open_reader(name, behind)
        subscription = Subscription(self, cursor, clock=self.world.clock, limits=self.limits)
        self.subscriptions[name] = subscription
        return subscription

    async def close(self) -> None:
        for each in self.subscriptions.values():
            assert each.failed.version == 0
            await each.close()
        await self.ledger.close()

    async def reopened(self) -> Topic:
        """The same topic after a stop and a start."""
        await self.close()
        return await open_topic(self.world, self.limits)


async def open_topic(world: MemoryWorld, limits: Limits | None = None) -> Topic:
    limits = limits or Limits()
    return Topic(world, await world.open(limits=limits), limits)


Scenario = Callable[[Topic], Awaitable[None]]


def run(scenario: Scenario, limits: Limits | None = None) -> None:
    """Play a scenario on a fresh topic, in virtual time."""

    async def main() -> None:
        topic = await open_topic(MemoryWorld(), limits)
        await scenario(topic)
        await topic.close()

    virtual_time.run(main())


def options_of(
    type_: SubscriptionType,
    name: str = "c",
    *,
    priority: int = 0,
    durable: bool = True,
    start: MessageId | None = None,
    key_shared: KeySharedPolicy | None = None,
    epoch: int | None = None,
) -> SubscribeRequest:
    return SubscribeRequest(
        subscription="s",
        type=type_,
        consumer_id=0,
        connection=None,
        name=name,
        priority_level=priority,
        durable=durable,
        initial_position=InitialPosition.EARLIEST,
        start=start,
        key_shared=key_shared,
        consumer_epoch=epoch,
    )


class Client:
    """A connected consumer and everything it got."""

    def __init__(
        self,
        subscription: Subscription,
        type_: SubscriptionType,
        name: str = "c",
        *,
        permits: int = PERMITS,
        priority: int = 0,
        key_shared: KeySharedPolicy | None = None,
        epoch: int | None = None,
    ) -> None:
        self.subscription = subscription
        options = options_of(
            type_,
            name,
            priority=priority,
            durable=subscription.durable,
            key_shared=key_shared,
            epoch=epoch,
        )
        self.consumer: Consumer = subscription.add_consumer(options)
        self.got: list[Delivery] = []
        self.news: list[News] = []
        self.consumer.flow(permits)

    def take(self) -> list[Delivery]:
        self.news += self.consumer.take_news()
        taken = self.consumer.take()
        self.got += taken
        return taken

    def bodies(self) -> list[str]:
        self.take()
        return [body_of(each) for each in self.got]

    def counts(self) -> list[tuple[str, int]]:
        self.take()
        return [(body_of(each), each.redelivery_count) for each in self.got]

    def position_of(self, body: str) -> Position:
        self.take()
        return next(each.position for each in self.got if body_of(each) == body)

    def ack(self, *bodies: str, cumulative: bool = False, unacked: int = 0) -> None:
        acks = [Ack(self.position_of(body), unacked) for body in bodies]
        self.subscription.ack(self.consumer, acks, cumulative=cumulative)

    def nack(self, *bodies: str) -> None:
        positions = [self.position_of(body) for body in bodies]
        self.subscription.redeliver(self.consumer, positions)

    def leave(self) -> None:
        self.subscription.remove_consumer(self.consumer)


def body_of(delivery: Delivery) -> str:
    return delivery.payload[payload_offset(delivery.payload) :].decode()


def key_of(delivery: Delivery) -> str:
    return metadata_of(delivery.payload).partition_key


def numbered(count: int, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


async def settle(turns: int = 50) -> None:
    """Let everything that can happen without the passing of time happen."""
    for _ in range(turns):
        await asyncio.sleep(0)
