"""Pure: what filters of a batch read say about where the messages can be.

Owns: `Bounds` and `bounds_of`.

Invariants:
1. Bounds leave out no message that the filters let through, as long as the clocks of producers
   differ by less than `CLOCKS_MS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

# Ten minutes: far more than clocks with NTP differ, and little to read in vain.
CLOCKS_MS: Final = 600_000
"""Publish times are of the producers' clocks, so they ascend only about."""

_TIME: Final = ("publishTime", "__publishTime")
_SEGMENT: Final = ("segment", "__segment")
_KEY: Final = ("key", "__key")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The part of the topics in which a filter's messages can be."""

    from_ms: int | None = None
    to_ms: int | None = None
    segments: frozenset[int] | None = None
    keys: frozenset[str] | None = None
    """None: all of them."""


def bounds_of(filters: Iterable[Filter]) -> Bounds:
    """The bounds of filters that must all hold."""
    found = Bounds()
    for each in filters:
        found = _narrowed(found, each)
    return found


def _narrowed(bounds: Bounds, given: Filter) -> Bounds:
    attribute: tuple[str, ...] = getattr(given, "attribute", ())
    # A field inside a struct: of the value, about which brokers know nothing.
    if len(attribute) != 1:
        return bounds
    name, value = attribute[0], getattr(given, "value", None)
    if name in _TIME and isinstance(value, datetime):
        return _in_time(bounds, given, int(value.timestamp() * 1000))
    values: frozenset[Any]
    # Only equality and lists choose keys and segments; other filters narrow nothing, and Spark
    # applies all of them anyway.
    if isinstance(given, EqualTo):
        values = frozenset((value,))
    elif isinstance(given, In):
        values = frozenset(value or ())
    else:
        return bounds
    # A value of another type narrows nothing: Spark compares it its own way (invariant 1).
    if name in _SEGMENT and all(isinstance(each, int) for each in values):
        known = bounds.segments
        return replace(bounds, segments=values if known is None else known & values)
    if name in _KEY and all(isinstance(each, str) for each in values):
        return replace(bounds, keys=values if bounds.keys is None else bounds.keys & values)
    return bounds


def _in_time(bounds: Bounds, given: Filter, time_ms: int) -> Bounds:
    low, high = bounds.from_ms, bounds.to_ms
    # Strict or not makes no difference: both ends are widened by what clocks may differ.
    if isinstance(given, GreaterThan | GreaterThanOrEqual | EqualTo):
        low = max(low or 0, time_ms - CLOCKS_MS)
    if isinstance(given, LessThan | LessThanOrEqual | EqualTo):
        later = time_ms + CLOCKS_MS
        high = later if high is None else min(high, later)
    return replace(bounds, from_ms=low, to_ms=high)
