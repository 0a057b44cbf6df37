"""Brokers, clusters, tenants, namespaces, policies, lookups, and what is unknown."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from magnetar.runtime.disk import LocalDisk
from magnetar.server.app import Server
from magnetar.txn.coordinator_partitions import CoordinatorAssignment
from tests.unit.server.admin.world import FULL, TOPIC, World, run


def test_brokers(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for path in ("/live", "/health", "/ready", "brokers/health", "brokers/ready"):
            answer = await world.ask("GET", path)
            assert (answer.status, answer.data) == (200, b"ok")
        assert (await world.ask("GET", "brokers/version")).status == 200
        assert world.server.admin_url is not None
        broker = world.server.admin_url.removeprefix("http://")
        assert await world.get("brokers/here") == [broker]
        assert await world.get("brokers") == [broker]
        leader = await world.get("brokers/leaderBroker")
        assert leader == {"brokerId": broker, "serviceUrl": world.server.admin_url}
        await world.refuse(404, "GET", "brokers/elsewhere")

    run(tmp_path, scenario)


def test_a_server_that_stops_is_alive_and_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Server, "stopping", True)
            for path in ("/health", "/ready", "brokers/health", "brokers/ready"):
                await world.refuse(503, "GET", path)
            assert (await world.ask("GET", "/live")).status == 200

    run(tmp_path, scenario)


def test_clusters(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.get("clusters") == ["here"]
        own = await world.get("clusters/here")
        assert own["brokerServiceUrl"] == world.server.service_url
        assert own.keys() == {
            *("serviceUrl", "serviceUrlTls", "brokerServiceUrl", "brokerServiceUrlTls")
        }
        await world.change("PUT", "clusters/there", {"serviceUrl": "http://a", "x": None})
        await world.refuse(409, "PUT", "clusters/there", {})
        await world.change("POST", "clusters/there", {"serviceUrl": "http://b"})
        assert (await world.get("clusters/there"))["serviceUrl"] == "http://b"
        await world.refuse(404, "POST", "clusters/nowhere", {})
        await world.refuse(404, "GET", "clusters/nowhere")
        await world.change("DELETE", "clusters/there")
        await world.refuse(404, "DELETE", "clusters/there")
        await world.refuse(412, "DELETE", "clusters/here")
        await world.refuse(412, "PUT", "clusters/a%2Fb", {})

    run(tmp_path, scenario)


def test_tenants(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.get("tenants") == ["public", "pulsar"]
        body = {"adminRoles": None, "allowedClusters": ["here"]}
        await world.change("PUT", "tenants/acme", body)
        assert await world.get("tenants/acme") == {"adminRoles": [], "allowedClusters": ["here"]}
        await world.refuse(409, "PUT", "tenants/acme", body)
        await world.change("POST", "tenants/acme", {**body, "adminRoles": ["me"]})
        assert (await world.get("tenants/acme"))["adminRoles"] == ["me"]
        await world.refuse(404, "POST", "tenants/nobody", body)
        await world.refuse(404, "GET", "tenants/nobody")
        await world.refuse(412, "PUT", "tenants/other", {"allowedClusters": ["nowhere"]})
        await world.refuse(412, "PUT", "tenants/other", {"allowedClusters": []})
        await world.refuse(412, "PUT", "tenants/other")
        await world.refuse(412, "PUT", "tenants/oth%20er", body)
        await world.change("PUT", "namespaces/acme/n")
        assert "namespaces" in await world.refuse(409, "DELETE", "tenants/acme")
        await world.change("DELETE", "namespaces/acme/n")
        await world.change("DELETE", "tenants/acme")
        await world.refuse(404, "DELETE", "tenants/acme")

    run(tmp_path, scenario)


def test_namespaces(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert await world.get("namespaces/public") == ["public/default"]
        await world.refuse(404, "GET", "namespaces/nobody")
        await world.change("PUT", "namespaces/public/n", {"bundles": {"numBundles": 4}})
        await world.refuse(409, "PUT", "namespaces/public/n")
        await world.refuse(404, "PUT", "namespaces/nobody/n")
        await world.refuse(412, "PUT", "namespaces/public/a%20b")
        await world.refuse(412, "PUT", "namespaces/public/m", {"replication_clusters": ["x"]})
        policies = await world.get("namespaces/public/n")
        assert policies["replication_clusters"] == ["here"]
        assert policies["auth_policies"]["namespace_auth"] == {}
        assert policies["bundles"]["numBundles"] == 1
        assert "retention_policies" not in policies
        await world.refuse(404, "GET", "namespaces/public/none")
        await world.change("PUT", "persistent/public/n/t")
        await world.refuse(409, "DELETE", "namespaces/public/n")
        await world.change("DELETE", "namespaces/public/n", force="true")
        await world.refuse(404, "DELETE", "namespaces/public/n", force="true")
        await world.refuse(412, "DELETE", "namespaces/public/default", force="perhaps")

    run(tmp_path, scenario)


def test_topics_of_a_namespace(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.change("PUT", "persistent/public/default/p/partitions", 2)
        await world.change("PUT", "non-persistent/public/default/n")
        parts = [f"persistent://public/default/p-partition-{number}" for number in range(2)]
        kept, passing = [*parts, FULL], ["non-persistent://public/default/n"]
        path = "namespaces/public/default/topics"
        assert await world.get(path) == kept
        assert await world.get(path, mode="NON_PERSISTENT") == passing
        assert await world.get(path, mode="ALL") == [*passing, *kept]
        await world.refuse(412, "GET", path, mode="SOME")
        await world.refuse(404, "GET", "namespaces/public/none/topics")

    run(tmp_path, scenario)


def test_policies_reach_topics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 1)
        assert (await world.get(f"{TOPIC}/stats"))["deduplicationStatus"] == "Disabled"
        await world.change("POST", "namespaces/public/default/deduplication", True)
        assert (await world.get(f"{TOPIC}/stats"))["deduplicationStatus"] == "Enabled"
        await world.change("POST", f"{TOPIC}/deduplicationEnabled", False)
        assert (await world.get(f"{TOPIC}/stats"))["deduplicationStatus"] == "Disabled"
        off = {"allowAutoTopicCreation": False, "topicType": "non-partitioned"}
        await world.change("POST", "namespaces/public/default/autoTopicCreation", off)
        path = "persistent/public/default/new/partitions"
        await world.refuse(404, "GET", path, checkAllowAutoCreation="true")
        two = {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 2,
        }
        await world.change("POST", "namespaces/public/default/autoTopicCreation", two)
        await world.refuse(404, "GET", path)
        assert await world.get(path, checkAllowAutoCreation="true") == {"partitions": 2}

    run(tmp_path, scenario)


def test_coordinators_are_found_over_http(tmp_path: Path) -> None:
    """A client with an http:// address counts coordinators and looks each up, nothing is stored."""

    async def scenario(world: World) -> None:
        assign = "persistent/pulsar/system/transaction_coordinator_assign"
        for query in ({}, {"checkAllowAutoCreation": "true"}):
            assert await world.get(f"{assign}/partitions", **query) == {"partitions": 16}
        found = await world.get(f"/lookup/v2/topic/{assign}-partition-3")
        assert found["brokerUrl"] == world.server.service_url
        # A leader at another broker is named, as the binary lookup names it.
        leaders = world.server.coordinators.partitions
        elsewhere = [CoordinatorAssignment(each, "pulsar://other:6650") for each in range(16)]
        with patch.object(leaders, "assignments", lambda: elsewhere):
            found = await world.get(f"/lookup/v2/topic/{assign}-partition-3")
            assert found["brokerUrl"] == "pulsar://other:6650"
        nobody = [CoordinatorAssignment(each, None) for each in range(16)]
        with patch.object(leaders, "assignments", lambda: nobody):
            await world.refuse(503, "GET", f"/lookup/v2/topic/{assign}-partition-3")
        assert await world.get("persistent/pulsar/system") == []

    run(tmp_path, scenario)


def test_lookup(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        found = await world.get(f"/lookup/v2/topic/{TOPIC}")
        assert found == {
            "brokerUrl": world.server.service_url,
            "brokerUrlTls": "",
            "httpUrl": world.server.admin_url,
            "httpUrlTls": "",
            "nativeUrl": world.server.service_url,
            "brokerUrlSsl": "",
        }
        bundle = await world.ask("GET", f"/lookup/v2/topic/{TOPIC}/bundle")
        assert bundle.data == b"0x00000000_0xffffffff"
        for path in ("topic/public/default/t", "segment/public/default/t%2F0000-ffff-0"):
            assert await world.get(f"/lookup/v2/topic/{path}") == found
        await world.refuse(412, "GET", "/lookup/v2/topic/segment/public/default/t")
        await world.refuse(404, "GET", "/lookup/v2/topic/persistent/public/none/t")
        await world.refuse(412, "GET", "/lookup/v2/topic/eternal/public/default/t")
        await world.refuse(412, "GET", "/lookup/v2/topic/persistent/pub%20lic/default/t")

    run(tmp_path, scenario)


def test_unknown_and_unbuilt_say_why(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.refuse(404, "GET", "/")
        await world.refuse(404, "GET", "nothing/here")
        await world.refuse(404, "GET", f"{TOPIC}/nothing")
        await world.refuse(405, "DELETE", "brokers/health")
        unbuilt = (
            f"{TOPIC}/shadowTopics",
            "namespaces/public/default/permissions",
            "namespaces/public/default/permissions/me",
            "functions/public/default",
            "segments/public/default/t/0000-ffff-0",
            "/admin/v3/sinks/public/default",
        )
        for path in unbuilt:
            assert "not supported" in await world.refuse(501, "GET", path)
            await world.refuse(501, "PUT", path, {})

    run(tmp_path, scenario)


def test_the_retention_in_force_is_told_with_who_set_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        namespace, regular = "/admin/v2/namespaces/public/default", TOPIC
        scalable = "/admin/v2/scalable/public/default/orders"
        await world.change("PUT", regular)
        await world.change("PUT", scalable)
        budget = LocalDisk().space(tmp_path).total // 10
        week = {"seconds": 7 * 24 * 3600.0, "sizeBytes": budget, "from": "broker"}
        nothing = {"seconds": 0, "sizeBytes": 0, "from": "broker"}
        assert (await world.get(f"{regular}/stats"))["retention"] == nothing
        assert (await world.get(f"{scalable}/stats"))["retention"] == week
        assert (await world.get(namespace))["retentionInForce"] == {
            "persistent": nothing,
            "topic": week,
        }
        value = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}
        await world.change("POST", f"{namespace}/retention", value)
        ten = {"seconds": 600.0, "sizeBytes": None, "from": "namespace"}
        assert (await world.get(f"{regular}/stats"))["retention"] == ten
        assert (await world.get(f"{scalable}/stats"))["retention"] == ten
        value = {"retentionTimeInMinutes": -1, "retentionSizeInMB": 1}
        await world.change("POST", f"{regular}/retention", value)
        own = {"seconds": None, "sizeBytes": 1024 * 1024, "from": "topic"}
        assert (await world.get(f"{regular}/stats"))["retention"] == own

    run(tmp_path, scenario)
