"""Legacy transactions over HTTP: the same endpoints, told by their coordinators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from magnetar.errors import NotAllowed
from magnetar.model.names import NamespaceName, TopicName
from magnetar.server.authority import Action, Authority, Principal
from magnetar.txn.ids import to_text
from magnetar.txn.legacy.stream_state import OpenTransaction, StreamRecord, stream_key
from magnetar.txn.records import encode
from magnetar.wire.messages import TxnId
from tests.unit.server.admin.txn_client import COMMIT, TIMEOUT_MS, txn_client
from tests.unit.server.admin.world import World, run

BASE = "/admin/v3/transactions"
T = "persistent://public/default/t"
PART = "persistent/public/default/t"


def path(txn: TxnId) -> str:
    return f"{txn.most}/{txn.least}"


async def story(world: World, txn: TxnId) -> Any:
    return await world.get(f"{BASE}/transactionMetadata/{path(txn)}")


def test_both_kinds_are_listed_and_told(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            legacy = await client.begin(3, scalable=False)
            other = await client.begin(3)
            await client.add(legacy, T, "s")
            listed = await world.get(f"{BASE}/open")
            assert (listed["total"], listed["truncated"]) == (2, False)
            first, second = listed["transactions"]
            assert (first["id"], first["kind"]) == (to_text(legacy), "markers")
            assert (second["id"], second["kind"]) == (to_text(other), "metadata")
            assert (first["segments"], first["subscriptions"]) == ([T], [f"{T} s"])
            slow = await world.get(f"{BASE}/slowTransactions/0")
            assert set(slow) == {"(3,1)", second["txnId"]}
            assert slow["(3,1)"]["producedPartitions"][T]["aborted"] is False
            told = await story(world, legacy)
            assert (told["status"], told["timeoutAt"]) == ("OPEN", TIMEOUT_MS)
            assert told["ackedPartitions"] == {T: {"s": {"cumulativeAckPosition": None}}}
            assert "begun by 127.0.0.1:" in told["timeline"][0]["event"]
            assert "unless it is ended" in told["timeline"][1]["event"]
            await client.end(legacy, COMMIT)
            told = await story(world, legacy)
            assert told["status"] == "COMMITTED"
            events = [each["event"] for each in told["timeline"]]
            assert events[1].startswith("to be committed: decided by client 127.0.0.1:")
            assert events[2:] == ["committed everywhere"]
            assert (await world.get(f"{BASE}/open"))["total"] == 1
            await world.refuse(404, "GET", f"{BASE}/transactionMetadata/3/77")
            await world.refuse(404, "GET", f"{BASE}/transactionMetadata/4/1")

    run(tmp_path, scenario)


def test_coordinators_tell_of_their_logs(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            for _ in range(3):
                last = await client.begin(3, scalable=False)
            stats = await world.get(f"{BASE}/coordinatorStats", coordinatorId="3")
            assert stats["ongoingTxnSize"] == 3
            assert (stats["leastSigBits"], stats["lowWaterMark"]) == (last.least, 0)
            found = await world.get(f"{BASE}/coordinatorInternalStats/3")
            log = found["transactionLogStats"]
            assert log["managedLedgerName"].endswith("__transaction_log_3")
            assert log["managedLedgerInternalStats"]["numberOfEntries"] == 3
            assert "transaction.subscription" in log["managedLedgerInternalStats"]["cursors"]
            text = await world.get("/metrics")
            assert 'pulsar_txn_active_count{cluster="here",coordinator_id="3"} 3' in text
            assert 'pulsar_txn_append_log_total{cluster="here",coordinator_id="3"}' in text
        listed = await world.get("/admin/v2/persistent/pulsar/system")
        assert not [each for each in listed if "__transaction_log" in each]

    run(tmp_path, scenario)


def test_who_holds_a_topic_up(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        blocked = f"{BASE}/blocked/{PART}"
        in_buffer = f"{BASE}/transactionInBufferStats/{PART}"
        async with txn_client(world.server.service_url) as client:
            await client.publish(T)
            legacy, other = await client.begin(scalable=False), await client.begin()
            await client.add(legacy, T, "s")
            position = await client.publish(T, legacy)
            second = await client.publish(T, other)
            (held,) = (await world.get(blocked))["segments"]
            assert (held["blocker"]["id"], held["blocker"]["kind"]) == (to_text(legacy), "markers")
            assert (held["blocker"]["from"], held["open"]) == (position, 2)
            assert held["entriesBehind"] == 2
            stats = await world.get(f"{BASE}/transactionBufferStats/{PART}")
            assert (stats["ongoingTxnSize"], stats["entriesBehind"]) == (2, 2)
            found = await world.get(f"{in_buffer}/{path(legacy)}")
            assert found == {"startPosition": position, "aborted": False}
            text = await world.get("/metrics")
            labels = f'cluster="here",namespace="public/default",topic="{T}"'
            assert f"pulsar_txn_tb_active_total{{{labels}}} 2" in text
            assert f"pulsar_txn_tb_ceiling_lag_entries{{{labels}}} 2" in text
            await world.change("PUT", f"{PART}/unload")
            first = OpenTransaction(to_text(legacy), 0, 0)
            record = StreamRecord(T, 1, (0, 0), (first,))  # as of an owner that wrote it later
            await world.server.metadata.put(stream_key(T), encode(record))
            (away,) = (await world.get(blocked))["segments"]
            assert (away["loaded"], away["blocker"]["id"]) == (False, to_text(legacy))
            await world.change("POST", f"{BASE}/abortTransaction/{path(legacy)}")
            (held,) = (await world.get(blocked))["segments"]
            assert (held["blocker"]["id"], held["blocker"]["from"]) == (to_text(other), second)
            found = await world.get(f"{in_buffer}/{path(legacy)}")
            assert found == {"startPosition": None, "aborted": True}
            told = await story(world, legacy)
            assert [each["segment"] for each in told["aborted"]] == [T]

    run(tmp_path, scenario)


def test_a_namespace_cannot_have_markers_where_the_broker_has_none(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        path = "namespaces/public/default/transactionKind"
        await world.change("POST", path, "markers")
        world.server.config = replace(world.server.config, transaction_kind="metadata")
        reason = await world.refuse(412, "POST", path, "markers")
        assert "transaction_kind" in reason
        await world.change("POST", path, "auto")

    run(tmp_path, scenario)


def test_an_operator_aborts(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            txn = await client.begin(0, scalable=False)
            await client.add(txn, T, "s")
            for _ in range(2):
                await world.change("POST", f"{BASE}/abortTransaction/{path(txn)}")
            assert (await story(world, txn))["status"] == "ABORTED"
            over = await client.begin(0, scalable=False)
            await client.end(over, COMMIT)
            await world.refuse(409, "POST", f"{BASE}/abortTransaction/{path(over)}")
            await world.refuse(404, "POST", f"{BASE}/abortTransaction/0/77")

    run(tmp_path, scenario)


class _NoConsuming(Authority):
    def authorise(
        self, principal: Principal, action: Action, target: TopicName | NamespaceName
    ) -> None:
        if action is Action.CONSUME and str(target) == T:
            raise NotAllowed("not you")


def test_who_aborts_needs_every_right_on_what_it_touched(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            txn = await client.begin(0, scalable=False)
            await client.add(txn, T, "s")
            world.server.context.authority = _NoConsuming()
            await world.refuse(412, "POST", f"{BASE}/abortTransaction/{path(txn)}")
            assert (await story(world, txn))["status"] == "OPEN"

    run(tmp_path, scenario)


def test_pending_acks_count_both_kinds(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        async with txn_client(world.server.service_url) as client:
            for _ in range(3):
                await client.publish(T)
            await client.subscribe(T, "s")
            for scalable in (False, True):
                txn = await client.begin(scalable=scalable)
                await client.add(txn, T, "s")
                await client.ack_next(txn)
            stats = await world.get(f"{BASE}/pendingAckStats/{PART}/s")
            assert (stats["ongoingTxnSize"], stats["acknowledgements"]) == (2, 1)

    run(tmp_path, scenario)
