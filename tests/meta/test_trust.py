"""The list of what once went wrong against the tests and the pages: all that it names exists."""

from __future__ import annotations

import re

from tests.meta.named_tests import ROW, TEST_ID, missing
from tests.meta.tree import ROOT

PAGE = ROOT / "docs" / "reference" / "trust.md"
NUMBERS = range(17)
PAGE_LINK = re.compile(r"\| \[[^]]+\]\(([^)#]+)[^)]*\) \|$")


def rows() -> dict[str, str]:
    found = {row["name"]: row[0] for row in ROW.finditer(PAGE.read_text("utf-8"))}
    return {name: row for name, row in found.items() if name[0].isdecimal()}


def test_every_row_is_listed_once_and_has_a_test_and_a_page() -> None:
    names = list(rows())
    numbers = list(dict.fromkeys(int(name.rstrip("abcdefghijklm")) for name in names))
    assert numbers == list(NUMBERS)
    assert len(names) == len(ROW.findall(PAGE.read_text("utf-8"))) - 3  # heads of tables
    for name, row in rows().items():
        assert TEST_ID.search(row), name
        page = PAGE_LINK.search(row)
        assert page is not None, name
        assert (PAGE.parent / page[1]).exists(), name


def test_every_test_that_is_named_exists() -> None:
    assert missing(PAGE.read_text("utf-8")) == []
