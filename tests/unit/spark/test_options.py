"""Options: names in any case, values checked, errors that say what to do."""

from __future__ import annotations

import re

import pytest

from magnetar.errors import InvalidSetting
from magnetar.spark.option_table import OPTIONS
from magnetar.spark.options import Use, parse


def test_names_and_aliases_in_any_case_mean_one_option() -> None:
    for key in ("maxMessagesPerTrigger", "maxmessagespertrigger", "MAXOFFSETSPERTRIGGER"):
        assert parse({key: "7"}, Use.STREAM)["maxMessagesPerTrigger"] == 7


def test_what_is_not_given_has_its_default() -> None:
    options = parse({}, Use.STREAM)
    assert options["maxTriggerDelay"] == 900
    assert options["failOnDataLoss"] is True
    assert options["topic"] is None
    assert options.given == frozenset()


def test_every_default_can_be_read() -> None:
    for use in (Use.STREAM, Use.BATCH, Use.WRITE, Use.READ):
        parse({}, use)


def test_no_two_options_share_a_name() -> None:
    keys = [key.lower() for each in OPTIONS for key in (each.name, *each.aliases)]
    assert len(keys) == len(set(keys))


def test_what_spark_adds_is_no_option() -> None:
    options = parse({"checkpointlocation": "/c"}, Use.STREAM)
    assert options.spark == {"checkpointlocation": "/c"}


@pytest.mark.parametrize(
    ("given", "use", "said"),
    [
        ({"maxmesagespertrigger": "1"}, Use.STREAM, "is maxMessagesPerTrigger meant?"),
        ({"pulsar.client.operationtimeout": "1"}, Use.STREAM, "operationTimeoutMs meant?"),
        ({"zzz": "1"}, Use.STREAM, "there is no option zzz"),
        ({"endingoffsets": "latest"}, Use.STREAM, "endingOffsets means nothing to a streaming"),
        ({"topics": "a", "subscribe": "b"}, Use.BATCH, "topics is given twice"),
        ({"minpartitions": "0"}, Use.BATCH, "use a whole number from 1 up"),
        ({"maxtriggerdelay": "soon"}, Use.STREAM, "use a duration"),
        ({"maxbytespertrigger": "0"}, Use.STREAM, "use a number of bytes"),
        ({"failondataloss": "maybe"}, Use.STREAM, "use true or false"),
        ({"readisolation": "snapshot"}, Use.STREAM, "use committed or uncommitted"),
        ({"startingtimestamp": "2026-11-16"}, Use.BATCH, "it has no time zone"),
        ({"topics": " , "}, Use.BATCH, "it names nothing"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_next_step(
    given: dict[str, str], use: Use, said: str
) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(said)):
        parse(given, use)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as raised:
        parse({"token": "  "}, Use.STREAM)
    assert "its value" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("maxtriggerdelay", "1500ms", 1.5),
        ("maxtriggerdelay", "2 hours", 7200.0),
        ("maxbytespertrigger", "1.5k", 1536),
        ("topics", "a, b", ("a", "b")),
        ("startingtimestamp", "1700000000000", 1_700_000_000_000),
        ("startingtimestamp", "2026-11-16T10:00:00+00:00", 1_794_823_200_000),
        ("readisolation", "UNCOMMITTED", "uncommitted"),
    ],
)
def test_values(name: str, written: str, value: object) -> None:
    options = parse({name: written}, Use.STREAM)
    (given,) = options.given
    assert options[given] == value
