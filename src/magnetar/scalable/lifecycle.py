"""Pure: how long a scalable topic keeps lost consumers their places, and sealed segments.

Owns: `Lifecycle`, what holds for one topic, and `resolve_lifecycle`, which puts it together.

Invariants:
1. Field by field the topic's own value goes before its namespace's, that before the broker's.
2. Every value is a number of seconds, at least 0 and at most `SECONDS_MAX`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from magnetar.errors import NotAllowed
from magnetar.runtime.limits import Limits
from magnetar.scalable.records import LifecycleOverride

SECONDS_MAX: Final = 2**31 - 1


class Lifecycle(msgspec.Struct, frozen=True, rename="camel"):
    """The times that hold for one topic."""

    grace_period_seconds: float
    """A consumer of a group that has lost its connection keeps its segments."""
    sealed_seconds: float
    """A sealed segment is kept at least, for readers without a subscription."""


def broker_lifecycle(limits: Limits) -> Lifecycle:
    """The times that hold where neither namespace nor topic say anything."""
    return Lifecycle(limits.scalable_grace_period_seconds, limits.scalable_sealed_seconds)


def resolve_lifecycle(
    broker: Lifecycle, namespace: LifecycleOverride | None, topic: LifecycleOverride | None
) -> Lifecycle:
    """The times of a topic (invariant 1)."""
    values = msgspec.structs.asdict(broker)
    # The narrower one last: it replaces the one before.
    for override in (namespace, topic):
        if override is not None:
            given = msgspec.structs.asdict(override)
            values |= {name: value for name, value in given.items() if value is not None}
    return Lifecycle(**values)


def read_lifecycle(given: Mapping[str, object]) -> LifecycleOverride:
    """What the admin interface or a namespace's policies say; NotAllowed if it cannot be."""
    # A misspelt name would silently change nothing.
    unknown = sorted(given.keys() - _JSON_NAMES)
    if unknown:
        raise NotAllowed(f"the lifecycle policy has no {unknown[0]!r}")
    try:
        found = msgspec.convert(given, LifecycleOverride)
    except msgspec.ValidationError as error:
        raise NotAllowed(f"the lifecycle policy cannot be read: {error}") from error
    for name, value in msgspec.structs.asdict(found).items():
        # Of not-a-number every comparison is false.
        if value is not None and not 0 <= value <= SECONDS_MAX:
            raise NotAllowed(f"lifecycle policy: {name} is {value}, not 0 to {SECONDS_MAX}")
    return found


_JSON_NAMES: Final = frozenset(LifecycleOverride.__struct_encode_fields__)
