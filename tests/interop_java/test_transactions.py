"""Transactions of the official Java client for scalable topics, against our server."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.interop.program import Program, passes
from tests.interop_java.program import SCALABLE
from tests.interop_java.transacting import named

# The first test may wait for Maven to fetch the client.
pytestmark = pytest.mark.slow

LACKING: Mapping[str, str] = {}


@pytest.mark.parametrize("name", named(SCALABLE, r"transactions?-(?!restart|beside)", LACKING))
def test_scenario(program: Program, name: str) -> None:
    passes(program, name)
