"""The queue of waiting positions, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.redelivery import RedeliveryCounts, ReplayQueue
from magnetar.errors import InvariantBroken
from magnetar.model.ids import Position

POSITIONS = st.builds(Position, st.integers(0, 2), st.integers(0, 9))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add_all", "add_run", "remove", "remove_all", "drop_through", "end_turn"]
        ),
        st.lists(POSITIONS, min_size=1, max_size=6),
    ),
    max_size=30,
)


def hash_of(position: Position) -> int:
    return position.entry_id % 3


@given(STEPS)
def test_as_a_plain_set(steps: list[tuple[str, list[Position]]]) -> None:
    queue = ReplayQueue()
    model: set[Position] = set()
    for step, positions in steps:
        first = positions[0]
        if step == "add":
            queue.add(first, hash_of(first))
            model.add(first)
        elif step == "add_all":
            queue.add_all((each, hash_of(each)) for each in positions)
            model |= set(positions)
        elif step == "add_run":
            run = {each: 1 for each in positions if hash_of(each) == hash_of(first)}
            queue.add_run(run.keys() - model, hash_of(first))
            model |= run.keys()
        elif step == "remove":
            assert queue.remove(first) == (first in model)
            model.discard(first)
        elif step == "remove_all":
            queue.remove_all(sorted(model & set(positions)))
            model -= set(positions)
        elif step == "drop_through":
            queue.drop_through(first)
            model = {each for each in model if each > first}
        else:
            queue.end_turn(hash_of(first))
        queue.check_invariants()
        assert len(queue) == len(model)
        assert all(each in queue for each in model)
        assert set(queue.hashes) == {hash_of(each) for each in model}
        for key_hash in range(3):
            expected = sorted(each for each in model if hash_of(each) == key_hash)
            assert queue.first(key_hash, 3) == expected[:3]
            assert queue.head(key_hash) == (expected[0] if expected else None)


def test_a_served_hash_goes_behind_the_others() -> None:
    queue = ReplayQueue()
    for number in (5, 3, 4):
        queue.add(Position(1, number), number)
    queue.end_turn(5)
    assert list(queue.hashes) == [3, 4, 5]
    queue.end_turn(77)
    assert list(queue.hashes) == [3, 4, 5]
    queue.clear()
    assert len(queue) == 0


def test_a_broken_queue_says_so() -> None:
    queue = ReplayQueue()
    queue.add(Position(1, 1), 0)
    queue._waiting[0].append(Position(1, 0))
    with pytest.raises(InvariantBroken):
        queue.check_invariants()


def test_counts_grow_and_are_forgotten() -> None:
    counts = RedeliveryCounts()
    low, high = Position(1, 1), Position(1, 2)
    for position in (low, low, high):
        counts.increase(position)
    assert (counts.of(low), counts.of(high), counts.of(Position(9, 9))) == (2, 1, 0)
    counts.drop_through(low)
    assert set(counts.positions) == {high}
    counts.forget(high)
    assert len(counts) == 0
    counts.increase(low)
    counts.clear()
    assert counts.of(low) == 0
