"""Rates of dispatching on a topic, on virtual time: how much comes when, and to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from magnetar.broker.api import Delivery
from magnetar.broker.policy.defaults import PolicyDefaults
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.namespaces import DEFAULT
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import DispatchRate, SubscriptionPolicies
from magnetar.broker.publish.producers import TopicProducers
from magnetar.broker.rates.rate_limiter import PAUSE_S
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.broker.topic.rates import TopicRates
from magnetar.broker.topic.topic import Topic as RealTopic
from magnetar.model.ids import EARLIEST
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import DISPATCH_THROTTLED
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.testing.virtual import virtual_time
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    Client,
    Topic,
    numbered,
    run,
    settle,
)
from tests.unit.broker.world import World, consumer, message, options, receipts

ALL_TYPES = [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED]
TEN = DispatchRate(10)


async def _no_epoch(_: int) -> None: ...


class Rates(TopicRates):
    """The rates of a topic of the subscription's world."""

    def __init__(self, topic: Topic) -> None:
        clock: Clock = topic.world.clock
        self.published = (0.0, 0.0)
        producers = TopicProducers(None, _no_epoch, close_seconds=1)
        super().__init__(topic.name, producers, TopicPolicies(), clock, lambda: self.published)
        self._topic = topic

    async def hold(
        self,
        *,
        topic: DispatchRate | None = None,
        subscription: DispatchRate | None = None,
        own: Mapping[str, DispatchRate] | None = None,
        by_entries: bool = False,
    ) -> None:
        policies = TopicPolicies(
            dispatch_rate=topic or DispatchRate(),
            subscription_dispatch_rate=subscription or DispatchRate(),
            own_dispatch_rates=dict(own or {}),
            dispatch_by_entries=by_entries,
        )
        await self.follow(policies, self._topic.subscriptions.values())

    async def hold_at(self, level: str, rate: DispatchRate) -> None:
        """The rate at one of three levels, for the subscription `s` among others."""
        if level == "own":
            await self.hold(own={"s": rate})
        elif level == "topic":
            await self.hold(topic=rate)
        else:
            await self.hold(subscription=rate)


def throttled() -> float:
    (sample,) = next(iter(DISPATCH_THROTTLED.collect())).samples[:1]
    return sample.value


async def counted(client: Client, seconds: int) -> list[int]:
    """How many it has got in all, now and after each second."""
    await settle()
    found = [len(client.bodies())]
    for _ in range(seconds):
        await asyncio.sleep(1)
        found.append(len(client.bodies()))
    return found


@pytest.mark.parametrize("level", ["topic", "subscription", "own"])
@pytest.mark.parametrize("type_", ALL_TYPES)
def test_a_backlog_comes_at_the_rate_in_order_and_whole(
    type_: SubscriptionType, level: str
) -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(65), key="k")
        before = throttled()
        await rates.hold_at(level, TEN)
        client = Client(subscription, type_)
        assert await counted(client, 6) == [
            pytest.approx(10 + 10 * each, abs=1) for each in range(6)
        ] + [65]
        assert client.bodies() == numbered(65)
        assert throttled() > before

    run(scenario)


def test_readers_are_throttled_too() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        await topic.publish(*numbered(30))
        reader = await topic.subscription("r", durable=False, start=EARLIEST)
        await rates.hold(subscription=TEN)
        client = Client(reader, EXCLUSIVE)
        assert await counted(client, 2) == [pytest.approx(each, abs=1) for each in (10, 20, 30)]

    run(scenario)


@pytest.mark.parametrize("type_", ALL_TYPES)
def test_consumers_that_are_caught_up_are_throttled_too(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await rates.hold(topic=TEN)
        client = Client(subscription, type_)
        for number in range(40):
            await topic.publish(str(number), key="k")
            await asyncio.sleep(0.025)
        await settle()
        assert len(client.bodies()) == pytest.approx(20, abs=1)
        await asyncio.sleep(2.1)
        assert client.bodies() == numbered(40)

    run(scenario)


def test_nobody_waits_for_a_rate_without_anything_to_read() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await rates.hold(topic=DispatchRate(1), subscription=DispatchRate(1))
        client = Client(subscription, SHARED)
        await topic.publish("0")
        await settle()
        before = throttled()
        for _ in range(5):
            subscription.wake.advance()
            await settle()
        assert throttled() == before
        assert client.bodies() == ["0"]
        throttle = subscription.throttle
        assert throttle is not None
        assert throttle.own is not None
        assert throttle.own._timer is None

    run(scenario)


def test_bytes_let_one_entry_too_many_through() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*("x" * 990 for _ in range(30)))
        await rates.hold(topic=DispatchRate(-1, 5000))
        client = Client(subscription, SHARED)
        found = await counted(client, 5)
        assert found[0] in (5, 6)
        assert found[-1] == pytest.approx(30, abs=2)
        assert all(4 <= later - earlier <= 6 for earlier, later in pairwise(found[:-1]))

    run(scenario)


@pytest.mark.parametrize("by_entries", [False, True])
def test_batches_count_as_messages_or_as_entries(by_entries: bool) -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*("x" * 50 for _ in range(40)), messages=5)
        await rates.hold(topic=TEN, by_entries=by_entries)
        client = Client(subscription, SHARED)
        found = await counted(client, 20)
        if by_entries:
            assert found[:4] == [pytest.approx(each, abs=1) for each in (10, 20, 30, 40)]
        else:
            # The first read does not know yet how large batches are: ten entries, for five periods.
            assert found[0] == 10
            assert found[3] == 10
            assert found[-1] == pytest.approx(40, abs=2)

    run(scenario)


@pytest.mark.parametrize("rate", [DispatchRate(5), DispatchRate(-1, 500)])
@pytest.mark.parametrize("level", ["topic", "subscription"])
def test_statistics_say_for_which_rate_it_waited(rate: DispatchRate, level: str) -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*("x" * 90 for _ in range(40)))
        await rates.hold_at(level, rate)
        Client(subscription, SHARED)
        await asyncio.sleep(3)
        await rates.hold()
        found = msgspec.to_builtins(subscription.stats())
        unit = "Bytes" if rate.dispatch_throttling_rate_in_byte > 0 else "Msg"
        waited = {name: count for name, count in found.items() if "Throttled" in name and count > 0}
        assert list(waited) == [f"dispatchThrottled{unit}EventsBy{level.capitalize()}Limit"]
        # Once for each wait, not for each time that it was woken meanwhile.
        assert 1 <= sum(waited.values()) < 30

    run(scenario)


def test_a_period_is_what_the_rate_is_for() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(30))
        await rates.hold(subscription=DispatchRate(10, -1, 10))
        client = Client(subscription, SHARED)
        found = await counted(client, 20)
        at = [found[each] for each in (0, 5, 10, 20)]
        assert at == [pytest.approx(each, abs=1) for each in (10, 15, 20, 30)]

    run(scenario)


def test_the_rate_of_publishing_is_added_where_a_policy_says_so() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(400))
        await rates.hold(subscription=DispatchRate(10, 0, 1, True))
        client = Client(subscription, SHARED)
        assert (await counted(client, 2))[2] == pytest.approx(30, abs=2)
        rates.published = (90.0, 1e6)
        found = await counted(client, 4)
        assert found[4] - found[2] == pytest.approx(200, abs=10)

    run(scenario)


def test_a_change_holds_at_once_also_for_who_waits() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(200))
        await rates.hold(subscription=DispatchRate(1, -1, 1000))
        client = Client(subscription, SHARED)
        assert await counted(client, 3) == [1, 1, 1, 1]
        await rates.hold(subscription=DispatchRate(50))
        await asyncio.sleep(1)
        assert len(client.bodies()) == pytest.approx(51, abs=2)
        await rates.hold(own={"s": DispatchRate(1, -1, 1000)}, subscription=DispatchRate(50))
        await asyncio.sleep(1)
        assert len(client.bodies()) < 55
        await rates.hold(topic=DispatchRate(1, -1, 1000))
        await asyncio.sleep(1)
        assert len(client.bodies()) < 57
        await rates.hold()
        await settle()
        assert client.bodies() == numbered(200)
        assert subscription.throttle is None

    run(scenario)


def test_subscriptions_share_the_rate_of_their_topic_in_turns() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        names = [f"s{number}" for number in range(5)]
        for name in names:
            await topic.subscription(name)
        await topic.publish(*numbered(500))
        await rates.hold(topic=DispatchRate(100))
        clients = [Client(topic.subscriptions[name], SHARED) for name in names]
        await asyncio.sleep(10)
        counts = [len(each.bodies()) for each in clients]
        assert sum(counts) == pytest.approx(1100, abs=10)
        # The burst went to one of them.
        assert min(counts) > 180
        # Ten more that are caught up in a moment do not take the others' place.
        await rates.hold()
        await settle(200)
        assert [len(each.bodies()) for each in clients] == [500] * 5

    run(scenario)


def test_a_low_rate_goes_round() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        names = [f"s{number}" for number in range(7)]
        for name in names:
            await topic.subscription(name)
        await topic.publish(*numbered(100))
        await rates.hold(topic=DispatchRate(1))
        clients = [Client(topic.subscriptions[name], SHARED) for name in names]
        await asyncio.sleep(70.5)
        assert {len(each.bodies()) for each in clients} <= {10, 11}

    run(scenario)


def test_a_high_rate_is_read_in_portions() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(4000))
        await rates.hold(topic=DispatchRate(2000))
        client = Client(subscription, SHARED, permits=10_000)
        reads = 0
        plain = subscription._dispatcher._in_turn

        def counting(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return plain(*args)

        subscription._dispatcher._in_turn = counting  # type: ignore[assignment]
        await asyncio.sleep(1.1)
        assert len(client.bodies()) == 4000
        assert reads < 4 / PAUSE_S

    run(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_when_everybody_gets_everything_once_and_not_too_fast(seed: int) -> None:
    async def scenario(topic: Topic) -> None:
        chance, loop = Random(seed), asyncio.get_running_loop()
        rates, clients = Rates(topic), dict[str, list[Client]]()
        for number in range(chance.randint(1, 4)):
            type_, name = chance.choice(ALL_TYPES), f"s{number}"
            subscription = await topic.subscription(name)
            count = 1 if type_ is EXCLUSIVE else chance.randint(1, 3)
            clients[name] = [
                Client(subscription, type_, f"c{each}", permits=0) for each in range(count)
            ]
        everybody = [each for group in clients.values() for each in group]
        published, rate, most, since = 0, 0, 0.0, loop.time()

        def got() -> int:
            return sum([len(each.bodies()) for each in everybody])

        for _ in range(60):
            bodies = numbered(chance.randint(0, 40), published)
            await topic.publish(*bodies, key=chance.choice("abc"))
            published += len(bodies)
            chance.choice(everybody).consumer.flow(chance.randint(1, 100))
            if chance.random() < 0.2:
                rate = chance.choice([0, 5, 50, 500])
                most, since = got() + rate, loop.time()
                await rates.hold(topic=DispatchRate(rate), subscription=DispatchRate(500))
            await asyncio.sleep(chance.choice([0.0, 0.01, 0.5, 3.0]))
            assert not rate or got() <= most + rate * (loop.time() - since) + 1
        await rates.hold()
        for each in everybody:
            each.consumer.flow(10_000)
        await settle(500)
        for group in clients.values():
            found = [body for each in group for body in each.bodies()]
            assert sorted(found, key=int) == numbered(published)
            if len(group) == 1:
                assert found == numbered(published)

    run(scenario)


def test_permits_and_acknowledgements_are_as_without_a_rate() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(20))
        await rates.hold(topic=TEN)
        client = Client(subscription, SHARED, permits=3)
        assert await counted(client, 2) == [3, 3, 3]
        client.nack("1")
        client.consumer.flow(100)
        await asyncio.sleep(2)
        # The one that was asked for again goes first, and costs a token as well.
        assert client.bodies() == ["0", "1", "2", "1", *numbered(17, 3)]
        client.ack(*numbered(20))
        assert subscription.backlog() == 0

    run(scenario)


def test_messages_that_wait_for_their_time_cost_nothing_until_then() -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(100), after=20)
        await topic.publish("now")
        await rates.hold(topic=TEN)
        client = Client(subscription, SHARED)
        await settle(500)
        assert client.bodies() == ["now"]
        await asyncio.sleep(20)
        await settle()
        assert len(client.bodies()) < 25
        await asyncio.sleep(10)
        assert sorted(client.bodies()) == sorted(["now", *numbered(100)])

    run(scenario)


def test_very_many_subscriptions_are_told_in_slices() -> None:
    async def scenario(topic: Topic) -> None:
        rates, ticks = Rates(topic), 0
        for number in range(3 * SLICE_ITEMS):
            await topic.subscription(f"r{number}", durable=False, start=EARLIEST)

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await rates.hold(subscription=TEN)
        assert ticks >= 3
        ticking.cancel()
        assert all(each.throttle is not None for each in topic.subscriptions.values())

    run(scenario)


@pytest.mark.parametrize("level", ["topic", "subscription"])
def test_a_subscription_that_ends_leaves_the_line(level: str) -> None:
    async def scenario(topic: Topic) -> None:
        rates = Rates(topic)
        subscription = await topic.subscription()
        await topic.publish(*numbered(30))
        await rates.hold_at(level, DispatchRate(1))
        Client(subscription, SHARED)
        await settle()
        limiter = rates._dispatching
        if limiter is None:
            assert subscription.throttle is not None
            limiter = subscription.throttle.own
        assert limiter is not None
        assert limiter.waiting == 1
        await subscription.close()
        assert limiter.waiting == 0
        assert limiter._timer is None

    run(scenario)


# --- of a topic with all its parts


def with_topic(scenario: Callable[[World, RealTopic], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World(Limits())
        topic = await world.topic()
        await scenario(world, topic)
        await topic.close()

    virtual_time.run(main())


async def filled(topic: RealTopic, count: int) -> None:
    producer = await topic.add_producer(options())
    for number in range(count):
        producer.send(message(number))
    await receipts(producer, count)
    await topic.remove_producer(producer)


def test_subscriptions_that_come_later_have_the_rates_too() -> None:
    async def scenario(_: World, topic: RealTopic) -> None:
        await filled(topic, 1)
        await topic.apply(TopicPolicies(dispatch_rate=TEN, subscription_dispatch_rate=TEN))
        first = await topic.subscription(consumer())
        throttle = first.throttle
        assert throttle is not None
        assert str(throttle.own) == f"subscriptionDispatchRate of 10 messages/s on {topic.name}"
        assert len(throttle._limiters) == 2
        await topic.apply(TopicPolicies(own_dispatch_rates={"s": DispatchRate(-1, 5)}))
        throttle = first.throttle
        assert throttle is not None
        assert str(throttle.own) == f"subscriptionDispatchRate of 5 bytes/s on {topic.name}"
        other = await topic.subscription(consumer("other"))
        assert other.throttle is None
        await topic.apply(TopicPolicies())
        assert first.throttle is None

    with_topic(scenario)


def test_a_rate_relative_to_publishing_goes_by_what_statistics_show() -> None:
    async def scenario(_: World, topic: RealTopic) -> None:
        producer = await topic.add_producer(options())
        relative = DispatchRate(10, 10_000, 1, True)
        await topic.apply(TopicPolicies(subscription_dispatch_rate=relative))
        subscription = await topic.subscription(consumer())
        got: list[Delivery] = []
        member = subscription.add_consumer(consumer())
        member.flow(100_000)
        number = 0
        for _second in range(100):
            for _each in range(50):
                producer.send(message(number))
                number += 1
            await asyncio.sleep(1)
            got += member.take()
        # 50 in a second come, and 60 may go: nothing stays behind for long.
        assert topic.stats().msg_rate_in == pytest.approx(50, abs=2)
        await asyncio.sleep(1)
        got += member.take()
        assert len(got) == 5000
        await topic.apply(TopicPolicies(subscription_dispatch_rate=TEN))
        for _each in range(100):
            producer.send(message(number))
            number += 1
        await asyncio.sleep(1)
        assert len(member.take()) < 30
        subscription.remove_consumer(member)
        await topic.remove_producer(producer)

    with_topic(scenario)


def test_levels_reach_loaded_topics_and_segments() -> None:
    segment = TopicName.parse("segment://public/default/orders/0000-ffff-0")

    async def main() -> None:
        world = World(Limits())
        topics = await world.topics()
        await topics.create(segment)
        name = TopicName.parse("persistent://public/default/t")
        loaded = [await topics.get(segment), await topics.get(name)]
        subscriptions = []
        for each in loaded:
            assert isinstance(each, RealTopic)
            subscriptions.append(await each.subscription(consumer()))

        def own(number: int) -> str | None:
            throttle = subscriptions[number].throttle
            return None if throttle is None else str(throttle.own).partition(" on ")[0]

        def counts_entries(subscription: Subscription) -> bool:
            assert subscription.throttle is not None
            return subscription.throttle._by_entries

        def changed(**fields: Any) -> Callable[[Policies], Policies]:
            return lambda old: msgspec.structs.replace(old, **fields)

        defaults = PolicyDefaults(dispatch_throttling_rate_per_subscription_in_msg=3)
        await topics.change_broker(defaults.as_policies(Limits()))
        assert [own(0), own(1)] == ["subscriptionDispatchRate of 3 messages/s"] * 2
        assert [counts_entries(each) for each in subscriptions] == [False, False]
        defaults = replace(defaults, dispatch_throttling_on_batch_message_enabled=True)
        await topics.change_broker(defaults.as_policies(Limits()))
        assert [counts_entries(each) for each in subscriptions] == [True, True]
        await topics.change_namespace(DEFAULT, changed(subscription_dispatch_rate=DispatchRate(4)))
        assert [own(0), own(1)] == ["subscriptionDispatchRate of 4 messages/s"] * 2
        single = {"s": SubscriptionPolicies(DispatchRate(5))}
        await topics.change_topic(name, changed(subscription_policies=single))
        assert own(0) == "subscriptionDispatchRate of 4 messages/s"
        assert own(1) == "subscriptionDispatchRate of 5 messages/s"
        await topics.change_topic(name, changed(subscription_policies={}))
        await topics.change_namespace(DEFAULT, changed(subscription_dispatch_rate=DispatchRate()))
        assert [own(0), own(1)] == [None, None]
        await topics.stop()

    virtual_time.run(main())
