"""Transactions through the wire: coordinators, begin, end, deadlines, groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.limits import within
from magnetar.errors import WireCode
from magnetar.model.ids import Position
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.buffer.pins import place_pin
from magnetar.txn.coordinator_partitions import LEADERS, PARTITIONS, partition_of
from magnetar.txn.ids import METADATA_BIT, to_text
from magnetar.txn.records import Pin, State, encode, pin_key
from magnetar.txn.store import TxnStore
from magnetar.wire.commands import TYPES
from magnetar.wire.messages import Received, TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.integration.server.txn_stage import Roles
from tests.unit.server.serving import LIMITS, connected, refused, run, serving

ASSIGN = "persistent://pulsar/system/transaction_coordinator_assign"
APP = "pipeline"
HOME = partition_of(APP)

Scene = Callable[[Server, Driver], Awaitable[None]]


def play(folder: Path, scene: Scene) -> None:
    async def go() -> None:
        async with serving(folder) as server:
            driver = await connected(server)
            await scene(server, driver)
            await driver.close()

    run(go())


async def begun(driver: Driver, tc_id: int = 0, *, ttl: int = 60_000, **fields: Any) -> TxnId:
    fields.setdefault("scalable", True)
    answer = await driver.request("NEW_TXN", tc_id=tc_id, txn_ttl_millis=ttl, **fields)
    return txn_of(answer)


def txn_of(answer: Any) -> TxnId:
    return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)


def ids(txn: TxnId) -> dict[str, Any]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


async def ended(driver: Driver, txn: TxnId, *, commit: bool = True, **fields: Any) -> Any:
    action = pb.COMMIT if commit else pb.ABORT
    return await driver.request("END_TXN", txn_action=action, **ids(txn), **fields)


async def state(server: Server, txn: TxnId) -> State | None:
    return await TxnStore(server.metadata).state(txn)


class Outcome:
    """What becomes of a transaction, as topics of the server would learn it."""

    def __init__(self, server: Server, txn: TxnId) -> None:
        self._state: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        server.outcomes.join(txn, self)

    def decided(self, txn: TxnId, state: State) -> None:
        self._state.set_result(state)

    async def wait(self) -> State:
        async with within("a decision"):
            return await self._state


async def told(driver: Driver) -> pb.CommandWatchTcAssignmentsUpdate:
    push = await driver.pushes.get()
    assert isinstance(push, Received)
    assert push.type == TYPES["WATCH_TC_ASSIGNMENTS_UPDATE"]
    assert isinstance(push.body, pb.CommandWatchTcAssignmentsUpdate)
    return push.body


# --- where coordinators are


def test_the_server_says_that_it_has_them(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        port = int(server.service_url.rpartition(":")[2])
        other = await Driver.connect("127.0.0.1", port, handshake=False)
        answer = await other.request("CONNECT", client_version="c", protocol_version=21)
        assert answer.feature_flags.supports_tc_metadata_discovery
        assert answer.feature_flags.supports_transaction_groups
        await other.close()

    play(tmp_path, scene)


def test_old_clients_find_coordinators_by_a_topic(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        found = await driver.request("PARTITIONED_METADATA", topic=ASSIGN)
        assert found.partitions == PARTITIONS
        for number in range(PARTITIONS):
            place = await driver.request("LOOKUP", topic=f"{ASSIGN}-partition-{number}")
            assert place.response == pb.CommandLookupTopicResponse.Connect
            assert place.brokerServiceUrl == server.service_url
            await driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=number)
        request = driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=PARTITIONS)
        assert await refused(request) == WireCode.TRANSACTION_COORDINATOR_NOT_FOUND

    play(tmp_path, scene)


def test_new_clients_watch_the_coordinators(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        driver.send("WATCH_TC_ASSIGNMENTS", watch_id=7)
        first = await told(driver)
        assert (first.watch_id, first.snapshot.parallelism) == (7, PARTITIONS)
        urls = {each.tc_id: each.broker_service_url for each in first.snapshot.assignments}
        assert urls == dict.fromkeys(range(PARTITIONS), server.service_url)
        await driver.request("TC_CLIENT_CONNECT_REQUEST", tc_id=3, scalable=True)

        await server.metadata.delete(f"{LEADERS}/3")  # as if its leader were gone
        without = await told(driver)
        assert 3 not in {each.tc_id for each in without.snapshot.assignments}
        again = await told(driver)
        assert len(again.snapshot.assignments) == PARTITIONS

        driver.send("WATCH_TC_ASSIGNMENTS_CLOSE", watch_id=7)
        driver.send("WATCH_TC_ASSIGNMENTS_CLOSE", watch_id=8)
        await driver.request("LOOKUP", topic="anything")
        seen = server.coordinators.partitions.changes.version
        await server.metadata.delete(f"{LEADERS}/3")
        await server.coordinators.partitions.changes.past(seen)
        await driver.request("LOOKUP", topic="anything")
        assert len(driver.pushes) == 0

    play(tmp_path, scene)


def test_a_watch_that_is_closed_at_once_is_told_nothing_more(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        driver.send("WATCH_TC_ASSIGNMENTS", watch_id=1)
        driver.send("WATCH_TC_ASSIGNMENTS_CLOSE", watch_id=1)
        await driver.request("LOOKUP", topic="anything")
        session = next(iter(server.context.sessions))
        assert len(session.scalable) == 0
        assert session.scalable.coordinators == {}

    play(tmp_path, scene)


# --- begin and end


@pytest.mark.parametrize("commit", [False, True])
def test_end_again_crossed_and_by_another_connection(tmp_path: Path, commit: bool) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        txn = await begun(driver, 5)
        assert txn.most == 5
        assert txn.least & METADATA_BIT
        answer = await driver.request(
            "ADD_PARTITION_TO_TXN",
            partitions=["persistent://public/default/a", "segment://a/b/c/0000-ffff-0"],
            **ids(txn),
        )
        assert txn_of(answer) == txn
        answer = await driver.request(
            "ADD_SUBSCRIPTION_TO_TXN",
            subscription=[{"topic": "persistent://public/default/a", "subscription": "s"}],
            **ids(txn),
        )
        assert txn_of(answer) == txn
        answer = await ended(driver, txn, commit=commit, scalable=True)
        assert txn_of(answer) == txn
        other = await connected(server)
        for each in (driver, other):
            await ended(each, txn, commit=commit)
            crossed = ended(each, txn, commit=not commit)
            assert await refused(crossed) == WireCode.INVALID_TXN_STATUS
        late = driver.request("ADD_PARTITION_TO_TXN", partitions=["a"], **ids(txn))
        assert await refused(late) == WireCode.INVALID_TXN_STATUS
        await other.close()

    play(tmp_path, scene)


def test_refusals_name_the_coordinator(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        driver.send("NEW_TXN", request_id=1, tc_id=77, txn_ttl_millis=1000)
        push = await driver.pushes.get()
        assert isinstance(push, Received)
        assert isinstance(push.body, pb.CommandNewTxnResponse)
        assert push.body.error == pb.TransactionCoordinatorNotFound
        assert push.body.txnid_most_bits == 77
        driver.send("END_TXN", request_id=2, txn_action=0, **ids(TxnId(3, METADATA_BIT | 9)))
        push = await driver.pushes.get()
        assert isinstance(push, Received)
        assert isinstance(push.body, pb.CommandEndTxnResponse)
        assert push.body.error == pb.TransactionNotFound
        assert (push.body.txnid_most_bits, push.body.txnid_least_bits) == (3, METADATA_BIT | 9)

    play(tmp_path, scene)


def test_an_end_is_carried_out_though_the_connection_is_gone(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        other = await connected(server)
        txn = await begun(other)
        outcome = Outcome(server, txn)
        other.send("END_TXN", request_id=1, txn_action=pb.COMMIT, **ids(txn))
        await other.close()
        assert await outcome.wait() == "COMMITTED"
        await ended(driver, txn)

    play(tmp_path, scene)


def test_a_transaction_that_nobody_ends_is_aborted(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        txn = await begun(driver, ttl=50)
        assert await Outcome(server, txn).wait() == "ABORTED"
        await ended(driver, txn, commit=False)
        assert await refused(ended(driver, txn)) == WireCode.INVALID_TXN_STATUS

    play(tmp_path, scene)


def test_outcomes_and_ids_outlive_a_restart(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            committed, left = await begun(driver), await begun(driver)
            await ended(driver, committed)
            await driver.close()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await ended(driver, committed)
            crossed = ended(driver, committed, commit=False)
            assert await refused(crossed) == WireCode.INVALID_TXN_STATUS
            await ended(driver, left)
            assert (await begun(driver)).least > left.least
            await driver.close()

    run(go())


def test_another_principal_is_told_that_there_is_none(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        server.context.authority = Roles()
        alice = await connected(server, auth_data=b"alice")
        bob = await connected(server, auth_data=b"bob")
        txn = await begun(alice)
        for other in (bob, driver):
            assert await refused(ended(other, txn)) == WireCode.TRANSACTION_NOT_FOUND
            add = other.request("ADD_PARTITION_TO_TXN", partitions=["a"], **ids(txn))
            assert await refused(add) == WireCode.TRANSACTION_NOT_FOUND
        await ended(alice, txn)
        for each in (alice, bob):
            await each.close()

    play(tmp_path, scene)


# --- groups


async def opened(driver: Driver, run_name: str = "run-1") -> int:
    answer = await driver.request("OPEN_GROUP", application=APP, generation="query", run=run_name)
    assert answer.tc_id == HOME
    return int(answer.epoch)


async def member(driver: Driver, epoch: int, sequence: int) -> TxnId:
    group = {"application": APP, "epoch": epoch, "sequence": sequence}
    return await begun(driver, HOME, group=group)


async def committed(driver: Driver, epoch: int, sequence: int, *txns: TxnId) -> bool:
    listed = [{"most_bits": txn.most, "least_bits": txn.least} for txn in txns]
    answer = await driver.request(
        "COMMIT_GROUP", application=APP, epoch=epoch, sequence=sequence, transactions=listed
    )
    return bool(answer.replayed)


def test_a_group_commits_its_winners(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        epoch = await opened(driver)
        won, lost = await member(driver, epoch, 0), await member(driver, epoch, 0)
        assert await refused(ended(driver, won)) == WireCode.NOT_ALLOWED
        assert not await committed(driver, epoch, 0, won)
        assert await committed(driver, epoch, 0, won)
        assert [await state(server, each) for each in (won, lost)] == ["COMMITTED", "ABORTED"]
        status = await driver.request("GROUP_STATUS", application=APP)
        assert (status.epoch, status.generation, status.run) == (epoch, "query", "run-1")
        assert status.committed_sequence == 0
        assert [(each.most_bits, each.least_bits) for each in status.committed] == [won]
        assert await opened(driver, "run-2") == epoch + 1
        again = await driver.request("OPEN_GROUP", application=APP, generation="query", run="run-2")
        assert (again.epoch, again.committed_sequence) == (epoch + 1, 0)
        for work in (opened(driver), member(driver, epoch, 1), committed(driver, epoch, 1)):
            assert await refused(work) == WireCode.PRODUCER_FENCED

    play(tmp_path, scene)


def test_a_group_outlives_a_restart(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            epoch = await opened(driver)
            won, lost = await member(driver, epoch, 0), await member(driver, epoch, 0)
            await committed(driver, epoch, 0, won)
            await driver.close()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            assert await opened(driver) == epoch
            assert await committed(driver, epoch, 0, won, lost)
            after = await member(driver, epoch, 1)
            assert not await committed(driver, epoch, 1, after)
            found = [await state(server, each) for each in (won, lost, after)]
            assert found == ["COMMITTED", "ABORTED", "COMMITTED"]
            await driver.close()

    run(go())


# --- what is left


async def _gone(server: Server, key: str) -> None:
    """Wait until a record is deleted."""
    async with within(f"{key} is deleted"), server.metadata.watch(key=key) as watch:
        while await server.metadata.get(key) is not None:
            await anext(watch)


def test_finished_transactions_leave_nothing_behind(tmp_path: Path) -> None:
    limits = LIMITS.override({"txn_retention_seconds": 0.05, "txn_collect_seconds": 0.05})

    async def go() -> None:
        async with serving(tmp_path, limits=limits) as server:
            driver = await connected(server)
            await driver.request("PRODUCER", topic="topic", producer_id=1)
            store = TxnStore(server.metadata)
            txns = []
            for number in range(3):
                txn = await begun(driver, ttl=300 if number == 2 else 60_000)
                message = build_message(b"x", sequence_id=number, **ids(txn))
                await driver.publish(1, number, message, **ids(txn))
                txns.append(txn)
            # One whose topic was deleted, and one that its topic does not know of.
            await place_pin(store, txns[0], "persistent://public/default/no", Position(1, 0), 1)
            topic = "persistent://public/default/topic"
            key, indexes = pin_key(txns[1], topic)
            late = encode(Pin(to_text(txns[1]), topic, 0, 0, epoch=0))
            await server.metadata.put(key, late, indexes=indexes)
            await ended(driver, txns[0])
            await ended(driver, txns[1], commit=False)
            for txn in txns:
                await _gone(server, f"/txn/id/{to_text(txn)}")
                assert await refused(ended(driver, txn)) == WireCode.TRANSACTION_NOT_FOUND
            assert await server.metadata.scan_keys("/txn/op") == []
            await driver.close()

    run(go())
