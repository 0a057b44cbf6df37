"""Rules of transactions through the wire: ends, lost receipts, aborted entries, races, no leak."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from magnetar.broker.subscription import Subscription
from magnetar.broker.topic import Topic
from magnetar.broker.topics import CARE_SECONDS
from magnetar.model.names import TopicName
from tests.server.scalable_stage import until
from tests.server.txn_stage import (
    T,
    TxnStage,
    act,
)

of_both_clients = pytest.mark.parametrize("v4", [True, False])


def loaded(stage: TxnStage, topic: str = T) -> Topic:
    found = stage.server.topics.loaded[TopicName.parse(topic)]
    assert isinstance(found, Topic)
    return found


# --- aborted entries count as acknowledged


async def aborted_behind_all(stage: TxnStage) -> None:
    """Three subscriptions that have acknowledged everything but what is aborted then."""
    client = await stage.client()
    sender = await client.sender()
    readers = {}
    for name, permits in (("idle", 3), ("out of permits", 3), ("waiting", 1000)):
        readers[name] = await client.reader(subscription=name, permits=permits)
    for number in range(3):
        await sender.send(f"{number}")
    for reader in readers.values():
        await reader.ack(*await reader.take(3))
    await readers["idle"].close()
    txn = await client.begin()
    for number in range(9):
        await sender.send(f"aborted {number}", txn)
    await client.abort(txn)
    await stage.settled()
    await sender.send("sentinel")


def test_aborted_entries_count_as_acknowledged_and_trimming_goes_on() -> None:
    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        topic = loaded(stage)

        def trimmed() -> bool:
            return topic.ledger.entries <= 3  # a ledger may get one more when it is full

        await until(trimmed, 3 * CARE_SECONDS, "what is aborted is trimmed")
        for subscription in topic.subscriptions.values():
            assert subscription.backlog() == 1

    act(story, managed_ledger_ledger_entries=2)


def test_aborted_entries_count_as_acknowledged_after_a_kill_too() -> None:
    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        await stage.killed()
        await (await stage.client()).sender()
        topic = loaded(stage)

        def passed() -> bool:
            return {each.backlog() for each in topic.subscriptions.values()} == {1}

        await until(passed, 10, "what is aborted is passed")

    act(story)


def test_without_that_rule_an_idle_subscription_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(Subscription, "pass_aborted", nothing)

    async def story(stage: TxnStage) -> None:
        await aborted_behind_all(stage)
        await asyncio.sleep(3 * CARE_SECONDS)
        assert loaded(stage).ledger.entries > 9

    act(story, managed_ledger_ledger_entries=2)
