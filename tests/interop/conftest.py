"""What tests with the official client get: a served folder, clients, names of their own.

Invariants:
1. The server ends with code 0 on SIGTERM, and wrote no error while all the tests ran.
2. Every client is closed before its test ends.
3. The check for what a test leaves behind does not hold here: the official client keeps the
   descriptors of its native event loops as long as any object of it is referred to, and pytest
   refers to a test's arguments until after that check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pulsar  # type: ignore[import-untyped]
import pytest

from harness.limits import PATIENCE_S
from tests.interop.serving import ServerProcess, served

OPERATION_SECONDS = round(PATIENCE_S)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """In the place of the check of all other folders; see invariant 3."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("interop")) as process:
        yield process


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """For a test that stops it."""
    with served(tmp_path) as process:
        yield process


@pytest.fixture
def new_client() -> Iterator[Callable[[ServerProcess], Any]]:
    """Makes clients, each with a connection of its own."""
    clients = []

    def make(server: ServerProcess) -> Any:
        clients.append(
            pulsar.Client(
                server.service_url,
                operation_timeout_seconds=OPERATION_SECONDS,
                logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Warn),
            )
        )
        return clients[-1]

    yield make
    for each in clients:
        each.close()


@pytest.fixture
def client(new_client: Callable[[ServerProcess], Any], server: ServerProcess) -> Any:
    return new_client(server)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that only this test uses."""
    local_name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"persistent://public/default/{local_name}"
