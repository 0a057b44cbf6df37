"""The list of ledgers: positions, rollover and trimming."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.errors import InvariantBroken
from magnetar.managed_ledger.ledger_list import LedgerList, LedgerSpan, Retention, Rollover
from magnetar.model.ids import Position
from tests.examples import examples

COUNTS = st.lists(st.integers(0, 4), max_size=6)
POSITIONS = st.builds(Position, st.integers(0, 16), st.integers(-2, 6))


def ledgers_of(counts: list[int]) -> LedgerList:
    """Ledgers 3, 6, 9, ...: closed but the last, 10 bytes per entry, closed at 1 s, 2 s, ..."""
    spans = [
        LedgerSpan(3 * at + 3, 0, 1000 * (at + 1), count, 10 * count)
        for at, count in enumerate(counts[:-1])
    ]
    if counts:
        spans.append(LedgerSpan(3 * len(counts), 0, None, counts[-1], 10 * counts[-1]))
    return LedgerList(spans)


@settings(max_examples=examples(300))
@given(COUNTS, POSITIONS, POSITIONS, st.integers(0, 3))
def test_positions_are_those_of_a_plain_list(
    counts: list[int], position: Position, other: Position, more: int
) -> None:
    ledgers = ledgers_of(counts)
    assert ledgers.total == sum(counts)
    if counts:
        ledgers.grow(3 * len(counts), counts[-1] + more, 0)
        counts = [*counts[:-1], counts[-1] + more]
    there = [
        Position(3 * at + 3, entry_id)
        for at, count in enumerate(counts)
        for entry_id in range(count)
    ]
    assert [ledgers.at(number) for number in range(ledgers.total)] == there
    assert (ledgers.first, ledgers.last) == ((there[0], there[-1]) if there else (None, None))
    assert ledgers.exists(position) == (position in there)
    above = [each for each in there if each > position]
    below = [each for each in there if each < position]
    at_or_after = next((each for each in there if each >= position), None)
    assert ledgers.at_or_after(position) == at_or_after
    assert ledgers.after(position) == (above[0] if above else None)
    assert ledgers.before(position) == (below[-1] if below else None)
    expected = position if position in there else (below[-1] if below else None)
    assert ledgers.at_or_before(position) == expected
    between = [each for each in there if position < each <= other]
    assert ledgers.count_between(position, other) == len(between)


def test_changes_keep_the_order_and_only_open_ledgers_grow() -> None:
    ledgers = ledgers_of([2, 3])
    with pytest.raises(InvariantBroken):
        ledgers.add(LedgerSpan(6, 0))
    with pytest.raises(InvariantBroken):
        ledgers.grow(3, 5, 0)
    with pytest.raises(InvariantBroken):
        ledgers.grow(6, 2, 0)
    with pytest.raises(InvariantBroken):
        ledgers.grow(7, 2, 0)
    with pytest.raises(InvariantBroken):
        ledgers.at(5)
    ledgers.close(6, 4, 44, 9000)
    assert ledgers.spans[-1] == LedgerSpan(6, 0, 9000, 4, 44)
    assert ledgers.size_bytes == 64
    ledgers.add(LedgerSpan(7, 0))
    ledgers.drop([3])
    assert [span.ledger_id for span in ledgers.spans] == [6, 7]
    assert (3 in ledgers, 6 in ledgers) == (False, True)
    assert ledgers.rank(Position(6, 1)) == 2


def test_rollover_by_size_entries_and_age_but_never_empty() -> None:
    rollover = Rollover(size_bytes=100, entries=10, seconds=60)
    assert rollover.due(1, 100, 0)
    assert rollover.due(10, 1, 0)
    assert rollover.due(1, 1, 60)
    assert not rollover.due(9, 99, 59.9)
    assert not rollover.due(0, 0, 3600)


NOTHING_KEPT = Retention(0, 0)


@pytest.mark.parametrize(
    ("retention", "now_ms", "acked_through", "lowest_pin", "expected"),
    [
        (NOTHING_KEPT, 5000, None, None, [3, 6, 9]),
        (Retention(None, None), 10**12, None, None, []),
        (Retention(2, None), 4500, None, None, [3, 6]),
        (Retention(None, 35), 4500, None, None, [3, 6]),
        (Retention(3600, 35), 4500, None, None, [3, 6]),
        (NOTHING_KEPT, 5000, Position(3, 1), None, [3, 6]),
        (NOTHING_KEPT, 5000, Position(3, 0), None, []),
        (NOTHING_KEPT, 5000, Position(9, 0), None, [3, 6]),
        (NOTHING_KEPT, 5000, Position(12, 0), None, [3, 6, 9]),
        (NOTHING_KEPT, 5000, None, Position(3, 1), []),
        (NOTHING_KEPT, 5000, None, Position(6, 0), [3, 6]),
        (NOTHING_KEPT, 5000, None, Position(9, 1), [3, 6]),
        (NOTHING_KEPT, 5000, None, Position(9, 2), [3, 6, 9]),
    ],
)
def test_trim_takes_only_leading_closed_ledgers_that_nobody_needs(
    retention: Retention,
    now_ms: int,
    acked_through: Position | None,
    lowest_pin: Position | None,
    expected: list[int],
) -> None:
    ledgers = ledgers_of([2, 0, 2, 2])
    found = ledgers.trimmable(retention, now_ms, acked_through=acked_through, lowest_pin=lowest_pin)
    assert found == expected
