"""Which column is what part of a message, and rows as the client takes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import InvalidSetting
from magnetar.spark.sink.columns import SinkColumns

TOPIC = "topic://public/default/t"


def columns(option: str | None = TOPIC, /, **types: str) -> SinkColumns:
    return SinkColumns.of(types, topic=option)


def test_plain_names_and_those_of_pulsar_spark_mean_the_same() -> None:
    plain = columns(None, value="binary", key="string", eventTime="timestamp", topic="string")
    assert (plain.value, plain.fields) == ("value", ())
    assert plain.parts == {"key": "key", "eventTime": "eventTime", "topic": "topic"}
    style = columns(
        None,
        value="string",
        __key="string",
        __topic="string",
        __eventTime="bigint",
        __messageProperties="map<string,string>",
    )
    assert style.parts == {
        "key": "__key",
        "topic": "__topic",
        "eventTime": "__eventTime",
        "properties": "__messageProperties",
    }


def test_with_underscores_the_plain_name_is_a_field() -> None:
    found = columns(__key="string", key="bigint", amount="double")
    assert found.value is None
    assert found.fields == ("key", "amount")
    assert found.parts == {"key": "__key"}


def test_a_topic_that_the_option_names_wins_over_the_column() -> None:
    assert columns(TOPIC, value="string", topic="string").parts == {}
    assert columns(None, value="string", topic="string").parts == {"topic": "topic"}


def test_what_the_source_tells_about_a_message_may_stay() -> None:
    found = columns(value="binary", key="string", messageId="string", publishTime="timestamp")
    assert found.about == ("messageId", "publishTime")
    assert found.fields == ()


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ({"value": "string", "extra": "int"}, "'extra' is no part of a message"),
        ({"key": "string"}, "no column for the value"),
        ({"value": "string", "eventTime": "string"}, "'eventTime' is string"),
        ({"value": "string", "properties": "array<struct<a:int,b:int>>"}, "properties"),
        ({"value": "string", "properties": "array<string>"}, "map<string,string> or array"),
    ],
)
def test_columns_that_fit_nowhere_are_named(types: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        columns(**types)


def test_a_topic_is_needed() -> None:
    with pytest.raises(InvalidSetting, match="which topic"):
        columns(None, value="string")


Pair = st.tuples(st.text(max_size=3), st.none() | st.text(max_size=3))


@given(st.lists(st.none() | st.lists(Pair, max_size=3), max_size=6), st.booleans(), st.data())
def test_properties_become_a_map_without_nulls(
    rows: list[Any], is_list: bool, data: st.DataObject
) -> None:
    """Whatever their type, and also in a slice of a batch."""
    cut = data.draw(st.integers(0, len(rows)))
    if is_list:
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
        given_rows = [
            None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows
        ]
        name = "array<struct<key:string,value:string>>"
    else:
        kind, given_rows, name = pa.map_(pa.string(), pa.string()), rows, "map<string,string>"
    batch = pa.RecordBatch.from_pydict(
        {"value": pa.array(["x"] * len(rows)), "properties": pa.array(given_rows, kind)}
    ).slice(cut)
    out = columns(value="string", properties=name).outgoing(batch, batch.column("value"))
    expected = [[(k, v or "") for k, v in row or []] for row in rows[cut:]]
    assert out.column("properties").to_pylist() == expected
    assert out.column("properties").null_count == 0


def test_times_are_milliseconds() -> None:
    moment = datetime(2026, 11, 16, 9, 0, 0, 123999, tzinfo=UTC)
    batch = pa.RecordBatch.from_pydict(
        {"value": ["a", "b"], "eventTime": pa.array([moment, None], pa.timestamp("us", tz="UTC"))}
    )
    out = columns(value="string", eventTime="timestamp").outgoing(batch, batch.column("value"))
    assert out.column("event_time").to_pylist() == [int(moment.timestamp() * 1000), None]


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=20))
def test_every_row_goes_to_its_topic_in_order(topics: list[str | None]) -> None:
    batch = pa.RecordBatch.from_pydict(
        {"value": list(map(str, range(len(topics)))), "topic": pa.array(topics, pa.string())}
    )
    found: dict[str | None, list[int]] = {}
    for topic, rows in columns(None, value="string", topic="string").by_topic(batch, None):
        assert topic not in found
        found[topic] = [int(each) for each in rows.column("value").to_pylist()]
    wanted: dict[str | None, list[int]] = {}
    for number, topic in enumerate(topics):
        wanted.setdefault(topic, []).append(number)
    assert found == wanted
