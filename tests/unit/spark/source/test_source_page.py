"""The page of the source: every option of a read and every column, as the code has them."""

from __future__ import annotations

import re

from magnetar.spark.option_table import OPTIONS, Use
from magnetar.spark.options import parse
from magnetar.spark.source.columns import shape_of, spark_schema
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "spark" / "source.md"
OPTION = re.compile(r"^\| `(\w+)` \| (\w+) \| (\S+) \| (.*) \|$", re.MULTILINE)
COLUMN = re.compile(r"^\| `(\w+)` \| (\S+) \|", re.MULTILINE)
ALSO = re.compile(r"`([\w.]+)`")
READS = {Use.STREAM: "streams", Use.BATCH: "batches", Use.READ: "both"}


def _section(title: str) -> str:
    return PAGE.read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_option_is_on_the_page() -> None:
    shown = {
        name: (read, default, tuple(ALSO.findall(text.partition(" Also called ")[2])))
        for name, read, default, text in OPTION.findall(_section("Options"))
    }
    wanted = {
        each.name: (
            READS[each.use & Use.READ],
            "-" if each.default is None else f"`{each.default}`",
            each.aliases,
        )
        for each in OPTIONS
        if each.use & Use.READ
    }
    assert shown == wanted


def test_every_column_is_on_the_page() -> None:
    options = parse({"includeKeyBytes": "true"}, Use.BATCH)
    made = spark_schema(shape_of("bytes", None, ""), options)
    wanted = {each.name: each.dataType.simpleString() for each in made.fields}
    assert dict(COLUMN.findall(_section("Columns"))) == wanted
