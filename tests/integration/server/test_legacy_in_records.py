"""Legacy transactions in namespaces that keep them in records, through the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnetar.broker.policy.policies import TransactionKind
from magnetar.broker.topic.topic import Topic
from magnetar.errors import ServiceNotReady, WireCode
from magnetar.model.names import NamespaceName, TopicName
from magnetar.scalable.records import segment_topic
from magnetar.server.app import Server
from magnetar.txn.ids import is_metadata
from magnetar.txn.records import OPS
from magnetar.txn.store import TxnStore
from magnetar.wire.messages import TxnId
from tests.integration.server.legacy_stage import V4, A, Decided, play
from tests.unit.server.serving import refused

KEPT = "persistent://public/kept/t"
KEPT_NAMESPACE = NamespaceName("public", "kept")
DEFAULT = NamespaceName("public", "default")


async def keep(server: Server, namespace: NamespaceName, kind: TransactionKind) -> None:
    await server.namespaces.create(namespace)
    await server.topics.change_namespace(
        namespace, lambda policies: msgspec.structs.replace(policies, transaction_kind=kind)
    )


async def scalable_segment(server: Server, name: str) -> str:
    """The one segment of a new scalable topic."""
    topic = TopicName.parse(name)
    await server.context.scalable.create(topic, 1)
    record = await server.context.scalable.get(topic)
    assert record.layout is not None
    (segment,) = record.layout.layout().segments.values()
    return str(segment_topic(topic, segment))


async def entries(server: Server, topic: str) -> int:
    found = await server.topics.get(TopicName.parse(topic))
    assert isinstance(found, Topic)
    return found.ledger.entries


@pytest.mark.parametrize("commit", [True, False])
def test_no_marker_is_written_and_the_end_is_the_same(tmp_path: Path, commit: bool) -> None:
    async def scene(server: Server, client: V4) -> None:
        await keep(server, KEPT_NAMESPACE, "metadata")
        await client.subscribe(KEPT, subType=1)
        await client.publish(KEPT, b"#in")
        _, where = await client.receive()
        txn = await client.begin()
        assert not is_metadata(txn)
        await client.publish(KEPT, b"#out", txn)
        await client.ack(KEPT, where, txn)
        await client.sees_nothing()
        assert len(await server.metadata.scan_keys(OPS)) == 2
        await client.end(txn, commit=commit)
        for _ in range(2):
            await client.end(txn, commit=commit)
            crossed = client.end(txn, commit=not commit)
            assert await refused(crossed) == WireCode.INVALID_TXN_STATUS
        assert await client.payloads(1) == [b"out" if commit else b"in"]
        await client.sees_nothing()
        assert await entries(server, KEPT) == 2
        assert await TxnStore(server.metadata).state(txn) == ("COMMITTED" if commit else "ABORTED")

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(KEPT, "new")
        assert await client.payloads(1 + commit) == [b"in", b"out"][: 1 + commit]
        await client.sees_nothing()

    play(tmp_path, scene, again)


def test_one_over_both_ways_and_a_segment(tmp_path: Path) -> None:
    """A restart between the decision and its end finds all three of them."""
    segments: list[str] = []

    async def scene(server: Server, client: V4) -> None:
        await keep(server, KEPT_NAMESPACE, "metadata")
        segments.append(await scalable_segment(server, "topic://public/kept/x"))
        txn = await client.begin()
        for topic in (A, KEPT, segments[0]):
            await client.publish(topic, b"#1", txn)

        async def not_now(*given: Any, **named: Any) -> None:
            raise ServiceNotReady("another broker has it")

        legacy = server.coordinators.legacy
        legacy.participants.end_on_topic = not_now  # type: ignore[method-assign]
        decided = Decided(server, txn)
        asked = asyncio.create_task(client.end(txn))
        assert await decided.wait() == "COMMITTED"
        asked.cancel()

    async def again(server: Server, client: V4) -> None:
        for topic in (A, KEPT, segments[0]):
            await client.subscribe(topic)
        assert await client.payloads(3) == [b"1"] * 3
        await client.end(TxnId(0, 1))
        await client.sees_nothing()

    play(tmp_path, scene, again)


def test_segments_take_none_by_markers(tmp_path: Path) -> None:
    async def scene(server: Server, client: V4) -> None:
        segment = await scalable_segment(server, "topic://public/default/x")
        txn = await client.begin()
        assert await refused(client.add(txn, segment)) == WireCode.NOT_ALLOWED
        await client.publish(segment, b"#plain")
        await client.subscribe(segment)
        _, where = await client.receive()
        assert await refused(client.send(segment, b"#1", txn)) == WireCode.NOT_ALLOWED
        assert await refused(client.ack_only(segment, where, txn)) == WireCode.TRANSACTION_CONFLICT

    play(tmp_path, scene)


@pytest.mark.parametrize("kinds", [("metadata", "markers"), ("markers", "metadata")])
def test_the_policy_is_switched_while_transactions_are_open(
    tmp_path: Path, kinds: tuple[TransactionKind, TransactionKind]
) -> None:
    async def scene(server: Server, client: V4) -> None:
        await client.subscribe(A)
        made = []
        for kind in kinds:
            await keep(server, DEFAULT, kind)
            for _ in range(2):
                made.append(txn := await client.begin())
                await client.publish(A, b"#%d" % txn.least, txn)
        for txn in made:
            await client.publish(A, b"#%d again" % txn.least, txn)
        for txn, commit in zip(made, (True, False, True, False), strict=True):
            await client.end(txn, commit=commit)
        assert await client.payloads(4) == [b"1", b"3", b"1 again", b"3 again"]
        await client.sees_nothing()

    async def again(server: Server, client: V4) -> None:
        await client.subscribe(A, "new")
        assert await client.payloads(4) == [b"1", b"3", b"1 again", b"3 again"]
        await client.sees_nothing()

    play(tmp_path, scene, again)
