"""What tests with official Java clients get: a served folder, and the programs of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.program import Program
from tests.interop.serving import ServerProcess, served
from tests.interop_java.maven import BuildFailed, lacking
from tests.interop_java.program import SCALABLE, V4, Client


@pytest.fixture(scope="session")
def built() -> None:
    _build(SCALABLE)


@pytest.fixture(scope="session")
def built_v4() -> None:
    _build(V4)


def _build(client: Client) -> None:
    reason = lacking("javac")
    if reason is not None:
        pytest.skip(reason)
    try:
        client.project.build()
    except BuildFailed as error:
        if error.fetching:
            pytest.skip(f"Maven could not fetch the official client: {error}")
        pytest.fail(f"Maven could not build the program:\n{error}", pytrace=False)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("interop-java")) as process:
        yield process


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may kill, and start again."""
    with served(tmp_path) as process:
        yield process


@pytest.fixture(scope="module")
def program(
    built: None, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """The program against the client for scalable topics, while the tests of a module run."""
    with Program.started(SCALABLE.command(server), tmp_path_factory.mktemp("program")) as running:
        yield running


@pytest.fixture(scope="module")
def program_v4(
    built_v4: None, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """The program against the client of version 4, while the tests of a module run."""
    with Program.started(V4.command(server), tmp_path_factory.mktemp("program")) as running:
        yield running


@pytest.fixture
def own_program(built: None, own_server: ServerProcess, tmp_path: Path) -> Iterator[Program]:
    with Program.started(SCALABLE.command(own_server), tmp_path) as running:
        yield running


@pytest.fixture
def own_program_v4(built_v4: None, own_server: ServerProcess, tmp_path: Path) -> Iterator[Program]:
    with Program.started(V4.command(own_server), tmp_path) as running:
        yield running
