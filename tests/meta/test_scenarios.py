"""The list of scenarios against the tests: each is there, and each test that it names exists."""

from __future__ import annotations

from tests.meta.named_tests import ROW, TEST_ID, missing
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "transaction-scenarios.md"
SCENARIOS = range(1, 66)
LEFT = {63: "delays and dead letters"}
"""What other parts of the project bring, wholly or in part."""


def test_every_scenario_is_listed_once_and_has_a_test() -> None:
    rows = {row["name"]: row[0] for row in ROW.finditer(PAGE.read_text("utf-8"))}
    numbered = {int(name): row for name, row in rows.items() if name.isdecimal()}
    assert list(numbered) == list(SCENARIOS)
    for number, row in numbered.items():
        assert TEST_ID.search(row), row
        assert ("left: " in row) == (number in LEFT), row
        assert LEFT.get(number, "") in row


def test_every_test_that_is_named_exists() -> None:
    text = PAGE.read_text("utf-8")
    assert len(set(TEST_ID.findall(text))) > 60
    assert missing(text) == []


def test_every_line_of_the_other_lists_has_a_test() -> None:
    _, _, others = PAGE.read_text("utf-8").partition("## What was seen")
    rows = [row[0] for row in ROW.finditer(others)]
    lacking = [row for row in rows if not TEST_ID.search(row)]
    assert [row.split(" |")[0] for row in lacking] == ["| finding", "| rule"]
