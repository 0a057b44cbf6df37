"""A set of positions in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magnetar.model.ids import Position
from magnetar.model.position_set import PositionSet

positions = st.builds(Position, st.integers(0, 3), st.integers(0, 200))


@given(st.sets(positions), st.sets(positions), st.integers(0, 50))
def test_it_is_a_set_in_order(added: set[Position], gone: set[Position], count: int) -> None:
    found = PositionSet()
    for each in added:
        found.add(each)
    for each in gone:
        found.discard(each)
    left = sorted(added - gone)
    assert (list(found), len(found), bool(found)) == (left, len(left), bool(left))
    assert found.first() == (left[0] if left else None)
    assert all(each in found for each in left)
    assert list(found.within(1, 10, 100)) == [
        each.entry_id for each in left if each.ledger_id == 1 and 10 <= each.entry_id <= 100
    ]
    assert found.take(count) == left[:count]
    assert list(found) == left[count:]
