"""The bench of splits: how it chooses changes, what it counts, and that its parts fit together."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.split import (
    Change,
    next_merge,
    next_split,
    parts_of,
    serving,
    splits,
    stalls_in,
)
from bench.split_load import KEYS, key_of
from magnetar.model.segments import SegmentLayout


def _record(layout: SegmentLayout) -> dict[str, object]:
    """As the admin interface shows it."""
    return {
        "epoch": layout.epoch,
        "segments": {
            str(number): {
                "segmentId": number,
                "hashRange": {"start": each.hash_range.start, "end": each.hash_range.end},
                "state": each.state.value,
            }
            for number, each in layout.segments.items()
        },
    }


def test_a_topic_goes_from_one_segment_to_eight_and_back() -> None:
    layout = SegmentLayout.create(1, now_ms=0)
    paths = []
    for goal, choose in ((8, next_split), (1, next_merge)):
        while len(parts := parts_of(_record(layout))) != goal:
            path = choose(parts)
            paths.append(path)
            verb, *segments = path.split("/")
            numbers = [int(each) for each in segments]
            if verb == "split":
                layout = layout.split(*numbers, now_ms=0)
            else:
                layout = layout.merge(numbers, now_ms=0)
            layout.check_invariants()
            if len(layout.active) == 8:
                assert {each.hash_range.size for each in layout.active} == {8192}
    assert [path.partition("/")[0] for path in paths] == ["split"] * 7 + ["merge"] * 7


def test_stalls_are_those_of_messages_that_waited_during_a_change() -> None:
    stalls = [[0.0, 0.5], [0.5, 0.6], [1.5, 0.01], [2.1, 0.01], [2.5, 0.01], [0.2, 9.0]]
    assert stalls_in(stalls, [Change(1.0, 2.0)]) == [0.6, 0.01, 0.01, 9.0]
    assert stalls_in(stalls, []) == []


def test_all_keys_are_used() -> None:
    assert len({key_of(sequence) for sequence in range(KEYS)}) == KEYS


@pytest.mark.slow
def test_a_small_run_finds_nothing_wrong_with_the_messages(tmp_path: Path) -> None:
    options = argparse.Namespace(rate=200.0, segments=2, pause=0.1)
    with serving(tmp_path) as served:
        rows, wrong = splits(served, options)
    found = {row.measure: row.value for row in rows}
    assert found["violations"] == 0
    # How fast it is says nothing here: tests share the machine.
    assert not [text for text in wrong if not text.startswith("receipts during a change")]
    assert found["receipt during a change, max"] >= found["receipt during a change, p50"] > 0
