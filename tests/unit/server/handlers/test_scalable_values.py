"""Layouts as frames: what is always there, what is absent, and which layout follows which."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from magnetar.broker.policy.schemas import Schemas
from magnetar.broker.topic.topics import Topics
from magnetar.model.hashing import HashRange
from magnetar.model.names import TopicName
from magnetar.model.segments import NEVER, Segment, SegmentLayout
from magnetar.runtime.clock import LoopClock
from magnetar.scalable.groups.sessions import Assignment, SegmentToRead
from magnetar.server.authority import Authority
from magnetar.server.config import ServerConfig
from magnetar.server.context import BrokerUrls, Context, TopicOwners, broker_urls
from magnetar.server.handlers.scalable_values import assignment_fields, dag_fields, supersedes
from magnetar.wire.pb import pulsar_pb2 as pb
from tests.unit.server.link import NoQueue

PLAIN = BrokerUrls("pulsar://a:1", None)
BOTH = BrokerUrls("pulsar://a:1", "pulsar+ssl://a:2")


def test_when_an_active_segment_was_sealed_is_absent() -> None:
    layout = SegmentLayout.create(1, now_ms=0).split(0, now_ms=7)
    dag = pb.ScalableTopicDAG(**dag_fields(layout, {}, None))
    sealed, active, _ = dag.segments
    assert (sealed.sealed_at_epoch, sealed.sealed_at_ms) == (1, 7)
    assert not active.HasField("sealed_at_epoch")
    assert not active.HasField("sealed_at_ms")
    for segment in dag.segments:
        assert segment.HasField("created_at_ms")
        assert segment.HasField("created_at_epoch")
        assert not segment.HasField("legacy_topic_name")
    assert not dag.HasField("controller_broker_url")
    assert not dag.segment_brokers


def test_encrypted_addresses_are_told_where_there_are() -> None:
    layout = SegmentLayout.create(2, now_ms=0)
    dag = pb.ScalableTopicDAG(**dag_fields(layout, {0: PLAIN, 1: BOTH}, BOTH))
    assert [each.HasField("broker_url_tls") for each in dag.segment_brokers] == [False, True]
    assert dag.controller_broker_url_tls == BOTH.tls
    plain = pb.ScalableTopicDAG(**dag_fields(layout, {}, PLAIN))
    assert plain.controller_broker_url == PLAIN.plain
    assert not plain.HasField("controller_broker_url_tls")


def test_a_legacy_segment_names_its_topic() -> None:
    segment = Segment(0, HashRange(0, 65535), legacy_topic_name="persistent://public/default/x")
    dag = pb.ScalableTopicDAG(**dag_fields(SegmentLayout(0, 1, {0: segment}), {}, None))
    assert dag.segments[0].legacy_topic_name == "persistent://public/default/x"


def test_shared_segments_have_all_bucket_ranges() -> None:
    segment = Segment(3, HashRange(0, 9))
    name = TopicName.parse("segment://public/default/x/0000-0009-3")
    halves = (HashRange(0, 32767), HashRange(32768, 65535))
    whole = assignment_fields(Assignment(4, (SegmentToRead(segment, name),)))
    shared = assignment_fields(Assignment(4, (SegmentToRead(segment, name, halves),)))
    (alone,) = pb.ScalableConsumerAssignment(**whole).segments
    (one,) = pb.ScalableConsumerAssignment(**shared).segments
    assert not alone.bucket_ranges
    assert (alone.segment_id, alone.hash_end, alone.segment_topic) == (3, 9, str(name))
    assert [(each.start, each.end) for each in one.bucket_ranges] == [(0, 32767), (32768, 65535)]
    assert pb.ScalableConsumerAssignment(**assignment_fields(Assignment(NEVER, ()))).IsInitialized()


def test_only_later_layouts_and_other_topics_are_told() -> None:
    first = SegmentLayout.create(1, now_ms=5)
    second = first.split(0, now_ms=6)
    assert supersedes(second, first)
    assert not supersedes(first, second)
    assert not supersedes(second, second)
    # Deleted and created anew: it begins at epoch 0 again.
    assert supersedes(SegmentLayout.create(1, now_ms=9), second)
    pruned = second.prune([0])
    assert supersedes(pruned, second)
    assert not supersedes(second, pruned)


class Elsewhere:
    async def owner_url(self, name: TopicName) -> str:
        return "pulsar://other:1" if name.local_name == "x" else "pulsar://here:1"


def context(owners: TopicOwners | None = None, **settings: str) -> Context:
    return Context(
        ServerConfig(**settings),  # type: ignore[arg-type]  # those given are text
        cast("Topics", None),
        cast("Schemas", None),
        LoopClock(0),
        Authority(),
        "pulsar://here:1",
        queue=NoQueue(),
        owners=owners,
    )


def test_a_topic_may_be_at_another_broker() -> None:
    x, y = TopicName.parse("x"), TopicName.parse("y")

    async def scene() -> None:
        alone, among = context(), context(Elsewhere())
        assert await alone.owner_urls(x) == broker_urls(alone)
        assert await among.owner_urls(y) == broker_urls(among)
        assert (await among.owner_urls(x)).plain == "pulsar://other:1"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "0.0.0.0", "advertised_host": "name"}, True),
    ],
)
def test_an_address_that_nobody_knows_is_not_told(settings: dict[str, str], known: bool) -> None:
    async def scene() -> None:
        assert context(None, **settings).is_reachable is known

    asyncio.run(scene())
