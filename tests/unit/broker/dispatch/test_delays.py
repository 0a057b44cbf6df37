"""Delayed delivery, on virtual time: who waits, until when, in which order, and what ends it."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from magnetar.broker.dispatch.delay_rule import DelayRule
from magnetar.broker.dispatch.delayed_index import DelayedIndex
from magnetar.broker.dispatch.dispatcher import Dispatcher
from magnetar.errors import CorruptEntry
from magnetar.ledger.api import Entry
from magnetar.model.hashing import FULL_RING
from magnetar.model.ids import Position
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy, SubscriptionType
from magnetar.runtime.limits import Limits
from magnetar.runtime.metrics import DELAYED_ENTRIES
from magnetar.testing.virtual import virtual_time
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    Client,
    Topic,
    numbered,
    open_topic,
    run,
    settle,
)
from tests.unit.managed_ledger.world import MemoryWorld

STRICT = DelayRule(strict=True)
LOOSE = DelayRule()


def waiting() -> float:
    """What the metric says, for all subscriptions of this process."""
    (sample,) = next(iter(DELAYED_ENTRIES.collect())).samples
    return sample.value


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
@pytest.mark.parametrize("rule", [LOOSE, STRICT])
def test_a_message_waits_for_its_time(type_: SubscriptionType, rule: DelayRule) -> None:
    async def scenario(topic: Topic) -> None:
        topic.delays = rule
        subscription = await topic.subscription()
        client = Client(subscription, type_, permits=2)
        await topic.publish("late", after=60)
        await topic.publish("now")
        await settle()
        assert client.bodies() == ["now"]
        stats = subscription.stats()
        assert (stats.msg_backlog, stats.msg_delayed, stats.msg_backlog_no_delayed) == (2, 1, 1)
        assert stats.delayed_message_index_size_in_bytes > 0
        # It uses no permits and is not unacknowledged.
        assert (client.consumer.permits, client.consumer.unacked) == (1, 1)
        await asyncio.sleep(58.5)
        assert client.bodies() == ["now"]
        await asyncio.sleep(1.5 if rule is LOOSE else 2.5)
        assert client.counts() == [("now", 0), ("late", 0)]
        assert subscription.stats().msg_delayed == 0

    before = waiting()
    run(scenario)
    assert waiting() == before


@pytest.mark.parametrize("strict", [True, False])
def test_each_comes_within_a_tick_of_its_time(strict: bool) -> None:
    async def scenario(topic: Topic) -> None:
        topic.delays = DelayRule(strict=strict)
        client = Client(await topic.subscription(), SHARED)
        random, due = Random(4), {}
        now = topic.world.clock.now_ms
        for number in range(300):
            after = random.choice((0.0, 0.4, 1.0, random.uniform(0, 30)))
            due[str(number)] = now() + round(after * 1000)
            await topic.publish(str(number), after=after)
        seen: set[str] = set()
        for _ in range(1650):
            await settle(2)
            for body in set(client.bodies()) - seen:
                seen.add(body)
                late_ms = now() - due[body]
                assert (0 if strict else -1000) <= late_ms <= (540 if strict else 30)
            await asyncio.sleep(0.02)
        assert len(client.bodies()) == len(seen) == 300

    run(scenario)


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER])
def test_who_has_an_order_is_served_at_once(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), type_)
        await topic.publish("late", after=60)
        await topic.publish("now")
        await settle()
        assert client.bodies() == ["late", "now"]

    run(scenario)


def test_stream_consumers_that_share_by_entry_buckets_are_served_at_once() -> None:
    async def scenario(topic: Topic) -> None:
        policy = KeySharedPolicy(KeySharedMode.STICKY, (FULL_RING,), entry_buckets=True)
        client = Client(await topic.subscription(), KEY_SHARED, key_shared=policy)
        await topic.publish("late", after=60, key="k")
        await settle()
        assert client.bodies() == ["late"]

    run(scenario)


def test_an_inactive_policy_lets_all_go_at_once() -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), SHARED)
        await topic.publish("late", after=60)
        await settle()
        assert client.bodies() == []
        topic.delays = DelayRule(active=False)
        topic.wake()
        await settle()
        await topic.publish("later", after=60)
        await settle()
        assert client.bodies() == ["late", "later"]

    run(scenario)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_due_messages_go_before_new_ones_in_the_order_of_the_log(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), type_, permits=1)
        await topic.publish("first")
        await topic.publish("b", after=21)
        await topic.publish("c", after=20)
        await topic.publish("x")
        await settle()
        assert client.bodies() == ["first"]
        client.consumer.flow(1)
        await settle()
        assert client.bodies() == ["first", "x"]
        await asyncio.sleep(30)
        await topic.publish("new")
        await settle()
        client.consumer.flow(10)
        await settle()
        assert client.bodies() == ["first", "x", "b", "c", "new"]

    run(scenario)


def test_due_messages_join_those_that_wait_for_redelivery() -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), SHARED, permits=2)
        await topic.publish("a", after=5)
        await topic.publish("b", "d")
        await topic.publish("c", after=5)
        await settle()
        assert client.bodies() == ["b", "d"]
        await asyncio.sleep(10)
        client.nack("b", "d")
        await settle()
        client.consumer.flow(4)
        await settle()
        assert client.counts()[2:] == [("a", 0), ("b", 1), ("d", 1), ("c", 0)]

    run(scenario)


def test_a_message_that_was_delivered_is_not_delayed_again() -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), SHARED)
        await topic.publish("late", after=5)
        await asyncio.sleep(6)
        client.nack("late")
        await settle()
        assert client.counts() == [("late", 0), ("late", 1)]
        client.leave()
        other = Client(client.subscription, SHARED)
        await settle()
        assert other.counts() == [("late", 0)]

    run(scenario)


def test_a_key_of_equal_delays_keeps_its_order_and_its_consumer() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        clients = [Client(subscription, KEY_SHARED, name, permits=40) for name in "ab"]
        for number in range(40):
            await topic.publish(str(number), key=f"k{number % 7}", after=10)
            await asyncio.sleep(0.01)
        await topic.publish("now", key="k0")
        await asyncio.sleep(20)
        got = [client.bodies() for client in clients]
        assert sorted(got[0] + got[1], key=str) == sorted([*numbered(40), "now"])
        for key in range(7):
            mine = [str(number) for number in range(key, 40, 7)]
            assert [body for body in got[0] + got[1] if body in mine] == mine
            assert any(set(mine) <= set(each) for each in got)

    run(scenario)


def test_a_due_message_waits_until_its_key_is_free() -> None:
    """What the former consumer of a key has unacknowledged holds the key back (PIP-379)."""

    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        one = Client(subscription, KEY_SHARED, "one")
        await topic.publish("0", key="a")
        await topic.publish("late", key="a", after=5)
        await settle()
        assert one.bodies() == ["0"]
        others = [Client(subscription, KEY_SHARED, f"other{number}") for number in range(20)]
        await asyncio.sleep(10)
        assert all(not each.bodies() for each in others)
        one.ack("0")
        await settle()
        everything = [body for each in (one, *others) for body in each.bodies()]
        assert sorted(everything) == ["0", "late"]

    run(scenario)


def test_nothing_above_the_ceiling_begins_to_wait() -> None:
    """A delay starts to matter at the commit; past its time it is delivered then."""

    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        topic.end = topic.ledger.last_position()
        await topic.publish("soon", after=5)
        await topic.publish("late", after=50)
        await settle()
        assert subscription.stats().msg_delayed == 0
        await asyncio.sleep(10)
        assert client.bodies() == []
        topic.end = None
        topic.wake()
        await settle()
        assert client.bodies() == ["soon"]
        assert subscription.stats().msg_delayed == 1
        await asyncio.sleep(50)
        assert client.bodies() == ["soon", "late"]

    run(scenario)


def test_a_restart_knows_them_again() -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), SHARED)
        await topic.publish("late", after=60)
        await topic.publish("now", "too")
        await settle()
        client.ack("now")
        topic = await topic.reopened()
        subscription = await topic.subscription()
        assert subscription.stats().msg_delayed == 0  # until somebody reads
        client = Client(subscription, SHARED)
        await settle()
        assert client.bodies() == ["too"]
        assert subscription.stats().msg_delayed == 1
        await asyncio.sleep(61)
        assert client.bodies() == ["too", "late"]
        await topic.close()

    async def main() -> None:
        await scenario(await open_topic(MemoryWorld()))

    virtual_time.run(main())


def test_skips_seeks_and_removal_clear_it() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await topic.publish(*numbered(4), after=60)
        await settle()
        assert subscription.stats().msg_delayed == 4
        await subscription.skip(1)
        assert subscription.stats().msg_delayed == 3
        subscription.skip_all()
        assert subscription.stats().msg_delayed == 0
        await asyncio.sleep(100)
        assert client.bodies() == []
        await topic.publish("more", after=60)
        await settle()
        first = topic.ledger.first_position()
        await subscription.seek(first)
        assert subscription.stats().msg_delayed == 0
        client = Client(subscription, SHARED)
        await settle()
        assert client.bodies() == numbered(4)
        assert subscription.stats().msg_delayed == 1
        client.leave()
        await subscription.unsubscribe()
        assert subscription.stats().msg_delayed == 0
        del topic.subscriptions["s"]

    run(scenario)


def test_many_that_are_equally_late_are_not_all_read() -> None:
    async def scenario(topic: Topic) -> None:
        topic.delays = DelayRule(fixed_delay_entries=10)
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        for number in range(40):
            await topic.publish(str(number), after=60)
            await asyncio.sleep(1)
        assert subscription.stats().msg_delayed == 10
        await asyncio.sleep(25)
        assert 0 < len(client.bodies()) < 40
        await asyncio.sleep(60)
        assert client.bodies() == numbered(40)

    run(scenario)


def test_no_more_wait_than_the_limit() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        for number in range(20):
            await topic.publish(str(number), after=60 - 2 * number)
        await settle()
        assert subscription.stats().msg_delayed == 10
        await asyncio.sleep(70)
        assert sorted(client.bodies(), key=int) == numbered(20)

    run(scenario, Limits().override({"subscription_delayed_entries": 10}))


def test_few_permits_do_not_make_small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    serve_new = Dispatcher._serve_new

    async def counted(dispatcher: Dispatcher, entries_max: int) -> bool:
        reads.append(entries_max)
        return await serve_new(dispatcher, entries_max)

    monkeypatch.setattr(Dispatcher, "_serve_new", counted)

    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(1000), after=60)
        await topic.publish("now", "then")
        client = Client(await topic.subscription(), SHARED, permits=1)
        await settle(200)
        assert client.bodies() == ["now"]
        assert len(reads) < 20
        client.consumer.flow(1)
        await settle()
        assert client.bodies() == ["now", "then"]

    run(scenario)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_while_all_wait_nothing_runs(
    type_: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    step = Dispatcher._step

    async def counted(dispatcher: Dispatcher) -> bool:
        steps.append(1)
        return await step(dispatcher)

    monkeypatch.setattr(Dispatcher, "_step", counted)

    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), type_, permits=3)
        for number in range(10):
            await topic.publish(str(number), after=3600)
        await settle()
        steps.clear()
        await asyncio.sleep(3500)
        assert len(steps) <= 60  # a look a minute
        await asyncio.sleep(200)
        assert len(client.bodies()) == 3
        steps.clear()
        await asyncio.sleep(10_000)  # due, but nobody takes them
        assert len(steps) <= 2
        client.consumer.flow(10)
        await settle()
        assert sorted(client.bodies()) == numbered(10)

    run(scenario)


def test_a_failed_read_of_a_due_message_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = Client(subscription, KEY_SHARED)
        await topic.publish("late", after=5, key="k")
        await settle()
        read = topic.ledger.read

        async def broken(*_: object) -> list[Entry]:
            raise CorruptEntry("damaged")

        monkeypatch.setattr(topic.ledger, "read", broken)
        await asyncio.sleep(10)
        assert subscription.failure is not None
        assert subscription.stats().msg_delayed == 1
        monkeypatch.setattr(topic.ledger, "read", read)
        subscription._dispatcher.resume()
        await settle()
        assert client.bodies() == ["late"]

    run(scenario)


def test_the_end_is_told_when_the_last_of_them_is_acknowledged() -> None:
    async def scenario(topic: Topic) -> None:
        client = Client(await topic.subscription(), SHARED)
        await topic.publish("late", after=60)
        await topic.ledger.seal()
        topic.wake()
        await settle()
        client.take()
        assert not client.news
        await asyncio.sleep(61)
        assert client.bodies() == ["late"]
        client.ack("late")
        await settle()
        client.take()
        assert [each.value for each in client.news] == ["reached-end"]

    run(scenario)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
@pytest.mark.parametrize("seed", range(4))
def test_each_comes_once_and_not_early_whatever_happens(type_: SubscriptionType, seed: int) -> None:
    """Consumers come and go, ask again, acknowledge and run out of permits."""

    async def scenario(topic: Topic) -> None:
        random, subscription = Random(seed), await topic.subscription()
        now, due = topic.world.clock.now_ms, dict[str, int]()
        acked: set[str] = set()
        clients: list[Client] = []
        for number in range(600):
            kind = random.random()
            if kind < 0.5:
                after = random.choice((None, 0.1, 3.0, random.uniform(0, 20)))
                due[str(number)] = now() + round((after or 0) * 1000)
                await topic.publish(str(number), after=after, key=f"k{number % 5}")
            elif kind < 0.6 and len(clients) < 3:
                clients.append(Client(subscription, type_, f"c{number}", permits=3))
            elif kind < 0.64 and clients:
                clients.pop(random.randrange(len(clients))).leave()
            elif clients:
                client = random.choice(clients)
                bodies = set(client.bodies()) - acked
                for body in bodies:
                    assert now() >= due[body] - 1000
                some = [body for body in sorted(bodies) if random.random() < 0.5]
                if kind < 0.7:
                    client.nack(*some)
                else:
                    client.ack(*some)
                    acked.update(some)
                client.consumer.flow(random.randrange(1, 5))
            await asyncio.sleep(random.choice((0, 0.01, 0.5)))
        for client in clients:
            client.leave()
        last = Client(subscription, type_, "last", permits=10_000)
        await asyncio.sleep(40)
        assert sorted(last.bodies(), key=int) == sorted(due.keys() - acked, key=int)

    run(scenario)


def test_without_the_rule_they_come_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see it: an index that says too early that something is due."""

    def at_once(index: DelayedIndex, count: int, now_ms: int, rule: DelayRule) -> list[Position]:
        return first_due(index, count, now_ms + 3_600_000, rule)

    first_due = DelayedIndex.first_due
    monkeypatch.setattr(DelayedIndex, "first_due", at_once)
    with pytest.raises(AssertionError):
        test_a_message_waits_for_its_time(SHARED, LOOSE)
