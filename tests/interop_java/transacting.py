"""Scenarios of transactions as tests, those included that can't pass yet.

Owns: `named` (the parameters of a test) and `passes` (runs one scenario).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.interop_java.program import NO_FAVOURS, Client, Favour, Program


def named(client: Client, pattern: str, lacking: Mapping[str, str]) -> list[object]:
    """The client's scenarios that match; `lacking` says which of them can't pass yet, and why."""
    names = [name for name in client.scenarios() if re.match(pattern, name)]
    assert lacking.keys() <= set(names)
    return [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=lacking[name]))
        if name in lacking
        else name
        for name in names
    ]


def passes(
    program: Program, name: str, *arguments: str, favours: Mapping[str, Favour] = NO_FAVOURS
) -> None:
    outcome = program.run(name, *arguments, favours=favours)
    if outcome.failure is not None:
        pytest.fail(outcome.failure, pytrace=False)
