"""What the client's end-to-end tests get: a target, and what is expected to fail there.

Invariants:
1. A test that needs what the target lacks is skipped, and the reason names the feature.
2. A test that is expected to fail at this server (`expected_failures.toml`) and passes is reported:
   as a failure if it should always fail, in the summary if it should sometimes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.client_e2e.target import SERVER, SERVICE_URL, Feature, Target, targeted

_EXPECTED = Path(__file__).with_name("expected_failures.toml")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*features): what the server has to offer")


@dataclass(frozen=True)
class ExpectedFailure:
    """One defect of one server."""

    test: str
    finding: str
    always: bool
    why: str


@cache
def expected_failures(version: str) -> dict[str, ExpectedFailure]:
    """By the name of the test, those of a server that calls itself so."""
    known = tomllib.loads(_EXPECTED.read_text("utf-8"))
    return {
        each["test"]: ExpectedFailure(**each)
        for server in known["server"]
        if server["version"] in version
        for each in server["expected"]
    }


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with targeted(tmp_path_factory.mktemp("client-e2e")) as found:
        yield found


@pytest.fixture(scope="module")
def own_target(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server of the same kind that a module may kill, and start again."""
    if target.process is None:
        pytest.skip(f"the server does not offer {Feature.RESTARTS.value}")
    with targeted(tmp_path_factory.mktemp("client-e2e-own")) as found:
        yield found


@pytest.fixture(autouse=True)
def only_what_is_offered(request: pytest.FixtureRequest, target: Target) -> None:
    for mark in request.node.iter_markers("needs"):
        for feature in mark.args:
            if feature not in target.features:
                pytest.skip(f"{target.version} does not offer {feature.value}")
    name = f"{request.path.stem}::{request.node.name}"
    failure = expected_failures(target.version).get(name)
    if failure is not None:
        reason = f"{failure.finding}: {failure.why}"
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=failure.always))


def pytest_report_header() -> str:
    return f"client-e2e: {SERVICE_URL} or {SERVER} choose the server"
