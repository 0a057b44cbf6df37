"""The list of fault points against the tests: each has some, and each that it names exists."""

from __future__ import annotations

import pytest

from tests.meta.named_tests import ROW, TEST_ID, is_soak, missing
from tests.meta.tree import ROOT

PAGE = (ROOT / "docs" / "reference" / "spark-faults.md").read_text("utf-8")
POINTS = [f"F{number}" for number in range(1, 31)]
IN_MAKE_TEST = ("F3", "F5", "F6", "F7", "F12", "F14", "F17", "F18", "F21")


def rows() -> dict[str, list[tuple[str, str]]]:
    """The tests of each row."""
    found = {row["name"]: TEST_ID.findall(row[0]) for row in ROW.finditer(PAGE)}
    return {name: tests for name, tests in found.items() if name not in ("point", "what")}


def test_every_point_is_listed_once_and_has_a_test() -> None:
    points = [row["name"] for row in ROW.finditer(PAGE) if row["name"].startswith("F")]
    assert points == POINTS
    assert [name for name, tests in rows().items() if not tests] == []


@pytest.mark.slow
def test_every_test_that_is_named_exists() -> None:
    assert missing(PAGE) == []
    assert missing("`tests/meta/test_spark_faults.py::test_of_nothing`") != []


@pytest.mark.parametrize("point", IN_MAKE_TEST)
def test_what_must_never_break_is_in_make_test(point: str) -> None:
    assert any(not is_soak(path, name) for path, name in rows()[point])


def test_soaks_are_known_by_their_marks() -> None:
    of_module = ("tests/integration/spark/test_sink_soak.py", "test_spark_connect")
    of_function = (
        "tests/integration/spark/test_quickstart.py",
        "test_five_kills_while_topics_go_from_one_segment_to_four_and_back",
    )
    assert is_soak(*of_module)
    assert is_soak(*of_function)
    assert not is_soak("tests/integration/spark/test_quickstart.py", "test_the_main_job")
