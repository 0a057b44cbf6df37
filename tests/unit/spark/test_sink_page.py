"""The page of the sink: every option of a write is on it, as the table has it."""

from __future__ import annotations

import re

from magnetar.spark.option_table import OPTIONS, Use
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "spark" / "sink.md"
ROW = re.compile(r"^\| `(\w+)` \| (\S+) \|", re.MULTILINE)


def test_every_option_is_on_the_page_with_its_default() -> None:
    section = PAGE.read_text("utf-8").partition("## Options")[2].partition("\n## ")[0]
    shown = dict(ROW.findall(section))
    wanted = {
        each.name: "-" if each.default is None else f"`{each.default}`"
        for each in OPTIONS
        if Use.WRITE & each.use
    }
    assert shown == wanted
