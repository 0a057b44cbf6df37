"""The simulation of the broker finds it if a rule of compaction is missing.

As in `test_broker_mutations`, a rule is taken away by patching it from here.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.simulation.broker.run import simulate_broker
from magnetar.broker.compact.compacted_ledger import CompactedWriter
from magnetar.broker.compact.compaction import Compaction
from magnetar.broker.compact.compaction_state import CompactionState
from magnetar.broker.compact.latest_keys import LatestKeys, Survivors
from magnetar.broker.compact.passes import CompactionRun
from magnetar.model.ids import Position
from tests.simulation.search import first_violation

SEEDS = 40


def _first_violation(first: int) -> str:
    return first_violation(simulate_broker, SEEDS, first)


def test_deletions_that_are_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LatestKeys.__init__

    def keeping(keys: LatestKeys, keys_max: int, **_: bool) -> None:
        made(keys, keys_max, keeps_deletions=True)

    monkeypatch.setattr(LatestKeys, "__init__", keeping)
    assert "is not due" in _first_violation(first=1)


def test_a_survivor_that_is_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    survivors = CompactionRun.survivors

    async def without_one(run: CompactionRun) -> Survivors:
        found = await survivors(run)
        found.entries.take(1)
        return found

    monkeypatch.setattr(CompactionRun, "survivors", without_one)
    assert "is not seen" in _first_violation(first=1)


def test_a_former_view_that_is_passed_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CompactionRun.__init__

    def without_it(run: CompactionRun, *parts: Any, **options: Any) -> None:
        made(run, *parts, **options)
        run._former = None

    monkeypatch.setattr(CompactionRun, "__init__", without_it)
    assert "is not seen" in _first_violation(first=1)


def test_a_former_view_that_is_deleted_before_the_new_one_is_named_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace = Compaction._replace

    async def too_early(compaction: Compaction, ledger_id: int, horizon: Position) -> None:
        if compaction.view is not None:
            await compaction._ledgers.delete(compaction.view.ledger_id)
        await replace(compaction, ledger_id, horizon)

    monkeypatch.setattr(Compaction, "_replace", too_early)
    assert "does not get to" in _first_violation(first=52)


def test_a_view_that_is_named_before_it_is_written_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def named_first(compaction: Compaction, run: CompactionRun, survivors: Survivors) -> int:
        writer = CompactedWriter(await compaction._ledgers.create(), compaction._clock)
        dropping = compaction._state.ledgers
        await compaction._store(CompactionState(writer.ledger_id, run._end, dropping))
        await run.write(survivors, writer)
        await writer.close()
        return writer.ledger_id

    monkeypatch.setattr(Compaction, "_written", named_first)
    assert "is not seen" in _first_violation(first=9)
