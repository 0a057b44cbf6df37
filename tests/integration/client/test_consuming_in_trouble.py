"""Consumers while segments split and merge, connections break and brokers die.

Whatever happens, an application that settles what it receives gets every message; one consumer of a
kind that keeps order gets each of them once, and those of a key in their order.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.checkpoint import FROM_EARLIEST
from magnetar.client.consume.receiving import Receiving
from magnetar.client.consume.segment.ack_state import CumulativeAcks, IndividualAcks, SegmentMark
from magnetar.client.consume.segment.acknowledged import NOTHING_TO_DO, Acknowledged
from magnetar.client.consume.segment.stream_segment import StreamSegment
from magnetar.client.message.message import Checkpoint, Message
from magnetar.errors import AlreadyClosed
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import Kept, new_client, play
from tests.integration.client.test_producing_in_trouble import (
    Trouble,
    cut_links,
    merge,
    restart,
    split,
    trickle,
)
from tests.integration.server.scalable_stage import NAME, Stage

SEEDS = range(8)
COUNT = 400
FIRST = InitialPosition.EARLIEST
QUIET_S = 100.0

Consume = Callable[[Client, "Got", Random], Coroutine[Any, Any, None]]
"""Receives until nothing more comes."""


class Got:
    """What an application received, in the order in which it did."""

    def __init__(self) -> None:
        self.by_key: dict[str, list[bytes]] = defaultdict(list)

    def add(self, message: Message[bytes]) -> None:
        assert message.key is not None
        self.by_key[message.key].append(message.value)

    def check_exact(self, kept: Kept) -> None:
        wrong = {
            key: (self.by_key[key], sent)
            for key, sent in kept.sent.items()
            if self.by_key[key] != sent
        }
        assert not wrong, f"received and sent: {wrong}"

    def check_all(self, kept: Kept, *, once: bool) -> None:
        for key, sent in kept.sent.items():
            assert set(self.by_key[key]) == set(sent)
            assert not once or len(self.by_key[key]) == len(sent)


async def each_message(consumer: Receiving[bytes], got: Got, settle: Any, chance: Random) -> None:
    """Some are settled at once, others only when there are more of them."""
    open_ones: list[Message[bytes]] = []
    while messages := await consumer.receive_many(chance.randrange(1, 40), timeout=QUIET_S):
        for message in messages:
            got.add(message)
            open_ones.append(message)
        if chance.random() < 0.4:
            await asyncio.sleep(0.05 * chance.random())
        if chance.random() < 0.7:
            await settle(open_ones)
            open_ones = []
        else:
            asyncio.get_running_loop().call_later(5.0, settle, open_ones)
            open_ones = []


async def by_queue(client: Client, got: Got, chance: Random) -> None:
    async with await client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer:
        await each_message(consumer, got, consumer.ack_many, chance)


async def by_queues(client: Client, got: Got, chance: Random) -> None:
    await asyncio.gather(*(by_queue(client, got, chance) for _ in range(3)))


async def by_stream(client: Client, got: Got, chance: Random) -> None:
    async with await client.stream_consumer(NAME, "s", initial_position=FIRST) as consumer:

        def settle(messages: list[Message[bytes]]) -> Any:
            return consumer.ack_cumulative(messages[-1])

        await each_message(consumer, got, settle, chance)


async def by_streams(client: Client, got: Got, chance: Random) -> None:
    await asyncio.gather(*(by_stream(client, got, chance) for _ in range(2)))


async def by_checkpoint(client: Client, got: Got, chance: Random) -> None:
    """The consumer is made anew again and again, from its bytes."""
    place = FROM_EARLIEST
    while True:
        consumer = await client.checkpoint_consumer(NAME, start=place)
        for _ in range(chance.randrange(1, 12)):
            messages = await consumer.receive_many(chance.randrange(1, 40), timeout=QUIET_S)
            if not messages:
                await consumer.close()
                return
            for message in messages:
                got.add(message)
        place = Checkpoint.from_bytes(consumer.checkpoint().to_bytes())
        await consumer.close()


def run(seed: int, consume: Consume, *troubles: Trouble, disk: bool = False) -> tuple[Got, Kept]:
    chance = Random(f"{seed} consuming")
    got, kept = Got(), Kept()

    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consuming = asyncio.create_task(consume(client, got, chance))
            sending = asyncio.create_task(trickle(kept, producer, COUNT, chance))
            for trouble in troubles:
                await asyncio.sleep(0.3 * chance.random())
                await trouble(stage, chance)
            await sending
            await producer.flush()
            await consuming

    play(story, disk=disk)
    return got, kept


CHANGES = (split, split, merge, split, merge)
BREAKS = (cut_links, split, cut_links, cut_links, merge, cut_links, split, cut_links)


@pytest.mark.parametrize("troubles", [CHANGES, BREAKS], ids=["changes", "breaks"])
@pytest.mark.parametrize("consume", [by_queue, by_stream, by_checkpoint])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_consumer_gets_everything_once(
    seed: int, consume: Consume, troubles: tuple[Trouble, ...]
) -> None:
    got, kept = run(seed, consume, *troubles)
    if consume is by_queue:
        got.check_all(kept, once=True)
    else:
        got.check_exact(kept)


@pytest.mark.parametrize("consume", [by_queue, by_stream, by_checkpoint])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_one_consumer_gets_everything_once_over_restarts(seed: int, consume: Consume) -> None:
    got, kept = run(seed, consume, split, restart, merge, restart, disk=True)
    if consume is by_queue:
        got.check_all(kept, once=True)
    else:
        got.check_exact(kept)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_several_queue_consumers_lose_nothing(seed: int) -> None:
    got, kept = run(seed, by_queues, *BREAKS)
    got.check_all(kept, once=False)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_members_of_a_group_keep_the_order_of_each_key(seed: int) -> None:
    got, kept = run(seed, by_streams, *CHANGES)
    got.check_exact(kept)


async def values(consumer: Receiving[bytes], most: int) -> list[bytes]:
    return [each.value for each in await consumer.receive_many(most, timeout=QUIET_S)]


async def rows(consumer: Receiving[bytes], most: int) -> list[bytes]:
    batch = await consumer.receive_arrow(most, timeout=QUIET_S)
    found: list[bytes] = batch.column("value").to_pylist()
    return found


Receive = Callable[[Receiving[bytes], int], Coroutine[Any, Any, list[bytes]]]


def over_a_cut(receive: Receive) -> list[bytes]:
    """What a stream gets if connections break while the application has something unsettled."""
    found: list[bytes] = []

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.stream_consumer(NAME, "s", initial_position=FIRST) as consumer,
        ):
            await Kept().send_many(producer, 20, keys=1)
            await producer.flush()
            found.extend(await receive(consumer, 5))
            await cut_links(stage, Random(0))
            while more := await receive(consumer, 40):
                found.extend(more)

    play(story)
    return found


@pytest.mark.parametrize("receive", [values, rows])
def test_harm_of_forgetting_what_the_application_has(
    monkeypatch: pytest.MonkeyPatch, receive: Receive
) -> None:
    sent = [b"%d" % number for number in range(20)]
    assert over_a_cut(receive) == sent
    monkeypatch.setattr(CumulativeAcks, "handed", lambda self, mark: None)
    found = over_a_cut(receive)
    assert len(found) > len(sent), "what the application had came again"
    assert set(found) == set(sent)


@pytest.mark.parametrize("receive", [values, rows])
def test_a_sealed_segment_is_left_though_messages_of_another_wait_behind_its_last(
    receive: Receive,
) -> None:
    """The broker tells its end only when it hears that everything was read."""
    found: list[bytes] = []

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with (
            new_client(stage) as client,
            await client.producer(NAME) as producer,
            await client.checkpoint_consumer(NAME, start=FROM_EARLIEST) as consumer,
        ):
            kept = Kept()
            for segment_id in (0, 1):
                await kept.send_many(producer, 50)
                await producer.flush()
                await stage.split(segment_id)
            await kept.send_many(producer, 50)
            await producer.flush()
            while more := await receive(consumer, 1000):
                found.extend(more)

    play(story)
    assert sorted(map(int, found)) == list(range(150))


def test_harm_of_acknowledging_what_still_waits_for_the_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The vector of a cumulative acknowledgement is taken when its message is handed out."""

    def through_arrived(self: StreamSegment, turn: int, txn: None) -> Acknowledged:
        receive_queue = self.receive_queue._waiting
        waiting = [
            each._raw_id
            for each in receive_queue
            if isinstance(each, Message) and each._source is self
        ]
        handed = self._hand_offs.through(turn)
        if not waiting:
            return NOTHING_TO_DO if handed is None else self.ack_through(handed)
        return self.ack_through(SegmentMark(waiting[-1].position))

    async def by_short_streams(client: Client, got: Got, chance: Random) -> None:
        """Each one ends after a few messages, as if it had died."""
        while True:
            consumer = await client.stream_consumer(NAME, "s", initial_position=FIRST)
            messages = await consumer.receive_many(10, timeout=QUIET_S)
            for message in messages:
                got.add(message)
            if messages:
                await consumer.ack_cumulative(messages[-1])
            await consumer.close()
            if not messages:
                return

    got, kept = run(1, by_short_streams, split, split)
    got.check_exact(kept)
    monkeypatch.setattr(StreamSegment, "ack_turns", through_arrived)
    got, kept = run(1, by_short_streams, split, split)
    with pytest.raises(AssertionError, match="received and sent"):
        got.check_exact(kept)


def test_harm_of_forgetting_acknowledgements_that_were_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IndividualAcks, "reconnected", IndividualAcks.forget)
    harmed = 0
    for seed in SEEDS:
        got, kept = run(seed, by_queue, *BREAKS)
        try:
            got.check_all(kept, once=True)
        except AssertionError:
            harmed += 1
    assert harmed


def test_what_is_acknowledged_after_the_close_is_refused() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            async with await client.producer(NAME) as producer:
                await producer.send(b"x", key="k")
            message = await consumer.receive(timeout=5.0)
            await consumer.close()
            with pytest.raises(AlreadyClosed):
                consumer.ack(message)

    play(story)
