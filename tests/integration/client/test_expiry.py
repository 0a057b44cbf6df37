"""Messages whose time to live is over: over splits, beside transactions, with those that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import RetentionPolicies
from magnetar.model.names import NamespaceName
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import send, silence
from tests.integration.client.test_delayed_delivery import on_server
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
TTL = 200
PASSES_S = 400.0
"""After so long everything older has expired."""
SOON: dict[str, Any] = {"expiry_check_seconds": 30.0}


async def set_policies(stage: Stage, **values: object) -> None:
    def change(found: Policies) -> Policies:
        return msgspec.structs.replace(found, **values)

    namespace = NamespaceName("public", "default")
    await stage.host.ask(lambda server: server.topics.change_namespace(namespace, change))


def test_messages_of_sealed_segments_expire_and_the_segments_go() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_policies(
            stage, message_ttl_in_seconds=TTL, retention_policies=RetentionPolicies(0, 0)
        )
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await consumer.close()
            await send(client, 20, batching=False)
            await producer.send(b"late", deliver_after=3600)
            await stage.split(0)
            await send(client, 20, batching=False)
            assert (await on_server(stage)).msg_backlog == 41
            await asyncio.sleep(PASSES_S)
            assert (await on_server(stage)).msg_backlog == 0
            await asyncio.sleep(PASSES_S)
            assert set((await stage.layout()).segments) == {1, 2}
            consumer = await client.queue_consumer(NAME, "s")
            await producer.send(b"now")
            assert (await consumer.receive(timeout=5.0)).value == b"now"
            await silence(consumer)
            await consumer.close()

    play(story, scalable_sealed_seconds=60.0, **SOON)


def test_what_waits_for_its_time_expires_too() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_policies(stage, message_ttl_in_seconds=TTL)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await producer.send(b"late", deliver_after=600)
            await asyncio.sleep(1)
            assert (await on_server(stage)).msg_delayed == 1
            await asyncio.sleep(PASSES_S)
            found = await on_server(stage)
            assert (found.msg_backlog, found.msg_delayed) == (0, 0)
            await silence(consumer, 600)
            await consumer.close()

    play(story, **SOON)


def test_an_aborted_acknowledgement_does_not_bring_an_expired_message_back() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_policies(stage, message_ttl_in_seconds=TTL)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await producer.send(b"old")
            message = await consumer.receive(timeout=5.0)
            txn = await client.transaction(timeout=3000)
            await consumer.ack(message, txn=txn)
            await asyncio.sleep(PASSES_S)
            assert (await on_server(stage)).msg_backlog == 0
            await txn.abort()
            await silence(consumer, 60)
            await consumer.close()
            again = await client.queue_consumer(NAME, "s")
            await silence(again, 60)
            await again.close()

    play(story, **SOON)


def test_nothing_expires_above_an_undecided_transaction() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_policies(stage, message_ttl_in_seconds=TTL)
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            txn = await client.transaction(timeout=3000)
            await producer.send(b"held", txn=txn)
            await producer.send(b"behind it")
            await asyncio.sleep(PASSES_S)
            await txn.commit()
            got = [(await consumer.receive(timeout=5.0)).value for _ in range(2)]
            assert got == [b"held", b"behind it"]
            await consumer.close()

    play(story, **SOON)
