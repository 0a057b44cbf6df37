"""Scenarios of transactions as tests, those included that can't pass yet.

Owns: `named`, the parameters of a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.interop_java.program import Client


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
