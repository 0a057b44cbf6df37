"""Consumers that share a topic by its entry buckets: who may join, who has what, order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.key_shared import AssignRefused, EntryBuckets, Moved
from magnetar.broker.subscribe.subscription import Subscription
from magnetar.client.connection.server_errors import is_other_type
from magnetar.errors import ConsumerAssign, ConsumerBusy, NotAllowed
from magnetar.model.hashing import FULL_RING, HASH_MAX, RING_SIZE, HashRange, bucket_hash, key_hash
from magnetar.model.subscriptions import KeySharedMode, KeySharedPolicy
from magnetar.runtime.limits import Limits
from tests.unit.broker.subscription_world import (
    EXCLUSIVE,
    KEY_SHARED,
    SHARED,
    Client,
    Topic,
    body_of,
    key_of,
    run,
    settle,
)


def buckets(count: int) -> list[tuple[int, int]]:
    bounds = [index * RING_SIZE // count for index in range(count + 1)]
    return [(start, end - 1) for start, end in pairwise(bounds)]


def sharing(count: int) -> EntryBuckets:
    return EntryBuckets(KeySharedPolicy.bucketed(buckets(count)).ranges)


# --- what a consumer may declare


def test_the_first_bucket_may_leave_position_0_out() -> None:
    assert KeySharedPolicy.bucketed([(1, HASH_MAX)]).ranges == (FULL_RING,)
    shuffled = KeySharedPolicy.bucketed([(100, HASH_MAX), (1, 99)])
    assert shuffled == KeySharedPolicy.bucketed([(0, 99), (100, HASH_MAX)])
    assert shuffled.entry_buckets


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ([], "at least one"),
        ([(2, HASH_MAX)], "positions 0 and 1"),
        ([(0, 0), (1, HASH_MAX)], "positions 0 and 1"),
        ([(0, 99), (101, HASH_MAX)], "gap"),
        ([(0, 99), (99, HASH_MAX)], "overlap"),
        ([(0, 99), (100, HASH_MAX - 1)], "end the ring"),
        ([(0, HASH_MAX + 1)], "not a range"),
    ],
)
def test_buckets_must_tile_the_ring(ranges: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(NotAllowed, match=reason):
        KeySharedPolicy.bucketed(ranges)


def test_buckets_are_sticky_and_in_order() -> None:
    with pytest.raises(NotAllowed, match="sticky"):
        KeySharedPolicy(entry_buckets=True)
    with pytest.raises(NotAllowed, match="in order"):
        KeySharedPolicy(KeySharedMode.STICKY, (FULL_RING,), out_of_order=True, entry_buckets=True)


# --- who has what


def test_consumers_get_runs_of_buckets_in_the_order_of_their_names() -> None:
    selector = sharing(4)
    ranges = selector._buckets
    assert selector.join(5, "b", ranges) == [Moved(FULL_RING, None, 5)]
    assert selector.join(6, "a", ranges) == [Moved(HashRange(0, 32767), 5, 6)]
    assert selector.join(7, "a", ranges) == [Moved(HashRange(16384, 32767), 6, 7)]
    assert [selector.ranges_of(key) for key in (6, 7, 5)] == [
        [HashRange(0, 16383)],
        [HashRange(16384, 32767)],
        [HashRange(32768, HASH_MAX)],
    ]
    selector.leave(6)
    assert selector.ranges_of(7) == [HashRange(0, 32767)]


@pytest.mark.parametrize("ranges", [[], buckets(2), buckets(3), [*buckets(4), (0, 0)]])
def test_another_list_of_buckets_is_refused(ranges: list[tuple[int, int]]) -> None:
    selector = sharing(4)
    assert isinstance(selector.join(1, "a", [HashRange(*each) for each in ranges]), AssignRefused)
    assert selector.select(1) is None


def test_an_entry_stands_at_the_start_of_its_bucket() -> None:
    selector = sharing(4)
    found = [selector.ring_position(at) for at in (0, 1, 16383, 16384, 40_000, HASH_MAX)]
    assert found == [1, 1, 1, 16384, 32768, 49152]


@given(count=st.integers(1, 9), changes=st.lists(st.integers(0, 11), max_size=24))
def test_every_bucket_has_one_owner_and_shares_are_even(count: int, changes: list[int]) -> None:
    """A number joins if it is out and leaves if it is in."""
    selector = sharing(count)
    present: set[int] = set()
    for key in changes:
        before = [selector.select(each.start) for each in selector._buckets]
        if key in present:
            moves = selector.leave(key)
        else:
            joined = selector.join(key, f"c{key % 4}", selector._buckets)
            assert not isinstance(joined, AssignRefused)
            moves = joined
        present ^= {key}
        owners = [selector.select(each.start) for each in selector._buckets]
        for each, old, new in zip(selector._buckets, before, owners, strict=True):
            assert selector.select(each.end) == new
            moved = [move[1:] for move in moves if each.start in move.range]
            assert moved == ([] if old == new else [(old, new)])
        assert set(owners) <= present if present else owners == [None] * count
        shares = [owners.count(sharer) for sharer in present]
        assert sum(shares) == (count if present else 0)
        assert not shares or max(shares) - min(shares) <= 1
        for sharer in present:
            assert len(selector.ranges_of(sharer)) == min(owners.count(sharer), 1)


# --- who may join


def test_sharers_must_declare_the_same_buckets() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        first = joined(subscription, "a", 4)
        with pytest.raises(ConsumerAssign):
            joined(subscription, "b", 2)
        for policy in (KeySharedPolicy(), KeySharedPolicy.sticky([(0, 9)])):
            with pytest.raises(ConsumerAssign):
                Client(subscription, KEY_SHARED, "b", key_shared=policy)
        with pytest.raises(ConsumerBusy):
            Client(subscription, EXCLUSIVE, "b")
        joined(subscription, "b", 4).leave()
        first.leave()
        plain = Client(subscription, KEY_SHARED, "c", key_shared=KeySharedPolicy.sticky([(0, 9)]))
        with pytest.raises(ConsumerAssign):
            joined(subscription, "d", 4)
        plain.leave()
        joined(subscription, "e", 2)

    run(scenario)


def test_a_stream_that_begins_to_share_is_not_taken_for_another_type() -> None:
    """A member that gets a share before the one that read alone has left waits for its place."""

    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        alone = Client(subscription, EXCLUSIVE, "a")
        with pytest.raises(ConsumerBusy, match="do not share by entry buckets") as refused:
            joined(subscription, "b", 4)
        assert not is_other_type(refused.value)
        with pytest.raises(ConsumerBusy, match="is a stream subscription") as refused:
            Client(subscription, KEY_SHARED, "b")
        assert is_other_type(refused.value)
        alone.leave()
        sharer = joined(subscription, "b", 4)
        with pytest.raises(ConsumerBusy, match="that share by entry buckets") as refused:
            Client(subscription, EXCLUSIVE, "a")
        assert not is_other_type(refused.value)
        with pytest.raises(ConsumerBusy, match="is a stream subscription") as refused:
            Client(subscription, SHARED, "a")
        assert is_other_type(refused.value)
        sharer.leave()

    run(scenario)


def joined(subscription: Subscription, name: str, count: int, permits: int = 100) -> Client:
    policy = KeySharedPolicy.bucketed(buckets(count))
    return Client(subscription, KEY_SHARED, name, key_shared=policy, permits=permits)


# --- delivery


KEYS = [f"k-{number}" for number in range(12)]
BUCKET_COUNT = 4


def bucket_of(key: str) -> int:
    return bucket_hash(key_hash(key)) * BUCKET_COUNT // RING_SIZE


def test_a_moving_bucket_waits_for_its_last_ack() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        old = joined(subscription, "b", BUCKET_COUNT)
        for number, key in enumerate(KEYS):
            await topic.publish(str(number), key=key)
        await settle()
        moving = [each for each, key in enumerate(KEYS) if bucket_of(key) == 0]
        assert len(moving) > 1
        new = joined(subscription, "a", BUCKET_COUNT)
        for number, key in enumerate(KEYS):
            await topic.publish(str(100 + number), key=key)
        await settle()
        assert new.bodies() == []
        old.ack(*(str(each) for each in moving[1:]))
        await settle()
        assert new.bodies() == []
        old.ack(str(moving[0]))
        await settle()
        assert new.bodies() == [str(100 + each) for each in moving]

    run(scenario)


def test_consumers_beyond_the_buckets_idle_until_one_leaves() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        clients = [joined(subscription, name, 2) for name in "abc"]
        for number, key in enumerate(KEYS):
            await topic.publish(str(number), key=key)
        await settle()
        got = [len(each.bodies()) for each in clients]
        assert sorted(got)[0] == 0
        assert sum(got) == len(KEYS)
        assert min(sorted(got)[1:]) > 0
        for each in clients:
            if each.bodies():
                each.leave()
        await settle()
        (idle,) = (each for each in clients if each.consumer in subscription.consumers)
        assert idle.bodies() == [str(number) for number in range(len(KEYS))]

    run(scenario)


def test_messages_without_a_key_are_of_the_first_bucket() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        clients = [joined(subscription, name, 2) for name in "ab"]
        await topic.publish(*"0123")
        await settle()
        assert [each.bodies() for each in clients] == [list("0123"), []]

    run(scenario)


def test_a_redelivered_message_comes_before_the_rest_of_its_bucket() -> None:
    async def scenario(topic: Topic) -> None:
        subscription = await topic.subscription()
        client = joined(subscription, "a", 2, permits=2)
        await topic.publish(*"0123")
        await settle()
        client.nack("0")
        client.consumer.flow(3)
        await settle()
        assert client.counts() == [("0", 0), ("1", 0), ("0", 1), ("2", 0), ("3", 0)]

    run(scenario)


# --- order, whatever happens


@dataclass
class Churn:
    """A subscription whose consumers come, go, acknowledge late and in any order."""

    topic: Topic
    subscription: Subscription
    seed: int
    clients: list[Client] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    """Keys, by number."""
    at: dict[int, Client] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    async def publish(self) -> None:
        key = self.rng.choice(KEYS)
        await self.topic.publish(str(len(self.published)), key=key)
        self.published.append(key)

    def join(self, step: int) -> None:
        name = f"{self.rng.choice('abc')}{step}"
        self.clients.append(joined(self.subscription, name, BUCKET_COUNT, permits=4))

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        client.leave()
        self.at = {number: who for number, who in self.at.items() if who is not client}

    def ack_some(self, client: Client, most: int) -> None:
        mine = [number for number, who in self.at.items() if who is client]
        self.rng.shuffle(mine)
        for number in mine[: self.rng.randint(0, most)]:
            client.ack(str(number))
            del self.at[number]
            self.acked.add(number)

    def nack_one(self, client: Client) -> None:
        mine = [number for number, who in self.at.items() if who is client]
        if mine:
            number = self.rng.choice(mine)
            client.nack(str(number))
            del self.at[number]

    async def take(self) -> None:
        await settle(8)
        for client in self.clients:
            for each in client.take():
                self.check(client, int(body_of(each)), key_of(each))

    def check(self, client: Client, number: int, key: str) -> None:
        bucket = bucket_of(key)
        for other, other_key in enumerate(self.published):
            if bucket_of(other_key) == bucket:
                holder = self.at.get(other)
                where = f"seed {self.seed}, {number} of {key}, bucket {bucket}"
                assert holder in (None, client), f"{where}: the bucket is at two consumers"
                settled = other >= number or other in self.acked or holder is client
                assert settled, f"{where}: it overtook {other}"
        self.at[number] = client

    async def step(self, number: int) -> None:
        action = self.rng.random()
        client = self.rng.choice(self.clients)
        if action < 0.35 and len(self.published) < 150:
            await self.publish()
        elif action < 0.42 and len(self.clients) < 7:
            self.join(number)
        elif action < 0.48 and len(self.clients) > 1:
            self.leave(client)
        elif action < 0.6:
            client.consumer.flow(self.rng.randint(1, 3))
        elif action < 0.66:
            self.nack_one(client)
        else:
            self.ack_some(client, most=2)
        await self.take()


@pytest.mark.parametrize("seed", range(10))
def test_buckets_keep_their_order_while_consumers_come_and_go(seed: int) -> None:
    async def scenario(topic: Topic) -> None:
        churn = Churn(topic, await topic.subscription(), seed)
        churn.join(0)
        for step in range(350):
            await churn.step(step)
        for _ in range(200):
            for each in churn.clients:
                each.consumer.flow(5)
                churn.ack_some(each, most=4)
            await churn.take()
        assert churn.acked == set(range(len(churn.published))), f"seed {seed}: starved"
        assert churn.subscription.backlog() == 0

    run(scenario, Limits().override({"subscription_look_ahead_entries": 30}))
