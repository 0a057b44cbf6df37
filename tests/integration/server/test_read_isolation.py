"""Subscriptions that read what is not committed, through the wire: theirs, and no other one's."""

from __future__ import annotations

from typing import Any

import pytest

from magnetar.broker.topic.subscriptions import TopicSubscriptions
from magnetar.errors import WireCode
from magnetar.model.isolation import ISOLATION_PROPERTY, ReadIsolation
from magnetar.model.names import TopicName
from magnetar.scalable.records import DrainedRecord
from magnetar.wire.messages import TxnId
from tests.integration.server.scalable_stage import TOPIC, until
from tests.integration.server.txn_stage import (
    SHARED,
    T,
    TxnClient,
    TxnStage,
    act,
    begun,
    refusal,
)

UNCOMMITTED = [{"key": ISOLATION_PROPERTY, "value": "read_uncommitted"}]
COMMITTED = [{"key": ISOLATION_PROPERTY, "value": "read_committed"}]


def asking(place: str, asked: list[dict[str, str]]) -> dict[str, Any]:
    return {place: asked}


async def mixed(client: TxnClient, topic: str = T) -> TxnId:
    """Plain, aborted, open and plain again; the open transaction."""
    sender = await client.sender(topic)
    gone, left = await client.begin(), await client.begin()
    await sender.send("plain")
    await sender.send("aborted", gone)
    await client.abort(gone)
    await sender.send("open", left)
    await sender.send("behind")
    return left


ALL = ["plain", "aborted", "open", "behind"]


def test_without_its_own_wake_up_it_would_wait_for_the_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TopicSubscriptions, "wake_uncommitted", lambda _: None)

    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        dirty = await client.reader(subscription="dirty", metadata=UNCOMMITTED)
        sender, txn = await client.sender(), await client.begin()
        await sender.send("first")
        await dirty.get()
        await sender.send("open", txn)
        await dirty.nothing()
        await client.commit(txn)
        assert await dirty.texts(1) == ["open"]

    act(story)


@pytest.mark.parametrize("place", ["subscription_properties", "metadata"])
def test_it_gets_all_that_is_durable_and_no_other_one_does(place: str) -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        dirty = await client.reader(subscription="dirty", **asking(place, UNCOMMITTED))
        clean = await client.reader(subscription="clean")
        left = await mixed(client)
        assert await dirty.texts(4) == ALL
        assert await clean.texts(1) == ["plain"]
        await clean.nothing()
        await client.commit(left)
        assert await clean.texts(2) == ["open", "behind"]
        await dirty.nothing()

    act(story)


def test_backlog_and_last_message_count_what_it_sees() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        dirty = await client.reader(
            subscription="dirty", permits=0, subscription_properties=UNCOMMITTED
        )
        clean = await client.reader(subscription="clean", permits=0)
        left = await mixed(client)
        assert await dirty.backlog() == 4
        stats = stage.server.topics.loaded[TopicName.parse(T)].stats().subscriptions
        assert stats["dirty"].read_isolation == ReadIsolation.UNCOMMITTED
        assert stats["clean"].read_isolation == ReadIsolation.COMMITTED
        assert stats["dirty"].msg_backlog == 4
        assert await clean.last_id() < await dirty.last_id()
        await client.commit(left)
        assert await clean.last_id() == await dirty.last_id()

    act(story)


def test_it_stays_so_over_a_kill_and_waits_for_recovery() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        await client.reader(subscription="dirty", subscription_properties=UNCOMMITTED)
        await mixed(client)
        await stage.killed()
        client = await stage.client()
        dirty = await client.reader(subscription="dirty")
        assert await dirty.texts(4) == ALL
        clean = await client.reader(subscription="clean")
        assert await clean.texts(1) == ["plain"]
        await clean.nothing()

    act(story)


def test_a_reader_asks_for_it_too() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        await mixed(client)
        earliest = {"ledgerId": 2**64 - 1, "entryId": 2**64 - 1}
        for asked, expected in ((UNCOMMITTED, ALL), (COMMITTED, ["plain"]), ([], ["plain"])):
            reader = await client.reader(
                subscription="r", durable=False, start_message_id=earliest, metadata=asked
            )
            assert await reader.texts(len(expected)) == expected
            await reader.nothing()
            await reader.close()

    act(story)


def test_at_latest_it_begins_behind_what_is_open() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        left = await mixed(client)
        dirty = await client.reader(
            subscription="dirty", initialPosition=0, subscription_properties=UNCOMMITTED
        )
        clean = await client.reader(subscription="clean", initialPosition=0)
        await client.commit(left)
        assert await clean.texts(2) == ["open", "behind"]
        sender = await client.sender()
        await sender.send("new")
        assert await dirty.texts(1) == ["new"]

    act(story)


def test_transactions_acknowledge_on_it() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        dirty = await client.reader(
            subscription="dirty", kind=SHARED, subscription_properties=UNCOMMITTED
        )
        left = await mixed(client)
        plain, aborted, opened, behind = await dirty.take(4)
        kept, lost = await client.begin(), await client.begin()
        await dirty.ack(plain, aborted, opened, txn=kept)
        await dirty.ack(behind, txn=lost)
        assert await refusal(dirty.ack(opened, txn=lost)) == WireCode.TRANSACTION_CONFLICT
        await client.commit(kept)
        await client.abort(lost)
        assert [each.text for each in await dirty.take(1)] == ["behind"]
        await client.abort(left)
        await dirty.nothing()
        await stage.settled()
        await stage.killed()
        client = await stage.client()
        dirty = await client.reader(subscription="dirty", kind=SHARED)
        assert await dirty.texts(1) == ["behind"]

    act(story)


def test_unknown_values_and_other_isolations_are_refused() -> None:
    async def story(stage: TxnStage) -> None:
        client = await stage.client()
        for value in ("READ_UNCOMMITTED", "", "snapshot"):
            asked = [{"key": ISOLATION_PROPERTY, "value": value}]
            for place in ("subscription_properties", "metadata"):
                work = client.reader(subscription="new", **asking(place, asked))
                assert await refusal(work) == WireCode.NOT_ALLOWED
        both = client.reader(
            subscription="new", subscription_properties=UNCOMMITTED, metadata=COMMITTED
        )
        assert await refusal(both) == WireCode.NOT_ALLOWED
        loaded = stage.server.topics.loaded.get(TopicName.parse(T))
        assert loaded is None or "new" not in loaded.subscriptions
        await client.reader(subscription="dirty", kind=SHARED, metadata=UNCOMMITTED)
        await client.reader(subscription="clean", kind=SHARED)
        for name, asked in (("dirty", COMMITTED), ("clean", UNCOMMITTED)):
            work = client.reader(subscription=name, kind=SHARED, metadata=asked)
            assert await refusal(work) == WireCode.NOT_ALLOWED
        for name, asked in (("dirty", UNCOMMITTED), ("clean", COMMITTED), ("dirty", [])):
            await client.reader(subscription=name, kind=SHARED, metadata=asked)

    act(story)


def test_a_subscription_of_a_scalable_topic_has_it_on_every_segment() -> None:
    async def story(stage: TxnStage) -> None:
        await stage.stage.create()
        properties = {ISOLATION_PROPERTY: "read_uncommitted"}
        await stage.stage.ask(
            lambda scalable: scalable.create_subscription(TOPIC, "dirty", "STREAM", properties)
        )
        client = await stage.client()
        txn = await client.begin()
        (parent,) = await stage.segments()
        await (await client.sender(parent)).send("in the parent", txn)
        await stage.stage.split(0)
        child = await stage.segment("k")
        await (await client.sender(child)).send("in a child", txn)
        for segment, text in ((parent, "in the parent"), (child, "in a child")):
            reader = await client.reader(segment, "dirty")
            got = await reader.get()
            assert got.text == text
            await reader.ack(got)
            await (await client.reader(segment, "clean")).nothing()

        async def drained() -> bool:
            found = await stage.stage.ask(
                lambda scalable: scalable.store.all(TOPIC, "drained", DrainedRecord)
            )
            return (0, "dirty") in [(each.segment_id, each.group) for each in found]

        await client.abort(txn)
        await until(drained, 30, "the parent is drained")

    act(story)


def test_markers_are_for_nobody_and_in_no_backlog() -> None:
    """Of transactions of v4 clients: behind an open one too."""

    async def story(stage: TxnStage) -> None:
        client = await stage.client(v4=True)
        dirty = await client.reader(subscription="dirty", metadata=UNCOMMITTED)
        clean = await client.reader(subscription="clean", permits=0)
        sender = await client.sender()
        await sender.send("plain")
        opened, committed = await begun(client), await begun(client)
        await sender.send("open", opened)
        last = await sender.send("committed", committed)
        await client.commit(committed)
        assert await dirty.texts(3) == ["plain", "open", "committed"]
        await dirty.nothing()
        assert await dirty.last_id() == last
        assert (await dirty.backlog(), await clean.backlog()) == (3, 1)
        await client.commit(opened)
        await dirty.nothing()
        assert (await dirty.backlog(), await clean.backlog()) == (3, 3)

    act(story, kind="markers")
