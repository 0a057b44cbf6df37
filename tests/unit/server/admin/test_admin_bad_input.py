"""Bodies that are none, at every endpoint that changes something: refused, and nothing changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from magnetar.server.admin.application import ENDPOINTS
from magnetar.server.admin.endpoints import Endpoint
from tests.unit.server.admin.world import TOPIC, World, run

NAMESPACE = "namespaces/public/default"
X = "scalable/public/default/x"
BODIES = {
    "no JSON": b"{",
    "no text": b'"\xff\xfe"',
    "nested arrays": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "another kind": b'[{"limit": "many"}]',
    "a number that is none of Java's": b"1e400",
}
# What stands for a part of a path: things that exist, so that it is the body that is refused.
PARTS = {
    "tenant": "public",
    "namespace": "default",
    "topic": "t",
    "cluster": "here",
    "subscription": "s",
    "name": "s",
    "bundle": "0x00000000_0xffffffff",
    "segment": "0",
    "segments": "0/1",
    "key": "k",
    "value": "v",
}


def path_of(row: Endpoint) -> str:
    """A path of this row; scalable rows get a scalable topic."""
    path = re.sub(r"{domain:(\w[\w-]*)[^}]*}", r"\1", row.path)
    if path.startswith("/admin/v2/scalable"):
        path = path.replace("{topic}", "x")
    return re.sub(r"{(\w+)[^}]*}", lambda part: PARTS.get(part[1], "1"), path)


async def everything(world: World) -> Any:
    """What is set, at each level."""
    return [
        await world.get(NAMESPACE),
        *[
            (await world.ask("GET", f"{TOPIC}/{row.path.rpartition('/')[2]}")).body
            for row in ENDPOINTS
            if row.policy and row.method == "GET" and row.path.startswith("/admin/v2/{domain")
        ],
        await world.get(f"{TOPIC}/backlogQuotaMap"),
        (await world.ask("GET", f"{X}/autoScalePolicy")).body,
        (await world.ask("GET", f"{X}/lifecyclePolicy")).body,
        (await world.ask("GET", f"schemas/{TOPIC.partition('/')[2]}/schema")).status,
    ]


async def prepare(world: World) -> None:
    await world.change("PUT", TOPIC)
    await world.change("PUT", f"{TOPIC}/subscription/s")
    await world.change("PUT", X)
    for path in (NAMESPACE, TOPIC):
        keep = {"retentionTimeInMinutes": 10, "retentionSizeInMB": 1}
        await world.change("POST", f"{path}/retention", keep)
        await world.change("POST", f"{path}/backlogQuota", {"limit": 1000})
    await world.change("POST", f"{X}/autoScalePolicy", {"maxSegments": 8})
    await world.change("POST", f"{X}/lifecyclePolicy", {"sealedSeconds": 5})


@pytest.mark.parametrize("kind", BODIES)
def test_at_every_policy_it_is_412_and_what_was_set_stays(tmp_path: Path, kind: str) -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        before = await everything(world)
        rows = [row for row in ENDPOINTS if row.method in ("POST", "PUT") and row.policy]
        assert len(rows) > 100
        paths = [(row.method, path_of(row)) for row in rows]
        paths += [("POST", f"/admin/v2/{each}/backlogQuota") for each in (NAMESPACE, TOPIC)]
        paths.append(("POST", f"/admin/v2/{TOPIC}/s/dispatchRate"))
        paths += [("POST", f"/admin/v2/{X}/{each}Policy") for each in ("autoScale", "lifecycle")]
        for method, path in paths:
            reason = await world.refuse(412, method, path, BODIES[kind])
            assert "Traceback" not in reason
        assert await everything(world) == before

    run(tmp_path, scenario)


def test_no_body_that_is_none_is_a_bug_anywhere(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        wrong = []
        rows = [row for row in ENDPOINTS if row.method not in ("GET", "DELETE")]
        for row in rows:
            for kind, body in BODIES.items():
                answer = await world.ask(
                    row.method if row.method != "*" else "POST", path_of(row), body
                )
                says_why = answer.status < 400 or bool(answer.body["reason"])
                if answer.status in (500, 503, 504) or not says_why:
                    wrong.append(f"{row.method} {row.path}: {kind}: {answer.status}")
        assert not wrong, "\n".join(wrong)

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("status", "path", "body"),
    [
        (404, f"{NAMESPACE}/shoeSize", 44),
        (404, f"{TOPIC}/shoeSize", 44),
        (412, f"{NAMESPACE}/messageTTL", -1),
        (412, f"{TOPIC}/messageTTL?messageTTL=-1", None),
        (412, f"{NAMESPACE}/subscriptionExpirationTime", -1),
        (412, f"{NAMESPACE}/deduplicationSnapshotInterval", -1),
        (412, f"{TOPIC}/deduplicationSnapshotInterval", -1),
        (412, f"{NAMESPACE}/backlogQuota", {"limit": 2**20}),
        (412, f"{TOPIC}/backlogQuota", {"limitSize": 2**40}),
        (412, f"{TOPIC}/backlogQuota?backlogQuotaType=message_age", {"limitTime": 600}),
        (412, f"{TOPIC}/retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 5}),
        (400, f"{TOPIC}/persistence", {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 2}),
        (406, f"{NAMESPACE}/autoTopicCreation", {"topicType": "partitioned"}),
        (412, f"{TOPIC}/maxMessageSize", 2**31 - 1),
        (412, f"{NAMESPACE}/replication", ["elsewhere"]),
        (422, "schemas/public/default/t/schema", {"type": "AVRO", "schema": "{", "properties": {}}),
        (422, "schemas/public/default/t/schema", {"type": "INT32", "schema": "x"}),
        (412, "schemas/public/default/t/schema", {"type": "NOTHING", "schema": ""}),
        (412, f"{X}/lifecyclePolicy", {"graceSeconds": 1}),
        (412, f"{X}/autoScalePolicy", {"maxSegments": -1}),
    ],
)
def test_values_that_cannot_be_change_nothing(
    tmp_path: Path, status: int, path: str, body: Any
) -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        before = await everything(world)
        given = body
        if "defaultNumPartitions" not in str(body) and path.endswith("autoTopicCreation"):
            given = {**body, "allowAutoTopicCreation": True, "defaultNumPartitions": 10_001}
        name, _, query = path.partition("?")
        asked = dict(each.split("=") for each in query.split("&")) if query else {}
        await world.refuse(status, "POST", name, given, **asked)
        assert await everything(world) == before

    run(tmp_path, scenario)
