"""Offsets as Spark keeps them: one text for one meaning, and clear words about foreign ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import WrongCheckpoint
from magnetar.model.ranges import RangePosition
from magnetar.spark.source.offsets import (
    Offset,
    Sentinel,
    TopicOffset,
    base_of,
    format_offset,
    format_sentinel,
    parse_offset,
    parse_start,
)

POSITIONS = st.builds(
    RangePosition, st.integers(0, 2**62), st.integers(0, 2**62), st.integers(0, 999)
)
PLACES = st.builds(
    TopicOffset,
    st.text(max_size=5),
    st.integers(0, 10**9),
    st.dictionaries(st.integers(0, 99), st.none() | POSITIONS, max_size=6),
)
OFFSETS = st.builds(Offset, st.dictionaries(st.text(max_size=9), PLACES, max_size=3))


@given(OFFSETS, OFFSETS)
def test_json_there_and_back(offset: Offset, base: Offset) -> None:
    text = json.loads(json.dumps(format_offset(offset, base)))
    assert parse_offset(text) == offset
    assert base_of(text) == base


@given(OFFSETS, st.randoms())
def test_equal_offsets_have_equal_texts(offset: Offset, chance: Any) -> None:
    topics = list(offset.topics.items())
    chance.shuffle(topics)
    mixed = {}
    for topic, place in topics:
        segments = list(place.segments.items())
        chance.shuffle(segments)
        mixed[topic] = TopicOffset(place.creation_id, place.epoch, dict(segments))
    assert json.dumps(format_offset(Offset(mixed))) == json.dumps(format_offset(offset))


def test_a_sentinel_is_kept_as_it_is() -> None:
    assert parse_start(format_sentinel(Sentinel("latest"))) == Sentinel("latest")


@pytest.mark.slow
def test_ten_thousand_segments_fit() -> None:
    segments = {number: RangePosition(123_456, 99_999, 0) for number in range(10_000)}
    text = json.dumps(format_offset(Offset({"topic://a/b/c": TopicOffset("id", 9, segments)})))
    assert len(text) < 400_000


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"orders": {"0": 12}},
        {"v": 2, "topics": {}},
        {"v": 1},
        {"v": 1, "topics": {"x": 1}},
        {"v": 1, "topics": {"x": {"id": "a", "epoch": 1}}},
        {"v": 1, "topics": {"x": {"id": "a", "epoch": 1, "seg": {"0": [1, 2]}}}},
        {"v": 1, "topics": {"x": {"id": "a", "epoch": 1, "seg": {"0": [1, -2, 0]}}}},
        {"v": 1, "topics": {"x": {"id": "a", "epoch": 1, "seg": {"a": "D"}}}},
    ],
)
def test_what_is_no_offset_of_this_source_is_refused(text: dict[str, Any]) -> None:
    with pytest.raises(WrongCheckpoint, match="checkpoint folder of its own"):
        parse_offset(text)


def test_a_first_offset_without_its_base_is_refused() -> None:
    with pytest.raises(WrongCheckpoint, match="where it began"):
        base_of({"v": 1, "topics": {}})
