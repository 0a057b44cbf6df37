"""The list of scenarios against the tests: each is there, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "transaction-scenarios.md"
SCENARIOS = range(1, 66)
LEFT = {38: "Spark", 63: "compaction, delays and dead letters"}
"""What other parts of the project bring, wholly or in part."""

ROW = re.compile(r"^\| (?P<name>[^|]+) \|.*\|$", re.MULTILINE)
TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_scenario_is_listed_once_and_has_a_test() -> None:
    rows = {row["name"]: row[0] for row in ROW.finditer(PAGE.read_text("utf-8"))}
    numbered = {int(name): row for name, row in rows.items() if name.isdecimal()}
    assert list(numbered) == list(SCENARIOS)
    for number, row in numbered.items():
        assert TEST_ID.search(row) or number == 38, row
        assert ("left: " in row) == (number in LEFT), row
        assert LEFT.get(number, "") in row


def test_every_test_that_is_named_exists() -> None:
    named = TEST_ID.findall(PAGE.read_text("utf-8"))
    assert len(set(named)) > 60
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def test_every_line_of_the_other_lists_has_a_test() -> None:
    _, _, others = PAGE.read_text("utf-8").partition("## What was seen")
    rows = [row[0] for row in ROW.finditer(others)]
    lacking = [row for row in rows if not TEST_ID.search(row)]
    assert [row.split(" |")[0] for row in lacking] == ["| finding", "| rule"]


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(each.name for each in tree.body if isinstance(each, ast.FunctionDef))
