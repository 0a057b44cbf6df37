"""Clients of a server that gets killed: publishers with receipts, consumers with acks of all kinds.

Owns: `ServerLoad`, all clients of one life of the server. They use the protocol driver, decide by
a seed, and note in a `ServerHistory` what they sent before they send it and what was answered.

Publishers first send again what has no receipt, then new messages. Consumers leave some entries
unacknowledged, acknowledge others one by one, several in a command, of a batch some messages,
cumulatively where that exists, with and without asking for an answer, and ask for some again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, cast

from harness.crash.server.history import (
    AUDIT,
    DEDUP_NAMESPACE,
    Entry,
    ProducerHistory,
    Sent,
    ServerHistory,
    SubscriptionHistory,
    TopicHistory,
    all_bits,
    payload_of,
    sent_of,
)
from harness.patient_clients import PatientAdmin
from harness.patient_clients import PatientDriver as Driver
from magnetar.errors import InvariantBroken, MagnetarError, RemoteProtocolError, RequestError
from magnetar.model.batch_indexes import unacked_of, words_of
from magnetar.model.ids import Position
from magnetar.model.subscriptions import SubscriptionType
from magnetar.runtime.signal import Signal
from magnetar.testing.virtual.driver import build_message
from magnetar.wire.commands import NAMES, TYPES
from magnetar.wire.messages import Command, Delivered, Received, payload_offset
from magnetar.wire.pb import pulsar_pb2 as pb

HOST: Final = "127.0.0.1"

_ENTRIES_PER_LIFE: Final = 250
_WINDOW_MAX: Final = 40
_BATCH_MAX: Final = 12
_KEYS: Final = 20
_PERMITS: Final = 1_000_000
_NO_POSITION: Final = 2**64 - 1
_ACK_SET_WORDS: Final = 64
_EARLIEST: Final = 1
_REFUSALS: Final = {TYPES[name] for name in ("CLOSE_PRODUCER", "CLOSE_CONSUMER", "SEND_ERROR")}
"""What a server that stops may send."""


@dataclass(slots=True)
class Moments:
    """What the one who kills may wait for."""

    receipts: Signal = field(default_factory=Signal)
    """Its version is the number of receipts."""
    first_ack_answer: asyncio.Event = field(default_factory=asyncio.Event)
    all_sent: asyncio.Event = field(default_factory=asyncio.Event)
    """Every publisher has the receipts of all that it had to send."""
    failure: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has ended before its server: what others wait for may never come."""


# --- what the load and the check share


async def prepare(history: ServerHistory, port: int, admin_url: str) -> None:
    """Make namespace, topics and subscriptions; what a life before has made is there already."""
    if history.prepared:
        return
    async with PatientAdmin(admin_url) as admin:
        path = f"namespaces/{DEDUP_NAMESPACE}"
        if await admin.get_or_none(path) is None:
            await admin.put(path)
        await admin.post(f"{path}/deduplication", True)
    driver = await Driver.connect(HOST, port)
    try:
        number = 0
        for topic in history.topics:
            audit = SubscriptionHistory(AUDIT, SubscriptionType.EXCLUSIVE)
            for each in (audit, *topic.subscriptions):
                number += 1
                await subscribe(driver, topic, each, number)
    finally:
        await driver.close()
    history.prepared = True


async def subscribe(
    driver: Driver, topic: TopicHistory, subscription: SubscriptionHistory, consumer_id: int
) -> None:
    await driver.request(
        "SUBSCRIBE",
        topic=topic.name,
        subscription=subscription.name,
        subType=subscription.type.value,
        consumer_id=consumer_id,
        consumer_name=f"{subscription.name}-{consumer_id}",
        initialPosition=_EARLIEST,
    )


async def open_producer(driver: Driver, topic: TopicHistory, name: str) -> int:
    """Up to which sequence id the server says that it has everything."""
    opened = await driver.request(
        "PRODUCER",
        topic=topic.name,
        producer_id=1,
        producer_name=name,
        user_provided_producer_name=True,
    )
    return int(opened.last_sequence_id)


def send(driver: Driver, topic: TopicHistory, sent: Sent) -> None:
    topic.producers[sent.producer].send(sent)
    fields: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if sent.messages > 1:
        fields = {"num_messages": sent.messages, "highest_sequence_id": sent.highest_sequence_id}
        metadata = {
            "num_messages_in_batch": sent.messages,
            "highest_sequence_id": sent.highest_sequence_id,
        }
    message = build_message(
        payload_of(sent),
        producer_name=sent.producer,
        sequence_id=sent.sequence_id,
        key=f"key-{sent.sequence_id % _KEYS}" if topic.keyed else None,
        **metadata,
    )
    driver.send("SEND", message, producer_id=1, sequence_id=sent.sequence_id, **fields)


async def next_receipt(driver: Driver) -> tuple[int, Position | None]:
    """Sequence id and place of the next one; no place: it was stored before."""
    push = await driver.pushes.get()
    if not isinstance(push, Received) or push.type != TYPES["SEND_RECEIPT"]:
        raise _unexpected("a publisher", push)
    body = cast("pb.CommandSendReceipt", push.body)
    place = body.message_id
    if place.ledgerId == _NO_POSITION:
        return body.sequence_id, None
    return body.sequence_id, Position(place.ledgerId, place.entryId)


def entry_of(delivered: Delivered) -> Entry:
    place = delivered.body.message_id
    position = Position(place.ledgerId, place.entryId)
    data = delivered.headers_and_payload
    sent = sent_of(data[payload_offset(data) :]) if delivered.checksum_ok else None
    unacked = all_bits(1 if sent is None else sent.messages)
    if delivered.body.ack_set:
        unacked &= unacked_of(delivered.body.ack_set, _ACK_SET_WORDS)
    return Entry(position, sent, unacked)


async def next_entry(driver: Driver) -> tuple[int, Entry]:
    """The consumer id and the entry of the next MESSAGE."""
    while True:
        push = await driver.pushes.get()
        if isinstance(push, Delivered):
            return push.body.consumer_id, entry_of(push)
        if isinstance(push, Received) and push.type == TYPES["ACTIVE_CONSUMER_CHANGE"]:
            continue
        raise _unexpected("a consumer", push)


def _unexpected(who: str, push: Command) -> MagnetarError:
    if not isinstance(push, Received):
        return InvariantBroken(f"{who} got {push!r}")
    text = f"{who} got {NAMES[push.type]} {push.body}"
    return RequestError(text) if push.type in _REFUSALS else InvariantBroken(text)


# --- the load


@dataclass(frozen=True, slots=True)
class _Ack:
    """One ACK command, and what it acknowledges."""

    consumer_id: int
    entries: list[tuple[Entry, int]]
    """With the bits of the messages that are acknowledged."""
    cumulative: bool
    answered: bool

    def fields(self) -> dict[str, Any]:
        kind = pb.CommandAck.Cumulative if self.cumulative else pb.CommandAck.Individual
        ids = []
        for entry, bits in self.entries:
            assert entry.sent is not None
            left = all_bits(entry.sent.messages) & ~bits
            place = entry.position
            ids.append(
                {
                    "ledgerId": place.ledger_id,
                    "entryId": place.entry_id,
                    "ack_set": list(words_of(left)),
                }
            )
        return {"consumer_id": self.consumer_id, "ack_type": kind, "message_id": ids}


class ServerLoad:
    """The clients of one life. Each ends with its connection, once it has read all that came."""

    def __init__(self, history: ServerHistory, port: int, chance: Random) -> None:
        self.ending = False
        """Set by the one who kills: connections may break from now on."""
        self.broken: list[str] = []
        """Connections that broke, and refusals, before that."""
        self.failures: list[MagnetarError] = []
        """Answers that should never be."""
        self._history = history
        self._port = port
        self._chance = chance
        self.moments = Moments()
        self._sending = sum(len(topic.producers) for topic in history.topics)
        self.entries = self._sending * _ENTRIES_PER_LIFE
        """So many its publishers send at least."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for topic in self._history.topics:
                for producer in topic.producers.values():
                    group.create_task(self._client(self._publish(topic, producer)))
                for subscription in topic.subscriptions:
                    group.create_task(self._client(self._consume(topic, subscription)))

    async def _client(self, work: Coroutine[Any, Any, None]) -> None:
        """One client must not end the others: what they have received counts."""
        try:
            await work
        except (RemoteProtocolError, RequestError, OSError) as error:
            if not self.ending:
                self.broken.append(repr(error))
                self.moments.failure.set()
        except MagnetarError as error:
            self.failures.append(error)
            self.moments.failure.set()

    # --- publishing

    async def _publish(self, topic: TopicHistory, producer: ProducerHistory) -> None:
        driver = await Driver.connect(HOST, self._port)
        try:
            known = await open_producer(driver, topic, producer.name)
            if topic.deduplicates and known < producer.last_receipted:
                text = f"{producer.name}: the server has up to {known}, receipted up to"
                raise InvariantBroken(f"{text} {producer.last_receipted}")
            await self._send_all(driver, topic, producer)
            self._sending -= 1
            if not self._sending:
                self.moments.all_sent.set()
            await driver.lost()
        finally:
            driver.abort()

    async def _send_all(
        self, driver: Driver, topic: TopicHistory, producer: ProducerHistory
    ) -> None:
        to_send = self._sends(producer)
        in_flight: deque[Sent] = deque()
        window = self._chance.randint(1, _WINDOW_MAX)
        more = True
        while more or in_flight:
            while more and len(in_flight) < window:
                sent = next(to_send, None)
                more = sent is not None and driver.failure is None
                if sent is not None and more:
                    send(driver, topic, sent)
                    in_flight.append(sent)
            if not in_flight:
                return
            sequence_id, position = await next_receipt(driver)
            expected = in_flight.popleft()
            if sequence_id != expected.sequence_id:
                text = f"{producer.name}: a receipt of {sequence_id} before {expected.sequence_id}"
                raise InvariantBroken(text)
            topic.receipt(expected, position)
            self.moments.receipts.advance()
            if self._chance.random() < 0.1:
                await asyncio.sleep(self._chance.random() * 0.02)

    def _sends(self, producer: ProducerHistory) -> Iterator[Sent]:
        """What has no receipt, as it was but for the attempt; then new ones."""
        life = self._history.life
        for sent in list(producer.unreceipted.values()):
            yield sent._replace(attempt=life)
        for _ in range(_ENTRIES_PER_LIFE):
            messages = self._chance.randint(1, _BATCH_MAX) if producer.batched else 1
            yield Sent(producer.name, producer.next_sequence_id, messages, life)

    # --- consuming

    async def _consume(self, topic: TopicHistory, subscription: SubscriptionHistory) -> None:
        driver = await Driver.connect(HOST, self._port)
        try:
            numbers = range(1, subscription.consumers + 1)
            for number in numbers:
                await subscribe(driver, topic, subscription, number)
                driver.send("FLOW", consumer_id=number, messagePermits=_PERMITS)
            while True:
                held: dict[int, list[Entry]] = {number: [] for number in numbers}
                number, entry = await next_entry(driver)
                held[number].append(entry)
                for _ in range(self._chance.randint(0, min(len(driver.pushes), 20))):
                    number, entry = await next_entry(driver)
                    held[number].append(entry)
                acks = [
                    ack
                    for number, entries in held.items()
                    for ack in self._react(driver, subscription, number, entries)
                ]
                await asyncio.gather(*[self._ack(driver, subscription, ack) for ack in acks])
        finally:
            driver.abort()

    def _react(
        self,
        driver: Driver,
        subscription: SubscriptionHistory,
        number: int,
        entries: list[Entry],
    ) -> Iterator[_Ack]:
        """Acknowledge some of what a consumer has got, leave some, want some again."""
        chance = self._chance
        in_order = subscription.type.takes_cumulative_acks
        intact = [entry for entry in entries if entry.sent is not None]
        if in_order and intact and chance.random() < 0.3:
            last = chance.choice(intact)
            yield _Ack(number, [(last, self._leading(last))], True, chance.random() < 0.5)
            return
        chosen = []
        for entry in intact:
            draw = chance.random()
            if draw < 0.04 and not in_order:
                place = {
                    "ledgerId": entry.position.ledger_id,
                    "entryId": entry.position.entry_id,
                }
                driver.send(
                    "REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=number, message_ids=[place]
                )
            elif draw < 0.85:
                chosen.append((entry, self._some(entry)))
        while chosen:
            count = chance.choice((1, 1, 3, len(chosen)))
            some, chosen = chosen[:count], chosen[count:]
            yield _Ack(number, some, False, chance.random() < 0.5)

    def _some(self, entry: Entry) -> int:
        """Messages of the entry to acknowledge: mostly all that are left of it."""
        if self._chance.random() < 0.6:
            return entry.unacked
        return self._chance.getrandbits(entry.unacked.bit_length()) & entry.unacked or entry.unacked

    def _leading(self, entry: Entry) -> int:
        """The first messages of the entry, or all."""
        assert entry.sent is not None
        if self._chance.random() < 0.5:
            return all_bits(entry.sent.messages)
        return all_bits(self._chance.randint(1, entry.sent.messages))

    async def _ack(self, driver: Driver, subscription: SubscriptionHistory, ack: _Ack) -> None:
        for entry, bits in ack.entries:
            subscription.sent_ack(entry.position, bits)
            if ack.cumulative:
                subscription.sent_cumulative_ack(entry.position)
        if not ack.answered:
            driver.send("ACK", **ack.fields())
            return
        await driver.request("ACK", **ack.fields())
        self.moments.first_ack_answer.set()
        for entry, bits in ack.entries:
            subscription.ack_is_durable(entry.position, bits)
            if ack.cumulative:
                subscription.cumulative_ack_is_durable(entry.position)
