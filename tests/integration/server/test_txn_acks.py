"""ACK in a transaction over the wire: what is answered, and what sticks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from magnetar.errors import WireCode
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.wire.messages import TxnId
from tests.unit.server.serving import (
    connected,
    message,
    published,
    refused,
    run,
    serving,
    subscribed,
)

EXCLUSIVE, SHARED = 0, 1
COMMIT, ABORT = 0, 1


async def begun(driver: Driver) -> TxnId:
    answer = await driver.request("NEW_TXN", txn_ttl_millis=60_000, tc_id=0, scalable=True)
    return TxnId(answer.txnid_most_bits, answer.txnid_least_bits)


async def ended(driver: Driver, txn: TxnId, action: int) -> None:
    await driver.request("END_TXN", txn_action=action, **_ids(txn))


async def ack(
    driver: Driver, txn: TxnId, *ids: Any, cumulative: bool = False, ack_set: int = 0
) -> Any:
    fields = [{"ledgerId": each.ledgerId, "entryId": each.entryId} for each in ids]
    if ack_set:
        fields = [each | {"ack_set": [ack_set]} for each in fields]
    return await driver.request(
        "ACK", consumer_id=0, ack_type=int(cumulative), message_id=fields, **_ids(txn)
    )


def _ids(txn: TxnId) -> dict[str, int]:
    return {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}


async def bodies(driver: Driver, count: int) -> list[bytes]:
    return [(await message(driver)).headers_and_payload[-1:] for _ in range(count)]


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
def test_a_commit_sticks_and_an_abort_redelivers(tmp_path: Path, kind: int) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=kind)
            await published(driver, 3)
            ids = [(await message(driver)).body.message_id for _ in range(3)]
            kept, lost = await begun(driver), await begun(driver)
            answer = await ack(driver, kept, ids[0])
            assert TxnId(answer.txnid_most_bits, answer.txnid_least_bits) == kept
            await ack(driver, lost, ids[1], ids[2])
            await ended(driver, kept, COMMIT)
            await ended(driver, lost, ABORT)
            assert await bodies(driver, 2) == [b"1", b"2"]
            await driver.close()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=kind)
            assert await bodies(driver, 2) == [b"1", b"2"]
            await driver.close()

    run(scene())


def test_conflicts_and_ended_transactions_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver)
            await published(driver, 3)
            ids = [(await message(driver)).body.message_id for _ in range(3)]
            first, second = await begun(driver), await begun(driver)
            await ack(driver, first, ids[1], cumulative=True)
            for body, cumulative in ((ids[0], False), (ids[1], True), (ids[2], True)):
                code = await refused(ack(driver, second, body, cumulative=cumulative))
                assert code == WireCode.TRANSACTION_CONFLICT
            await ended(driver, first, COMMIT)
            for txn in (first, TxnId(0, 1 << 62 | 77), TxnId(3, 1 << 62)):
                assert await refused(ack(driver, txn, ids[2])) == WireCode.TRANSACTION_CONFLICT
            await ack(driver, second, ids[2], cumulative=True)
            two = await refused(ack(driver, second, ids[1], ids[2], cumulative=True))
            assert two == WireCode.NOT_ALLOWED
            await driver.close()

    run(scene())


def test_acks_of_open_transactions_are_held_over_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            await published(driver, 3)
            ids = [(await message(driver)).body.message_id for _ in range(3)]
            txn = await begun(driver)
            await ack(driver, txn, ids[0])
        await driver.lost()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            assert await bodies(driver, 2) == [b"1", b"2"]
            other = await begun(driver)
            assert await refused(ack(driver, other, ids[0])) == WireCode.TRANSACTION_CONFLICT
            await ended(driver, txn, ABORT)
            assert await bodies(driver, 1) == [b"0"]
            await driver.close()

    run(scene())


def test_messages_of_a_batch_over_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            await driver.request("PRODUCER", topic="topic", producer_id=9)
            await driver.publish(9, 0, build_message(b"x", num_messages_in_batch=3))
            entry = (await message(driver)).body.message_id
            txn = await begun(driver)
            await ack(driver, txn, entry, ack_set=0b011)
            await ended(driver, txn, COMMIT)
        await driver.lost()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            assert list((await message(driver)).body.ack_set) == [0b011]
            await driver.close()

    run(scene())


def test_a_non_persistent_topic_takes_no_transactions(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, topic="non-persistent://public/default/n")
            txn = await begun(driver)
            entry = type("Id", (), {"ledgerId": 0, "entryId": 0})
            assert await refused(ack(driver, txn, entry)) == WireCode.NOT_ALLOWED
            await driver.close()

    run(scene())


def test_many_acks_of_one_connection_are_all_answered(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            await published(driver, 50)
            ids = [(await message(driver)).body.message_id for _ in range(50)]
            txn = await begun(driver)
            await asyncio.gather(*(ack(driver, txn, each) for each in ids))
            await ended(driver, txn, COMMIT)
            stats = await driver.request("CONSUMER_STATS", consumer_id=0)
            assert stats.msgBacklog == 0
            await driver.close()

    run(scene())
