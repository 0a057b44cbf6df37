"""What tests with the official Go client get: a served folder, and the program of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.program import Program
from tests.interop.serving import ServerProcess, served
from tests.interop_go.program import BuildFailed, build, command, lacking

_OTHERWISE = {
    "MAGNETAR_SUBSCRIPTION_KEY_SHARED_USE_CONSISTENT_HASHING": "false",
    "MAGNETAR_TRANSACTION_KIND": "metadata",
}


@pytest.fixture(scope="session")
def built() -> None:
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)
    try:
        build()
    except BuildFailed as error:
        if error.fetching:
            pytest.skip(f"Go could not fetch the official client: {error}")
        pytest.fail(f"Go could not build the program:\n{error}", pytrace=False)


@pytest.fixture(scope="session")
def server(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("interop-go")) as process:
        yield process


@pytest.fixture
def own_server(built: None, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may kill, and start again."""
    with served(tmp_path) as process:
        yield process


@pytest.fixture(scope="module")
def program(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The program, while the tests of a module run."""
    with Program.started(command(server), tmp_path_factory.mktemp("program")) as running:
        yield running


@pytest.fixture(scope="module")
def program_otherwise(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The program against a server whose settings are not the defaults."""
    folder = tmp_path_factory.mktemp("interop-go-otherwise")
    with served(folder, _OTHERWISE) as server, Program.started(command(server), folder) as running:
        yield running


@pytest.fixture
def own_program(own_server: ServerProcess, tmp_path: Path) -> Iterator[Program]:
    with Program.started(command(own_server), tmp_path) as running:
        yield running
