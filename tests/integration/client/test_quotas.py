"""Backlog quotas of a scalable topic, as our own client meets them: over a split, in and out."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.policy.values import BacklogQuota, QuotaPolicy
from magnetar.errors import SendTimedOut
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_expiry import set_policies
from tests.integration.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST
BYTES = b"x" * 1000
LIMIT = 30_000
LOOK_S = 70.0
"""Within it the controller looks."""


async def set_quota(stage: Stage, policy: QuotaPolicy) -> None:
    quota = BacklogQuota(limit_size=LIMIT, policy=policy)
    await set_policies(stage, backlog_quota_map={"destination_storage": quota})


def test_sends_wait_while_all_segments_together_hold_too_much() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_quota(stage, "producer_request_hold")
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await consumer.close()
            # None of the three segments reaches the quota alone.
            for number in range(20):
                await producer.send(BYTES, key=str(number))
            await stage.split(0)
            for number in range(20):
                await producer.send(BYTES, key=str(number))
            await asyncio.sleep(LOOK_S)
            held = asyncio.create_task(producer.send(b"held", key="a"))
            await asyncio.sleep(10)
            assert not held.done()
            consumer = await client.queue_consumer(NAME, "s")
            for _ in range(40):
                message = await consumer.receive(timeout=30.0)
                await consumer.ack(message)
            await held
            assert (await consumer.receive(timeout=30.0)).value == b"held"
            await consumer.close()

    play(story)


def test_or_fail_in_the_end_where_nobody_consumes() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        await set_quota(stage, "producer_exception")
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await consumer.close()
            for number in range(40):
                await producer.send(BYTES, key=str(number))
            await asyncio.sleep(LOOK_S)
            with pytest.raises(SendTimedOut, match="the backlog has reached its quota"):
                await producer.send(b"refused", key="a")

    play(story)


def test_or_the_oldest_go_and_sends_go_on() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(1)
        await set_quota(stage, "consumer_backlog_eviction")
        async with new_client(stage) as client, await client.producer(NAME) as producer:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await consumer.close()
            for number in range(20):
                await producer.send(b"old" + BYTES, key=str(number))
            await stage.split(0)
            for number in range(20):
                await producer.send(b"new" + BYTES, key=str(number))
            await asyncio.sleep(LOOK_S)
            await producer.send(b"now", key="a")
            consumer = await client.queue_consumer(NAME, "s")
            found: list[bytes] = []
            while got := await consumer.receive_many(100, timeout=10.0):
                for message in got:
                    found.append(message.value[:3])
                    await consumer.ack(message)
            # Of the old ones only as many are left as fit beside all that is newer.
            assert found.count(b"new") == 20
            assert found.count(b"now") == 1
            assert 0 < found.count(b"old") < 10
            await consumer.close()

    play(story)
