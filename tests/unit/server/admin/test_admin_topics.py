"""Topics with and without partitions, statistics, the end of topics, metrics."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from magnetar.wire.frames import command
from tests.unit.server.admin.world import FULL, PUBLISHED_MS, TOPIC, World, run

PARTED = "persistent/public/default/p"
PARTED_FULL = "persistent://public/default/p"
PASSING = "non-persistent/public/default/n"


def test_topics_come_and_go(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        await world.refuse(409, "PUT", TOPIC)
        assert await world.get("persistent/public/default") == [FULL]
        assert await world.get("persistent/public/default/partitioned") == []
        assert await world.get(f"{TOPIC}/partitions") == {"partitions": 0}
        await world.change("DELETE", TOPIC)
        await world.refuse(404, "DELETE", TOPIC)
        assert await world.get("persistent/public/default") == []
        await world.refuse(404, "PUT", "persistent/public/none/t")
        await world.refuse(404, "GET", "persistent/public/none")
        await world.refuse(404, "GET", "persistent/public/none/partitioned")
        await world.refuse(412, "PUT", "persistent/public/default/%20")
        await world.refuse(412, "PUT", TOPIC, [1])

    run(tmp_path, scenario)


def test_a_used_topic_is_deleted_by_force_only(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with world.link() as link:
            await link.request("PRODUCER", topic=FULL, producer_id=1)
            await world.refuse(412, "DELETE", TOPIC)
            await world.change("DELETE", TOPIC, force="true")
        assert await world.get("persistent/public/default") == []

    run(tmp_path, scenario)


def test_partitioned_topics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 2)
        await world.refuse(409, "PUT", f"{PARTED}/partitions", 2)
        await world.refuse(409, "PUT", PARTED)
        name = "persistent://public/default/p"
        assert await world.get("persistent/public/default/partitioned") == [name]
        assert await world.get("non-persistent/public/default/partitioned") == []
        parts = [f"{name}-partition-{number}" for number in range(3)]
        assert await world.get("persistent/public/default") == parts[:2]
        await world.change("PUT", f"{PARTED}/subscription/s")
        await world.change("POST", f"{PARTED}/partitions", 3)
        assert await world.get(f"{PARTED}/partitions") == {"partitions": 3}
        assert await world.get("persistent/public/default") == parts
        assert await world.get(f"{PARTED}-partition-2/subscriptions") == ["s"]
        await world.refuse(412, "POST", f"{PARTED}/partitions", 2)
        await world.refuse(412, "POST", f"{PARTED}/partitions", 0)
        await world.refuse(412, "PUT", f"{PARTED}x/partitions", "many")
        await world.refuse(412, "PUT", f"{PARTED}x/partitions")
        await world.change("PUT", f"{PARTED}x/partitions", {"partitions": 1, "properties": None})
        await world.refuse(404, "POST", f"{PARTED}y/partitions", 3)
        await world.change("PUT", TOPIC)
        await world.refuse(409, "PUT", f"{TOPIC}/partitions", 3)
        await world.refuse(409, "POST", f"{TOPIC}/partitions", 3)
        await world.refuse(404, "DELETE", f"{TOPIC}/partitions")
        await world.change("DELETE", f"{PARTED}/partitions")
        await world.refuse(404, "GET", f"{PARTED}/partitions")

    run(tmp_path, scenario)


def test_non_persistent_topics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", PASSING)
        await world.refuse(409, "PUT", PASSING)
        assert await world.get("non-persistent/public/default") == [
            "non-persistent://public/default/n"
        ]
        assert (await world.get(f"{PASSING}/stats"))["storageSize"] == 0
        assert (await world.get(f"{PASSING}/internalStats"))["ledgers"] == []
        await world.refuse(405, "PUT", f"{PASSING}/subscription/s")
        await world.change("DELETE", PASSING)
        await world.refuse(404, "GET", f"{PASSING}/stats")
        await world.change("PUT", "non-persistent/public/default/m/partitions", 2)
        found = await world.get("non-persistent/public/default/m/partitioned-stats")
        assert found["metadata"]["partitions"] == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("local_name", ["a b", "a+b", "ü%2F", "a/../b?c#d", "100%"])
def test_names_are_one_part_of_the_path(tmp_path: Path, local_name: str) -> None:
    async def scenario(world: World) -> None:
        if "/" in local_name:
            encoded = quote(local_name, safe="")
            await world.refuse(412, "PUT", f"persistent/public/default/{encoded}")
            return
        await world.change("PUT", f"persistent/public/default/{quote_plus(local_name)}")
        assert await world.get("persistent/public/default") == [
            f"persistent://public/default/{local_name}"
        ]
        path = f"persistent/public/default/{quote(local_name, safe='')}"
        await world.change("PUT", f"{path}/subscription/{quote('x/y z', safe='')}")
        assert await world.get(f"{path}/subscriptions") == ["x/y z"]
        await world.change("DELETE", path)

    run(tmp_path, scenario)


def test_stats(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{TOPIC}x")
        await world.produce(FULL, 3)
        async with world.link() as link:
            await link.request("PRODUCER", topic=FULL, producer_id=1, producer_name="mine")
            await world.subscribe(link, FULL, "s", 2)
            await world.change("POST", f"{TOPIC}/subscription/s/resetcursor/0")
            await world.subscribe(link, FULL, "other", 3)
            found = await world.get(f"{TOPIC}/stats")
        assert found["storageSize"] > 0
        assert found["msgInCounter"] == 3
        assert [each["producerName"] for each in found["publishers"]] == ["mine"]
        assert found["subscriptions"]["s"]["msgBacklog"] == 3
        other = found["subscriptions"]["other"]
        assert (other["type"], other["isDurable"], other["unackedMessages"]) == (
            *("Exclusive", True, 0),
        )
        assert len(other["consumers"]) == 1
        assert other["activeConsumerName"] == other["consumers"][0]["consumerName"]
        for field in ("msgRateIn", "msgThroughputOut", "backlogSize", "ownerBroker"):
            assert field in found
        await world.refuse(404, "GET", "persistent/public/default/none/stats")
        await world.refuse(404, "GET", f"{TOPIC}/partitioned-stats")

    run(tmp_path, scenario)


def test_stats_without_publishers_or_consumers(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for domain in ("persistent", "non-persistent"):
            path, name = f"{domain}/public/default/t", f"{domain}://public/default/t"
            async with world.link() as link:
                await link.request("PRODUCER", topic=name, producer_id=1)
                await world.subscribe(link, name, "s", 2)
                counts = {
                    (without, kept): await _counts(world, path, without, kept)
                    for without in ("excludePublishers", "excludeConsumers")
                    for kept in ("true", "false")
                }
            assert counts == {
                ("excludePublishers", "true"): (0, 1),
                ("excludePublishers", "false"): (1, 1),
                ("excludeConsumers", "true"): (1, 0),
                ("excludeConsumers", "false"): (1, 1),
            }
        await world.refuse(412, "GET", f"{TOPIC}/stats", excludePublishers="perhaps")
        await world.change("PUT", f"{PARTED}/partitions", 2)
        async with world.link() as link:
            await link.request("PRODUCER", topic=f"{PARTED_FULL}-partition-1", producer_id=1)
            assert len((await world.get(f"{PARTED}/partitioned-stats"))["publishers"]) == 1
            found = await world.get(f"{PARTED}/partitioned-stats", excludePublishers="true")
        every = [found, *found["partitions"].values()]
        assert [each["publishers"] for each in every] == [[], [], []]

    run(tmp_path, scenario)


async def _counts(world: World, path: str, query: str, value: str) -> tuple[int, int]:
    """How many publishers and consumers are shown."""
    found = await world.get(f"{path}/stats", **{query: value})
    return len(found["publishers"]), len(found["subscriptions"]["s"]["consumers"])


def test_times_in_stats(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        now = world.server.clock.now_ms
        before = now()
        await world.change("PUT", TOPIC)
        found = await world.get(f"{TOPIC}/stats")
        created = found["topicCreationTimeStamp"]
        assert before <= created <= now()
        assert found["lastPublishTimeStamp"] == 0
        before = now()
        await world.produce(FULL, 2)
        published = (await world.get(f"{TOPIC}/stats"))["lastPublishTimeStamp"]
        assert before <= published <= now()
        async with world.link() as link:
            await world.subscribe(link, FULL, "s", 2)
            subscription = (await world.get(f"{TOPIC}/stats"))["subscriptions"]["s"]
            assert subscription["lastConsumedFlowTimestamp"] == 0
            assert subscription["consumers"][0]["lastConsumedFlowTimestamp"] == 0
            assert subscription["consumersAfterMarkDeletePosition"] == {}
            before = now()
            link.write(command("FLOW", consumer_id=2, messagePermits=1))
            await link.request("GET_LAST_MESSAGE_ID", consumer_id=2)
            subscription = (await world.get(f"{TOPIC}/stats"))["subscriptions"]["s"]
            flow = subscription["lastConsumedFlowTimestamp"]
            assert before <= flow <= now()
            assert subscription["consumers"][0]["lastConsumedFlowTimestamp"] == flow
            await link.request("CLOSE_CONSUMER", consumer_id=2)
        found = await world.get(f"{TOPIC}/stats")
        assert found["subscriptions"]["s"]["lastConsumedFlowTimestamp"] == flow
        # Loaded anew: of an entry from before, what its producer said.
        await world.change("PUT", f"{TOPIC}/unload")
        found = await world.get(f"{TOPIC}/stats")
        assert found["topicCreationTimeStamp"] == created
        assert found["lastPublishTimeStamp"] == PUBLISHED_MS + 1000

    run(tmp_path, scenario)


def test_times_of_partitions(tmp_path: Path) -> None:
    """The oldest creation and the latest message, not their sums."""

    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 3)
        await world.produce(f"{PARTED_FULL}-partition-1", 1)
        found = await world.get(f"{PARTED}/partitioned-stats")
        parts = found["partitions"].values()
        for name, chosen in (("topicCreationTimeStamp", min), ("lastPublishTimeStamp", max)):
            assert found[name] == chosen(each[name] for each in parts)
        assert found["lastPublishTimeStamp"] > 0

    run(tmp_path, scenario)


def test_partitioned_stats(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", f"{PARTED}/partitions", 2)
        await world.change("PUT", f"{PARTED}/subscription/s")
        for number in range(2):
            await world.produce(f"persistent://public/default/p-partition-{number}", number + 1)
        found = await world.get(f"{PARTED}/partitioned-stats")
        assert found["metadata"]["partitions"] == 2
        assert found["msgInCounter"] == 3
        assert found["subscriptions"]["s"]["msgBacklog"] == 3
        counts = [each["msgInCounter"] for each in found["partitions"].values()]
        assert counts == [1, 2]
        short = await world.get(f"{PARTED}/partitioned-stats", perPartition="false")
        assert short["partitions"] == {}
        assert "partition-0" in await world.refuse(405, "GET", f"{PARTED}/stats")

    run(tmp_path, scenario)


def test_internal_stats(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        ids = await world.produce(FULL, 3)
        await world.change("PUT", f"{TOPIC}/subscription/s")
        found = await world.get(f"{TOPIC}/internalStats")
        assert found["numberOfEntries"] == 3
        assert found["lastConfirmedEntry"] == ids[-1]
        assert found["state"] == "LedgerOpened"
        assert sum(each["entries"] for each in found["ledgers"]) == 3
        assert found["cursors"]["s"]["markDeletePosition"] == ids[-1]

    run(tmp_path, scenario)


def test_terminate_unload_and_last_message(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", TOPIC)
        empty = await world.get(f"{TOPIC}/lastMessageId")
        assert empty == {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
        ids = await world.produce(FULL, 2)
        await world.change("PUT", f"{TOPIC}/unload")
        last = await world.get(f"{TOPIC}/lastMessageId")
        assert f"{last['ledgerId']}:{last['entryId']}" == ids[-1]
        ended = await world.ask("POST", f"{TOPIC}/terminate")
        assert (ended.status, ended.body) == (200, last)
        assert (await world.ask("POST", f"{TOPIC}/terminate")).body == last
        internal = await world.get(f"{TOPIC}/internalStats")
        assert internal["state"] == "Terminated"
        for method, verb in (("PUT", "unload"), ("POST", "terminate"), ("GET", "lastMessageId")):
            await world.refuse(404, method, f"persistent/public/default/none/{verb}")
        await world.change("PUT", f"{PARTED}/partitions", 2)
        await world.refuse(405, "POST", f"{PARTED}/terminate")
        await world.refuse(405, "GET", f"{PARTED}/lastMessageId")
        await world.change("PUT", f"{PARTED}/unload")
        both = await world.ask("POST", f"{PARTED}/terminate/partitions")
        assert both.body.keys() == {"0", "1"}

    run(tmp_path, scenario)


def test_metrics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.produce(FULL, 2)
        await world.change("PUT", f"{TOPIC}/subscription/%22s%22", {"ledgerId": -1, "entryId": -1})
        answer = await world.ask("GET", "/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.body.splitlines()
        labels = f'cluster="here",namespace="public/default",topic="{FULL}"'
        assert f"pulsar_in_messages_total{{{labels}}} 2" in lines
        assert f"pulsar_msg_backlog{{{labels}}} 2" in lines
        backlog = f'pulsar_subscription_back_log{{{labels},subscription="\\"s\\""}} 2'
        assert backlog in lines
        assert 'pulsar_topics_count{cluster="here",namespace="public/default"} 1' in lines
        assert lines.count("# TYPE pulsar_rate_in gauge") == 1
        assert any(line.startswith("magnetar_journal_records_total") for line in lines)

    run(tmp_path, scenario)
