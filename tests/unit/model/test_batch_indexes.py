"""Batch-index sets in their two forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.errors import NotAllowed
from magnetar.model.batch_indexes import unacked_of, words_of

WORDS_MAX = 64


@pytest.mark.parametrize(
    ("unacked", "words"),
    [
        (0, ()),
        (0b101, (5,)),
        (1 << 63, (-(1 << 63),)),
        ((1 << 64) - 1, (-1,)),
        (1 << 64, (0, 1)),
        ((1 << 70) - 1, (-1, 63)),
    ],
)
def test_words_are_signed_and_the_lowest_comes_first(unacked: int, words: tuple[int, ...]) -> None:
    assert words_of(unacked) == words
    assert unacked_of(words, WORDS_MAX) == unacked


@given(st.integers(0, (1 << 300) - 1))
def test_words_round_trip(unacked: int) -> None:
    words = words_of(unacked)
    assert unacked_of(words, WORDS_MAX) == unacked
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    assert not words or words[-1] != 0
    unsigned = [word & (1 << 64) - 1 for word in words]
    assert unacked_of([*unsigned, 0, 0], WORDS_MAX) == unacked


def test_too_many_words_are_refused() -> None:
    with pytest.raises(NotAllowed, match="limit is 2"):
        unacked_of([1, 2, 3], 2)
