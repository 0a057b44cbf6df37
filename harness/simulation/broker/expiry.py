"""Lets messages and subscriptions of a simulated broker expire, and looks what became of them.

Owns: the actor `expire` (a time to live that comes and goes, messages expired by hand, quotas that
evict, and looks of the product's own maintenance) and `leave_alone`, a while in which nobody uses
most subscriptions of a topic.

Invariants:
1. The story is told what may go before the broker is asked, and what has gone once that is durable.
2. A quota is there for one look only: it evicts the oldest, only if it is used up, and no more than
   leaves nine tenths of it, entry by entry.
3. What surely is too old is gone after a look; without a policy nothing goes.
4. A subscription goes only if nobody has used it for as long as its policy says, and then it does.

Relies on: `lapses`, where it is computed what should go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Final

import msgspec

from harness.simulation.broker.actors import Consuming, visit
from harness.simulation.broker.history import Gone, Sent, SubscriptionStory, TopicStory
from harness.simulation.broker.lapses import (
    Lapses,
    all_before,
    evicted_through,
    last_before,
    positions_of,
    share_bytes,
)
from harness.simulation.broker.world import BrokerWorld
from harness.simulation.seeds import LIFE_SECONDS_MAX
from magnetar.broker.policy.values import BacklogQuota
from magnetar.broker.topic.maintenance import TopicMaintenance
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.managed_ledger.managed_ledger import EARLIEST
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from magnetar.runtime.clock import LoopClock

_TTLS: Final = (0, 0, 0, 1, 2, 4, round(LIFE_SECONDS_MAX) + 10)
"""The last one reaches into the life before."""
_AGES: Final = (1, 2, 4, round(LIFE_SECONDS_MAX) + 10)
_OF_BACKLOG: Final = (0.0, 0.3, 0.7, 0.95, 1.0, 1.2)
_UNUSED_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 100.0
_READ_ENTRIES: Final = 100


async def expire(world: BrokerWorld, random: Random, story: TopicStory) -> None:
    """Let something of a topic expire, again and again."""
    assert story.lapses is not None
    expiry = _Expiry(world, random, story, story.lapses)
    steps = (expiry.change_ttl, expiry.by_hand, expiry.evict, expiry.look)
    while not world.over:
        await asyncio.sleep(random.expovariate(3))
        if world.over:
            return
        try:
            await random.choice(steps)()
        except MagnetarError as error:
            world.failed(f"expiry of {story.name}", error)


class _Expiry:
    """What is done to one topic."""

    def __init__(
        self, world: BrokerWorld, random: Random, story: TopicStory, lapses: Lapses
    ) -> None:
        self._world = world
        self._random = random
        self._story = story
        self._lapses = lapses
        self._name = TopicName.parse(story.name)

    def _loaded(self) -> Topic | None:
        topic = self._world.server.topics.loaded.get(self._name)
        if not isinstance(topic, Topic) or topic.closing or topic.lost is not None:
            return None
        return topic

    # --- time to live

    async def change_ttl(self) -> None:
        world, lapses, seconds = self._world, self._lapses, self._random.choice(_TTLS)
        world.note(f"{self._story.name} has a time to live of {seconds} s")
        lapses.setting_ttl(seconds)
        await world.server.topics.change_topic(
            self._name,
            lambda policies: msgspec.structs.replace(policies, message_ttl_in_seconds=seconds),
        )
        if not world.disk.is_stopped:
            self._story.follow(world.now())
            lapses.ttl_is(seconds)

    async def look(self) -> None:
        """The product's maintenance comes by once."""
        world, topic = self._world, self._loaded()
        if topic is None:
            return
        sure = NOTHING
        if self._lapses.ttl:
            sure = all_before(await self._read(topic), world.now() - self._lapses.ttl)
        begun_at = world.now()
        await look_once(world)
        if world.disk.is_stopped:
            return
        self._story.follow(world.now())
        world.note(f"{self._story.name} was looked at: {sure} is too old")
        for subscription in self._story.subscriptions:
            await self._is_gone(topic, subscription, sure, begun_at)

    async def by_hand(self) -> None:
        """One subscription, as an operator has it."""
        world, topic = self._world, self._loaded()
        story = self._random.choice(self._story.subscriptions)
        if topic is None or story.name not in topic.subscriptions:
            return
        seconds, subscription = self._random.choice(_AGES), topic.subscriptions[story.name]
        log = await self._read(topic)
        begun_at = world.now()
        sure = all_before(log, begun_at - seconds)
        story.lapsing(last_before(self._story.at, begun_at - seconds))
        world.note(f"{story.name} of {self._story.name} expires what is {seconds} s old: {sure}")
        await subscription.expire(seconds)
        await self._is_gone(topic, story, sure, begun_at)

    async def _read(self, topic: Topic) -> dict[Position, Sent]:
        """All entries that are there now: receipts of some may have been lost."""
        found: dict[Position, Sent] = {}
        entries = await topic.ledger.read(EARLIEST, 1)
        while entries:
            for entry in entries:
                sent = self._story.seen(entry.position, entry.payload)
                if sent is not None:
                    found[entry.position] = sent
            entries = await topic.ledger.read(entries[-1].position.next, _READ_ENTRIES)
        return found

    async def _is_gone(
        self, topic: Topic, story: SubscriptionStory, through: Position, begun_at: float
    ) -> None:
        """Wait until it is durable that a subscription has let go of this."""
        world = self._world
        subscription = topic.subscriptions.get(story.name)
        if subscription is None or world.disk.is_stopped:
            return
        if not subscription.cursor.is_acked(through) and through != NOTHING:
            # A read may have failed, or the topic ended, or it was set back meanwhile.
            is_calm = not world.disk.plan.faults and self._loaded() is topic
            is_set_back = story.is_seeking or story.last_seek_at >= begun_at
            if is_calm and not is_set_back and not world.server.stopping:
                world.findings.broken(f"{story.name} of {self._story.name} still has {through}")
            return
        await subscription.ack_durable()
        if not world.disk.is_stopped:
            story.lapsed(Gone(through, begun_at, world.now()))

    # --- quotas

    async def evict(self) -> None:
        world, topic = self._world, self._loaded()
        if topic is None:
            return
        size = int(share_bytes(topic.ledger.ledger_spans, _first_unacked(topic)))
        quota = BacklogQuota(
            limit=int(size * self._random.choice(_OF_BACKLOG)), policy="consumer_backlog_eviction"
        )
        self._lapses.is_quota_open = True
        await self._set_quotas({"destination_storage": quota})
        topic = self._loaded()
        if topic is not None and not world.disk.is_stopped:
            await self._evicted(topic, quota.limit)
        await self._set_quotas({})
        topic = self._loaded()
        if topic is None or world.disk.is_stopped:
            return  # who knows what was evicted while it was loaded
        self._lapses.add(evicted_through(topic.ledger.ledger_spans, quota.limit))
        self._lapses.is_quota_open = False

    async def _set_quotas(self, quotas: Mapping[str, BacklogQuota]) -> None:
        await self._world.server.topics.change_topic(
            self._name,
            lambda policies: msgspec.structs.replace(policies, backlog_quota_map=dict(quotas)),
        )

    async def _evicted(self, topic: Topic, limit: int) -> None:
        """Look at the quota once, and see that exactly what must go has gone (invariant 2)."""
        world, spans = self._world, topic.ledger.ledger_spans
        backlog = share_bytes(spans, _first_unacked(topic))
        through = evicted_through(spans, limit) if backlog >= limit else NOTHING
        world.note(f"{self._story.name}: {int(backlog)} bytes, quota {limit}, to {through}")
        begun_at, positions = world.now(), positions_of(spans)
        for story in self._story.subscriptions:
            story.lapsing(through)
        before = _acked(topic, positions)
        await topic.quotas.enforce()
        for name, acked in _acked(topic, positions).items():
            due = before[name] | {each for each in positions if each <= through}
            if acked != due:
                wrong = sorted(acked ^ due)
                text = f"{name} of {self._story.name}: quota {limit} of {int(backlog)} bytes"
                world.findings.broken(f"{text}: {len(wrong)} too many or too few, {wrong[0]}")
        for story in self._story.subscriptions:
            await self._is_gone(topic, story, through, begun_at)


NOTHING: Final = Position(-1, -1)


def _first_unacked(topic: Topic) -> Position:
    durable = (each for each in topic.subscriptions.values() if each.durable)
    clients = (each for each in durable if each.name != COMPACTION)
    first = min((each.first_unacked() for each in clients), default=None)
    return topic.ledger.next_append_floor() if first is None else first


def _acked(topic: Topic, positions: list[Position]) -> dict[str, set[Position]]:
    return {
        name: {each for each in positions if subscription.cursor.is_acked(each)}
        for name, subscription in topic.subscriptions.items()
        if subscription.durable and name != COMPACTION
    }


# --- the product's own looks


class _OverError(Exception):
    """One round is over."""


class _OneLook(LoopClock):
    """A clock on which there is time for one round of maintenance, at once."""

    def __init__(self) -> None:
        super().__init__(0)
        self._rounds = 0

    async def sleep(self, seconds: float) -> None:
        self._rounds += 1
        if self._rounds > 1:
            raise _OverError
        await asyncio.sleep(0.01)


async def look_once(world: BrokerWorld) -> None:
    """Have maintenance look at every topic, as a part of the server that ends with it."""
    if world.server.topics.stopping:
        return
    limits = world.server.config.limits.override({"expiry_check_seconds": 0.001})
    maintenance = TopicMaintenance(world.server.topics, _OneLook(), limits)

    async def look() -> None:
        with suppress(_OverError):
            await maintenance.run()

    task = world.server.topics.spawn(look(), "a look")
    await asyncio.wait({task}, timeout=_LOOK_SECONDS)


# --- subscriptions


async def leave_alone(world: BrokerWorld, random: Random, story: TopicStory) -> None:
    """Nobody uses the subscriptions of a topic for a while, but for one of them (invariant 4)."""
    topics, name = world.server.topics, TopicName.parse(story.name)
    used = random.choice(story.subscriptions)
    for each in story.subscriptions:
        await visit(world, random, each)
    consumer = Consuming(world, random, used, await world.connect())
    await consumer.subscribe()
    await _let_subscriptions_expire(world, name, minutes=1)
    since = world.now()
    for seconds in (random.uniform(5.0, 50.0), _UNUSED_SECONDS + random.uniform(0.1, 20.0)):
        await asyncio.sleep(max(since + seconds - world.now(), 0.0))
        await look_once(world)
        if world.disk.is_stopped:
            return
        topic = topics.loaded.get(name)
        present = topic.subscriptions.keys() if isinstance(topic, Topic) else ()
        for each in story.subscriptions:
            is_due = each is not used and seconds >= _UNUSED_SECONDS
            if (each.name in present) is is_due:
                text = "is still there" if is_due else "is gone"
                world.findings.broken(f"{story.name}/{each.name} {text} after {seconds:.1f} s")
    await consumer.leave()
    await _let_subscriptions_expire(world, name, minutes=0)
    for each in story.subscriptions:
        if each is not used and not world.disk.is_stopped:
            each.began_anew()
            await visit(world, random, each)


async def _let_subscriptions_expire(world: BrokerWorld, name: TopicName, *, minutes: int) -> None:
    await world.server.topics.change_topic(
        name,
        lambda policies: msgspec.structs.replace(
            policies, subscription_expiration_time_minutes=minutes
        ),
    )
