"""Subscriptions: who gets in, acknowledgements, seeks, operators' moves, restarts, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.subscribe import subscription
from magnetar.broker.subscribe.ack import Ack
from magnetar.broker.subscribe.subscription import Subscription, first_mark_delete
from magnetar.errors import (
    ConsumerAssign,
    ConsumerBusy,
    ConsumerNotFound,
    NotAllowed,
    ServiceNotReady,
)
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import EARLIEST as EARLIEST_ID
from magnetar.model.ids import LATEST, MessageId, Position
from magnetar.model.subscriptions import KeySharedPolicy, SubscriptionType
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
    options_of,
    run,
    settle,
)
from tests.unit.managed_ledger.world import MemoryWorld

# --- who gets in


def test_an_exclusive_subscription_has_one_consumer() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = Client(subscription, EXCLUSIVE)
        with pytest.raises(ConsumerBusy):
            Client(subscription, EXCLUSIVE, "second")
        client.leave()
        client.leave()
        Client(subscription, EXCLUSIVE, "third")
        assert [each.name for each in subscription.consumers] == ["third"]

    run(scenario)


def test_the_type_may_change_only_while_nobody_is_connected() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        assert subscription.type is None
        client = Client(subscription, SHARED)
        with pytest.raises(ConsumerBusy):
            Client(subscription, FAILOVER)
        client.leave()
        Client(subscription, FAILOVER)
        assert subscription.type is FAILOVER

    run(scenario)


def test_key_shared_policies_must_agree() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        taken = KeySharedPolicy.sticky([(0, 100)])
        Client(subscription, KEY_SHARED, "a", key_shared=taken)
        with pytest.raises(ConsumerAssign):
            Client(subscription, KEY_SHARED, "b", key_shared=KeySharedPolicy.sticky([(100, 200)]))
        with pytest.raises(ConsumerBusy):
            Client(subscription, KEY_SHARED, "c", key_shared=KeySharedPolicy())
        assert len(subscription.consumers) == 1

    run(scenario)


def test_durability_must_agree() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        with pytest.raises(NotAllowed):
            subscription.add_consumer(options_of(EXCLUSIVE, durable=False))

    run(scenario)


# --- acknowledging


@pytest.mark.parametrize("type_", [EXCLUSIVE, FAILOVER])
def test_a_cumulative_ack_covers_everything_before(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(5))
        subscription = await topic.subscription()
        client = Client(subscription, type_)
        await settle()
        client.ack("2", cumulative=True)
        assert subscription.backlog() == 2
        client.leave()
        after = Client(subscription, type_)
        await settle()
        assert after.bodies() == ["3", "4"]

    run(scenario)


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED])
def test_a_cumulative_ack_is_ignored_where_consumers_share(type_: SubscriptionType) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(5))
        subscription = await topic.subscription()
        client = Client(subscription, type_)
        await settle()
        client.ack("2", cumulative=True)
        assert subscription.backlog() == 5

    run(scenario)


def test_runs_and_holes_are_acknowledged_alike() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(10))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        client.ack("5", "6", "8", "0", "1", "2", "4")
        subscription.cursor.check_invariants()
        assert subscription.backlog() == 3
        assert client.consumer.unacked == 3
        client.leave()
        after = Client(subscription, SHARED)
        await settle()
        assert after.bodies() == ["3", "7", "9"]

    run(scenario)


# First entry, how many follow one another, and the messages of a batch that are left.
ACKED = st.tuples(st.integers(-2, 24), st.integers(1, 9), st.sampled_from([0, 0, 0, 0b10]))


@given(st.lists(st.lists(ACKED, min_size=1, max_size=3), max_size=5))
def test_a_run_is_acknowledged_as_each_of_its_entries(commands: list[list[Any]]) -> None:
    """The same commands with runs as one step, and one by one; some entries do not exist."""

    def acknowledged(run_entries_min: int) -> list[object]:
        found: list[object] = []

        async def scenario(topic: Topic) -> None:
            await topic.publish(*numbered(20), messages=2)
            ledger_id = topic.ledger.last_position().ledger_id
            opened = await topic.subscription()
            client = Client(opened, SHARED)
            await settle()
            client.take()
            for command in commands:
                acks = [
                    Ack(Position(ledger_id, first + number), left if number == count - 1 else 0)
                    for first, count, left in command
                    for number in range(count)
                ]
                opened.ack(client.consumer, acks)
                opened.cursor.check_invariants()
                entries = [Position(ledger_id, number) for number in range(20)]
                found.extend(
                    [
                        opened.cursor.mark_delete,
                        opened.backlog(),
                        client.consumer.unacked,
                        [opened.cursor.is_acked(each) for each in entries],
                        [opened.cursor.unacked_indexes(each) for each in entries],
                    ]
                )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subscription, "_RUN_ENTRIES_MIN", run_entries_min)
            run(scenario)
        return found

    assert acknowledged(2) == acknowledged(1000)


def test_an_ack_may_come_from_another_consumer_of_the_subscription() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("a")
        subscription = await topic.subscription()
        one = Client(subscription, SHARED, "one")
        await settle()
        two = Client(subscription, SHARED, "two")
        subscription.ack(two.consumer, [Ack(one.position_of("a"))])
        assert subscription.backlog() == one.consumer.unacked == 0

    run(scenario)


def test_the_rest_of_a_partly_acknowledged_batch_comes_back() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("batch", messages=4)
        await topic.publish("next")
        subscription = await topic.subscription()
        client = Client(subscription, SHARED, permits=10)
        await settle()
        assert client.bodies() == ["batch", "next"]
        assert client.consumer.unacked == 5
        client.ack("batch", unacked=0b1010)
        assert client.consumer.unacked == 3
        client.nack("batch")
        await settle()
        again = client.take()[0]
        assert (again.ack_set, again.num_messages) == ((0b1010,), 2)
        assert (again.redelivery_count, client.consumer.permits) == (1, 10 - 5 - 2)
        client.ack("batch", unacked=0b1000)
        client.ack("batch", unacked=0b0111)  # what is left of both is nothing
        assert client.consumer.unacked == 1
        assert subscription.backlog() == 1

    run(scenario)


def test_ack_durable_groups_its_writes() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(20))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        for body in numbered(20):
            client.ack(body)
        await asyncio.gather(*(subscription.ack_durable() for _ in range(20)))
        assert not subscription.cursor.dirty
        assert subscription.cursor._written == 1

    run(scenario)


# --- restarts


@pytest.mark.parametrize("type_", list(SubscriptionType))
def test_consumers_resume_where_they_were(type_: SubscriptionType) -> None:
    async def main() -> None:
        topic = await open_topic(MemoryWorld())
        await topic.publish(*numbered(6))
        await topic.publish("batch", messages=3)
        client = Client(await topic.subscription(), type_)
        await settle()
        client.ack("0", "1", "3")
        client.ack("batch", unacked=0b100)
        again = await topic.reopened()
        assert client.consumer.is_stopped
        client = Client(await again.subscription(), type_)
        await settle()
        if type_ is KEY_SHARED:
            assert sorted(client.bodies()) == ["2", "4", "5", "batch"]
        else:
            assert client.bodies() == ["2", "4", "5", "batch"]
        rest = next(each for each in client.got if each.ack_set)
        assert (rest.ack_set, rest.num_messages) == ((0b100,), 1)
        await again.close()

    virtual_time.run(main())


def test_acks_that_were_durable_survive_a_kill() -> None:
    async def main() -> None:
        world = MemoryWorld()
        broker = world.broker()
        topic = Topic(world, await world.open(broker), (await open_topic(MemoryWorld())).limits)
        await topic.publish(*numbered(4))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        client.ack("1", "2")
        await subscription.ack_durable()
        client.ack("3")  # without a receipt: it may come again
        world.kill(broker)
        again = await open_topic(world)
        after = Client(await again.subscription(), SHARED)
        await settle()
        assert after.bodies() == ["0", "3"]
        await again.close()

    virtual_time.run(main())


# --- seeking and operators' moves


def test_a_seek_closes_the_consumers_and_begins_at_the_entry() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(6))
        subscription = await topic.subscription()
        client = Client(subscription, EXCLUSIVE)
        await settle()
        target = client.position_of("2")
        client.ack("5", cumulative=True)
        await subscription.seek(target)
        assert isinstance(client.consumer.error, ServiceNotReady)
        assert client.consumer.stopped.version == 1
        with pytest.raises(ConsumerNotFound):
            client.ack("5", cumulative=True)
        after = Client(subscription, EXCLUSIVE)
        await settle()
        assert after.bodies() == ["2", "3", "4", "5"]

    run(scenario)


@pytest.mark.parametrize(
    ("target", "expected"), [(EARLIEST_ID, ["0", "1", "2", "new"]), (LATEST, ["new"])]
)
def test_a_seek_to_an_end(target: MessageId, expected: list[str]) -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(3))
        subscription = await topic.subscription()
        await subscription.seek(target.position)
        client = Client(subscription, SHARED)
        await topic.publish("new")
        await settle()
        assert client.bodies() == expected

    run(scenario)


def test_a_seek_into_a_batch() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("batch", "other", messages=3)
        subscription = await topic.subscription()
        await subscription.seek(topic.ledger.first_position(), unacked=0b110)
        client = Client(subscription, EXCLUSIVE)
        await settle()
        assert [(each.ack_set, each.num_messages) for each in client.take()] == [
            ((0b110,), 2),
            ((), 3),
        ]

    run(scenario)


def test_a_seek_by_time() -> None:
    async def scenario(topic: Topic) -> None:
        clock = topic.world.clock
        for body in numbered(5):
            await topic.publish(body)
            await clock.sleep(10)
        middle = clock.now_ms() - 30_000
        subscription = await topic.subscription()
        await subscription.seek_time(middle)
        client = Client(subscription, EXCLUSIVE)
        await settle()
        assert client.bodies() == ["2", "3", "4"]
        await subscription.seek_time(clock.now_ms() + 1)
        client = Client(subscription, EXCLUSIVE)
        await topic.publish("later")
        await settle()
        assert client.bodies() == ["later"]

    run(scenario)


def test_during_a_seek_nobody_gets_in_and_a_second_one_is_refused() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(3))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        seeking = asyncio.ensure_future(subscription.seek(client.position_of("0")))
        await asyncio.sleep(0)
        with pytest.raises(ServiceNotReady):
            Client(subscription, SHARED)
        with pytest.raises(ServiceNotReady):
            await subscription.seek(Position(0, 0))
        await seeking
        after = Client(subscription, SHARED)
        await settle()
        assert after.bodies() == numbered(3)

    run(scenario)


def test_a_seek_while_a_read_is_under_way() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(4))
        subscription = await topic.subscription()
        last = topic.ledger.last_position()
        for turns in range(8):
            client = Client(subscription, SHARED)
            await settle(turns)
            await subscription.seek(last._replace(entry_id=turns % 4))
            assert client.take() == []
            client = Client(subscription, SHARED)
            await settle()
            assert client.bodies() == numbered(4)[turns % 4 :]
            client.leave()
            await subscription.seek(EARLIEST_ID.position)

    run(scenario)


def test_skip_and_peek_and_clear() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(8))
        subscription = await topic.subscription()
        client = Client(subscription, SHARED, permits=3)
        await settle()
        client.ack("1")
        peeked = await subscription.peek(2)
        assert peeked is not None
        assert peeked.position == client.position_of("2")
        assert await subscription.peek(8) is None
        assert await subscription.skip(3) == 3  # 0, 2, 3: the first two are at the consumer
        assert client.consumer.unacked == 0
        client.consumer.flow(2)
        await settle()
        assert client.bodies() == ["0", "1", "2", "4", "5"]
        subscription.skip_all()
        assert subscription.backlog() == client.consumer.unacked == 0
        client.consumer.flow(10)
        await topic.publish("new")
        await settle()
        assert client.bodies()[5:] == ["new"]
        assert await subscription.skip(5) == 1

    run(scenario)


def test_expiry_acknowledges_what_is_older() -> None:
    async def scenario(topic: Topic) -> None:
        for body in numbered(4):
            await topic.publish(body)
            await topic.world.clock.sleep(10)
        subscription = await topic.subscription()
        await subscription.expire(25)
        assert subscription.backlog() == 2
        client = Client(subscription, EXCLUSIVE)
        await settle()
        assert client.bodies() == ["2", "3"]
        await subscription.expire(1)
        assert subscription.backlog() == 0

    run(scenario)


def test_the_last_one_gone_forgets_redelivery_counts() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish("a", "b")
        subscription = await topic.subscription()
        client = Client(subscription, SHARED)
        await settle()
        client.nack("a")
        await settle()
        client.ack("b")
        client.leave()
        after = Client(subscription, SHARED)
        await settle()
        assert after.counts() == [("a", 0)]

    run(scenario)


# --- readers


def test_a_reader_begins_with_the_entry_of_its_start_and_is_not_stored() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(4))
        second = topic.ledger.first_position()._replace(entry_id=1)
        plain = MessageId(second.ledger_id, second.entry_id)
        in_batch = MessageId(second.ledger_id, second.entry_id, batch_index=0)
        expected = ["1", "2", "3"]
        for name, start in (("r1", plain), ("r2", in_batch)):
            subscription = await topic.subscription(name, durable=False, start=start)
            assert not subscription.durable
            client = Client(subscription, EXCLUSIVE)
            await settle()
            assert client.bodies() == expected
            client.ack(expected[-1], cumulative=True)
            await subscription.ack_durable()
            assert subscription.backlog() == 0
        assert topic.ledger.cursor_names() == []

    run(scenario)


def test_where_a_new_subscription_begins() -> None:
    last = Position(7, 3)
    options = options_of(EXCLUSIVE)
    assert first_mark_delete(options, last) == EARLIEST
    start = MessageId(5, 0, batch_index=2)
    assert first_mark_delete(options_of(EXCLUSIVE, durable=False, start=start), last) == (5, -1)


# --- the end


def test_unsubscribing_needs_to_be_alone_or_force() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        one = Client(subscription, SHARED, "one")
        two = Client(subscription, SHARED, "two")
        with pytest.raises(ConsumerBusy):
            await subscription.unsubscribe(by=one.consumer)
        two.leave()
        with pytest.raises(ConsumerBusy):
            await subscription.unsubscribe()
        await subscription.unsubscribe(by=one.consumer)
        assert one.consumer.is_stopped
        assert topic.ledger.cursor_names() == []
        with pytest.raises(ServiceNotReady):
            Client(subscription, SHARED)
        forced = await topic.subscription()
        Client(forced, SHARED)
        await forced.unsubscribe(force=True)
        assert topic.ledger.cursor_names() == []
        del topic.subscriptions["s"]

    run(scenario)


def test_statistics() -> None:
    async def scenario(topic: Topic) -> None:
        await topic.publish(*numbered(3))
        subscription: Subscription = await topic.subscription()
        client = Client(subscription, SHARED, permits=2)
        await settle()
        stats = subscription.stats()
        assert (stats.type, stats.msg_backlog, stats.unacked_messages) == ("Shared", 3, 2)
        assert (stats.msg_out_counter, stats.is_durable) == (2, True)
        assert stats.consumers[0].available_permits == 0
        client.leave()
        after = subscription.stats()
        assert (after.msg_out_counter, after.consumers, after.unacked_messages) == (2, [], 0)

    run(scenario)
