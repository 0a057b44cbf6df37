"""Drivers that are killed at every point of a write: the output has every row once, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.spark.sink_stage import sink_stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_a_driver_is_killed_at_every_point_of_a_batch(tmp_path: Path) -> None:
    """F3, F4, F5, F6, F7, F12 and F18, one after the other on one checkpoint."""
    with sink_stage(tmp_path) as stage:
        first = stage.driver(
            99, {"point": "before-commit", "batch": 1}, {"point": "mid-write", "batch": 2}
        )
        first.until_reached(0)
        stage.check(1)
        stage.split(0)  # with the transactions of a batch open
        first.go_on(0)
        first.until_reached(1)
        first.kill()
        stage.check(2)

        for point, batch in (("after-write", 2), ("before-commit", 3)):
            driver = stage.driver(99, {"point": point, "batch": batch})
            driver.until_reached(0)
            driver.kill()
            stage.check(batch)

        decided = stage.driver(
            99, {"point": "lost-answer", "batch": 4}, {"point": "after-commit", "batch": 5}
        )
        decided.until_reached(1)
        decided.kill()
        assert not (stage.checkpoint / "commits" / "5").exists()
        stage.check(6)

        last = stage.driver(7)
        assert last.ended() == 0, last.text()
        stage.check()
        newest = stage.last_done()
        stage.forget(newest)
        again = stage.driver(newest + 1, partitions=2)
        assert again.ended() == 0, again.text()
        stage.check()


def test_two_drivers_on_one_checkpoint(tmp_path: Path) -> None:
    """F14: the older one is held in the middle of a task, and writes on when it is too late."""
    with sink_stage(tmp_path) as stage:
        old = stage.driver(99, {"point": "mid-write", "batch": 2})
        old.until_reached(0)
        new = stage.driver(4)
        assert new.ended() == 0, new.text()
        stage.check()
        old.go_on(0)
        assert old.ended() == 1
        assert "only the last one goes on" in old.text()
        stage.check()
