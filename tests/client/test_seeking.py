"""Consumers of scalable topics that are moved: to a message, to a time, to an end of the topic."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.client.message import Message
from magnetar.errors import ConsumerNotFound, InvalidValue
from magnetar.model.ids import EARLIEST, LATEST, ScalableMessageId
from magnetar.model.subscriptions import InitialPosition
from magnetar.runtime.clock import LoopClock
from magnetar.testing.seeds import EPOCH_MS
from tests.client.stage import new_client, play
from tests.client.test_consuming import drain, numbers, send, silence
from tests.server.scalable_stage import NAME, Stage

FIRST = InitialPosition.EARLIEST


def segment_of(message: Message[bytes]) -> int:
    assert isinstance(message.id, ScalableMessageId)
    return message.id.segment_id


def test_a_queue_is_moved_in_all_segments_or_in_that_of_a_message() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with new_client(stage) as client:
            consumer = await client.queue_consumer(NAME, "s", initial_position=FIRST)
            await send(client, 20, batching=False)
            await stage.split(0)
            await asyncio.sleep(1)
            between = LoopClock(EPOCH_MS).now_ms()
            await asyncio.sleep(1)
            await send(client, 20, batching=False)
            found = await drain(consumer, 40, consumer.ack)
            await consumer.seek(EARLIEST)
            assert numbers(await drain(consumer, 40, consumer.ack)) == numbers(found)
            await consumer.seek(between)
            assert numbers(await drain(consumer, 20, consumer.ack)) == list(range(20))
            await consumer.seek(EARLIEST)
            await consumer.seek(LATEST)
            await silence(consumer)
            target = found[0].id
            assert isinstance(target, ScalableMessageId)
            await consumer.seek(target)
            segment = [each for each in found if segment_of(each) == target.segment_id]
            assert numbers(await drain(consumer, len(segment), consumer.ack)) == numbers(segment)
            await silence(consumer)
            with pytest.raises(ConsumerNotFound):
                await consumer.seek(ScalableMessageId(77, target.message_id))
            with pytest.raises(InvalidValue, match="names no partition"):
                await consumer.seek(target.message_id)

    play(story)
