"""Random lives of a topic that is read by ranges; and that planted bugs are found by them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.ranges.view import RangeView
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.errors import MagnetarError
from magnetar.model.ranges import ORIGIN, RangePosition
from magnetar.testing.virtual.virtual_time import run
from tests.examples import examples
from tests.unit.broker.range_history import LIMITS, RangeHistory
from tests.unit.broker.txn_world import TxnWorld


def live(seed: int, count: int) -> None:
    async def main() -> None:
        await RangeHistory(TxnWorld(LIMITS), random.Random(seed)).live(count)

    run(main())


@given(st.integers(0, 2**32))
@settings(max_examples=examples(8), derandomize=True, deadline=None)
def test_ranges_are_what_the_list_of_messages_says(seed: int) -> None:
    live(seed, 40)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 100))
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_ranges_are_what_the_list_of_messages_says_for_long(seed: int, count: int) -> None:
    live(seed, count)


# --- planted bugs


def aborted_is_visible(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeView, "is_visible", lambda *_: True)


def trimmed_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RangeView, "check_kept", lambda *_: None)


def undecided_is_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicTransactions, "max_read_position", lambda self: self._ledger.last_position())


def end_of_the_newest_ledger(patch: pytest.MonkeyPatch) -> None:
    """Positions that change though no entry came."""

    def behind(self: RangeView, _: object) -> RangePosition:
        span = self.ledger.ledger_spans[-1]
        return RangePosition(span.ledger_id, span.entries)

    patch.setattr(RangeView, "_behind_last", behind)


def first_of_the_list(patch: pytest.MonkeyPatch) -> None:
    """What was read to its end before it was trimmed counts as lost."""

    def first(self: RangeView) -> RangePosition:
        if self.ledger.trimmed_through is None:
            return ORIGIN
        return RangePosition(self.ledger.ledger_spans[0].ledger_id, 0)

    patch.setattr(RangeView, "first", first)


PLANTED = (
    aborted_is_visible,
    trimmed_is_skipped,
    undecided_is_read,
    end_of_the_newest_ledger,
    first_of_the_list,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(50):
        try:
            live(seed, 40)
        except (AssertionError, MagnetarError):
            return
    pytest.fail("it was not found")
