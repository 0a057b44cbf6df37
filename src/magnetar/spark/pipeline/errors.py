"""Pure: what went wrong in Spark, as one line with the next step.

Owns: the way from Spark's text, which is a Java trace around a Python trace around a reason, to an
error of ours.

Invariants:
1. An error of Magnetar that a worker raised comes out as that error says it, with its hint.
2. What is not known is not hidden: the first line of Spark's message, and where the rest is.
"""

from __future__ import annotations

import re
from typing import Final

from magnetar.errors import SparkError

# Anywhere in a line: Spark puts its own words in front of what a worker of ours has said.
_OURS: Final = re.compile(r"\bmagnetar\.errors\.(\w+): (.+)$", re.MULTILINE)
_CLASS: Final = re.compile(r"^\[([A-Z_.0-9]+)\] ?")
_USER_FRAME: Final = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_RAISED: Final = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception)): (?P<text>.+)$", re.M)

_KNOWN: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = (
    (
        re.compile(r"There are \[(\d+)\] sources in the checkpoint"),
        "the checkpoint belongs to a query with another number of sources",
        "give the pipeline a `checkpoint` of its own",
    ),
    (
        re.compile(r"STATE_STORE_\w*SCHEMA|schema for state|STATEFUL_OPERATOR_NOT_MATCH"),
        "the checkpoint holds the state of another query",
        "give the pipeline a `checkpoint` of its own, or restore the steps as they were",
    ),
    (
        re.compile(r"does not support Update mode", re.IGNORECASE),
        "Spark gives a sink written in Python no update mode",
        "use append, with a watermark where rows are aggregated, or write from foreachBatch with "
        "magnetar.spark.foreach_batch_writer",
    ),
    (
        re.compile(
            r"STREAMING_OUTPUT_MODE\.UNSUPPORTED_OPERATION|output mode not supported when there are"
        ),
        "append needs to know when a group is complete",
        "give the source a `watermark` and group by its column",
    ),
    (
        re.compile(r"DATA_SOURCE_NOT_FOUND|Failed to find (?:the )?data source"),
        "Spark knows no such format",
        "correct `format`; for a format in a jar, name it in spark.settings (spark.jars)",
    ),
    (
        re.compile(r"Python worker failed to connect back"),
        "a Python worker did not start within Spark's ten seconds",
        "run it again, it goes on: the machine is too busy, or PYSPARK_PYTHON is wrong",
    ),
    (
        re.compile(r"Concurrent update to the log|CONCURRENT_STREAM_LOG_UPDATE"),
        "two queries write to one checkpoint",
        "stop one of them; each pipeline has a `checkpoint` of its own",
    ),
)


def explained(text: str, *, rest_in: str) -> SparkError:
    """An error for what Spark said; `rest_in` is where all of it stands."""
    # From the most to the least that is known: an error of ours, which the innermost `Caused by`
    # repeats; a message of Spark with a known remedy; the exception of a user's function; else the
    # first line.
    ours = _OURS.findall(text)
    if ours:
        _, said = ours[-1]
        return SparkError(said)
    for pattern, what, next_step in _KNOWN:
        if pattern.search(text):
            return SparkError(f"{what} ({_first_line(text)})", hint=next_step)
    raised = _RAISED.findall(text)
    frames = _USER_FRAME.findall(text)
    if raised and frames:
        kind, said = raised[-1]
        return SparkError(f"{kind}: {said}", hint=f"its trace is in {rest_in}")
    return SparkError(_first_line(text), hint=f"all of it is in {rest_in}")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "Spark gave no reason"
    return _CLASS.sub("", first)
