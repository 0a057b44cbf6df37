"""Where a read begins, as users write it."""

from __future__ import annotations

import json

import pytest

from magnetar.errors import InvalidSetting
from magnetar.model.ranges import RangePosition
from magnetar.spark.source.begin import Bound, at_time, read_bounds
from magnetar.spark.source.offsets import Offset, TopicOffset, format_offset

X, Y = "topic://public/default/x", "persistent://public/default/y"


def test_words_and_times_are_for_every_topic() -> None:
    assert read_bounds("o", "Earliest", [X, Y]) == {X: Bound("earliest"), Y: Bound("earliest")}
    assert read_bounds("o", at_time(70), [X]) == {X: Bound(time_ms=70)}


def test_an_offset_of_this_source() -> None:
    place = TopicOffset("id", 4, {0: None, 1: RangePosition(7, 8, 9)})
    text = json.dumps(format_offset(Offset({X: place})))
    assert read_bounds("o", text, [X]) == {X: Bound(place=place)}


def test_a_place_for_each_topic_in_short_names_too() -> None:
    text = json.dumps({X: {"0": "7:12", "1": "latest", "2": [1, 2, 3]}, "y": "latest"})
    assert read_bounds("o", text, [X, Y]) == {
        X: Bound(segments={0: RangePosition(7, 12), 1: "latest", 2: RangePosition(1, 2, 3)}),
        Y: Bound("latest"),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "cannot be used"),
        ("[1]", "cannot be used"),
        ("{}", "does not say where topic://public/default/x begins or ends"),
        ('{"z": "latest"}', "names persistent://public/default/z, which is not read"),
        ('{"topic://public/default/x": "middle"}', "'middle' is no place in a topic"),
        ('{"topic://public/default/x": {"a": "latest"}}', "'a' is no segment"),
        ('{"topic://public/default/x": {"1": "7"}}', "'7' is no position"),
        ('{"://": "latest"}', "cannot be used"),
        ('{"v": 3, "topics": {}}', "has version 3"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match="the option startingOffsets") as raised:
        read_bounds("startingOffsets", text, [X])
    assert said in str(raised.value)
