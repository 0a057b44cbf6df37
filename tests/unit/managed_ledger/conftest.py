"""The backends on which the tests of managed ledgers run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.managed_ledger.world import (
    EmbeddedWorldFactory,
    MemoryWorldFactory,
    WorldFactory,
)


@pytest.fixture
def memory_world_factory() -> MemoryWorldFactory:
    return MemoryWorldFactory()


@pytest.fixture(params=["memory", "embedded"])
def world_factory(request: pytest.FixtureRequest, tmp_path: Path) -> WorldFactory:
    if request.param == "memory":
        return MemoryWorldFactory()
    return EmbeddedWorldFactory(tmp_path)
