"""Redelivery: delays by count, deadlines against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.consume.segment.nacks import Deadlines, RedeliveryDelay
from magnetar.errors import InvalidSetting
from magnetar.model.ids import Position


@given(st.floats(0, 100), st.floats(1, 1e300), st.floats(0, 1e6), st.integers(0, 2**31))
def test_delays_grow_up_to_a_limit(first: float, factor: float, extra: float, count: int) -> None:
    delay = RedeliveryDelay(first, factor, first + extra)
    assert delay.after(0) == first
    assert first <= delay.after(count) <= delay.after(count + 1) <= delay.most


@pytest.mark.parametrize("wrong", [(-1, 1, 2), (3, 1, 2), (1, 0.5, 2), (1, 1, float("inf"))])
def test_delays_that_make_no_sense_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidSetting):
        RedeliveryDelay(*wrong)


_STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "drop", "due"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=200,
)


@given(_STEPS)
def test_deadlines_are_those_of_a_plain_table(steps: list[tuple[str, int, int]]) -> None:
    deadlines = Deadlines()
    model: dict[Position, float] = {}
    for step, entry, time in steps:
        position = Position(1, entry)
        if step == "set":
            deadlines.set(position, time)
            model[position] = time
        elif step == "drop":
            deadlines.drop(position)
            model.pop(position, None)
        else:
            expected = sorted(
                (each for each in model if model[each] <= time),
                key=lambda each: (model[each], each),
            )
            assert deadlines.due(time) == expected
            for each in expected:
                del model[each]
        assert deadlines.next_at == min(model.values(), default=None)
        assert len(deadlines) == len(model)
        assert all(each in deadlines for each in model)
    deadlines.clear()
    assert deadlines.next_at is None


def test_setting_anew_again_and_again_keeps_nothing() -> None:
    deadlines = Deadlines()
    for time in range(10_000):
        deadlines.set(Position(1, 1), float(time))
    assert len(deadlines._queue) < 100
