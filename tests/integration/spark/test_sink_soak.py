"""The slow faults of the sink: `make soak-spark`. Each test starts a JVM or several."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.spark.broker_pair import broker_pair
from tests.integration.spark.cluster import (
    SETTINGS,
    WHERE_THE_FILES_ARE,
    Events,
    cluster,
    kill_executor_of,
)
from tests.integration.spark.connect import connect_packages
from tests.integration.spark.sink_stage import SinkStage, sink_stage, sink_stage_at

pytestmark = [
    pytest.mark.soak,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]


def done(stage: SinkStage, until: int, *faults: dict[str, object], **plan: object) -> str:
    """A driver that ends well; what it said."""
    driver = stage.driver(until, *faults, **plan)
    assert driver.ended() == 0, driver.text()
    return driver.text()


def failed(stage: SinkStage, *faults: dict[str, object], **plan: object) -> str:
    """A driver whose query fails; what it said."""
    driver = stage.driver(99, *faults, **plan)
    assert driver.ended() == 1, driver.text()
    return driver.text()


def test_commit_and_abort_may_raise(tmp_path: Path) -> None:
    """F9."""
    with sink_stage(tmp_path) as stage:
        text = failed(
            stage,
            {"point": "fail-before-commit", "batch": 1},
            {"point": "fail-abort", "batch": 1},
        )
        assert "the test wanted fail-before-commit" in text
        stage.check(1)
        failed(stage, {"point": "fail-after-commit", "batch": 2})
        stage.check(3)
        done(stage, 4)
        stage.check()


def test_a_task_is_tried_again(tmp_path: Path) -> None:
    """F10: a task that fails after it wrote, and one whose process is killed."""
    with sink_stage(tmp_path) as stage:
        driver = stage.driver(
            4,
            {"point": "fail-write", "batch": 1, "partition": 2},
            {"point": "mid-write", "batch": 2, "partition": 1},
        )
        driver.until_reached(1)
        os.kill(driver.holder(1), signal.SIGKILL)
        assert driver.ended() == 0, driver.text()
        stage.check()


def test_speculation_and_lost_executors_on_two_hosts(tmp_path: Path) -> None:
    """F10: the copy on the other host wins; an executor dies with the shuffle files it has.

    What was in them cannot be fetched any more, and the stage that made them is run again.
    """
    with cluster(tmp_path) as master, sink_stage(tmp_path) as stage:
        copied = Events(tmp_path / "copied")
        slow = stage.driver(
            2,
            {"point": "mid-write", "batch": 1, "partition": 0},
            master=master,
            settings=SETTINGS | copied.settings,
            shuffle=True,
        )
        slow.until_reached(0)
        stage.until_committed(1)  # while the first attempt is still held
        slow.go_on(0)
        assert slow.ended() == 0, slow.text()
        stage.check()
        assert copied.speculated() >= 1

        lost = Events(tmp_path / "lost")
        dies = stage.driver(
            5,
            {"point": "mid-write", "batch": 4, "partition": 1},
            master=master,
            settings=SETTINGS | WHERE_THE_FILES_ARE | lost.settings,
            shuffle=True,
        )
        dies.until_reached(0)
        kill_executor_of(dies.holder(0))
        assert dies.ended() == 0, dies.text()
        stage.check()
    assert {"ExecutorLostFailure", "FetchFailed"} <= set(lost.ends())
    assert lost.retries() >= 1


def test_a_query_is_stopped_while_it_writes_and_while_it_commits(tmp_path: Path) -> None:
    """F11."""
    with sink_stage(tmp_path) as stage:
        for batch, point in ((1, "mid-write"), (2, "before-commit"), (3, "after-commit")):
            done(stage, 99, {"point": point, "batch": batch}, stop_at=0)
            stage.check()
        done(stage, 5)
        stage.check()


def test_transactions_time_out_before_a_commit_and_while_nobody_is_there(tmp_path: Path) -> None:
    """F13; and when the batch is run again, before its commit and after it."""
    options = {"transactionTimeout": "20s"}
    with sink_stage(tmp_path) as stage:
        waits = stage.driver(99, {"point": "before-commit", "batch": 1}, options=options)
        waits.until_reached(0)
        stage.until_nothing_is_open()
        waits.go_on(0)
        assert waits.ended() == 1
        assert "raise transactionTimeout" in waits.text()
        stage.check(1)
        dies = stage.driver(99, {"point": "before-commit", "batch": 2}, options=options)
        dies.until_reached(0)
        dies.kill()
        stage.until_nothing_is_open()
        again = stage.driver(99, {"point": "before-commit", "batch": 2}, options=options)
        again.until_reached(0)
        stage.until_nothing_is_open()
        again.go_on(0)
        assert again.ended() == 1
        assert "raise transactionTimeout" in again.text()
        stage.check(2)
        decided = stage.driver(99, {"point": "after-commit", "batch": 2}, options=options)
        decided.until_reached(0)
        decided.kill()
        repeats = stage.driver(4, {"point": "before-commit", "batch": 2}, options=options)
        repeats.until_reached(0)
        stage.until_nothing_is_open()
        repeats.go_on(0)
        assert repeats.ended() == 0, repeats.text()
        stage.check()


def test_the_server_is_killed_at_every_point_of_a_batch(tmp_path: Path) -> None:
    """F16: the query goes on, or fails and is started again; the output is exact."""
    points = ("mid-write", "after-write", "before-commit", "after-commit")
    with sink_stage(tmp_path) as stage:
        faults = [{"point": point, "batch": n} for n, point in enumerate(points, 1)]
        driver = stage.driver(6, *faults)
        for number in range(len(points)):
            driver.until_reached(number)
            stage.kill_server()
            driver.go_on(number)
        code = driver.ended()
        stage.check()
        assert code == 0, driver.text()


def test_segments_move_to_another_broker_at_every_point_of_a_batch(tmp_path: Path) -> None:
    """F16: with a transaction open, after its last message, and on both sides of the decision."""
    points = ("mid-write", "after-write", "before-commit", "lost-answer", "after-commit")
    with broker_pair(tmp_path) as pair, sink_stage_at(tmp_path, pair.url) as stage:
        faults = [{"point": point, "batch": n} for n, point in enumerate(points, 1)]
        driver = stage.driver(7, *faults)
        for number in range(len(points)):
            driver.until_reached(number)
            assert pair.move(stage.topic), "no segment is loaded anywhere"
            driver.go_on(number)
        assert driver.ended() == 0, driver.text()
        stage.check()


def test_a_name_that_belongs_to_another_query_is_refused(tmp_path: Path) -> None:
    """F27: the checkpoint is deleted, with a transactionalId and without one."""
    named = {"transactionalId": "orders"}
    with sink_stage(tmp_path) as stage:
        done(stage, 1, options=named)
        rows = stage.rows()
        shutil.rmtree(stage.checkpoint)
        text = failed(stage, options=named)
        assert "choose another transactionalId" in text
        assert stage.rows() == rows
        shutil.rmtree(stage.checkpoint)
        done(stage, 1, options={"transactionalId": "orders-2"})
        assert len(stage.rows()) > len(rows), "a new name writes a second time, as documented"


def test_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    """F28."""
    with sink_stage(tmp_path) as stage:
        done(stage, 1)
        older = tmp_path / "older"
        shutil.copytree(stage.checkpoint, older)
        done(stage, 4)
        shutil.rmtree(stage.checkpoint)
        older.rename(stage.checkpoint)
        text = failed(stage)
        assert "restore the newest one" in text
        stage.check()


def test_foreach_batch_writes_once(tmp_path: Path) -> None:
    """F29, and the way around Update mode (F30)."""
    with sink_stage(tmp_path) as stage:
        driver = stage.driver(
            99, {"point": "after-commit", "batch": 1}, kind="foreach", mode="update"
        )
        driver.until_reached(0)
        driver.kill()
        stage.check(2)
        done(stage, 3, kind="foreach", mode="update")
        stage.check()


def test_modes_that_replace_rows_are_refused(tmp_path: Path) -> None:
    """F30."""
    with sink_stage(tmp_path) as stage:
        text = failed(stage, mode="update")
        assert "does not support Update mode" in text
        text = failed(stage, options={"asyncProgressTrackingEnabled": "true"})
        assert "async progress tracking" in text


def test_spark_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F30: the same over Spark Connect."""
    monkeypatch.setenv("PYTHONPATH", str(connect_packages()))
    with sink_stage(tmp_path) as stage:
        remote = "connect:local[2,4]"
        driver = stage.driver(99, {"point": "after-commit", "batch": 1}, master=remote)
        driver.until_reached(0)
        driver.kill()
        stage.check(2)
        done(stage, 3, master=remote)
        stage.check()


def test_the_single_transaction_survives_kills(tmp_path: Path) -> None:
    """The way of a server without groups: F3, F5, F7, F9, F10 and F12."""
    single = {"commitMode": "single"}
    with sink_stage(tmp_path) as stage:
        for point, batch in (("mid-write", 1), ("before-commit", 1), ("after-commit", 2)):
            driver = stage.driver(99, {"point": point, "batch": batch}, options=single)
            driver.until_reached(0)
            driver.kill()
            stage.check(batch + (point == "after-commit"))
        text = failed(stage, {"point": "fail-write", "batch": 3}, options=single)
        assert "cannot be tried again" in text
        stage.check(3)
        done(stage, 4, options=single)
        last = stage.last_done()
        stage.forget(last)
        done(stage, last + 1, options=single)
        stage.check(stage.last_done() + 1)
