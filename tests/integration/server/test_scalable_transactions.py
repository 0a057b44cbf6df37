"""Layout changes amid transactions: no send of one fails, and everything is seen once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from magnetar.errors import DeadlineExceeded
from magnetar.scalable.layout.txn_barrier import TransactionBarrier
from tests.integration.server.scalable_stage import Stage, nothing_comes, play, read, send
from tests.integration.server.strict_sender import StrictSender

SENDERS = 3
AT_A_TIME = 4
PER_TXN = 12
WAIT_S = 5.0

Change = Callable[[Stage], Awaitable[None]]


async def split(stage: Stage) -> None:
    await stage.split(0)


async def merge(stage: Stage) -> None:
    await stage.merge(0, 1)


async def under_load(stage: Stage, segments: int, change: Change) -> list[StrictSender]:
    """Change the layout while several clients have several transactions at a time, without end."""
    await stage.create(segments)
    senders = [await StrictSender(stage.process(), f"c{each}").open() for each in range(SENDERS)]
    enough = asyncio.Event()

    async def work(sender: StrictSender) -> None:
        while not enough.is_set():
            await sender.transact(PER_TXN)
        await sender.transact(PER_TXN)

    async with asyncio.TaskGroup() as group:
        for sender in senders:
            for _ in range(AT_A_TIME):
                group.create_task(work(sender))
        await asyncio.sleep(0.05)
        await change(stage)
        enough.set()
    return senders


async def all_once(stage: Stage, committed: list[bytes]) -> None:
    """What was committed is there, and nothing else."""
    consumer = stage.queue(stage.process(), "all", "all")
    await consumer.start()
    found = await read(consumer, len(committed), 60.0)
    assert sorted(each.payload for each in found) == sorted(committed)
    await nothing_comes(consumer)
    await consumer.stop()


@pytest.mark.parametrize(("segments", "change"), [(1, split), (2, merge)])
def test_no_commit_fails_under_continuous_load(segments: int, change: Change) -> None:
    async def story(stage: Stage) -> None:
        begun = asyncio.get_running_loop().time()
        senders = await under_load(stage, segments, change)
        assert asyncio.get_running_loop().time() - begun < WAIT_S
        assert [sender.given_up for sender in senders] == [0] * SENDERS
        assert len((await stage.layout()).segments) == 3
        await all_once(stage, [each for sender in senders for each in sender.committed])

    play(story, checked=False)


def test_without_a_lull_the_clients_give_transactions_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: object) -> bool:
        return True

    monkeypatch.setattr(TransactionBarrier, "granted", at_once)

    async def story(stage: Stage) -> None:
        senders = await under_load(stage, 1, split)
        assert sum(sender.given_up for sender in senders) > 0
        await all_once(stage, [each for sender in senders for each in sender.committed])

    play(story, checked=False)


def test_a_split_waits_for_an_open_transaction_and_fails_none_of_its_sends() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        sender = await StrictSender(stage.process(), "c").open()
        txn = await sender.begin()
        payloads = await sender.send(txn, PER_TXN)
        splitting = asyncio.create_task(stage.split(0))
        for _ in range(20):
            payloads += await sender.send(txn, PER_TXN)
            await asyncio.sleep(0.1)
        assert not splitting.done()
        await sender.end(txn, commit=True)
        await splitting
        await sender.transact(PER_TXN)
        assert sender.given_up == 0
        await all_once(stage, payloads + sender.committed)

    play(story, checked=False)


def test_it_does_not_wait_for_ever_and_the_transaction_commits_all_the_same() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        sender = await StrictSender(stage.process(), "c").open()
        txn = await sender.begin()
        payloads = await sender.send(txn, PER_TXN)
        now = asyncio.get_running_loop().time
        begun = now()
        splitting = asyncio.create_task(stage.split(0))
        await asyncio.sleep(0.5)
        held = asyncio.create_task(sender.begin())
        await splitting
        assert WAIT_S <= now() - begun < WAIT_S + 1
        other = await held
        assert now() - begun < WAIT_S + 1
        payloads += await sender.send(txn, PER_TXN)  # to the children
        await sender.end(txn, commit=True)
        await sender.send(other, PER_TXN)
        await sender.end(other, commit=False)
        await all_once(stage, payloads)

    play(story, checked=False)


def test_plain_producers_and_other_clients_wait_for_no_transaction() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        sender = await StrictSender(stage.process(), "c").open()
        txn = await sender.begin()
        await sender.send(txn, PER_TXN)
        splitting = asyncio.create_task(stage.split(0))
        await asyncio.sleep(0.5)
        links = stage.process()
        async with stage.producer(links) as producer:
            await send(producer, 100)
            assert max(stall.seconds for stall in producer.stalls) < 0.1
        stranger = await stage.driver()
        new = {"tc_id": 0, "txn_ttl_millis": 1000, "scalable": True}
        await stranger.request("NEW_TXN", timeout_s=0.1, **new)
        with pytest.raises(DeadlineExceeded):
            await sender.line.request("NEW_TXN", timeout_s=0.1, **new)
        assert not splitting.done()
        await sender.end(txn, commit=False)
        await splitting
        await stranger.close()

    play(story, checked=False)


def test_consumers_are_placed_while_a_split_waits() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        sender = await StrictSender(stage.process(), "c").open()
        txn = await sender.begin()
        splitting = asyncio.create_task(stage.split(0))
        await asyncio.sleep(0.5)
        begun = asyncio.get_running_loop().time()
        async with stage.stream(stage.process()) as consumer:
            assert asyncio.get_running_loop().time() - begun < 1
            payloads = await sender.send(txn, PER_TXN)
            assert not splitting.done()
            await sender.end(txn, commit=True)
            await splitting
            found = await read(consumer, len(payloads))
            await sender.transact(PER_TXN)
            found += await read(consumer, PER_TXN)
            assert {each.payload for each in found} == {*payloads, *sender.committed}

    play(story, checked=False)
