"""Pauses between tries."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.connection.backoff import JITTER, Backoff


@given(st.integers(0, 2**32), st.floats(0.001, 10), st.floats(1, 1000), st.integers(1, 60))
def test_pauses_double_up_to_the_limit_and_are_shortened_a_little(
    seed: int, first: float, factor: float, count: int
) -> None:
    most = first * factor
    backoff = Backoff(Random(seed), first_s=first, most_s=most)
    nominal = first
    for _ in range(count):
        pause = backoff.next()
        assert nominal * (1 - JITTER) <= pause <= nominal
        nominal = min(most, 2 * nominal)
    backoff.reset()
    assert backoff.next() <= first


def test_two_clients_do_not_come_back_in_step() -> None:
    one, two = Backoff(Random(1)), Backoff(Random(2))
    assert [one.next() for _ in range(5)] != [two.next() for _ in range(5)]
