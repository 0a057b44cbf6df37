"""Topic names: forms, canonical form, derived names, refusals with a hint."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from magnetar.errors import InvalidTopicName, NotAllowed
from magnetar.model.hashing import HashRange
from magnetar.model.names import (
    Domain,
    NamespaceName,
    SegmentDescriptor,
    TopicName,
    decoded,
    encoded,
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("x", "persistent://public/default/x"),
        ("t/n/x", "persistent://t/n/x"),
        ("persistent://t/n/x", "persistent://t/n/x"),
        ("PERSISTENT://t/n/x", "persistent://t/n/x"),
        ("non-persistent://t/n/x", "non-persistent://t/n/x"),
        ("topic://t/n/x", "topic://t/n/x"),
        ("topic://t/n/a/b", "topic://t/n/a/b"),
        ("segment://t/n/x/0000-7fff-3", "segment://t/n/x/0000-7fff-3"),
        ("segment://t/n/a/b/0000-7fff-3", "segment://t/n/a/b/0000-7fff-3"),
        ("Segment://t/n/x/0-7FFF-03", "segment://t/n/x/0000-7fff-3"),
    ],
)
def test_parsing_gives_the_canonical_form(text: str, canonical: str) -> None:
    name = TopicName.parse(text)
    assert str(name) == canonical
    assert TopicName.parse(canonical) == name


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "tenant/namespace/x"),
        ("a/b", "tenant/namespace/x"),
        ("a/b/c/d", "tenant/namespace/x"),
        ("persistent://t/n", "tenant/namespace/x"),
        ("persistent://t/n/ ", "tenant/namespace/x"),
        ("persistent://t/c/n/x", "cluster"),
        ("kafka://t/n/x", "use one of persistent"),
        ("persistent://t t/n/x", "letters, digits"),
        ("persistent:///n/x", "letters, digits"),
        ("segment://t/n/x", "segment://tenant/namespace/x"),
        ("segment://t/n/x/0000-7fff", "0000-7fff-3"),
        ("segment://t/n/x/7fff-0000-3", "0000-7fff-3"),
        ("segment://t/n/x/0000-1ffff-3", "0000-7fff-3"),
        ("segment://t/n/x/0000-7fff-3-4", "0000-7fff-3"),
        ("segment://t/n/x/0000-7fff--3", "0000-7fff-3"),
    ],
)
def test_a_bad_name_is_refused_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(InvalidTopicName) as caught:
        TopicName.parse(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize("local", ["a\x00b", "a\nb", "a\x7f", "a\ud800"])
def test_no_name_holds_control_characters(local: str) -> None:
    with pytest.raises(InvalidTopicName):
        TopicName.parse(f"topic://t/n/{local}")


def test_namespaces() -> None:
    assert str(NamespaceName.parse("t/n")) == "t/n"
    for text in ("t", "", "t/", "/n", "a/b/c", "a b/c"):
        with pytest.raises(InvalidTopicName):
            NamespaceName.parse(text)


@pytest.mark.parametrize(
    ("local", "partition", "base"),
    [
        ("x-partition-0", 0, "x"),
        ("x-partition-12", 12, "x"),
        ("x-partition-1-partition-2", 2, "x-partition-1"),
        ("x-partition-01", None, "x-partition-01"),
        ("x-partition--1", None, "x-partition--1"),
        ("x-partition-", None, "x-partition-"),
        ("-partition-1", None, "-partition-1"),
        ("x", None, "x"),
    ],
)
def test_partition_suffix(local: str, partition: int | None, base: str) -> None:
    name = TopicName.parse(local)
    assert name.partition == partition
    assert name.without_partition().local_name == base


def test_partitions_belong_to_regular_topics() -> None:
    assert str(TopicName.parse("x").with_partition(3)).endswith("/x-partition-3")
    assert TopicName.parse("topic://t/n/x-partition-3").partition is None
    for text in ("topic://t/n/x", "x-partition-3"):
        with pytest.raises(NotAllowed):
            TopicName.parse(text).with_partition(1)


def test_a_scalable_topic_and_its_segments() -> None:
    topic = TopicName.parse("topic://t/n/a/b")
    segment = topic.segment(SegmentDescriptor(HashRange(0, 0x7FFF), 3))
    assert str(segment) == "segment://t/n/a/b/0000-7fff-3"
    assert segment.scalable_topic() == topic
    assert str(TopicName.parse("t/n/x-partition-2").scalable_topic()) == "topic://t/n/x"
    with pytest.raises(NotAllowed):
        TopicName.parse("t/n/x").segment(SegmentDescriptor(HashRange(0, 1), 0))


def test_derived_names() -> None:
    segment = TopicName.parse("segment://t/n/a b/0000-7fff-3")
    assert segment.managed_ledger_name == "t/n/segment/a+b/0000-7fff-3"
    assert segment.schema_id == "t/n/a+b"
    regular = TopicName.parse("persistent://t/n/a b-partition-1")
    assert regular.managed_ledger_name == "t/n/persistent/a+b-partition-1"
    assert regular.schema_id == segment.schema_id


def test_what_holds_no_messages_has_no_managed_ledger() -> None:
    for text in ("topic://t/n/x", "non-persistent://t/n/x"):
        with pytest.raises(NotAllowed):
            _ = TopicName.parse(text).managed_ledger_name


@pytest.mark.parametrize(
    ("local", "part"),
    [("a/b", "a%2Fb"), ("a*~", "a*%7E"), ("é", "%C3%A9"), ("a+b c", "a%2Bb+c"), ("-_.", "-_.")],
)
def test_encoding_is_that_of_java(local: str, part: str) -> None:
    assert encoded(local) == part
    assert decoded(part) == local


def test_only_segments_have_a_descriptor() -> None:
    namespace = NamespaceName("t", "n")
    with pytest.raises(InvalidTopicName):
        TopicName(Domain.SEGMENT, namespace, "x")
    with pytest.raises(InvalidTopicName):
        TopicName(Domain.TOPIC, namespace, "x", SegmentDescriptor(HashRange(0, 1), 0))


_ENTITIES = st.text("ab0-=:._", min_size=1, max_size=6)
_LOCALS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@given(st.sampled_from(Domain), _ENTITIES, _ENTITIES, _LOCALS, st.integers(0, 2**62))
def test_parse_undoes_str(domain: Domain, tenant: str, space: str, local: str, number: int) -> None:
    assume(local.strip() and (domain.is_scalable or "/" not in local))
    descriptor = None
    if domain is Domain.SEGMENT:
        descriptor = SegmentDescriptor(HashRange(number % 65536, 65535), number)
    name = TopicName(domain, NamespaceName(tenant, space), local, descriptor)
    assert TopicName.parse(str(name)) == name
    assert decoded(encoded(local)) == local
    assert "/" not in encoded(local)
