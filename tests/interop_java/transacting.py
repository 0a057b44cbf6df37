"""Scenarios of transactions as tests, those included that can't pass yet.

Owns: `named` (the parameters of a test) and `passes` (runs one scenario).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

import pytest

from tests.interop.serving import ServerProcess
from tests.interop_java.program import Client, Program


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


def passes(server: ServerProcess, program: Program, name: str) -> None:
    """It may ask for a kill of the server, so that one must be the test's own then."""
    outcome = program.run(name, favours={"restart": lambda: _kill_and_start(server)})
    if outcome.failure is not None:
        pytest.fail(outcome.failure, pytrace=False)


def _kill_and_start(server: ServerProcess) -> None:
    server.signal(signal.SIGKILL)
    server.ended(code=-signal.SIGKILL)
    server.start()
