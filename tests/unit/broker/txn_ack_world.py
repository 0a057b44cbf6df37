"""A topic with a subscription whose messages are acknowledged in transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.topic import Topic
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.wire.messages import Send, TxnId
from tests.unit.broker.subscription_world import (
    SHARED,
    Client,
    numbered,
)
from tests.unit.broker.txn_world import (
    Broker,
    TxnWorld,
    in_txn_world,
    joined,
)
from tests.unit.broker.world import NAME, entry, message, receipts

Scenario = Callable[["Stage"], Awaitable[None]]


class Stage:
    """A broker, a topic with a subscription, and messages `0`, `1`, ... in it."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self.world = broker.world
        self.broker = broker
        self.topic = topic

    @property
    def subscription(self) -> Subscription:
        return self.topic.subscriptions["s"]

    async def publish(self, *texts: str, batch: int | None = None) -> None:
        producer = await joined(self.topic)
        for number, text in enumerate(texts):
            body = entry(number, text, batch=batch)
            producer.send(Send(1, number, batch or 1, body) if batch else message(number, text))
        await receipts(producer, len(texts))
        await self.topic.remove_producer(producer)

    def client(self, type_: SubscriptionType = SHARED, name: str = "c") -> Client:
        return Client(self.subscription, type_, name)

    async def begin(self, *txns: TxnId) -> None:
        for txn in txns:
            await self.broker.begin(txn)

    async def moved(self) -> Stage:
        """The topic at another broker, the former one is dead."""
        self.broker.kill()
        return await self.world_stage()

    async def world_stage(self) -> Stage:
        broker = self.world.broker()
        return Stage(broker, await broker.topic(self.topic.name))

    async def ops(self) -> int:
        return len(await self.broker.keys())

    async def stored_mark(self) -> Position:
        """What a later owner would find acknowledged."""
        later = await self.world_stage()
        mark = later.subscription.cursor.mark_delete
        await later.topic.close()
        return mark


async def ack(
    client: Client, txn: TxnId, *bodies: str, cumulative: bool = False, unacked: int = 0
) -> None:
    acks = [Ack(client.position_of(body), unacked) for body in bodies]
    subscription = client.subscription
    work = subscription.ack_in_txn(client.consumer, txn, acks, cumulative=cumulative)
    await asyncio.shield(work)


def play(
    scenario: Scenario,
    *,
    name: TopicName = NAME,
    messages: int = 5,
    limits: Limits | None = None,
    shares_journal: bool = False,
    coordinates: bool = True,
) -> None:
    async def scene(world: TxnWorld) -> None:
        broker = world.broker(coordinates=coordinates, shares_journal=shares_journal)
        stage = Stage(broker, await broker.topic(name))
        await stage.topic.create_subscription("s", Position(-1, -1))
        await stage.publish(*numbered(messages))
        await scenario(stage)

    in_txn_world(scene, limits)
