"""The page for those who come from another connector names options that there are."""

from __future__ import annotations

import re

from magnetar.spark.option_table import OPTIONS
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "spark" / "migration.md"
KNOWN = {name.lower() for option in OPTIONS for name in (option.name, *option.aliases)}
TAKEN = re.compile(r"^\| ((?:`\w+`, )+`\w+`) \| the same names \|$", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")


def test_names_of_kafka_that_are_the_same() -> None:
    (listed,) = TAKEN.findall(PAGE.read_text("utf-8"))
    assert [name for name in NAME.findall(listed) if name.lower() not in KNOWN] == []


def test_names_of_pulsar_spark_that_are_taken() -> None:
    text = PAGE.read_text("utf-8")
    section = text.partition("These names are taken:")[2].partition("What an option cannot")[0]
    names = NAME.findall(section)
    assert len(names) > 8
    assert [name for name in names if name.lower() not in KNOWN] == []
