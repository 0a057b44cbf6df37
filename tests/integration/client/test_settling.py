"""What is given back, what takes too long, and what limits it: nothing stops, nothing is lost."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.segment.nacks import RedeliveryDelay
from magnetar.client.consume.segment.settings import DeadLetterPolicy
from magnetar.client.message.message import Message
from magnetar.errors import UnreadableMessage
from magnetar.model.ids import EARLIEST
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import InitialPosition, SubscriptionType
from magnetar.server.app import Server
from magnetar.wire.frames import encode_send
from magnetar.wire.messages import encode_entry
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import REGULAR, numbers, send, silence
from tests.integration.client.test_producing_in_trouble import cut_links
from tests.integration.client.test_what_is_consumed import terminate
from tests.integration.server.scalable_stage import NAME, Stage

LARGE = bytes(range(256)) * (12 * 4096)
FIRST = InitialPosition.EARLIEST
LIMITED: dict[str, Any] = {"initial_position": FIRST, "queue_size": 10, "unacked_max": 20}


async def send_large(client: Client, topic: str) -> None:
    async with await client.producer(topic, chunking=True) as producer:
        await producer.send(LARGE, key="k")


async def backlog(stage: Stage, topic: str, subscription: str) -> int:
    """Entries that a subscription has not acknowledged."""

    async def count(server: Server) -> int:
        found = await server.topics.get(TopicName.parse(topic))
        return found.subscriptions[subscription].backlog()

    return await stage.host.ask(count)


def recover(stage: Stage) -> None:
    for host in stage.world.hosts.values():
        for link in host.network.links:
            link.recover()


@pytest.mark.parametrize("how", ["given back", "too slow"])
def test_what_is_not_kept_any_more_makes_room_below_the_limit(how: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME,
                "s",
                nack_delay=RedeliveryDelay(1.0),
                processing_timeout=0.0 if how == "given back" else 5.0,
                **LIMITED,
            )
            await send(client, 60, batching=False)
            found: list[Message[bytes]] = []
            while got := await consumer.receive_many(60, timeout=2.0):
                found += got
            assert 20 <= len(found) < 60, "the limit is reached"
            if how == "given back":
                for message in found:
                    consumer.nack(message)
            acked: list[Message[bytes]] = []
            while got := await consumer.receive_many(60, timeout=10.0):
                acked += got
                await consumer.ack_many(got)
            assert numbers(acked) == list(range(60))

    play(story)


def test_a_new_connection_is_not_asked_for_more_than_the_limit() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", **LIMITED)
            await send(client, 60, batching=False)
            found: list[Message[bytes]] = []
            for _ in range(5):
                while got := await consumer.receive_many(60, timeout=2.0):
                    found += got
                await cut_links(stage, Random(0))
            assert 20 <= len(found) < 40
            while len(found) < 60:
                await consumer.ack_many(found)
                found += await consumer.receive_many(50, timeout=5.0)
            assert numbers(found) == list(range(60))

    play(story)


@pytest.mark.parametrize("by", ["messages", "rows", "a transaction"])
def test_a_stream_that_is_not_acknowledged_is_not_given_more_than_the_limit(by: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", **LIMITED)
            await send(client, 100, batching=False)
            found: list[Message[bytes]] = []
            while got := await consumer.receive_many(7, timeout=2.0):
                found += got
            assert 20 <= len(found) < 40
            received, txn = len(found), await client.transaction()
            while received < 100:
                consumer.ack_cumulative(found[-1], txn=txn if by == "a transaction" else None)
                if by == "rows":
                    rows = await consumer.receive_arrow(7, timeout=2.0)
                    await consumer.ack_arrow(rows)
                    received += rows.num_rows
                got = await consumer.receive_many(50, timeout=2.0)
                assert got or received == 100
                found += got
                received += len(got)
            await txn.commit()

    play(story)


def test_a_stream_whose_transactions_are_aborted_goes_on() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.stream_consumer(NAME, "s", **LIMITED)
            await send(client, 60, batching=False)
            for _ in range(3):
                found: list[Message[bytes]] = []
                while got := await consumer.receive_many(60, timeout=2.0):
                    found += got
                assert 20 <= len(found) < 40
                txn = await client.transaction()
                await consumer.ack_cumulative(found[-1], txn=txn)
                await txn.abort()

    play(story)


@pytest.mark.parametrize("then", ["once more", "too slow"])
def test_a_message_that_is_given_back_twice_is_one_dead_letter(then: str) -> None:
    """Also if its time is over while it is put aside, with others of its batch."""

    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            dead = await client.queue_consumer(f"{NAME}-DLQ", "d", initial_position=FIRST)
            consumer = await client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                processing_timeout=0.0 if then == "once more" else 2.0,
                dead_letter=DeadLetterPolicy(max_redeliveries=0),
            )
            await send(client, 2)
            messages = [await consumer.receive(timeout=5.0) for _ in range(2)]
            if then == "too slow":
                for host in stage.world.hosts.values():
                    for link in host.network.links:
                        link.fall_silent(client=False)
                    asyncio.get_running_loop().call_later(4, recover, stage)
            for message in messages:
                consumer.nack(message)
                consumer.nack(message)
            letters = [await dead.receive(timeout=100.0) for _ in range(2)]
            assert numbers(letters) == [0, 1]
            await silence(dead, 20.0)
            await silence(consumer)

    play(story)


@pytest.mark.parametrize("how", ["given back", "too slow"])
def test_a_large_message_comes_again_with_all_its_chunks(how: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                nack_delay=RedeliveryDelay(1.0),
                processing_timeout=0.0 if how == "given back" else 5.0,
            )
            await send_large(client, NAME)
            message = await consumer.receive(timeout=2.0)
            assert len(message._chunk_ids) > 2
            if how == "given back":
                consumer.nack(message)
            again = await consumer.receive(timeout=10.0)
            assert again.value == LARGE
            await consumer.ack(again)
            await silence(consumer, 20.0)

    play(story)


def test_a_cumulative_acknowledgement_covers_every_chunk() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await client.consumer(REGULAR, "s", initial_position=FIRST)
            await send_large(client, REGULAR)
            await consumer.ack_cumulative(await consumer.receive(timeout=2.0))
            assert await backlog(stage, REGULAR, "s") == 0

    play(story)


async def send_chunks(stage: Stage, topic: str, *chunks: tuple[str, int]) -> None:
    """Of messages of two chunks: the uuid and number of each one to be sent."""
    async with new_client(stage) as client:
        connection = await client._connections.lookup(topic)
        await connection.request("PRODUCER", topic=topic, producer_id=9, producer_name="cutter")
        for number, (uuid, chunk_id) in enumerate(chunks):
            metadata = pb.MessageMetadata(
                producer_name="cutter",
                sequence_id=number,
                publish_time=1,
                partition_key=uuid,
                uuid=uuid,
                chunk_id=chunk_id,
                num_chunks_from_msg=2,
                total_chunk_msg_size=4,
            )
            entry = encode_entry(metadata, b"ab" if chunk_id == 0 else b"cd")
            connection.write_pieces(encode_send(9, number, entry, num_messages=1))
        await connection.request("CLOSE_PRODUCER", producer_id=9)


def test_a_stream_tells_of_a_message_whose_chunks_did_not_all_come() -> None:
    """Its key is there, its value raises; a message without its last chunk was never sent."""

    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            reader = await client.reader(REGULAR, start=EARLIEST, chunked_messages_max=1)
            await send_chunks(
                stage, REGULAR, ("gone", 0), ("never", 0), ("whole", 0), ("whole", 1), ("gone", 1)
            )
            first = await reader.receive(timeout=5.0)
            assert (first.key, first.value) == ("whole", b"abcd")
            second = await reader.receive(timeout=5.0)
            assert second.key == "gone"
            with pytest.raises(UnreadableMessage, match="not all of the 2 chunks"):
                _ = second.value
            await silence(reader)
            await cut_links(stage, Random(0))
            await silence(reader)

    play(story)


def test_a_chunk_that_is_sent_once_more_is_no_message() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            reader = await client.reader(REGULAR, start=EARLIEST)
            queue = await client.consumer(
                REGULAR, "s", subscription_type=SubscriptionType.SHARED, initial_position=FIRST
            )
            await send_chunks(stage, REGULAR, ("u", 0), ("u", 1), ("u", 1))
            for consumer in (reader, queue):
                message = await consumer.receive(timeout=5.0)
                assert message.value == b"abcd"
                await silence(consumer)
            await queue.ack(message)
            assert await backlog(stage, REGULAR, "s") == 0

    play(story)


def test_dead_letters_are_of_any_size_and_have_no_value_if_the_message_has_none() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            dead = await client.queue_consumer(f"{NAME}-DLQ", "d", initial_position=FIRST)
            consumer = await client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                dead_letter=DeadLetterPolicy(max_redeliveries=0),
            )
            await send_large(client, NAME)
            async with await client.producer(NAME) as producer:
                await producer.send(None, key="k")
            for _ in range(2):
                consumer.nack(await consumer.receive(timeout=5.0))
            large, null = [await dead.receive(timeout=20.0) for _ in range(2)]
            assert large.value == LARGE
            assert null.is_null

    play(story)


def test_a_producer_of_dead_letters_that_failed_is_replaced() -> None:
    async def story(stage: Stage) -> None:
        letters = "persistent://public/default/letters"
        async with new_client(stage) as client:
            consumer = await client.consumer(
                REGULAR,
                "s",
                subscription_type=SubscriptionType.SHARED,
                initial_position=FIRST,
                dead_letter=DeadLetterPolicy(max_redeliveries=0, topic=letters),
            )
            await send(client, 2, REGULAR, batching=False)
            consumer.nack(await consumer.receive(timeout=5.0))
            await asyncio.sleep(5)
            await terminate(stage, letters)
            consumer.nack(await consumer.receive(timeout=5.0))
            await asyncio.sleep(20)
            name = TopicName.parse(letters)
            await stage.host.ask(lambda server: server.topics.delete(name, force=True))
            dead = await client.consumer(letters, "d", initial_position=FIRST)
            assert (await dead.receive(timeout=60.0)).value == b"1"

    play(story)


@pytest.mark.parametrize("trouble", ["none", "cut", "another consumer"])
def test_a_message_is_not_handed_out_before_its_time(trouble: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        now = asyncio.get_running_loop().time
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", **LIMITED)
            begun = now()
            await producer.send(b"30", key="k", deliver_after=30)
            await producer.send(b"20", key="k", deliver_after=20)
            await send(client, 15, batching=False)
            for number in range(15):
                message = await consumer.receive(timeout=1.0)
                assert message.value == b"%d" % number
                consumer.ack(message)
            if trouble == "cut":
                await cut_links(stage, Random(0))
            elif trouble == "another consumer":
                await consumer.close()
                consumer = await client.queue_consumer(NAME, "s", **LIMITED)
            for seconds in (20, 30):
                message = await consumer.receive(timeout=60.0)
                assert message.value == b"%d" % seconds
                assert seconds - 1 <= now() - begun < seconds + 5
                await consumer.ack(message)
            await silence(consumer, 60.0)

    play(story)
