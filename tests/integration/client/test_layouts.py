"""What a client knows of the segments of a topic, and of its own among them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.client.connection.pool import Connections
from magnetar.client.layout.assignment import AssignmentSession
from magnetar.client.layout.watch import LayoutWatch
from magnetar.errors import AlreadyClosed, NotConnected, TopicNotFound
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.client.stage import new_client, play
from tests.integration.server.scalable_stage import TOPIC, Stage, until
from tests.unit.client.fake_broker import FakeBroker, Peer
from tests.unit.client.fake_broker import play as play_with_fake


def test_a_watch_follows_splits_over_broken_connections() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with new_client(stage) as client, LayoutWatch(client._connections, TOPIC) as watch:
            layout = await watch.first()
            assert (layout.epoch, len(layout.active)) == (0, 1)
            await stage.split(0)
            await watch.changes.past(1)
            assert watch.layout == await stage.layout()
            for link in stage.host.network.links:
                link.cut()
            await stage.split(1)
            await until(lambda: watch.layout is not None and watch.layout.epoch == 2, 5)
            assert watch.layout is not None
            names = {watch.topic_of(each) for each in watch.layout.active}
            assert names == {str(TOPIC.segment(each.descriptor)) for each in watch.layout.active}
        with pytest.raises(AlreadyClosed):
            await watch.changes.past(watch.changes.version)

    play(story)


def test_why_there_is_no_layout() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage, operation_timeout=5)
        async with LayoutWatch(client._connections, TOPIC, create_if_missing=False) as watch:
            with pytest.raises(TopicNotFound):
                await watch.first()
        await stage.host.stop()
        async with LayoutWatch(client._connections, TOPIC) as watch:
            with pytest.raises(NotConnected):
                await watch.first()
        await client.close()

    play(story)


def with_layouts(broker: FakeBroker, *layouts: tuple[int, int]) -> None:
    """Whoever asks for a layout is told of these, one after another: epoch, segments."""

    def tell(peer: Peer, session_id: int, epoch: int, count: int) -> None:
        width = 65536 // count
        peer.say(
            "SCALABLE_TOPIC_UPDATE",
            session_id=session_id,
            resolved_topic_name=str(TOPIC),
            dag={
                "epoch": epoch,
                "segments": [
                    {"segment_id": number, "hash_start": number * width,
                     "hash_end": (number + 1) * width - 1, "state": pb.ACTIVE,
                     "created_at_epoch": 0, "created_at_ms": 0}
                    for number in range(count)
                ],
            },
        )  # fmt: skip

    def looked_up(peer: Peer, body: Any) -> None:
        for epoch, count in layouts:
            tell(peer, body.session_id, epoch, count)

    broker.handlers["SCALABLE_TOPIC_LOOKUP"] = looked_up
    broker.handlers["LOOKUP"] = lambda peer, body: peer.say(
        "LOOKUP_RESPONSE", request_id=body.request_id, proxy_through_service_url=True,
        response=pb.CommandLookupTopicResponse.Connect,
    )  # fmt: skip


def test_an_older_layout_is_dropped_and_one_of_the_same_epoch_taken() -> None:
    async def story(broker: FakeBroker) -> None:
        with_layouts(broker, (5, 1), (4, 2), (5, 4), (0, 8))
        connections = broker.connections()
        async with LayoutWatch(connections, TOPIC) as watch:
            await watch.first()
            await asyncio.sleep(5)
            assert watch.layout is not None
            assert (watch.layout.epoch, len(watch.layout.active)) == (5, 4)
            assert watch.changes.version == 2
        await asyncio.sleep(1)
        assert broker.said("SCALABLE_TOPIC_CLOSE")
        await connections.close()

    play_with_fake(story)


def member(connections: Connections, watch: LayoutWatch, name: str) -> AssignmentSession:
    return AssignmentSession(
        connections, watch, subscription="s", consumer_name=name, kind=pb.STREAM
    )


def segments(session: AssignmentSession) -> list[int]:
    assigned = session.assignment
    return [] if assigned is None else sorted(each.segment_id for each in assigned.segments)


def test_members_share_segments_and_keep_them_over_a_broken_connection() -> None:
    async def story(stage: Stage) -> None:
        await stage.create(2)
        async with (
            new_client(stage) as client,
            LayoutWatch(client._connections, TOPIC) as watch,
            member(client._connections, watch, "one") as one,
        ):
            await one.first()
            assert segments(one) == [0, 1]
            async with member(client._connections, watch, "two") as two:
                await two.first()
                await until(lambda: len(segments(one)) == len(segments(two)) == 1, 5)
                before = segments(one), segments(two)
                known = one.changes.version, two.changes.version
                for link in stage.host.network.links:
                    link.cut()
                await one.changes.past(known[0])
                await two.changes.past(known[1])
                await asyncio.sleep(1)
                assert (segments(one), segments(two)) == before
                await two.leave()
            await until(lambda: segments(one) == [0, 1], 5)

    play(story)


def test_a_member_leaves_pulsar_by_a_connection_of_its_own() -> None:
    """Pulsar 5.0.0-M1 cuts the connection on which it hears a command for it."""

    async def story(broker: FakeBroker) -> None:
        with_layouts(broker, (0, 1))
        broker.handlers["SCALABLE_TOPIC_SUBSCRIBE"] = lambda peer, body: peer.say(
            "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE", request_id=body.request_id,
            assignment={"layout_epoch": 0, "segments": []},
        )  # fmt: skip
        connections = broker.connections()
        async with LayoutWatch(connections, TOPIC) as watch:
            async with member(connections, watch, "one") as one:
                await one.first()
                assert len(broker.peers) == 2, "that of the watch, and its own"
                await one.leave()
            await asyncio.sleep(1)
            assert not broker.said("SCALABLE_TOPIC_UNSUBSCRIBE")
            assert [each.transport.is_closing() for each in broker.peers] == [False, True]
        await connections.close()

    play_with_fake(story)


def test_a_member_of_a_topic_that_does_not_exist_is_told() -> None:
    async def story(stage: Stage) -> None:
        client = new_client(stage, operation_timeout=5)
        async with (
            LayoutWatch(client._connections, TOPIC, create_if_missing=False) as watch,
            member(client._connections, watch, "one") as one,
        ):
            with pytest.raises(TopicNotFound):
                await one.first()
        await client.close()

    play(story)
