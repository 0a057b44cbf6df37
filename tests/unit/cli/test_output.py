"""Tables on terminals: nothing in them is cut."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.limits import PATIENCE_S
from magnetar.cli.output import retention_text, table
from magnetar.spark.pipeline.progress import HEADINGS

_WORDS = st.text("abc0123456789:_-", min_size=1, max_size=40)
_CELLS = st.one_of(st.integers(0, 10**15), _WORDS, st.lists(_WORDS, max_size=4).map(" ".join))


def _drawn(headings: list[str], rows: list[tuple[object, ...]], width: int) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(table(headings, rows, width=width), markup=False, highlight=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_at_80_columns_no_number_is_cut() -> None:
    headings = ["subscription", "type", "backlog", "unacknowledged", "consumers", "messages/s out"]
    row = ("a-name-of-a-subscription", "Key_Shared", 123_456_789, 987_654_321, 12_345, 123_456.7)
    drawn = _drawn(headings, [row], 80)
    for number in ("123,456,789", "987,654,321", "12,345", "123,456.7"):
        assert number in drawn
    assert "\u2026" not in drawn
    assert max(map(len, drawn.splitlines())) <= 80


def test_a_table_that_cannot_fit_becomes_a_list() -> None:
    group = "a-transaction-group-with-a-long-name/settled"
    row = ("settled", "1,234", "9,876,543", "1,234", "12 (3.2 min)", "512", "12:34:56", group)
    drawn = _drawn(list(HEADINGS), [(*row, "0_4611686018427387905 +12")], 80)
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in drawn.splitlines()}
    assert lines["rows"] == "9,876,543"
    assert lines["lag"] == "12 (3.2 min)"
    assert lines["group"] == group


@given(st.lists(st.tuples(_CELLS, _CELLS, _CELLS), min_size=1, max_size=4), st.integers(50, 200))
def test_every_word_of_every_cell_is_shown_whole(
    rows: list[tuple[object, ...]], width: int
) -> None:
    drawn = _drawn(["one", "two", "three"], rows, width)
    for row in rows:
        for cell in row:
            for word in (f"{cell:,}" if isinstance(cell, int) else str(cell)).split():
                assert word in drawn
    assert max(map(len, drawn.splitlines())) <= width


_PROGRAM = """
import os, sys
from magnetar.cli.verbs.pipeline_view import summary, watching
from magnetar.spark.pipeline.progress import QueryState
from magnetar.spark.pipeline.state import RunState
state = RunState(name="p", file="f", pid=1, host="h", master="local", started_at=0.0)
state.queries["a-sink"] = QueryState(batch=7, input_rows=9000, group="app")
with watching("p") as watcher:
    # As Spark's session does while the JVM starts.
    ours = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    watcher.told("starting Java and Spark")
    os.dup2(ours, 2)
    watcher.moved("a-sink", state)
    watcher.told("running")
summary(state)
"""


@pytest.fixture
def seen_on_a_terminal() -> tuple[str, str]:
    """What the program shows on a terminal as its stderr, and what it prints."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment,
        timeout=PATIENCE_S,
        check=True,
    )
    os.close(slave)
    shown = bytearray()
    # Linux ends the stream of a closed terminal by an error.
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(master)
    return shown.decode(), done.stdout.decode()


def test_the_live_view_is_seen_while_spark_starts_and_its_table_comes_once(
    seen_on_a_terminal: tuple[str, str],
) -> None:
    shown, printed = seen_on_a_terminal
    assert "starting Java and Spark" in shown
    for text in ("p: running", "a-sink", "9,000", "app", "transactions"):
        assert text in shown
    # Wiped at the end: the summary has it.
    assert shown.rindex("\x1b[2K") > shown.rindex("a-sink")
    assert printed.count("a-sink") == 1


@pytest.mark.parametrize(
    ("seconds", "size_bytes", "source", "text"),
    [
        (0, 0, "broker", "none: without a subscription messages go (default)"),
        (604_800.0, 2 * 1024**3, "broker", "7 days or 2,048 MB of a topic (default)"),
        (1800.0, None, "namespace", "30 minutes (policy of the namespace)"),
        (None, None, "topic", "for ever (policy of the topic)"),
    ],
)
def test_retention_is_told_in_words(
    seconds: float | None, size_bytes: int | None, source: str, text: str
) -> None:
    found = {"seconds": seconds, "sizeBytes": size_bytes, "from": source}
    assert retention_text(found) == text
