"""Clients of a simulated broker, and the trouble that they have with it.

Owns: the actors, coroutines that run until the world is ending: `produce` (one producer over its
connections), `consume` (one consumer after the other of a subscription) and `trouble` (cut and
silent connections, a full disk, topics unloaded and trimmed). An actor tells the history
(`broker_history`) what it is about to send, and what arrives; it judges nothing.

Invariants:
1. Everything random comes from the actor's own `Random`, made from the seed and its name.
2. Whatever arrives is told to the history in the step in which it arrives.
3. A client acknowledges only what it got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from harness.simulation.broker.history import (
    ALL,
    Ack,
    ConsumerStory,
    Part,
    ProducerStory,
    Sent,
    SubscriptionStory,
)
from harness.simulation.broker.world import CLIENT_ERRORS, BrokerWorld, Client
from harness.simulation.seeds import EPOCH_MS
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError, RequestError
from magnetar.model.batch_indexes import unacked_of, words_of
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import SubscriptionType
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Command, Delivered, Received
from magnetar.wire.pb import pulsar_pb2 as pb

PRODUCER_ID: Final = 3
CONSUMER_ID: Final = 5
SUBSCRIBE_ID: Final = 1_000_000
SEEK_ID: Final = 2_000_000
ACK_ID: Final = 3_000_000

_KEYS: Final = 6
_IN_FLIGHT_MAX: Final = 60
_ANSWER_SECONDS: Final = 120.0
_WORDS_MAX: Final = 16
_INT64: Final = 2**64
_VISITS_MAX: Final = 60


# --- producers


async def produce(world: BrokerWorld, random: Random, story: ProducerStory) -> None:
    """Sends, and after each lost connection sends again what got no receipt."""
    while not world.over:
        client = None
        try:
            client = await world.connect()
            await _Producing(world, random, story, client).go()
        except CLIENT_ERRORS as error:
            world.failed(f"producer {story.name}", error, client)
        finally:
            if client is not None:
                client.abort()
        await asyncio.sleep(random.expovariate(4))


class _Producing:
    """A producer on one connection."""

    def __init__(
        self, world: BrokerWorld, random: Random, story: ProducerStory, client: Client
    ) -> None:
        self._world = world
        self._random = random
        self._story = story
        self._client = client
        self._over = False
        self._budget = random.choice((20, 60, 120))
        """Entries in bulk; single ones come as long as the connection lives."""
        client.take = self._take

    async def go(self) -> None:
        world, random, story, client = self._world, self._random, self._story, self._client
        opened = await world.ask(
            client,
            "PRODUCER",
            topic=story.topic.name,
            producer_id=PRODUCER_ID,
            producer_name=story.name,
            user_provided_producer_name=True,
        )
        if world.disk.is_stopped:
            return
        world.note(f"producer {story.name}: opened, last {opened.last_sequence_id}")
        story.connected(opened.last_sequence_id)
        for sent in list(story.unanswered):
            await self._room(_IN_FLIGHT_MAX)
            self._send(sent)
        while not self._ended:
            await asyncio.sleep(random.expovariate(10))
            kind = random.random()
            if kind < 0.25:
                await self._send_new(1)
                await self._room(1)
            elif kind < 0.9 and self._budget > 0:
                await self._send_new(random.choice((1, 2, 5, 25)))
            elif kind < 0.93:
                break
        await self._leave()

    @property
    def _ended(self) -> bool:
        return self._over or self._world.over or self._world.is_gone(self._client)

    async def _leave(self) -> None:
        """Wait for the receipts that are owed, then close or just go."""
        await self._room(1)
        if self._random.random() < 0.5 and not self._world.is_gone(self._client):
            await self._world.ask(self._client, "CLOSE_PRODUCER", producer_id=PRODUCER_ID)
            await self._client.close()

    async def _room(self, most: int) -> None:
        """Wait until fewer than `most` sends are without an answer, or none can come."""
        deadline = self._world.now() + _ANSWER_SECONDS
        while len(self._story.in_flight) >= most and not self._over:
            if self._world.is_gone(self._client) or self._world.disk.is_stopped:
                return
            if self._world.now() > deadline:
                if not self._world.is_silent(self._client) and not self._world.disk.plan.faults:
                    self._world.findings.broken(f"{self._story.name} waits for receipts")
                return
            await asyncio.sleep(0.02)

    async def _send_new(self, entries: int) -> None:
        for _ in range(entries):
            await self._room(_IN_FLIGHT_MAX)
            if self._ended:
                return
            self._budget -= 1
            self._send(self._prepare())

    def _prepare(self) -> Sent:
        random, story = self._random, self._story
        messages = random.choice((1, 1, 1, 2, 7))
        key = f"k{random.randrange(_KEYS)}"
        fields: dict[str, Any] = {}
        if messages > 1:
            fields["num_messages_in_batch"] = messages
            fields["highest_sequence_id"] = story.next_sequence + messages - 1
        deliver_at = self._world.deliver_at(story.topic)
        if deliver_at is not None:
            fields["deliver_at_time"] = EPOCH_MS + round(deliver_at * 1000)
        now = self._world.now()
        # By the broker's clock where that counts.
        epoch_ms = 0 if story.topic.lapses is None else EPOCH_MS
        payload = self._world.payload(random, story.next_sequence)
        parts: tuple[Part, ...] = ()
        if story.topic.is_compacted and messages > 1:
            payload, parts = self._world.batch(messages, payload)
        elif story.topic.is_compacted:
            payload, further, parts = self._world.message(key, payload)
            fields |= further
        payload = build_message(
            payload,
            producer_name=story.name,
            sequence_id=story.next_sequence,
            publish_time_ms=epoch_ms + round(now * 1000),
            key=key,
            **fields,
        )
        return story.prepare(messages, key, payload, deliver_at, now, parts)

    def _send(self, sent: Sent) -> None:
        if self._over or self._world.disk.is_stopped or self._client.failure is not None:
            return
        fields = {"highest_sequence_id": sent.highest} if sent.messages > 1 else {}
        self._story.sending(sent)
        self._client.send(
            "SEND",
            sent.payload,
            producer_id=PRODUCER_ID,
            sequence_id=sent.sequence_id,
            num_messages=sent.messages,
            **fields,
        )

    def _take(self, command: Command, at: float) -> bool:
        world, story = self._world, self._story
        if world.disk.is_stopped or not isinstance(command, Received):
            return False
        body: Any = command.body
        if command.type == TYPES["SEND_RECEIPT"]:
            position = _position(body.message_id)
            world.note(f"receipt {story.name} {body.sequence_id} {position}")
            story.receipt(body.sequence_id, position)
        elif command.type == TYPES["SEND_ERROR"]:
            world.note(f"refusal {story.name} {body.sequence_id} {body.error}")
            story.refused(body.sequence_id)
            story.topic.lost_appends = True
            self._over = True
        elif command.type == TYPES["CLOSE_PRODUCER"]:
            world.note(f"closed {story.name}")
            story.topic.lost_appends |= bool(world.disk.plan.faults)
            self._over = True
        else:
            return False
        return True


# --- consumers


async def consume(world: BrokerWorld, random: Random, story: SubscriptionStory) -> None:
    """Consumes as one member of a subscription, over its connections."""
    while not world.over:
        client = None
        try:
            client = await world.connect()
            await Consuming(world, random, story, client).go()
        except CLIENT_ERRORS as error:
            world.failed(f"consumer of {story.name}", error, client)
        finally:
            if client is not None:
                client.abort()
        await asyncio.sleep(random.expovariate(3))


class Consuming:
    """A consumer on one connection."""

    def __init__(
        self,
        world: BrokerWorld,
        random: Random,
        story: SubscriptionStory,
        client: Client,
        kind: SubscriptionType | None = None,
    ) -> None:
        world.consumers += 1
        self.got: dict[Position, int] = {}
        """Everything that came, with its open messages."""
        self.arrived = asyncio.Event()
        self._world = world
        self._random = random
        self._client = client
        name = f"c{world.consumers}"
        # Exclusive is 0.
        self.story = ConsumerStory(
            story, name, story.kind if kind is None else kind, client.end.peer
        )
        self._unsettled: dict[Position, int] = {}
        self._asked: dict[int, list[Ack]] = {}
        self._ack_id = ACK_ID
        self._seek_at: dict[int, float] = {}
        self._seeks = 0
        self._permits = 0
        self._over = False
        client.take = self._take

    async def go(self) -> None:
        world, random = self._world, self._random
        await self.subscribe()
        self.flow(random.choice((1, 3, 10, 100)))
        try:
            while not self._ended:
                await asyncio.sleep(random.expovariate(20))
                if not self._ended:
                    await self._act()
            if random.random() < 0.5 and not world.is_gone(self._client):
                await self.leave()
        finally:
            self.story.left()

    @property
    def _ended(self) -> bool:
        return self._over or self._world.over or self._world.is_gone(self._client)

    async def subscribe(self) -> None:
        story = self.story
        await self._world.ask(
            self._client,
            "SUBSCRIBE",
            request_id=SUBSCRIBE_ID,
            topic=story.subscription.topic.name,
            subscription=story.subscription.name,
            subType=int(story.kind),
            consumer_id=CONSUMER_ID,
            consumer_name=story.name,
            initialPosition=pb.CommandSubscribe.Earliest,
            durable=True,
        )

    def flow(self, permits: int) -> None:
        self._permits += permits
        self.story.flow(permits)
        self._client.send("FLOW", consumer_id=CONSUMER_ID, messagePermits=permits)

    async def leave(self) -> None:
        self.story.left()
        await self._world.ask(self._client, "CLOSE_CONSUMER", consumer_id=CONSUMER_ID)
        await self._client.close()

    # --- what it does

    async def _act(self) -> None:
        random = self._random
        kind = random.random()
        if self._permits < 5 and kind < 0.5:
            self.flow(random.choice((1, 2, 10, 50)))
        elif kind < 0.6:
            self._ack_some()
        elif kind < 0.72 and self.story.kind.takes_cumulative_acks:
            self._ack_through()
        elif kind < 0.8:
            self._ask_again()
        elif kind < 0.805 and self._world.findings.submissions % 2:
            await self._seek()
        elif kind > 0.99:
            self._over = True

    def _ack_some(self) -> None:
        """One or several entries, some batches in part; with an answer or without."""
        random = self._random
        waiting = list(self._unsettled)
        count = min(len(waiting), random.choice((1, 1, 4, 30)))
        if not count:
            return
        chosen = random.sample(waiting, count) if random.random() < 0.5 else waiting[:count]
        self._ack([self._part(position) for position in chosen], cumulative=False)

    def _ack_through(self) -> None:
        """Everything up to one that it has not acknowledged yet."""
        waiting = sorted(self._unsettled)
        if waiting:
            chosen = waiting[min(len(waiting) - 1, self._random.choice((0, 3, 20)))]
            self._ack([self._part(chosen)], cumulative=True)

    def _part(self, position: Position) -> tuple[Position, int]:
        """A position, and which of its messages are acknowledged now."""
        random = self._random
        opened = self._unsettled[position]
        if opened.bit_count() < 2 or random.random() < 0.5:
            return position, ALL
        return position, opened & random.randrange(1, opened + 1) or ALL

    def _ack(self, parts: list[tuple[Position, int]], *, cumulative: bool) -> None:
        acks = []
        fields: dict[str, object] = {}
        ids = []
        for position, mask in parts:
            sent = self.story.subscription.topic.at[position]
            if cumulative and mask != ALL:
                mask = (1 << mask.bit_length()) - 1  # up to the last of them
            rest = sent.mask & ~mask
            ids.append(_id(position, rest))
            acks.append(Ack(position, mask if rest else ALL, cumulative, self.story))
            self._settle(position, mask if rest else ALL, sent)
        if cumulative:
            for earlier in [each for each in self._unsettled if each < parts[0][0]]:
                self._settle(earlier, ALL, self.story.subscription.topic.at[earlier])
        for ack in acks:
            self.story.subscription.acked(ack)
        if self._random.random() < 0.6:
            self._ack_id += 1
            self._asked[self._ack_id] = acks
            fields["request_id"] = self._ack_id
        self._world.note(f"{self.story.name} acks {[(*part,) for part in parts]} {cumulative}")
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        self._client.send("ACK", consumer_id=CONSUMER_ID, ack_type=kind, message_id=ids, **fields)

    def _settle(self, position: Position, mask: int, sent: Sent) -> None:
        left = self._unsettled.get(position, 0) & ~mask
        if left:
            self._unsettled[position] = left
        else:
            self._unsettled.pop(position, None)
            self.story.let_go(sent.key, position)

    def _ask_again(self) -> None:
        """Some of what it has, or all of it."""
        random, story = self._random, self.story
        waiting = list(self._unsettled)
        single = story.kind.takes_cumulative_acks
        if single or random.random() < 0.3:
            story.subscription.asked_again(None)
            story.asked_for_all(self._world.now())
            chosen = waiting
            ids: list[Mapping[str, int]] = []
        elif waiting:
            chosen = random.sample(waiting, min(len(waiting), random.choice((1, 5))))
            story.subscription.asked_again(chosen)
            ids = [_id(position, 0) for position in chosen]
        else:
            return
        story.may_rewind()
        for position in chosen:
            self._settle(position, ALL, story.subscription.topic.at[position])
        self._world.note(f"{story.name} asks again for {chosen if ids else 'all'}")
        self._client.send(
            "REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=CONSUMER_ID, message_ids=ids
        )

    async def _seek(self) -> None:
        subscription = self.story.subscription
        known = sorted(subscription.topic.at)
        if not known:
            return
        target = self._random.choice(known)
        self._seeks += 1
        request_id = SEEK_ID + self._seeks
        self._world.note(f"{self.story.name} seeks {target}")
        subscription.seeking(target, self._world.now())
        await self._world.ask(
            self._client,
            "SEEK",
            request_id=request_id,
            consumer_id=CONSUMER_ID,
            message_id=_id(target, 0),
        )
        if not self._world.disk.is_stopped:
            self._world.note(f"{self.story.name} sought {target}")
            subscription.sought(target, self._seek_at[request_id])
        self._over = True

    # --- what arrives

    def _take(self, command: Command, at: float) -> bool:
        if self._world.disk.is_stopped:
            return False
        if isinstance(command, Delivered):
            self._delivered(command, at)
            return True
        if not isinstance(command, Received):
            return False
        body: Any = command.body
        if command.type == TYPES["SUCCESS"]:
            if body.request_id == SUBSCRIBE_ID:
                self.story.joined(at)
            self._seek_at[body.request_id] = at
            return False
        return self._heard(command.type, body, at)

    def _heard(self, kind: int, body: Any, at: float) -> bool:
        world, name = self._world, self.story.name
        if kind == TYPES["ACK_RESPONSE"]:
            error = body.HasField("error")
            world.note(f"{name}: ack {body.request_id} {'refused' if error else 'durable'}")
            for ack in self._asked.pop(body.request_id, ()):
                ack.durable_at = None if error else at
        elif kind == TYPES["ACTIVE_CONSUMER_CHANGE"]:
            world.note(f"{name}: active {body.is_active}")
            self.story.may_rewind()
        elif kind == TYPES["CLOSE_CONSUMER"]:
            world.note(f"{name}: closed by the broker")
            self.story.stopped_at = at
            self._over = True
        else:
            return False
        return True

    def _delivered(self, command: Delivered, at: float) -> None:
        body = command.body
        position = _position(body.message_id)
        mask = unacked_of(body.ack_set, _WORDS_MAX) if body.ack_set else None
        self._world.note(f"{self.story.name} gets {position} {mask} {body.redelivery_count}")
        sent = self.story.delivered(
            position, command.headers_and_payload, mask, body.redelivery_count, at
        )
        if sent is not None:
            opened = sent.mask if mask is None else mask
            self._permits -= opened.bit_count()
            self._unsettled[position] = opened
            self.got[position] = opened
            self.arrived.set()


async def visit(world: BrokerWorld, random: Random, story: SubscriptionStory) -> None:
    """Use a subscription for a moment, which may be a new one."""
    for _ in range(_VISITS_MAX):
        client = await world.connect()
        consumer = Consuming(world, random, story, client)
        try:
            await consumer.subscribe()
        except RequestError as error:
            world.failed(f"a visit to {story.name}", error)
            await client.close()
            await asyncio.sleep(1.0)  # a disk that was full has room again
        else:
            await consumer.leave()
            return


def _position(message_id: pb.MessageIdData) -> Position:
    ledger, entry = message_id.ledgerId, message_id.entryId
    return Position(
        ledger if ledger < _INT64 // 2 else ledger - _INT64,
        entry if entry < _INT64 // 2 else entry - _INT64,
    )


def _id(position: Position, unacked: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"ledgerId": position.ledger_id, "entryId": position.entry_id}
    if unacked:
        fields["ack_set"] = list(words_of(unacked))
    return fields


# --- trouble


async def trouble(world: BrokerWorld, random: Random) -> None:
    """Breaks connections, fills the disk, unloads and trims topics."""
    fills_disk = random.random() < 0.2
    while not world.over:
        await asyncio.sleep(random.expovariate(1.5))
        links = [link for link in world.network.links if not link.is_over]
        kind = random.random()
        if kind < 0.35 and links:
            random.choice(links).cut()
        elif kind < 0.5 and links:
            await _silence(world, random)
        elif kind < 0.6 and fills_disk:
            world.disk.plan.is_full = True
            await asyncio.sleep(random.uniform(0.2, 3.0))
            world.disk.plan.is_full = False
        elif kind < 0.8:
            await _administer(world, random)


async def _silence(world: BrokerWorld, random: Random) -> None:
    """For a while, or for good; in one direction, or both."""
    link = random.choice([link for link in world.network.links if not link.is_over])
    ways = random.choice(((True, True), (True, False), (False, True)))
    link.fall_silent(client=ways[0], server=ways[1])
    if random.random() < 0.6:
        await asyncio.sleep(random.uniform(0.1, 4.0))
        link.recover()


async def _administer(world: BrokerWorld, random: Random) -> None:
    name = TopicName.parse(random.choice(world.topics).name)
    try:
        if random.random() < 0.4:
            world.note(f"unload {name}")
            await world.server.topics.unload(name)
        else:
            topic = world.server.topics.loaded.get(name)
            if isinstance(topic, Topic):
                world.note(f"trimmed {name}: {await topic.trim()}")
    except MagnetarError as error:
        world.failed(f"care for {name}", error)
