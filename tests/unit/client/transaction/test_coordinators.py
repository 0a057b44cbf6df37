"""How coordinators are found and asked, with a broker that answers as it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.client.transaction.coordinators import ASSIGN_TOPIC, CoordinatorClients
from magnetar.client.transaction.group import open_group
from magnetar.errors import (
    DeadlineExceeded,
    InvalidTxnStatus,
    NotAllowed,
    TransactionCoordinatorNotFound,
    WireCode,
)
from magnetar.wire.messages import TxnId
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.client.fake_broker import URL, FakeBroker, Peer, play

TXN = TxnId(1, 7)


def tell(peer: Peer, watch_id: int, *led: int, url: str = URL) -> None:
    assignments = [{"tc_id": each, "broker_service_url": url} for each in led]
    peer.say(
        "WATCH_TC_ASSIGNMENTS_UPDATE",
        watch_id=watch_id,
        snapshot={"parallelism": 4, "assignments": assignments},
    )


def with_watch(broker: FakeBroker, *led: int) -> None:
    """A broker that has a watch, and leads these."""
    broker.connected["feature_flags"] = {"supports_tc_metadata_discovery": True}
    broker.handlers["WATCH_TC_ASSIGNMENTS"] = lambda peer, body: tell(peer, body.watch_id, *led)
    answers(broker)


def with_topic(broker: FakeBroker, count: int) -> None:
    """A broker of the older kind."""
    broker.connected["feature_flags"] = {}

    def counted(peer: Peer, body: Any) -> None:
        assert body.topic == str(ASSIGN_TOPIC)
        kind = pb.CommandPartitionedTopicMetadataResponse.Success
        peer.say(
            "PARTITIONED_METADATA_RESPONSE",
            request_id=body.request_id,
            partitions=count,
            response=kind,
        )

    def found(peer: Peer, body: Any) -> None:
        peer.say(
            "LOOKUP_RESPONSE",
            request_id=body.request_id,
            response=pb.CommandLookupTopicResponse.Connect,
            brokerServiceUrl=URL,
            authoritative=True,
        )

    broker.handlers |= {"PARTITIONED_METADATA": counted, "LOOKUP": found}
    answers(broker)


def answers(broker: FakeBroker) -> None:
    def greeted(peer: Peer, body: Any) -> None:
        peer.say("TC_CLIENT_CONNECT_RESPONSE", request_id=body.request_id)

    def begun(peer: Peer, body: Any) -> None:
        peer.say(
            "NEW_TXN_RESPONSE",
            request_id=body.request_id,
            txnid_most_bits=body.tc_id,
            txnid_least_bits=5,
        )

    broker.handlers |= {
        "TC_CLIENT_CONNECT_REQUEST": greeted,
        "NEW_TXN": begun,
        "END_TXN": lambda peer, body: ended(peer, body),
    }


def ended(peer: Peer, body: Any, error: WireCode | None = None) -> None:
    fields: dict[str, Any] = {} if error is None else {"error": int(error), "message": "no"}
    peer.say(
        "END_TXN_RESPONSE",
        request_id=body.request_id,
        txnid_most_bits=body.txnid_most_bits,
        txnid_least_bits=body.txnid_least_bits,
        **fields,
    )


def test_the_watch_says_who_leads() -> None:
    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 1, 3)
        async with CoordinatorClients(broker.connections()) as coordinators:
            begun = [await coordinators.begin(60) for _ in range(4)]
            assert {each.most for each in begun} == {1, 3}, "those that are led take turns"
            await coordinators.ask(TXN, "END_TXN", txn_action=pb.COMMIT)
        greeted = broker.said("TC_CLIENT_CONNECT_REQUEST")
        assert sorted(each.tc_id for each in greeted) == [1, 3], "each is greeted once"
        assert all(each.scalable for each in greeted + broker.said("NEW_TXN"))
        assert [each.txn_ttl_millis for each in broker.said("NEW_TXN")] == [60_000] * 4
        await asyncio.sleep(1)
        assert broker.said("WATCH_TC_ASSIGNMENTS_CLOSE")

    play(story)


def test_older_brokers_have_a_topic_for_it() -> None:
    async def story(broker: FakeBroker) -> None:
        with_topic(broker, 2)
        async with CoordinatorClients(broker.connections()) as coordinators:
            assert {(await coordinators.begin(1)).most for _ in range(4)} == {0, 1}
        looked_up = {each.topic for each in broker.said("LOOKUP")}
        assert looked_up == {f"{ASSIGN_TOPIC}-partition-{number}" for number in range(2)}
        assert not any(each.scalable for each in broker.said("NEW_TXN"))
        assert len(broker.said("TC_CLIENT_CONNECT_REQUEST")) == 2

    play(story)


def test_without_transactions_that_is_said() -> None:
    async def story(broker: FakeBroker) -> None:
        with_topic(broker, 0)
        async with CoordinatorClients(broker.connections()) as coordinators:
            with pytest.raises(NotAllowed, match="no coordinators"):
                await coordinators.begin(60)
        async with CoordinatorClients(broker.connections(), scalable=True) as coordinators:
            with pytest.raises(NotAllowed, match="scalable"):
                await coordinators.begin(60)

    play(story)


def test_a_watch_that_is_refused_for_now_is_tried_again() -> None:
    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 1)
        refused = 0

        def watch(peer: Peer, body: Any) -> None:
            nonlocal refused
            refused += 1
            if refused < 3:
                code = int(WireCode.SERVICE_NOT_READY)
                peer.say(
                    "WATCH_TC_ASSIGNMENTS_UPDATE", watch_id=body.watch_id, error=code, message="no"
                )
            else:
                tell(peer, body.watch_id, 1)

        broker.handlers["WATCH_TC_ASSIGNMENTS"] = watch
        async with CoordinatorClients(broker.connections()) as coordinators:
            assert (await coordinators.begin(60)).most == 1

    play(story)


def test_requests_are_repeated_where_the_leader_is() -> None:
    """Refused by who does not lead it, cut off, and at last moved away from who says nothing."""

    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 1)
        asked = 0

        def end(peer: Peer, body: Any) -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                ended(peer, body, WireCode.TRANSACTION_COORDINATOR_NOT_FOUND)
            elif asked == 2:
                peer.transport.close()
            elif asked == 3:
                watch_id = broker.said("WATCH_TC_ASSIGNMENTS")[-1].watch_id
                asyncio.get_running_loop().call_later(1, tell, peer, watch_id)
                asyncio.get_running_loop().call_later(2, tell, peer, watch_id, 1)
            else:
                ended(peer, body)

        broker.handlers["END_TXN"] = end
        async with CoordinatorClients(broker.connections()) as coordinators:
            begun = asyncio.get_running_loop().time()
            await coordinators.ask(TXN, "END_TXN", txn_action=pb.COMMIT)
            assert asked == 4
            assert asyncio.get_running_loop().time() - begun < 10
        assert len(broker.said("TC_CLIENT_CONNECT_REQUEST")) == 4, "greeted anew each time"

    play(story)


def test_other_refusals_are_final_and_silence_has_an_end() -> None:
    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 1)
        refuse = WireCode.INVALID_TXN_STATUS
        broker.handlers["END_TXN"] = lambda peer, body: ended(peer, body, refuse)
        async with CoordinatorClients(broker.connections(operation_timeout=5.0)) as coordinators:
            with pytest.raises(InvalidTxnStatus):
                await coordinators.ask(TXN, "END_TXN", txn_action=pb.COMMIT)
            assert len(broker.said("END_TXN")) == 1
            with pytest.raises(DeadlineExceeded, match="nobody leads coordinator 3"):
                await coordinators.ask(TxnId(3, 1), "END_TXN", txn_action=pb.COMMIT)
            broker.handlers["END_TXN"] = lambda _peer, _body: None
            with pytest.raises(DeadlineExceeded):
                await coordinators.ask(TXN, "END_TXN", txn_action=pb.COMMIT)

    play(story)


def test_groups_need_a_server_that_has_them() -> None:
    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 2)
        async with CoordinatorClients(broker.connections()) as coordinators:
            with pytest.raises(NotAllowed, match="no transaction groups"):
                await coordinators.ask_group(None, "GROUP_STATUS", application="a")
        assert not broker.said("GROUP_STATUS")

    play(story)


def test_any_broker_says_which_coordinator_a_group_has() -> None:
    async def story(broker: FakeBroker) -> None:
        with_watch(broker, 2)
        flags = {"supports_tc_metadata_discovery": True, "supports_transaction_groups": True}
        broker.connected["feature_flags"] = flags

        def opened(peer: Peer, body: Any) -> None:
            fields: dict[str, Any] = {"epoch": 3, "committed_sequence": 4}
            if not broker.said("TC_CLIENT_CONNECT_REQUEST"):
                code = int(TransactionCoordinatorNotFound.wire_code)
                fields = {"error": code, "message": "not here"}
            peer.say("OPEN_GROUP_RESPONSE", request_id=body.request_id, tc_id=2, **fields)

        broker.handlers["OPEN_GROUP"] = opened
        async with CoordinatorClients(broker.connections()) as coordinators:
            group = await open_group(coordinators, "a", "g", "r", lambda *_: pytest.fail("no"))
            assert group.ticket == ("a", 3, 2)
            assert group.committed_sequence == 4
        assert [each.tc_id for each in broker.said("TC_CLIENT_CONNECT_REQUEST")] == [2]

    play(story)
