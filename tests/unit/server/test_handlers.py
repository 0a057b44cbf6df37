"""The commands against a real server, through a driver: replies, codes, order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.schema_rules import AUTO_CONSUME_TYPE, NO_SCHEMA_TYPE
from magnetar.broker.policy.values import AutoTopicCreation
from magnetar.errors import WireCode
from magnetar.model.names import NamespaceName, TopicName
from magnetar.runtime.limits import Limits
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import Received
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.serving import (
    LIMITS,
    connected,
    pushed,
    refused,
    run,
    serving,
    subscribed,
)

# --- finding topics


def test_a_lookup_answers_this_server(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            found = await driver.request("LOOKUP", topic="topic", advertised_listener_name="")
            assert found.response == pb.CommandLookupTopicResponse.Connect
            assert found.brokerServiceUrl == server.service_url
            assert found.authoritative
            assert found.proxy_through_service_url
            await driver.close()

    run(scene())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "persistent://a/b"}, WireCode.INVALID_TOPIC_NAME),
        ({"topic": "persistent://nobody/has/this"}, WireCode.TOPIC_NOT_FOUND),
        ({"topic": "x", "advertised_listener_name": "other"}, WireCode.SERVICE_NOT_READY),
    ],
)
def test_a_lookup_that_fails_says_why(
    tmp_path: Path, fields: dict[str, Any], code: WireCode
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            assert await refused(driver.request("LOOKUP", **fields)) == code
            await driver.close()

    run(scene())


def test_partitions_are_created_as_the_policy_says(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            plain = await driver.request("PARTITIONED_METADATA", topic="plain")
            assert plain.partitions == 0
            missing = driver.request(
                "PARTITIONED_METADATA", topic="missing", metadata_auto_creation_enabled=False
            )
            assert await refused(missing) == WireCode.TOPIC_NOT_FOUND
            await server.topics.change_namespace(
                NamespaceName("public", "default"),
                _with_partitions,
            )
            parts = await driver.request("PARTITIONED_METADATA", topic="parts")
            assert parts.partitions == 3
            code = await refused(driver.request("PRODUCER", topic="parts", producer_id=1))
            assert code == WireCode.NOT_ALLOWED
            code = await refused(
                driver.request("PRODUCER", topic="parts-partition-3", producer_id=1)
            )
            assert code == WireCode.NOT_ALLOWED
            await driver.request("PRODUCER", topic="parts-partition-2", producer_id=1)
            await driver.close()

    run(scene())


def test_topics_are_listed_matched_and_hashed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            for name in ("a-1", "a-2", "b", "non-persistent://public/default/a-3"):
                await driver.request("PRODUCER", topic=name, producer_id=hash(name) & 0xFFFF)
            listed = await driver.request("GET_TOPICS_OF_NAMESPACE", namespace="public/default")
            assert [name.rpartition("/")[2] for name in listed.topics] == ["a-1", "a-2", "b"]
            pattern: dict[str, Any] = {
                "namespace": "public/default",
                "topics_pattern": "public/default/a-.*",
            }
            some = await driver.request("GET_TOPICS_OF_NAMESPACE", mode=2, **pattern)
            assert len(some.topics) == 3
            assert some.filtered
            same = await driver.request(
                "GET_TOPICS_OF_NAMESPACE", mode=2, topics_hash=some.topics_hash, **pattern
            )
            assert not same.changed
            assert not same.topics
            for bad, code in (("x" * 51, WireCode.NOT_ALLOWED), ("(", WireCode.INVALID_TOPIC_NAME)):
                asked = driver.request(
                    "GET_TOPICS_OF_NAMESPACE", namespace="public/default", topics_pattern=bad
                )
                assert await refused(asked) == code
            await driver.close()

    run(scene())


def test_a_watch_tells_what_comes_and_goes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            given: dict[str, Any] = {
                "namespace": "public/default",
                "topics_pattern": "public/default/w-.*",
            }
            started = await driver.request("WATCH_TOPIC_LIST", watcher_id=4, **given)
            assert not started.topic
            await driver.request("PRODUCER", topic="w-1", producer_id=1)
            update = await pushed(driver, "WATCH_TOPIC_UPDATE")
            assert list(update.new_topics) == ["persistent://public/default/w-1"]
            again = await driver.request("WATCH_TOPIC_LIST", watcher_id=4, **given)
            assert list(again.topic) == list(update.new_topics)
            assert again.topics_hash == update.topics_hash
            await driver.request("CLOSE_PRODUCER", producer_id=1)
            await server.topics.delete(TopicName.parse("w-1"))
            update = await pushed(driver, "WATCH_TOPIC_UPDATE")
            assert list(update.deleted_topics) == ["persistent://public/default/w-1"]
            await driver.request("WATCH_TOPIC_LIST_CLOSE", watcher_id=4)
            await driver.close()

    run(scene())


def test_a_namespace_that_is_not_there_yet_has_no_topics(tmp_path: Path) -> None:
    """Clients that consume by pattern may come before whoever makes the namespace."""

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            coming = NamespaceName("public", "coming")
            listed = await driver.request("GET_TOPICS_OF_NAMESPACE", namespace=str(coming), mode=2)
            assert not listed.topics
            started = await driver.request(
                "WATCH_TOPIC_LIST",
                watcher_id=4,
                namespace=str(coming),
                topics_pattern="public/coming/.*",
            )
            assert not started.topic
            await server.topics.namespaces.create(coming)
            await driver.request("PRODUCER", topic=f"persistent://{coming}/t", producer_id=1)
            update = await pushed(driver, "WATCH_TOPIC_UPDATE")
            assert list(update.new_topics) == ["persistent://public/coming/t"]
            await driver.close()

    run(scene())


# --- producing


def test_receipts_come_in_order_with_their_positions(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            for number in range(300):
                driver.send(
                    "SEND",
                    build_message(b"x", sequence_id=number),
                    producer_id=1,
                    sequence_id=number,
                )
            receipts = [await pushed(driver, "SEND_RECEIPT") for _ in range(300)]
            assert [each.sequence_id for each in receipts] == list(range(300))
            entries = [(each.message_id.ledgerId, each.message_id.entryId) for each in receipts]
            assert entries == sorted(set(entries))
            await driver.close()

    run(scene())


def test_a_damaged_message_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            damaged = bytearray(build_message(b"payload"))
            damaged[-1] ^= 1
            assert await refused(driver.publish(1, 0, bytes(damaged))) == WireCode.CHECKSUM
            await driver.publish(1, 1, build_message(b"payload", sequence_id=1))
            await driver.close()

    run(scene())


def test_a_taken_name_is_busy_until_its_connection_turns_out_dead(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = Limits(
            journal_file_bytes=1024 * 1024, close_seconds=60, connection_liveness_seconds=0.3
        )
        async with serving(tmp_path, limits=limits) as server:
            first, second = await connected(server), await connected(server)
            fields: dict[str, Any] = {"topic": "topic", "producer_id": 1, "producer_name": "me"}
            await first.request("PRODUCER", **fields)
            assert await refused(second.request("PRODUCER", **fields)) == WireCode.PRODUCER_BUSY
            first.answer_pings = False
            opened = await second.request("PRODUCER", **fields)
            assert opened.producer_name == "me"
            await first.lost()
            await second.close()

    run(scene())


def test_a_producer_that_waits_for_the_topic_is_told_twice(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="t", producer_id=1, producer_access_mode=1)
            waiting = await driver.request(
                "PRODUCER", topic="t", producer_id=2, producer_access_mode=2, request_id=77
            )
            assert not waiting.producer_ready
            await driver.request("CLOSE_PRODUCER", producer_id=1)
            ready = await pushed(driver, "PRODUCER_SUCCESS")
            assert (ready.request_id, ready.producer_ready) == (77, True)
            assert ready.topic_epoch == 1
            await driver.publish(2, 0, build_message(b"x"))
            await driver.close()

    run(scene())


def test_a_producer_id_is_opened_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            one = driver.request("PRODUCER", topic="topic", producer_id=1)
            two = driver.request("PRODUCER", topic="topic", producer_id=1)
            results = await asyncio.gather(one, two, return_exceptions=True)
            refusals = [each for each in results if isinstance(each, Exception)]
            assert [getattr(each, "wire_code", None) for each in refusals] == [
                WireCode.SERVICE_NOT_READY
            ]
            again = await driver.request("PRODUCER", topic="topic", producer_id=1)
            (opened,) = [each for each in results if not isinstance(each, BaseException)]
            assert again.producer_name == opened.producer_name
            await driver.request("CLOSE_PRODUCER", producer_id=1)
            await driver.request("CLOSE_PRODUCER", producer_id=1)  # unknown by now: no error
            await driver.close()

    run(scene())


def test_a_terminated_topic_refuses_sends_and_producers(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            topic = await server.topics.get(TopicName.parse("topic"))
            await topic.terminate()
            await pushed(driver, "CLOSE_PRODUCER")
            driver.send("SEND", build_message(b"late"), producer_id=1, sequence_id=0)
            code = await refused(driver.request("PRODUCER", topic="topic", producer_id=1))
            assert code == WireCode.TOPIC_TERMINATED
            await driver.close()

    run(scene())


# --- schemas


def test_schemas_are_stored_with_versions(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            none = driver.request("GET_SCHEMA", topic="topic")
            assert await refused(none) == WireCode.TOPIC_NOT_FOUND
            schema = {"name": "s", "schema_data": b'"int"', "type": 2}
            opened = await driver.request("PRODUCER", topic="topic", producer_id=1, schema=schema)
            assert opened.schema_version == bytes(8)
            # The same in other words, and another one.
            same = schema | {"schema_data": b'{"type": "int"}'}
            made = await driver.request("GET_OR_CREATE_SCHEMA", topic="topic", schema=same)
            assert made.schema_version == bytes(8)
            date = b'{"type": "int", "logicalType": "date"}'
            other = schema | {"schema_data": date}
            made = await driver.request("GET_OR_CREATE_SCHEMA", topic="topic", schema=other)
            assert made.schema_version == bytes(7) + b"\x01"
            first = await driver.request("GET_SCHEMA", topic="topic", schema_version=bytes(8))
            latest = await driver.request("GET_SCHEMA", topic="topic")
            assert (first.schema.schema_data, latest.schema.schema_data) == (b'"int"', date)
            empty = driver.request("GET_SCHEMA", topic="topic", schema_version=b"")
            assert await refused(empty) == WireCode.INCOMPATIBLE_SCHEMA
            wrong = driver.request(
                "PRODUCER", topic="topic", producer_id=2, schema=schema | {"type": 4}
            )
            assert await refused(wrong) == WireCode.INCOMPATIBLE_SCHEMA
            unsound = ({**schema, "schema_data": b"{}"}, {**schema, "type": AUTO_CONSUME_TYPE})
            for each in unsound:
                asked = driver.request("PRODUCER", topic="topic", producer_id=3, schema=each)
                assert await refused(asked) == WireCode.INCOMPATIBLE_SCHEMA
                asked = driver.request("GET_OR_CREATE_SCHEMA", topic="topic", schema=each)
                assert await refused(asked) == WireCode.INCOMPATIBLE_SCHEMA
            await driver.close()

    run(scene())


# --- back-pressure


def test_plain_bytes_have_no_version_of_a_schema(tmp_path: Path) -> None:
    """An empty one is a version to the client for Go: its consumers ask for it, in vain."""

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            schema = {"name": "Bytes", "schema_data": b"", "type": NO_SCHEMA_TYPE}
            opened = await driver.request("PRODUCER", topic="topic", producer_id=1, schema=schema)
            assert not opened.schema_version
            found = await driver.request("GET_OR_CREATE_SCHEMA", topic="topic", schema=schema)
            assert not found.HasField("schema_version")
            none = driver.request("GET_SCHEMA", topic="topic")
            assert await refused(none) == WireCode.TOPIC_NOT_FOUND
            await driver.close()

    run(scene())


def test_a_producer_that_never_waits_is_slowed_and_loses_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            entry = build_message(b"x" * 100)
            highest = 0
            for number in range(5000):
                driver.send("SEND", entry, producer_id=1, sequence_id=number)
                if number % 500 == 0:
                    await driver.drain()
                    await asyncio.sleep(0)
                    (session,) = server.context.sessions
                    highest = max(highest, session.owed)
            last = await _receipts(driver, 5000)
            assert last == 4999
            # One read may bring more than the limit allows; nothing more is read then.
            assert highest < LIMITS.connection_pending_publishes + 256 * 1024 // len(entry)
            await driver.close()

    run(scene())


def test_a_consumer_that_never_reads_stays_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = Limits(
            journal_file_bytes=4 * 1024 * 1024, connection_write_bytes=64 * 1024, close_seconds=60
        )
        async with serving(tmp_path, limits=limits) as server:
            lazy = await connected(server)
            await subscribed(lazy)
            lazy.detach().pause_reading()
            writer = await connected(server)
            await writer.request("PRODUCER", topic="topic", producer_id=1)
            big = build_message(b"x" * 100_000)
            for number in range(200):
                await writer.publish(1, number, big)
            topic = await server.topics.get(TopicName.parse("topic"))
            (consumer,) = topic.subscriptions["sub"].consumers
            session = next(each for each in server.context.sessions if each.consumers)
            assert session.outbound.paused
            assert consumer.outbox_bytes <= limits.consumer_outbox_bytes + len(big)
            await writer.close()
            lazy.abort()

    run(scene())


async def _receipts(driver: Driver, count: int) -> int:
    last = -1
    for _ in range(count):
        push = await driver.pushes.get()
        assert isinstance(push, Received)
        body = push.body
        assert isinstance(body, pb.CommandSendReceipt)
        assert body.sequence_id == last + 1
        last = body.sequence_id
    return last


def _with_partitions(policies: Policies) -> Policies:
    creation = AutoTopicCreation(True, "partitioned", 3)
    return msgspec.structs.replace(policies, auto_topic_creation=creation)


@pytest.mark.parametrize(
    ("fields", "code", "at_most"),
    [
        ({"producer_name": "n" * 1025}, WireCode.NOT_ALLOWED, {"producer_name": "n" * 1024}),
        (
            {"metadata": [{"key": "k", "value": "v" * 1024}]},
            WireCode.METADATA,
            {"metadata": [{"key": "k", "value": "v" * 1023}]},
        ),
        (
            {"metadata": [{"key": f"{number}", "value": "value"} for number in range(200)]},
            WireCode.METADATA,
            {"metadata": []},
        ),
    ],
)
def test_names_and_metadata_of_producers_have_a_bound(
    tmp_path: Path, fields: dict[str, Any], code: WireCode, at_most: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, client_version="v" * 10_000)
            assert (
                await refused(driver.request("PRODUCER", topic="x", producer_id=1, **fields))
                == code
            )
            await driver.request("PRODUCER", topic="x", producer_id=1, **at_most)
            (session,) = server.context.sessions
            assert session.client_version == "v" * 128
            await driver.close()

    run(scene())
