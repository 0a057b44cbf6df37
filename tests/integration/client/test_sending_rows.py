"""Record batches that are sent while segments split and merge, connections break and brokers die.

As with messages: each row is stored once, each key keeps its order, and what was handed in before
a batch stands before it.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from random import Random
from typing import Any

import pytest

from magnetar.client.arrow.outgoing_rows import OutgoingRows
from magnetar.client.client import Client
from magnetar.client.produce.outbox import Outbox, Pending, PendingBatch
from magnetar.client.produce.producer import Producer
from magnetar.client.produce.row_sender import RowSender
from magnetar.errors import MagnetarError, SendTimedOut
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import Kept, new_client, play, stored
from tests.integration.client.test_producing_in_trouble import (
    Trouble,
    cut_links,
    fall_silent,
    merge,
    restart,
    split,
)
from tests.integration.client.test_transactional_sends import Txn
from tests.integration.server.scalable_stage import NAME, Stage
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_broker import play as play_fake
from tests.unit.client.produce.test_segment_producer import REGULAR, client_of, older

pa: Any = import_module("pyarrow")

SEEDS = range(6)
KEYS = 4
"""So few that rows of a batch share their place: those with a place of their own go one by one."""


class KeptRows(Kept):
    """Rows and messages that were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[asyncio.Task[int]] = []

    def send_rows(self, producer: Producer[bytes], count: int, chance: Random) -> None:
        begun = sum(map(len, self.sent.values()))
        keys = [f"k{chance.randrange(KEYS)}" for _ in range(count)]
        values = [b"%d" % number for number in range(begun, begun + count)]
        for key, value in zip(keys, values, strict=True):
            self.sent[key].append(value)
        batch = pa.RecordBatch.from_pydict({"key": keys, "value": values})
        self.batches.append(asyncio.create_task(producer.send_arrow(batch)))


async def trickle(
    kept: KeptRows, producer: Producer[bytes], count: int, chance: Random, *, one_at_a_time: bool
) -> None:
    while count > 0:
        burst = min(count, chance.randrange(1, 80))
        kept.send_rows(producer, burst, chance)
        if one_at_a_time or chance.random() < 0.3:
            await kept.batches[-1]
        else:
            await asyncio.sleep(0)  # it is handed in by now: what comes next stands behind it
            await kept.send_many(producer, chance.randrange(3), keys=KEYS)
        count -= burst
        await asyncio.sleep(0.03 * chance.random())


def run(
    seed: int,
    *troubles: Trouble,
    count: int = 1500,
    disk: bool = False,
    one_at_a_time: bool = False,
    **how: Any,
) -> int:
    """Send while these happen; how many batches were taken apart."""
    chance = Random(f"{seed} rows")
    divided: list[PendingBatch] = []

    async def story(stage: Stage) -> None:
        await stage.create()
        kept = KeptRows()
        async with new_client(stage) as client, await client.producer(NAME, **how) as producer:
            pending = producer._core.pending
            replace = pending.replace

            def counted(batch: PendingBatch, messages: Any) -> None:
                divided.append(batch)
                replace(batch, messages)

            pending.replace = counted
            sending = asyncio.create_task(
                trickle(kept, producer, count, chance, one_at_a_time=one_at_a_time)
            )
            for trouble in troubles:
                await asyncio.sleep(0.2 * chance.random())
                await trouble(stage, chance)
            await sending
            await producer.flush()
            await asyncio.gather(*kept.batches)
            assert producer.pending == 0
        await kept.check(stage)

    play(story, disk=disk)
    return len(divided)


def test_splits_and_merges() -> None:
    divided = [run(seed, split, split, merge, split, merge) for seed in SEEDS]
    assert any(divided), "no batch was taken apart"


def test_splits_and_merges_with_broken_connections() -> None:
    divided = [run(seed, cut_links, split, cut_links, merge, cut_links) for seed in SEEDS]
    assert any(divided), "no batch was taken apart"


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_splits_and_restarts(seed: int) -> None:
    run(seed, split, restart, merge, restart, disk=True)


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_little_room(seed: int) -> None:
    """Batches wait for room, and the layout changes meanwhile."""
    troubles = (split, cut_links, merge, split)
    run(seed, *troubles, one_at_a_time=True, max_pending=20, batch_messages=15)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4))
def test_any_trouble(group: int) -> None:
    """100 seeds: whatever may happen, in any order, with any options."""
    for seed in range(25 * group, 25 * group + 25):
        chance = Random(f"{seed} any trouble with rows")
        disk = chance.random() < 0.5
        kinds = [split, merge, cut_links, fall_silent, *([restart] if disk else [])]
        # A call that waits for room lets others pass: it is not handed in yet.
        has_room = chance.random() < 0.5
        run(
            seed,
            *(chance.choice(kinds) for _ in range(chance.randrange(2, 9))),
            count=chance.randrange(100, 1500),
            disk=disk,
            one_at_a_time=not has_room,
            max_pending=10_000 if has_room else 50,
            batch_messages=chance.choice([9, 1000]),
            send_timeout=300.0,
        )


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_rows_without_a_key_in_text(seed: int) -> None:
    chance = Random(f"{seed} no key")
    numbers = 900

    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client, await client.producer(NAME) as producer:

            async def sending() -> None:
                for start in range(0, numbers, 100):
                    values = [b"%d" % number for number in range(start, start + 100)]
                    keys = [b"\xff\x00" if number % 3 == 0 else None for number in range(100)]
                    columns = [pa.array(values, pa.binary()), pa.array(keys, pa.binary())]
                    batch = pa.RecordBatch.from_arrays(columns, ["value", "key"])
                    assert await producer.send_arrow(batch) == 100

            task = asyncio.create_task(sending())
            for trouble in (split, cut_links, merge, merge, cut_links, split):
                await asyncio.sleep(0.05 * chance.random())
                await trouble(stage, chance)
            await task
        found = await stored(stage)
        assert sorted(int(each.payload) for each in found) == list(range(numbers))
        keyed = [int(each.payload) for each in found if each.key]
        assert keyed == sorted(keyed)

    play(story)


def test_rows_are_a_part_of_their_transaction() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(3)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            good, bad = await Txn.begin(client), await Txn.begin(client)
            for txn, word in ((good, "good"), (bad, "bad"), (None, "plain")):
                keys = [f"k{number % 9}" for number in range(300)]
                batch = pa.RecordBatch.from_pydict({"key": keys, "value": [word] * 300})
                assert await producer.send_arrow(batch, txn=txn) == 300
            assert len(good.topics) == 3
            assert len(good.receipts) < 100, "a receipt for each entry"
            await good.end(pb.COMMIT)
            await bad.end(pb.ABORT)
        words = [each.payload for each in await stored(stage)]
        assert (words.count(b"good"), words.count(b"plain"), words.count(b"bad")) == (300, 300, 0)

    play(story)


def test_what_was_not_sent_of_a_transaction_is_dropped() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            txn = await Txn.begin(client)
            for host in stage.world.hosts.values():
                for link in list(host.network.links):
                    link.cut()
            await asyncio.sleep(0)
            batch = pa.RecordBatch.from_pydict({"value": [b"x"] * 100})
            sending = asyncio.create_task(producer.send_arrow(batch, txn=txn))
            await asyncio.sleep(0)
            producer._core.sender.drop(txn.txn_id, SendTimedOut("dropped"))
            with pytest.raises(SendTimedOut, match="dropped"):
                await sending
            assert producer.pending == 0
        assert await stored(stage) == []

    play(story)


def rows_of(count: int, size: int) -> Any:
    return pa.RecordBatch.from_pydict({"value": [bytes(size)] * count})


def test_a_batch_that_the_broker_does_not_take_is_sent_message_by_message() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.connected["max_message_size"] = 1000
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR)
            assert await producer.send_arrow(rows_of(20, 400)) == 20
            assert producer.pending == 0
            assert sum(each.num_messages for each in broker.said("SEND")) == 20
            assert all(len(each.headers_and_payload) <= 1000 for each in broker.said("SEND"))
            with pytest.raises(MagnetarError, match="takes 1000"):
                await producer.send_arrow(rows_of(20, 1200))
            assert producer.pending == 0

    play_fake(story)


def test_rows_that_get_no_receipt_are_given_up() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        broker.handlers["SEND"] = lambda *_: None
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, send_timeout=5.0)
            with pytest.raises(SendTimedOut):
                await producer.send_arrow(rows_of(50, 10))
            assert producer.pending == 0

    play_fake(story)


def test_rows_that_nobody_waits_for_are_waited_for_by_flush() -> None:
    async def story(broker: FakeBroker) -> None:
        older(broker)
        async with client_of(broker) as client:
            producer = await client.producer(REGULAR, send_timeout=5.0)
            await producer.submit_arrow(rows_of(50, 10))
            assert producer.pending == 50
            await producer.flush()
            assert producer.pending == 0
            broker.handlers["SEND"] = lambda *_: None
            await producer.submit_arrow(rows_of(50, 10))
            with pytest.raises(SendTimedOut):
                await producer.flush()

    play_fake(story)


# --- the rules, taken out


def test_harm_of_not_closing_batches_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that were handed in before a batch then come behind it."""
    add_batch = Outbox._add_batch

    def hasty(self: Outbox, batch: PendingBatch) -> None:
        monkeypatch.setattr(Outbox, "close_batches", lambda _: None)
        try:
            add_batch(self, batch)
        finally:
            monkeypatch.setattr(Outbox, "close_batches", close_batches)

    close_batches = Outbox.close_batches
    monkeypatch.setattr(Outbox, "_add_batch", hasty)

    async def story(client: Client) -> None:
        producer = await client.producer(NAME)
        await producer.submit(b"first", key="k")
        batch = pa.RecordBatch.from_pydict({"key": ["k"] * 20, "value": ["second"] * 20})
        await producer.send_arrow(batch)
        await producer.flush()

    async def first_stored(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client:
            await story(client)
        assert (await stored(stage))[0].payload == b"first"

    with pytest.raises(AssertionError):
        play(first_stored)
    monkeypatch.setattr(Outbox, "_add_batch", add_batch)
    play(first_stored)


def test_harm_of_an_order_that_is_not_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = OutgoingRows._taken

    def reversed_order(self: OutgoingRows, arrow: Any, order: Any) -> OutgoingRows:
        return taken(self, arrow, order.take(pa.array(range(len(order))[::-1])))

    monkeypatch.setattr(OutgoingRows, "_taken", reversed_order)
    with pytest.raises(AssertionError):
        run(1)


def test_harm_of_numbers_that_are_given_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that may be stored, taken apart, is then stored once more."""
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


def test_harm_of_a_batch_that_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a split its rows belong to two segments."""

    def whole(_: RowSender, batch: PendingBatch, rows: OutgoingRows) -> list[Pending]:
        first = next(rows.rows())
        batch.key = first.key
        return [batch]

    monkeypatch.setattr(RowSender, "_divided", whole)
    with pytest.raises((AssertionError, MagnetarError)):
        test_splits_and_merges()
