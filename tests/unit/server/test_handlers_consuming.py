"""The commands of consumers against a real server, through a driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import WireCode
from magnetar.model.names import TopicName
from magnetar.runtime.limits import Limits
from magnetar.runtime.slices import SLICE_ITEMS
from magnetar.server.config import load
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.serving import (
    LIMITS,
    connected,
    message,
    published,
    pushed,
    refused,
    run,
    serving,
    subscribed,
)


def test_messages_are_delivered_and_acknowledged_with_a_receipt(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver)
            await published(driver, 3)
            got = [await message(driver) for _ in range(3)]
            assert [each.headers_and_payload[-1:] for each in got] == [b"0", b"1", b"2"]
            ids = [each.body.message_id for each in got]
            await driver.request("ACK", consumer_id=0, ack_type=0, message_id=[_id(ids[0])])
            await driver.request("ACK", consumer_id=0, ack_type=1, message_id=[_id(ids[1])])
            await driver.request("CLOSE_CONSUMER", consumer_id=0)
            await subscribed(driver, consumer_id=1)
            assert (await message(driver)).headers_and_payload[-1:] == b"2"
            await driver.close()

    run(scene())


def test_what_is_acknowledged_stays_so_after_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=1)
            await published(driver, 3)
            got = [await message(driver) for _ in range(3)]
            driver.send("ACK", consumer_id=0, ack_type=0, message_id=[_id(got[1].body.message_id)])
            driver.send("PING")
            await pushed(driver, "PONG")
        await driver.lost()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=1)
            again = [(await message(driver)).headers_and_payload[-1:] for _ in range(2)]
            assert again == [b"0", b"2"]
            await driver.close()

    run(scene())


@pytest.mark.parametrize("domain", ["persistent", "non-persistent"])
@pytest.mark.parametrize("setting", ["true", "false", None])
def test_a_setting_says_how_key_shared_consumers_divide_the_keys(
    tmp_path: Path, setting: str | None, domain: str
) -> None:
    name = "MAGNETAR_SUBSCRIPTION_KEY_SHARED_USE_CONSISTENT_HASHING"
    given = load({}, {} if setting is None else {name: setting})
    chosen = given.subscription_key_shared_use_consistent_hashing
    topic = f"{domain}://public/default/keys"

    async def scene() -> None:
        async with serving(
            tmp_path, subscription_key_shared_use_consistent_hashing=chosen
        ) as server:
            driver = await connected(server)
            for number in range(3):
                await subscribed(driver, number, topic=topic, subType=3, consumer_name=f"c{number}")
            stats = (await server.topics.get(TopicName.parse(topic))).stats()
            consumers = stats.subscriptions["sub"].consumers
            ranges = {each.consumer_name: each.key_hash_ranges for each in consumers}
            if setting == "false":
                # Each newcomer takes the lower half of the widest range.
                assert ranges == {
                    "c0": ["[32769, 65535]"],
                    "c1": ["[16385, 32768]"],
                    "c2": ["[1, 16384]"],
                }
            else:
                assert all(len(each) > 20 for each in ranges.values())
            await driver.close()

    run(scene())


def test_a_seek_closes_the_consumer_before_it_succeeds(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            for durable in (True, False):
                await subscribed(driver, durable=durable, subscription=f"sub-{durable}")
                ids = await published(driver, 3, topic="topic")
                for _ in range(3):
                    await message(driver)
                # Sent without waiting, so that its answer is a push, in order with the other.
                driver.send("SEEK", consumer_id=0, message_id=_id(ids[1]), request_id=1000)
                assert (await pushed(driver, "CLOSE_CONSUMER")).consumer_id == 0
                assert (await pushed(driver, "SUCCESS")).request_id == 1000
                await subscribed(driver, durable=durable, subscription=f"sub-{durable}")
                assert (await message(driver)).body.message_id == ids[1]
                await driver.request("CLOSE_CONSUMER", consumer_id=0)
                await server.topics.delete(TopicName.parse("topic"))
            await driver.close()

    run(scene())


def test_redelivery_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=1)
            (only,) = await published(driver, 1)
            assert (await message(driver)).body.redelivery_count == 0
            driver.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=0, message_ids=[_id(only)])
            assert (await message(driver)).body.redelivery_count == 1
            await driver.close()

    run(scene())


def test_the_active_consumer_of_a_failover_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, 1, subType=2, consumer_name="a")
            assert (await pushed(driver, "ACTIVE_CONSUMER_CHANGE")).is_active
            await driver.close()

    run(scene())


def test_the_end_of_a_topic_is_told_to_java_clients_only(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            java = await connected(server, client_version="Pulsar-Java-v4.1.0")
            other = await connected(server)
            await subscribed(java, subscription="java")
            await subscribed(other, subscription="other")
            topic = await server.topics.get(TopicName.parse("topic"))
            await topic.terminate()
            assert (await pushed(java, "REACHED_END_OF_TOPIC")).consumer_id == 0
            other.send("PING")
            await pushed(other, "PONG")  # and nothing before it
            await java.close()
            await other.close()

    run(scene())


def test_last_message_and_statistics(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver)
            empty = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=0)
            assert empty.last_message_id.entryId == 2**64 - 1
            ids = await published(driver, 2)
            found = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=0)
            assert found.last_message_id.entryId == ids[1].entryId
            assert found.last_message_id.batch_index == -1
            for _ in ids:
                await message(driver)
            stats = await driver.request("CONSUMER_STATS", consumer_id=0)
            assert (stats.type, stats.msgBacklog, stats.availablePermits) == ("Exclusive", 2, 998)
            await driver.close()

    run(scene())


@pytest.mark.parametrize(
    ("type_name", "fields", "code"),
    [
        ("GET_LAST_MESSAGE_ID", {}, WireCode.METADATA),
        ("CONSUMER_STATS", {}, WireCode.CONSUMER_NOT_FOUND),
        ("SEEK", {"message_publish_time": 1}, WireCode.METADATA),
        ("UNSUBSCRIBE", {}, WireCode.METADATA),
        ("ACK", {"ack_type": 0}, WireCode.CONSUMER_NOT_FOUND),
    ],
)
def test_an_unknown_consumer_is_refused(
    tmp_path: Path, type_name: str, fields: dict[str, Any], code: WireCode
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            assert await refused(driver.request(type_name, consumer_id=5, **fields)) == code
            await driver.request("CLOSE_CONSUMER", consumer_id=5)  # unknown: no error
            await driver.close()

    run(scene())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "missing", "force_topic_creation": False}, WireCode.TOPIC_NOT_FOUND),
        ({"topic": "a/b"}, WireCode.INVALID_TOPIC_NAME),
        ({"subscription": ""}, WireCode.PRODUCER_BUSY),
        ({"read_compacted": True, "subType": 1}, WireCode.NOT_ALLOWED),
        ({"metadata": [{"key": "k", "value": "v" * 1025}]}, WireCode.METADATA),
        ({"subscription_properties": [{"key": "k", "value": "\u00e4" * 512}]}, WireCode.METADATA),
        ({"consumer_name": "\u00e4" * 513}, WireCode.NOT_ALLOWED),
        (
            {"subType": 3, "keySharedMeta": {"keySharedMode": 1, "hashRanges": []}},
            WireCode.CONSUMER_ASSIGN,
        ),
        ({"subType": 1}, WireCode.CONSUMER_BUSY),
        ({"durable": False}, WireCode.NOT_ALLOWED),
    ],
)
def test_what_a_subscribe_may_not_ask_for(
    tmp_path: Path, fields: dict[str, Any], code: WireCode
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver)
            assert await refused(subscribed(driver, 1, **fields)) == code
            await driver.close()

    run(scene())


def test_an_exclusive_subscription_goes_over_from_a_dead_connection(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = Limits(
            journal_file_bytes=1024 * 1024, close_seconds=60, connection_liveness_seconds=0.3
        )
        async with serving(tmp_path, limits=limits) as server:
            first, second = await connected(server), await connected(server)
            await subscribed(first)
            assert await refused(subscribed(second)) == WireCode.CONSUMER_BUSY
            first.answer_pings = False
            await subscribed(second)
            await first.lost()
            await second.close()

    run(scene())


def test_unsubscribe_removes_the_subscription_of_its_only_consumer(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, 1, subType=1)
            await subscribed(driver, 2, subType=1)
            busy = driver.request("UNSUBSCRIBE", consumer_id=1)
            assert await refused(busy) == WireCode.METADATA
            await driver.request("CLOSE_CONSUMER", consumer_id=2)
            await driver.request("UNSUBSCRIBE", consumer_id=1)
            topic = await server.topics.get(TopicName.parse("topic"))
            assert not topic.subscriptions
            assert not len(driver.pushes), "nobody is told of the end that they asked for"
            await driver.close()

    run(scene())


def test_a_lost_connection_frees_what_it_held(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            first = await connected(server)
            await subscribed(first, 1)
            await first.request("PRODUCER", topic="topic", producer_id=1, producer_name="me")
            first.abort()
            await server.context.all_ended()
            second = await connected(server)
            await subscribed(second, 1)
            await second.request("PRODUCER", topic="topic", producer_id=1, producer_name="me")
            await second.close()

    run(scene())


def _id(message_id: pb.MessageIdData) -> dict[str, int]:
    return {"ledgerId": message_id.ledgerId, "entryId": message_id.entryId}


def test_too_many_message_ids_in_one_command_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = replace(LIMITS, command_ids_max=2)
        async with serving(tmp_path, limits=limits) as server:
            driver = await connected(server)
            await subscribed(driver, subType=1)
            found = await published(driver, 3)
            ids = [{"ledgerId": each.ledgerId, "entryId": each.entryId} for each in found]
            ack = {"consumer_id": 0, "ack_type": 0}
            assert (
                await refused(driver.request("ACK", message_id=ids, **ack)) == WireCode.NOT_ALLOWED
            )
            await driver.request("ACK", message_id=ids[:2], **ack)
            await driver.close()

    run(scene())


def test_too_many_hash_ranges_are_refused_before_they_are_looked_at(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            most = server.config.limits.subscribe_ranges_max
            ranges = [{"start": 0, "end": 0}] * (most + 1)
            meta = {"keySharedMode": 1, "hashRanges": ranges}
            code = await refused(subscribed(driver, subType=3, keySharedMeta=meta))
            assert code == WireCode.CONSUMER_ASSIGN
            ranges = [{"start": 2 * each, "end": 2 * each} for each in range(most)]
            meta = {"keySharedMode": 1, "hashRanges": ranges}
            await subscribed(driver, subType=3, keySharedMeta=meta)
            await driver.close()

    run(scene())


@pytest.mark.slow
def test_commands_behind_a_long_acknowledgement_wait_for_its_end(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=1)
            found = await published(driver, 5 * SLICE_ITEMS)
            driver.send("FLOW", consumer_id=0, messagePermits=5 * SLICE_ITEMS)
            for _ in found:
                await message(driver)
            ids = [{"ledgerId": each.ledgerId, "entryId": each.entryId} for each in found]
            # Not in order, so that each id is a step of its own; the last one comes again.
            driver.send("ACK", consumer_id=0, ack_type=0, message_id=[*ids[1:-1], ids[0]])
            driver.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=0)
            driver.send("FLOW", consumer_id=0, messagePermits=10)
            again = await message(driver)
            assert again.body.message_id.entryId == found[-1].entryId
            answer = await driver.request("CONSUMER_STATS", consumer_id=0)
            assert (answer.msgBacklog, len(driver.pushes)) == (1, 0)
            await driver.close()

    run(scene())
