"""The commands of scalable topics against a real server: answers, pushes, order, codes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.patient_clients import PatientDriver
from magnetar.broker.policy.values import AutoTopicCreation
from magnetar.broker.topic.topics import topics_hash
from magnetar.errors import WireCode
from magnetar.model.names import NamespaceName, TopicName
from magnetar.scalable.records import AutoScaleOverride, GroupRecord
from magnetar.scalable.store import ScalableStore
from magnetar.server.app import Server
from magnetar.server.config import ServerConfig
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Delivered, Received
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.serving import (
    LIMITS,
    connected,
    message,
    refused,
    run,
    serving,
    subscribed,
)

NAME = "topic://public/default/x"
TOPIC = TopicName.parse(NAME)
DEFAULT = NamespaceName("public", "default")

Scene = Callable[[Server, Driver], Awaitable[None]]


def play(folder: Path, scene: Scene) -> None:
    async def go() -> None:
        async with serving(folder) as server:
            driver = await connected(server)
            await scene(server, driver)
            await driver.close()

    run(go())


async def told(driver: Driver, name: str) -> Any:
    """The next push of that name; others before it are skipped."""
    while True:
        push = await driver.pushes.get()
        if isinstance(push, Received) and push.type == TYPES[name]:
            return push.body


async def looked_up(driver: Driver, session_id: int, topic: str = NAME, **fields: Any) -> Any:
    driver.send("SCALABLE_TOPIC_LOOKUP", session_id=session_id, topic=topic, **fields)
    return await told(driver, "SCALABLE_TOPIC_UPDATE")


async def settled(driver: Driver) -> None:
    """Everything that was sent before is handled."""
    await driver.request("LOOKUP", topic="anything")


async def member(driver: Driver, name: str, consumer_id: int, **fields: Any) -> Any:
    given: dict[str, Any] = {
        "topic": NAME,
        "subscription": "sub",
        "consumer_name": name,
        "consumer_id": consumer_id,
        "consumer_type": pb.STREAM,
    }
    return await driver.request("SCALABLE_TOPIC_SUBSCRIBE", **(given | fields))


def ids(assignment: Any) -> list[int]:
    return [each.segment_id for each in assignment.segments]


async def members_of(server: Server) -> dict[str, bool]:
    """The consumers of the topic by name, and whether they are connected."""
    groups = await ScalableStore(server.metadata).all(TOPIC, "group", GroupRecord)
    return {each.name: each.lost_ms < 0 for group in groups for each in group.members}


# --- layouts


def test_the_server_says_that_it_has_them(tmp_path: Path) -> None:
    async def go() -> None:
        for enabled in (True, False):
            config = ServerConfig(
                data=str(tmp_path / str(enabled)),
                port=0,
                limits=LIMITS,
                scalable_topics_enabled=enabled,
            )
            async with Server(config) as server:
                port = int(server.service_url.rpartition(":")[2])
                driver = await PatientDriver.connect("127.0.0.1", port, handshake=False)
                answer = await driver.request("CONNECT", client_version="c", protocol_version=21)
                flags = answer.feature_flags
                assert flags.supports_scalable_topics is enabled
                found = await looked_up(driver, 1)
                assert found.HasField("dag") is enabled
                if not enabled:
                    assert found.error == WireCode.NOT_ALLOWED
                    driver.send("SCALABLE_TOPIC_CLOSE", session_id=1)
                    assert await refused(member(driver, "c", 1)) == WireCode.NOT_ALLOWED
                    segment = "segment://public/default/x/0000-ffff-0"
                    request = driver.request("PRODUCER", producer_id=1, topic=segment)
                    assert await refused(request) == WireCode.NOT_ALLOWED
                await driver.close()

    run(go())


def test_a_lookup_creates_and_is_told_every_change(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        first = await looked_up(driver, 7)
        assert (first.session_id, first.resolved_topic_name) == (7, NAME)
        assert first.dag.epoch == 0
        assert first.dag.controller_broker_url == server.service_url
        (segment,) = first.dag.segments
        assert (segment.hash_start, segment.hash_end) == (0, 65535)
        assert [each.broker_url for each in first.dag.segment_brokers] == [server.service_url]
        other = await connected(server)
        assert (await looked_up(other, 7)).dag == first.dag
        scalable = server.context.scalable
        epochs: list[int] = []
        for number in range(3):
            await scalable.split(TOPIC, 2 * number)
        while not epochs or epochs[-1] < 3:
            epochs.append((await told(driver, "SCALABLE_TOPIC_UPDATE")).dag.epoch)
        assert epochs == sorted(set(epochs))
        last = await told(other, "SCALABLE_TOPIC_UPDATE")
        while last.dag.epoch < 3:
            last = await told(other, "SCALABLE_TOPIC_UPDATE")
        assert len(last.dag.segments) == 7
        await other.close()

    play(tmp_path, scene)


def test_a_closed_watch_is_told_nothing(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        await looked_up(driver, 2)
        driver.send("SCALABLE_TOPIC_CLOSE", session_id=1)
        driver.send("SCALABLE_TOPIC_CLOSE", session_id=99)
        driver.send("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=99)
        # Closed before it could be opened: there is no answer at all.
        driver.send("SCALABLE_TOPIC_LOOKUP", session_id=3, topic="topic://public/default/y")
        driver.send("SCALABLE_TOPIC_CLOSE", session_id=3)
        await settled(driver)
        await server.context.scalable.split(TOPIC, 0)
        assert (await told(driver, "SCALABLE_TOPIC_UPDATE")).session_id == 2
        await settled(driver)
        assert not len(driver.pushes)
        (session,) = server.context.sessions
        assert list(session.scalable.layouts) == [2]

    play(tmp_path, scene)


def test_a_session_id_that_is_used_again_is_one_watch(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        again = await looked_up(driver, 1, "topic://public/default/other")
        assert again.resolved_topic_name == "topic://public/default/other"
        await server.context.scalable.split(TOPIC, 0)
        await settled(driver)
        assert not len(driver.pushes)

    play(tmp_path, scene)


def test_a_topic_created_anew_is_told(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        scalable = server.context.scalable
        await scalable.create(TOPIC, 2)
        await scalable.merge(TOPIC, [0, 1])
        assert (await looked_up(driver, 1)).dag.epoch == 1
        await scalable.delete(TOPIC)
        await settled(driver)
        assert not len(driver.pushes)
        await scalable.create(TOPIC, 3)
        new = (await told(driver, "SCALABLE_TOPIC_UPDATE")).dag
        assert (new.epoch, len(new.segments)) == (0, 3)

    play(tmp_path, scene)


def test_a_regular_topic_has_a_layout_and_its_migration_is_told(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.topics.create_partitioned(TopicName.parse("persistent://public/default/x"), 2)
        for number, name in enumerate(("x", "persistent://public/default/x")):
            found = await looked_up(driver, number, name)
            assert found.resolved_topic_name == NAME
            assert found.dag.epoch == 0
            assert [each.legacy_topic_name for each in found.dag.segments] == [
                f"persistent://public/default/x-partition-{partition}" for partition in range(2)
            ]
            assert not found.dag.segment_brokers
            assert not found.dag.HasField("controller_broker_url")
        await server.context.scalable.migrate(TopicName.parse("x"))
        for _ in range(2):
            dag = (await told(driver, "SCALABLE_TOPIC_UPDATE")).dag
            assert [each.state for each in dag.segments] == [pb.SEALED] * 2 + [pb.ACTIVE] * 2
            assert dag.segments[0].HasField("legacy_topic_name")
        closed = driver.request("PRODUCER", topic="x-partition-0", producer_id=1)
        assert await refused(closed) == WireCode.TOPIC_TERMINATED

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("non-persistent://public/default/x", WireCode.NOT_ALLOWED),
        ("persistent://public/default/p-partition-0", WireCode.TOPIC_NOT_FOUND),
        ("segment://public/default/x/0000-ffff-0", WireCode.TOPIC_NOT_FOUND),
        ("topic://public/default/missing", WireCode.TOPIC_NOT_FOUND),
        ("persistent://public/default/missing", WireCode.TOPIC_NOT_FOUND),
        ("topic://nobody/has/this", WireCode.TOPIC_NOT_FOUND),
        ("topic://bad", WireCode.INVALID_TOPIC_NAME),
    ],
)
def test_a_lookup_that_fails_says_why(tmp_path: Path, topic: str, code: WireCode) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        found = await looked_up(driver, 5, topic, create_if_missing=False)
        assert (found.session_id, found.error) == (5, code)
        assert found.message
        assert not found.HasField("dag")
        assert not found.HasField("resolved_topic_name")
        (session,) = server.context.sessions
        assert not len(session.scalable)

    play(tmp_path, scene)


def test_a_namespace_may_forbid_to_create_by_lookup(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        off = AutoTopicCreation(False, "non-partitioned", None)
        await server.topics.change_namespace(
            DEFAULT, lambda policies: msgspec.structs.replace(policies, auto_topic_creation=off)
        )
        assert (await looked_up(driver, 1)).error == WireCode.TOPIC_NOT_FOUND
        await server.context.scalable.create(TOPIC)
        assert (await looked_up(driver, 1)).HasField("dag")

    play(tmp_path, scene)


def test_a_client_that_does_not_read_is_told_the_last_layout_only(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        (session,) = server.context.sessions
        session.outbound.pause()
        for number in range(3):
            await server.context.scalable.split(TOPIC, 2 * number)
        session.outbound.resume()
        assert (await told(driver, "SCALABLE_TOPIC_UPDATE")).dag.epoch == 3
        await settled(driver)
        assert not len(driver.pushes)

    play(tmp_path, scene)


# --- names in other commands


def test_lookups_and_partitions_of_scalable_names(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        for name in (NAME, "segment://public/default/x/0000-ffff-0", "x"):
            found = await driver.request("LOOKUP", topic=name)
            assert found.brokerServiceUrl == server.service_url
            assert found.authoritative
        for name in (NAME, "segment://public/default/x/0000-ffff-0"):
            assert (await driver.request("PARTITIONED_METADATA", topic=name)).partitions == 0

    play(tmp_path, scene)


def test_only_segments_of_the_layout_are_used(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        segment = "segment://public/default/x/0000-ffff-0"
        opened = await driver.request("PRODUCER", topic=segment, producer_id=1)
        receipt = await driver.publish(
            1, 0, build_message(b"m", producer_name=opened.producer_name)
        )
        assert receipt.message_id.entryId == 0
        subscription: dict[str, Any] = {"subscription": "s", "subType": 1, "initialPosition": 1}
        await driver.request("SUBSCRIBE", topic=segment, consumer_id=1, **subscription)
        driver.send("FLOW", consumer_id=1, messagePermits=5)
        while not isinstance(await driver.pushes.get(), Delivered):
            pass
        for topic, code in (
            (NAME, WireCode.NOT_ALLOWED),
            ("segment://public/default/x/0000-ffff-9", WireCode.TOPIC_NOT_FOUND),
            ("segment://public/default/none/0000-ffff-0", WireCode.TOPIC_NOT_FOUND),
        ):
            made = driver.request("PRODUCER", topic=topic, producer_id=2)
            assert await refused(made) == code
            made = driver.request("SUBSCRIBE", topic=topic, consumer_id=2, **subscription)
            assert await refused(made) == code
        await server.context.scalable.split(TOPIC, 0)
        made = driver.request("PRODUCER", topic=segment, producer_id=3)
        assert await refused(made) == WireCode.TOPIC_TERMINATED
        # Every durable subscription is one of the whole topic.
        for child in ("0000-7fff-1", "8000-ffff-2"):
            name = TopicName.parse(f"segment://public/default/x/{child}")
            assert "s" in (await server.topics.get(name, create=False)).subscriptions

    play(tmp_path, scene)


def test_a_scalable_topic_stands_before_a_regular_one_of_its_name(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        for request in (
            driver.request("PRODUCER", topic="x", producer_id=1),
            driver.request("SUBSCRIBE", topic="x", subscription="s", subType=0, consumer_id=1),
            driver.request("PARTITIONED_METADATA", topic="x"),
        ):
            assert await refused(request) == WireCode.TOPIC_NOT_FOUND
        assert not await server.topics.exists(TopicName.parse("x"))

    play(tmp_path, scene)


def test_segments_share_the_schema_of_their_topic(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.context.scalable.create(TOPIC, 2)
        schema = {"name": "s", "schema_data": b"", "type": pb.Schema.String}
        names = [f"segment://public/default/x/{each}" for each in ("0000-7fff-0", "8000-ffff-1")]
        versions = set()
        for number, topic in enumerate(names):
            made = await driver.request("PRODUCER", topic=topic, producer_id=number, schema=schema)
            versions.add(made.schema_version)
            found = await driver.request("GET_SCHEMA", topic=topic)
            assert found.schema.type == pb.Schema.String
            versions.add(found.schema_version)
        assert len(versions) == 1
        assert (await driver.request("GET_SCHEMA", topic=NAME)).schema_version in versions

    play(tmp_path, scene)


# --- consumers


def test_consumers_share_the_segments(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.context.scalable.create(TOPIC, 2)
        first = await member(driver, "a", 1)
        assert ids(first.assignment) == [0, 1]
        assert [each.segment_topic for each in first.assignment.segments] == [
            "segment://public/default/x/0000-7fff-0",
            "segment://public/default/x/8000-ffff-1",
        ]
        assert not first.assignment.segments[0].bucket_ranges
        other = await connected(server)
        second = await member(other, "b", 1)
        update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        assert update.consumer_id == 1
        assert sorted(ids(update.assignment) + ids(second.assignment)) == [0, 1]
        # It leaves for good: its segment comes back at once, and to leave again is no error.
        await other.request("SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=1)
        await other.request("SCALABLE_TOPIC_UNSUBSCRIBE", consumer_id=1)
        assert ids((await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")).assignment) == [0, 1]
        assert await members_of(server) == {"a": True}
        await other.close()

    play(tmp_path, scene)


def test_a_lost_connection_keeps_its_segments_for_the_grace_period(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.context.scalable.create(TOPIC, 2)
        await member(driver, "a", 1)
        other = await connected(server)
        before = ids((await member(other, "b", 4)).assignment)
        (session,) = [each for each in server.context.sessions if 4 in each.scalable.members]
        other.abort()
        await session.ended.wait()
        assert await members_of(server) == {"a": True, "b": False}
        back = await connected(server)
        assert ids((await member(back, "b", 9)).assignment) == before
        assert await members_of(server) == {"a": True, "b": True}
        await back.close()

    play(tmp_path, scene)


def test_a_consumer_that_comes_again_on_its_connection_is_one(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.context.scalable.create(TOPIC, 2)
        await member(driver, "a", 1)
        again = await member(driver, "a", 2)
        assert ids(again.assignment) == [0, 1]
        (session,) = server.context.sessions
        assert list(session.scalable.members) == [2]
        assert await members_of(server) == {"a": True}
        # The same number for another consumer gives up the former one's connection.
        await member(driver, "b", 2)
        assert await members_of(server) == {"a": False, "b": True}

    play(tmp_path, scene)


def test_surplus_consumers_share_by_buckets_unless_they_cannot(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await server.context.scalable.create(TOPIC)
        # More consumers than segments would split one.
        await server.context.scalable.set_auto_scale(TOPIC, AutoScaleOverride(enabled=False))
        await member(driver, "a", 1)
        old = await connected(server, client_version="Pulsar-Java-v5.0.0-M1")
        assert ids((await member(old, "b", 1)).assignment) == []
        new = await connected(server, client_version="Pulsar-Java-v5.0.0")
        shared = (await member(new, "c", 1)).assignment
        assert ids(shared) == [0]
        ranges = [(each.start, each.end) for each in shared.segments[0].bucket_ranges]
        assert ranges == [(0, 16383), (16384, 32767), (32768, 49151), (49152, 65535)]
        update = await told(driver, "SCALABLE_TOPIC_ASSIGNMENT_UPDATE")
        assert update.assignment.segments[0].bucket_ranges == shared.segments[0].bucket_ranges
        await old.close()
        await new.close()

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "topic://public/default/none"}, WireCode.TOPIC_NOT_FOUND),
        ({"topic": "persistent://public/default/none"}, WireCode.TOPIC_NOT_FOUND),
        ({"topic": "topic://bad"}, WireCode.INVALID_TOPIC_NAME),
        ({"topic": "non-persistent://public/default/x"}, WireCode.NOT_ALLOWED),
        ({"topic": "segment://public/default/x/0000-ffff-0"}, WireCode.NOT_ALLOWED),
        ({"consumer_name": ""}, WireCode.NOT_ALLOWED),
    ],
)
def test_a_consumer_that_is_refused_is_told_why(
    tmp_path: Path, fields: dict[str, Any], code: WireCode
) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        assert await refused(member(driver, "a", 1, **fields)) == code
        (session,) = server.context.sessions
        assert not session.scalable.members
        # The server still has it as it was.
        assert ids((await member(driver, "a", 1)).assignment) == [0]

    play(tmp_path, scene)


# --- lists of topics


def test_topics_that_come_and_go_are_told(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        scalable = server.context.scalable
        await scalable.create(TOPIC, properties={"team": "a", "tier": "1"})
        one, two = (TopicName.parse(f"topic://public/default/{each}") for each in ("one", "two"))
        await scalable.create(one, properties={"team": "a"})
        filters = [{"key": "team", "value": "a"}]
        watch = {"namespace": "public/default"}
        driver.send("WATCH_SCALABLE_TOPICS", watch_id=1, property_filters=filters, **watch)
        found = await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")
        assert list(found.snapshot.topics) == [str(one), NAME]
        both = [*filters, {"key": "tier", "value": "1"}]
        driver.send("WATCH_SCALABLE_TOPICS", watch_id=2, property_filters=both, **watch)
        found = await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")
        assert (found.watch_id, list(found.snapshot.topics)) == (2, [NAME])
        await scalable.create(two, properties={"team": "a"})
        await scalable.delete(one)
        added: set[str] = set()
        removed: set[str] = set()
        while (added, removed) != ({str(two)}, {str(one)}):
            diff = await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")
            assert diff.watch_id == 1
            added |= set(diff.diff.added)
            removed |= set(diff.diff.removed)
        driver.send("WATCH_SCALABLE_TOPICS_CLOSE", watch_id=1)
        await settled(driver)
        (session,) = server.context.sessions
        assert list(session.scalable.topics) == [2]

    play(tmp_path, scene)


def test_a_client_that_knows_the_list_gets_changes_only(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        scalable = server.context.scalable
        await scalable.create(TOPIC)
        fields = {"namespace": "public/default", "current_hash": topics_hash([NAME])}
        driver.send("WATCH_SCALABLE_TOPICS", watch_id=1, **fields)
        await settled(driver)
        assert not len(driver.pushes)
        await scalable.delete(TOPIC)
        found = await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")
        assert list(found.diff.removed) == [NAME]

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("namespace", "code"),
    [("public", WireCode.INVALID_TOPIC_NAME), ("public/none", WireCode.TOPIC_NOT_FOUND)],
)
def test_a_watch_that_fails_says_why(tmp_path: Path, namespace: str, code: WireCode) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        driver.send("WATCH_SCALABLE_TOPICS", watch_id=3, namespace=namespace)
        found = await told(driver, "WATCH_SCALABLE_TOPICS_UPDATE")
        assert (found.watch_id, found.error) == (3, code)
        (session,) = server.context.sessions
        assert not len(session.scalable)

    play(tmp_path, scene)


def test_the_end_of_a_connection_ends_its_watches(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        other = await connected(server)
        await looked_up(other, 1)
        other.send("WATCH_SCALABLE_TOPICS", watch_id=1, namespace="public/default")
        await told(other, "WATCH_SCALABLE_TOPICS_UPDATE")
        (session,) = [each for each in server.context.sessions if len(each.scalable)]
        other.abort()
        await session.ended.wait()
        assert not len(session.scalable)
        changed = server.context.scalable.layouts.changed(TOPIC)
        await asyncio.sleep(0)
        assert not changed.waiters
        await settled(driver)

    play(tmp_path, scene)


def test_a_name_without_bound_does_not_join_a_group(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        for given in ({"consumer_name": "n" * 1025}, {"subscription": "s" * 257}):
            fields: dict[str, Any] = {"subscription": "sub"} | given
            name = fields.pop("consumer_name", "member")
            code = await refused(member(driver, name, 1, **fields))
            assert code in (WireCode.NOT_ALLOWED, WireCode.METADATA), given
        assert await member(driver, "n" * 1024, 1)

    play(tmp_path, scene)


@pytest.mark.slow
def test_a_closed_connection_leaves_no_memory_to_the_garbage_collector(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        await looked_up(driver, 1)
        await driver.request("PRODUCER", topic="plain", producer_id=1)
        gone = await connected(server)
        await _use_all(gone)
        session = next(each for each in server.context.sessions if each.watches)
        producer, consumer = session.producers[1].producer, session.consumers[1].consumer
        refs = [weakref.ref(each) for each in (session, producer, consumer, session.outbound)]
        ended = session.ended
        del session, producer, consumer
        await gone.close()
        await ended.wait()
        # The end of its task, and the callbacks of others, come in later turns.
        for _ in range(100):
            if all(ref() is None for ref in refs):
                break
            await asyncio.sleep(0)
        assert [ref() for ref in refs] == [None] * 4

    gc.collect()
    gc.disable()
    try:
        play(tmp_path, scene)
    finally:
        gc.enable()


async def _use_all(driver: Driver) -> None:
    """One of each kind of handle, a message to and fro, and refusals."""
    await driver.request("PRODUCER", topic="plain", producer_id=1, metadata=[])
    await driver.publish(1, 0, build_message(b"x", sequence_id=0))
    await subscribed(driver, 1, topic="plain")
    await message(driver)
    await looked_up(driver, 1)
    await member(driver, "member", 2)
    watch: dict[str, Any] = {"namespace": "public/default", "topics_pattern": ".*"}
    await driver.request("WATCH_TOPIC_LIST", watcher_id=1, **watch)
    assert await refused(driver.request("PRODUCER", topic="a/b", producer_id=2))
    assert await refused(driver.request("GET_LAST_MESSAGE_ID", consumer_id=9))
