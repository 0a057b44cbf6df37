"""Encrypted messages through real brokers: every consumer, layouts that change, keys that lack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from magnetar.client.arrow.arrow import UNREADABLE
from magnetar.client.client import Client
from magnetar.client.consume.segment.settings import DeadLetterPolicy
from magnetar.client.consume.stream import StreamConsumer
from magnetar.client.encryption.decryptor import DecryptionFailure
from magnetar.client.encryption.encryptor import EncryptionFailure
from magnetar.client.message.routing import Routing
from magnetar.errors import (
    EncryptionFailed,
    InvalidSetting,
    UnreadableMessage,
)
from magnetar.model.subscriptions import InitialPosition
from magnetar.wire.compression import Compression
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import NAME, Stage
from tests.unit.client.encryption.test_encryption import Keys

FIRST = InitialPosition.EARLIEST
COUNT = 40
LARGE = 3 * 1024 * 1024

Open = Callable[..., Any]
CONSUMERS: dict[str, Open] = {
    "queue": lambda client, **options: client.queue_consumer(
        NAME, "s", initial_position=FIRST, **options
    ),
    "stream": lambda client, **options: client.stream_consumer(
        NAME, "s", initial_position=FIRST, **options
    ),
}


def secret(client: Client, **options: Any) -> Any:
    return client.producer(NAME, encryption_keys=["a"], key_reader=Keys("a"), **options)


async def send(producer: Any, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await producer.submit(b"%d" % number, key=f"k{number % 5}")
    await producer.flush()


async def values(consumer: Any, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = await consumer.receive(timeout=30)
        found.append(message.value)
        # Of a stream, what comes behind a split waits for that.
        if isinstance(consumer, StreamConsumer):
            consumer.ack_cumulative(message)
    return found


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("kind", CONSUMERS)
def test_what_is_encrypted_is_read_again_over_a_split(kind: str, *, batching: bool) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client, batching=batching, compression=Compression.LZ4) as producer:
                await send(producer, COUNT)
                await stage.split(0)
                await send(producer, COUNT, COUNT)
            async with CONSUMERS[kind](client, key_reader=Keys("a")) as consumer:
                found = await values(consumer, 2 * COUNT)
            for key in range(5):
                of_key = [int(each) for each in found if int(each) % 5 == key]
                # A queue reads parents and children side by side: it promises no order.
                ordered = of_key if kind == "stream" else sorted(of_key)
                assert ordered == [*range(key, 2 * COUNT, 5)]

    play(story)


def test_large_messages_and_rows() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client, chunking=True) as producer:
                await producer.send(b"x" * (3 * LARGE), key="k")
                batch = pa.RecordBatch.from_pydict({"value": [b"%d" % n for n in range(COUNT)]})
                await producer.send_arrow(batch)
            async with client.queue_consumer(
                NAME, "s", initial_position=FIRST, key_reader=Keys("a")
            ) as consumer:
                large = await consumer.receive(timeout=30)
                assert large.value == b"x" * (3 * LARGE)
                context = large.encryption
                assert context is not None
                assert not context.is_encrypted
                assert context.num_chunks == 2
                table = await consumer.receive_arrow(COUNT, timeout=30)
                assert table["value"].to_pylist() == [b"%d" % n for n in range(COUNT)]

    play(story)


def test_who_has_no_key_is_told_and_loses_nothing() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client) as producer:
                await send(producer, COUNT)
            for reader in (None, Keys("b")):
                async with client.queue_consumer(
                    NAME, "s", initial_position=FIRST, key_reader=reader
                ) as consumer:
                    message = await consumer.receive(timeout=30)
                    with pytest.raises(UnreadableMessage, match=r"encrypted|KeyError"):
                        _ = message.value
                    assert message.encryption is not None
                    assert message.encryption.is_encrypted
            async with client.queue_consumer(NAME, "s", key_reader=Keys("a")) as consumer:
                found = await values(consumer, COUNT)
                assert {int(each) for each in found} == set(range(COUNT))

    play(story)


def test_batches_that_nobody_can_read_do_not_use_permits_up() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            for _ in range(6):
                async with secret(client, batch_delay=1) as producer:
                    await send(producer, COUNT)
            async with client.queue_consumer(
                NAME, "s", initial_position=FIRST, queue_size=COUNT
            ) as consumer:
                found = [await consumer.receive(timeout=30)]
                while more := await consumer.receive_many(timeout=5):
                    found += more
                said = [each.encryption for each in found]
                assert sum(each.batch_size or 1 for each in said if each) == 6 * COUNT

    play(story)


def test_what_cannot_be_decrypted_may_be_discarded() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client) as producer:
                await send(producer, COUNT)
            async with client.producer(NAME) as producer:
                await producer.send(b"plain")
            async with client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                queue_size=COUNT // 2,
                on_decryption_failure=DecryptionFailure.DISCARD,
            ) as consumer:
                message = await consumer.receive(timeout=30)
                assert message.value == b"plain"
                await consumer.ack(message)
                await asyncio.sleep(5)
            # They were acknowledged.
            async with client.queue_consumer(NAME, "s", key_reader=Keys("a")) as consumer:
                assert await consumer.receive_many(timeout=5) == []

    play(story)


def test_what_cannot_be_decrypted_may_be_taken_as_it_is() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client, compression=Compression.ZSTD) as producer:
                await producer.send(b"secret")
            async with client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                on_decryption_failure=DecryptionFailure.CONSUME,
            ) as consumer:
                message = await consumer.receive(timeout=30)
                assert message.value == message.data != b"secret"
                context = message.encryption
                assert context is not None
                assert context.is_encrypted
                assert context.compression == Compression.ZSTD
                assert context.uncompressed_size == len(b"secret")
                assert [each.name for each in context.keys] == ["a"]

    play(story)


def test_a_key_that_lacks_ends_the_opening_or_is_left_out_on_demand() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            with pytest.raises(EncryptionFailed, match="'a'"):
                await client.producer(NAME, encryption_keys=["a"], key_reader=Keys())
            async with client.producer(
                NAME,
                encryption_keys=["a"],
                key_reader=Keys(),
                on_encryption_failure=EncryptionFailure.SEND,
            ) as producer:
                await producer.send(b"in plain")
            async with client.queue_consumer(NAME, "s", initial_position=FIRST) as consumer:
                assert await values(consumer, 1) == [b"in plain"]

    play(story)


@pytest.mark.parametrize("keys", [["b"], []])
def test_dead_letters_are_encrypted_again_if_they_are_to_be(keys: list[str]) -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        failed = f"{NAME}-failed"
        policy = DeadLetterPolicy(max_redeliveries=0, topic=failed, encryption_keys=keys)
        async with new_client(stage) as client:
            async with secret(client) as producer:
                await producer.send(b"secret")
            async with client.queue_consumer(
                NAME,
                "s",
                initial_position=FIRST,
                key_reader=Keys("a", "b"),
                dead_letter=policy,
            ) as consumer:
                consumer.nack(await consumer.receive(timeout=30))
                await asyncio.sleep(10)
            async with client.queue_consumer(
                failed, "s", initial_position=FIRST, key_reader=Keys("b")
            ) as consumer:
                letter = await consumer.receive(timeout=30)
                assert letter.value == b"secret"
                said = letter.encryption
                assert ([] if said is None else [each.name for each in said.keys]) == keys

    play(story)


def test_what_cannot_be_decrypted_does_not_become_a_dead_letter() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        policy = DeadLetterPolicy(max_redeliveries=0, topic=f"{NAME}-failed")
        async with new_client(stage) as client:
            async with secret(client) as producer:
                await producer.send(b"secret")
            async with client.queue_consumer(
                NAME, "s", initial_position=FIRST, dead_letter=policy
            ) as consumer:
                consumer.nack(await consumer.receive(timeout=30))
                await asyncio.sleep(10)
            async with client.queue_consumer(NAME, "s", key_reader=Keys("a")) as consumer:
                assert await values(consumer, 1) == [b"secret"]

    play(story)


def test_ranges_say_that_they_do_not_decrypt() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        async with new_client(stage) as client:
            async with secret(client) as producer:
                await producer.send(b"secret")
            ranges = await client.ranges(NAME)
            (state,) = (await ranges.states([0])).values()
            async for page in ranges.read(0, state.first, state.stable):
                (row,) = page.record_batch().to_pylist()
                assert row["value"] is None
                assert "key_reader" in dict(row["properties"])[UNREADABLE]

    play(story)


@pytest.mark.parametrize(
    "options",
    [
        {"encryption_keys": ["a"]},
        {"key_reader": Keys("a")},
        {"encryption_keys": "a", "key_reader": Keys("a")},
        {"encryption_keys": [""], "key_reader": Keys("a")},
        {"encryption_keys": [str(n) for n in range(65)], "key_reader": Keys("a")},
        {"encryption_keys": ["a"], "key_reader": "key.pem"},
        {"encryption_keys": ["a"], "key_reader": Keys},
        {"encryption_keys": ["a"], "key_reader": Keys("a"), "on_encryption_failure": "fail"},
    ],
)
def test_wrong_options_of_a_producer(options: Any) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            with pytest.raises(InvalidSetting):
                await client.producer(NAME, routing=Routing.RING, **options)

    play(story)


@pytest.mark.parametrize(
    "options",
    [
        {"key_reader": "key.pem"},
        {"on_decryption_failure": "fail"},
        {"key_reader": Keys("a"), "dead_letter": DeadLetterPolicy(max_redeliveries=1)},
        {"dead_letter": DeadLetterPolicy(max_redeliveries=1, encryption_keys=["a"])},
    ],
)
def test_wrong_options_of_a_consumer(options: Any) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            with pytest.raises(InvalidSetting):
                await client.queue_consumer(NAME, "s", **options)

    play(story)
