"""The official client for Go against our server."""

from __future__ import annotations

import pytest

from tests.interop.program import Program, passes
from tests.interop.serving import ServerProcess
from tests.interop_go.program import scenarios

# The first test may wait for Go to fetch and compile the client. One worker has them all: they
# share a server, and a program.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("interop-go")]

_RESTARTS = [name for name in scenarios() if name.startswith("restart-")]


@pytest.mark.parametrize("name", [name for name in scenarios() if name not in _RESTARTS])
def test_scenario(program: Program, name: str) -> None:
    passes(program, name)


@pytest.mark.parametrize("name", _RESTARTS)
def test_a_server_that_is_killed_amid_it(
    own_server: ServerProcess, own_program: Program, name: str
) -> None:
    passes(own_program, name, favours={"restart": lambda _: _kill_and_start(own_server)})


@pytest.mark.parametrize(
    "name", [name for name in scenarios() if name.startswith(("key-", "sticky", "txn-"))]
)
def test_keys_by_ranges_and_transactions_in_records(program_otherwise: Program, name: str) -> None:
    passes(program_otherwise, name)


def _kill_and_start(server: ServerProcess) -> None:
    server.kill()
    server.start()
