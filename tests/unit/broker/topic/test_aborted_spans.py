"""Where entries of aborted transactions are looked for."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.topic.transactions import merged
from magnetar.model.ids import Position

positions = st.builds(Position, st.integers(1, 3), st.integers(0, 20))
spans = st.lists(st.tuples(positions, positions).map(lambda pair: (min(pair), max(pair))))


@given(spans)
def test_merged_spans_hold_the_same_positions_once(
    given_spans: list[tuple[Position, Position]],
) -> None:
    found = merged(given_spans)
    assert all(one[1] < other[0] for one, other in pairwise(found))
    for ledger in range(1, 4):
        for entry in range(21):
            at = Position(ledger, entry)
            before = any(first <= at <= last for first, last in given_spans)
            assert before == any(first <= at <= last for first, last in found)
