"""`compaction` of topics, partitions and scalable topics over HTTP, and what the protocol tells."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harness.limits import PATIENCE_S
from magnetar.broker.topic.topic import Topic
from magnetar.model.names import TopicName
from magnetar.model.subscriptions import COMPACTION
from tests.unit.server.admin.world import FULL, TOPIC, World, run

PARTED = "persistent/public/default/p"
NOT_RUN = {"status": "NOT_RUN", "lastError": ""}
SCALABLE = "scalable/public/default/x"


async def ended(world: World, path: str) -> Any:
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while (found := await world.get(f"{path}/compaction"))["status"] == "RUNNING":
        assert asyncio.get_running_loop().time() < until
    return found


def loaded(world: World, name: str) -> Topic:
    topic = world.server.topics.loaded[TopicName.parse(name)]
    assert isinstance(topic, Topic)
    return topic


def test_a_topic_is_compacted(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.refuse(404, "GET", f"{TOPIC}/compaction")
        await world.refuse(404, "PUT", f"{TOPIC}/compaction")
        await world.produce(FULL, 3, key="k")
        assert await world.get(f"{TOPIC}/compaction") == NOT_RUN
        assert (await world.get(f"{TOPIC}/internalStats"))["compactedLedger"]["ledgerId"] == -1
        turns = loaded(world, FULL)._parts.compaction_turns
        async with turns:
            await world.change("PUT", f"{TOPIC}/compaction")
            assert "being compacted" in await world.refuse(409, "PUT", f"{TOPIC}/compaction")
            assert (await world.get(f"{TOPIC}/compaction"))["status"] == "RUNNING"
        assert await ended(world, TOPIC) == {"status": "SUCCESS", "lastError": ""}
        stats = await world.get(f"{TOPIC}/stats")
        assert stats["compaction"].keys() == {
            "lastCompactionRemovedEventCount",
            "lastCompactionSucceedTimestamp",
            "lastCompactionFailedTimestamp",
            "lastCompactionDurationTimeInMills",
        }
        assert stats["compaction"]["lastCompactionRemovedEventCount"] == 2
        assert stats["compaction"]["lastCompactionSucceedTimestamp"] > 0
        assert stats["subscriptions"][COMPACTION]["msgBacklog"] == 0
        internal = await world.get(f"{TOPIC}/internalStats")
        assert internal["compactedLedger"]["entries"] == 1
        named = internal["cursors"][COMPACTION]["cursorProperties"]["CompactedTopicLedger"]
        assert named == str(internal["compactedLedger"]["ledgerId"])
        # It is memory: a load knows nothing of it.
        await world.change("PUT", f"{TOPIC}/unload")
        assert await world.get(f"{TOPIC}/compaction") == NOT_RUN
        await world.change("PUT", "non-persistent/public/default/n")
        await world.refuse(405, "PUT", "non-persistent/public/default/n/compaction")

    run(tmp_path, scenario)


def test_what_it_has_not_seen_is_spared(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 3, key="k")
        await world.change("PUT", f"{TOPIC}/subscription/s", {"ledgerId": -1, "entryId": -1})
        await world.change("POST", f"{TOPIC}/compactionThreshold", 1_000_000)

        async def backlogs() -> dict[str, int]:
            found = (await world.get(f"{TOPIC}/stats"))["subscriptions"]
            return {name: each["msgBacklog"] for name, each in found.items()}

        await world.change("POST", "namespaces/public/default/clearBacklog")
        assert await backlogs() == {"s": 0, COMPACTION: 3}
        await world.change("POST", f"{TOPIC}/all_subscription/expireMessages/1")
        assert await backlogs() == {"s": 0, COMPACTION: 3}
        await world.refuse(412, "PUT", f"{TOPIC}/subscription/{COMPACTION}/properties", {"a": "b"})
        # The view goes with its position.
        await world.change("PUT", f"{TOPIC}/compaction")
        await ended(world, TOPIC)
        await world.change("DELETE", f"{TOPIC}/subscription/{COMPACTION}")
        assert (await world.get(f"{TOPIC}/internalStats"))["compactedLedger"]["ledgerId"] == -1

    run(tmp_path, scenario)


def test_each_partition_is_compacted(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 2)
        for number in range(2):
            await world.produce(f"persistent://public/default/p-partition-{number}", 3, key="k")
        assert await world.get(f"{PARTED}/compaction") == NOT_RUN
        await world.change("PUT", f"{PARTED}/compaction")
        assert (await ended(world, PARTED))["status"] == "SUCCESS"
        for number in range(2):
            assert (await world.get(f"{PARTED}-partition-{number}/compaction"))["status"] == (
                "SUCCESS"
            )
        stats = await world.get(f"{PARTED}/partitioned-stats")
        assert stats["compaction"]["lastCompactionRemovedEventCount"] == 4
        # One that failed says so for the topic.
        topic = loaded(world, "persistent://public/default/p-partition-1")
        topic.compaction.report.status = "ERROR"
        topic.compaction.report.last_error = "no"
        assert await world.get(f"{PARTED}/compaction") == {
            "status": "ERROR",
            "lastError": "persistent://public/default/p-partition-1: no",
        }

    run(tmp_path, scenario)


def test_a_topic_that_becomes_scalable_keeps_its_view(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 3, key="k")
        await world.change("PUT", f"{TOPIC}/compaction")
        await ended(world, TOPIC)
        await world.change("POST", "scalable/public/default/t/migrate")
        assert (await world.get("scalable/public/default/t/subscriptions"))["subscriptions"] == {}
        view = loaded(world, FULL).compacted
        assert view is not None
        assert (await view.info()).last_entry == 0

    run(tmp_path, scenario)


def test_every_segment_is_compacted(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.refuse(404, "PUT", f"{SCALABLE}/compaction")
        await world.change("PUT", SCALABLE, numInitialSegments="2")
        assert await world.get(f"{SCALABLE}/compaction") == NOT_RUN
        names = [f"segment://public/default/x/{each}" for each in ("0000-7fff-0", "8000-ffff-1")]
        await world.produce(names[0], 3, key="k")
        await world.change("PUT", f"{SCALABLE}/compaction")
        assert (await ended(world, SCALABLE))["status"] == "SUCCESS"
        views = [loaded(world, name).compacted for name in names]
        assert views[0] is not None
        assert views[1] is None, "there was nothing"
        # The parts of a split are new, and their parent keeps its view.
        await world.change("POST", f"{SCALABLE}/split/0")
        await world.change("PUT", f"{SCALABLE}/compaction")
        assert (await ended(world, SCALABLE))["status"] == "SUCCESS"
        parent = loaded(world, names[0])
        assert parent.compacted is not None
        assert (await parent.compacted.info()).last_entry == 0
        subscriptions = await world.get(f"{SCALABLE}/subscriptions")
        assert COMPACTION not in subscriptions["subscriptions"]

    run(tmp_path, scenario)
