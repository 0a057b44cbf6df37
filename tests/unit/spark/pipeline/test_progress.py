"""Figures of a query, from what Spark tells, and what its errors come to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from magnetar.spark.pipeline.errors import explained
from magnetar.spark.pipeline.progress import QueryState, doing, duration, line, row, taken


def _progress(batch: int, rows: int, **more: Any) -> dict[str, Any]:
    return {
        "id": "the-query",
        "batchId": batch,
        "timestamp": "2026-11-16T09:00:00.250Z",
        "numInputRows": rows,
        "processedRowsPerSecond": 1234.5,
        "durationMs": {"addBatch": 80, "triggerExecution": 900},
        "sources": [{"latestOffset": json.dumps({"lagMessages": 7, "lagSeconds": 1.5})}],
        "sink": {"numOutputRows": -1},
    } | more


def test_batches_are_counted_once() -> None:
    state = QueryState()
    taken(state, _progress(4, 10), group=None)
    taken(state, _progress(4, 10), group=None)
    taken(state, _progress(5, 20), group="app")
    assert (state.batches, state.input_rows, state.batch) == (2, 30, 5)
    assert state.output_rows is None, "a sink that does not count says -1"
    assert state.group == "app"
    assert state.committed_at == "2026-11-16T09:00:01.150+00:00", "when the batch ended"


def test_a_query_with_a_new_checkpoint_counts_anew() -> None:
    state = QueryState(query_id="an-earlier-one", batch=17, committed_at="2026-11-15T00:00:00")
    taken(state, _progress(0, 10), group=None)
    assert (state.query_id, state.batch, state.batches) == ("the-query", 0, 1)


def test_a_query_that_waits_has_no_new_batch_but_a_lag() -> None:
    state = QueryState()
    taken(state, _progress(5, 20), group=None)
    waiting = _progress(6, 0, durationMs={"latestOffset": 1, "triggerExecution": 1})
    waiting["sources"] = [{"latestOffset": {"lagMessages": 0}}, {"latestOffset": "no JSON"}, {}]
    taken(state, waiting, group=None)
    assert (state.batch, state.batches, state.lag_messages, state.lag_seconds) == (5, 1, 0, None)


def test_a_source_without_a_lag_shows_none() -> None:
    state = QueryState()
    taken(state, _progress(0, 1, sources=[{"latestOffset": 17}]), group=None)
    assert state.lag_messages is None
    assert row("out", state)[4] == "-"


def test_a_line_says_what_a_row_shows() -> None:
    state = QueryState()
    taken(state, _progress(5, 2000, sink={"numOutputRows": 3}), group="app")
    state.transactions = ["0_1", "0_2", "0_3"]
    assert line("out", state) == (
        "out: batch 5, 2,000 rows, 1,234 rows/s, lag 7 (1.5 s), 900 ms, committed 09:00:01, "
        "group app, transactions 0_1 +2"
    )
    assert row("out", state)[-2:] == ("app", "0_1 +2")
    assert state.output_rows == 3
    assert [duration(seconds) for seconds in (0.4, 90, 7200)] == ["0.4 s", "1.5 min", "2.0 h"]


def test_what_spark_does_is_told_without_its_classes() -> None:
    source = "org.apache.spark.sql.PythonMicroBatchStreamWithTriggerAvailableNow@6ee4b39e"
    assert doing(f"Getting offsets from {source}") == "Getting offsets"
    assert doing("Waiting for data to arrive") == "Waiting for data to arrive"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Query x terminated\nTraceback (most recent call last):\n  File ...\n"
            "magnetar.errors.TopicNotFound: there is no orders (create it first)\n\tat org.apache",
            "there is no orders (create it first)",
        ),
        (
            "[STREAM_FAILED] Query x terminated with exception: [PYTHON_DATA_SOURCE_ERROR] Failed "
            "to create: magnetar.errors.NotConnected: no broker can be reached\n SQLSTATE: 38000",
            "no broker can be reached",
        ),
        (
            "assertion failed: There are [2] sources in the checkpoint offsets and now there are "
            "[1] sources requested by the query.",
            "another number of sources",
        ),
        ("[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema", "state of another query"),
        (
            "magnetar does not support Update mode.",
            "foreachBatch with magnetar.spark.foreach_batch",
        ),
        ("[STREAM_FAILED] Python worker failed to connect back.", "run it again, it goes on"),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: magnetr.", "no such format"),
        (
            "Traceback:\n  File \"/p/steps.py\", line 3, in f\nKeyError: 'amount'\n",
            "its trace is in /p/driver.log",
        ),
        ("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column `amont` cannot\n== SQL ==", "A column `am"),
        ("", "Spark gave no reason (all of it is in /p/driver.log)"),
    ],
)
def test_an_error_is_one_line(text: str, said: str) -> None:
    error = explained(text, rest_in="/p/driver.log")
    assert said in str(error)
    assert "\n" not in str(error)
