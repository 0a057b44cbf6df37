"""Compacted reading with real brokers and our own client, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from magnetar.broker.topic.topic import Topic
from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.reader import Reader
from magnetar.client.message.batch import messages_in, open_entry
from magnetar.errors import NotAllowed
from magnetar.managed_ledger.ledger_list import KEEP_NOTHING
from magnetar.model.ids import EARLIEST
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.server.app import Server
from magnetar.wire.compression import Compression
from magnetar.wire.messages import Delivered
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import REGULAR
from tests.integration.server.scalable_stage import NAME, Stage

ROWS = [("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1"), ("b", b""), ("d", b"1"), ("a", b"3")]
LEFT = [("c", b"1"), ("d", b"1"), ("a", b"3")]


async def on_topics(stage: Stage, wanted: Callable[[TopicName], bool], work: Any) -> None:
    async def ask(server: Server) -> None:
        for topic in list(server.topics.loaded.values()):
            if isinstance(topic, Topic) and wanted(topic.name):
                await work(topic)

    await stage.host.ask(ask)


async def compacted(topic: Topic) -> None:
    topic.compaction.begin()
    await topic.compaction.ended()
    assert topic.compaction.report.status == "SUCCESS"


async def compact(stage: Stage, topic: str = REGULAR) -> None:
    name = TopicName.parse(topic)
    scalable = name.domain.is_scalable
    await on_topics(
        stage,
        lambda each: (
            (each.scalable_topic() if scalable else each) == name
            and (not scalable or each.domain.is_scalable)
        ),
        compacted,
    )


async def put(
    client: Client, rows: Sequence[tuple[str, bytes | None]], topic: str = REGULAR, **how: Any
) -> None:
    async with await client.producer(topic, **how) as producer:
        receipts = [await producer.submit(value, key=key) for key, value in rows]
        await producer.flush()
        for receipt in receipts:
            await receipt


async def read_all(reader: Reader[bytes]) -> list[tuple[str | None, bytes]]:
    found = []
    while await reader.has_message_available():
        message = await reader.receive(timeout=30)
        found.append((message.key, message.value))
    return found


@pytest.mark.parametrize("how", [{"batching": False}, {"compression": Compression.ZSTD}])
def test_a_reader_of_a_compacted_topic(how: dict[str, Any]) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await put(client, ROWS, **how)
            reader = await client.reader(REGULAR, start=EARLIEST, read_compacted=True)
            assert await read_all(reader) == ROWS
            await compact(stage)
            again = await client.reader(REGULAR, start=EARLIEST, read_compacted=True)
            assert await read_all(again) == LEFT
            plain = await client.reader(REGULAR, start=EARLIEST)
            assert await read_all(plain) == ROWS
            await put(client, [("c", b""), ("e", b"1")], **how)
            assert await read_all(again) == [("c", b""), ("e", b"1")]
            # A new life of the topic, whose log has been dropped.
            await on_topics(stage, lambda each: str(each) == REGULAR, Topic.close)
            await put(client, [("f", b"1")], **how)
            await compact(stage)
            await on_topics(
                stage, lambda each: str(each) == REGULAR, lambda topic: topic.trim(KEEP_NOTHING)
            )
            late = await client.reader(REGULAR, start=EARLIEST, read_compacted=True)
            assert await read_all(late) == [*LEFT[1:], ("e", b"1"), ("f", b"1")]

    play(story)


@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_a_consumer_of_a_compacted_topic(kind: SubscriptionType) -> None:
    async def received(consumer: Consumer[bytes], count: int) -> list[Any]:
        found = []
        for _ in range(count):
            message = await consumer.receive(timeout=30)
            consumer.ack(message)
            found.append((message.key, message.value))
        return found

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await put(client, ROWS)
            await compact(stage)
            consumer = await client.consumer(
                REGULAR,
                "s",
                subscription_type=kind,
                initial_position=InitialPosition.EARLIEST,
                read_compacted=True,
            )
            assert await received(consumer, 3) == LEFT
            await put(client, [("a", b"4")])
            assert await received(consumer, 1) == [("a", b"4")]
            with pytest.raises(NotAllowed):
                await client.consumer(
                    REGULAR, "t", read_compacted=True, subscription_type=SubscriptionType.SHARED
                )

    play(story)


@pytest.mark.parametrize("scalable", [None, False], ids=["metadata", "markers"])
def test_only_what_is_committed_is_compacted(scalable: bool | None) -> None:
    async def story(stage: Stage) -> None:
        async with (
            new_client(stage) as client,
            await client.producer(REGULAR, batching=False) as producer,
        ):
            await producer.send(b"1", key="a")
            await producer.send(b"1", key="b")
            async with client.transaction(scalable=scalable) as txn:
                await producer.send(b"committed", key="a", txn=txn)
            bad = await client.transaction(scalable=scalable)
            await producer.send(b"aborted", key="b", txn=bad)
            await bad.abort()
            late = await client.transaction(scalable=scalable)
            await producer.send(b"late", key="c", txn=late)
            await producer.send(b"1", key="d")
            await compact(stage)
            # Behind the undecided one nothing can be seen yet, by nobody.
            expected = [("b", b"1"), ("a", b"committed")]
            reader = await client.reader(REGULAR, start=EARLIEST, read_compacted=True)
            assert await read_all(reader) == expected
            await late.commit()
            assert await read_all(reader) == [("c", b"late"), ("d", b"1")]
            # What a transaction left in the view is there though its log is gone.
            await on_topics(stage, lambda each: str(each) == REGULAR, Topic.close)
            await producer.send(b"1", key="e")
            await compact(stage)
            await on_topics(
                stage, lambda each: str(each) == REGULAR, lambda topic: topic.trim(KEEP_NOTHING)
            )
            again = await client.reader(REGULAR, start=EARLIEST, read_compacted=True)
            rest = [("c", b"late"), ("d", b"1"), ("e", b"1")]
            assert await read_all(again) == expected + rest

    play(story)


def test_segments_are_read_compacted_over_a_split() -> None:
    """Keys that moved: the parent's view before the child's, and what deletes a key stays."""

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            keys = [f"k{number}" for number in range(20)]
            await put(client, [(key, b"old") for key in keys] * 2, NAME)
            await compact(stage, NAME)
            await stage.split(0)
            await put(client, [(key, b"new") for key in keys[:5]], NAME)
            await put(client, [(key, None) for key in keys[5:10]], NAME)
            await compact(stage, NAME)
            parent, *children = [
                await view_of(stage, f"segment://{NAME.partition('://')[2]}/{each}")
                for each in ("0000-ffff-0", "0000-7fff-1", "8000-ffff-2")
            ]
        assert sorted(parent) == sorted((key, b"old") for key in keys)
        moved = [(key, b"new") for key in keys[:5]] + [(key, b"") for key in keys[5:10]]
        assert sorted(children[0] + children[1]) == sorted(moved)
        assert all(children), "both have some"
        table = dict(parent) | dict(children[0]) | dict(children[1])
        known = {key: value for key, value in table.items() if value}
        assert known == dict.fromkeys(keys[:5], b"new") | dict.fromkeys(keys[10:], b"old")

    play(story)


async def view_of(stage: Stage, segment: str) -> list[tuple[str, bytes]]:
    """What a compacted reader of one segment gets."""
    driver = await stage.driver(stage.world.ready[0].name)
    end = 2**64 - 1
    await driver.request(
        "SUBSCRIBE",
        topic=segment,
        subscription="table",
        subType=pb.CommandSubscribe.Exclusive,
        consumer_id=1,
        durable=False,
        initialPosition=pb.CommandSubscribe.Earliest,
        start_message_id={"ledgerId": end, "entryId": end},
        read_compacted=True,
    )
    driver.send("FLOW", consumer_id=1, messagePermits=1000)
    last = (await driver.request("GET_LAST_MESSAGE_ID", consumer_id=1)).last_message_id
    found: list[tuple[str, bytes]] = []
    while True:
        push = await driver.pushes.get(30)
        if isinstance(push, Delivered):
            opened = open_entry(push.headers_and_payload)
            if opened.is_batch:
                singles = [each for each in messages_in(opened) if not each.metadata.compacted_out]
                found += [(each.metadata.partition_key, each.payload) for each in singles]
            else:
                found.append((opened.metadata.partition_key, opened.payload))
            if push.position == (last.ledgerId, last.entryId):
                await driver.close()
                return found
