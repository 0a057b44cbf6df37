"""Regular topics with legacy transactions become scalable: all of them end right afterwards.

The ends come through the seam at which coordinators reach topics, so that they can come at any
moment: before the migration, after it, after a restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.limits import PATIENCE_S
from harness.simulation.scalable.clients import QueueConsumer
from harness.simulation.scalable.links import Links
from harness.simulation.scalable.producer import ScalableProducer
from magnetar.broker.topic.legacy_txn_ends import LegacyTxnEnds
from magnetar.broker.topic.topic import Topic
from magnetar.errors import RequestError
from magnetar.model.names import TopicName
from magnetar.server.app import Server
from magnetar.testing.virtual.driver import Driver, build_message
from magnetar.txn.legacy.coordinators import LegacyCoordinators
from magnetar.wire.messages import TxnId
from tests.integration.server.scalable_stage import nothing_comes, read, send
from tests.unit.server.serving import connected, message, run, serving, subscribed

REGULAR = "persistent://public/default/orders"
SCALABLE = "topic://public/default/orders"
(
    COMMITTED_BEFORE,
    ABORTED_BEFORE,
    COMMITTED_AFTER,
    ABORTED_AFTER,
    ACKS_COMMITTED,
    ACKS_ABORTED,
) = (TxnId(3, number) for number in range(6))

Scene = Callable[[Server], Awaitable[None]]


def play(folder: Path, *scenes: Scene) -> None:
    """Each on a server of its own, one after the other, over the same folder."""

    async def go() -> None:
        for scene in scenes:
            async with serving(folder) as server:
                await scene(server)

    run(go())


async def end(
    server: Server, txn: TxnId, *, commit: bool, topic: str = REGULAR, subscription: str = ""
) -> None:
    ends = LegacyTxnEnds(server.topics)
    if subscription:
        await ends.end_on_subscription(topic, subscription, txn, commit=commit, low_watermark=-1)
    else:
        await ends.end_on_topic(topic, txn, commit=commit, low_watermark=-1)


@pytest.fixture(autouse=True)
def any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests tell the ends themselves: no coordinator knows of their transactions."""
    monkeypatch.setattr(LegacyCoordinators, "takes_part", lambda *_: True)


async def publish(driver: Driver, sequence: int, txn: TxnId | None = None) -> None:
    fields: dict[str, Any] = {}
    if txn is not None:
        fields = {"txnid_most_bits": txn.most, "txnid_least_bits": txn.least}
    body = build_message(b"%d" % sequence, sequence_id=sequence, key="k", **fields)
    await driver.publish(1, sequence, body, **fields)


async def ack(driver: Driver, found: Any, txn: TxnId) -> None:
    at = {"ledgerId": found.ledgerId, "entryId": found.entryId}
    await driver.request(
        "ACK",
        consumer_id=1,
        ack_type=0,
        message_id=[at],
        txnid_most_bits=txn.most,
        txnid_least_bits=txn.least,
    )


async def migrate(server: Server) -> None:
    await server.context.scalable.migrate(TopicName.parse(REGULAR), force=True)


async def filled(server: Server, topic: str = REGULAR) -> None:
    """Messages 0 to 9, of which 0 and 1 are acknowledged in transactions."""
    driver = await connected(server)
    await subscribed(driver, 1, topic=topic, subscription="s", subType=1)
    await driver.request("PRODUCER", topic=topic, producer_id=1)
    for sequence in range(2):
        await publish(driver, sequence)
    await ack(driver, (await message(driver)).body.message_id, ACKS_COMMITTED)
    await ack(driver, (await message(driver)).body.message_id, ACKS_ABORTED)
    await publish(driver, 2, COMMITTED_BEFORE)
    await publish(driver, 3, ABORTED_BEFORE)
    await publish(driver, 4, COMMITTED_AFTER)
    await publish(driver, 5)
    await publish(driver, 6, ABORTED_AFTER)
    await publish(driver, 7, COMMITTED_AFTER)
    await publish(driver, 8, ABORTED_AFTER)
    await publish(driver, 9)
    await end(server, COMMITTED_BEFORE, commit=True, topic=topic)
    await end(server, ABORTED_BEFORE, commit=False, topic=topic)
    await driver.close()


async def ended(server: Server, topic: str = REGULAR) -> None:
    await end(server, COMMITTED_AFTER, commit=True, topic=topic)
    await end(server, ABORTED_AFTER, commit=False, topic=topic)
    await end(server, ACKS_COMMITTED, commit=True, topic=topic, subscription="s")
    await end(server, ACKS_ABORTED, commit=False, topic=topic, subscription="s")


async def check(server: Server, *, first: int = 0) -> None:
    """What subscribers of the scalable topic get of messages 0 to 9, and of those from 10 on."""
    async with (
        Links(server.service_url, wait_s=PATIENCE_S) as links,
        ScalableProducer(links, SCALABLE, "p", first_sequence=10) as producer,
        QueueConsumer(links, SCALABLE, "s", "c") as old,
        QueueConsumer(links, SCALABLE, "new", "c") as new,
    ):
        await send(producer, 5)
        later = set(range(10, 15))
        found = [each.sequence for each in await read(old, 6 + 5)]
        assert set(found) == {1, 2, 4, 5, 7, 9} | later
        found = [each.sequence for each in await read(new, 7 + 5)]
        assert set(found) == {0, 1, 2, 4, 5, 7, 9} | later
        await nothing_comes(old, 0.2)
        await nothing_comes(new, 0.2)


def test_all_end_after_the_migration(tmp_path: Path) -> None:
    async def scene(server: Server) -> None:
        await filled(server)
        await migrate(server)
        await ended(server)
        await check(server)

    play(tmp_path, scene)


@pytest.mark.parametrize("restart", [False, True])
def test_errors_after_a_migration_speak_of_the_migration(tmp_path: Path, restart: bool) -> None:
    said = f"{REGULAR} was migrated to {SCALABLE}"

    async def before(server: Server) -> None:
        driver = await connected(server)
        await driver.request("PRODUCER", topic=REGULAR, producer_id=1)
        await publish(driver, 0)
        await migrate(server)
        await driver.close()

    async def after(server: Server) -> None:
        driver = await connected(server)
        with pytest.raises(RequestError, match=said):
            await driver.request("PRODUCER", topic=REGULAR, producer_id=1)
        # What there never was a regular topic of: its name is taken all the same.
        other = f"{REGULAR}-partition-7"
        with pytest.raises(RequestError, match=f"there is no regular topic {other}: {SCALABLE}"):
            await driver.request("PRODUCER", topic=other, producer_id=2)

    async def both(server: Server) -> None:
        await before(server)
        await after(server)

    play(tmp_path, *((before, after) if restart else (both,)))


def test_all_end_after_the_migration_and_a_restart(tmp_path: Path) -> None:
    async def before(server: Server) -> None:
        await filled(server)
        await migrate(server)

    async def after(server: Server) -> None:
        await ended(server)
        await check(server)

    play(tmp_path, before, after)


def test_what_ended_after_the_migration_stays_so_after_a_restart(tmp_path: Path) -> None:
    async def before(server: Server) -> None:
        await filled(server)
        await migrate(server)
        await ended(server)

    play(tmp_path, before, check)


def test_consumers_that_wait_at_the_migration_see_the_ends(tmp_path: Path) -> None:
    async def scene(server: Server) -> None:
        await filled(server)
        await migrate(server)
        async with (
            Links(server.service_url, wait_s=PATIENCE_S) as links,
            QueueConsumer(links, SCALABLE, "s", "c") as consumer,
        ):
            assert [each.sequence for each in await read(consumer, 1)] == [2]
            await nothing_comes(consumer, 0.2)
            await ended(server)
            found = {each.sequence for each in await read(consumer, 5)}
            assert found == {1, 4, 5, 7, 9}
            await nothing_comes(consumer, 0.2)

    play(tmp_path, scene)


def test_partitions_are_migrated_with_their_transactions(tmp_path: Path) -> None:
    partition = f"{REGULAR}-partition-1"

    async def before(server: Server) -> None:
        await server.topics.create_partitioned(TopicName.parse(REGULAR), 2)
        await filled(server, partition)
        await migrate(server)

    async def after(server: Server) -> None:
        await ended(server, partition)
        await check(server)

    play(tmp_path, before, after)


@pytest.mark.parametrize("restart", [False, True])
def test_a_topic_that_stays_regular(tmp_path: Path, restart: bool) -> None:
    async def after(server: Server) -> None:
        await ended(server)
        driver = await connected(server)
        await subscribed(driver, 1, topic=REGULAR, subscription="s", subType=1)
        found = [int((await message(driver)).headers_and_payload[-1:]) for _ in range(6)]
        assert sorted(found) == [1, 2, 4, 5, 7, 9]
        last = await driver.request("GET_LAST_MESSAGE_ID", consumer_id=1)
        topic = server.topics.loaded[TopicName.parse(REGULAR)]
        assert isinstance(topic, Topic)
        assert last.last_message_id.entryId < topic.ledger.last_position().entry_id or restart
        assert len(driver.pushes) == 0
        await driver.close()

    async def both(server: Server) -> None:
        await filled(server)
        await after(server)

    play(tmp_path, *([filled, after] if restart else [both]))
