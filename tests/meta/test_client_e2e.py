"""The client's end-to-end suite against its page, and what it expects to fail against its tests."""

from __future__ import annotations

import re
import tomllib

from tests.meta.named_tests import TEST_ID, functions_in, missing
from tests.meta.test_scenarios import PAGE as FINDINGS
from tests.meta.tree import ROOT

FOLDER = ROOT / "tests" / "client_e2e"
PAGE = ROOT / "docs" / "reference" / "client-e2e.md"


def test_every_test_that_is_named_exists() -> None:
    text = PAGE.read_text("utf-8")
    assert len(set(TEST_ID.findall(text))) > 40
    assert missing(text) == []


def test_what_is_expected_to_fail_is_a_test_and_a_known_finding() -> None:
    known = tomllib.loads((FOLDER / "expected_failures.toml").read_text("utf-8"))
    _, _, seen = FINDINGS.read_text("utf-8").partition("## What was seen")
    findings = set(re.findall(r"F\d+|ids|latest|sealed", seen))
    for server in known["server"]:
        names = [each["test"] for each in server["expected"]]
        assert len(set(names)) == len(names)
        for each in server["expected"]:
            assert each["finding"] in findings, each
            assert each["why"].endswith("."), "a sentence"
            module, _, name = each["test"].partition("::")
            assert name.partition("[")[0] in functions_in(f"tests/client_e2e/{module}.py"), name
