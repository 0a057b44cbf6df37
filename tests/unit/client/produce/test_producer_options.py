"""The options of a producer: in one list in the code, and in the documentation."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import ProducerOptions
from magnetar.client.consume.segment.settings import ConsumerSettings
from magnetar.client.produce.settings import ProducerSettings
from magnetar.errors import InvalidSetting

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "producing.md"


def test_every_option_can_be_given_and_is_documented() -> None:
    names = {each.name for each in fields(ProducerSettings)}
    assert names == set(ProducerOptions.__annotations__)
    page = PAGE.read_text("utf-8")
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "wrong",
    [{"max_pending": 0}, {"batch_bytes": 0}, {"send_timeout": -1.0}, {"batch_delay": float("nan")},
     {"initial_sequence_id": -1}, {"compression": "zstd"}, {"routing": "ring"},
     {"access_mode": 1}, {"properties": {"a": 1}}, {"batch_messages": "10"},
     {"batching": "off"}, {"chunking": 1}],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        ProducerSettings(**wrong)


def test_a_compression_by_its_name_is_told_how_it_is_given() -> None:
    with pytest.raises(InvalidSetting, match=r"'zstd'.*Compression\.ZSTD"):
        ProducerSettings(compression="zstd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"initial_position": "earliest"}, {"properties": {"a": 1}}, {"queue_size": 0},
     {"subscription_properties": [("a", "b")]}, {"processing_timeout": "1"},
     {"retries": "yes"}, {"fail_on_data_loss": None}],
)  # fmt: skip
def test_wrong_options_of_consumers_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        ConsumerSettings(**wrong)
