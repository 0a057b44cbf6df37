"""The active consumer: priority first, then names; spread over partitions and topics."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.dispatch.members import Candidate, choose_active

NAMES = [Candidate(0, "b", 1), Candidate(0, "a", 2), Candidate(0, "c", 3)]


def test_nobody_to_choose_from() -> None:
    assert choose_active([], "t", None) is None
    assert choose_active([], "t", 3) is None


def test_partitions_go_round_the_consumers_in_the_order_of_names() -> None:
    assert [choose_active(NAMES, "t", partition) for partition in range(4)] == [2, 1, 3, 2]


def test_only_the_lowest_priority_number_is_chosen() -> None:
    candidates = [*NAMES, Candidate(-1, "z", 9)]
    assert {choose_active(candidates, "t", partition) for partition in range(5)} == {9}
    assert {choose_active(candidates, f"t{number}", None) for number in range(5)} == {9}


def test_topics_are_spread_over_the_consumers() -> None:
    chosen = Counter(choose_active(NAMES, f"persistent://t/n/x{n}", None) for n in range(900))
    assert set(chosen) == {1, 2, 3}
    assert min(chosen.values()) > 150


def test_a_topic_keeps_its_choice_across_versions() -> None:
    chosen = [choose_active(NAMES, f"persistent://public/default/x{n}", None) for n in range(12)]
    assert chosen == [3, 3, 2, 1, 3, 3, 1, 2, 2, 1, 2, 3]


@given(st.permutations(NAMES), st.text(max_size=8), st.none() | st.integers(0, 7))
def test_the_order_of_arrival_does_not_matter(
    candidates: list[Candidate], topic: str, partition: int | None
) -> None:
    assert choose_active(candidates, topic, partition) == choose_active(NAMES, topic, partition)


@given(st.text(max_size=8), st.sampled_from([1, 2, 3]))
def test_on_the_ring_others_going_does_not_move_a_topic(topic: str, gone: int) -> None:
    before = choose_active(NAMES, topic, None)
    after = choose_active([each for each in NAMES if each.key != gone], topic, None)
    assert after == before or before == gone
