"""Dispatch of every type: order, permits, ceilings, redelivery, failures, idleness."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import pytest

from magnetar.broker.dispatch import dispatcher
from magnetar.broker.dispatch.consumer import News
from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.subscribe.nonpersistent_subscription import NonPersistentSubscription
from magnetar.errors import CorruptEntry
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import KeySharedPolicy, SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.testing.virtual import virtual_time
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    Client,
    Topic,
    body_of,
    key_of,
    numbered,
    options_of,
    run,
    settle,
)
from tests.unit.managed_ledger.world import MemoryWorld


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_everything_comes_once_and_in_order(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(50), key="k")
        client = Client(await topic.subscription(), type_)
        await settle()
        await topic.publish(*numbered(50, 50), key="k")
        await settle()
        assert client.bodies() == numbered(100)
        assert all(each.redelivery_count == 0 and not each.ack_set for each in client.got)

    run(scenario)


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_single_messages_are_delivered_as_if_each_had_been_looked_at(
    type_: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of reads without a batch, and the way of all others, on the same topic."""

    def delivered() -> list[object]:
        found: list[object] = []

        async def scenario(topic: Topic) -> None:
            await topic.publish(*numbered(30), key="k")
            client = Client(await topic.subscription(), type_, permits=25, epoch=3)
            await settle()
            client.consumer.flow(100)
            await topic.publish(*numbered(10, 30), key="k")
            await settle()
            client.take()
            found.extend([client.got, client.consumer.permits, client.consumer.unacked])

        run(scenario)
        return found

    together = delivered()
    monkeypatch.setattr(dispatcher, "may_have_batches", lambda _: True)
    assert together == delivered()
    assert len(together[0]) == 40  # type: ignore[arg-type]


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_permits_count_messages_and_a_batch_is_not_split(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(10), messages=4)
        client = Client(await topic.subscription(), type_, permits=6)
        await settle()
        assert client.bodies() == ["0", "1"]
        assert client.consumer.permits == -2
        client.consumer.flow(2)
        await settle()
        assert len(client.bodies()) == 2
        client.consumer.flow(1)
        await settle()
        assert len(client.bodies()) == 3
        assert client.consumer.messages_out == 12

    run(scenario)


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_with_nothing_to_do_it_waits(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(4), messages=2)
        subscription = await topic.subscription()
        client = Client(subscription, type_, permits=3)
        await settle()
        assert client.bodies() == ["0", "1"]
        # Virtual time moves only when no coroutine is ready to run: a spin would never end.
        await asyncio.sleep(3600)
        assert subscription.wake.waiters == 1
        client.leave()
        await asyncio.sleep(3600)
        assert subscription.wake.waiters == 1

    run(scenario)


def test_the_ceiling_holds_back_and_hidden_entries_are_acknowledged() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(6))
        first = topic.ledger.first_position()
        topic.end = first._replace(entry_id=2)
        topic.hidden = {first._replace(entry_id=1)}
        subscription = await topic.subscription()
        client = Client(subscription, EXCLUSIVE)
        await settle()
        assert client.bodies() == ["0", "2"]
        assert subscription.backlog() == 5
        topic.end = None
        topic.wake()
        await settle()
        assert client.bodies() == ["0", "2", "3", "4", "5"]

    run(scenario)


def test_shared_spreads_and_prefers_the_lower_priority_number() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        one, two = (Client(subscription, SHARED, name, permits=60) for name in ("one", "two"))
        later = Client(subscription, SHARED, "later", priority=1)
        await topic.publish(*numbered(200))
        await settle()
        for client in (one, two):
            assert len(client.bodies()) == 60
        assert len(later.bodies()) == 80
        got = one.bodies() + two.bodies() + later.bodies()
        assert sorted(got, key=int) == numbered(200)

    run(scenario)


def test_a_nack_brings_an_entry_back_with_its_count() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("a", "b", "c")
        client = Client(await topic.subscription(), SHARED)
        await settle()
        client.nack("b")
        await settle()
        client.nack("b")
        await settle()
        assert client.counts() == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("b", 2)]
        client.ack("b")
        client.nack("b")
        client.subscription.redeliver(client.consumer)
        await settle()
        assert client.counts()[5:] == [("a", 1), ("c", 1)]

    run(scenario)


def test_what_is_still_in_the_outbox_is_not_redelivered() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("a", "b")
        client = Client(await topic.subscription(), SHARED)
        await settle()
        client.subscription.redeliver(client.consumer)
        await settle()
        assert client.counts() == [("a", 0), ("b", 0)]

    run(scenario)


def test_entries_of_a_consumer_that_leaves_go_to_another_uncounted() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        one = Client(subscription, SHARED, "one")
        await topic.publish(*numbered(30))
        await settle()
        two = Client(subscription, SHARED, "two")
        assert one.bodies() == numbered(30)
        one.ack("3")
        one.leave()
        await settle()
        assert two.counts() == [(body, 0) for body in numbered(30) if body != "3"]

    run(scenario)


def test_an_exclusive_rewind_comes_with_the_new_epoch() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(5))
        client = Client(await topic.subscription(), EXCLUSIVE, permits=3, epoch=0)
        await settle()
        assert client.bodies() == ["0", "1", "2"]
        client.ack("0")
        client.consumer.flow(10)
        await settle()  # two more are in the outbox, unseen: they are taken back
        client.subscription.redeliver(client.consumer, epoch=1)
        client.got.clear()
        await settle()
        assert client.bodies() == ["1", "2", "3", "4"]
        assert {(each.consumer_epoch, each.redelivery_count) for each in client.got} == {(1, 0)}
        assert client.consumer.permits == 13 - 3 - 4

    run(scenario)


def test_failover_switches_after_a_pause_and_tells_everybody() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        low = Client(subscription, FAILOVER, "low", priority=1)
        await topic.publish(*numbered(4))
        await settle()
        assert low.bodies() == numbered(4)
        assert low.news == [News.ACTIVE]
        high = Client(subscription, FAILOVER, "high", priority=0)
        low.ack("0", "1")  # in time: the new one does not get them
        await settle()
        assert high.bodies() == []
        await asyncio.sleep(topic.limits.failover_switch_seconds + 0.001)
        await settle()
        assert high.bodies() == ["2", "3"]
        low.take()
        assert (low.news, high.news) == ([News.ACTIVE, News.INACTIVE], [News.ACTIVE])
        third = Client(subscription, FAILOVER, "third", priority=2)
        third.take()
        assert third.news == [News.INACTIVE]
        high.leave()
        await settle()
        assert low.bodies()[4:] == ["2", "3"]
        assert low.news[-1] is News.ACTIVE
        assert third.bodies() == []

    run(scenario)


@pytest.mark.slow
def test_keys_keep_their_order_while_consumers_come_and_go() -> None:
    for seed in range(12):
        limits = Limits().override({"subscription_look_ahead_entries": 30})
        run(lambda topic, seed=seed: _key_churn(topic, seed), limits)  # type: ignore[misc]


async def _key_churn(topic: Topic, seed: int) -> None:
    rng = random.Random(seed)
    subscription = await topic.subscription()
    clients = [Client(subscription, KEY_SHARED, "c0", permits=5)]
    unacked: dict[str, tuple[Client, str]] = {}
    acked: dict[str, list[int]] = {}
    published = 0

    def take(client: Client) -> None:
        for each in client.take():
            key, body = key_of(each), body_of(each)
            missing = set(range(int(key[1:]), published, 7)) - set(acked.get(key, ()))
            missing -= {int(other) for other, (_, of) in unacked.items() if of == key}
            assert int(body) == min(missing), f"seed {seed}: key {key} is out of order"
            holder = next((who for who, of in unacked.values() if of == key), client)
            assert holder is client, f"seed {seed}: key {key} is at two consumers"
            unacked[body] = (client, key)

    for step in range(400):
        action = rng.random()
        client = rng.choice(clients)
        if action < 0.3 and published < 200:
            await topic.publish(str(published), key=f"k{published % 7}")
            published += 1
        elif action < 0.35 and len(clients) < 5:
            clients.append(Client(subscription, KEY_SHARED, f"c{step}", permits=5))
        elif action < 0.4 and len(clients) > 1:
            clients.remove(client)
            client.leave()
            unacked = {body: held for body, held in unacked.items() if held[0] is not client}
        elif action < 0.6:
            client.consumer.flow(rng.randint(1, 3))
        else:
            _ack_some(client, unacked, acked, rng)
        await settle(8)
        for each in clients:
            take(each)
    for _ in range(600):
        for each in clients:
            each.consumer.flow(5)
            _ack_some(each, unacked, acked, rng)
        await settle(8)
        for each in clients:
            take(each)
    everything = sorted(number for numbers in acked.values() for number in numbers)
    assert everything == list(range(published)), f"seed {seed}"
    assert subscription.backlog() == 0


def _ack_some(
    client: Client,
    unacked: dict[str, tuple[Client, str]],
    acked: dict[str, list[int]],
    rng: random.Random,
) -> None:
    mine = [body for body, (who, _) in unacked.items() if who is client]
    for body in mine[: rng.randint(0, 3)]:
        client.ack(body)
        acked.setdefault(unacked.pop(body)[1], []).append(int(body))


def test_a_key_waits_until_its_former_consumer_has_acknowledged() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        one = Client(subscription, KEY_SHARED, "one")
        keys = [f"k{number}" for number in range(20)]
        for key in keys:
            await topic.publish(f"{key}-0", key=key)
        await settle()
        assert len(one.bodies()) == 20
        two = Client(subscription, KEY_SHARED, "two")
        for key in keys:
            await topic.publish(f"{key}-1", key=key)
        await settle()
        assert two.bodies() == []
        moved = [key for key in keys if f"{key}-1" not in one.bodies()]
        assert 0 < len(moved) < len(keys)
        one.ack(*(f"{key}-0" for key in moved))
        await settle()
        assert sorted(two.bodies()) == sorted(f"{key}-1" for key in moved)

    run(scenario)


def test_sticky_consumers_get_their_ranges() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        low = KeySharedPolicy.sticky([(0, 32767)])
        high = KeySharedPolicy.sticky([(32768, 65535)])
        one = Client(subscription, KEY_SHARED, "one", key_shared=low)
        two = Client(subscription, KEY_SHARED, "two", key_shared=high)
        for number in range(40):
            await topic.publish(str(number), key=f"k{number}")
        await settle()
        assert one.bodies()
        assert two.bodies()
        assert sorted(one.bodies() + two.bodies(), key=int) == numbered(40)

    run(scenario)


def test_unacked_limits_stop_dispatch_until_half_is_acknowledged() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(30))
        client = Client(await topic.subscription(), SHARED)
        await settle()
        assert client.bodies() == numbered(10)
        assert client.consumer.blocked
        client.ack(*numbered(4))
        await settle()
        assert len(client.bodies()) == 10
        client.ack("4")
        await settle()
        assert client.bodies() == numbered(15)

    run(scenario, Limits().override({"consumer_unacked_messages": 10}))


def test_a_consumer_that_takes_nothing_holds_little() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        slow = Client(subscription, SHARED, "slow")
        fast = Client(subscription, SHARED, "fast", permits=10_000)
        for start in range(0, 300, 10):
            await topic.publish(*(f"{number:0100}" for number in range(start, start + 10)))
            await settle(8)
            fast.take()
        limits = topic.limits
        room = limits.consumer_outbox_bytes + limits.subscription_read_bytes
        assert slow.consumer.outbox_bytes <= room
        assert len(fast.got) + slow.consumer.outbox_entries == 300

    small = {"consumer_outbox_bytes": 1000, "subscription_read_bytes": 1000}
    run(scenario, Limits().override(small))


def test_a_damaged_entry_stops_dispatch_until_it_is_skipped() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(4))
        bad = topic.ledger.first_position()._replace(entry_id=1)
        whole_read = topic.ledger.read
        attempts = 0

        async def damaged(position: Position, entries_max: int, bytes_max: int) -> object:
            nonlocal attempts
            attempts += 1
            if position == bad:
                raise CorruptEntry(f"{position} is damaged")
            most = 1 if position < bad else entries_max
            return await whole_read(position, most, bytes_max)

        subscription = await topic.subscription()
        subscription.cursor._read = damaged  # type: ignore[assignment]
        client = Client(subscription, EXCLUSIVE)
        await settle()
        assert client.bodies() == ["0"]
        assert isinstance(subscription.failure, CorruptEntry)
        before = attempts
        await topic.publish("4")
        await settle()
        assert attempts == before
        client.ack("0")
        assert await subscription.skip(1) == 1
        await settle()
        assert subscription.failure is None
        assert client.bodies() == ["0", "2", "3", "4"]

    run(scenario)


def test_others_have_turns_while_hidden_entries_are_passed_over() -> None:
    """A consumer with one permit reads them one by one, and what is in memory is not waited for."""

    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(2 * SLICE_ITEMS + 1))
        first = topic.ledger.first_position()
        entries = await topic.ledger.read(first, 10_000, 10**9)
        topic.hidden = {entry.position for entry in entries[:-1]}
        subscription = await topic.subscription()
        reads = 0

        async def in_memory(position: Position, entries_max: int, bytes_max: int) -> object:
            nonlocal reads
            reads += 1
            at = position.entry_id - first.entry_id
            return entries[at : at + entries_max]

        subscription.cursor._read = in_memory  # type: ignore[assignment]
        client = Client(subscription, SHARED, permits=1)
        most = 0
        while not client.bodies():
            before = reads
            await asyncio.sleep(0)
            most = max(most, reads - before)
        assert reads == len(entries)
        assert most <= SLICE_ITEMS

    run(scenario)


def test_the_end_of_a_terminated_topic_is_told_once_it_is_drained() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("a", "b")
        client = Client(await topic.subscription(), SHARED)
        await settle()
        await topic.ledger.seal()
        topic.wake()
        client.ack("a")
        await settle()
        assert client.consumer.take_news() == []
        client.ack("b")
        await settle()
        assert client.consumer.take_news() == [News.REACHED_END]
        late = Client(client.subscription, SHARED, "late")
        await settle()
        assert late.consumer.take_news() == [News.REACHED_END]

    run(scenario)


# --- limits of policies


def test_a_subscription_follows_other_limits_of_unacknowledged_messages() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(10))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        assert client.bodies() == numbered(4)
        assert client.consumer.blocked
        # Higher, and it goes on; lower, and nobody gets more until half is acknowledged.
        topic.policies = TopicPolicies(max_unacked_per_consumer=8)
        subscription.limits_changed()
        await settle()
        assert client.bodies() == numbered(8)
        topic.policies = TopicPolicies(max_unacked_per_subscription=2)
        subscription.limits_changed()
        assert subscription.stats().blocked_subscription_on_unacked_msgs
        client.ack(*numbered(6))
        await settle()
        assert client.bodies() == numbered(8)
        client.ack("6")
        await settle()
        assert client.bodies() == numbered(9)
        topic.policies = TopicPolicies()
        subscription.limits_changed()
        await settle()
        assert client.bodies() == numbered(10)

    run(scenario, Limits().override({"consumer_unacked_messages": 4}))


# --- non-persistent topics


class TransientTopic(NamedTuple):
    name: TopicName = TopicName.parse("non-persistent://public/default/t")
    policies: TopicPolicies = TopicPolicies()
    consumers: int = 0


def _transient(world: MemoryWorld) -> NonPersistentSubscription:
    return NonPersistentSubscription(
        TransientTopic(),
        "s",
        clock=world.clock,
        limits=Limits(),
    )


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_a_transient_subscription_delivers_or_drops(type_: SubscriptionType) -> None:
    async def main() -> None:
        subscription = _transient(MemoryWorld())
        assert not subscription.publish(b"nobody")
        consumer = subscription.add_consumer(options_of(type_, durable=False))
        assert not subscription.publish(b"no permits")
        consumer.flow(2)
        assert [subscription.publish(b"m%d" % number) for number in range(4)] == [
            *(True, True),
            *(False, False),
        ]
        assert [each.payload for each in consumer.take()] == [b"m0", b"m1"]
        assert (subscription.dropped, consumer.unacked, subscription.backlog()) == (4, 0, 0)
        consumer.flow(1)
        assert subscription.publish(b"m4")
        assert consumer.unacked == 0
        subscription.remove_consumer(consumer)
        assert not subscription.publish(b"gone")

    virtual_time.run(main())


def test_transient_failover_goes_on_with_the_next_consumer() -> None:
    async def main() -> None:
        subscription = _transient(MemoryWorld())
        one = subscription.add_consumer(options_of(FAILOVER, "one", durable=False))
        two = subscription.add_consumer(options_of(FAILOVER, "two", durable=False))
        for consumer in (one, two):
            consumer.flow(10)
        assert subscription.publish(b"a")
        active = subscription.active_consumer
        other = two if active is one else one
        assert active is not None
        subscription.remove_consumer(active)
        assert subscription.publish(b"b")
        assert [each.payload for each in other.take()] == [b"b"]

    virtual_time.run(main())
