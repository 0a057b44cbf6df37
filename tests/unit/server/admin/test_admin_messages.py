"""Messages by REST, what is stored of topics and subscriptions, and work on whole namespaces."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from magnetar.broker.topic.quota_rules import bytes_from
from magnetar.broker.topic.topic import Topic
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.server.admin.topics import analysis
from magnetar.server.admin.topics.messages import position_of
from magnetar.server.app import Server
from tests.unit.server.admin.world import FULL, PUBLISHED_MS, TOPIC, World, run

SUB = f"{TOPIC}/subscription/s"
PARTED = "persistent/public/default/p"
PASSING = "non-persistent/public/default/n"
SPANS = (LedgerSpan(3, 0, 1, 2, 20), LedgerSpan(5, 1, 2, 0, 0), LedgerSpan(7, 2, None, 3, 60))


def as_id(text: str, **more: Any) -> dict[str, Any]:
    ledger, entry = text.split(":")
    return {"ledgerId": int(ledger), "entryId": int(entry), **more}


# --- one entry


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, Position(3, 0)),
        (1, Position(3, 1)),
        (2, Position(7, 0)),
        (4, Position(7, 2)),
        (5, None),
        (-1, None),
    ],
)
def test_the_position_of_a_number(index: int, expected: Position | None) -> None:
    assert position_of(SPANS, index) == expected


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (Position(-1, -1), 80),
        (Position(3, 1), 70),
        (Position(4, 9), 60),
        (Position(7, 0), 60),
        (Position(7, 2), 20),
        (Position(7, 3), 0),
        (Position(9, 0), 0),
    ],
)
def test_bytes_behind_a_position(position: Position, expected: int) -> None:
    assert bytes_from(SPANS, position) == expected


def test_an_entry_is_found_by_its_number_and_time(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.refuse(412, "GET", f"{TOPIC}/examinemessage")
        ids = await world.produce(FULL, 4)
        for query, expected in (
            ({}, b"m3"),
            ({"messagePosition": "2"}, b"m2"),
            ({"messagePosition": "99"}, b"m0"),
            ({"initialPosition": "earliest"}, b"m0"),
            ({"initialPosition": "earliest", "messagePosition": "3"}, b"m2"),
            ({"initialPosition": "earliest", "messagePosition": "99"}, b"m3"),
        ):
            answer = await world.ask("GET", f"{TOPIC}/examinemessage", **query)
            assert (answer.status, answer.data) == (200, expected)
        await world.refuse(412, "GET", f"{TOPIC}/examinemessage", initialPosition="middle")
        await world.refuse(412, "GET", f"{TOPIC}/examinemessage", messagePosition="0")
        found = await world.get(f"{TOPIC}/messageid/{PUBLISHED_MS + 1500}")
        assert found == {**as_id(ids[2]), "partitionIndex": -1}
        behind = await world.get(f"{TOPIC}/messageid/{PUBLISHED_MS + 99_000}")
        assert behind["entryId"] == as_id(ids[3])["entryId"] + 1
        await world.refuse(412, "GET", f"{TOPIC}/messageid/noon")
        await world.refuse(412, "GET", f"{TOPIC}/getMessageIdByIndex", index="0")
        size = (await world.get(f"{TOPIC}/stats"))["storageSize"]
        answer = await world.ask("PUT", f"{TOPIC}/backlogSize", as_id(ids[0]))
        assert answer.body == size
        answer = await world.ask("PUT", f"{TOPIC}/backlogSize", as_id(ids[2]))
        assert answer.body == size // 2
        await world.refuse(412, "PUT", f"{TOPIC}/backlogSize", {"ledgerId": 1})

    run(tmp_path, scenario)


def test_what_needs_one_log_is_405_elsewhere(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 2)
        await world.change("PUT", f"{PARTED}/subscription/s")
        await world.change("PUT", PASSING)
        for path in (PARTED, PASSING):
            for method, rest, body in (
                ("GET", "examinemessage", None),
                ("GET", "messageid/1", None),
                ("GET", "internal-info", None),
                ("GET", "ledger/0/entry/0", None),
                ("PUT", "backlogSize", {"ledgerId": 1, "entryId": 1}),
                ("GET", "subscription/s/position/1", None),
                ("POST", "subscription/s/expireMessages", {"ledgerId": 1, "entryId": 1}),
                ("POST", "subscription/s/analyzeBacklog", None),
            ):
                await world.refuse(405, method, f"{path}/{rest}", body)
        for method, rest in (
            ("POST", "trim"),
            ("DELETE", "truncate"),
            ("GET", "properties"),
            ("POST", "subscription/s/skip_all"),
            ("POST", "all_subscription/expireMessages/1"),
        ):
            await world.refuse(405, method, f"{PASSING}/{rest}")
        await world.refuse(404, "GET", f"{TOPIC}/examinemessage")

    run(tmp_path, scenario)


# --- subscriptions


def test_expiry_up_to_a_message(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        await world.change("PUT", f"{TOPIC}/subscription/other")
        ids = await world.produce(FULL, 4)

        async def backlog(name: str = "s") -> int:
            stats = await world.get(f"{TOPIC}/stats")
            found: int = stats["subscriptions"][name]["msgBacklog"]
            return found

        path = f"{SUB}/expireMessages"
        await world.change("POST", path, as_id(ids[1], isExcluded=True))
        assert await backlog() == 3
        await world.change("POST", path, as_id(ids[1]))
        assert await backlog() == 2
        await world.change("POST", path, as_id(ids[0]))  # never back
        assert await backlog() == 2
        await world.refuse(412, "POST", path)
        await world.refuse(412, "POST", path, {"ledgerId": "x", "entryId": 0})
        await world.change("POST", path, {"ledgerId": 2**62, "entryId": 0})
        assert (await backlog(), await backlog("other")) == (0, 4)
        await world.change("POST", f"{TOPIC}/all_subscription/expireMessages/1")
        assert await backlog("other") == 0
        await world.refuse(412, "POST", f"{TOPIC}/all_subscription/expireMessages/0")

    run(tmp_path, scenario)


def test_the_analysis_of_a_backlog(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        path = f"{SUB}/analyzeBacklog"
        empty = (await world.ask("POST", path)).body
        assert (empty["entries"], empty["firstMessageId"]) == (0, None)
        ids = await world.produce(FULL, 5)
        await world.change("POST", f"{SUB}/skip/1")
        found = (await world.ask("POST", path)).body
        assert (found["entries"], found["messages"], found["markerMessages"]) == (4, 4, 0)
        assert found["aborted"] is False
        assert found["firstMessageId"] == {**as_id(ids[1]), "partitionIndex": -1}
        assert found["lastMessageId"] == {**as_id(ids[4]), "partitionIndex": -1}
        assert found["filterAcceptedEntries"] == 0
        from_there = (await world.ask("POST", path, as_id(ids[3]))).body
        assert from_there["entries"] == 2
        with (
            patch.object(analysis, "ENTRIES_MAX", 3),
            patch.object(analysis, "_ENTRIES_PER_TURN", 2),
        ):
            part = (await world.ask("POST", path)).body
            assert (part["entries"], part["aborted"]) == (3, True)
        await world.refuse(404, "POST", f"{TOPIC}/subscription/none/analyzeBacklog")

    run(tmp_path, scenario)


def test_properties_of_a_subscription(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 2)
        sub = f"{PARTED}/subscription/s"
        start = {"ledgerId": -1, "entryId": -1, "properties": {"a": "1"}}
        await world.change("PUT", sub, start)
        assert await world.get(f"{sub}/properties") == {"a": "1"}
        await world.change("PUT", f"{sub}/properties", {"b": "2"})
        for number in range(2):
            path = f"{PARTED}-partition-{number}/subscription/s"
            assert await world.get(f"{path}/properties") == {"b": "2"}
        await world.refuse(412, "PUT", f"{sub}/properties", {"b": 2})
        await world.refuse(412, "PUT", f"{sub}/properties", {"b": "x" * 70_000})
        await world.refuse(404, "GET", f"{PARTED}/subscription/none/properties")
        assert await world.get(f"{sub}/replicatedSubscriptionStatus") == {
            f"persistent://public/default/p-partition-{number}": False for number in range(2)
        }
        # They survive, and so do acknowledgements that were written meanwhile.
        await world.produce("persistent://public/default/p-partition-0", 2)
        path = f"{PARTED}-partition-0/subscription/s"
        await asyncio.gather(
            world.change("POST", f"{path}/skip/1"),
            world.change("PUT", f"{path}/properties", {"c": "3"}),
            world.change("PUT", f"{path}/properties", {"c": "3"}),
        )
        await world.change("PUT", f"{PARTED}/unload")
        assert await world.get(f"{path}/properties") == {"c": "3"}
        stats = await world.get(f"{PARTED}-partition-0/stats")
        assert stats["subscriptions"]["s"]["msgBacklog"] == 1

    run(tmp_path, scenario)


def test_the_isolation_of_a_subscription_stays(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        isolation = {"magnetar.read.isolation": "read_uncommitted"}
        start = {"ledgerId": -1, "entryId": -1, "properties": isolation}
        await world.change("PUT", SUB, start)
        await world.change("PUT", f"{SUB}/properties", {"a": "1"})
        assert await world.get(f"{SUB}/properties") == {"a": "1", **isolation}
        other = {"magnetar.read.isolation": "read_committed"}
        await world.refuse(412, "PUT", f"{SUB}/properties", other)

    run(tmp_path, scenario)


# --- what is stored


def test_ledgers_and_cursors_as_recorded(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        (first, second, third) = await world.produce(FULL, 3)
        await world.change("POST", f"{SUB}/skip/1")
        (topic,) = (each for each in world.server.topics.loaded.values() if isinstance(each, Topic))
        topic.subscriptions["s"].cursor.ack(Position(*as_id(third).values()))
        found = await world.get(f"{TOPIC}/internal-info")
        assert [each["entries"] for each in found["ledgers"]] == [3]
        cursor = found["cursors"]["s"]
        assert cursor["markDelete"] == as_id(first)
        (run,) = cursor["individualDeletedMessages"]
        assert (run["from"], run["to"]) == (as_id(second), as_id(third))
        await world.change("PUT", f"{PARTED}/partitions", 2)
        parts = await world.get(f"{PARTED}/partitioned-internalStats")
        assert parts["metadata"] == {"partitions": 2}
        assert len(parts["partitions"]) == 2
        await world.refuse(404, "GET", f"{TOPIC}/partitioned-internalStats")

    run(tmp_path, scenario)


def test_trim_keeps_what_truncate_drops(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", SUB)
        await world.produce(FULL, 3)
        await world.change("PUT", f"{TOPIC}/unload")  # which closes the ledger
        await world.produce(FULL, 1)
        await world.change("POST", f"{TOPIC}/trim")
        assert (await world.get(f"{TOPIC}/internalStats"))["numberOfEntries"] == 4
        await world.change("DELETE", f"{TOPIC}/truncate")
        assert (await world.get(f"{TOPIC}/internalStats"))["numberOfEntries"] <= 1
        assert (await world.get(f"{TOPIC}/stats"))["subscriptions"]["s"]["msgBacklog"] == 0
        await world.refuse(404, "POST", f"{TOPIC}none/trim")

    run(tmp_path, scenario)


def test_partitions_that_are_missing_are_made(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 3)
        await world.change("DELETE", f"{PARTED}-partition-1")
        assert len(await world.get("persistent/public/default")) == 2
        await world.change("POST", f"{PARTED}/createMissedPartitions")
        assert len(await world.get("persistent/public/default")) == 3
        await world.refuse(404, "POST", f"{TOPIC}/createMissedPartitions")

    run(tmp_path, scenario)


@pytest.mark.parametrize("path", [TOPIC, PARTED])
def test_properties_of_a_topic(tmp_path: Path, path: str) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC, {"a": "1"})
        body = {"partitions": 2, "properties": {"a": "1"}}
        await world.change("PUT", f"{PARTED}/partitions", body)
        where = f"{path}/properties"
        assert await world.get(where) == {"a": "1"}
        await world.change("PUT", where, {"b": "2"})
        await world.change("DELETE", where, key="a")
        assert await world.get(where) == {"b": "2"}
        await world.refuse(412, "DELETE", where)
        await world.refuse(412, "PUT", where, {"b": "x" * 70_000})
        await world.refuse(412, "PUT", where, ["b"])
        assert await world.get(where) == {"b": "2"}
        await world.refuse(404, "GET", "persistent/public/default/none/properties")
        await world.refuse(404, "PUT", "persistent/public/default/none/properties", {"b": "2"})

    run(tmp_path, scenario)


def test_all_policies_of_a_topic_are_removed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC, {"kept": "yes"})
        await world.change("POST", f"{TOPIC}/maxProducers", 3)
        await world.change("POST", f"{TOPIC}/backlogQuota", {"limit": 3})
        await world.change("DELETE", f"{TOPIC}/policies")
        await world.change("GET", f"{TOPIC}/maxProducers")
        assert await world.get(f"{TOPIC}/backlogQuotaMap") == {}
        assert await world.get(f"{TOPIC}/properties") == {"kept": "yes"}

    run(tmp_path, scenario)


# --- namespaces

NAMESPACE = "namespaces/public/default"
BUNDLE = f"{NAMESPACE}/0x00000000_0xffffffff"


def test_backlogs_of_a_namespace_are_cleared_and_subscriptions_removed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        names = [f"persistent://public/default/t{number}" for number in range(3)]
        for name in names:
            path = name.replace("://", "/")
            await world.change("PUT", path)
            await world.change("PUT", f"{path}/subscription/s")
            await world.change("PUT", f"{path}/subscription/other")
            await world.produce(name, 2)
        await world.change("PUT", f"{names[0].replace('://', '/')}/unload")

        async def backlogs() -> list[tuple[int, int]]:
            found = [await world.get(f"{name.replace('://', '/')}/stats") for name in names]
            both = [each["subscriptions"] for each in found]
            return [(each["s"]["msgBacklog"], each["other"]["msgBacklog"]) for each in both]

        await world.refuse(412, "POST", f"{NAMESPACE}/0x00000000_0x7fffffff/clearBacklog")
        assert await backlogs() == [(2, 2)] * 3
        await world.change("POST", f"{NAMESPACE}/clearBacklog/s")
        assert await backlogs() == [(0, 2)] * 3
        await world.change("POST", f"{BUNDLE}/clearBacklog")
        assert await backlogs() == [(0, 0)] * 3
        async with world.link() as link:
            await world.subscribe(link, names[1], "s", 1)
            await world.refuse(412, "POST", f"{NAMESPACE}/unsubscribe/s")
            await link.request("CLOSE_CONSUMER", consumer_id=1)
        await world.change("POST", f"{BUNDLE}/unsubscribe/s")
        for name in names:
            assert await world.get(f"{name.replace('://', '/')}/subscriptions") == ["other"]
        await world.change("POST", f"{NAMESPACE}/unsubscribe/other")
        await world.refuse(404, "POST", "namespaces/public/none/clearBacklog")
        assert (await world.get(f"{NAMESPACE}/bundles"))["numBundles"] == 1
        await world.change("PUT", f"{BUNDLE}/unload")
        assert not world.server.topics.loaded
        await world.refuse(412, "PUT", f"{BUNDLE}/split")

    run(tmp_path, scenario)


def test_properties_of_a_namespace(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        where, one = f"{NAMESPACE}/properties", f"{NAMESPACE}/property"
        assert await world.get(where) == {}
        await world.change("PUT", where, {"a": "1"})
        await world.change("PUT", f"{one}/b%2Fc/2%203")
        assert await world.get(where) == {"a": "1", "b/c": "2 3"}
        assert (await world.ask("GET", f"{one}/b%2Fc")).data == b"2 3"
        await world.change("GET", f"{one}/none")
        assert (await world.ask("DELETE", f"{one}/a")).data == b"1"
        await world.change("DELETE", f"{one}/a")
        await world.refuse(412, "PUT", where, {"b": "x" * 70_000})
        assert await world.get(where) == {"b/c": "2 3"}
        await world.change("DELETE", where)
        assert await world.get(where) == {}

    run(tmp_path, scenario)


def test_the_quota_of_a_bundle_is_kept_and_shown(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        default = await world.get("resource-quotas")
        assert default["msgRateIn"] == 40.0
        path = "resource-quotas/public/default/0x00000000_0xffffffff"
        assert await world.get(path) == default
        given = {**default, "memory": 7.0, "dynamic": False}
        await world.change("POST", path, given)
        await world.refuse(412, "POST", path, {**given, "memory": -1})
        await world.refuse(412, "POST", path, b"{")
        await world.refuse(412, "POST", path.replace("0xff", "0x7f"), given)
        assert await world.get(path) == given
        await world.change("DELETE", path)
        assert await world.get(path) == default
        await world.refuse(404, "GET", path.replace("public", "nobody"))

    run(tmp_path, scenario)


def test_namespaces_that_are_to_be_kept_apart(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", "namespaces/public/n")
        await world.change("POST", "namespaces/public/n/antiAffinity", "apart")
        path = "namespaces/here/antiAffinity/apart"
        assert await world.get(path, tenant="public") == ["public/n"]
        assert await world.get("namespaces/here/antiAffinity/none", tenant="public") == []
        await world.refuse(412, "GET", path)
        await world.refuse(404, "GET", path, tenant="nobody")

    run(tmp_path, scenario)


# --- the broker


def test_settings_that_change_while_the_broker_runs(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        base = "brokers/configuration"
        names = await world.get(base)
        assert "ttlDurationDefaultInSeconds" in names
        assert await world.get(f"{base}/values") == {}
        assert (await world.get(f"{base}/runtime"))["ttlDurationDefaultInSeconds"] == "0"
        await world.produce(FULL, 1)
        (topic,) = world.server.topics.loaded.values()
        await world.change("POST", f"{base}/ttlDurationDefaultInSeconds/7")
        await world.change("POST", f"{base}/schemaCompatibilityStrategy/BACKWARD")
        await world.change("POST", f"{base}/delayedDeliveryEnabled/false")
        assert topic.policies.message_ttl_seconds == 7
        assert not topic.policies.delayed_delivery.active
        assert await world.get(f"{TOPIC}/messageTTL", applied="true") == 7
        for path in (
            "ttlDurationDefaultInSeconds/-1",
            "ttlDurationDefaultInSeconds/soon",
            "delayedDeliveryEnabled/perhaps",
            "schemaCompatibilityStrategy/UNDEFINED",
            "numIOThreads/3",
            "admin_port/3",
            "defaultRetentionTimeInMinutes/3",
        ):
            await world.refuse(412, "POST", f"{base}/{path}")
        await world.refuse(412, "DELETE", f"{base}/numIOThreads")
        await world.change("DELETE", f"{base}/schemaCompatibilityStrategy")
        changed = {"ttlDurationDefaultInSeconds": "7", "delayedDeliveryEnabled": "false"}
        assert await world.get(f"{base}/values") == changed
        await world.server.stop()
        again = Server(world.server.config)
        await again.start()
        assert again.namespaces.broker.message_ttl_in_seconds == 7
        await again.stop()

    run(tmp_path, scenario)


def test_statistics_of_all_topics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.get("broker-stats/topics") == {}
        await world.change("PUT", "namespaces/public/n")
        await world.produce(FULL, 1)
        await world.produce("persistent://public/n/x", 1)
        for number in range(45):
            await world.server.topics.get(_named(number))
        await world.change("PUT", "non-persistent/public/default/passing")
        answer = await world.ask("GET", "broker-stats/topics")
        found = json.loads(answer.data)
        whole = "0x00000000_0xffffffff"
        assert sorted(found) == ["public/default", "public/n"]
        assert len(found["public/default"][whole]["persistent"]) == 46
        assert found["public/default"][whole]["persistent"][FULL]["storageSize"] > 0
        assert list(found["public/default"][whole]["non-persistent"]) == [
            "non-persistent://public/default/passing"
        ]
        assert list(found["public/n"][whole]["persistent"]) == ["persistent://public/n/x"]
        assert (await world.get("broker-stats/load-report"))["numTopics"] == 48
        (broker,) = await world.get("brokers")
        owned = await world.get(f"brokers/here/{broker}/ownedNamespaces")
        assert sorted(owned) == [f"public/default/{whole}", f"public/n/{whole}"]
        assert owned[f"public/n/{whole}"]["broker_assignment"] == "shared"
        assert await world.get("brokers/here/other:1/ownedNamespaces") == {}
        assert set((await world.get("brokers/internal-configuration")).values()) == {""}
        assert await world.get("clusters/here/peers") == []
        assert await world.get("clusters/here/failureDomains") == {}

    run(tmp_path, scenario)


def _named(number: int) -> TopicName:
    return TopicName.parse(f"persistent://public/default/many{number}")
