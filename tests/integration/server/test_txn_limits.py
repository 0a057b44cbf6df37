"""What one client, one transaction or one subscription may have open: refusals over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.limits import within
from magnetar.broker.publish.producer import Producer
from magnetar.errors import MagnetarError, WireCode
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.acks import ack_store
from magnetar.txn.outcomes import Outcomes
from magnetar.txn.records import OPS
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId
from tests.integration.server.test_transactions import begun, ended, ids
from tests.integration.server.test_txn_acks import ack, bodies
from tests.unit.server.serving import (
    LIMITS,
    connected,
    message,
    published,
    run,
    serving,
    subscribed,
)

SHARED = 1


def play(
    folder: Path, scene: Callable[[Server, Driver], Awaitable[None]], **limits: object
) -> None:
    async def go() -> None:
        async with serving(folder, limits=LIMITS.override(limits)) as server:
            driver = await connected(server)
            await scene(server, driver)
            await driver.close()

    run(go())


async def refusal(work: Awaitable[object]) -> tuple[WireCode | None, str]:
    """The code and the text of a refusal."""
    try:
        await work
    except MagnetarError as error:
        return error.wire_code, str(error)
    raise AssertionError("it was not refused")


async def send(driver: Driver, producer_id: int, number: int, txn: TxnId) -> None:
    entry = build_message(b"%d" % number, sequence_id=number, **ids(txn))
    await driver.publish(producer_id, number, entry, **ids(txn))


async def delivered(driver: Driver, count: int) -> list[Any]:
    await subscribed(driver, subType=SHARED)
    await published(driver, count)
    return [(await message(driver)).body.message_id for _ in range(count)]


def test_open_transactions_of_an_owner(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        txns = [await begun(driver, number) for number in range(3)]
        code, text = await refusal(begun(driver, 3))
        assert code == WireCode.TOO_MANY_REQUESTS
        assert "3 transactions" in text
        assert "txn_open_per_owner_max" in text
        await ended(driver, txns[1])
        await begun(driver, 3)

    play(tmp_path, scene, txn_open_per_owner_max=3)


def test_entries_acknowledged_by_open_transactions(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        places = await delivered(driver, 5)
        first, second = await begun(driver), await begun(driver)
        await ack(driver, first, *places[:3])
        code, text = await refusal(ack(driver, second, places[3], places[4]))
        assert code == WireCode.TOO_MANY_REQUESTS
        assert "txn_pending_acks_max" in text
        await ack(driver, second, places[3])
        await ended(driver, first)
        await ack(driver, second, places[4])
        await ended(driver, second)

    play(tmp_path, scene, txn_pending_acks_max=4)


def test_acknowledgements_of_one_transaction(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        places = await delivered(driver, 4)
        txn, other = await begun(driver), await begun(driver)
        await ack(driver, txn, places[0])
        await ack(driver, txn, places[1])
        code, text = await refusal(ack(driver, txn, places[2]))
        assert code == WireCode.TOO_MANY_REQUESTS
        assert "txn_ack_records_max" in text
        await ack(driver, other, places[2], places[3])
        await ended(driver, txn)
        await ended(driver, other)

    play(tmp_path, scene, txn_ack_records_max=2)


def test_topics_and_subscriptions_of_one_transaction(tmp_path: Path) -> None:
    async def scene(server: Server, driver: Driver) -> None:
        places = await delivered(driver, 1)
        txn = await begun(driver)
        for number in range(3):
            await driver.request("PRODUCER", topic=f"topic-{number}", producer_id=number)
        await send(driver, 0, 0, txn)
        await send(driver, 1, 0, txn)
        code, text = await refusal(send(driver, 2, 0, txn))
        assert code == WireCode.NOT_ALLOWED
        assert "txn_participants_max" in text
        code, text = await refusal(ack(driver, txn, places[0]))
        assert code == WireCode.NOT_ALLOWED
        assert "txn_participants_max" in text
        await send(driver, 1, 1, txn)
        await ended(driver, txn)
        await send(driver, 2, 1, await begun(driver))

    play(tmp_path, scene, txn_participants_max=2)


def test_an_acknowledgement_that_needs_several_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_store, "RECORD_BYTES", 100)  # two entries

    async def scene() -> None:
        async with serving(tmp_path) as server:
            driver = await connected(server)
            places = await delivered(driver, 8)
            kept, lost = await begun(driver), await begun(driver)
            await ack(driver, kept, *places[:5])
            await ack(driver, lost, *places[5:])
            assert len(await server.metadata.scan_keys(OPS)) == 5
            await ended(driver, kept)
            await driver.close()
        async with serving(tmp_path) as server:
            driver = await connected(server)
            await subscribed(driver, subType=SHARED)
            await ended(driver, lost, commit=False)
            assert sorted(await bodies(driver, 3)) == [b"5", b"6", b"7"]
            await driver.close()

    run(scene())


def test_sends_that_wait_for_a_pin_are_as_few_as_others_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`connection_pending_publishes` bounds them: then the connection is read no more."""
    sent, most = 200, 10
    stuck = asyncio.Event()
    state = TxnStore.state

    async def slow(self: TxnStore, txn: TxnId) -> Any:
        await stuck.wait()
        return await state(self, txn)

    async def scene(server: Server, driver: Driver) -> None:
        await driver.request("PRODUCER", topic="topic", producer_id=1)
        txn = await begun(driver)
        # As if it were begun at another broker: its state has to be read before its first message.
        monkeypatch.setattr(Outcomes, "is_open_here", lambda *_: False)
        monkeypatch.setattr(TxnStore, "state", slow)
        for number in range(sent):
            entry = build_message(bytes(20_000), sequence_id=number, **ids(txn))
            driver.send("SEND", entry, producer_id=1, sequence_id=number, **ids(txn))
        (session,) = server.context.sessions
        async with within("the session stops reading"):
            while session._is_read:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0)
        producer = session.producers[1].producer
        assert isinstance(producer, Producer)
        assert most <= producer.held <= most + 256 * 1024 // 20_000 + 1
        stuck.set()
        for _ in range(sent):
            await driver.pushes.get()
        await ended(driver, txn)

    play(tmp_path, scene, connection_pending_publishes=most)
