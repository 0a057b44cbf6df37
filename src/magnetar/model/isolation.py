"""Read isolation: what a subscription may see of transactions (pure).

Owns: the property with which a subscription asks for one, and what its values mean.

Invariants:
1. Without the property a subscription reads what is committed. Nothing but the very word
   `read_uncommitted` lets it read more.
2. A value that is not known is refused where it is asked for. Where it is stored already it means
   `read_committed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from magnetar.errors import NotAllowed

ISOLATION_PROPERTY: Final = "magnetar.read.isolation"
"""In the properties of a subscription, or in the metadata of the consumer that creates it."""


class ReadIsolation(StrEnum):
    """The read isolation of a subscription: which messages of transactions it gets."""

    COMMITTED = "read_committed"
    """Those of committed ones, and nothing that stands behind an undecided one."""
    UNCOMMITTED = "read_uncommitted"
    """All that is durable: of undecided and of aborted ones too."""


def asked_isolation(properties: Mapping[str, str]) -> ReadIsolation | None:
    """What somebody asks for; None: they do not say."""
    value = properties.get(ISOLATION_PROPERTY)
    if value is None:
        return None
    try:
        return ReadIsolation(value)
    except ValueError:
        # Invariant 2: a misspelt word must not quietly become `read_committed` for its author.
        known = " or ".join(ReadIsolation)
        raise NotAllowed(
            f"{ISOLATION_PROPERTY} is {value!r}, which is no isolation", hint=f"use {known}"
        ) from None


def isolation_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties that say what is read."""
    return {name: value for name, value in properties.items() if name == ISOLATION_PROPERTY}


def stored_isolation(properties: Mapping[str, str]) -> ReadIsolation:
    """What a subscription that has these properties reads."""
    # Invariant 2, stored: nobody is there to be told, so the careful reading wins.
    if properties.get(ISOLATION_PROPERTY) == ReadIsolation.UNCOMMITTED:
        return ReadIsolation.UNCOMMITTED
    return ReadIsolation.COMMITTED


def with_isolation(properties: Mapping[str, str], metadata: Mapping[str, str]) -> dict[str, str]:
    """The properties of a subscription, with what the metadata of its consumer asks for."""
    given, besides = asked_isolation(properties), asked_isolation(metadata)
    if besides is None:
        return dict(properties)
    # Asked in both places, differently: neither is more likely to be meant.
    if given is not None and given is not besides:
        raise NotAllowed(
            f"the subscription is asked to be {given}, its consumer {besides}",
            hint=f"give {ISOLATION_PROPERTY} once",
        )
    return {**properties, ISOLATION_PROPERTY: besides.value}
