"""Producers while segments split and merge, connections break and brokers die.

Whatever happens, each message that was handed in is stored once, and each key keeps its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from magnetar.client.produce.outbox import Outbox, Pending
from magnetar.client.produce.producer import Producer
from magnetar.errors import MagnetarError
from magnetar.model.names import TopicName
from tests.integration.client.stage import Kept, new_client, play, stored
from tests.integration.server.scalable_stage import NAME, TOPIC, Stage
from tests.unit.client.message.test_layout_forms import sealed

REGULAR = "persistent://public/default/orders"
SEEDS = range(8)

Trouble = Callable[[Stage, Random], Awaitable[None]]


async def cut_links(stage: Stage, chance: Random) -> None:
    """Break every connection, one after the other."""
    for host in stage.world.hosts.values():
        for link in list(host.network.links):
            link.cut()
            await asyncio.sleep(0.01 * chance.random())


async def split(stage: Stage, chance: Random) -> None:
    layout = await stage.layout()
    await stage.split(chance.choice(layout.active).segment_id)


async def merge(stage: Stage, chance: Random) -> None:
    active = (await stage.layout()).active
    if len(active) > 1:
        at = chance.randrange(len(active) - 1)
        await stage.merge(active[at].segment_id, active[at + 1].segment_id)


async def restart(stage: Stage, chance: Random) -> None:
    await stage.host.kill()
    await asyncio.sleep(3 * chance.random())
    assert await stage.host.start()


async def trickle(
    kept: Kept, producer: Producer[bytes], count: int, chance: Random, *, keys: int = 12
) -> None:
    """Messages in bursts, so that batches and single messages are under way."""
    while count > 0:
        burst = min(count, chance.randrange(1, 30))
        await kept.send_many(producer, burst, keys=keys)
        count -= burst
        await asyncio.sleep(0.02 * chance.random())


async def fall_silent(stage: Stage, chance: Random) -> None:
    """Nothing arrives for a while; then it does, or the connections break."""
    links = [link for host in stage.world.hosts.values() for link in host.network.links]
    for link in links:
        link.fall_silent(client=chance.random() < 0.5)
    await asyncio.sleep(2 * chance.random())
    if chance.random() < 0.5:
        for link in links:
            link.recover()
    else:
        await cut_links(stage, chance)


async def replace(stage: Stage, chance: Random) -> None:
    """One of several brokers dies; another has its topics until and after it comes again."""
    host = chance.choice(list(stage.world.hosts.values()))
    await host.kill()
    await asyncio.sleep(10 * chance.random())
    assert await host.start()


def run(
    seed: int,
    *troubles: Trouble,
    count: int = 500,
    disk: bool = False,
    brokers: str = "a",
    **how: Any,
) -> None:
    """Send while these happen, in this order."""
    chance = Random(f"{seed} trouble")

    async def story(stage: Stage) -> None:
        await stage.create()
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME, **how) as producer:
            sending = asyncio.create_task(trickle(kept, producer, count, chance))
            for trouble in troubles:
                await asyncio.sleep(0.2 * chance.random())
                await trouble(stage, chance)
            await sending
            await producer.flush()
        await kept.check(stage)

    play(story, disk=disk, brokers=brokers)


@pytest.mark.parametrize("seed", SEEDS)
def test_splits_and_merges(seed: int) -> None:
    run(seed, split, split, merge, split, merge, batching=bool(seed % 3))


@pytest.mark.parametrize("seed", SEEDS)
def test_splits_and_merges_with_broken_connections(seed: int) -> None:
    run(seed, cut_links, split, cut_links, cut_links, merge, cut_links, batching=bool(seed % 3))


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_splits_and_restarts(seed: int) -> None:
    run(seed, split, restart, merge, restart, disk=True)


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_topics_that_move_between_brokers(seed: int) -> None:
    run(seed, split, replace, cut_links, replace, brokers="ab", send_timeout=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(8))
def test_any_trouble(group: int) -> None:
    """200 seeds: whatever may happen, in any order, with any options."""
    for seed in range(25 * group, 25 * group + 25):
        chance = Random(f"{seed} any trouble")
        disk = chance.random() < 0.5
        kinds = [split, merge, cut_links, fall_silent, *([restart] if disk else [])]
        run(
            seed,
            *(chance.choice(kinds) for _ in range(chance.randrange(2, 9))),
            count=chance.randrange(50, 500),
            disk=disk,
            batching=chance.random() < 0.8,
            max_pending=chance.choice([5, 50, 10_000]),
            batch_messages=chance.choice([3, 1000]),
            send_timeout=300.0,
        )


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_restarts_in_the_middle_of_a_split(seed: int) -> None:
    async def split_and_restart(stage: Stage, chance: Random) -> None:
        splitting = asyncio.create_task(split(stage, chance))
        await asyncio.sleep(0.005 * chance.random())
        await restart(stage, chance)
        await asyncio.gather(splitting, return_exceptions=True)

    run(seed, split_and_restart, cut_links, split_and_restart, disk=True)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_ids_of_the_application_over_splits(seed: int) -> None:
    chance = Random(f"{seed} ids")

    async def story(stage: Stage) -> None:
        await stage.create()
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def sending() -> None:
                for number in range(300):
                    key = f"k{chance.randrange(9)}"
                    await kept.send(producer, key, b"%d" % number, sequence_id=2 * number)
                    if not number % 20:
                        await asyncio.sleep(0.01 * chance.random())

            task = asyncio.create_task(sending())
            for trouble in (split, cut_links, split, merge):
                await asyncio.sleep(0.05 * chance.random())
                await trouble(stage, chance)
            await task
            await producer.flush()
        await kept.check(stage)

    play(story)


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_without_a_key_in_text_over_splits_and_merges(seed: int) -> None:
    chance = Random(f"{seed} no key")

    async def story(stage: Stage) -> None:
        await stage.create(2)
        receipts = []
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def sending() -> None:
                for number in range(400):
                    key = b"\xff\x00" if number % 7 == 0 else None
                    receipts.append(await producer.submit(b"%d" % number, key=key))
                    if not number % 10:
                        await asyncio.sleep(0.01 * chance.random())

            task = asyncio.create_task(sending())
            for trouble in (split, cut_links, merge, merge, cut_links, split):
                await asyncio.sleep(0.05 * chance.random())
                await trouble(stage, chance)
            await task
            await producer.flush()
        found = [int(each.payload) for each in await stored(stage)]
        assert sorted(found) == list(range(400))
        assert [each.exception() for each in receipts] == [None] * 400

    play(story)


def test_a_large_message_is_cut_again_for_the_next_segment() -> None:
    large = bytes(range(256)) * (8 * 4096)

    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            new_client(stage) as client,
            await client.producer(NAME, chunking=True) as producer,
        ):
            before = await producer.submit(b"before", key="k")
            sent = await producer.submit(large, key="k")
            after = await producer.submit(b"after", key="k")
            await asyncio.sleep(0)
            await stage.split(0)
            await asyncio.gather(before, sent, after)
        whole: dict[str, list[bytes]] = {}
        for each in await stored(stage):
            if each.entry.num_chunks_from_msg > 1:
                whole.setdefault(each.entry.uuid, []).append(each.payload)
        assert large in [b"".join(chunks) for chunks in whole.values()]

    play(story)


def test_a_layout_without_active_segments_is_waited_out() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        kept = Kept()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            await kept.send_many(producer, 50)
            watch = producer._core.segments._watch
            layout = watch.layout
            assert layout is not None
            watch._adopt(sealed(layout))
            await asyncio.sleep(1)
            await kept.send_many(producer, 50)
            await stage.split(0)
            await kept.send_many(producer, 50)
            await producer.flush()
        await kept.check(stage)

    play(story)


# --- regular topics


def test_a_regular_topic_becomes_a_scalable_one_while_it_is_written_to() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)
        await stage.host.ask(lambda server: server.context.topics.create_partitioned(name, 2))
        kept = Kept()
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            await kept.send_many(producer, 50)
            await producer.flush()
            sending = asyncio.create_task(trickle(kept, producer, 300, Random(3), keys=16))
            await asyncio.sleep(0.05)
            await stage.ask(lambda scalable: scalable.migrate(name, force=False))
            await sending
            await producer.flush()
        layout = await stage.layout()
        assert len(layout.active) == 2
        found: dict[str, list[bytes]] = {}
        names = [f"{REGULAR}-partition-0", f"{REGULAR}-partition-1"]
        names += [str(TOPIC.segment(each.descriptor)) for each in layout.active]
        for topic in names:
            for message in await stored(stage, topic):
                found.setdefault(message.key, []).append(message.payload)
        assert found == kept.sent

    play(story)


def test_new_partitions_are_used_within_a_minute() -> None:
    async def story(stage: Stage) -> None:
        name = TopicName.parse(REGULAR)
        await stage.host.ask(lambda server: server.context.topics.create_partitioned(name, 1))
        async with new_client(stage) as client, await client.producer(REGULAR) as producer:
            await producer.send(b"x", key="k")
            await stage.host.ask(lambda server: server.context.topics.grow(name, 4))
            await asyncio.sleep(65)
            sent = await asyncio.gather(*(producer.send(b"y", key=f"k{n}") for n in range(40)))
            assert {each.partition for each in sent} == {0, 1, 2, 3}  # type: ignore[union-attr]

    play(story)


# --- the rules, taken out


def test_harm_of_numbers_given_when_messages_are_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several buckets then have ids between each other's, and some are dropped."""
    add = Outbox.add

    def numbered(self: Outbox, message: Pending) -> None:
        self._number(message)
        add(self, message)

    monkeypatch.setattr(Outbox, "add", numbered)
    with pytest.raises(AssertionError):
        run(1)


def test_harm_of_putting_what_may_be_stored_into_new_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Part of such a batch may be stored already: all of it is dropped, or stored twice."""
    left = Outbox.left

    def forgetful(self: Outbox) -> list[Pending]:
        found = left(self)
        for message in found:
            message.may_be_stored = False
            message.sequence_id = -1
        return found

    monkeypatch.setattr(Outbox, "left", forgetful)

    async def split_behind_a_cut(stage: Stage, chance: Random) -> None:
        for host in stage.world.hosts.values():
            for link in host.network.links:
                link.fall_silent(client=False)
        await asyncio.sleep(0.5)
        await split(stage, chance)
        await cut_links(stage, chance)

    with pytest.raises((AssertionError, MagnetarError)):
        run(2, split_behind_a_cut)
