"""Policies over HTTP: every row of the table, what is refused, and which topics follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.server.admin.policies.table import POLICIES
from tests.unit.server.admin.world import FULL, TOPIC, World, run

NAMESPACE = "namespaces/public/default"
PASSING = "non-persistent/public/default/none"
NEGATIVE = -1
RATE = {
    "dispatchThrottlingRateInMsg": 10,
    "dispatchThrottlingRateInByte": -1,
    "ratePeriodInSecond": 1,
    "relativeToPublishRate": False,
}
WRONG_RATE = {"dispatchThrottlingRateInMsg": 1, "ratePeriodInSecond": 0}

# By field: a value, and one that is refused.
VALUES: dict[str, tuple[Any, Any]] = {
    "retention_policies": (
        {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1},
        {"retentionTimeInMinutes": 10, "retentionSizeInMB": 0},
    ),
    "message_ttl_in_seconds": (60, NEGATIVE),
    "subscription_expiration_time_minutes": (5, NEGATIVE),
    "inactive_topic_policies": (
        {
            "inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
            "maxInactiveDurationSeconds": 5,
            "deleteWhileInactive": True,
        },
        {"maxInactiveDurationSeconds": -1},
    ),
    "compaction_threshold": (2**40, NEGATIVE),
    "deduplication_enabled": (True, 1),
    "deduplication_snapshot_interval_seconds": (9, NEGATIVE),
    "delayed_delivery_policies": (
        {"active": True, "tickTime": 500, "maxDeliveryDelayInMillis": 10_000},
        {"active": True, "tickTime": -1},
    ),
    "auto_topic_creation": (
        {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 3,
        },
        {"topicType": "partitioned"},
    ),
    "auto_subscription_creation": (
        {"allowAutoSubscriptionCreation": False},
        {"allowAutoSubscriptionCreation": "maybe"},
    ),
    "publish_rate": (
        {"publishThrottlingRateInMsg": 100, "publishThrottlingRateInByte": 0},
        {"publishThrottlingRateInMsg": -2},
    ),
    "dispatch_rate": (RATE, WRONG_RATE),
    "subscription_dispatch_rate": (RATE, WRONG_RATE),
    "subscribe_rate": (
        {"subscribeThrottlingRatePerConsumer": 3, "ratePeriodInSecond": 30},
        {"subscribeThrottlingRatePerConsumer": "many"},
    ),
    "max_producers_per_topic": (3, NEGATIVE),
    "max_consumers_per_topic": (3, 2**31),
    "max_consumers_per_subscription": (3, NEGATIVE),
    "max_subscriptions_per_topic": (3, "many"),
    "max_topics_per_namespace": (3, NEGATIVE),
    "max_unacked_messages_per_consumer": (0, NEGATIVE),
    "max_unacked_messages_per_subscription": (10, NEGATIVE),
    "max_message_size": (1024, 2**31 - 1),
    "subscription_types_enabled": (["Shared", "Key_Shared"], ["Private"]),
    "schema_compatibility_strategy": ("BACKWARD", "SIDEWARD"),
    "schema_auto_update_compatibility_strategy": ("FullTransitive", "FULL"),
    "schema_validation_enforced": (True, "maybe"),
    "is_allow_auto_update_schema": (False, 0),
    "encryption_required": (True, None),
    "scalable_topic_auto_scale_policy": (
        {"enabled": True, "maxSegments": 8, "splitMsgRateInThreshold": 500.0},
        {"minSegments": 9, "maxSegments": 8},
    ),
    "scalable_topic_lifecycle_policy": (
        {"gracePeriodSeconds": 10.0, "sealedSeconds": 0.0},
        {"gracePeriodSeconds": -1},
    ),
    "transaction_kind": ("metadata", "both"),
    "replication_clusters": (["here"], ["here", "there"]),
    "allowed_clusters": (["here"], []),
    "persistence": (
        {
            "bookkeeperEnsemble": 3,
            "bookkeeperWriteQuorum": 3,
            "bookkeeperAckQuorum": 2,
            "managedLedgerMaxMarkDeleteRate": 0.5,
            "managedLedgerStorageClassName": None,
        },
        {"bookkeeperEnsemble": "three"},
    ),
    "replicator_dispatch_rate": (RATE, WRONG_RATE),
    "offload_policies": ({"managedLedgerOffloadDriver": "S3"}, {"bucket": "b" * 70_000}),
    "offload_threshold": (2**40, -2),
    "offload_threshold_in_seconds": (60, -2),
    "offload_deletion_lag_ms": (60, -2),
    "anti_affinity_group": ("apart", 7),
    "bookie_affinity": (
        {"bookkeeperAffinityGroupPrimary": "one", "bookkeeperAffinityGroupSecondary": None},
        {"bookkeeperAffinityGroupPrimary": 7},
    ),
    "subscription_auth_mode": ("Prefix", "Suffix"),
    "dispatcher_pause_on_ack_state_persistent": (True, 7),
    "allowed_topic_property_keys_for_metrics": (["colour"], "colour"),
}


def test_the_values_are_those_of_the_table() -> None:
    assert sorted(VALUES) == sorted(policy.field for policy in POLICIES)


def test_every_policy_is_set_shown_and_removed(tmp_path: Path) -> None:
    async def check(world: World, path: str, value: Any, wrong: Any, query: str) -> None:
        async def refuse(body: Any) -> None:
            given = {query: str(body)[:100]} if query else {}
            await world.refuse(412, "POST", path, None if query else body, **given)

        unset = await world.ask("GET", path)
        given = {query: str(value)} if query else {}
        await world.change("POST", path, None if query else value, **given)
        assert await world.get(path) == value, path
        for body in (wrong, b"{", b"[" * 100_000):
            await refuse(body)
        await world.refuse(412, "POST", path)
        assert await world.get(path) == value, path
        await world.change("DELETE", path)
        await world.change("DELETE", path)
        after = await world.ask("GET", path)
        assert (unset.status, unset.body) == (after.status, after.body), path

    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        for policy in POLICIES:
            value, wrong = VALUES[policy.field]
            if policy.namespace_name is not None:
                name = policy.namespace_name
                if policy.is_always_set:
                    await world.refuse(412, "POST", f"{NAMESPACE}/{name}", wrong)
                    await world.refuse(405, "DELETE", f"{NAMESPACE}/{name}")
                else:
                    await check(world, f"{NAMESPACE}/{name}", value, wrong, "")
                await world.refuse(404, "GET", f"namespaces/public/none/{name}")
                await world.refuse(404, "POST", f"namespaces/public/none/{name}", value)
            if policy.topic_name is not None:
                name = policy.topic_name
                query = name if policy.by_query else ""
                await check(world, f"{TOPIC}/{name}", value, wrong, query)
                await world.refuse(404, "GET", f"persistent/public/default/none/{name}")
                await world.refuse(405, "GET", f"{PASSING}/{name}")

    run(tmp_path, scenario)


def test_what_holds_for_a_topic_is_its_own_then_its_namespaces_then_the_brokers(
    tmp_path: Path,
) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        both = [each for each in POLICIES if each.namespace_name and each.topic_name]
        for policy in both:
            value, _ = VALUES[policy.field]
            broker = await world.ask("GET", f"{TOPIC}/{policy.topic_name}", applied="true")
            # Those without effect have no value of the broker; what it has is not what is set here.
            assert (broker.status == 204) == (not policy.has_effect) or (
                policy.field == "replication_clusters"
            )
            await world.change("POST", f"{NAMESPACE}/{policy.namespace_name}", value)
            assert await world.get(f"{TOPIC}/{policy.topic_name}", applied="true") == value
            await world.change("GET", f"{TOPIC}/{policy.topic_name}")
        # Of a topic that sets one itself.
        await world.change("POST", f"{TOPIC}/maxProducers", 0)
        assert await world.get(f"{TOPIC}/maxProducers", applied="true") == 0
        await world.change("DELETE", f"{TOPIC}/maxProducers")
        assert await world.get(f"{TOPIC}/maxProducers", applied="true") == 3

    run(tmp_path, scenario)


def test_what_is_not_set_is_answered_as_tools_expect_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        expected = {
            "maxTopicsPerNamespace": 0,
            "schemaCompatibilityStrategy": "UNDEFINED",
            "schemaValidationEnforced": False,
            "isAllowAutoUpdateSchema": True,
            "subscriptionTypesEnabled": [],
            "subscriptionAuthMode": "None",
            "encryptionRequired": False,
            "replication": ["here"],
            "offloadThreshold": -1,
            "backlogQuotaMap": {},
        }
        for name, value in expected.items():
            assert await world.get(f"{NAMESPACE}/{name}") == value
        await world.refuse(404, "GET", f"{NAMESPACE}/persistence/bookieAffinity")
        for name in ("messageTTL", "persistence", "offloadDeletionLagMs", "antiAffinity"):
            await world.change("GET", f"{NAMESPACE}/{name}")
        await world.change("GET", f"{TOPIC}/replication")
        assert await world.get(f"{TOPIC}/backlogQuotaMap") == {}

    run(tmp_path, scenario)


def test_a_namespace_shows_what_is_set_in_the_shape_of_javas_policies(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        before = await world.get(NAMESPACE)
        assert before["encryption_required"] is False
        assert before["offload_threshold"] == -1
        for policy in POLICIES:
            if policy.namespace_name is not None:
                value, _ = VALUES[policy.field]
                await world.change("POST", f"{NAMESPACE}/{policy.namespace_name}", value)
        shown = await world.get(NAMESPACE)
        assert shown["topicDispatchRate"] == {"here": RATE}
        assert shown["publishMaxMessageRate"] == {"here": VALUES["publish_rate"][0]}
        assert shown["message_ttl_in_seconds"] == 60
        assert shown["delayed_delivery_policies"]["tickTime"] == 500
        assert shown["subscription_auth_mode"] == "Prefix"
        await world.server.stop()
        # The record is read as it was written.
        again = type(world.server)(world.server.config)
        await again.start()
        found = await again.namespaces.policies(next(iter(await again.namespaces.names("public"))))
        assert found.message_ttl_in_seconds == 60
        assert isinstance(found, Policies)
        await again.stop()

    run(tmp_path, scenario)


# --- backlog quotas, rates of subscriptions


def test_backlog_quotas_are_kept_by_type(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        size = {"limit": 1000, "limitSize": 1000, "limitTime": -1, "policy": "producer_exception"}
        age = {
            "limit": -1,
            "limitSize": -1,
            "limitTime": 60,
            "policy": "consumer_backlog_eviction",
        }
        for path in (NAMESPACE, TOPIC):
            await world.change("POST", f"{path}/backlogQuota", {"limit": 1000, **_policy(size)})
            await world.change("POST", f"{path}/backlogQuota", age, backlogQuotaType="message_age")
            shown = await world.get(f"{path}/backlogQuotaMap")
            assert shown == {"destination_storage": size, "message_age": age}
            wrong = ({"limit": -2}, {"limitTime": -2}, {"policy": "shrug"}, [1])
            for body in wrong:
                await world.refuse(412, "POST", f"{path}/backlogQuota", body)
            await world.refuse(412, "POST", f"{path}/backlogQuota", age, backlogQuotaType="weight")
            assert await world.get(f"{path}/backlogQuotaMap") == shown
        # A topic without a quota of one type has its namespace's of that type.
        await world.change("DELETE", f"{TOPIC}/backlogQuota", backlogQuotaType="message_age")
        await world.change("DELETE", f"{NAMESPACE}/backlogQuota")
        assert await world.get(f"{TOPIC}/backlogQuotaMap") == {"destination_storage": size}
        held = await world.get(f"{TOPIC}/backlogQuotaMap", applied="true")
        assert held == {"destination_storage": size, "message_age": age}

    run(tmp_path, scenario)


def _policy(quota: dict[str, Any]) -> dict[str, Any]:
    return {"policy": quota["policy"]}


@pytest.mark.parametrize("path", [NAMESPACE, TOPIC])
def test_quota_and_retention_that_contradict_each_other(tmp_path: Path, path: str) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        keep = {"retentionTimeInMinutes": 10, "retentionSizeInMB": 1}
        quota, retention = f"{path}/backlogQuota", f"{path}/retention"
        await world.change("POST", retention, keep)
        await world.refuse(412, "POST", quota, {"limit": 2**20})
        await world.refuse(412, "POST", quota, {"limitTime": 600}, backlogQuotaType="message_age")
        assert await world.get(f"{path}/backlogQuotaMap") == {}
        await world.change("POST", quota, {"limit": 2**20 - 1})
        await world.change("POST", quota, {"limitTime": 599}, backlogQuotaType="message_age")
        # The other way round.
        less = {"retentionTimeInMinutes": 9, "retentionSizeInMB": 1}
        assert "600 s" not in await world.refuse(412, "POST", retention, less)
        assert await world.get(retention) == keep
        await world.change(
            "POST", retention, {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        )

    run(tmp_path, scenario)


def test_the_rate_of_one_subscription(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 1)
        path = f"{TOPIC}/my%2Fsub/dispatchRate"
        await world.change("GET", path)
        await world.change("POST", path, RATE)
        assert await world.get(path) == RATE
        (topic,) = world.server.topics.loaded.values()
        rate = topic.policies.own_dispatch_rates["my/sub"]
        assert rate.dispatch_throttling_rate_in_msg == 10
        await world.change("DELETE", path)
        await world.change("GET", path)
        assert (await world.get(path, applied="true"))["dispatchThrottlingRateInMsg"] == 0
        assert not topic.policies.own_dispatch_rates
        await world.refuse(412, "POST", path, WRONG_RATE)

    run(tmp_path, scenario)


# --- single rules


def test_statuses_that_upstream_gives_single_policies(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        quorums = ((2, 3, 1), (3, 2, 3), (3, 3, 0), (3, 3, -1))
        for path in (NAMESPACE, TOPIC):
            for ensemble, write, ack in quorums:
                body = {
                    "bookkeeperEnsemble": ensemble,
                    "bookkeeperWriteQuorum": write,
                    "bookkeeperAckQuorum": ack,
                    "managedLedgerMaxMarkDeleteRate": 1.0,
                }
                await world.refuse(400, "POST", f"{path}/persistence", body)
            await world.change("GET", f"{path}/persistence")
        many = {
            "allowAutoTopicCreation": True,
            "topicType": "partitioned",
            "defaultNumPartitions": 10_001,
        }
        await world.refuse(406, "POST", f"{NAMESPACE}/autoTopicCreation", many)
        for text in ("-1", "x", str(2**31), ""):
            await world.refuse(412, "POST", f"{TOPIC}/messageTTL", messageTTL=text)
        await world.refuse(412, "POST", f"{TOPIC}/messageTTL", 7)  # not a query value
        await world.change("GET", f"{TOPIC}/messageTTL")

    run(tmp_path, scenario)


def test_partitions_have_the_policies_of_their_topic(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        topic = "persistent/public/default/p"
        await world.change("PUT", f"{topic}/partitions", 3)
        await world.change("POST", f"{topic}/messageTTL", messageTTL="7")
        for number in range(3):
            assert await world.get(f"{topic}-partition-{number}/messageTTL") == 7
        await world.change("DELETE", f"{topic}/messageTTL")
        await world.change("GET", f"{topic}-partition-2/messageTTL")

    run(tmp_path, scenario)


def test_loaded_topics_have_what_was_set_when_it_is_answered(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 1)
        (topic,) = world.server.topics.loaded.values()
        await world.change("POST", f"{NAMESPACE}/messageTTL", 60)
        assert topic.policies.message_ttl_seconds == 60
        await world.change("POST", f"{TOPIC}/messageTTL", messageTTL="7")
        assert topic.policies.message_ttl_seconds == 7
        await world.change("POST", f"{NAMESPACE}/delayedDelivery", {"active": False})
        assert not topic.policies.delayed_delivery.active
        assert topic.policies.delayed_delivery.tick_time == 1000  # of the broker
        await world.change("POST", f"{NAMESPACE}/backlogQuota", {"limit": 5})
        assert topic.policies.size_quota.limit_size == 5
        assert topic.policies.age_quota.limit_time == -1
        defaults = dataclasses.replace(
            world.server.config.policies,
            ttl_duration_default_in_seconds=9,
            max_producers_per_topic=1,
        )
        policies = defaults.as_policies(world.server.config.limits)
        await world.server.topics.change_broker(policies)
        assert (topic.policies.message_ttl_seconds, topic.policies.max_producers) == (7, 1)

    run(tmp_path, scenario)


def test_a_namespace_is_made_with_policies(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        new = "namespaces/public/n"
        before = await world.get(NAMESPACE)
        await world.change("PUT", new, before)  # as Java sends what is not set
        assert await world.get(new) == before
        await world.change("DELETE", new)
        body = {
            "replication_clusters": ["here"],
            "message_ttl_in_seconds": 60,
            "topicDispatchRate": {"here": RATE, "there": RATE},
            "backlog_quota_map": {"destination_storage": {"limit": 5}},
            "retention_policies": {"retentionTimeInMinutes": 5, "retentionSizeInMB": 1},
            "bundles": {"numBundles": 4},
            "schema_compatibility_strategy": "UNDEFINED",
        }
        for wrong in (
            {"message_ttl_in_seconds": -1},
            {"topicDispatchRate": {"here": WRONG_RATE}},
            {"topicDispatchRate": 7},
            {"replication_clusters": ["nowhere"]},
            {"backlog_quota_map": {"destination_storage": {"limit": 2**30}}},
            {"properties": {"a": 1}},
        ):
            await world.refuse(412, "PUT", new, body | wrong)
            await world.refuse(404, "GET", new)
        await world.refuse(412, "PUT", new, b"[" * 100_000)
        await world.change("PUT", new, body)
        assert await world.get(f"{new}/messageTTL") == 60
        assert await world.get(f"{new}/dispatchRate") == RATE
        assert (await world.get(f"{new}/backlogQuotaMap"))["destination_storage"]["limit"] == 5
        assert await world.get(f"{new}/schemaCompatibilityStrategy") == "UNDEFINED"
        assert (await world.get(f"{new}/bundles"))["numBundles"] == 1
        await world.refuse(404, "PUT", "namespaces/nobody/n", body)

    run(tmp_path, scenario)


def test_a_flag_may_be_text(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        path = f"{NAMESPACE}/encryptionRequired"
        for text, flag in (("true", True), ("false", False)):
            await world.change("POST", path, text)
            assert await world.get(path) is flag
        await world.refuse(412, "POST", path, "maybe")

    run(tmp_path, scenario)
