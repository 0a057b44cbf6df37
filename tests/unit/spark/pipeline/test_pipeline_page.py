"""The page on pipeline files lists the keys that the code has, with their defaults."""

from __future__ import annotations

import re

import msgspec
import pytest

from magnetar.spark.pipeline.file import Pipeline, Sink, Source, Spark, Step, Watermark
from magnetar.spark.pipeline.session import DEFAULT_MASTER
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "spark" / "pipeline-file.md"
ROW = re.compile(r"^\| `(\w+)` \|[^|]+\|([^|]*)\|", re.MULTILINE)
TABLES: dict[str, type[msgspec.Struct]] = {
    "The file": Pipeline,
    "A source": Source,
    "A watermark": Watermark,
    "A step": Step,
    "A sink": Sink,
    "Spark": Spark,
}


@pytest.mark.parametrize("heading", TABLES)
def test_every_key_is_listed_with_its_default(heading: str) -> None:
    section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    listed = {key: default.strip() for key, default in ROW.findall(section)}
    fields = {each.encode_name: each for each in msgspec.structs.fields(TABLES[heading])}
    fields.pop("folder", None)
    assert listed.keys() == fields.keys()
    for key, each in fields.items():
        assert (listed[key] == "required") == each.required, key
        if isinstance(each.default, str):
            assert listed[key] == f"`{each.default}`", key


def test_the_master_is_the_one_of_the_code() -> None:
    assert f"| `{DEFAULT_MASTER}` |" in PAGE.read_text("utf-8")
