"""Pure: Spark's progress of a query, as the figures that people and metrics want.

Owns: which of Spark's figures count, and how they are said in a line or a row.

Relies on: the source for its lag (`lagMessages`, `lagSeconds` in what it reports as latest).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from msgspec import Struct

HEADINGS: Final = (
    *("sink", "batch", "rows", "rows/s", "lag", "batch ms", "last commit", "group"),
    "transactions",
)
_JAVA_OBJECT: Final = re.compile(r" \w+ [\w.$]+@[0-9a-f]+$")
_UNITS: Final = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))


class QueryState(Struct, kw_only=True):
    """The progress of one sink."""

    query_id: str = ""
    batch: int = -1
    """The last one that was committed, by this run or an earlier one."""
    batches: int = 0
    """Of this run, as the rows below."""
    input_rows: int = 0
    output_rows: int | None = None
    """None where the sink does not count."""
    rows_per_second: float = 0.0
    lag_messages: int | None = None
    lag_seconds: float | None = None
    batch_ms: int = 0
    committed_at: str | None = None
    """When the last batch was, in UTC."""
    group: str | None = None
    """The transaction group that batches are committed in, where the sink has one."""
    transactions: list[str] = []
    """Those of the last batch that the broker was asked about."""


def taken(state: QueryState, progress: Mapping[str, Any], *, group: str | None) -> None:
    """Count one more progress into the state of its query."""
    # Another query, since the checkpoint that earlier batches were of is gone: it counts anew.
    if state.query_id not in ("", progress["id"]):
        state.batch, state.committed_at, state.group = -1, None, None
    state.query_id = str(progress["id"])
    state.rows_per_second = float(progress.get("processedRowsPerSecond") or 0.0)
    # Only sources of ours report a lag; the numbers of several add up, their ages do not.
    lags = [_reported(source) for source in progress.get("sources", ())]
    counts = [lag["lagMessages"] for lag in lags if "lagMessages" in lag]
    ages = [lag["lagSeconds"] for lag in lags if "lagSeconds" in lag]
    state.lag_messages = sum(map(int, counts)) if counts else None
    state.lag_seconds = max(map(float, ages)) if ages else None
    batch = int(progress["batchId"])
    # The lag above is taken from every report, the rest only from batches that ran.
    if batch <= state.batch or "addBatch" not in progress.get("durationMs", {}):
        return  # Spark tells of a query that waits, too
    state.batch = batch
    state.batches += 1
    state.input_rows += int(progress.get("numInputRows") or 0)
    written = progress.get("sink", {}).get("numOutputRows")
    # Spark says -1 for a sink that does not count.
    if written is not None and int(written) >= 0:
        state.output_rows = (state.output_rows or 0) + int(written)
    state.batch_ms = int(progress["durationMs"].get("triggerExecution", 0))
    # Spark's time is that of the trigger's beginning.
    started = datetime.fromisoformat(str(progress["timestamp"]))
    ended = started + timedelta(milliseconds=state.batch_ms)
    state.committed_at = ended.isoformat(timespec="milliseconds")
    state.group = group


def doing(message: str) -> str:
    """What Spark says that it does, without the Java object that it does it to."""
    return _JAVA_OBJECT.sub("", message)


def _reported(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the source said of its end; Spark hands it on as text or as it is."""
    said = source.get("latestOffset")
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError:
            return {}
    return said if isinstance(said, dict) else {}


def row(name: str, state: QueryState) -> Sequence[str]:
    """The cells of a table's row, in the order of `HEADINGS`."""
    return (
        name,
        "-" if state.batch < 0 else f"{state.batch:,}",
        f"{state.input_rows:,}",
        f"{state.rows_per_second:,.0f}",
        lag(state),
        f"{state.batch_ms:,}",
        clock_time(state.committed_at),
        state.group or "-",
        transactions(state),
    )


def line(name: str, state: QueryState) -> str:
    """One batch, for a log."""
    parts = [
        f"{name}: batch {state.batch}",
        f"{state.input_rows:,} rows",
        f"{state.rows_per_second:,.0f} rows/s",
        f"lag {lag(state)}",
        f"{state.batch_ms} ms",
        f"committed {clock_time(state.committed_at)}",
    ]
    if state.group is not None:
        parts.append(f"group {state.group}, transactions {transactions(state)}")
    return ", ".join(parts)


def transactions(state: QueryState) -> str:
    """The first of them, and how many more there are."""
    if not state.transactions:
        return "-"
    more = len(state.transactions) - 1
    return f"{state.transactions[0]} +{more}" if more else state.transactions[0]


def lag(state: QueryState) -> str:
    if state.lag_messages is None:
        return "-"
    age = "" if not state.lag_seconds else f" ({duration(state.lag_seconds)})"
    return f"{state.lag_messages:,}{age}"


def clock_time(at: str | None) -> str:
    """The time of day of an ISO time."""
    return "-" if at is None else at.partition("T")[2][:8]


def duration(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
