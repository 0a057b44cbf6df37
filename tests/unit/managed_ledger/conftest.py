"""The backends on which the tests of managed ledgers run."""

from __future__ import annotations

import pytest

from tests.unit.managed_ledger.world import World, WorldFactory


@pytest.fixture(params=[World], ids=["memory"])
def world_factory(request: pytest.FixtureRequest) -> WorldFactory:
    factory: WorldFactory = request.param
    return factory
