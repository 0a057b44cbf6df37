"""What a transaction has stored, against a set of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from magnetar.txn.buffer.txn_dedup import Sent, SequenceNews, TxnRuns, TxnSequences, TxnVerdict


def test_what_is_in_flight_is_unknown_and_what_failed_may_come_again() -> None:
    begun: list[str] = []
    stored = TxnSequences(lambda name, _: begun.append(name))
    assert stored.judge(Sent("p", 1, 1)) is TxnVerdict.STORE
    assert stored.judge(Sent("p", 1, 1)) is TxnVerdict.UNKNOWN
    stored.settled(Sent("p", 1, 1), stored=False)
    assert stored.judge(Sent("p", 1, 3)) is TxnVerdict.STORE
    stored.settled(Sent("p", 1, 3), stored=True)
    assert stored.judge(Sent("p", 3, 3)) is TxnVerdict.DUPLICATE
    assert stored.judge(Sent("p", 4, 4)) is TxnVerdict.STORE
    assert stored.judge(Sent("q", 3, 3)) is TxnVerdict.STORE
    assert begun == ["p", "q"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=40))
def test_runs_hold_what_was_noted(notes: list[tuple[int, int]]) -> None:
    stored, expected = TxnRuns(), set[int]()
    for first, more in notes:
        stored.add(first, first + more)
        expected |= set(range(first, first + more + 1))
    spans = list(stored)
    assert {number for first, last in spans for number in range(first, last + 1)} == expected
    assert all(low + 1 < high for (_, low), (high, _) in pairwise(spans))
    for number in range(40):
        verdict = stored.judge(number, number)
        assert verdict is (TxnVerdict.DUPLICATE if number in expected else TxnVerdict.STORE)


@given(st.lists(st.tuples(st.sampled_from("psfx"), st.integers(0, 12)), max_size=60))
def test_plain_sends_beside_judged_ones(steps: list[tuple[str, int]]) -> None:
    """A message is never taken twice, and one is called a duplicate only if it is durable."""
    runs = TxnRuns()
    flying: list[tuple[int, bool]] = []
    durable = set[int]()
    for kind, number in steps:
        if kind == "p" and number > runs.pushed:
            runs.pushed = number
            runs.plain += 1
            flying.append((number, True))
        elif kind == "s":
            verdict = runs.judge(number, number)
            assert (verdict is TxnVerdict.DUPLICATE) == (number in durable)
            if verdict is TxnVerdict.STORE:
                assert number not in durable
                assert number not in [each for each, _ in flying]
                flying.append((number, False))
        elif kind in "fx" and flying:
            number, plain = flying.pop(0)
            if kind == "f":
                durable.add(number)
            if plain and kind == "f":
                runs.plain_stored(number)
                continue
            runs.plain -= plain
            runs.flying.discard(number)
            if kind == "f":
                runs.add(number, number)
    assert {each for first, last in runs for each in range(first, last + 1)} == durable


def test_news_are_kept_while_somebody_follows_them_and_taken_once_in_order() -> None:
    news, runs, sent = SequenceNews(), TxnRuns(), Sent("p", 3, 4)
    news.began("p", runs)
    assert not news  # the topic has no dedup: nobody would ever take it
    news.is_followed = True
    news.began("p", runs)
    news.ended("COMMITTED", "p", runs)
    news.late("ABORTED", sent)
    assert news.take() == [
        ("OPEN", "p", runs),
        ("COMMITTED", "p", runs),
        ("ABORTED", "p", sent),
    ]
    assert not news
    assert news.take() == []
