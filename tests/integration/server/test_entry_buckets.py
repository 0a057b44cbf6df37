"""Consumers that share a topic by its entry buckets, over the protocol."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.limits import within
from magnetar.errors import WireCode
from magnetar.model.hashing import HASH_MAX, bucket_hash, key_hash
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Delivered, payload_offset
from tests.unit.server.serving import connected, refused, run, serving, subscribed

QUARTERS = ((0, 16383), (16384, 32767), (32768, 49151), (49152, HASH_MAX))
KEYS = tuple(f"k-{number}" for number in range(16))
MESSAGES = 240
HELD_MAX = 5


def sharing(*buckets: tuple[int, int], mode: int = 1) -> dict[str, Any]:
    """keySharedMeta of a consumer that shares the topic by these buckets."""
    ranges = [{"start": start, "end": end} for start, end in buckets]
    return {"keySharedMode": mode, "hashRanges": ranges, "entryBucketDispatch": True}


def bucket_of(key: str) -> int:
    return bucket_hash(key_hash(key)) >> 14


# --- who may join


@pytest.mark.parametrize(
    "meta",
    [
        sharing(*QUARTERS[:-1]),
        sharing(QUARTERS[0], *QUARTERS[2:]),
        sharing((0, 0), (1, HASH_MAX)),
        sharing((2, HASH_MAX)),
        sharing((-1, HASH_MAX)),
        sharing(),
        sharing(*QUARTERS, mode=0),
    ],
    ids=["no end", "gap", "0 alone", "from 2", "from -1", "none", "auto split"],
)
def test_buckets_that_do_not_tile_the_ring_are_refused(
    tmp_path: Path, meta: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            request = subscribed(driver, subType=3, keySharedMeta=meta)
            assert await refused(request) == WireCode.CONSUMER_ASSIGN
            await driver.close()

    run(scene())


def test_sharers_name_the_same_buckets(tmp_path: Path) -> None:
    halves = ((0, 32767), (32768, HASH_MAX))
    others: list[tuple[int, dict[str, Any] | None, WireCode]] = [
        (3, sharing(*halves), WireCode.CONSUMER_ASSIGN),
        (3, {"keySharedMode": 1, "hashRanges": [{"start": 0, "end": 9}]}, WireCode.CONSUMER_ASSIGN),
        (3, {"keySharedMode": 0}, WireCode.CONSUMER_ASSIGN),
        (3, None, WireCode.CONSUMER_ASSIGN),
        (0, None, WireCode.CONSUMER_BUSY),
    ]

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, 1, subType=3, keySharedMeta=sharing(*QUARTERS))
            for kind, meta, code in others:
                request = subscribed(driver, 2, subType=kind, keySharedMeta=meta)
                assert await refused(request) == code, meta
            from_one = sharing((1, 16383), *QUARTERS[1:])
            await subscribed(driver, 2, subType=3, keySharedMeta=from_one)
            for number in (1, 2):
                await driver.request("CLOSE_CONSUMER", consumer_id=number)
            await subscribed(driver, 3, subType=3, keySharedMeta=sharing(*halves))
            await driver.close()

    run(scene())


# --- order


@dataclass
class Traffic:
    """What all consumers got, in the order in which it came.

    After a third of the messages nobody acknowledges, until all are published; when half of them
    have come, the third consumer joins.
    """

    seed: int
    order: list[tuple[str, int, str]] = field(default_factory=list)
    """Consumer, number, key."""
    held: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    """Key and id of unacknowledged messages, by consumer."""
    frozen: bool = False
    half: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def got(self, name: str, number: int, key: str, message_id: Any) -> None:
        for other, held in self.held.items():
            buckets = {bucket_of(each) for each, _ in held}
            where = f"seed {self.seed}: {number} of {key} came to {name}"
            assert other == name or bucket_of(key) not in buckets, f"{where}, {other} has it"
        self.order.append((name, number, key))
        self.held.setdefault(name, []).append((key, message_id))
        if len(self.order) == MESSAGES // 3:
            self.frozen = True
        elif len(self.order) == MESSAGES // 2:
            self.half.set()
        elif len(self.order) == MESSAGES:
            self.done.set()

    def ack(self, name: str, driver: Driver) -> None:
        """Everything that a consumer has, in any order."""
        held = self.held.pop(name, [])
        self.rng.shuffle(held)
        for _, each in held:
            fields = {"ledgerId": each.ledgerId, "entryId": each.entryId}
            driver.send("ACK", consumer_id=0, ack_type=0, message_id=[fields])


async def _publish(driver: Driver, traffic: Traffic) -> None:
    """Every other message has no key but is stamped, as in a batch of its bucket."""
    await driver.request("PRODUCER", topic="topic", producer_id=1)
    for number in range(MESSAGES):
        if number == MESSAGES // 2:
            await traffic.joined.wait()
        key = traffic.rng.choice(KEYS)
        where: dict[str, Any] = {"key": key}
        if number % 2:
            at = bucket_hash(key_hash(key))
            where = {"entry_hash_min": at, "entry_hash_max": at}
        entry = build_message(f"{number} {key}".encode(), sequence_id=number, **where)
        await driver.publish(1, number, entry)


async def _consume(driver: Driver, name: str, traffic: Traffic) -> None:
    """Acknowledge when some are held, or nothing else is there to do."""
    while True:
        delivered = await driver.pushes.get()
        assert isinstance(delivered, Delivered)
        data = delivered.headers_and_payload
        number, key = data[payload_offset(data) :].decode().split()
        traffic.got(name, int(number), key, delivered.body.message_id)
        enough = len(traffic.held[name]) >= HELD_MAX or not len(driver.pushes)
        if enough and not traffic.frozen:
            traffic.ack(name, driver)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keys_keep_their_order_when_a_third_consumer_joins(tmp_path: Path, seed: int) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            traffic = Traffic(seed)
            drivers = {name: await connected(server) for name in "acb"}
            publisher = await connected(server)
            for name in "ac":
                await _share(drivers[name], name)
            async with within("all messages"), asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(_consume(each, name, traffic))
                    for name, each in drivers.items()
                ]
                publishing = group.create_task(_publish(publisher, traffic))
                await traffic.half.wait()
                await _share(drivers["b"], "b")
                traffic.joined.set()
                await publishing
                assert "b" not in traffic.held, "its bucket moved with messages unacknowledged"
                traffic.frozen = False
                for name in "ac":
                    traffic.ack(name, drivers[name])
                await traffic.done.wait()
                for loop in loops:
                    loop.cancel()
            _check(traffic)
            await _check_backlog(list(drivers.values()))
            for driver in (*drivers.values(), publisher):
                await driver.close()

    run(scene())


async def _share(driver: Driver, name: str) -> None:
    meta = sharing(*QUARTERS)
    await subscribed(driver, subType=3, keySharedMeta=meta, consumer_name=name)


def _check(traffic: Traffic) -> None:
    assert sorted(number for _, number, _ in traffic.order) == list(range(MESSAGES))
    for bucket in range(len(QUARTERS)):
        numbers = [number for _, number, key in traffic.order if bucket_of(key) == bucket]
        assert numbers == sorted(numbers), f"seed {traffic.seed}: bucket {bucket} is out of order"
    last = {bucket_of(key): name for name, _, key in traffic.order}
    assert last == {0: "a", 1: "b", 2: "c", 3: "c"}, f"seed {traffic.seed}"


async def _check_backlog(drivers: list[Driver]) -> None:
    """Acknowledgements are applied in the order of frames: each answer comes after them."""
    stats = [await driver.request("CONSUMER_STATS", consumer_id=0) for driver in drivers]
    assert [each.unackedMessages for each in stats] == [0, 0, 0]
    again = await drivers[0].request("CONSUMER_STATS", consumer_id=0)
    assert (again.type, again.msgBacklog) == ("Key_Shared", 0)
