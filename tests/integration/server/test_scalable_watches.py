"""What clients learn of scalable topics by watching, and of those that are deleted or forbidden."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from magnetar.errors import Conflict, DeadlineExceeded, WireCode
from magnetar.model.names import TopicName
from magnetar.scalable.records import state_directory
from magnetar.server.admin import create_admin
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.messages import Received
from tests.integration.server.scalable_stage import (
    NAME,
    TOPIC,
    Stage,
    joined,
    looked_up,
    play,
    read_all,
    send,
    told,
    until,
)
from tests.unit.server.admin.world import World
from tests.unit.server.serving import LIMITS, connected, refused, run

WHOLE = "segment://public/default/orders/0000-ffff-0"
OTHER = TopicName.parse("topic://public/default/other")
THIRD = TopicName.parse("topic://public/default/third")


async def left(stage: Stage) -> list[Any]:
    """What is stored of scalable topics."""
    server = stage.host.server
    keys = [
        key
        for directory in ("/scalable/topics", state_directory(TOPIC))
        for key in await server.metadata.scan_keys(directory)
    ]
    return [*keys, *await server.topics.segment_names(TOPIC)]


# --- layouts


def test_every_watch_sees_ascending_epochs_whichever_broker_it_asks() -> None:
    """Defect 13: no update is older than the one before it, and the last one comes."""

    async def story(stage: Stage) -> None:
        await stage.create()
        hosts = list(stage.world.hosts.values())
        drivers = [await stage.driver(host.name) for host in hosts]
        firsts = [await looked_up(driver, create=False) for driver in drivers]
        assert {each.dag.epoch for each in firsts} == {0}
        for number in range(12):
            layout = await stage.layout()
            segment = layout.active[number % len(layout.active)].segment_id
            await stage.ask(
                lambda scalable, at=segment: scalable.split(TOPIC, at),  # type: ignore[misc]
                hosts[number % 2],
            )
        for driver in drivers:
            epochs = [0]
            while epochs[-1] < 12:
                dag = (await told(driver, "SCALABLE_TOPIC_UPDATE")).dag
                epochs.append(dag.epoch)
                active = sorted(
                    (each.hash_start, each.hash_end) for each in dag.segments if each.state == 0
                )
                assert (active[0][0], active[-1][1]) == (0, 65535)
                assert all(low[1] + 1 == high[0] for low, high in pairwise(active))
            assert epochs == sorted(set(epochs))
            await driver.close()

    play(story, brokers="ab")


def test_urls_are_those_of_plain_connections_while_there_is_no_tls() -> None:
    """Defect 16: a TLS URL is there if, and only if, the broker has one."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        dag = (await looked_up(driver, create=False)).dag
        urls = {host.url for host in stage.world.hosts.values()}
        assert dag.controller_broker_url in urls
        assert not dag.HasField("controller_broker_url_tls")
        assert {each.broker_url for each in dag.segment_brokers} <= urls
        assert not any(each.HasField("broker_url_tls") for each in dag.segment_brokers)
        await driver.close()

    play(story, brokers="ab")


# --- deletion


def test_a_topic_in_use_is_deleted_by_force_and_not_created_again() -> None:
    """Defect 17: every client is put off, whoever asks again learns it, and nothing is left."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        await looked_up(driver, create=False)
        await joined(driver, "a")
        await driver.request("PRODUCER", topic=WHOLE, producer_id=1)
        await driver.publish(1, 0, build_message(b"m"))
        subscribing: dict[str, Any] = {"topic": WHOLE, "subscription": "s", "subType": 1}
        await driver.request("SUBSCRIBE", consumer_id=2, **subscribing)
        with pytest.raises(Conflict):
            await stage.ask(lambda scalable: scalable.delete(TOPIC))
        assert (await stage.layout()).epoch == 0, "nothing is stranded"
        assert len(await left(stage)) == 4  # the topic, its segment, a subscription, a group
        await stage.ask(lambda scalable: scalable.delete(TOPIC, force=True))
        closed = [await driver.pushes.get() for _ in range(2)]
        kinds = {NAMES[each.type] for each in closed if isinstance(each, Received)}
        assert kinds == {"CLOSE_PRODUCER", "CLOSE_CONSUMER"}
        found = await looked_up(driver, session=2, create=False)
        assert found.error == WireCode.TOPIC_NOT_FOUND
        again = joined(driver, "b", 9)
        assert await refused(again) == WireCode.TOPIC_NOT_FOUND
        again = driver.request("PRODUCER", topic=WHOLE, producer_id=3)
        assert await refused(again) == WireCode.TOPIC_NOT_FOUND
        again = driver.request("SUBSCRIBE", consumer_id=4, **subscribing)
        assert await refused(again) == WireCode.TOPIC_NOT_FOUND
        await asyncio.sleep(120)
        assert await left(stage) == []
        await driver.close()

    play(story)


def test_clients_of_a_deleted_topic_that_go_on_trying_do_not_bring_it_back() -> None:
    async def story(stage: Stage) -> None:
        await stage.create()
        async with (
            stage.process() as links,
            stage.producer(links) as producer,
            stage.queue(links) as queue,
            stage.stream(links) as stream,
        ):
            await send(producer, 20)
            await read_all(stage, queue, stream)
            await stage.split(0)
            await stage.ask(lambda scalable: scalable.delete(TOPIC, force=True))
            await producer.send("k1", b"nobody takes it")
            await asyncio.sleep(30)
            assert await left(stage) == []
            links.kill()
        stage.is_complete = False

    play(story)


def test_a_member_of_a_topic_that_is_deleted_and_created_anew_is_told() -> None:
    """By an assignment, or by the end of its connection, which makes it register again."""

    async def story(stage: Stage) -> None:
        await stage.create()
        driver = await stage.driver()
        await joined(driver, "a")
        await stage.ask(lambda scalable: scalable.delete(TOPIC, force=True))
        await stage.create(2)
        with contextlib.suppress(DeadlineExceeded):
            await driver.lost(5.0)
        assert len(driver.pushes) or driver.failure is not None
        await driver.close()

    play(story)


@pytest.mark.parametrize("after_s", [0.0005, 0.002, 0.004, 0.006, 0.01])
def test_a_deletion_that_a_crash_interrupts_is_finished_or_never_was(after_s: float) -> None:
    """Defect 17: what was begun does not stay half done."""

    async def story(stage: Stage) -> None:
        await stage.create(3)
        async with stage.process() as links, stage.producer(links) as producer:
            await send(producer, 30)
        await stage.ask(lambda scalable: scalable.create_subscription(TOPIC, "s", "STREAM"))
        work = asyncio.create_task(stage.ask(lambda scalable: scalable.delete(TOPIC, force=True)))
        await asyncio.sleep(after_s)
        await stage.host.kill()
        await asyncio.wait([work])
        work.exception()
        assert await stage.host.start()
        await asyncio.sleep(1)
        driver = await stage.driver()
        found = await looked_up(driver, create=False)
        if found.HasField("dag"):
            assert len(found.dag.segments) == 3
            async with stage.process() as links, stage.stream(links) as stream:
                await read_all(stage, stream)
        else:
            assert found.error == WireCode.TOPIC_NOT_FOUND
            assert await left(stage) == []
        await driver.close()

    play(story, disk=True)


# --- lists of topics


async def _updated(driver: Driver) -> Any:
    return await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")


def test_a_namespace_is_watched_with_filters_on_any_broker() -> None:
    """Defect 14: a client that follows the list creates nothing by looking at what is gone."""

    async def story(stage: Stage) -> None:
        one, two = {"team": "a", "tier": "1"}, {"team": "a"}
        await stage.ask(lambda scalable: scalable.create(TOPIC, 1, one))
        other = stage.world.hosts["b"].server.context.scalable
        await until(lambda: other.names(TOPIC.namespace) == [NAME], 1.0, "the other broker's list")
        driver = await stage.driver("b")
        wanted = [{"key": name, "value": text} for name, text in one.items()]
        for number, filters in enumerate((wanted, wanted[:1], [])):
            driver.send(
                "WATCH_SCALABLE_TOPICS",
                watch_id=number,
                namespace="public/default",
                property_filters=filters,
            )
            snapshot = await _updated(driver)
            assert (snapshot.watch_id, list(snapshot.snapshot.topics)) == (number, [NAME])
        await stage.ask(lambda scalable: scalable.create(OTHER, 1, two))
        await stage.ask(lambda scalable: scalable.create(THIRD))
        seen: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
        while seen != {0: set(), 1: {str(OTHER)}, 2: {str(OTHER), str(THIRD)}}:
            update = await _updated(driver)
            seen[update.watch_id] |= set(update.diff.added)
        # It comes to match, and no longer does.
        await stage.ask(lambda scalable: scalable.set_properties(OTHER, one))
        update = await _updated(driver)
        assert (update.watch_id, list(update.diff.added)) == (0, [str(OTHER)])
        await stage.ask(lambda scalable: scalable.set_properties(OTHER, {}))
        gone = {(await _updated(driver)).watch_id for _ in range(2)}
        assert gone == {0, 1}
        await stage.ask(lambda scalable: scalable.delete(TOPIC))
        gone = {(await _updated(driver)).watch_id for _ in range(3)}
        assert gone == {0, 1, 2}
        found = await looked_up(driver, create=False)
        assert found.error == WireCode.TOPIC_NOT_FOUND
        assert stage.host.server.context.scalable.names(TOPIC.namespace) == [
            str(OTHER),
            str(THIRD),
        ]
        await driver.close()

    play(story, brokers="ab")


# --- switched off


async def _are_refused(world: World) -> None:
    """Requests to the admin interface."""
    path = "scalable/public/default"
    for method, place in (
        ("GET", path),
        ("PUT", f"{path}/orders"),
        ("GET", f"{path}/orders"),
        ("POST", f"{path}/orders/split/0"),
        ("POST", f"{path}/orders/merge/0/1"),
        ("DELETE", f"{path}/orders"),
    ):
        assert 400 <= (await world.ask(method, place)).status < 500, place


def test_without_the_feature_everything_of_it_is_not_allowed(tmp_path: Path) -> None:
    config = ServerConfig(
        data=str(tmp_path), port=0, admin_port=0, limits=LIMITS, scalable_topics_enabled=False
    )

    async def story() -> None:
        async with (
            Server(config, create_admin=create_admin) as server,
            aiohttp.ClientSession() as http,
        ):
            await _are_refused(World(server, http))
            driver = await connected(server)
            assert (await looked_up(driver, create=True)).error == WireCode.NOT_ALLOWED
            # Also for a regular topic: a v5 client is told by the handshake not to ask at all.
            assert (await looked_up(driver, "x", create=True)).error == WireCode.NOT_ALLOWED
            assert await refused(joined(driver, "a")) == WireCode.NOT_ALLOWED
            request = driver.request("SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=1)
            assert await refused(request) == WireCode.NOT_ALLOWED
            driver.send("WATCH_SCALABLE_TOPICS", watch_id=1, namespace="public/default")
            assert (await _updated(driver)).error == WireCode.NOT_ALLOWED
            subscribing: dict[str, Any] = {"subscription": "s", "subType": 1, "consumer_id": 1}
            for topic in (NAME, WHOLE):
                for request in (
                    driver.request("PRODUCER", topic=topic, producer_id=1),
                    driver.request("SUBSCRIBE", topic=topic, **subscribing),
                ):
                    assert await refused(request) == WireCode.NOT_ALLOWED, topic
            # Closing what cannot be open is no error, and regular topics are as ever.
            driver.send("SCALABLE_TOPIC_CLOSE", session_id=1)
            driver.send("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=1)
            await driver.request("PRODUCER", topic="regular", producer_id=1)
            await driver.publish(1, 0, build_message(b"m"))
            await driver.close()

    run(story())
