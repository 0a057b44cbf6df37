"""Every refusal that clients know: the code, in the reply that they wait for, on a live connection.

The codes are those that official clients act on; where a code exists the connection stays open.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from magnetar.broker.policy.values import AutoSubscriptionCreation, AutoTopicCreation
from magnetar.errors import WireCode
from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.commands import NAMES
from magnetar.wire.frames import base_command, command, encode_with_payload
from magnetar.wire.messages import Received, ReceivedEntries
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.range_refusals import REFUSED_RANGES
from tests.unit.server.serving import connected, published, run, serving, subscribed

REQUEST = 4711
NO_REQUEST = 2**64 - 1
DEFAULT = NamespaceName("public", "default")
AVRO = {"name": "s", "schema_data": b'"int"', "type": 4}
JSON = {"name": "s", "schema_data": b'"int"', "type": 2}
SOME_ID = {"ledgerId": 1, "entryId": 1}
TXN = {"txnid_least_bits": 1, "txnid_most_bits": 0}

Setting = Callable[[Server, Driver], Awaitable[None]]


class Refusal(NamedTuple):
    """A command, and what it must be answered with once `given` is so."""

    command: str
    fields: dict[str, Any]
    code: WireCode
    reply: str = "ERROR"
    given: Setting | None = None
    id_field: str = "request_id"


# --- what is given


async def no_auto_creation(server: Server, driver: Driver) -> None:
    off = AutoTopicCreation(False, "non-partitioned", None)
    await server.topics.change_namespace(
        DEFAULT, lambda policies: msgspec.structs.replace(policies, auto_topic_creation=off)
    )


async def no_new_subscriptions(server: Server, driver: Driver) -> None:
    await driver.request("PRODUCER", topic="topic", producer_id=50)
    off = AutoSubscriptionCreation(False)
    await server.topics.change_namespace(
        DEFAULT, lambda policies: msgspec.structs.replace(policies, auto_subscription_creation=off)
    )


async def terminated(server: Server, driver: Driver) -> None:
    topic = await server.topics.get(TopicName.parse("topic"))
    await topic.terminate()


async def partitioned(server: Server, driver: Driver) -> None:
    await server.topics.create_partitioned(TopicName.parse("parts"), 3)


async def named_producer(server: Server, driver: Driver) -> None:
    await driver.request("PRODUCER", topic="topic", producer_id=50, producer_name="me")


async def exclusive_producer(server: Server, driver: Driver) -> None:
    await driver.request("PRODUCER", topic="topic", producer_id=50, producer_access_mode=1)


async def exclusive_consumer(server: Server, driver: Driver) -> None:
    await subscribed(driver, 50)


async def shared_consumers(server: Server, driver: Driver) -> None:
    await subscribed(driver, 1, subType=1)
    await subscribed(driver, 2, subType=1)


async def sticky_consumer(server: Server, driver: Driver) -> None:
    await subscribed(driver, 50, subType=3, keySharedMeta=sticky((0, 100)))


async def lone_consumer(server: Server, driver: Driver) -> None:
    await subscribed(driver, 1)


async def transient_consumer(server: Server, driver: Driver) -> None:
    await subscribed(driver, 1, topic="non-persistent://public/default/n")


async def schema_and_message(server: Server, driver: Driver) -> None:
    await driver.request("PRODUCER", topic="topic", producer_id=50, schema=JSON)


async def message_without_schema(server: Server, driver: Driver) -> None:
    await published(driver, 1)


def sticky(*ranges: tuple[int, int]) -> dict[str, Any]:
    spans = [{"start": start, "end": end} for start, end in ranges]
    return {"keySharedMode": 1, "hashRanges": spans}


def subscribe(code: WireCode, given: Setting | None = None, **fields: Any) -> Refusal:
    asked: dict[str, Any] = {"topic": "topic", "subscription": "sub", "subType": 0}
    return Refusal("SUBSCRIBE", asked | {"consumer_id": 1} | fields, code, given=given)


def produce(code: WireCode, given: Setting | None = None, **fields: Any) -> Refusal:
    return Refusal("PRODUCER", {"topic": "topic", "producer_id": 1} | fields, code, given=given)


def of_namespace(command: str, code: WireCode, **fields: Any) -> Refusal:
    return Refusal(command, {"namespace": "public/default"} | fields, code)


BAD_NAMES = ("persistent://a/b", "a/b", "ftp://a/b/c", "persistent://a/b/c/d/e", "")
NOWHERE = "persistent://nobody/has/this"
PARTITIONS = "PARTITIONED_METADATA_RESPONSE"

NAMES_AND_TOPICS = [
    *(produce(WireCode.INVALID_TOPIC_NAME, topic=name) for name in BAD_NAMES),
    *(subscribe(WireCode.INVALID_TOPIC_NAME, topic=name) for name in BAD_NAMES),
    Refusal("LOOKUP", {"topic": "a/b"}, WireCode.INVALID_TOPIC_NAME, "LOOKUP_RESPONSE"),
    Refusal("LOOKUP", {"topic": NOWHERE}, WireCode.TOPIC_NOT_FOUND, "LOOKUP_RESPONSE"),
    Refusal(
        "LOOKUP",
        {"topic": "x", "advertised_listener_name": "other"},
        WireCode.SERVICE_NOT_READY,
        "LOOKUP_RESPONSE",
    ),
    Refusal("PARTITIONED_METADATA", {"topic": "a/b"}, WireCode.INVALID_TOPIC_NAME, PARTITIONS),
    Refusal("PARTITIONED_METADATA", {"topic": NOWHERE}, WireCode.TOPIC_NOT_FOUND, PARTITIONS),
    Refusal(
        "PARTITIONED_METADATA",
        {"topic": "missing", "metadata_auto_creation_enabled": False},
        WireCode.TOPIC_NOT_FOUND,
        PARTITIONS,
    ),
    Refusal(
        "PARTITIONED_METADATA",
        {"topic": "missing"},
        WireCode.TOPIC_NOT_FOUND,
        PARTITIONS,
        no_auto_creation,
    ),
    produce(WireCode.TOPIC_NOT_FOUND, topic=NOWHERE),
    produce(WireCode.TOPIC_NOT_FOUND, no_auto_creation, topic="missing"),
    subscribe(WireCode.TOPIC_NOT_FOUND, no_auto_creation, topic="missing"),
    subscribe(WireCode.TOPIC_NOT_FOUND, topic="missing", force_topic_creation=False),
    produce(WireCode.NOT_ALLOWED, partitioned, topic="parts"),
    produce(WireCode.NOT_ALLOWED, partitioned, topic="parts-partition-3"),
    subscribe(WireCode.NOT_ALLOWED, partitioned, topic="parts"),
    subscribe(WireCode.NOT_ALLOWED, partitioned, topic="parts-partition-3"),
    of_namespace("GET_TOPICS_OF_NAMESPACE", WireCode.NOT_ALLOWED, topics_pattern="x" * 51),
    of_namespace("GET_TOPICS_OF_NAMESPACE", WireCode.INVALID_TOPIC_NAME, topics_pattern="("),
    of_namespace("GET_TOPICS_OF_NAMESPACE", WireCode.INVALID_TOPIC_NAME, namespace="a/b/c/d"),
    of_namespace("WATCH_TOPIC_LIST", WireCode.NOT_ALLOWED, watcher_id=1, topics_pattern="x" * 51),
    of_namespace("WATCH_TOPIC_LIST", WireCode.INVALID_TOPIC_NAME, watcher_id=1, topics_pattern="("),
]

PRODUCERS = [
    produce(WireCode.TOPIC_TERMINATED, terminated),
    produce(WireCode.PRODUCER_BUSY, named_producer, producer_name="me"),
    produce(WireCode.PRODUCER_BUSY, exclusive_producer),
    produce(WireCode.PRODUCER_FENCED, named_producer, producer_access_mode=1),
    produce(WireCode.INCOMPATIBLE_SCHEMA, schema_and_message, schema=AVRO),
    produce(WireCode.NOT_ALLOWED, no_new_subscriptions, initial_subscription_name="s"),
]

CONSUMERS = [
    subscribe(WireCode.CONSUMER_BUSY, exclusive_consumer),
    subscribe(WireCode.CONSUMER_BUSY, exclusive_consumer, subType=1),
    subscribe(WireCode.NOT_ALLOWED, exclusive_consumer, durable=False),
    subscribe(WireCode.SUBSCRIPTION_NOT_FOUND, no_new_subscriptions),
    subscribe(WireCode.PRODUCER_BUSY, subscription=""),
    subscribe(WireCode.NOT_ALLOWED, read_compacted=True, subType=1),
    subscribe(WireCode.METADATA, metadata=[{"key": "k", "value": "v" * 1025}]),
    subscribe(WireCode.INCOMPATIBLE_SCHEMA, schema_and_message, schema=AVRO),
    subscribe(WireCode.INCOMPATIBLE_SCHEMA, message_without_schema, schema=JSON),
    *(
        subscribe(WireCode.CONSUMER_ASSIGN, subType=3, keySharedMeta=sticky(*ranges))
        for ranges in ([], [(0, 10), (5, 20)], [(10, 0)], [(-1, 5)], [(0, 65_536)])
    ),
    subscribe(
        WireCode.CONSUMER_ASSIGN, sticky_consumer, subType=3, keySharedMeta=sticky((100, 200))
    ),
    subscribe(WireCode.CONSUMER_BUSY, sticky_consumer, subType=3),
    Refusal("UNSUBSCRIBE", {"consumer_id": 1}, WireCode.METADATA),
    Refusal("UNSUBSCRIBE", {"consumer_id": 1}, WireCode.METADATA, given=shared_consumers),
    Refusal("SEEK", {"consumer_id": 1, "message_publish_time": 1}, WireCode.METADATA),
    Refusal("SEEK", {"consumer_id": 1}, WireCode.NOT_ALLOWED, given=lone_consumer),
    Refusal("GET_LAST_MESSAGE_ID", {"consumer_id": 1}, WireCode.METADATA),
    Refusal(
        "GET_LAST_MESSAGE_ID", {"consumer_id": 1}, WireCode.NOT_ALLOWED, given=transient_consumer
    ),
    Refusal(
        "CONSUMER_STATS", {"consumer_id": 1}, WireCode.CONSUMER_NOT_FOUND, "CONSUMER_STATS_RESPONSE"
    ),
    Refusal(
        "ACK",
        {"consumer_id": 1, "ack_type": 0, "message_id": [SOME_ID]},
        WireCode.CONSUMER_NOT_FOUND,
        "ACK_RESPONSE",
    ),
    *(
        Refusal("ACK", {"consumer_id": 1} | fields, WireCode.NOT_ALLOWED, "ACK_RESPONSE", given)
        for given, fields in (
            (lone_consumer, {"ack_type": 1, "message_id": [SOME_ID, SOME_ID]}),
            (
                lone_consumer,
                {"ack_type": 0, "message_id": [SOME_ID | {"ack_set": [1] * 2049}]},
            ),
        )
    ),
]

SCHEMAS = [
    Refusal("GET_SCHEMA", {"topic": "topic"}, WireCode.TOPIC_NOT_FOUND, "GET_SCHEMA_RESPONSE"),
    Refusal("GET_SCHEMA", {"topic": "a/b"}, WireCode.INVALID_TOPIC_NAME, "GET_SCHEMA_RESPONSE"),
    Refusal(
        "GET_SCHEMA",
        {"topic": "topic", "schema_version": b""},
        WireCode.INCOMPATIBLE_SCHEMA,
        "GET_SCHEMA_RESPONSE",
    ),
    Refusal(
        "GET_OR_CREATE_SCHEMA",
        {"topic": "missing", "schema": JSON},
        WireCode.TOPIC_NOT_FOUND,
        "GET_OR_CREATE_SCHEMA_RESPONSE",
    ),
    Refusal(
        "GET_OR_CREATE_SCHEMA",
        {"topic": "topic", "schema": AVRO},
        WireCode.INCOMPATIBLE_SCHEMA,
        "GET_OR_CREATE_SCHEMA_RESPONSE",
        schema_and_message,
    ),
]

NOT_LED, NO_TXN = WireCode.TRANSACTION_COORDINATOR_NOT_FOUND, WireCode.TRANSACTION_NOT_FOUND
NO_GROUP = {"application": "a"}
NO_SUCH_TXN = {"txnid_least_bits": (1 << 62) + 1, "txnid_most_bits": 3}

TRANSACTIONS = [
    Refusal(command, fields, code, reply or f"{command}_RESPONSE")
    for command, fields, code, reply in (
        ("TC_CLIENT_CONNECT_REQUEST", {"tc_id": 16}, NOT_LED, "TC_CLIENT_CONNECT_RESPONSE"),
        ("NEW_TXN", {"tc_id": 1}, WireCode.NOT_ALLOWED, ""),
        ("NEW_TXN", {"tc_id": 99, "txn_ttl_millis": 1000}, NOT_LED, ""),
        ("ADD_PARTITION_TO_TXN", TXN, NO_TXN, ""),
        ("ADD_SUBSCRIPTION_TO_TXN", NO_SUCH_TXN, NO_TXN, ""),
        ("END_TXN", NO_SUCH_TXN, WireCode.NOT_ALLOWED, ""),
        ("END_TXN", NO_SUCH_TXN | {"txn_action": 0}, NO_TXN, ""),
        ("END_TXN_ON_PARTITION", {}, WireCode.NOT_ALLOWED, ""),
        ("END_TXN_ON_SUBSCRIPTION", {}, WireCode.NOT_ALLOWED, ""),
        ("OPEN_GROUP", NO_GROUP | {"generation": "g", "run": "*"}, WireCode.NOT_ALLOWED, ""),
        ("GROUP_STATUS", {"application": ""}, WireCode.NOT_ALLOWED, ""),
        ("COMMIT_GROUP", NO_GROUP | {"epoch": 1, "sequence": 0}, NO_TXN, ""),
        ("GROUP_STATUS", NO_GROUP, NO_TXN, ""),
    )
] + [
    Refusal(
        "ACK",
        {"consumer_id": 1, "ack_type": 0, "message_id": [SOME_ID]} | TXN,
        WireCode.TRANSACTION_CONFLICT,
        "ACK_RESPONSE",
        lone_consumer,
    )
]

RANGES = [
    Refusal(f"RANGE_{command}", fields, code, f"RANGE_{command}_RESPONSE")
    for command, fields, code in REFUSED_RANGES
]

SCALABLE = [
    Refusal(command, fields, code, reply, id_field=id_field)
    for command, fields, code, reply, id_field in (
        (
            "SCALABLE_TOPIC_LOOKUP",
            {"topic": "non-persistent://public/default/t"},
            WireCode.NOT_ALLOWED,
            "SCALABLE_TOPIC_UPDATE",
            "session_id",
        ),
        (
            "SCALABLE_TOPIC_LOOKUP",
            {"topic": "topic://public/default/t", "create_if_missing": False},
            WireCode.TOPIC_NOT_FOUND,
            "SCALABLE_TOPIC_UPDATE",
            "session_id",
        ),
        (
            "SCALABLE_TOPIC_SUBSCRIBE",
            {
                "topic": "t",
                "subscription": "s",
                "consumer_id": 1,
                "consumer_name": "c",
                "consumer_type": 0,
            },
            WireCode.TOPIC_NOT_FOUND,
            "SCALABLE_TOPIC_SUBSCRIBE_RESPONSE",
            "request_id",
        ),
        (
            "WATCH_SCALABLE_TOPICS",
            {"namespace": "a/b"},
            WireCode.TOPIC_NOT_FOUND,
            "WATCH_SCALABLE_TOPICS_UPDATE",
            "watch_id",
        ),
    )
]


@pytest.mark.parametrize(
    "refusal",
    [*NAMES_AND_TOPICS, *PRODUCERS, *CONSUMERS, *SCHEMAS, *TRANSACTIONS, *RANGES, *SCALABLE],
    ids=lambda refusal: f"{refusal.command}-{refusal.code.name}",
)
def test_a_refusal_has_its_code_and_its_reply(tmp_path: Path, refusal: Refusal) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver, other = await connected(server), await connected(server)
            if refusal.given is not None:
                same = refusal.command not in ("PRODUCER", "SUBSCRIBE")
                await refusal.given(server, driver if same else other)
            driver.send(refusal.command, **refusal.fields, **{refusal.id_field: REQUEST})
            name, body = await answer(driver)
            assert name == refusal.reply
            assert getattr(body, refusal.id_field) == REQUEST
            assert code_of(body) == refusal.code
            codes = pb.ServerError.keys()
            assert not any(error in text_of(body) for error in codes)
            await still_answers(driver)
            await driver.close()
            await other.close()

    run(scene())


# --- sends


async def _sender(server: Server) -> Driver:
    driver = await connected(server)
    await driver.request("PRODUCER", topic="topic", producer_id=1)
    return driver


def _damaged() -> bytes:
    entry = bytearray(build_message(b"payload"))
    entry[-1] ^= 1
    return bytes(entry)


@pytest.mark.parametrize(
    ("entry", "fields", "code"),
    [
        (_damaged(), {}, WireCode.CHECKSUM),
        (build_message(b"x"), TXN, WireCode.NOT_ALLOWED),
    ],
    ids=["damaged", "transactional"],
)
def test_a_refused_send_leaves_its_producer_alone(
    tmp_path: Path, entry: bytes, fields: dict[str, Any], code: WireCode
) -> None:
    async def scene() -> None:
        async with serving(tmp_path, max_message_bytes=1024) as server:
            driver = await _sender(server)
            driver.send("SEND", entry, producer_id=1, sequence_id=7, **fields)
            name, body = await answer(driver)
            assert (name, body.error) == ("SEND_ERROR", code)
            assert (body.producer_id, body.sequence_id) == (1, 7)
            receipt = await driver.publish(1, 8, build_message(b"x", sequence_id=8))
            assert receipt.sequence_id == 8
            await driver.close()

    run(scene())


def test_a_send_to_a_terminated_topic_is_refused(tmp_path: Path) -> None:
    """One that crosses the end; afterwards the producer is closed, and its client told."""

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await _sender(server)
            topic = await server.topics.get(TopicName.parse("topic"))
            await topic.ledger.seal()  # type: ignore[union-attr]
            driver.send("SEND", build_message(b"x"), producer_id=1, sequence_id=7)
            name, body = await answer(driver)
            assert (name, body.error) == ("SEND_ERROR", WireCode.TOPIC_TERMINATED)
            await still_answers(driver)
            await driver.close()

    run(scene())


def test_a_message_as_large_as_announced_is_taken_with_its_headers(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path, max_message_bytes=64 * 1024) as server:
            driver = await _sender(server)
            await driver.publish(1, 0, build_message(b"x" * 64 * 1024))
            await driver.close()

    run(scene())


# --- what has no code ends the connection


def test_a_frame_above_the_limit_ends_the_connection(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path, max_message_bytes=1024) as server:
            driver = await _sender(server)
            driver.send_bytes(struct.pack(">I", 1024 + 11 * 1024))
            name, body = await answer(driver)
            assert (name, body.request_id) == ("ERROR", NO_REQUEST)
            await driver.lost()
            await _server_lives(server)

    run(scene())


def test_an_unknown_producer_ends_the_connection(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            driver.send("SEND", build_message(b"x"), producer_id=9, sequence_id=0)
            await driver.lost()
            await _server_lives(server)

    run(scene())


@pytest.mark.parametrize("first", ["LOOKUP", "PRODUCER", "PING", "SEND", "huge", "twice"])
def test_what_comes_before_or_instead_of_the_handshake_ends_the_connection(
    tmp_path: Path, first: str
) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server, handshake=first == "twice")
            driver.send_bytes(_opening(first))
            name, body = await answer(driver)
            assert (name, body.request_id) == ("ERROR", NO_REQUEST)
            await driver.lost()
            await _server_lives(server)

    run(scene())


def _opening(first: str) -> bytes:
    if first == "huge":
        return struct.pack(">I", 2**31 - 1) + b"x" * 4096
    if first == "twice":
        return command("CONNECT", client_version="x")
    if first == "SEND":
        base = base_command("SEND", producer_id=0, sequence_id=0)
        return b"".join(encode_with_payload(base, build_message(b"x")))
    fields: dict[str, Any] = {
        "LOOKUP": {"topic": "x", "request_id": 1},
        "PRODUCER": {"topic": "x", "request_id": 1, "producer_id": 1},
        "PING": {},
    }
    return command(first, **fields[first])


def test_an_unknown_command_is_answered_and_the_next_one_too(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            body = b"\x08\x7f"  # type 127
            driver.send_bytes(struct.pack(">II", 4 + len(body), len(body)) + body)
            name, error = await answer(driver)
            assert (name, error.error) == ("ERROR", WireCode.NOT_ALLOWED)
            assert error.request_id == NO_REQUEST
            await still_answers(driver)
            await driver.close()

    run(scene())


# --- what is no error


def test_what_nobody_waits_for_is_ignored_for_an_unknown_consumer(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            driver.send("FLOW", consumer_id=9, messagePermits=1)
            driver.send("ACK", consumer_id=9, ack_type=0, message_id=[SOME_ID])
            driver.send("REDELIVER_UNACKNOWLEDGED_MESSAGES", consumer_id=9)
            await still_answers(driver)
            await driver.request("CLOSE_CONSUMER", consumer_id=9)
            await driver.request("CLOSE_PRODUCER", producer_id=9)
            await driver.close()

    run(scene())


def test_a_topic_without_storage_has_no_other_place_to_go_to(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await transient_consumer(server, driver)
            await driver.request("SEEK", consumer_id=1, message_publish_time=1)
            await driver.request("SEEK", consumer_id=1, message_id=SOME_ID)
            await still_answers(driver)
            await driver.close()

    run(scene())


def test_an_empty_topic_has_no_last_message(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await lone_consumer(server, driver)
            found = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=1)
            last = found.last_message_id
            assert (last.ledgerId, last.entryId, last.batch_index) == (NO_REQUEST, NO_REQUEST, -1)
            await driver.close()

    run(scene())


def test_a_refused_reader_leaves_no_subscription_behind(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            for topic in ("topic", "non-persistent://public/default/n"):
                refused = subscribe(WireCode.CONSUMER_ASSIGN, sticky_consumer).fields
                asked = refused | {"topic": topic, "durable": False, "subType": 3}
                await driver.request("SUBSCRIBE", **(asked | {"subscription": "kept"}))
                asked["keySharedMeta"] = sticky((0, 10))
                await driver.request("SUBSCRIBE", **(asked | {"consumer_id": 2}))
                driver.send("SUBSCRIBE", **(asked | {"consumer_id": 3, "request_id": REQUEST}))
                _, body = await answer(driver)
                assert body.error == WireCode.CONSUMER_ASSIGN
                await driver.request("CLOSE_CONSUMER", consumer_id=2)
                held = await server.topics.get(TopicName.parse(topic))
                assert set(held.subscriptions) == {"kept"}
                await driver.request("CLOSE_CONSUMER", consumer_id=1)
            await driver.close()

    run(scene())


# --- parts


async def answer(driver: Driver) -> tuple[str, Any]:
    """The next thing that comes, whatever it is."""
    push = await driver.pushes.get()
    assert isinstance(push, Received | ReceivedEntries), push
    return NAMES[push.type], push.body


async def still_answers(driver: Driver) -> None:
    """The connection is open, and nothing more was said before."""
    driver.send("PING")
    name, _ = await answer(driver)
    assert name == "PONG"


async def _server_lives(server: Server) -> None:
    other = await connected(server)
    await still_answers(other)
    await other.close()


def code_of(body: Any) -> int:
    field = "error" if "error" in body.DESCRIPTOR.fields_by_name else "error_code"
    assert body.HasField(field)
    return int(getattr(body, field))


def text_of(body: Any) -> str:
    fields = body.DESCRIPTOR.fields_by_name
    return str(body.message if "message" in fields else body.error_message)
