"""Pure: what backlog quotas say of the backlog of one topic.

Owns: `bytes_from`, the size of a backlog, and `age_seconds`; `exceeded`, which quota it has used
up; and `evicted_through`, up to where a backlog has to go to be below its quota again.

Invariants:
1. A quota is used up by a backlog that is as large, or as old, as it says, or more. Of two that are
   used up the one by size counts.
2. Sizes are each ledger's, shared out among its entries: nothing is read for them.
3. What is left of a backlog behind `evicted_through` fits into the room it was given, and no entry
   could have been spared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from magnetar.broker.policy.effective import TopicPolicies
from magnetar.broker.policy.values import QuotaPolicy
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position

_MS_PER_SECOND: Final = 1000

# As in Pulsar: without a gap the next message would use the quota up again.
KEPT: Final = 0.9
"""The part of a quota that eviction leaves."""


class Exceeded(NamedTuple):
    """A quota that is used up."""

    kind: Literal["size", "age"]
    limit: int
    """Bytes, or seconds."""
    policy: QuotaPolicy


def has_quota(policies: TopicPolicies) -> bool:
    return _size_limit(policies) is not None or _age_limit(policies) is not None


def has_age_quota(policies: TopicPolicies) -> bool:
    return _age_limit(policies) is not None


def _size_limit(policies: TopicPolicies) -> int | None:
    limit = policies.size_quota.limit
    return None if limit < 0 else limit


def _age_limit(policies: TopicPolicies) -> int | None:
    # In Pulsar an age of 0 is none, and a size of 0 is a quota that nothing fits in.
    limit = policies.age_quota.limit_time
    return limit if limit > 0 else None


def age_seconds(published_ms: int | None, now_ms: int) -> float:
    """The age of a backlog whose first message was published then; None: there is none."""
    # Of a producer whose clock is ahead it would be negative.
    return 0.0 if published_ms is None else max(now_ms - published_ms, 0) / _MS_PER_SECOND


def exceeded(policies: TopicPolicies, size_bytes: int, age_seconds: float) -> Exceeded | None:
    """The quota that such a backlog has used up; None: neither."""
    size, age = _size_limit(policies), _age_limit(policies)
    if size is not None and size_bytes >= size:
        return Exceeded("size", size, policies.size_quota.policy)
    if age is not None and age_seconds >= age:
        return Exceeded("age", age, policies.age_quota.policy)
    return None


def bytes_from(spans: Iterable[LedgerSpan], position: Position) -> int:
    """About how many bytes the entries from a position on have."""
    found = 0
    for span in spans:
        if span.ledger_id > position.ledger_id:
            found += span.size_bytes
        elif span.ledger_id == position.ledger_id and span.entries:
            left = span.entries - min(max(position.entry_id, 0), span.entries)
            found += span.size_bytes * left // span.entries
    return found


def evicted_through(spans: Sequence[LedgerSpan], room: int) -> Position | None:
    """The last entry that must go so that so many bytes are left; None: none has to."""
    # From the end back, as long as whole ledgers fit in; the last one that does not is cut.
    for span in reversed(spans):
        if span.size_bytes > room:
            kept = room * span.entries // span.size_bytes
            # Rounding down twice must not keep a byte too many.
            return Position(span.ledger_id, span.entries - kept - 1)
        room -= span.size_bytes
    return None
