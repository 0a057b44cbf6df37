"""Consumers of all topics that match a pattern, while topics come, go and make trouble."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.layout.watch import LayoutWatch
from magnetar.errors import DeadlineExceeded, MagnetarError, TopicNotFound
from magnetar.model.names import TopicName
from magnetar.model.segments import SegmentLayout
from magnetar.model.subscriptions import InitialPosition
from tests.integration.client.stage import new_client, play
from tests.integration.client.test_consuming import send
from tests.integration.server.scalable_stage import Stage

FIRST = InitialPosition.EARLIEST
PATTERN = "persistent://public/default/t.*"
ONE, OTHER = "persistent://public/default/t1", "persistent://public/default/t2"


async def matching(client: Client) -> Consumer[bytes]:
    return await client.consumer(None, "m", pattern=PATTERN, initial_position=FIRST)


def fail_once(monkeypatch: pytest.MonkeyPatch, topic: str, error: MagnetarError) -> None:
    """The first look for the layout of a topic fails."""
    first = LayoutWatch.first
    failures = [error]

    async def failing(self: LayoutWatch) -> SegmentLayout:
        if str(self.topic) == topic and failures:
            raise failures.pop()
        return await first(self)

    monkeypatch.setattr(LayoutWatch, "first", failing)


def test_a_topic_that_could_not_be_added_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            consumer = await matching(client)
            await send(client, 1, ONE)
            await send(client, 1, OTHER)
            fail_once(monkeypatch, ONE, DeadlineExceeded("it did not come"))
            found = [await consumer.receive(timeout=150.0) for _ in range(2)]
            assert [message.topic for message in found] == [OTHER, ONE]

    play(story)


def test_a_topic_that_is_deleted_while_the_consumer_opens_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await send(client, 1, ONE)
            await send(client, 1, OTHER)
            fail_once(monkeypatch, ONE, TopicNotFound("it is gone"))
            consumer = await matching(client)
            assert (await consumer.receive(timeout=5.0)).topic == OTHER

    play(story)


def test_a_topic_that_is_deleted_and_created_again_is_consumed_again() -> None:
    async def story(stage: Stage) -> None:
        async with new_client(stage) as client:
            await send(client, 1, ONE)
            consumer = await matching(client)
            await consumer.ack(await consumer.receive(timeout=5.0))
            name = TopicName.parse(ONE)
            await stage.host.ask(lambda server: server.topics.delete(name, force=True))
            await asyncio.sleep(5)
            await send(client, 1, ONE)
            assert (await consumer.receive(timeout=150.0)).topic == ONE

    play(story)
