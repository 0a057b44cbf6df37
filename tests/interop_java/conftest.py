"""What tests with the official Java client get: a served folder, and the program of this folder.

Invariant: the server ends with code 0 on SIGTERM, and wrote no error while all the tests ran.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.serving import ServerProcess
from tests.interop_java.program import BuildFailed, Program, build, lacking


@pytest.fixture(scope="session")
def built() -> None:
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)
    try:
        build()
    except BuildFailed as error:
        if error.fetching:
            pytest.skip(f"Maven could not fetch the official client: {error}")
        pytest.fail(f"Maven could not build the program:\n{error}", pytrace=False)


@pytest.fixture(scope="session")
def server(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("interop-java"))
    process.start()
    try:
        yield process
    finally:
        process.stop()
    errors = [line for line in process.written.splitlines() if _is_error(line)]
    assert not errors, "\n".join(errors)


def _is_error(line: str) -> bool:
    return line.split(" ")[1:2] == ["error"] or line.startswith("Traceback")


@pytest.fixture(scope="session")
def program(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("program") / "stderr"
    running = Program(server.service_url, server.admin_url, log)
    yield running
    running.stop()
