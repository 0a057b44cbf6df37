"""Clients of a topic whose server is killed in the middle of a layout change.

Owns: `ChangeHistory`, what clients were told of one topic; `fill`, which publishes and acknowledges
before the change; `check_clients`, which uses the topic as it is found after a restart.

What holds whatever step the change was killed at:
1. Every active segment takes messages, and one that was receipted before is not stored again.
2. The subscription `all`, which acknowledged nothing, is given everything that has a receipt, once;
   `rest` everything but what it acknowledged.
3. What had no receipt at the kill and was sent again is stored once, but for a migration: regular
   topics know nothing of each other's sequences. It is counted (`doubled`).
4. Segments read parents first give the messages of each key in the order of publishing.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from harness.crash.scalable.child import SUBSCRIPTIONS
from harness.patient_clients import PatientDriver as Driver
from harness.simulation.scalable.links import CLIENT_VERSION, route
from magnetar.client.message.layouts import layout_from
from magnetar.errors import InvariantBroken, RequestError
from magnetar.model.hashing import key_hash
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.model.segments import Segment, SegmentLayout
from magnetar.scalable.records import segment_topic
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Delivered, Received, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

HOST: Final = "127.0.0.1"
PRODUCER: Final = "p"

_MESSAGES: Final = 24
_ACKED_OF_EACH: Final = 2
_NEW_OF_EACH: Final = 2
_PERMITS: Final = 10_000
_NO_POSITION: Final = 2**64 - 1


class Stored(NamedTuple):
    """A message of a log, and where it stands."""

    sequence: int
    position: Position


@dataclass(slots=True)
class ChangeHistory:
    """What the clients of one topic were told."""

    topic: TopicName
    key_names: list[str] = field(default_factory=list)
    """The keys that messages have, in turn."""
    keys: dict[int, str] = field(default_factory=dict)
    """Of everything that has a receipt, by sequence."""
    acked: set[int] = field(default_factory=set)
    """What `rest` acknowledged."""
    last: dict[str, int] = field(default_factory=dict)
    """The last receipted sequence of each topic that holds a segment."""
    may_double: set[int] = field(default_factory=set)
    """What had no receipt when the server of a migrating topic was killed."""
    doubled: set[int] = field(default_factory=set)
    """Those of them that were stored twice."""

    @property
    def next_sequence(self) -> int:
        return max(self.keys, default=-1) + 1

    def copy(self) -> ChangeHistory:
        return deepcopy(self)

    def receipt(self, sequence: int, key: str, place: TopicName) -> None:
        self.keys[sequence] = key
        self.last[str(place)] = sequence


class TopicClients:
    """A producer and consumers of a topic whose layout is known, on one connection."""

    def __init__(self, driver: Driver, history: ChangeHistory, layout: SegmentLayout) -> None:
        self._driver = driver
        self._history = history
        self._layout = layout
        self._producers: dict[int, int] = {}
        self._numbers = count(1)

    def name(self, segment: Segment) -> TopicName:
        return segment_topic(self._history.topic, segment)

    # --- producing

    async def publish(self, sequence: int, key: str) -> bool:
        """Send, and await the receipt; False: it was stored before."""
        segment = route(self._layout, key_hash(key))
        number = await self._producer(segment)
        message = build_message(
            str(sequence).encode(),
            producer_name=self._producer_name(segment),
            sequence_id=sequence,
            key=key,
        )
        receipt = await self._driver.publish(number, sequence, message)
        if receipt.message_id.ledgerId == _NO_POSITION:
            return False
        self._history.receipt(sequence, key, self.name(segment))
        return True

    async def _producer(self, segment: Segment) -> int:
        known = self._producers.get(segment.segment_id)
        if known is not None:
            return known
        number = self._producers[segment.segment_id] = next(self._numbers)
        await self._driver.request(
            "PRODUCER",
            topic=str(self.name(segment)),
            producer_id=number,
            producer_name=self._producer_name(segment),
            user_provided_producer_name=True,
        )
        return number

    def _producer_name(self, segment: Segment) -> str:
        legacy = segment.legacy_topic_name is not None
        return PRODUCER if legacy else f"{PRODUCER}-seg-{segment.segment_id}"

    # --- consuming

    async def read(self, subscription: str, segment: Segment) -> list[Stored]:
        """What a subscription is given of a segment, to its end; nothing is acknowledged."""
        number = await self._subscribe(subscription, segment)
        driver, found = self._driver, list[Stored]()
        reply = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=number)
        last = _position(reply.last_message_id)
        driver.send("FLOW", consumer_id=number, messagePermits=_PERMITS)
        while last is not None and (not found or found[-1].position < last):
            push = await driver.pushes.get()
            if isinstance(push, Delivered) and push.body.consumer_id == number:
                found.append(_stored(push))
        await driver.request("CLOSE_CONSUMER", consumer_id=number)
        return found

    async def acknowledge(self, subscription: str, segment: Segment, stored: list[Stored]) -> None:
        """Durably, when it returns."""
        number = await self._subscribe(subscription, segment)
        ids = [
            {"ledgerId": each.position.ledger_id, "entryId": each.position.entry_id}
            for each in stored
        ]
        kind = pb.CommandAck.Individual
        await self._driver.request("ACK", consumer_id=number, ack_type=kind, message_id=ids)
        await self._driver.request("CLOSE_CONSUMER", consumer_id=number)

    async def _subscribe(self, subscription: str, segment: Segment) -> int:
        number = next(self._numbers)
        await self._driver.request(
            "SUBSCRIBE",
            topic=str(self.name(segment)),
            subscription=subscription,
            subType=pb.CommandSubscribe.Exclusive,
            consumer_id=number,
            consumer_name=f"c-{number}",
            initialPosition=pb.CommandSubscribe.Earliest,
        )
        return number


def _position(place: Any) -> Position | None:
    """None: there is none."""
    if place.ledgerId == _NO_POSITION or place.entryId == _NO_POSITION:
        return None
    return Position(place.ledgerId, place.entryId)


def _stored(push: Delivered) -> Stored:
    data = push.headers_and_payload
    place = _position(push.body.message_id)
    assert place is not None, "a delivery has a place"
    return Stored(int(data[payload_offset(data) :]), place)


# --- before the change


async def fill(port: int, history: ChangeHistory, layout: SegmentLayout) -> None:
    """Publish, and acknowledge the first messages of every segment on `rest`.

    The last one is left: whoever reads a segment to its end waits for that.
    """
    driver = await Driver.connect(HOST, port)
    try:
        clients = TopicClients(driver, history, layout)
        for sequence in range(_MESSAGES):
            key = history.key_names[sequence % len(history.key_names)]
            await clients.publish(sequence, key)
        for segment in layout.active:
            first = (await clients.read(SUBSCRIPTIONS[1], segment))[:-1][:_ACKED_OF_EACH]
            await clients.acknowledge(SUBSCRIPTIONS[1], segment, first)
            history.acked.update(each.sequence for each in first)
    finally:
        await driver.close()


# --- after the restart


async def layout_seen(port: int, topic: str) -> SegmentLayout | None:
    """The layout that clients are told; None: there is no such topic."""
    driver = await Driver.connect(HOST, port, client_version=CLIENT_VERSION)
    try:
        driver.send("SCALABLE_TOPIC_LOOKUP", session_id=1, topic=topic, create_if_missing=False)
        push = await driver.pushes.get()
        assert isinstance(push, Received), "it is no message"
        body: Any = push.body
        if push.type != TYPES["SCALABLE_TOPIC_UPDATE"] or body.HasField("error"):
            return None
        return layout_from(body.dag)
    finally:
        await driver.close()


async def check_clients(port: int, history: ChangeHistory, layout: SegmentLayout) -> list[str]:
    """Go on with producers and consumers; what is wrong with that.

    A new message goes to every active segment, so the history has grown afterwards.
    """
    wrong = await _resend(port, history, layout)
    driver = await Driver.connect(HOST, port)
    try:
        clients = TopicClients(driver, history, layout)
        for segment in layout.active:
            for key in _keys_of(layout, segment):
                sequence = history.next_sequence
                if not await clients.publish(sequence, key):
                    wrong.append(f"{clients.name(segment)}: {sequence} is new, yet called stored")
        for subscription in SUBSCRIPTIONS:
            wrong += await _check_subscription(clients, history, layout, subscription)
    finally:
        await driver.close()
    return wrong


async def _resend(port: int, history: ChangeHistory, layout: SegmentLayout) -> list[str]:
    """Send the last messages of each segment again: they are known, or at least not stored."""
    wrong = []
    migrated = any(each.legacy_topic_name is not None for each in layout.segments.values())
    for place, sequence in sorted(history.last.items()):
        driver = await Driver.connect(HOST, port)
        try:
            clients = TopicClients(driver, history, layout)
            if await clients.publish(sequence, history.keys[sequence]):
                wrong.append(f"{sequence}, which {place} has, was stored again")
        except RequestError as error:
            # Several regular topics may contradict each other about a sequence: it is refused.
            if not migrated:
                wrong.append(f"{sequence}, which {place} has, was refused: {error}")
        finally:
            await driver.close()
    return wrong


def _keys_of(layout: SegmentLayout, segment: Segment) -> list[str]:
    candidates = (f"new-{number}" for number in count())
    keys: list[str] = []
    while len(keys) < _NEW_OF_EACH:
        key = next(candidates)
        if route(layout, key_hash(key)) is segment:
            keys.append(key)
    return keys


async def _check_subscription(
    clients: TopicClients, history: ChangeHistory, layout: SegmentLayout, subscription: str
) -> list[str]:
    expected = set(history.keys)
    if subscription == SUBSCRIPTIONS[1]:
        expected -= history.acked
    found = [
        stored.sequence
        for segment in layout.segments.values()  # by id: parents come first
        for stored in await clients.read(subscription, segment)
    ]
    read: list[int] = []
    for sequence in found:
        if sequence in history.may_double and sequence in read:
            history.doubled.add(sequence)
        else:
            read.append(sequence)
    return [f"{subscription}: {text}" for text in compare(history.keys, expected, read)]


def compare(keys: dict[int, str], expected: set[int], read: list[int]) -> list[str]:
    """What is wrong with what a subscription was given, in the order of segments (pure)."""
    counts = Counter(read)
    wrong = [f"{sequence} is lost" for sequence in sorted(expected - set(read))]
    wrong += [f"{each} came {times} times" for each, times in counts.items() if times > 1]
    wrong += [f"{each} came, unasked for" for each in sorted(set(read) - expected)]
    last: dict[str, int] = {}
    for sequence in read:
        key = keys.get(sequence, "")
        if last.get(key, -1) > sequence:
            wrong.append(f"{sequence} came after {last[key]}, of the same key")
        last[key] = sequence
    return wrong


def check_layout(layout: SegmentLayout, seen: SegmentLayout | None) -> list[str]:
    """Of the record, and as clients are told it."""
    wrong = []
    try:
        layout.check_invariants()
    except InvariantBroken as error:
        wrong.append(str(error))
    if seen is None or dict(seen.segments) != dict(layout.segments) or seen.epoch != layout.epoch:
        wrong.append(f"clients are told {seen}, the record has {layout}")
    return wrong
