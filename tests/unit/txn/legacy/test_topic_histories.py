"""Random lives of a topic with legacy transactions; and that planted bugs are found by them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.broker.topic import transactions
from magnetar.testing.virtual.virtual_time import run
from magnetar.txn.buffer.visibility import Visibility
from magnetar.txn.legacy.legacy_buffer import LegacyTransactionBuffer, MarkedTransaction
from magnetar.txn.legacy.stream_store import StreamStore
from magnetar.txn.store import TxnStore
from tests.examples import examples
from tests.unit.broker.legacy_history import LegacyHistory
from tests.unit.broker.txn_history import Step, random_steps
from tests.unit.broker.txn_world import TxnWorld


def live(seed: int, steps: list[Step]) -> None:
    async def main() -> None:
        await LegacyHistory(TxnWorld(), seed, local=True).live(steps)

    run(main())


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 60))
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_consumers_see_exactly_what_is_committed(seed: int, count: int) -> None:
    live(seed, random_steps(random.Random(seed), count))


# --- planted bugs


def no_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Visibility, "max_read_position", lambda _, last: last)


def no_scan(patch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return None

    patch.setattr(LegacyTransactionBuffer, "_scan", nothing)


def no_record_before_the_first_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamStore, "exists", True)


def no_aborted_record(patch: pytest.MonkeyPatch) -> None:
    async def not_written(*_: object, **__: object) -> None:
        return None

    patch.setattr(TxnStore, "write_aborted", not_written)


def end_without_marker(patch: pytest.MonkeyPatch) -> None:
    async def unmarked(self: LegacyTransactionBuffer, txn: Any, _: object) -> None:
        self._stream.over(txn)

    patch.setattr(LegacyTransactionBuffer, "_mark", unmarked)


def shown_before_the_marker_is_durable(patch: pytest.MonkeyPatch) -> None:
    finish = LegacyTransactionBuffer._finish

    async def early(self: LegacyTransactionBuffer, segment_txn: MarkedTransaction) -> None:
        self._visibility.commit(segment_txn.txn)
        await finish(self, segment_txn)

    patch.setattr(LegacyTransactionBuffer, "_finish", early)


def markers_are_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transactions, "trace_of", lambda _: None)


PLANTED = (
    no_bounds,
    no_scan,
    no_record_before_the_first_message,
    no_aborted_record,
    end_without_marker,
    shown_before_the_marker_is_durable,
    markers_are_shown,
)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(100):
        steps = random_steps(random.Random(seed), 50)
        try:
            live(seed, steps)
        except AssertionError:
            return
    pytest.fail("no life shows it")
