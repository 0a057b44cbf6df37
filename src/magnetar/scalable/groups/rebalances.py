"""Counting what a rebalance of a consumer group moved.

Owns: the metrics of assignments; the numbers follow from two records of the group.
"""

from __future__ import annotations

from collections import Counter

from magnetar.runtime.metrics import (
    SCALABLE_ASSIGNMENT_CHANGES,
    SCALABLE_EXPIRED_CONSUMERS,
    SCALABLE_REBALANCES,
)
from magnetar.scalable.records import GroupRecord


def count_rebalance(before: GroupRecord, after: GroupRecord | None) -> None:
    """A controller has looked at a group: what came of it."""
    gone = len(before.members) - (0 if after is None else len(after.members))
    if gone > 0:
        SCALABLE_EXPIRED_CONSUMERS.inc(gone)
    if after is None or after.revision == before.revision:
        return
    SCALABLE_REBALANCES.labels(after.kind).inc()
    SCALABLE_ASSIGNMENT_CHANGES.labels(after.kind).inc(moves(before, after))


def moves(before: GroupRecord, after: GroupRecord) -> int:
    """How many times a segment came to a consumer or left one."""
    had = Counter((segment, name) for segment, names in before.owners.items() for name in names)
    has = Counter((segment, name) for segment, names in after.owners.items() for name in names)
    return ((had - has) + (has - had)).total()
