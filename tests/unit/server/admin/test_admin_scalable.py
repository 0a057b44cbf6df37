"""Scalable topics over HTTP: shapes of Java's tools, statuses, subscriptions, policies, metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import MagnetarError
from magnetar.model.names import TopicName
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.admin.world import World, run

BASE = "scalable/public/default"
X = f"{BASE}/x"
NAME = "topic://public/default/x"
SEGMENT = "segment://public/default/x/0000-ffff-0"


async def active(world: World, path: str = X) -> dict[int, tuple[int, int]]:
    segments = (await world.get(path))["segments"].values()
    return {
        each["segmentId"]: (each["hashRange"]["start"], each["hashRange"]["end"])
        for each in segments
        if each["state"] == "ACTIVE"
    }


# --- topics


def test_unloading_a_scalable_topic_one_segment_and_a_namespace(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X, numInitialSegments="2")
        await world.change("PUT", "persistent/public/default/regular")
        halves = [f"segment://public/default/x/{each}" for each in ("0000-7fff-0", "8000-ffff-1")]
        names = [TopicName.parse(each) for each in (*halves, "regular")]
        topics = world.server.topics

        async def unloaded(path: str) -> list[bool]:
            """Which of the three are closed by it, whoever loads them again."""
            before = [await topics.get(name, create=False) for name in names]
            await world.change("PUT", path)
            pairs = zip(names, before, strict=True)
            return [topics.loaded.get(name) is not topic for name, topic in pairs]

        assert await unloaded(f"{X}/unload") == [True, True, False]
        assert await unloaded(f"{X}/unload/1") == [False, True, False]
        assert await unloaded("namespaces/public/default/unload") == [True, True, True]
        await world.refuse(404, "PUT", f"{X}/unload/7")
        await world.refuse(412, "PUT", f"{X}/unload/first")
        await world.refuse(404, "PUT", f"{BASE}/none/unload")
        await world.refuse(404, "PUT", "namespaces/public/none/unload")

    run(tmp_path, scenario)


def test_a_subscription_that_reads_what_is_not_committed(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        path, key = f"{X}/subscriptions", "magnetar.read.isolation"
        await world.change("PUT", f"{path}/dirty", {key: "read_uncommitted"})
        await world.change("PUT", f"{path}/clean")
        await world.refuse(412, "PUT", f"{path}/other", {key: "dirty"})
        for name, isolation in (("dirty", "read_uncommitted"), ("clean", "read_committed")):
            assert (await world.get(f"{path}/{name}"))["readIsolation"] == isolation
            stats = await world.get(f"{X}/stats")
            assert stats["subscriptions"][name]["readIsolation"] == isolation

    run(tmp_path, scenario)


def test_topics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.get(BASE) == []
        await world.change("PUT", X, {"team": "a", "tier": "1"}, numInitialSegments="2")
        await world.refuse(409, "PUT", X)
        await world.change("PUT", f"{BASE}/a%2Fb", {"team": "a"})
        await world.change("PUT", f"{BASE}/plain")
        names = ["topic://public/default/a/b", "topic://public/default/plain", NAME]
        assert await world.get(BASE) == names
        assert await world.get(f"{BASE}/") == names
        assert await world.get(BASE, property="team=a") == [names[0], NAME]
        assert await world.get(f"{BASE}?property=team=a&property=tier=1") == [NAME]
        await world.refuse(412, "GET", BASE, property="team")
        await world.refuse(404, "GET", "scalable/public/none")
        await world.refuse(404, "PUT", "scalable/public/none/x")
        await world.refuse(412, "PUT", f"{BASE}/y", numInitialSegments="0")
        await world.refuse(412, "PUT", f"{BASE}/y", numInitialSegments="few")
        await world.refuse(412, "PUT", f"{BASE}/%20y")
        await world.change("DELETE", f"{BASE}/a%2Fb")
        await world.refuse(404, "DELETE", f"{BASE}/a%2Fb")
        await world.refuse(404, "GET", f"{BASE}/a%2Fb")
        await world.change("PUT", "persistent/public/default/regular")
        await world.refuse(409, "PUT", f"{BASE}/regular")

    run(tmp_path, scenario)


def test_the_record_is_javas(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X, {"k": "v"})
        await world.change("POST", f"{X}/split/0")
        record = await world.get(X)
        assert record.keys() == {
            *("epoch", "nextSegmentId", "segments", "properties", "autoScalePolicy")
        }
        assert (record["epoch"], record["nextSegmentId"]) == (1, 3)
        assert record["properties"] == {"k": "v"}
        sealed, child = record["segments"]["0"], record["segments"]["1"]
        assert sealed.pop("createdAtMs") <= sealed.pop("sealedAtMs") == child.pop("createdAtMs")
        assert sealed == {
            "segmentId": 0,
            "hashRange": {"start": 0, "end": 65535},
            "state": "SEALED",
            "parentIds": [],
            "childIds": [1, 2],
            "createdAtEpoch": 0,
            "sealedAtEpoch": 1,
            "legacyTopicName": None,
            "entryBucketSplits": [16384, 32768, 49152],
        }
        assert child == {
            "segmentId": 1,
            "hashRange": {"start": 0, "end": 32767},
            "state": "ACTIVE",
            "parentIds": [0],
            "childIds": [],
            "createdAtEpoch": 1,
            "sealedAtEpoch": -1,
            "sealedAtMs": -1,
            "legacyTopicName": None,
            "entryBucketSplits": [32768],
        }

    run(tmp_path, scenario)


def test_a_topic_that_is_used_is_deleted_by_force_only(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        async with world.link() as link:
            await link.request("PRODUCER", topic=SEGMENT, producer_id=1)
            await world.refuse(409, "DELETE", X)
            await world.change("DELETE", X, force="true")
        await world.refuse(404, "GET", X)

    run(tmp_path, scenario)


# --- layouts


def test_splits_and_merges(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("POST", f"{X}/split/0", at="0x4000")
        assert await active(world) == {1: (0, 0x3FFF), 2: (0x4000, 0xFFFF)}
        await world.change("POST", f"{X}/split/2", at="32768")
        await world.change("POST", f"{X}/split/1")
        assert await active(world) == {
            3: (0x4000, 0x7FFF),
            4: (0x8000, 0xFFFF),
            5: (0, 0x1FFF),
            6: (0x2000, 0x3FFF),
        }
        await world.change("POST", f"{X}/merge/6/3/4")
        assert await active(world) == {5: (0, 0x1FFF), 7: (0x2000, 0xFFFF)}
        await world.change("POST", f"{X}/merge/5/7")
        assert await active(world) == {8: (0, 0xFFFF)}

    run(tmp_path, scenario)


def test_a_split_that_waits_for_a_transaction_says_so(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        async with world.link() as link:
            segment = f"segment://public/default/{X.rsplit('/', 1)[1]}/0000-ffff-0"
            await link.request("PRODUCER", topic=segment, producer_id=1)
            begun = await link.request("NEW_TXN", tc_id=0, txn_ttl_millis=60_000, scalable=True)
            splitting = asyncio.create_task(world.change("POST", f"{X}/split/0"))
            while True:
                change = (await world.get(f"{X}/stats"))["change"]
                if change is not None and "waitsAtMostMs" in change:
                    break
            ids = (begun.txnid_most_bits, begun.txnid_least_bits)
            assert change["waitsForTransaction"] == f"({ids[0]},{ids[1]})"
            assert 0 < change["waitsAtMostMs"] <= 5000
            await link.request("END_TXN", txnid_most_bits=ids[0], txnid_least_bits=ids[1],
                               txn_action=1, scalable=True)  # fmt: skip
            await splitting

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("status", "path", "query"),
    [
        (404, "split/9", {}),
        (404, "merge/0/9", {}),
        (412, "split/one", {}),
        (412, "split/0", {"at": "8000h"}),
        (412, "split/0", {"at": "0"}),
        (412, "split/0", {"at": "65536"}),
        (412, "split/0", {"at": "0xffff", "byLoad": "true"}),
        (412, "split/0", {"byLoad": "perhaps"}),
        (412, "split/1", {"at": "0x1000"}),
        (412, "merge/0", {}),
        (412, "merge/0/0", {}),
        (412, "merge/0/2", {}),
        (412, "merge/a/b", {}),
    ],
)
def test_a_change_that_is_refused_changes_nothing(
    tmp_path: Path, status: int, path: str, query: dict[str, str]
) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X, numInitialSegments="3")
        before = await world.get(X)
        await world.refuse(status, "POST", f"{X}/{path}", **query)
        assert await world.get(X) == before

    run(tmp_path, scenario)


def test_a_sealed_segment_cannot_be_split(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("POST", f"{X}/split/0")
        assert "sealed" in await world.refuse(412, "POST", f"{X}/split/0")
        for path in ("split/0", "merge/0/1"):
            await world.refuse(404, "POST", f"{BASE}/none/{path}")

    run(tmp_path, scenario)


def test_a_sealed_segment_is_deleted_and_no_other(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("PUT", f"{X}/subscriptions/s", type="QUEUE")
        await world.produce(SEGMENT, 3)
        await world.change("POST", f"{X}/split/0")
        await world.change("POST", f"{X}/split/1")
        before = await world.get(X)
        path = f"{X}/segment"
        assert "backlog of 3" in await world.refuse(409, "DELETE", f"{path}/0")
        for force in ("false", "true"):
            assert "active" in await world.refuse(412, "DELETE", f"{path}/2", force=force)
            assert "parent 0" in await world.refuse(412, "DELETE", f"{path}/1", force=force)
            await world.refuse(404, "DELETE", f"{path}/9", force=force)
        await world.refuse(412, "DELETE", f"{path}/first")
        await world.refuse(404, "DELETE", f"{BASE}/none/segment/0")
        await world.refuse(405, "GET", f"{path}/0")
        assert await world.get(X) == before
        await world.change("DELETE", f"{path}/0", force="true")
        await world.change("DELETE", f"{path}/1")
        await world.refuse(404, "DELETE", f"{path}/1")
        assert sorted(await active(world)) == [2, 3, 4]
        assert len((await world.get(X))["segments"]) == 3
        assert (await world.get(f"{X}/stats"))["prunedSegments"] == 2

    run(tmp_path, scenario)


def test_migration(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.refuse(404, "POST", f"{X}/migrate")
        await world.change("PUT", "persistent/public/default/x/partitions", 2)
        name = "persistent://public/default/x-partition-0"
        async with world.link() as link:
            await world.subscribe(link, name, "s", 1)
            await world.refuse(409, "POST", f"{X}/migrate")
            await world.change("POST", f"{X}/migrate", force="true")
        record = await world.get(X)
        assert record["segments"]["0"]["legacyTopicName"] == name
        assert [each["state"] for each in record["segments"].values()] == (
            ["SEALED"] * 2 + ["ACTIVE"] * 2
        )
        await world.refuse(409, "POST", f"{X}/migrate")
        assert "s" in (await world.get(f"{X}/subscriptions"))["subscriptions"]

    run(tmp_path, scenario)


# --- lost consumers and sealed segments


def test_a_lifecycle_policy_of_a_topic_goes_before_its_namespaces(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        path, namespace = f"{X}/lifecyclePolicy", "namespaces/public/default"
        broker = {"gracePeriodSeconds": 60.0, "sealedSeconds": 3600.0}
        await world.change("GET", path)
        assert await world.get(path, applied="true") == broker
        given = {"gracePeriodSeconds": 5, "sealedSeconds": 6}
        await world.change("POST", f"{namespace}/scalableTopicLifecyclePolicy", given)
        await world.change("POST", path, {"sealedSeconds": 7.5})
        assert await world.get(path) == {"sealedSeconds": 7.5}
        held = {"gracePeriodSeconds": 5.0, "sealedSeconds": 7.5}
        assert await world.get(path, applied="true") == held
        assert (await world.get(f"{X}/stats"))["lifecyclePolicy"] == held
        for wrong in ({"sealedSeconds": -1}, {"sealed": 1}, [1], None, b"{", b"[" * 100_000):
            await world.refuse(412, "POST", path, wrong)
        assert await world.get(path) == {"sealedSeconds": 7.5}
        for _ in range(2):
            await world.change("DELETE", path)
        assert await world.get(path, applied="true") == given
        for method in ("GET", "POST", "DELETE"):
            await world.refuse(404, method, f"{BASE}/none/lifecyclePolicy", {})

    run(tmp_path, scenario)


# --- backlog quotas


def test_a_quota_counts_the_backlog_of_all_segments(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("PUT", f"{X}/subscriptions/s", type="QUEUE")
        await world.produce(SEGMENT, 3)
        await world.change("POST", f"{X}/split/0")
        stats = await world.get(f"{X}/stats")
        assert (stats["backlogQuotaLimitSize"], stats["backlogSize"]) == (-1, -1)
        lower = "segment://public/default/x/0000-7fff-1"
        quota = {"limit": 1, "policy": "producer_exception"}
        await world.change("POST", "namespaces/public/default/backlogQuota", quota)
        # The child has no backlog of its own.
        async with world.link() as link:
            with pytest.raises(MagnetarError) as raised:
                await link.request("PRODUCER", topic=lower, producer_id=1)
        assert "backlog" in str(raised.value)
        stats = await world.get(f"{X}/stats")
        assert stats["backlogQuotaLimitSize"] == 1
        assert stats["backlogSize"] > 1
        assert stats["oldestBacklogMessageAgeSeconds"] == -1
        # Through the other endpoint the oldest go.
        quota = {"limitTime": 60, "policy": "consumer_backlog_eviction"}
        path = "namespaces/public/default/backlogQuota"
        await world.change("DELETE", path)
        await world.change("POST", path, quota, backlogQuotaType="message_age")
        await world.change("GET", "brokers/backlog-quota-check")
        assert (await world.get(f"{X}/subscriptions/s"))["msgBacklog"] == 0
        await world.produce(lower, 1)

    run(tmp_path, scenario)


# --- subscriptions


def test_subscriptions(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        path = f"{X}/subscriptions"
        await world.change("PUT", f"{path}/q", type="QUEUE")
        await world.change("PUT", f"{path}/q", type="QUEUE")
        await world.change("PUT", f"{path}/s%2Ft", type="STREAM")
        await world.refuse(412, "PUT", f"{path}/z", type="PILE")
        await world.produce(SEGMENT, 3)
        await world.change("POST", f"{X}/split/0")
        async with world.link() as link:
            given = {"topic": NAME, "subscription": "s/t", "consumer_name": "c"}
            kind = {"consumer_id": 1, "consumer_type": pb.STREAM}
            await link.request("SCALABLE_TOPIC_SUBSCRIBE", **given, **kind)
            found = await world.get(f"{path}/s%2Ft")
            assert (found["type"], found["established"]) == ("STREAM", True)
            assert [(each["name"], each["connected"]) for each in found["members"]] == [("c", True)]
            assert found["owners"] == {"0": ["c"]}
            assert found["backlog"] == {"0": 3, "1": 0, "2": 0}
            assert found["msgBacklog"] == 3
            stats = await world.get(f"{X}/stats")
            assert stats["subscriptions"]["s/t"]["consumerCount"] == 1
        all_found = await world.get(path)
        assert all_found["subscriptions"].keys() == {"q", "s/t"}
        assert all_found["checkpointGroups"] == {}
        assert all_found["subscriptions"]["q"]["members"] == []
        await world.change("POST", f"{path}/q/skip-all")
        assert (await world.get(f"{path}/q"))["msgBacklog"] == 0
        await world.change("POST", f"{path}/q/seek", timestamp="0")
        assert (await world.get(f"{path}/q"))["msgBacklog"] == 3
        await world.refuse(412, "POST", f"{path}/q/seek")
        await world.change("DELETE", f"{path}/q")
        for method, rest in (
            *(("GET", "q"), ("DELETE", "q"), ("POST", "q/skip-all")),
            ("POST", "q/seek?timestamp=5"),
        ):
            await world.refuse(404, method, f"{path}/{rest}")
        for method, rest in (("GET", ""), ("GET", "/q"), ("PUT", "/q"), ("DELETE", "/q")):
            await world.refuse(404, method, f"{BASE}/none/subscriptions{rest}")

    run(tmp_path, scenario)


# --- statistics, policies, metrics


def test_statistics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("PUT", f"{X}/subscriptions/q")
        await world.produce(SEGMENT, 2)
        await world.change("POST", f"{X}/split/0")
        found = await world.get(f"{X}/stats")
        assert (found["epoch"], found["totalSegments"]) == (1, 3)
        assert (found["activeSegments"], found["sealedSegments"]) == (2, 1)
        assert found["prunedSegments"] == 0
        assert found["change"] is None
        assert found["segments"]["0"]["name"] == SEGMENT
        assert [each["state"] for each in found["segments"].values()] == [
            *("SEALED", "ACTIVE", "ACTIVE")
        ]
        assert found["subscriptions"]["q"] == {
            "consumerCount": 0,
            "type": "QUEUE",
            "msgBacklog": 2,
            "readIsolation": "read_committed",
        }
        assert found["autoScalePolicy"]["enabled"] is True
        await world.refuse(404, "GET", f"{BASE}/none/stats")

    run(tmp_path, scenario)


def test_auto_scale_policies(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        path = f"{X}/autoScalePolicy"
        await world.change("GET", path)
        value: dict[str, Any] = {"enabled": False, "maxSegments": 4}
        await world.change("POST", path, {**value, "minSegments": None})
        assert await world.get(path) == value
        assert (await world.get(X))["autoScalePolicy"] == value
        for wrong in ({"maxSegments": 0}, {"maxSegments": "x"}, {"limit": 3}, None):
            await world.refuse(412, "POST", path, wrong)
        both = {"minSegments": 5, "maxSegments": 4}
        await world.refuse(412, "POST", path, both)
        namespace = "namespaces/public/default/scalableTopicAutoScalePolicy"
        await world.change("POST", namespace, {"maxSegments": 9, "splitCooldownSeconds": 7})
        applied = await world.get(path, applied="true")
        assert (applied["maxSegments"], applied["splitCooldownSeconds"]) == (4, 7)
        await world.change("DELETE", path)
        await world.change("GET", path)
        assert (await world.get(path, applied="true"))["maxSegments"] == 9
        for method in ("GET", "DELETE"):
            await world.refuse(404, method, f"{BASE}/none/autoScalePolicy")
        await world.refuse(404, "POST", f"{BASE}/none/autoScalePolicy", value)

    run(tmp_path, scenario)


def test_a_namespace_with_scalable_topics_is_deleted_by_force_only(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", "namespaces/public/n")
        await world.change("PUT", "scalable/public/n/x", numInitialSegments="2")
        await world.refuse(409, "DELETE", "namespaces/public/n")
        await world.change("DELETE", "namespaces/public/n", force="true")
        await world.refuse(404, "GET", "namespaces/public/n")
        await world.change("PUT", "namespaces/public/n")
        assert await world.get("scalable/public/n") == []

    run(tmp_path, scenario)


def test_metrics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", X)
        await world.change("PUT", f"{X}/subscriptions/q")
        await world.produce(SEGMENT, 2)
        await world.change("POST", f"{X}/split/0")
        text = (await world.ask("GET", "/metrics")).data.decode()
        labels = 'cluster="here",namespace="public/default",topic="topic://public/default/x"'
        assert f"pulsar_scalable_topic_active_segments{{{labels}}} 2" in text
        assert f"pulsar_scalable_topic_sealed_segments{{{labels}}} 1" in text
        assert f"pulsar_scalable_topic_pruned_segments{{{labels}}} 0" in text
        segment = f'{labels},segment="0",state="sealed"'
        assert f"pulsar_scalable_segment_msg_backlog{{{segment}}} 2" in text
        assert f"pulsar_scalable_segment_entry_buckets{{{segment}}} 4" in text
        for name in ("splits_total", "controllers", "watches", "updates_total"):
            assert f"# TYPE magnetar_scalable_{name}" in text

    run(tmp_path, scenario)
