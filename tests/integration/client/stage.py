"""The Python client with real brokers on virtual time, and what is stored afterwards.

Owns: `new_client`; `stored`, every message of a topic as a plain reader finds it; `Kept`, what an
application sent and was told, which is compared with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from harness.simulation.scalable.world import ANY_HOST, PORT
from harness.simulation.seeds import EPOCH_MS
from magnetar.client.client import Client
from magnetar.client.message.batch import messages_in, open_entry
from magnetar.client.message.message import AnyMessageId
from magnetar.client.produce.producer import Producer
from magnetar.errors import DeadlineExceeded, MagnetarError
from magnetar.runtime.clock import LoopClock
from magnetar.testing.virtual.driver import Driver
from magnetar.wire.messages import Delivered
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server import scalable_stage
from tests.integration.server.scalable_stage import NAME, TOPIC, Stage

URL: Final = f"pulsar://{ANY_HOST}:{PORT}"
SEED: Final = 11

_checks = count()

play = partial(scalable_stage.play, checked=False)
"""Stories here check what they have stored themselves."""


def new_client(stage: Stage, **options: Any) -> Client:
    options = {"operation_timeout": 30.0, **options}
    return Client(
        URL,
        connect=stage.world.connect,
        chance=Random(SEED),
        clock=LoopClock(EPOCH_MS),
        **options,
    )


class Stored(NamedTuple):
    """One message, as it is in the log."""

    topic: str
    key: str
    payload: bytes
    sequence_id: int
    entry: pb.MessageMetadata


async def stored(stage: Stage, topic: str = NAME) -> list[Stored]:
    """Every message of a topic, parents before children."""
    names = [topic]
    if topic == NAME:
        segments = (await stage.layout()).segments.values()
        names = [str(TOPIC.segment(segment.descriptor)) for segment in segments]
    return [each for name in names for each in await _stored_in(stage, name)]


async def _stored_in(stage: Stage, topic: str) -> list[Stored]:
    asked = await stage.driver(stage.world.ready[0].name)
    found = await asked.request("LOOKUP", topic=topic)
    await asked.close()
    driver = await stage.driver(urlsplit(found.brokerServiceUrl).hostname)
    try:
        return await _read(driver, topic)
    finally:
        await driver.close()


async def _read(driver: Driver, topic: str) -> list[Stored]:
    await driver.request(
        "SUBSCRIBE",
        topic=topic,
        subscription=f"check-{next(_checks)}",
        subType=pb.CommandSubscribe.Exclusive,
        consumer_id=1,
        durable=False,
        initialPosition=pb.CommandSubscribe.Earliest,
        start_message_id={"ledgerId": 2**64 - 1, "entryId": 2**64 - 1},
    )
    driver.send("FLOW", consumer_id=1, messagePermits=1_000_000)
    found: list[Stored] = []
    while True:
        try:
            push = await driver.pushes.get(5)
        except DeadlineExceeded:
            return found
        if isinstance(push, Delivered):
            found += _messages(topic, push)


def _messages(topic: str, delivered: Delivered) -> list[Stored]:
    opened = open_entry(delivered.headers_and_payload)
    entry = opened.metadata
    if not opened.is_batch:
        return [Stored(topic, entry.partition_key, opened.payload, entry.sequence_id, entry)]
    return [
        Stored(topic, each.metadata.partition_key, each.payload, each.metadata.sequence_id, entry)
        for each in messages_in(opened)
    ]


class Kept:
    """What was sent, by key and in order, and what came of it."""

    def __init__(self) -> None:
        self.sent: dict[str, list[bytes]] = defaultdict(list)
        self.receipts: list[tuple[str, bytes, asyncio.Future[AnyMessageId]]] = []

    async def send(self, producer: Producer[bytes], key: str, payload: bytes, **how: Any) -> None:
        """Hand a message in, and remember it."""
        receipt = await producer.submit(payload, key=key, **how)
        self.sent[key].append(payload)
        self.receipts.append((key, payload, receipt))

    async def send_many(self, producer: Producer[bytes], count: int, *, keys: int = 16) -> None:
        begun = sum(map(len, self.sent.values()))
        for number in range(begun, begun + count):
            await self.send(producer, f"k{number % keys}", b"%d" % number)

    async def check(self, stage: Stage, topic: str = NAME) -> None:
        """Everything is stored exactly once, each key in its order."""
        failures = [receipt.exception() for _, _, receipt in self.receipts if receipt.done()]
        assert len(failures) == len(self.receipts), "a send has no end"
        assert [each for each in failures if each is not None] == []
        found: dict[str, list[bytes]] = defaultdict(list)
        for message in await stored(stage, topic):
            found[message.key].append(message.payload)
        wrong = {key: (found[key], sent) for key, sent in self.sent.items() if found[key] != sent}
        assert not wrong, f"found and sent: {wrong}"
        assert found.keys() <= self.sent.keys()


async def outcome(receipt: asyncio.Future[AnyMessageId]) -> AnyMessageId | MagnetarError:
    try:
        return await receipt
    except MagnetarError as error:
        return error
