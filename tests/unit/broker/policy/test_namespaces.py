"""Clusters, tenants, namespaces, and how policies are put together."""

from __future__ import annotations

import msgspec
import pytest

from magnetar.broker.policy.effective import effective
from magnetar.broker.policy.namespaces import DEFAULT, SYSTEM, Cluster, Namespaces, Tenant
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.values import (
    AutoSubscriptionCreation,
    AutoTopicCreation,
    InactiveTopicPolicies,
    RetentionPolicies,
)
from magnetar.errors import CorruptMetadata, NotAllowed, TopicNotFound
from magnetar.managed_ledger.ledger_list import Retention
from magnetar.metadata.api import MetadataStore
from magnetar.model.names import NamespaceName
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import World

LONG = "n" * 400


async def opened() -> tuple[MetadataStore, Namespaces]:
    metadata = World().parts().metadata
    namespaces = Namespaces(metadata, "standalone")
    await namespaces.open(Cluster(service_url="http://127.0.0.1:8080"))
    return metadata, namespaces


def test_defaults_exist() -> None:
    async def main() -> None:
        _, namespaces = await opened()
        await namespaces.open(Cluster(service_url="http://127.0.0.1:9090"))
        assert await namespaces.tenants.names() == ["public", "pulsar"]
        assert await namespaces.names("public") == [DEFAULT]
        assert await namespaces.exists(SYSTEM)
        assert await namespaces.clusters.names() == ["standalone"]
        cluster = await namespaces.clusters.get("standalone")
        assert cluster is not None
        assert cluster.service_url == "http://127.0.0.1:9090"
        assert (await namespaces.policies(DEFAULT)).replication_clusters == ["standalone"]

    run(main())


def test_namespaces_come_and_go_with_their_tenant() -> None:
    async def main() -> None:
        _, namespaces = await opened()
        orders = NamespaceName("shop", LONG)
        with pytest.raises(TopicNotFound):
            await namespaces.create(orders)
        assert await namespaces.tenants.create("shop", Tenant(["admin"], ["standalone"]))
        assert not await namespaces.tenants.create("shop", Tenant())
        assert await namespaces.create(orders)
        assert not await namespaces.create(orders)
        assert await namespaces.names("shop") == [orders]
        with pytest.raises(NotAllowed):
            await namespaces.delete_tenant("shop")
        assert await namespaces.delete(orders)
        assert not await namespaces.delete(orders)
        with pytest.raises(TopicNotFound):
            await namespaces.policies(orders)
        assert await namespaces.delete_tenant("shop")
        assert not await namespaces.delete_tenant("shop")
        with pytest.raises(TopicNotFound):
            await namespaces.names("shop")

    run(main())


def test_policies_are_changed_and_kept() -> None:
    async def main() -> None:
        _, namespaces = await opened()
        wanted = RetentionPolicies(10, 100)
        await namespaces.change(
            DEFAULT, lambda old: msgspec.structs.replace(old, retention_policies=wanted)
        )
        assert (await namespaces.policies(DEFAULT)).retention_policies == wanted
        with pytest.raises(TopicNotFound):
            await namespaces.change(NamespaceName("public", "none"), lambda old: old)

    run(main())


def test_the_json_shape() -> None:
    policies = Policies(
        retention_policies=RetentionPolicies(10, 100),
        deduplication_enabled=True,
        auto_topic_creation=AutoTopicCreation(True, "partitioned", 3),
    )
    shown = msgspec.json.decode(msgspec.json.encode(policies))
    assert shown["retention_policies"] == {
        "retentionTimeInMinutes": 10,
        "retentionSizeInMB": 100,
    }
    assert shown["deduplicationEnabled"] is True
    assert shown["autoTopicCreationOverride"]["defaultNumPartitions"] == 3
    assert shown["auth_policies"]["namespace_auth"] == {}
    assert shown["bundles"]["numBundles"] == 1
    assert msgspec.json.decode(msgspec.json.encode(policies), type=Policies) == policies


def test_a_topic_goes_before_its_namespace_and_that_before_the_default() -> None:
    namespace = Policies(
        retention_policies=RetentionPolicies(-1, 10),
        deduplication_enabled=True,
        schema_compatibility_strategy="UNDEFINED",
        auto_subscription_creation=AutoSubscriptionCreation(False),
        max_producers_per_topic=3,
    )
    own = Policies(
        deduplication_enabled=False,
        inactive_topic_policies=InactiveTopicPolicies(delete_while_inactive=True),
    )
    found = effective(namespace, own)
    assert found.retention == Retention(None, 10 * 1024 * 1024)
    assert not found.deduplication
    assert not found.auto_subscription_creation
    assert found.inactive.delete_while_inactive
    assert (found.schema_strategy, found.max_producers) == ("FULL", 3)
    assert effective(Policies()).retention == Retention(0, 0)


@pytest.mark.parametrize(("minutes", "size"), [(0, 5), (5, 0), (-2, 5), (5, -2)])
def test_retention_that_makes_no_sense(minutes: int, size: int) -> None:
    with pytest.raises(NotAllowed):
        RetentionPolicies(minutes, size)


def test_a_damaged_record_is_reported() -> None:
    async def main() -> None:
        metadata, namespaces = await opened()
        await metadata.put("/broker/namespaces/public/default", b"{")
        with pytest.raises(CorruptMetadata):
            await namespaces.policies(DEFAULT)
        await metadata.put("/broker/namespaces/public/default", b'{"name":"x","body":{}}')
        with pytest.raises(CorruptMetadata):
            await namespaces.policies(DEFAULT)

    run(main())
