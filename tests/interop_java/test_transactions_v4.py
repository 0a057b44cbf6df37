"""Transactions, schemas and policies with the official Java client of version 4."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.interop.program import Program, passes
from tests.interop_java.program import V4
from tests.interop_java.transacting import named

# The first test may wait for Maven to fetch the client.
pytestmark = pytest.mark.slow

LACKING: Mapping[str, str] = {}


@pytest.mark.parametrize("name", named(V4, r"(?!restart|beside)", LACKING))
def test_scenario(program_v4: Program, name: str) -> None:
    passes(program_v4, name)
