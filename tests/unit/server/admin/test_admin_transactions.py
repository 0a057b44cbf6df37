"""Transactions over HTTP: shapes of Java's tools, what we add, statuses, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.limits import within
from magnetar.errors import NotAllowed, RequestError
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.admin.transactions import records
from magnetar.server.admin.transactions.places import bytes_between
from magnetar.server.admin.transactions.records import in_pending_acks_json
from magnetar.server.authority import Action, Authority, Principal
from magnetar.txn.ids import METADATA_BIT, to_text
from magnetar.txn.records import AckedEntry, AckOp
from magnetar.wire.messages import TxnId
from tests.unit.server.admin.txn_client import (
    ABORT,
    COMMIT,
    TIMEOUT_MS,
    TxnClient,
    txn_client,
)
from tests.unit.server.admin.world import FULL, World, run

BASE = "/admin/v3/transactions"
T = "public/default/t"


def path(txn: TxnId) -> str:
    return f"{txn.most}/{txn.least}"


def java(txn: TxnId) -> str:
    return f"({txn.most},{txn.least})"


async def story(world: World, txn: TxnId) -> Any:
    return await world.get(f"{BASE}/transactionMetadata/{path(txn)}")


# --- coordinators


def test_coordinators(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        url = world.server.service_url
        listed = await world.get(f"{BASE}/coordinators")
        assert listed == [{"id": number, "brokerServiceUrl": url} for number in range(16)]
        async with txn_client(url) as client:
            await client.begin(3)
        stats = await world.get(f"{BASE}/coordinatorStats")
        assert list(stats) == [str(number) for number in range(16)]
        assert stats["3"]["ongoingTxnSize"] == 1
        assert stats["4"]["ongoingTxnSize"] == 0
        alone = await world.get(f"{BASE}/coordinatorStats", coordinatorId="3")
        assert (alone, alone["state"]) == (stats["3"], "Ready")
        await world.refuse(404, "GET", f"{BASE}/coordinatorStats", coordinatorId="16")
        await world.refuse(412, "GET", f"{BASE}/coordinatorStats", coordinatorId="x")
        assert "no log" in await world.refuse(405, "GET", f"{BASE}/coordinatorInternalStats/0")
        await world.refuse(404, "GET", f"{BASE}/coordinatorInternalStats/99")

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("status", "method", "what"),
    [
        (404, "GET", "nothing"),
        (404, "GET", "open/1"),
        (501, "GET", f"positionStatsInPendingAck/{T}/sub/1/1"),
        (501, "POST", "transactionCoordinator/replicas"),
        (404, "GET", f"transactionMetadata/0/{METADATA_BIT | 77}"),
        (404, "GET", "transactionMetadata/0/1"),
        (412, "GET", "transactionMetadata/0/x"),
        (404, "POST", f"abortTransaction/0/{METADATA_BIT | 77}"),
        (405, "GET", f"abortTransaction/0/{METADATA_BIT | 77}"),
        (412, "GET", "slowTransactions/soon"),
        (412, "GET", "open?limit=1001"),
        (412, "GET", "open?limit=0"),
        (404, "GET", f"transactionBufferStats/{T}"),
        (404, "GET", f"transactionInBufferStats/{T}/0/1"),
        (404, "GET", f"pendingAckStats/{T}/sub"),
        (404, "GET", f"blocked/persistent/{T}"),
        (404, "GET", "blocked/topic/public/default/none"),
        (404, "GET", "blocked/segment/public/default/none%2F0000-ffff-0"),
    ],
)
def test_what_is_refused(tmp_path: Path, status: int, method: str, what: str) -> None:
    async def scenario(world: World) -> None:
        assert await world.refuse(status, method, f"{BASE}/{what}")

    run(tmp_path, scenario)


# --- transactions


def test_the_open_ones_are_listed_by_age(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            assert await world.get(f"{BASE}/open") == {
                "transactions": [],
                "total": 0,
                "truncated": False,
            }
            txns = [await client.begin(number) for number in (2, 0, 1)]
            await client.publish(FULL, txns[1])
            group = await client.open_group("app")
            member = {"application": "app", "epoch": group.epoch, "sequence": 4}
            txns.append(await client.begin(group.tc_id, group=member))
            found = (await world.get(f"{BASE}/open"))["transactions"]
            assert {each["txnId"] for each in found} == {java(txn) for txn in txns}
            ages = [each["openTimestamp"] for each in found]
            assert ages == sorted(ages)
            by_id = {each["id"]: each for each in found}
            writer = by_id[to_text(txns[1])]
            assert writer["segments"] == [FULL]
            assert (writer["status"], writer["owner"], writer["timeoutAt"]) == (
                *("OPEN", None, TIMEOUT_MS),
            )
            assert writer["deadline"] == writer["openTimestamp"] + TIMEOUT_MS
            assert by_id[to_text(txns[3])]["group"] == member

            cut = await world.get(f"{BASE}/open", limit="2")
            assert (len(cut["transactions"]), cut["total"], cut["truncated"]) == (2, 4, True)
            grouped = await world.get(f"{BASE}/open", application="app")
            assert [each["id"] for each in grouped["transactions"]] == [to_text(txns[3])]
            led = await world.get(f"{BASE}/open", coordinatorId="2", application="none")
            assert led["transactions"] == []
            assert (await world.get(f"{BASE}/open", owner="me"))["total"] == 0
            assert (await world.get(f"{BASE}/open", olderThanMs="600000"))["total"] == 0

            slow = await world.get(f"{BASE}/slowTransactions/0")
            assert set(slow) == {java(txn) for txn in txns}
            assert slow[java(txns[1])]["producedPartitions"][FULL]["aborted"] is False
            assert await world.get(f"{BASE}/slowTransactions/600000") == {}
            one = await world.get(f"{BASE}/slowTransactions/0", coordinatorId="1", limit="1")
            assert list(one) == [java(txns[2])]
            await client.end(txns[0], COMMIT)
            assert (await world.get(f"{BASE}/open"))["total"] == 3

    run(tmp_path, scenario)


def test_a_story(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            await client.publish(FULL)
            txn = await client.begin()
            position = await client.publish(FULL, txn)
            await client.subscribe(FULL, "sub")
            acked = await client.ack_next(txn, cumulative=True)
            found = await story(world, txn)
            assert found["txnId"] == java(txn)
            assert found["producedPartitions"] == {
                FULL: {"startPosition": position, "aborted": False}
            }
            assert found["ackedPartitions"] == {FULL: {"sub": {"cumulativeAckPosition": acked}}}
            assert [each["from"] for each in found["pins"]] == [position]
            assert [(each["entries"], each["last"]) for each in found["acks"]] == [(1, acked)]
            assert (found["aborted"], found["ended"], found["group"]) == ([], None, None)
            assert found["coordinatorUrl"] == world.server.service_url
            events = [each["event"] for each in found["timeline"]]
            assert events[0].startswith("begun")
            assert events[-1].startswith("is aborted unless")
            assert any("may write to" in each for each in events)
            assert any("acknowledged everything" in each for each in events)

            in_buffer = f"{BASE}/transactionInBufferStats/{T}/{path(txn)}"
            assert await world.get(in_buffer) == {"startPosition": position, "aborted": False}
            pending = f"{BASE}/transactionInPendingAckStats/{T}/sub/{path(txn)}"
            assert await world.get(pending) == {"cumulativeAckPosition": acked}
            await world.refuse(404, "GET", pending.replace("/sub/", "/other/"))

            await world.change("POST", f"{BASE}/abortTransaction/{path(txn)}")
            await world.change("POST", f"{BASE}/abortTransaction/{path(txn)}")
            await settled(world, txn)
            found = await story(world, txn)
            assert (found["status"], found["pins"], found["acks"]) == ("ABORTED", [], [])
            assert [each["last"] for each in found["aborted"]] == [position]
            assert found["producedPartitions"] == {FULL: {"startPosition": None, "aborted": True}}
            assert await world.get(in_buffer) == {"startPosition": None, "aborted": True}
            events = [each["event"] for each in found["timeline"]]
            assert any(each.startswith("hidden in") for each in events)

            other = await client.begin()
            await client.end(other, COMMIT)
            reason = await world.refuse(409, "POST", f"{BASE}/abortTransaction/{path(other)}")
            assert "COMMITTED" in reason

    run(tmp_path, scenario)


async def settled(world: World, txn: TxnId) -> None:
    """Until no op record of a transaction is left."""
    async with within("no op record is left"):
        while True:
            found = await story(world, txn)
            if not found["pins"] and not found["acks"]:
                return


def test_a_member_of_a_group(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            group = await client.open_group("app")
            member = {"application": "app", "epoch": group.epoch, "sequence": 0}
            txn = await client.begin(group.tc_id, group=member)
            found = await story(world, txn)
            assert found["group"] == member
            record = found["groupRecord"]
            assert (record["epoch"], record["committedSequence"]) == (group.epoch, -1)
            await world.change("POST", f"{BASE}/abortTransaction/{path(txn)}")
            assert (await story(world, txn))["status"] == "ABORTED"
            assert (await world.get(f"{BASE}/open"))["total"] == 0

    run(tmp_path, scenario)


class Strict(Authority):
    """Nobody may do anything with one topic."""

    def authorise(
        self, principal: Principal, action: Action, target: TopicName | NamespaceName
    ) -> None:
        if str(target) == FULL:
            raise NotAllowed(f"{principal} may not {action.value} {target}")


def test_a_topic_is_named_only_to_who_may_list_it(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        other = "persistent://public/default/other"
        async with txn_client(world.server.service_url) as client:
            txn = await client.begin()
            await client.publish(FULL, txn)
            await client.publish(other, txn)
            world.server.context.authority = Strict()
            found = await story(world, txn)
            assert [each["segment"] for each in found["pins"]] == [other]
            (listed,) = (await world.get(f"{BASE}/open"))["transactions"]
            assert listed["segments"] == [other]
            for refused in (f"blocked/persistent/{T}", f"transactionBufferStats/{T}"):
                await world.refuse(412, "GET", f"{BASE}/{refused}")
            abort = f"{BASE}/abortTransaction/{path(txn)}"
            assert FULL in await world.refuse(412, "POST", abort)
            assert (await story(world, txn))["status"] == "OPEN"

    run(tmp_path, scenario)


def test_the_coordinator_of_another_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            txn = await client.begin()
        partitions = world.server.coordinators.partitions
        monkeypatch.setattr(partitions, "leads", lambda _: False)
        reason = await world.refuse(503, "POST", f"{BASE}/abortTransaction/{path(txn)}")
        assert world.server.service_url in reason

    run(tmp_path, scenario)


def test_what_is_scanned_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SCANNED_MAX", 2)

    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            for _ in range(3):
                txn = await client.begin()
                await client.publish(FULL, txn)
                await client.end(txn, ABORT)
                await settled(world, txn)
            assert (await story(world, txn))["truncated"]
            for _ in range(3):
                txn = await client.begin()
            found = await world.get(f"{BASE}/open")
            assert (found["total"], found["truncated"]) == (2, True)

    run(tmp_path, scenario)


# --- topics


async def behind(client: TxnClient) -> tuple[TxnId, str]:
    """A topic with two messages, then one of a transaction, then two more; where it begins."""
    for _ in range(2):
        await client.publish(FULL)
    txn = await client.begin()
    position = await client.publish(FULL, txn)
    for _ in range(2):
        await client.publish(FULL)
    return txn, position


def test_a_buffer(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            txn, position = await behind(client)
            found = await world.get(f"{BASE}/transactionBufferStats/{T}")
            assert (found["state"], found["ongoingTxnSize"]) == ("Ready", 1)
            assert Position(*map(int, found["maxReadPosition"].split(":"))) < Position(
                *map(int, position.split(":"))
            )
            assert found["entriesBehind"] == 3
            assert found == await world.get(f"{BASE}/transactionBufferStats/persistent/{T}")
            inside = await world.get(f"{BASE}/transactionBufferInternalStats/{T}")
            assert [each["txnId"] for each in inside["pins"]] == [to_text(txn)]
            await client.end(txn, ABORT)
            await settled(world, txn)
            found = await world.get(f"{BASE}/transactionBufferStats/{T}")
            assert (found["ongoingTxnSize"], found["entriesBehind"]) == (0, 0)
            assert found["totalAbortedTransactions"] == 1
            inside = await world.get(f"{BASE}/transactionBufferInternalStats/{T}", limit="1")
            [aborted] = inside["aborted"]
            assert Position(*map(int, aborted["last"].split(":"))) >= Position(
                *map(int, position.split(":"))
            )
            assert (inside["pins"], inside["truncated"]) == ([], False)

    run(tmp_path, scenario)


def test_pending_acks(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            for _ in range(2):
                await client.publish(FULL)
            await client.subscribe(FULL, "sub")
            txn = await client.begin()
            positions = [await client.ack_next(txn) for _ in range(2)]
            found = await world.get(f"{BASE}/pendingAckStats/{T}/sub")
            assert (found["state"], found["ongoingTxnSize"]) == ("Ready", 1)
            assert found["acknowledgements"] == 2
            inside = await world.get(f"{BASE}/pendingAckInternalStats/{T}/sub")
            assert sorted(each["first"] for each in inside["acks"]) == positions
            cut = await world.get(f"{BASE}/pendingAckInternalStats/{T}/sub", limit="1")
            assert (len(cut["acks"]), cut["truncated"]) == (1, True)
            alone = await world.get(f"{BASE}/transactionInPendingAckStats/{T}/sub/{path(txn)}")
            assert alone == {"cumulativeAckPosition": None}

    run(tmp_path, scenario)


def test_who_holds_a_topic_up(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        blocked = f"{BASE}/blocked/persistent/{T}"
        async with txn_client(world.server.service_url) as client:
            await client.publish(FULL)
            (free,) = (await world.get(blocked))["segments"]
            assert (free["blocker"], free["entriesBehind"], free["loaded"]) == (None, 0, True)
            txn, position = await behind(client)
            (held,) = (await world.get(blocked))["segments"]
            assert held["blocker"]["txnId"] == java(txn)
            assert held["blocker"]["from"] == position
            assert held["blocker"]["status"] == "OPEN"
            assert (held["open"], held["entriesBehind"]) == (1, 3)
            assert held["bytesBehind"] > 300
        await world.change("PUT", f"persistent/{T}/unload")
        (away,) = (await world.get(blocked))["segments"]
        assert (away["loaded"], away["entriesBehind"]) == (False, None)
        assert away["blocker"]["txnId"] == java(txn)
        await world.change("POST", f"{BASE}/abortTransaction/{path(txn)}")

    run(tmp_path, scenario)


def test_every_segment_of_a_scalable_topic_is_looked_at(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.change("PUT", "scalable/public/default/x", numInitialSegments="2")
        names = [
            each["name"]
            for each in (await world.get("scalable/public/default/x/stats"))["segments"].values()
        ]
        async with txn_client(world.server.service_url) as client:
            txn = await client.begin()
            await client.publish(names[1], txn)
            found = (await world.get(f"{BASE}/blocked/topic/public/default/x"))["segments"]
            assert [each["segment"] for each in found] == names
            assert found[0]["blocker"] is None
            assert found[1]["blocker"]["id"] == to_text(txn)
            cut = await world.get(f"{BASE}/blocked/topic/public/default/x", limit="1")
            assert (len(cut["segments"]), cut["truncated"]) == (1, True)
            local = names[1].removeprefix("segment://public/default/").replace("/", "%2F")
            alone = await world.get(f"{BASE}/blocked/segment/public/default/{local}")
            assert [each["segment"] for each in alone["segments"]] == [names[1]]
            stats = await world.get(f"{BASE}/transactionBufferStats/segment/public/default/{local}")
            assert stats["ongoingTxnSize"] == 1

    run(tmp_path, scenario)


# --- metrics


def test_metrics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async def value(name: str, labels: str = "") -> float | None:
            text = await world.get("/metrics")
            start = f'{name}{{cluster="here"{labels}}} '
            return next(
                (float(line[len(start) :]) for line in text.splitlines() if line.startswith(start)),
                None,
            )

        own = ',coordinator_id="5"'
        topic = f',namespace="public/default",topic="{FULL}"'
        before = {
            name: await value(f"pulsar_txn_{name}_total", own) or 0
            for name in ("created", "committed", "aborted", "timeout")
        }
        async with txn_client(world.server.service_url) as client:
            assert await value("pulsar_txn_tb_active_total", topic) is None
            kept, lost, still = [await client.begin(5) for _ in range(3)]
            for txn in (kept, lost, still):
                await client.publish(FULL, txn)
            await client.end(kept, COMMIT)
            await client.end(lost, ABORT)
            await settled(world, lost)
            assert await value("pulsar_txn_active_count", own) == 1
            for name, grown in {"created": 3, "committed": 1, "aborted": 1, "timeout": 0}.items():
                assert await value(f"pulsar_txn_{name}_total", own) == before[name] + grown
            assert await value("pulsar_txn_tb_active_total", topic) == 1
            assert await value("pulsar_txn_tb_committed_total", topic) == 1
            assert await value("pulsar_txn_tb_aborted_total", topic) == 1
            assert await value("pulsar_txn_tb_ceiling_lag_entries", topic) == 1
            assert (await value("pulsar_txn_tb_ceiling_lag_bytes", topic) or 0) > 100
            assert await value("pulsar_txn_metadata_store_outstanding_op_records") == 1
            await client.end(still, COMMIT)
            assert await value("pulsar_txn_tb_ceiling_lag_entries", topic) is None

    run(tmp_path, scenario)


def test_each_part_of_a_transaction_moves_its_metrics(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        labels = f'cluster="here",namespace="public/default",topic="{FULL}",subscription="s"'
        acks = f"pulsar_txn_tp_{{}}{{{{{labels}}}}}"
        store = "pulsar_txn_metadata_store_"
        names = {
            "pins and acks": f"{store}op_writes_total",
            "decisions": f'{store}header_cas_total{{result="ok"}}',
            "conflicts": f'{store}header_cas_total{{result="conflict"}}',
            "rejected": f'{store}header_cas_total{{result="reject"}}',
            "queries": f"{store}index_query_seconds_count",
            "ops": f'{store}outstanding_op_records{{cluster="here"}}',
            "quick": 'pulsar_txn_execution_latency_le_5000{cluster="here"}',
            "held": acks.format("pending_acks"),
            "committed": acks.format("committed_count"),
            "aborted": acks.format("aborted_count"),
        }

        async def grown(since: dict[str, float]) -> dict[str, float]:
            """What the values are more than they were."""
            lines = (await world.get("/metrics")).splitlines()
            found = dict.fromkeys(names, 0.0)
            for line in lines:
                name, _, value = line.rpartition(" ")
                found |= {each: float(value) for each in names if names[each] == name}
            took = [line for line in lines if line.startswith("pulsar_txn_execution_latency_le_")]
            found["quick"] = sum(float(line.rpartition(" ")[2]) for line in took)
            changes = {each: found[each] - since.get(each, 0.0) for each in names}
            since.update(found)
            # Every second deadlines are looked for.
            queries.append(changes.pop("queries"))
            return {each: change for each, change in changes.items() if change}

        since: dict[str, float] = {}
        queries: list[float] = []
        async with txn_client(world.server.service_url) as client:
            await client.subscribe(FULL, "s")
            for _ in range(2):
                await client.publish(FULL)
            await grown(since)
            kept, lost = await client.begin(), await client.begin()
            assert await grown(since) == {}
            await client.publish("u", kept)
            assert await grown(since) == {"pins and acks": 1, "ops": 1}
            assert queries[-1] >= 2, "loading the topic asks for its pins and aborted records"
            await client.publish("u", kept)
            assert await grown(since) == {}
            await client.ack_next(kept)
            assert await grown(since) == {"pins and acks": 1, "ops": 1, "held": 1}
            await client.ack_next(lost)
            await grown(since)
            await client.end(kept, COMMIT)
            await settled(world, kept)
            changes = await grown(since)
            assert changes.pop("ops") == -2
            assert changes == {"decisions": 1, "quick": 1, "held": -1, "committed": 1}
            await client.end(lost, ABORT)
            await settled(world, lost)
            changes = await grown(since)
            assert changes == {"decisions": 1, "quick": 1, "held": -1, "aborted": 1, "ops": -1}
            with pytest.raises(RequestError, match="ABORTED"):
                await client.end(lost, COMMIT)
            assert await grown(since) == {"rejected": 1}

    run(tmp_path, scenario)


# --- parts


def test_bytes_between() -> None:
    spans = [
        LedgerSpan(1, 0, 0, 10, 1000),
        LedgerSpan(2, 0, 0, 0, 0),
        LedgerSpan(5, 0, None, 4, 80),
    ]
    assert bytes_between(spans, Position(1, 9), Position(5, 3)) == 80
    assert bytes_between(spans, Position(1, 4), Position(5, 1)) == 540
    assert bytes_between(spans, Position(-1, -1), Position(5, 3)) == 1080
    assert bytes_between(spans, Position(5, 3), Position(5, 3)) == 0


def test_where_a_cumulative_ack_in_a_batch_ends() -> None:
    def op(*entries: AckedEntry, cumulative: bool = True) -> AckOp:
        return AckOp("0_1", FULL, "sub", 0, entries, cumulative)

    assert in_pending_acks_json([]) == {"cumulativeAckPosition": None}
    assert in_pending_acks_json([op(AckedEntry(1, 5), cumulative=False)]) == {
        "cumulativeAckPosition": None
    }
    assert in_pending_acks_json([op(AckedEntry(1, 5)), op(AckedEntry(1, 3))]) == {
        "cumulativeAckPosition": "1:5"
    }
    # Messages 0 to 2 of the batch are acknowledged, 3 and 4 are not.
    assert in_pending_acks_json([op(AckedEntry(1, 5, "18"))]) == {"cumulativeAckPosition": "1:5:2"}
