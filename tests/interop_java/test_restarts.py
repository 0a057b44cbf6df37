"""Transactions of official Java clients whose server is killed, and started again, amid them."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from tests.interop.program import Program, passes
from tests.interop.serving import ServerProcess
from tests.interop_java.program import SCALABLE, V4
from tests.interop_java.transacting import named

# The first test may wait for Maven to fetch a client.
pytestmark = pytest.mark.slow

LACKING: Mapping[str, str] = {}
LACKING_V4: Mapping[str, str] = {}


@pytest.mark.parametrize("name", named(SCALABLE, "transaction-restart", LACKING))
def test_scalable_topics(own_server: ServerProcess, own_program: Program, name: str) -> None:
    passes(own_program, name, favours={"restart": lambda _: _kill_and_start(own_server)})


@pytest.mark.parametrize("name", named(V4, "restart", LACKING_V4))
def test_version_4(own_server: ServerProcess, own_program_v4: Program, name: str) -> None:
    passes(own_program_v4, name, favours={"restart": lambda _: _kill_and_start(own_server)})


def _kill_and_start(server: ServerProcess) -> None:
    server.signal(signal.SIGKILL)
    server.ended(code=-signal.SIGKILL)
    server.start()
