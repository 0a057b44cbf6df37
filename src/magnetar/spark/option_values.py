"""Pure: from the text that a user gives for an option to its value.

Invariants:
1. A text that does not fit raises `ValueError`, which says what would.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Final

_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_UNITS: Final = {
    **dict.fromkeys(("", "s", "second", "seconds"), 1.0),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
# Powers of two, as in Spark's and Java's sizes.
_SIZE_UNITS: Final = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30}


def text(written: str) -> str:
    if not written.strip():
        raise ValueError("it is empty")
    return written.strip()


def names(written: str) -> tuple[str, ...]:
    found = tuple(each.strip() for each in written.split(",") if each.strip())
    if not found:
        raise ValueError("it names nothing")
    return found


def truth(written: str) -> bool:
    known = {"true": True, "false": False}.get(written.strip().lower())
    if known is None:
        raise ValueError("use true or false")
    return known


def count(written: str) -> int:
    """A whole number, at least 1."""
    if not written.strip().isdecimal() or int(written) < 1:
        raise ValueError("use a whole number from 1 up")
    return int(written)


def milliseconds(written: str) -> int:
    """A whole number of milliseconds, at least 0."""
    if not written.strip().isdecimal():
        raise ValueError("use a whole number of milliseconds")
    return int(written)


def seconds(written: str) -> float:
    """A duration: `15m`, `90s`, `500 ms`, or seconds."""
    found = _DURATION.fullmatch(written)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError("use a duration such as 15m, 90s or 500ms")
    return float(found[1]) * unit


def size(written: str) -> int:
    """Bytes: `1048576`, `64m`, `1 GB`."""
    found = _DURATION.fullmatch(written)
    unit = None if found is None else _SIZE_UNITS.get(found[2].lower())
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError("use a number of bytes such as 1048576, 64m or 1g")
    return int(float(found[1]) * unit)


def instant(written: str) -> int:
    """Milliseconds of the epoch, from those or from ISO 8601 with a time zone."""
    if written.strip().isdecimal():
        return int(written)
    hint = "use milliseconds since 1970, or a time such as 2026-11-16T10:00:00Z"
    try:
        time = datetime.fromisoformat(written.strip())
    except ValueError:
        raise ValueError(hint) from None
    # The driver's own zone would make the same query read other messages on another machine.
    if time.tzinfo is None:
        raise ValueError(f"it has no time zone: {hint}")
    return int(time.timestamp() * 1000)


def one_of(*known: str) -> Callable[[str], str]:
    """A parser: one of a few words, in any case."""

    def parsed(written: str) -> str:
        for each in known:
            if written.strip().lower() == each.lower():
                return each
        raise ValueError(f"use {', '.join(known[:-1])} or {known[-1]}")

    return parsed
