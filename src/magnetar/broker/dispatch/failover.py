"""Pure: which consumer of a Failover subscription is the active one.

Owns: `choose_active`.

Invariants:
1. Only consumers of the lowest priority number are chosen.
2. The choice depends on the consumers' names and priorities and on the topic alone, not on the
   order in which they came: after a restart the same one is chosen.
3. A partition takes the consumer at (partition modulo their number) in the order of names, so that
   the partitions of a topic are spread evenly. Other topics are spread by a hash ring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from magnetar.model.hashing import key_hash

POINTS_PER_CONSUMER: Final = 100

_POSITIVE: Final = 0x7FFF_FFFF


class Candidate(NamedTuple):
    """A consumer as the choice sees it; `key` tells those of equal names apart."""

    priority: int
    name: str
    key: int


def choose_active(candidates: Iterable[Candidate], topic: str, partition: int | None) -> int | None:
    """The key of the active consumer; None if there is no consumer."""
    ordered = sorted(candidates)
    if not ordered:
        return None
    eligible = [each for each in ordered if each.priority == ordered[0].priority]
    if partition is not None:
        return eligible[partition % len(eligible)].key
    if len(eligible) == 1:
        return eligible[0].key
    ring: dict[int, int] = {}
    for candidate in eligible:
        for point in range(POINTS_PER_CONSUMER):
            ring[key_hash(f"{candidate.name}{point}") & _POSITIVE] = candidate.key
    points = sorted(ring)
    index = bisect_left(points, key_hash(topic) & _POSITIVE)
    return ring[points[index % len(points)]]
