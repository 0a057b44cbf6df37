"""Settings that are changed while the broker runs: the defaults of policies, under Pulsar's names.

Owns: `BrokerConfiguration`, and the record of what was changed, which goes before the settings with
which the process was started.

Invariants:
1. Only defaults of policies can be changed. A value that its setting does not allow is refused,
   and changes nothing.
2. What was changed holds after a restart. What a later version no longer knows, or no longer
   allows, is passed over: a broker starts with what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from magnetar.broker.policy.defaults import PolicyDefaults, all_policy_defaults
from magnetar.broker.policy.records import BROKER_CONFIGURATION
from magnetar.errors import ConfigError, CorruptMetadata, InvalidArgument, NotAllowed
from magnetar.metadata.api import MetadataStore, Record
from magnetar.metadata.recipes import Content, cas_update

_ON_OFF: Final = {"true": True, "false": False}


class _Record(msgspec.Struct, frozen=True):
    changed: dict[str, str] = {}


class BrokerConfiguration:
    """The defaults in force: those of the start, with what was changed since."""

    def __init__(self, metadata: MetadataStore, started_with: PolicyDefaults) -> None:
        self._metadata = metadata
        self._started_with = started_with
        # What is read back after a change must be that change, not an older one that came later.
        self._turn = asyncio.Lock()
        self.changed: dict[str, str] = {}
        """By Pulsar's name, as text."""

    async def load(self) -> None:
        record = await self._metadata.get(BROKER_CONFIGURATION)
        if record is not None:
            self.changed = _changed(record)

    @property
    def defaults(self) -> PolicyDefaults:
        """What holds now."""
        found = self._started_with
        for name, text in self.changed.items():
            try:
                found = _with(found, name, text)
            except (InvalidArgument, NotAllowed):
                continue  # invariant 2
        return found

    async def change(self, name: str, text: str | None) -> None:
        """Set one, or with None have again what the process was started with."""
        if name not in NAMES:
            raise NotAllowed(f"{name} cannot be changed while the broker runs")
        if text is not None:
            _with(self.defaults, name, text)  # refused before anything is stored

        def changed(present: Record | None) -> Content:
            held = (
                _Record() if present is None else msgspec.json.decode(present.value, type=_Record)
            )
            kept = {each: value for each, value in held.changed.items() if each != name}
            if text is not None:
                kept[name] = text
            return Content(msgspec.json.encode(_Record(kept)))

        async with self._turn:
            record = await cas_update(self._metadata, BROKER_CONFIGURATION, changed)
            assert record is not None
            self.changed = _changed(record)


def _changed(record: Record) -> dict[str, str]:
    try:
        return msgspec.json.decode(record.value, type=_Record).changed
    except msgspec.MsgspecError as error:
        raise CorruptMetadata(f"{record.key}: {error}") from error


def _with(defaults: PolicyDefaults, name: str, text: str) -> PolicyDefaults:
    if name not in NAMES:
        raise NotAllowed(f"there is no {name}")
    field = NAMES[name]
    present = getattr(defaults, field)
    try:
        value = _readers()[type(present)](text)
    except (KeyError, ValueError):
        raise InvalidArgument(f"{name} cannot be {text!r}") from None
    try:
        return defaults.override({field: value})
    except ConfigError as error:
        raise InvalidArgument(str(error)) from error


def _readers() -> Mapping[type, Callable[[str], object]]:
    return {bool: lambda text: _ON_OFF[text.lower()], int: int, str: str}


def _pulsar_name(field: str) -> str:
    first, *others = field.split("_")
    return first + "".join(each.capitalize() for each in others)


# One of these alone would contradict the other.
_TOGETHER: Final = ("default_retention_time_in_minutes", "default_retention_size_in_mb")
NAMES: Final = {
    _pulsar_name(each.name): each.name
    for each in all_policy_defaults()
    if each.name not in _TOGETHER
}
"""The settings that can be changed: Pulsar's name, and ours."""
