"""The isolation that subscriptions ask for."""

from __future__ import annotations

import pytest

from magnetar.errors import NotAllowed
from magnetar.model.isolation import (
    ISOLATION_PROPERTY,
    ReadIsolation,
    asked_isolation,
    stored_isolation,
    with_isolation,
)

DIRTY = {ISOLATION_PROPERTY: "read_uncommitted"}
CLEAN = {ISOLATION_PROPERTY: "read_committed"}


def test_nobody_reads_more_without_asking() -> None:
    assert asked_isolation({"other": "read_uncommitted"}) is None
    assert stored_isolation({}) is ReadIsolation.COMMITTED
    assert asked_isolation(CLEAN) is stored_isolation(CLEAN) is ReadIsolation.COMMITTED
    assert asked_isolation(DIRTY) is stored_isolation(DIRTY) is ReadIsolation.UNCOMMITTED


@pytest.mark.parametrize("value", ["", "READ_UNCOMMITTED", "read uncommitted", "snapshot"])
def test_unknown_values_are_refused_and_never_mean_more(value: str) -> None:
    given = {ISOLATION_PROPERTY: value}
    with pytest.raises(NotAllowed, match="read_committed or read_uncommitted"):
        asked_isolation(given)
    assert stored_isolation(given) is ReadIsolation.COMMITTED


def test_a_consumer_asks_for_its_subscription() -> None:
    assert with_isolation({"a": "b"}, {"c": "d"}) == {"a": "b"}
    assert with_isolation({"a": "b"}, DIRTY) == {"a": "b", **DIRTY}
    assert with_isolation(DIRTY, DIRTY) == DIRTY
    with pytest.raises(NotAllowed, match="once"):
        with_isolation(DIRTY, CLEAN)
